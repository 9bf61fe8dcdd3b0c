"""``batchnorm calibrate`` and ``batchnorm fold``, as a user runs them; what they write is what the verbs give."""

import json
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import batchnorm as bn
from batchnorm.commands import app
from batchnorm.loading import load_model, load_state, parse_input
from batchnorm.records import RecordFile

NET = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self, bias=False, norm=nn.BatchNorm2d):
            super().__init__()
            self.conv = nn.Conv2d(2, 4, 3, bias=bias)
            self.bn = norm(4)
            self.drop = nn.Dropout(0.5)
            self.head = nn.Linear(4, 3)
            self.last = nn.BatchNorm1d(3)

        def forward(self, x):
            x = torch.relu(self.bn(self.conv(x)))
            return self.last(self.head(self.drop(x.mean((2, 3)))))

    def make():
        return Net()

    def folded():
        return Net(True, lambda channels: nn.Identity())

    def double():
        return Net().double()

    def plain():
        return nn.Linear(3, 3)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix, self.bn = nn.Embedding(50, 4), nn.Linear(4, 5), nn.BatchNorm1d(5)
            self.out = nn.Linear(5, 2)

        def forward(self, ids, scale):
            return self.out(self.bn(self.mix(self.embed(ids).mean(1) * scale)).relu())

    def marked():
        model = nn.Module()
        model.forward = None
        inner = nn.Sequential()
        inner.add_module("[red]", nn.Linear(3, 3))
        inner.add_module("[bold]x[/bold]", nn.BatchNorm1d(3))
        inner.add_module("a", nn.Tanh())
        inner.add_module("[link]", nn.BatchNorm1d(3))
        return inner

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.bn = nn.Linear(3, 3), nn.BatchNorm1d(3)

        def forward(self, x):
            y = self.bn(self.linear(x))
            return y if float(y.sum()) > 0 else -y
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a model, its checkpoint and data in it, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "net.py").write_text(textwrap.dedent(NET))
    torch.manual_seed(0)
    model = load_model("net.py:make")
    with torch.no_grad():
        for m in (model.bn, model.last):
            m.weight.uniform_(0.5, 2)
            m.bias.uniform_(-1, 1)
            m.running_mean.uniform_(-1, 1)
            m.running_var.uniform_(0.5, 2)
    torch.save({"epoch": 3, "state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}}, "last.pt")
    x = np.random.default_rng(0).normal(2, 3, size=(101, 2, 6, 6))  # float64, as NumPy makes them
    np.savez("train.npz", x=x, y=np.arange(101))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(("net", "loader"))]:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in sys.modules[name].__file__:
            del sys.modules[name]


def run(*arguments):
    outcome = CliRunner().invoke(app, [str(a) for a in arguments])
    if outcome.exception is not None and not isinstance(outcome.exception, SystemExit):
        raise outcome.exception
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def mode_of(path):
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.mark.parametrize(
    ("options", "keywords"),
    [
        ([], {}),
        (["--formula", "paper"], {"formula": "paper"}),
        (["--max-batches", "2"], {"max_batches": 2}),
        (["--until", "0.3"], {"until": 0.3}),
    ],
)
def test_calibrate_writes_what_the_verb_gives(folder, options, keywords):
    calibrate = ["calibrate", "net.py:make", "--checkpoint", "last.pt", "--data", "train.npz", "--batch-size", "16"]
    output = run(*calibrate, "--out", "new/calibrated.pt", "--json", "report.json", *options)
    model = load_model("net.py:make", "last.pt")
    x = torch.from_numpy(np.load("train.npz")["x"]).float()
    expected, calibrated = bn.calibrate(model, x.split(16), progress=False, **keywords)
    written = load_state("new/calibrated.pt")
    assert list(written) == list(expected.state_dict())
    for name, tensor in expected.state_dict().items():
        assert torch.equal(written[name], tensor), name
    assert f"2 layers calibrated on {calibrated.samples} samples in {calibrated.batches} batches" in output
    assert "written to new/calibrated.pt" in output
    assert os.listdir("new") == ["calibrated.pt"]
    record = RecordFile.from_json((folder / "report.json").read_text())
    assert record.command == "calibrate"
    assert record.summary["samples"] == calibrated.samples
    assert record.summary["enough"] == calibrated.enough
    assert record.summary["report"]["changes"][0]["path"] == "bn"
    by = {(m.quantity, m.setting["layer"]): m.samples for m in record.measurements}
    new, old = expected.bn, model.bn
    moved = (new.running_mean - old.running_mean).abs() / (new.running_var + new.eps).sqrt()
    assert by["move of the mean", "bn"] == pytest.approx(moved.tolist(), rel=1e-5)
    grown = (new.running_var + new.eps) / (old.running_var + new.eps)
    assert by["growth of the variance", "bn"] == pytest.approx(grown.tolist(), rel=1e-5)
    row = next(line for line in output.splitlines() if line.startswith("bn "))
    assert f"{float(moved.max()):.3g}" in row
    assert f"{float(grown.min()):.3g} to {float(grown.max()):.3g}" in row


def test_calibrate_says_what_is_left_and_that_more_data_would_help(folder):
    (folder / "loader.py").write_text(
        "import torch\ndef batches():\n    g = torch.Generator().manual_seed(0)\n"
        "    return [(torch.randn(8, 2, 6, 6, generator=g), 0) for _ in range(5)]\n"
        "def make():\n    import batchnorm as bn, net\n    model = net.make()\n"
        "    model.last = bn.FrozenBatchNorm(3)\n    return model\n"
    )
    output = run(
        "calibrate", "loader.py:make", "--data", "loader.py:batches", "--until", "1e-9", "--out", "c.safetensors"
    )
    assert "1 layer calibrated on 40 samples in 5 batches" in output
    assert "1 left alone" in output
    assert "it is frozen" in output
    assert "above --until 1e-09: more data would help" in output
    assert load_state("c.safetensors")["last.running_var"].tolist() == [1.0, 1.0, 1.0]
    assert mode_of("c.safetensors") == mode_of("net.py")


def test_a_model_in_float64_and_inputs_by_name(folder):
    run("calibrate", "net.py:double", "--data", "train.npz", "--out", "double.pt")
    assert load_state("double.pt")["bn.running_mean"].dtype == torch.float64
    run("fold", "net.py:double", "--input", "2,2,6,6", "--out", "folded.pt")
    assert load_state("folded.pt")["conv.bias"].dtype == torch.float64
    np.savez("two.npz", ids=np.arange(40).reshape(20, 2), scale=np.ones((20, 1)), labels=np.zeros(20))
    run("calibrate", "net.py:Two", "--data", "two.npz", "--out", "two.pt")
    text = "ids=3,4:int64<50; scale=3,1"
    run("fold", "net.py:Two", "--checkpoint", "two.pt", "--input", text, "--out", "two-folded.pt")
    folded, _ = bn.fold(load_model("net.py:Two", "two.pt"), parse_input(text))
    for name, tensor in folded.state_dict().items():
        assert torch.equal(load_state("two-folded.pt")[name], tensor)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_fold_writes_the_state_of_the_folded_network(folder, suffix):
    out = f"folded{suffix}"
    output = run(
        "fold", "net.py:make", "--checkpoint", "last.pt", "--input", "2,2,6,6", "--out", out, "--json", "f.json"
    )
    model = load_model("net.py:make", "last.pt").eval()
    folded, report = bn.fold(model, parse_input("2,2,6,6"))
    written = load_state(out)
    assert set(written) == set(folded.state_dict())
    assert not any(key.startswith(("bn.", "last.")) for key in written)
    for name, tensor in folded.state_dict().items():
        assert torch.equal(written[name], tensor)
    again = load_model("net.py:folded")
    again.last = nn.Identity()
    again.load_state_dict(written)
    x = torch.randn(5, 2, 6, 6)
    torch.testing.assert_close(again.eval()(x), model(x), rtol=1e-4, atol=1e-5)
    assert "2 modules changed" in output
    assert "outputs differ by at most" in output
    assert f"written to {out}" in output
    record = RecordFile.from_json((folder / "f.json").read_text())
    assert record.command == "fold"
    assert record.summary == json.loads(report.to_json())
    assert record.measurements[0].samples == (report.certificate.absolute,)
    assert mode_of(out) == mode_of("net.py")


def test_fold_writes_programs(folder):
    model = load_model("net.py:make", "last.pt").eval()
    x = torch.randn(2, 2, 6, 6)
    fold = ["fold", "net.py:make", "--checkpoint", "last.pt", "--input", "2,2,6,6"]
    run(*fold, "--out", "model.pt2")
    program = torch.export.load("model.pt2").module()
    torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-5)
    assert not any("batch_norm" in str(node.target) for node in program.graph.nodes)


