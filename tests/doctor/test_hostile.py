"""Models and files that are not what they should be: the doctor says so in a sentence, and nothing else happens."""

import os
import pickle
import sys
import zipfile

import pytest
import torch
from doctor_findings import NASTY
from state import snapshot
from torch import nn
from typer.testing import CliRunner

import batchnorm as bn
import batchnorm.commands
from batchnorm.errors import BatchNormError


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        result = CliRunner().invoke(batchnorm.commands.app, [str(argument) for argument in arguments])
        if isinstance(result.exception, BatchNormError):  # which main says in one sentence
            return 2, result.stdout, str(result.exception)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout, result.stderr

    return run


def healthy(findings):
    assert not findings.failed, findings.failed
    return findings


# ---- models


class Nothing(nn.Module):
    def forward(self, x):
        return x


class Blind(nn.Module):
    """BN layers that are never called."""

    def __init__(self):
        super().__init__()
        self.unused = nn.BatchNorm2d(3)

    def forward(self, x):
        return x


class Odd(nn.Module):
    """Outputs that hold no tensors, attributes of all kinds, and a method where torch has a flag."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(3)
        self.things = [lambda: 1, {"a": self.bn}, object()]

    def forward(self, x):
        self.bn(x)
        return {"text": "none", "deep": [None, 3]}


class ParentInList(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.bn.owner = [self]
        self.conv.weight.owner = self.bn

    def forward(self, x):
        return self.bn(self.conv(x))


def shared():
    bn1, conv = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)
    other = nn.BatchNorm2d(3)
    other.weight, other.running_mean = bn1.weight, bn1.running_mean
    return nn.Sequential(conv, bn1, nn.Sequential(conv, bn1), conv, other)


MODELS = {
    "no layers": nn.Sequential,
    "no BN": lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()),
    "a function": Nothing,
    "BN only": lambda: nn.BatchNorm2d(3),
    "BN never called": Blind,
    "odd outputs": Odd,
    "parent in a list": ParentInList,
    "shared modules and parameters": shared,
    "no affine": lambda: nn.BatchNorm2d(3, affine=False),
    "no statistics": lambda: nn.BatchNorm2d(3, track_running_stats=False),
    "cumulative": lambda: nn.BatchNorm2d(3, momentum=None),
    "instance norm": lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
    "synchronised": lambda: nn.SyncBatchNorm(3),
    "half": lambda: nn.BatchNorm2d(3).bfloat16(),
    "ours": lambda: nn.Sequential(bn.BatchNorm2d(3, activation="relu"), bn.GhostBatchNorm(3, 2)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("given", ["nothing", "example", "data"])
def test_odd_models(name, given):
    torch.manual_seed(0)
    model = MODELS[name]()
    dtype = torch.bfloat16 if name == "half" else torch.float32
    batches = [torch.randn(4, 3, 5, 5, dtype=dtype) for _ in range(3)]
    before = snapshot(model)
    arguments = {"nothing": {}, "example": {"example": batches[0]}, "data": {"data": batches}}[given]
    findings = healthy(bn.check(model, **arguments))
    assert snapshot(model) == before
    str(findings), findings.to_json(), findings._repr_html_()
    if name in ("no layers", "no BN", "a function"):
        assert not [f for f in findings if f.code < "BN307"], findings


def test_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4))
    healthy(bn.check(model))


def test_a_module_inside_itself_is_refused():
    model = nn.Sequential(nn.Sequential(nn.BatchNorm2d(3)))
    model[0].up = model
    for call in (bn.check, bn.testing.assert_healthy):
        with pytest.raises(BatchNormError, match=r"check: 0\.up is a module that is inside itself"):
            call(model, torch.randn(2, 3, 4, 4))
    shared_twice = nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU()))
    shared_twice.append(shared_twice[1])
    healthy(bn.check(shared_twice))


def named(name):
    """A model with a module of any name that torch allows, and one more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
    model._modules = {name.replace(".", "_"): model[0], "bn" + name.replace(".", "_"): model[1], "r": model[2]}
    return model


