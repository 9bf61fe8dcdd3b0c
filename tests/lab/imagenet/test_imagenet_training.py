"""Training on a small image folder: repeatable, resumable after a kill, the same with workers and with processes."""

import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from imagenet_recorder import Recorder
from safetensors.torch import load_file

from batchnorm.errors import BatchNormError
from batchnorm.lab.imagenet.evaluate import evaluate_paths, load
from batchnorm.lab.imagenet.examples import looks, open_folder, training_batches
from batchnorm.lab.imagenet.settings import ImageNetSettings
from batchnorm.lab.imagenet.train import run
from batchnorm.lab.imagenet.variants import VARIANTS

HERE = Path(__file__).parent
SOURCE = Path(sys.modules["batchnorm"].__file__).parent.parent


def process(place, options, processes=1, **recorder):
    """Train in processes of their own; return the exit code and the output."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--max-restarts", "0"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command += [str(HERE / "imagenet_process.py"), str(place), json.dumps(options), json.dumps(recorder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout + done.stderr


def finished(place, options, processes=1, **recorder):
    code, output = process(place, options, processes, **recorder)
    assert code == 0, output
    return outcome(place)


def outcome(place):
    """What a run left: metrics without times, the result, the tensors of its checkpoint."""
    place = Path(place)
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("seconds", None)
    return lines, json.loads((place / "result.json").read_text()), load_file(place / "checkpoint.safetensors")


def trained(place, options, **recorder):
    held = Recorder(place, **recorder)
    result = run(options, held)
    (Path(place) / "result.json").write_text(json.dumps(result))
    return outcome(place)


def validation_loss(place, options):
    """The loss of the saved network, over all validation images at once."""
    model, _, _ = load(Path(place) / "checkpoint.safetensors", options)
    views, labels = zip(*looks(open_folder(options["data"]), size=options["size"]), strict=True)
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model(torch.cat(views)[:, 0].double()), torch.cat(labels)).item()


def assert_same(first, second):
    assert first[0] == second[0]
    assert first[1] == second[1]
    assert first[2].keys() == second[2].keys()
    assert all(torch.equal(first[2][name], second[2][name]) for name in first[2])


def launches(base, wanted):
    with ThreadPoolExecutor(2) as pool:
        started = {
            name: pool.submit(process, base / name, options, count, **recorder)
            for name, (options, count, recorder) in wanted.items()
        }
        return {name: future.result() for name, future in started.items()}


@pytest.fixture(scope="module")
def small(folder):
    small = {"size": 32, "width": 1 / 16, "precision": "float64", "steps": 6, "batch": 8, "data": str(folder)}
    return {**small, "log_every": 1, "validate_every": 3}


@pytest.fixture(scope="module")
def several(tmp_path_factory, small):
    """What needs processes of its own, beside each other; with the exit codes and outputs."""
    base = tmp_path_factory.mktemp("processes")
    wanted = {"two": ({**small, "sync": True}, 2, {}), "killed": (small, 1, {"every": 2, "kill": 5})}
    return base, launches(base, wanted)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, small):
    """Two processes with statistics of their own: to the end, and killed."""
    base, options = tmp_path_factory.mktemp("pairs"), {**small, "variant": "bn-baseline"}
    wanted = {"whole": (options, 2, {}), "killed": (options, 2, {"every": 2, "kill": 4})}
    return base, launches(base, wanted), options


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_trains(variant, options, tmp_path):
    lines, result, _ = trained(tmp_path, {**options, "variant": variant, "steps": 4, "validate_every": 2})
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 4
    assert losses[0] == pytest.approx(math.log(3), abs=0.2)
    assert all(math.isfinite(loss) for loss in losses)
    assert [line["step"] for line in lines if "accuracy" in line] == [2, 4]
    assert result["diverged_at"] is None
    examples, of = 30, VARIANTS[variant]
    assert [line["rate"] for line in lines if "rate" in line] == pytest.approx(
        [of.rate * 0.96 ** (of.decay_speed * step * 8 / examples / 8) for step in range(4)]
    )


def test_it_learns(options, tmp_path):
    chosen = {
        **options,
        "variant": "bn-x30",
        "precision": "float32",
        "steps": 120,
        "validate_every": 40,
        "width": 1 / 8,
    }
    lines, result, _ = trained(tmp_path, {**chosen, "decay_epochs": 100.0})
    assert result["best_accuracy"] > 0.9
    assert result["steps_to_target"] in (40, 80, 120)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


def test_a_run_is_repeated_bit_for_bit_with_any_number_of_workers(options, tmp_path):
    torch.manual_seed(1)
    first = trained(tmp_path / "a", {**options, "variant": "inception"})
    torch.manual_seed(2)
    second = trained(tmp_path / "b", {**options, "variant": "inception", "workers": 2})
    assert_same(first, second)
    other = trained(tmp_path / "c", {**options, "variant": "inception", "seed": 1})
    assert first[0] != other[0]


def test_a_run_leaves_torchs_random_numbers_alone(options, tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    trained(tmp_path, {**options, "variant": "inception", "steps": 1})
    assert torch.equal(before, torch.get_rng_state())


def test_a_run_goes_on_exactly_after_it_was_killed(several, small, tmp_path):
    base, codes = several
    place = base / "killed"
    assert codes["killed"][0] == -9, codes["killed"][1]
    assert not (place / "result.json").exists()
    assert Recorder(place).restored().step == 4
    assert_same(trained(place, small, every=2), trained(tmp_path, small))


def test_two_processes_are_one_with_synchronised_statistics(several, small, tmp_path):
    base, codes = several
    assert codes["two"][0] == 0, codes["two"][1]
    one, two = trained(tmp_path, {**small, "sync": True}), outcome(base / "two")
    assert [line.get("accuracy") for line in one[0]] == [line.get("accuracy") for line in two[0]]
    for a, b in zip(one[0], two[0], strict=True):
        assert a.get("loss", 0) == pytest.approx(b.get("loss", 0), abs=1e-7)  # eight digits are recorded
    for name, tensor in one[2].items():
        rows = two[2][name].mean(0, keepdim=True) if name == "statistics" else two[2][name]
        # The order of the images in a batch alone changes statistics by 1e-8 here.
        torch.testing.assert_close(rows, tensor, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(*two[2]["statistics"], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_two_processes_go_on_exactly_after_a_kill(pairs):
    base, codes, options = pairs
    assert codes["killed"][0] != 0
    assert not (base / "killed/result.json").exists()
    assert codes["whole"][0] == 0, codes["whole"][1]
    assert_same(finished(base / "killed", options, 2, every=2), outcome(base / "whole"))


@pytest.mark.slow
def test_without_sync_each_process_has_statistics_of_its_own_and_the_network_their_mean(pairs):
    base, _, options = pairs
    lines, _, tensors = outcome(base / "whole")
    rows = tensors["statistics"]
    assert rows.shape[0] == 2
    assert (rows[0] - rows[1]).abs().max() > 1e-4
    names = [name for name, _ in ImageNetSettings.of(options).network(3).named_buffers() if "running" in name]
    torch.testing.assert_close(torch.cat([tensors[f"network.{name}"] for name in names]), rows.mean(0))
    # Validation had that mean, too, on every process.
    assert validation_loss(base / "whole", options) == pytest.approx(lines[-1]["validation_loss"], rel=1e-7)
    with pytest.raises(BatchNormError, match="the run began with 2 processes, each with statistics of its own"):
        run(options, Recorder(base / "whole"))


def test_what_a_run_cannot_go_on_with(options, tmp_path, folder, monkeypatch):
    trained(tmp_path / "a", {**options, "steps": 1})
    copied = tmp_path / "other"
    for path in folder.rglob("*.jpg"):
        place = copied / path.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(path.read_bytes())
    next(copied.rglob("*.jpg")).unlink()
    with pytest.raises(BatchNormError, match="not those that this run began with"):
        run({**options, "data": str(copied)}, Recorder(tmp_path / "a"))
    monkeypatch.delenv("BATCHNORM_DATA", raising=False)
    with pytest.raises(BatchNormError, match="no image folder was given"):
        run({**options, "data": ""}, Recorder(tmp_path / "b"))
    saved = Recorder(tmp_path / "a").restored()
    Recorder(tmp_path / "c").save(1, saved.tensors, **{**saved.facts, "processes": 2})
    with pytest.raises(BatchNormError, match="the run began with 2 processes, each with statistics of its own"):
        run(options, Recorder(tmp_path / "c"))


def test_a_run_ends_when_its_loss_is_not_finite(options, tmp_path):
    chosen = {**options, "variant": "inception", "rate": 1e6, "precision": "float32", "steps": 50}
    lines, result, _ = trained(tmp_path, chosen)
    assert 1 < result["diverged_at"] < 50
    assert lines[-1]["step"] == result["diverged_at"]
    again = run(chosen, Recorder(tmp_path))
    assert again["diverged_at"] == result["diverged_at"]


def test_what_was_saved_at_the_end_is_what_validation_saw(options, tmp_path):
    lines, result, _ = trained(tmp_path, options)
    (score,) = evaluate_paths([tmp_path / "checkpoint.safetensors"], open_folder(options["data"]), options=options)
    assert 1 - score.top1 == pytest.approx(result["accuracy"])
    assert validation_loss(tmp_path, options) == pytest.approx(lines[-1]["validation_loss"], rel=1e-7)


def test_a_resumed_run_sees_the_rest_of_the_images(options):
    index, settings = open_folder(options["data"]), ImageNetSettings.of(options)
    whole = list(training_batches(index, settings, first=1))
    rest = list(training_batches(index, settings, first=4))
    assert len(whole) == 6
    for (a, x), (b, y) in zip(whole[3:], rest, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(x, y)
    halves = [list(training_batches(index, settings, first=1, rank=rank, processes=2)) for rank in (0, 1)]
    for (images, _), (left, _), (right, _) in zip(whole, *halves, strict=True):
        assert torch.equal(images, torch.cat([left, right]))