def test_a_program_that_gives_something_else_leaves_the_old_file(folder, monkeypatch):
    from batchnorm.transforms import export

    monkeypatch.setattr(export, "difference", lambda old, new: (1.0, 1.0))
    (folder / "model.pt2").write_text("old")
    before = sorted(os.listdir())
    with pytest.raises(bn.NotEquivalent, match=r"model\.pt2 gives something else than the model"):
        run("fold", "net.py:make", "--input", "2,2,6,6", "--out", "model.pt2", "--force")
    assert (folder / "model.pt2").read_text() == "old"
    assert sorted(os.listdir()) == before


def test_fold_writes_onnx(folder):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model = load_model("net.py:make", "last.pt").eval()
    x = torch.randn(2, 2, 6, 6)
    before = set(os.listdir())
    output = run("fold", "net.py:make", "--checkpoint", "last.pt", "--input", "2,2,6,6", "--out", "model.onnx")
    new = set(os.listdir()) - before
    assert all(name in output for name in new)
    assert new <= {"model.onnx", "model.onnx.data"}
    assert not any(node.op_type == "BatchNormalization" for node in onnx.load("model.onnx").graph.node)
    session = runtime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(y, model(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_fold_leaves_what_is_to_be_left(folder):
    output = run("fold", "net.py:make", "--input", "2,2,6,6", "--out", "f.pt", "--leave", "last, ")
    assert "it was to be left" in output
    assert "last.running_mean" in load_state("f.pt")
    assert "bn.running_mean" not in load_state("f.pt")


def test_names_that_look_like_markup_are_shown_as_they_are(folder):
    output = run("fold", "net.py:marked", "--input", "2,3", "--out", "f.pt")
    assert "[bold]x[/bold]" in output
    assert "into [red] (before it)" in output
    assert "[link]" in output
    np.save("x.npy", np.random.default_rng(0).normal(size=(20, 3)))
    output = run("calibrate", "net.py:marked", "--data", "x.npy", "--out", "c.pt")
    assert "[bold]x[/bold] " in output


def test_fold_compares_on_data_of_the_user(folder):
    np.savez("named.npz", ids=np.arange(24).reshape(6, 4), scale=np.ones((6, 1), np.float32))
    run("fold", "net.py:Two", "--data", "named.npz", "--out", "two-folded.pt")
    run("fold", "net.py:Two", "--input", "ids=6,4:int64<50;scale=6,1", "--out", "two-sizes.pt")
    assert list(load_state("two-folded.pt")) == list(load_state("two-sizes.pt"))


CALIBRATE = ["calibrate", "net.py:make", "--data", "train.npz", "--out", "o.pt"]
FOLD = ["fold", "net.py:make", "--input", "2,2,6,6", "--out", "o.pt"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["calibrate", "net.py", *CALIBRATE[2:]], "'net.py' does not say what to take from where; write file.py:fac"),
        (["calibrate", "net.py:gone", *CALIBRATE[2:]], "net.py has no 'gone'; it has Net, make"),
        (["calibrate", "net.py:plain", *CALIBRATE[2:]], "calibrate: there is no BN layer to calibrate; give a model"),
        ([*CALIBRATE, "--checkpoint", "gone.pt"], "there is no file gone.pt; give the path of a checkpoint"),
        ([*CALIBRATE, "--checkpoint", "last.pt", "--key", "ema"], "last.pt has no 'ema'; it holds 'epoch', 'state_d"),
        ([*CALIBRATE, "--checkpoint", "two.pt"], "two.pt does not fit the model: 9 of 13 are missing (conv.weight, "),
        ([*CALIBRATE[:2], "--data", "gone.npz", "--out", "o.pt"], "there is no file gone.npz"),
        (
            [*CALIBRATE[:2], "--data", "data.csv", "--out", "o.pt"],
            "'data.csv' is not a data file; give a file of",
        ),
        ([*CALIBRATE[:2], "--data", "flat.npy", "--out", "o.pt"], "the model, given [5, 3] float32, raises RuntimeErr"),
        ([*CALIBRATE[:2], "--data", "bytes.npy", "--out", "o.pt"], "the model, given [5, 2, 6, 6] uint8, raises Runti"),
        ([*CALIBRATE, "--out", "o.txt"], "the file is named 'o.txt'; end its name in .pt, .pth, .ckpt, .bin or .safe"),
        ([*CALIBRATE, "--out", "."], "--out is ., a folder; name a file in it"),
        ([*CALIBRATE, "--out", "/dev/null/o.pt"], "--out is /dev/null/o.pt, but /dev/null cannot be written to"),
        ([*CALIBRATE, "--json", "."], "--json is ., a folder; name a file in it"),
        ([*CALIBRATE, "--batch-size", "0"], "the batch size is 0; give a whole number from 1 up"),
        ([*CALIBRATE, "--until", "-1"], "calibrate: until is -1.0; use a small positive number"),
        ([*CALIBRATE, "--formula", "mean"], "calibrate: formula is 'mean'; use one of 'merged', 'paper'"),
        ([*CALIBRATE, "--max-batches", "0"], "calibrate: max_batches is 0; use 1 or more"),
        ([*FOLD, "--input", "2,2,six"], "the input '2,2,six' is not sizes such as 8,3,224,224"),
        ([*FOLD[:2], "--input", "2,5", *FOLD[4:]], "the model, given [2, 5] float32, raises RuntimeError: "),
        ([*FOLD, "--out", "o.h5"], "the file is named 'o.h5'; end its name in .pt, .pth, .ckpt, .bin, .safetensors, "),
        ([*FOLD, "--leave", "bn1"], "fold: there is no BN layer 'bn1' to leave; use one of bn, last"),
        ([*FOLD, "--out", "o.onnx", "--leave", "bn"], "--leave and --tolerance do not go with .onnx; leave them out"),
        ([*FOLD, "--tolerance", "1e-30"], "fold: the outputs would differ by "),
        (["fold", "net.py:plain", "--input", "2,3", "--out", "o.pt"], "fold: the model has no BN layer to fold"),
        (["fold", "net.py:make", "--out", "o.pt"], "fold needs --example or --data, one of them"),
        ([*FOLD, "--data", "x.npy"], "fold needs --example or --data, one of them"),
        (["fold", "net.py:make", "--data", "none.npy", "--out", "o.pt"], "there is no file none.npy"),
        (
            ["fold", "net.py:Branches", "--input", "2,3", "--out", "o.pt2"],
            "export: torch.export, given this model, raises ",
        ),
    ],
)
def test_a_bad_input_is_one_sentence_and_writes_nothing(folder, arguments, sentence):
    torch.save({"bn.weight": torch.ones(4), "bn.bias": torch.ones(4)}, "two.pt")
    np.save("flat.npy", np.zeros((5, 3)))
    np.save("bytes.npy", np.zeros((5, 2, 6, 6), dtype=np.uint8))
    (folder / "o.pt").write_text("old")
    before = sorted(os.listdir())
    with pytest.raises(bn.BatchNormError) as error:
        run(*arguments, "--force")
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600
    assert sorted(set(os.listdir()) - {"__pycache__"}) == [name for name in before if name != "__pycache__"]
    assert (folder / "o.pt").read_text() == "old"


