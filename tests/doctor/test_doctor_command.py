"""``batchnorm check``, ``explain`` and ``rules``, from what is typed to the exit code."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import batchnorm as bn
import batchnorm.commands
from batchnorm.doctor import command
from batchnorm.doctor.codes import RULES
from batchnorm.errors import BatchNormError

CODE = """
import torch
from torch import nn


def make():
    return stale(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)), 1)


def stale(model, name):
    layer = model.get_submodule(str(name))
    layer.running_mean.fill_(-9.0)
    layer.num_batches_tracked.fill_(100)
    return model


def clean():
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(4)
        stale(self, "bn")

    def forward(self, a, b):
        return self.bn(a) * b


def batches():
    return [(torch.randn(16, 3, 6, 6) * 5 + 3, None) for _ in range(4)]


def named():
    return [{"a": torch.randn(16, 4) + 9, "b": torch.randn(16, 4)} for _ in range(4)]


def loader():
    return torch.utils.data.DataLoader(torch.randn(17, 3, 6, 6), batch_size=4)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def no_optimizer(model):
    return "none"
"""
INPUT = ("--input", "4,3,6,6")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(folder):
    """The command as the shell runs it: what it prints, its exit code, and errors as ``main`` says them."""

    def run(*arguments):
        result = CliRunner().invoke(batchnorm.commands.app, [str(argument) for argument in arguments])
        if isinstance(result.exception, BatchNormError):
            return 2, "", f"batchnorm: {result.exception}"
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr

    return run


def test_advice_is_shown_and_passes(run):
    code, out, _ = run("check", "net.py:make", *INPUT, "--select", "BN101")
    assert code == 0
    assert "advice  BN101 bias-before-norm\n  0: its bias of 8 values does nothing" in out
    assert out.endswith("1 advice in a model with 1 batch normalisation layer\n")


@pytest.mark.parametrize(("fail_on", "expected"), [("advice", 1), ("warning", 0), ("error", 0), ("never", 0)], ids=str)
def test_fail_on(run, fail_on, expected):
    assert run("check", "net.py:make", *INPUT, "--select", "BN101", "--fail-on", fail_on)[0] == expected


def test_warnings_fail(run):
    code, out, _ = run("check", "net.py:make", "--data", "net.py:batches", "--select", "BN201")
    assert code == 1
    assert "BN201 stale-statistics" in out
    arguments = ("check", "net.py:make", "--data", "net.py:batches", "--select", "BN201", "--fail-on")
    assert run(*arguments, "never")[0] == 0


def test_clean(run):
    code, out, _ = run("check", "net.py:clean", *INPUT, "--select", "BN101")
    assert (code, out) == (0, "nothing found in a model with 1 batch normalisation layer\n")


def test_select_and_ignore(run):
    assert "BN101" not in run("check", "net.py:make", *INPUT, "--select", "BN2,BN3")[1]
    assert "BN101" not in run("check", "net.py:make", *INPUT, "--ignore", "bias-before-norm")[1]
    out = run("check", "net.py:make", *INPUT, "--select", "BN2", "--select", "BN101", "--format", "json")[1]
    content = json.loads(out)
    assert {f["code"] for f in content["findings"]} <= {"BN101"} | {c for c in RULES if c.startswith("BN2")}
    assert "BN101" in {f["code"] for f in content["findings"]}


def test_all(run, folder):
    many = "".join(f"nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU() if {n} % 2 else nn.Tanh()," for n in range(10))
    (folder / "many.py").write_text(f"from torch import nn\ndef make(): return nn.Sequential({many})\n")
    arguments = ("check", "many.py:make", *INPUT, "--select", "BN101")
    assert "and 2 more (--all shows them)" in run(*arguments)[1]
    assert "more (" not in run(*arguments, "--all")[1]


def test_checkpoint_into_the_model(run, folder):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    with torch.no_grad():
        model[0].bias.fill_(4.25)
    (folder / "two.py").write_text(
        "from torch import nn\nmodel = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))\n"
    )
    torch.save({"ema": model.state_dict(), "other": {"x": torch.ones(1)}}, folder / "best.pt")
    arguments = ("check", "two.py:model", *INPUT, "--select", "BN101", "--format", "json", "--checkpoint", "best.pt")
    out = run(*arguments, "--key", "ema")[1]
    assert json.loads(out)["findings"][0]["numbers"]["largest"] == 4.25
    code, _, err = run(*arguments)
    assert code == 2
    assert "it is not clear which is the model" in err


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_bare_checkpoint(run, folder, suffix):
    from batchnorm.checkpoints import save_state

    save_state(nn.Sequential(nn.BatchNorm2d(8)).state_dict(), folder / f"best.{suffix}")
    code, out, _ = run("check", f"best.{suffix}", "--select", "BN101,BN2")
    assert code in (0, 1)
    assert "in a checkpoint with 1 batch normalisation layer" in out
    assert "  needs a model (a checkpoint has only tensors): BN101, BN201" in out


@pytest.mark.parametrize(
    "option", [("--example", "1,2"), ("--data", "x.npy"), ("--fix", "--out", "y.pt"), ("--optimizer", "net.py:sgd"),
               ("--checkpoint", "x.pt"), ("--before", "x.pt"), ("--purpose", "export")], ids=lambda option: option[0],
)  # fmt: skip
def test_a_bare_checkpoint_lacks_the_model(run, folder, option):
    torch.save({}, folder / "best.pt")
    code, _, err = run("check", "best.pt", *option)
    assert code == 2
    assert f"{option[0]} needs the model, and best.pt is a checkpoint; give file.py:factory --checkpoint best.pt" in err


def test_inputs_of_several_names(run):
    arguments = ("check", "net.py:Two", "--data", "net.py:named", "--select", "BN201", "--fix", "--out", "f.pt")
    code, out, _ = run(*arguments, "--unsafe-fixes", "--input", "a=4,4; b=4,4")
    assert code == 0, out
    assert torch.load("f.pt", weights_only=True)["bn.running_mean"].mean() > 8
    assert run("check", "net.py:Two", "--input", "a=4,4; b=4,4")[0] in (0, 1)
    together = run("check", "net.py:Two", "--input", "4,4;4,4", "--format", "json")
    assert run("check", "net.py:Two", "--input", "4,4", "--input", "4,4", "--format", "json") == together
    code, _, error = run("check", "net.py:Two", "--input", "4,4")
    assert code == 2
    assert "the model raised TypeError on the example" in error


def test_a_loader_is_known_as_one(run, folder):
    subject = []
    from batchnorm.doctor import check as module

    class Spy(module.Subject):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            subject.append(self)

    original, module.Subject = module.Subject, Spy
    try:
        run("check", "net.py:make", "--data", "net.py:loader", "--max-batches", "2", "--select", "BN101")
    finally:
        module.Subject = original
    assert subject[0].loader.batch_size == 4
    assert len(subject[0].batches) == 2


def test_optimizer(run):
    assert run("check", "net.py:make", "--optimizer", "net.py:sgd", "--select", "BN101")[0] == 0
    code, _, err = run("check", "net.py:make", "--optimizer", "net.py:no_optimizer")
    assert code == 2
    assert "net.py:no_optimizer(model) gives a str; return the optimiser, or a list of several" in err
    code, _, err = run("check", "net.py:make", "--optimizer", "net.py:loader")
    assert code == 2
    assert "net.py:loader(model) raises TypeError" in err


def test_before(run, folder):
    torch.save(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).state_dict(), folder / "old.pt")
    for before in ("net.py:clean", "old.pt"):
        assert run("check", "net.py:make", "--before", before, "--select", "BN101")[0] == 0


def test_purpose(run):
    assert "BN501" in run("check", "net.py:make", "--purpose", "export", "--select", "BN501")[1]
    assert "BN501" not in run("check", "net.py:make", "--select", "BN501")[1]
    assert run("check", "net.py:make", "--purpose", "nothing")[::2] == (
        2, "batchnorm: check: the purpose is 'nothing'; use one of '', 'export'"
    )  # fmt: skip


# ---- fix


def test_fix(run, folder):
    code, out, err = run("check", "net.py:make", *INPUT, "--select", "BN101", "--fix", "--out", "deep/fixed.pt")
    assert code == 0
    assert "0       bias          8 values" in out
    assert "outputs differ by at most" in out
    assert out.endswith("nothing found in a model with 1 batch normalisation layer\n")
    assert "written to deep/fixed.pt; 1 key is gone (0.bias): the code that makes the model has to follow" in err
    state = torch.load(folder / "deep" / "fixed.pt", weights_only=True)
    assert "0.bias" not in state
    assert sorted(file.name for file in (folder / "deep").iterdir()) == ["fixed.pt"]


def test_only_unsafe_fixes_change_the_function(run, folder):
    arguments = ("check", "net.py:make", "--data", "net.py:batches", "--select", "BN201", "--fix", "--out", "f.pt")
    code, out, _ = run(*arguments)
    assert code == 1  # what is left counts
    assert "its repair is not safe" in out
    code, out, _ = run(*arguments, "--unsafe-fixes", "--force")
    assert code == 0, out
    assert torch.load("f.pt", weights_only=True)["1.running_mean"].abs().max() > 0.1


def test_fix_leaves_what_is_ignored_in_its_module(run, folder):
    (folder / "pyproject.toml").write_text('[tool.batchnorm.per-module-ignores]\n"1" = ["BN201"]\n')
    arguments = ("--select", "BN201", "--fix", "--unsafe-fixes", "--out", "f.pt")
    code, out, _ = run("check", "net.py:make", "--data", "net.py:batches", *arguments)
    assert code == 0
    assert "no module changed" in out
    assert "nothing found in a model with 1 batch normalisation layer; 1 ignored in its module" in out


def test_fix_in_other_formats(run):
    arguments = ("check", "net.py:make", *INPUT, "--select", "BN101", "--fix", "--out", "f.pt", "--force", "--format")
    assert json.loads(run(*arguments, "json")[1])["fixed"]["changes"][0]["what"] == "bias"
    _, out, err = run(*arguments, "github")
    assert out == ""
    assert "bias" in err
    assert json.loads(run(*arguments, "sarif")[1])["runs"][0]["results"] == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--fix",), "say where the repaired weights go: --out fixed.pt"),
        (("--out", "f.pt"), "--out without --fix has no meaning; add --fix"),
        (("--unsafe-fixes",), "--unsafe-fixes without --fix has no meaning"),
        (("--fix", "--out", "f.txt"), "the file is named 'f.txt'"),
        (("--fix", "--out", "."), "--out is ., a folder; name a file in it"),
        (("--fix", "--out", "net.py/f.pt"), "--out is net.py/f.pt, but net.py cannot be written to"),
        (("--batch-size", "0"), "--batch-size is 0"),
        (("--max-batches", "0"), "--max-batches is 0"),
        (("--format", "xml"), "--output-format is 'xml'; give one of text, json, sarif, github"),
        (("--fail-on", "warnings"), "--fail-on is 'warnings'; give one of error, warning, advice, never"),
        (("--select", "BN9"), "--select: there is no rule 'BN9'"),
        (("--ignore", "BN101,nothing"), "--ignore: there is no rule 'nothing'"),
        (("--data", "net.py:none"), "net.py has no 'none'"),
        (("--input", "4,three"), "is not sizes"),
        (("--input", "4,4,6,6"), "the model raised RuntimeError on the example"),
        (("--before", "none.pt"), "there is no file none.pt"),
        (("--checkpoint", "none.pt"), "there is no file none.pt"),
    ],
    ids=str,
)
def test_what_cannot_run_ends_in_one_sentence(run, folder, options, sentence):
    code, out, err = run("check", "net.py:make", *options)
    assert code == 2
    assert out == ""
    assert sentence in err
    assert len(err.strip().splitlines()) == 1
    assert not (folder / "f.pt").exists()


def test_no_batches(run, folder):
    (folder / "none.py").write_text("def none(): return []\n")
    assert run("check", "net.py:make", "--data", "none.py:none")[::2] == (2, "batchnorm: none.py:none gives no batches")


@pytest.mark.parametrize("name", ["data.npz", "data.pt"])
def test_doubles_become_what_the_model_has_and_that_is_said(run, folder, name):
    x = torch.randn(32, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 5 + 3
    if name.endswith("npz"):
        np.savez(name, x=x.numpy())
    else:
        torch.save(x, name)
    code, out, err = run("check", "net.py:make", "--data", name, "--select", "BN201")
    assert code == 1
    assert "BN201 stale-statistics" in out
    assert err == f"batchnorm: {name} holds float64, and is given to the model as float32\n"
    torch.save(x.float(), "single.pt")
    assert run("check", "net.py:make", "--data", "single.pt", "--select", "BN201")[2] == ""


# ---- formats


def test_machine_formats_are_all_there_is_on_stdout(run, folder):
    (folder / "loud.py").write_text(
        CODE.replace("def make():", "print('loading')\n\n\ndef make():\n    print('making')")
    )
    for name in ("json", "sarif"):
        _, out, err = run("check", "loud.py:make", *INPUT, "--format", name)
        json.loads(out)
        assert "loading" in err
    _, out, _ = run("check", "loud.py:make", *INPUT, "--format", "github", "--select", "BN101")
    line = next(n for n, text in enumerate((folder / "loud.py").read_text().splitlines(), 1) if "def make" in text)
    assert out.startswith(f"::notice file=loud.py,line={line},title=BN101 bias-before-norm::0: its bias")


def test_where_the_model_is_written(folder):
    line = next(n for n, text in enumerate(CODE.splitlines(), 1) if "class Two" in text)
    assert command.where_written("net.py:Two") == ("net.py", line)
    assert command.where_written("net.py:nothing") == ("net.py", None)
    assert command.where_written("no.py:nothing") == ("", None)
    assert command.where_written("best.ckpt") == ("best.ckpt", None)
    file, line = command.where_written("batchnorm.layers.batch:BatchNorm2d")
    assert Path(file).name == "batch.py"
    assert "class BatchNorm2d" in Path(file).read_text().splitlines()[line - 1]


def test_weights_are_the_same_every_time(run):
    arguments = ("check", "net.py:make", *INPUT, "--select", "BN101", "--format", "json")
    assert run(*arguments)[1] == run(*arguments)[1]


def test_settings_of_the_project(run, folder):
    (folder / "pyproject.toml").write_text(
        '[tool.batchnorm]\nselect = ["BN101"]\nfail-on = "advice"\nformat = "json"\n'
    )
    code, out, _ = run("check", "net.py:make", *INPUT)
    assert code == 1
    assert json.loads(out)["findings"][0]["code"] == "BN101"
    assert run("check", "net.py:make", *INPUT, "--fail-on", "error", "--format", "text")[0] == 0
    (folder / "pyproject.toml").write_text('[tool.batchnorm]\nignore = ["BN101"]\n')
    assert "BN101" not in run("check", "net.py:make", *INPUT)[1]
    assert "BN101" in run("check", "net.py:make", *INPUT, "--ignore", "BN2")[1]


def test_a_note_about_the_settings_goes_to_stderr(run, folder, monkeypatch):
    monkeypatch.setattr("batchnorm.doctor.config._parser", lambda: None)
    (folder / "pyproject.toml").write_text('[tool.batchnorm]\nignore = ["BN101"]\n')
    _, out, err = run("check", "net.py:make", *INPUT)
    assert "BN101" in out
    assert "which is read from Python 3.11 on" in err


# ---- explain and rules


def test_explain(run):
    code, out, _ = run("explain", "BN101")
    assert code == 0
    assert out.startswith("# BN101 bias-before-norm\n")
    assert "## Why is this bad?" in out
    assert run("explain", "Bias_Before_Norm")[1] == out
    assert run("explain", "bn101")[1] == out


@pytest.mark.parametrize(
    ("word", "meant"),
    [("BN1O1", "did you mean"), ("stale-statistic", "did you mean BN201 stale-statistics"),
     ("statistics", "stale-statistics"), ("zzzzzz", "`batchnorm rules` lists them"), ("", "lists them"),
     ("x" * 5000, "xxx...'"), ("BN20", "BN201 stale-statistics")],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_explain_something_else(run, word, meant):
    code, _, err = run("explain", word)
    assert code == 2
    assert meant in err
    assert len(err) < 300


def test_pages_are_drawn_on_a_terminal():
    import io

    from rich.console import Console

    from batchnorm.doctor.explain import show_page
    from batchnorm.doctor.pages import page_of

    stream = io.StringIO()
    show_page(page_of(RULES["BN101"]), Console(file=stream, force_terminal=True, width=80))
    assert "##" not in stream.getvalue()
    assert "Why is this bad?" in stream.getvalue()


def test_rules(run):
    code, out, _ = run("rules")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["code", *RULES]
    assert "BN101  bias-before-norm" in out
    rows = json.loads(run("rules", "--format", "json")[1])
    assert [row["code"] for row in rows] == list(RULES)
    assert rows[0] == {"code": "BN101", "name": "bias-before-norm", "severity": "advice", "needs": "model, example",
                       "fix": "safe", "title": RULES["BN101"].title}  # fmt: skip
    assert run("rules", "--format", "sarif")[0] == 2


def test_the_command_from_a_shell(folder):
    program = "import sys; from batchnorm.cli import main; sys.argv = ['batchnorm', *sys.argv[1:]]; main()"
    command = [sys.executable, "-c", program, "check", "net.py:make", "--fix"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("batchnorm: --fix does not change your files; say where")
    assert len(done.stderr.splitlines()) == 1


def test_help_does_not_import_torch():
    program = "import sys, batchnorm.commands; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_fix_says_what_it_lacks_and_repairs_the_rest():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    model[1].running_mean.fill_(-9.0)
    model[1].num_batches_tracked.fill_(100)
    data = [torch.randn(16, 3, 6, 6) * 4 + 7 for _ in range(3)]
    found = list(bn.check(model, data=data, select=["BN101", "BN201"]))
    assert [finding.code for finding in found] == ["BN201", "BN101"]
    repaired, report = bn.fix(model, found, unsafe=True, example=data[0])
    assert repaired[0].bias is None
    assert "repairing BN201 needs data: give data=" in report.left["1"]
    _, report = bn.fix(model, [*found, found[0]], example=data[0])
    assert report.left["1"].count("its repair is not safe") == 2
