"""What a user types becomes the object he means, or one sentence; nothing in a file runs."""

import os
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.checkpoints import load_tensors, replacing
from batchnorm.loading import load_batches, load_model, load_state, parse_input, save_state
from sentences import sentence

NETWORK = """
    import dataclasses
    import torch
    from torch import nn
    from beside import WIDTH

    @dataclasses.dataclass
    class Settings:
        width: int = WIDTH

    class Net(nn.Module):
        def __init__(self, width=Settings().width):
            super().__init__()
            self.conv = nn.Conv2d(1, width, 3)
            self.bn = nn.BatchNorm2d(width)

        def forward(self, x):
            return self.bn(self.conv(x))

    def make():
        from lazily_beside import SEED
        torch.manual_seed(SEED)
        return Net()

    ready = Net()
    number = 3

    def needs(width, *, depth, other=1):
        return Net()

    def fails():
        raise KeyError("no\\nweights")

    def leaves():
        raise SystemExit("usage: ...")

    def wrong():
        return [1]

    class Zoo:
        small = Net
"""


@pytest.fixture
def network(tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "network.py").write_text(textwrap.dedent(NETWORK))
    (folder / "beside.py").write_text("WIDTH = 4\n")
    (folder / "lazily_beside.py").write_text("SEED = 7\n")
    return folder / "network.py"


# ---- models


@pytest.mark.parametrize("name", ["make", "Net", "ready", "Zoo.small"])
def test_a_file_and_what_is_in_it(network, name):
    model = load_model(f"{network}:{name}")
    assert type(model).__name__ == "Net"
    assert model.bn.num_features == 4


def test_the_same_file_twice_is_run_twice(network):
    one = load_model(f"{network}:ready")
    network.write_text(network.read_text().replace("width: int = WIDTH", "width: int = 6"))
    other = load_model(f"{network}:ready")
    assert (one.bn.num_features, other.bn.num_features) == (4, 6)


def test_a_module_of_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "here.py").write_text("from torch import nn\nmake = nn.ReLU\n")
    monkeypatch.chdir(tmp_path)
    assert isinstance(load_model("here:make"), nn.ReLU)


def test_a_package_that_cannot_be_imported_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text("import no_such_package_at_all")
    (tmp_path / "broken" / "models.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(bn.BatchNormError) as error:
        load_model("broken.models:make")
    assert "importing broken.models raises ModuleNotFoundError: No module named 'no_such_package" in sentence(error)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("network.py", "'network.py' does not say what to take from where; write file.py:factory"),
        ("network.py:", "does not say what to take from where"),
        (":make", "does not say what to take from where"),
        ("nowhere.py:make", "there is no file nowhere.py; write file.py:factory"),
        ("no_such_package.models:make", "there is no module 'no_such_package.models'"),
        ("..up:make", "there is no module '..up'"),
        ("{file}:missing", "has no 'missing'; it has Settings, Net, make, ready, needs, fails"),
        ("{file}:Zoo.large", "has no 'Zoo.large'"),
        ("{file}:needs", ":needs needs arguments (width, depth), and is called without; write a function"),
        ("{file}:fails", ":fails() raises KeyError: 'no\\nweights'"),
        ("{file}:leaves", ":leaves() raises SystemExit: usage: ..."),
        ("{file}:wrong", ":wrong gives a list, not a torch.nn.Module"),
        ("{file}:number", ":number gives a int, not a torch.nn.Module"),
        ("torch.nn:no_such", "torch.nn has no 'no_such'"),
        ("torch.no_such:make", "there is no module 'torch.no_such'"),
    ],
)
def test_a_bad_model_is_one_sentence(network, spec, words):
    with pytest.raises(bn.BatchNormError) as error:
        load_model(spec.format(file=network))
    assert words in sentence(error)


def test_a_file_that_does_not_run_is_one_sentence_and_leaves_no_module(tmp_path):
    broken = tmp_path / "broken.py"
    for text, words in [
        ("import no_such_package_at_all", "broken.py raises ModuleNotFoundError: No module named"),
        ("def (:", "broken.py raises SyntaxError"),
    ]:
        broken.write_text(text)
        with pytest.raises(bn.BatchNormError) as error:
            load_model(f"{broken}:make")
        assert words in sentence(error)
        assert "broken" not in sys.modules


# ---- checkpoints


def state_of(network):
    model = load_model(f"{network}:make")
    with torch.no_grad():
        for number, tensor in enumerate(model.state_dict().values()):
            tensor.fill_(number + 1)
    return model.state_dict()


def under(prefix, state):
    return {prefix + name: tensor for name, tensor in state.items()}