@pytest.mark.filterwarnings("ignore:.*NaN or infinite")
def test_data_without_a_finite_batch_calibrates_nothing_and_says_so(folder):
    np.save("nan.npy", np.full((8, 2, 6, 6), np.nan, dtype=np.float32))
    with pytest.raises(bn.BatchNormError, match="no layer was calibrated, and nothing is written"):
        run(*CALIBRATE[:2], "--data", "nan.npy", "--out", "o.pt")
    assert not (folder / "o.pt").exists()


def test_rejected_batches_are_told(folder):
    data = np.random.default_rng(0).normal(size=(12, 2, 6, 6)).astype(np.float32)
    data[5] = np.nan
    np.save("some.npy", data)
    with pytest.warns(bn.BatchNormWarning, match="NaN or infinite"):
        output = run(*CALIBRATE[:2], "--data", "some.npy", "--batch-size", 4, "--out", "o.pt", "--json", "o.json")
    assert "2 layers calibrated on 8 samples in 2 batches, 1 more rejected (NaN or infinite)" in " ".join(
        output.split()
    )
    summary = RecordFile.from_json((folder / "o.json").read_text()).summary
    assert (summary["samples"], summary["batches"], summary["rejected"]) == (8, 2, 1)


def test_an_input_for_each_argument(folder):
    inputs = ("--input", "2,7:int64<50", "--input", "2,4")
    assert "written to two.pt" in run("fold", "net.py:Two", *inputs, "--out", "two.pt", "--json", "two.json")
    assert RecordFile.from_json((folder / "two.json").read_text()).configuration["input"] == "2,7:int64<50;2,4"
    with pytest.raises(bn.BatchNormError, match="the model, given"):
        run("fold", "net.py:Two", *inputs[:2], "--out", "one.pt")