@pytest.mark.parametrize("kind", NASTY)
@pytest.mark.parametrize("format", ["text", "json", "sarif", "github"])
def test_names_of_any_kind(kind, format):
    from batchnorm.doctor.formats import FORMATS, Outcome

    model = named(NASTY[kind])
    findings = healthy(bn.check(model, torch.randn(4, 3, 5, 5), select=["BN101"]))
    assert findings.codes == ("BN101",)
    text = FORMATS[format](Outcome("net.py:make", findings))
    assert all(character.isprintable() or character == "\n" for character in text)
    if format == "github":
        assert len(text.splitlines()) == 1
    repaired, _ = bn.fix(model, findings)
    assert next(iter(repaired.children())).bias is None


# ---- factories

FACTORIES = """
import os
import sys
import torch
from torch import nn

def raises(): raise KeyError("no such weights\\nand a second line")
def none(): return None
def leaves(): sys.exit("bye")
def exits(): raise SystemExit(0)
def needs(width, *, depth): return nn.ReLU()
def text(): return "a model"
def prints():
    print('{"findings": []}')
    return nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8))
async def waits(): return nn.ReLU()
def deep():
    return deep()

class Forward(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.bn, self.how = nn.BatchNorm2d(3), how
    def forward(self, x):
        if self.how == "raise": raise RuntimeError("boom [red]\\nsecond line")
        if self.how == "exit": sys.exit(0)
        if self.how == "forever": return self.forward(x)
        if self.how == "memory": raise MemoryError()
        if self.how == "train" and self.training: raise RuntimeError("not in training mode")
        return self.bn(x)

def raise_(): return Forward("raise")
def exit_(): return Forward("exit")
def forever(): return Forward("forever")
def memory(): return Forward("memory")
def train(): return Forward("train")

class NoCopy(Forward):
    def __deepcopy__(self, memo): raise TypeError("cannot be copied")
def no_copy(): return NoCopy("")

def loop():
    model = nn.Sequential(nn.BatchNorm2d(3))
    model.up = model
    return model

def bad_data():
    yield torch.randn(4, 3, 5, 5)
    raise OSError("disk gone")
def wrong_data(): return [torch.randn(4, 3, 5, 5), torch.randn(4, 7, 5, 5)]
def text_data(): return ["a", "b"]
def model_optimizer(model): raise ValueError("no parameters")
"""


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        ("raises", "net.py:raises() raises KeyError: 'no such weights"),
        ("none", "net.py:none gives a NoneType, not a torch.nn.Module"),
        ("leaves", "net.py:leaves() raises SystemExit: bye"),
        ("exits", "net.py:exits() raises SystemExit: 0"),
        ("needs", "net.py:needs needs arguments (width, depth), and is called without"),
        ("text", "net.py:text gives a str, not a torch.nn.Module"),
        ("deep", "net.py:deep() raises RecursionError"),
        ("raise_", "the model raised RuntimeError on the example: boom [red]"),
        ("exit_", "checking the model raises SystemExit: 0"),
        ("forever", "the model raised RecursionError on the example"),
        ("memory", "the model raised MemoryError on the example"),
        ("loop", "up is a module that is inside itself"),
        ("no_such", "net.py has no 'no_such'"),
    ],
)
def test_factories_and_models_that_fail(run, tmp_path, factory, sentence):
    (tmp_path / "net.py").write_text(FACTORIES)
    code, out, err = run("check", f"net.py:{factory}", "--input", "4,3,5,5")
    assert code == 2
    assert out == ""
    assert sentence in err
    assert "\n" not in err.strip()


def test_what_a_factory_prints_is_not_in_the_result(run, tmp_path):
    import json

    (tmp_path / "net.py").write_text(FACTORIES)
    _, out, err = run("check", "net.py:prints", "--input", "4,3,5,5", "--format", "json", "--select", "BN101")
    assert [finding["code"] for finding in json.loads(out)["findings"]] == ["BN101"]
    assert '{"findings": []}' in err


@pytest.mark.parametrize(
    ("data", "sentence"),
    [("bad_data", "raises OSError: disk gone"), ("wrong_data", "7"), ("text_data", ""),
     ("none", "gives a NoneType, which is no batches"), ("raises", "raises KeyError")],
)  # fmt: skip
def test_data_that_fails(run, tmp_path, data, sentence):
    (tmp_path / "net.py").write_text(FACTORIES)
    code, out, err = run("check", "net.py:prints", "--data", f"net.py:{data}")
    if code != 2:  # the rules that ran into it say so, and no others
        assert "could not run" in out
    assert sentence in err + out