WRAPPED = {
    "plain": lambda s: s,
    "state_dict": lambda s: {"epoch": 3, "state_dict": s, "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}},
    "model": lambda s: {"model": s, "model_ema": {k: v * 0 for k, v in s.items()}},
    "model_state_dict": lambda s: {"model_state_dict": s, "loss": torch.tensor(1.0)},
    "two deep": lambda s: {"model": {"state_dict": s, "arch": "net"}},
    "the only one": lambda s: {"classifier": s, "step": 3},
    "ddp": lambda s: under("module.", s),
    "compiled": lambda s: under("_orig_mod.", s),
    "compiled in ddp": lambda s: {"model": under("module._orig_mod.", s)},
    "ddp in compiled": lambda s: under("_orig_mod.module.", s),
    "a compiled part": lambda s: {name.replace("conv.", "conv._orig_mod."): v for name, v in s.items()},
    "lightning": lambda s: {
        "state_dict": {**under("model.", s), "criterion.weight": torch.ones(3)},
        "pytorch-lightning_version": "2.4",
        "callbacks": {},
        "loops": {"fit_loop": {"state_dict": {}}},
    },
    "averaged": lambda s: {"n_averaged": torch.tensor(3), **under("module.", s)},
    "of old": lambda s: {name: v for name, v in s.items() if not name.endswith("num_batches_tracked")},
}


@pytest.mark.parametrize("how", WRAPPED)
def test_what_is_wrapped_around_a_state_goes(network, tmp_path, how):
    state = state_of(network)
    torch.save(WRAPPED[how](state), tmp_path / "model.ckpt")
    loaded = load_model(f"{network}:make", tmp_path / "model.ckpt").state_dict()
    for name in state:
        if how != "of old" or not name.endswith("num_batches_tracked"):
            assert torch.equal(loaded[name], state[name]), name


@pytest.mark.parametrize("how", ["plain", "ddp", "compiled", "compiled in ddp", "ddp in compiled", "state_dict"])
def test_without_a_model_the_names_are_bare_too(network, tmp_path, how):
    state = state_of(network)
    torch.save(WRAPPED[how](state), tmp_path / "model.pt")
    assert list(load_state(tmp_path / "model.pt")) == list(state)


def test_a_model_whose_own_names_begin_with_module(tmp_path):
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    save_state(model.state_dict(), tmp_path / "model.pt")
    other = nn.Module()
    other.module = nn.Linear(2, 2)
    state = load_state(tmp_path / "model.pt", names=other.state_dict())
    assert list(state) == ["module.weight", "module.bias"]


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".ckpt", ".bin", ".safetensors"])
def test_what_is_saved_is_read(tmp_path, suffix):
    weight = torch.randn(3, 4)
    state = {"a": weight.T, "b": weight[1:], "c": weight, "n": torch.tensor(3), "h": torch.ones(2).bfloat16()}
    path = save_state(state, tmp_path / "new" / f"model{suffix}")
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    back = load_state(path)
    assert set(back) == set(state)
    for name, tensor in state.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)


def test_a_key_says_which(tmp_path):
    a, b = ({"w": torch.full((1,), float(n))} for n in (1, 2))
    torch.save({"generator": a, "critic": {"ema": b}, "model": a}, tmp_path / "gan.pt")
    assert load_state(tmp_path / "gan.pt")["w"] == 1
    assert load_state(tmp_path / "gan.pt", key="critic.ema")["w"] == 2
    assert load_state(tmp_path / "gan.pt", key="critic")["w"] == 2
    for key, words in [
        ("critics", "has no 'critics'; it holds 'generator', 'critic', 'model'"),
        ("critic.ema.w.x", "has no 'critic.ema.w.x'; it holds Tensor"),
        ("critic.ema.w", "'critic.ema.w' in"),
    ]:
        with pytest.raises(bn.BatchNormError) as error:
            load_state(tmp_path / "gan.pt", key=key)
        assert words in sentence(error)


def test_several_and_no_telling_which(tmp_path):
    torch.save({"generator": {"w": torch.ones(1)}, "critic": {"w": torch.ones(1)}}, tmp_path / "gan.pt")
    with pytest.raises(bn.BatchNormError, match="holds 'generator', 'critic', and it is not clear which"):
        load_state(tmp_path / "gan.pt")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    with pytest.raises(bn.BatchNormError, match="holds a list, not tensors by name"):
        load_state(tmp_path / "list.pt")


def test_a_checkpoint_of_another_model_is_one_sentence(network, tmp_path):
    state = dict(state_of(network))
    state["conv.weight"] = torch.zeros(5, 1, 3, 3)
    state["head.weight"] = state.pop("bn.weight")
    del state["bn.running_mean"]
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(bn.BatchNormError) as error:
        load_model(f"{network}:make", tmp_path / "other.pt")
    assert (
        "does not fit the model: 2 of 7 are missing (bn.weight, bn.running_mean), 1 is unexpected (head.weight), "
        "1 has another shape (conv.weight is [5, 1, 3, 3] in the file and [4, 1, 3, 3] in the model)"
    ) in sentence(error)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