def test_the_program_ends_with_2_and_one_sentence_and_runs_nothing_in_a_pickle(folder):
    class Evil:
        def __reduce__(self):
            return (os.system, ("touch ran",))

    torch.save({"state_dict": Evil()}, "evil.pt")
    program = [sys.executable, "-c", "from batchnorm.cli import main; main()"]
    done = subprocess.run(
        [*program, "fold", "net.py:make", "--checkpoint", "evil.pt", "--input", "2,2,6,6", "--out", "o.pt"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(bn.__file__).parents[1])},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("batchnorm: evil.pt was refused, and nothing in it was run: it holds more than")
    assert done.stderr.count("\n") == 1
    assert not os.path.exists("ran")
    assert not os.path.exists("o.pt")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "calibrate",
            ["batchnorm calibrate net.py:make --checkpoint last.pt --data", "package.module:factory", "--js"],
        ),
        ("fold", ["batchnorm fold net.py:make --checkpoint best.pt --example", ".pt2 for a program", "int64<1000"]),
    ],
)
def test_help_teaches_without_torch(command, words):
    code = (
        "import sys\nfrom batchnorm.commands import app\ntry:\n    app()\n"
        "except SystemExit:\n    sys.stderr.write(str('torch' in sys.modules))"
    )
    environment = {**os.environ, "COLUMNS": "200", "TERMINAL_WIDTH": "200", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, command, "--help"], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stderr == "False"
    for word in words:
        assert word in done.stdout