def test_an_optimizer_that_fails(run, tmp_path):
    (tmp_path / "net.py").write_text(FACTORIES)
    code, _, err = run("check", "net.py:prints", "--optimizer", "net.py:model_optimizer")
    assert code == 2
    assert "net.py:model_optimizer(model) raises ValueError: no parameters" in err


@pytest.mark.parametrize("factory", ["train", "no_copy"])
def test_models_that_some_rules_cannot_look_at(run, tmp_path, factory):
    (tmp_path / "net.py").write_text(FACTORIES)
    code, _, err = run("check", f"net.py:{factory}", "--input", "4,3,5,5")
    assert code in (0, 1), err


def test_files_that_are_no_code(run, tmp_path):
    (tmp_path / "broken.py").write_text("def make(:\n")
    assert "SyntaxError" in run("check", "broken.py:make")[2]
    assert "there is no file none.py" in run("check", "none.py:make")[2]
    assert run("check", "broken.py")[0] == 2
    assert run("check", "a" * 5000)[0] == 2
    assert run("check", "a\0b:c")[0] == 2
    assert run("check", "")[0] == 2


# ---- checkpoints


class Bomb:
    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def bad_files(tmp_path):
    good = tmp_path / "good.pt"
    torch.save(nn.BatchNorm2d(3).state_dict(), good)
    (tmp_path / "text.pt").write_text("import os")
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "cut.pt").write_bytes(good.read_bytes()[:-200])
    (tmp_path / "half.pt").write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    (tmp_path / "folder.pt").mkdir()
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "text.safetensors").write_text("{}")
    (tmp_path / "huge.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    (tmp_path / "notes.txt").write_text("hello")
    with zipfile.ZipFile(tmp_path / "zip.pt", "w") as file:
        file.writestr("hello.txt", "hello")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    torch.save(torch.ones(2), tmp_path / "tensor.pt")
    torch.save({"epoch": 3}, tmp_path / "numbers.pt")
    (tmp_path / "bomb.pt").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    torch.save({"weight": torch.ones(2), "x": Bomb(tmp_path / "ran")}, tmp_path / "zipped_bomb.ckpt")
    torch.save(nn.BatchNorm2d(3), tmp_path / "whole.pth")


BAD = ["text.pt", "empty.pt", "cut.pt", "half.pt", "folder.pt", "empty.safetensors", "text.safetensors",
       "huge.safetensors", "notes.txt", "zip.pt", "list.pt", "tensor.pt", "numbers.pt", "bomb.pt", "zipped_bomb.ckpt",
       "whole.pth", "missing.pt", "missing.safetensors", "/", "."]  # fmt: skip


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    bad_files(folder)
    return folder


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("place", ["alone", "into", "before"])
def test_files_that_are_no_checkpoints(run, tmp_path, bad, name, place):
    (tmp_path / "net.py").write_text("from torch import nn\nmodel = nn.BatchNorm2d(3)\n")
    file = str(bad / name) if name[-1] not in "/." else name
    if place == "alone":
        code, out, err = run("check", file)
    else:
        code, out, err = run("check", "net.py:model", "--checkpoint" if place == "into" else "--before", file)
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert not (bad / "ran").exists()
    if name == "zipped_bomb.ckpt":
        assert "refused, and nothing in it was run" in err


def test_the_bomb_would_have_gone_off(tmp_path):
    bad_files(tmp_path)
    pickle.loads((tmp_path / "bomb.pt").read_bytes())
    assert (tmp_path / "ran").exists()


ODD = {
    "0-d": {"bn.running_mean": torch.tensor(0.0), "bn.running_var": torch.tensor(1.0)},
    "integers": {"bn.running_mean": torch.zeros(3, dtype=torch.int64), "bn.running_var": torch.ones(3).int(),
                 "bn.num_batches_tracked": torch.tensor(3.5)},
    "bool": {"bn.running_mean": torch.zeros(3, dtype=torch.bool), "bn.running_var": torch.ones(3, dtype=torch.bool)},
    "complex": {"bn.running_mean": torch.zeros(3, dtype=torch.complex64), "bn.running_var": torch.ones(3)},
    "empty": {"bn.running_mean": torch.zeros(0), "bn.running_var": torch.ones(0), "bn.weight": torch.ones(0)},
    "different sizes": {"bn.running_mean": torch.zeros(3), "bn.running_var": torch.ones(4), "bn.weight": torch.ones(5)},
    "no variance": {"bn.running_mean": torch.zeros(3)},
    "no mean": {"bn.running_var": torch.zeros(3)},
    "matrices": {"bn.running_mean": torch.zeros(3, 2), "bn.running_var": torch.ones(3, 2), "bn.weight": torch.ones(6)},
    "counts": {"bn.running_mean": torch.zeros(3), "bn.running_var": torch.ones(3),
               "bn.num_batches_tracked": torch.zeros(3)},
    "float8": {"bn.running_mean": torch.zeros(3).to(torch.float8_e4m3fn), "bn.running_var": torch.ones(3)},
    "half": {"bn.running_mean": torch.zeros(3).half(), "bn.running_var": torch.full((3,), 1e-7).half()},
    "NaN": {"bn.running_mean": torch.full((3,), torch.nan), "bn.running_var": torch.full((3,), -1.0)},
    "at the top": {"running_mean": torch.zeros(3), "running_var": torch.ones(3)},
    "sparse": {"bn.running_mean": torch.zeros(3).to_sparse(), "bn.running_var": torch.ones(3)},
    "nothing": {"x": torch.ones(1)},
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_checkpoints_of_odd_tensors(run, tmp_path, name):
    healthy(bn.check(ODD[name]))
    torch.save(ODD[name], tmp_path / "odd.pt")
    code, out, err = run("check", "odd.pt")
    assert code in (0, 1), err
    assert "worth a report" not in out


@pytest.mark.parametrize("kind", NASTY)
def test_checkpoints_with_names_of_any_kind(run, tmp_path, kind):
    name = NASTY[kind].replace("\udc80", "")
    state = {f"{name}.running_mean": torch.full((2,), torch.nan), f"{name}.running_var": torch.ones(2)}
    torch.save(state, tmp_path / "odd.pt")
    for format in ("text", "github", "sarif", "json"):
        code, out, err = run("check", "odd.pt", "--format", format)
        assert code in (0, 1), err
        assert all(character.isprintable() or character == "\n" for character in out)
        assert not [line for line in out.splitlines() if line.startswith(("::error title=fake", "::warning::z"))]


def test_what_is_no_model():
    for thing in (3, None, "model", [nn.ReLU()], {"a": 3}, nn.ReLU):
        with pytest.raises(BatchNormError, match=r"give an nn\.Module, or the state_dict of one"):
            bn.check(thing)
    with pytest.raises(BatchNormError, match="does not know its shapes yet"):
        bn.check(nn.LazyBatchNorm2d())


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ([], "list"),
        (iter(()), "tuple_iterator"),
        (torch.utils.data.DataLoader([]), "DataLoader"),
        (torch.zeros(0, 2), "Tensor"),
    ],
    ids=["list", "iterator", "loader", "tensor"],
)
def test_data_without_batches_is_not_a_healthy_model(data, kind):
    with pytest.raises(bn.BatchNormError, match=rf"data \({kind}\) gives no batches; give some, or leave data out"):
        bn.check(nn.BatchNorm1d(2), torch.zeros(4, 2), data=data)
    with pytest.raises(bn.BatchNormError, match="gives no batches"):
        bn.testing.assert_healthy(nn.BatchNorm1d(2), data=[])
    with pytest.raises(bn.BatchNormError, match="max_batches is 0; give a whole number"):
        bn.check(nn.BatchNorm1d(2), data=[torch.zeros(4, 2)], max_batches=0)


def test_nothing_is_left_in_the_process(run, tmp_path):
    (tmp_path / "net.py").write_text(FACTORIES)
    out = sys.stdout
    run("check", "net.py:exit_", "--input", "4,3,5,5")
    assert sys.stdout is out