@pytest.mark.parametrize("how", ["torch", "legacy", "pickle", "environment"])
def test_a_malicious_pickle_is_refused_and_does_not_run(tmp_path, how, monkeypatch):
    ran, file = tmp_path / "ran", tmp_path / "model.pt"
    payload = {"state_dict": {"w": torch.ones(1)}, "extra": Evil(ran)}
    if how == "environment":
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    if how == "pickle":
        file.write_bytes(pickle.dumps(Evil(ran), protocol=2))
    else:
        torch.save(payload, file, _use_new_zipfile_serialization=how != "legacy")
    for load in (load_state, lambda path: list(load_batches(str(path)))):
        with pytest.raises(bn.BatchNormError) as error:
            load(file)
        assert f"{file} was refused, and nothing in it was run" in sentence(error)
        assert "system" in sentence(error)
        assert not ran.exists()
    torch.load(file, weights_only=False) if how != "pickle" else pickle.loads(file.read_bytes())
    assert ran.exists()  # it would have run


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.pt", None, "there is no file"),
        ("empty.pt", b"", "is not a file that torch.save wrote"),
        ("text.pt", b"hello there", "is not a file that torch.save wrote"),
        ("half.pt", "half", "is not a file that torch.save wrote"),
        ("bad.safetensors", b"12345678901234567890", "is not a safetensors file"),
        ("model.h5", b"", "end its name in .pt, .pth, .ckpt, .bin or .safetensors"),
    ],
)
def test_what_is_no_checkpoint_is_one_sentence(tmp_path, name, content, words):
    file = tmp_path / name
    if content == "half":
        torch.save({"w": torch.randn(1000)}, file)
        file.write_bytes(file.read_bytes()[:2000])
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(bn.BatchNormError) as error:
        load_state(file)
    assert words in sentence(error)
    with pytest.raises(bn.BatchNormError, match="is a folder; name the file in it"):
        load_state(tmp_path)


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path):
    target = tmp_path / "model.onnx"
    target.write_text("old")

    def interrupted():
        with replacing(target) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert target.read_text() == "old"
    with replacing(target) as temporary:
        assert temporary.name == "model.onnx"
        temporary.write_text("new")
        (temporary.parent / "model.onnx.data").write_text("weights")
        assert target.read_text() == "old"
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        "model.onnx": "new",
        "model.onnx.data": "weights",
    }


# ---- inputs


def test_inputs():
    x = parse_input("8,3,5")
    assert x.shape == (8, 3, 5)
    assert x.dtype == torch.float32
    assert torch.equal(x, parse_input(" 8 x 3 x 5 "))
    assert not torch.equal(x, parse_input("8,3,5", seed=1))
    assert 0.7 < x.std() < 1.3
    ids = parse_input("4,400:int64<1000")
    assert ids.dtype == torch.int64
    assert ids.min() >= 0
    assert 900 < ids.max() < 1000
    assert set(parse_input("100:int32").tolist()) == {0, 1}
    assert parse_input("3:float64").dtype == parse_input("3", dtype=torch.float64).dtype == torch.float64
    a, b = parse_input("2,3; 4:bool")
    assert (a.shape, b.dtype) == ((2, 3), torch.bool)
    assert not torch.equal(*parse_input("2,3;2,3"))
    named = parse_input("ids=2,3:int64<5;mask=2,3:bool")
    assert (list(named), named["mask"].dtype) == (["ids", "mask"], torch.bool)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no input given"),
        (" ; ", "no input given"),
        ("8,,3", "the input '8,,3' is not sizes such as 8,3,224,224 or 8,128:int64<1000; write sizes"),
        ("0,3,8,8", "the input '0,3,8,8' has no elements; give sizes from 1 up"),
        ("eight", "the input 'eight' is not sizes"),
        ("8,-3", "the input '8,-3' is not sizes"),
        ("8:floaty", "the input '8:floaty' is not sizes"),
        ("8:nn", "the input '8:nn' is not sizes"),
        ("8:int64<0", "the input '8:int64<0' cannot be made"),
        ("8<5", "has <5, which only whole numbers can have"),
        ("a=8;8", "gives names to some of its parts only, or a name twice"),
        ("a=8;a=8", "gives names to some of its parts only, or a name twice"),
        ("9999999,9999999,9999999", "cannot be made"),
    ],
)
def test_a_bad_input_is_one_sentence(text, words):
    with pytest.raises(bn.BatchNormError) as error:
        parse_input(text)
    assert words in sentence(error)


def test_reading_a_checkpoint_needs_no_torch_before_it_is_asked():
    program = "import sys, batchnorm.loading, batchnorm.commands; print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_folder_is_no_checkpoint_suffix(tmp_path):
    with pytest.raises(bn.BatchNormError, match="is a folder"):
        load_tensors(tmp_path)
