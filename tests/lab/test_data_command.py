"""``batchnorm lab data``: what is there, what is missing and where to get it, and the check of one set."""

import os
import subprocess
import sys
import time

import pytest
import typer
from data_files import cifar, pictures
from test_idx import written
from typer.testing import CliRunner

from batchnorm.errors import BatchNormError
from batchnorm.lab.data import cifar10, progress
from batchnorm.lab.data.command import data
from batchnorm.lab.data.sets import SETS

app = typer.Typer()
app.command()(data)


def run(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.exception
    return done.output.splitlines()


def test_without_a_folder_every_set_says_where_to_get_it_and_where_to_put_it():
    lines = run()
    rows = {line.split()[0]: line for line in lines[2 : 2 + len(SETS)]}
    assert list(rows) == [spec.name for spec in SETS]
    assert rows["digits"].endswith("in this package")
    assert all("missing" in rows[spec.name] for spec in SETS[1:])
    sentences = {line.split(":")[0]: line for line in lines[2 + len(SETS) : -1]}
    assert list(sentences) == [spec.name for spec in SETS[1:]]
    assert "kriz/cifar.html, put data_batch_1.bin to" in sentences["cifar10"]
    assert lines[-1] == "DIR is a folder of your choice: give --data DIR, or set BATCHNORM_DATA=DIR."


def test_what_is_found_and_what_is_not_whole(tmp_path, monkeypatch):
    written(tmp_path / "mnist")
    pictures(tmp_path / "imagefolder")
    cifar(tmp_path / "cifar10", records=1)
    (tmp_path / "cifar10" / "data_batch_3.bin").unlink()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATCHNORM_DATA", ".")
    text = "\n".join(run())
    assert "known      mnist" in text
    assert "not known  not whole: cifar10" in text
    assert "not known  imagefolder" in text
    assert "cifar10: cifar10 has no data_batch_3.bin; put it there." in text
    assert "fashion-mnist: get Fashion-MNIST from https://github.com/zalandoresearch/fashion-mnist, put" in text
    assert "\nmnist:" not in text


def test_a_check_decodes_and_verifies(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(cifar10, "RECORDS", 20)
    cifar(tmp_path / "cifar10")
    lines = run("--data", tmp_path, "--check", "cifar10")
    assert lines[0] == "CIFAR-10: 100 training and 20 test images of 3 x 32 x 32, 10 classes"
    assert len(lines[1].split()[-1]) == 64
    assert lines[2] == "The checksum of this set is not known; the files are whole and belong together."
    assert list(cache.rglob("*.npy"))
    file = tmp_path / "cifar10" / "test_batch.bin"
    file.write_bytes(file.read_bytes()[:-1])
    error = CliRunner().invoke(app, ["--data", str(tmp_path), "--check", "cifar10"]).exception
    assert str(error).startswith(f"{file}: it is truncated")
    assert run("--check", "digits")[-1] == "These are the published images."


def test_folders_of_images_are_checked_at_a_size(tmp_path):
    pictures(tmp_path)
    first = run("--data", tmp_path, "--check", "imagefolder", "--size", "16")[0]
    assert first == f"images in {tmp_path.name}: 8 training and 4 test images of 3 x 16 x 16, 2 classes"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--check", "minst"], "there is no data set 'minst'; choose from digits, mnist, fashion-mnist, cifar10, ima"),
        (["--size", "8"], "--size was given without --check"),
        (["--check", "cifar10", "--size", "8"], "a size was given for cifar10; leave it out"),
        (["--data", "no-such"], "no-such is not a folder; name the one that has your data sets"),
    ],
)
def test_bad_input_gets_one_sentence(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, BatchNormError)
    assert str(error).startswith(words)


def test_the_command_is_known_without_torch():
    code = "import sys, batchnorm.lab.data.command; print([m for m in ('torch', 'numpy', 'PIL') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "[]"


def test_a_bar_is_shown_only_where_it_takes_long(monkeypatch):
    bars, started = [], progress.started

    def recorded(*arguments):
        bars.append(started(*arguments))
        return bars[-1]

    monkeypatch.setattr(progress, "started", recorded)
    assert list(progress.slow("abc", "quick")) == ["a", "b", "c"]
    assert not bars
    monkeypatch.setattr(progress, "PATIENCE", 0.01)
    for item in progress.slow("abcd", "[red]slow"):
        time.sleep(0.02)
        assert not bars or bars[0].tasks[0].completed == "abcd".index(item)
    assert len(bars) == 1
    assert (bars[0].tasks[0].total, bars[0].live.is_started) == (4, False)
