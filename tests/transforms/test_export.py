"""What is written to a file gives what the model gives: torch.export and ONNX, after a fold."""

import importlib.util
import warnings

import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.transforms import export as module_of_export
from zoo import ZOO, perturb

pytestmark = pytest.mark.filterwarnings("ignore")  # the exporters' own
needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="onnx, onnxscript and onnxruntime are not installed",
)
STATIC = [name for name in ZOO if name != "functional"]  # a branch on values cannot be exported by anyone


def made(name):
    torch.manual_seed(0)
    return perturb(ZOO[name].make()).eval(), torch.randn(ZOO[name].shape)


def leaves(result):
    return list(result.values()) if isinstance(result, dict) else [result]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in STATIC if name != "perceptron"]


@pytest.mark.parametrize("name", ["perceptron", *SLOW])
def test_torch_export(name, tmp_path):
    model, x = made(name)
    folded, report = bn.export(model, x, tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2")
    assert len(report.changes) == ZOO[name].folds
    assert sum("batch_norm" in str(node.target) for node in program.graph.nodes) == len(report.left)
    for a, b in zip(leaves(model(x)), leaves(program.module()(x)), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    assert folded is not model


def run_onnx(path, x):
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return [torch.from_numpy(y) for y in session.run(None, {session.get_inputs()[0].name: x.numpy()})]


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize("name", STATIC)
def test_onnx_of_the_zoo(name, tmp_path):
    import onnx

    model, x = made(name)
    _, report = bn.export(model, x, tmp_path / "model.onnx")
    kinds = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    assert kinds.count("BatchNormalization") <= len(report.left)
    for a, b in zip(leaves(model(x)), run_onnx(tmp_path / "model.onnx", x), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


@needs_onnx
def test_any_batch_size_and_our_fused_layers(tmp_path):
    torch.manual_seed(0)
    model = perturb(nn.Sequential(nn.Conv2d(3, 4, 3), bn.BatchNorm2d(4, activation="relu"), nn.Flatten())).eval()
    shapes = ({0: torch.export.Dim("batch")},)
    bn.export(model, torch.randn(2, 3, 6, 6), tmp_path / "model.onnx", dynamic_shapes=shapes)
    x = torch.randn(5, 3, 6, 6)
    torch.testing.assert_close(run_onnx(tmp_path / "model.onnx", x)[0], model(x), rtol=1e-4, atol=1e-5)


def test_named_arguments(tmp_path):
    model, x = made("perceptron")
    bn.export(model, {"input": x}, tmp_path / "model.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "model.pt2").module()(input=x), model(x))


@pytest.mark.parametrize("part", [slice(0, 11), slice(1, 2)])
def test_training_mode_is_refused(part, tmp_path):
    model, x = made("vgg")
    for module in model[part]:
        module.train()
    with pytest.raises(
        bn.BatchNormError, match=r"^export: the model is in training mode, .*; call model.eval\(\) first$"
    ):
        bn.export(model, x, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_other_refusals(tmp_path, monkeypatch):
    model, x = made("vgg")
    with pytest.raises(bn.BatchNormError, match=r"the file is named 'model.txt'; end its name in .onnx or .pt2"):
        bn.export(model, x, tmp_path / "model.txt")
    monkeypatch.setattr(module_of_export, "find_spec", lambda name: None)
    with pytest.raises(
        bn.BatchNormError, match=r"onnx and onnxscript cannot be imported; pip install onnx onnxscript onnxruntime"
    ):
        bn.export(model, x, tmp_path / "model.onnx")


def test_a_file_that_gives_something_else_is_refused(tmp_path, monkeypatch):
    model, x = made("vgg")
    monkeypatch.setattr(module_of_export, "difference", lambda a, b: (1.0, 0.1))
    with pytest.raises(bn.NotEquivalent, match=r"model.pt2 gives something else than the model, by 0.1"):
        bn.export(model, x, tmp_path / "model.pt2")


def test_torch_exports_what_fold_returns():
    model, x = made("mobilenet-v2")
    folded, _ = bn.fold(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(folded, (x,))
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_model_without_bn_is_written_as_it_is(tmp_path):
    """After `fold`, and after a conversion to another brick, there is nothing to fold."""
    model, x = made("perceptron")
    for without in (bn.fold(model, x)[0], bn.convert(model, "layer")[0]):
        file = tmp_path / "new" / "folder" / "model.pt2"
        same, report = bn.export(without, x, file)
        assert same is without
        assert not report.changes
        torch.testing.assert_close(torch.export.load(file).module()(x), without(x))


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(3)

    def forward(self, x):
        y = self.bn(x)
        return y if y.mean() > 0 else -y


def test_what_cannot_be_exported_ends_in_a_sentence_and_leaves_the_file_that_was_there(tmp_path):
    file = tmp_path / "model.pt2"
    file.write_bytes(b"the last one")
    with pytest.raises(bn.BatchNormError, match=r"^export: torch.export, given this model, raises \w+: ") as raised:
        bn.export(Branch().eval(), torch.randn(4, 3), file)
    assert "\n" not in str(raised.value)
    assert [f.name for f in tmp_path.iterdir()] == ["model.pt2"]
    assert file.read_bytes() == b"the last one"
    with pytest.raises(bn.BatchNormError, match="the model is the class Branch"):
        bn.export(Branch, torch.randn(4, 3), file)


class Counting(nn.Module):
    """What torch.export cannot follow: a number that depends on the input's content."""

    def forward(self, x):
        return {"positive": x[x > 0], "count": int((x > 0).sum())}


@pytest.mark.parametrize("suffix", ["pt2", pytest.param("onnx", marks=needs_onnx)])
def test_a_refusal_is_one_sentence_without_torch_s_graph_and_log(suffix, tmp_path, capfd, caplog):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Counting()).eval()
    with pytest.raises(bn.BatchNormError, match=r"^export: torch.export, given this model, raises \w+: ") as raised:
        bn.export(model, torch.randn(6, 3), tmp_path / f"model.{suffix}")
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@pytest.mark.parametrize("name", ["a;b", "a\nb", "\x1b[2J"])
def test_names_that_the_format_lacks_end_in_a_sentence_without_torch_s_log(name, tmp_path, caplog):
    model = nn.Sequential()
    model.add_module(name, nn.Linear(3, 3))
    model.add_module("norm", nn.BatchNorm1d(3))
    with pytest.raises(bn.BatchNormError, match="lacks some characters in names of modules") as caught:
        bn.export(model.eval(), torch.ones(4, 3), tmp_path / "model.pt2")
    assert str(caught.value).isprintable()
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert list(tmp_path.iterdir()) == []
