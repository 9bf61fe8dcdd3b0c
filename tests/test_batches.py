"""Data that a user names on the command line becomes batches, or one sentence; nothing in a file runs."""

import textwrap

import numpy as np
import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.batches import split_labels
from batchnorm.loading import Batch, call_batch, load_batches, save_state
from sentences import sentence

X, Y = np.random.default_rng(0).normal(size=(11, 3)), np.arange(11)


def write(path, held):
    if path.suffix == ".npy":
        np.save(path, held)
    elif path.suffix == ".npz":
        np.savez(path, **held)
    elif path.suffix == ".safetensors":
        save_state(held, path)
    else:
        torch.save(held, path)
    return str(path)


def tensors():
    return torch.from_numpy(X.copy()), torch.from_numpy(Y.copy())


FILES = {
    "x.npy": (lambda: X, False),
    "big-endian.npy": (lambda: X.astype(">f8"), False),
    "xy.npz": (lambda: {"x": X, "y": Y}, True),
    "images.npz": (lambda: {"images": X, "labels": Y}, True),
    "unnamed.npz": (lambda: {"arr_0": X, "arr_1": Y}, True),
    "x.pt": (lambda: tensors()[0], False),
    "pair.pt": (tensors, True),
    "list.pt": (lambda: list(tensors()), True),
    "dict.pt": (lambda: dict(zip(("x", "y"), tensors(), strict=True)), True),
    "xy.safetensors": (lambda: dict(zip(("x", "target"), tensors(), strict=True)), True),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_data(tmp_path, name):
    held, labelled = FILES[name]
    batches = load_batches(write(tmp_path / name, held()), batch_size=4)
    for _ in range(2):  # can be read again
        read = list(batches)
        assert [len(b.inputs) for b in read] == [4, 4, 3]
        assert all(isinstance(b, Batch) for b in read)
        assert torch.equal(torch.cat([b.inputs for b in read]), tensors()[0])
        if labelled:
            assert torch.equal(torch.cat([b.labels for b in read]), tensors()[1])
        else:
            assert all(b.labels is None for b in read)
    assert len(batches) == 3
    assert next(iter(load_batches(str(tmp_path / name), dtype=torch.float32))).inputs.dtype == torch.float32


@pytest.mark.parametrize(("size", "sizes"), [(10, [11]), (5, [5, 6]), (11, [11]), (100, [11]), (1, [1] * 11)])
def test_a_last_sample_is_not_left_alone(tmp_path, size, sizes):
    batches = load_batches(write(tmp_path / "x.npy", X), batch_size=size)
    assert [len(b.inputs) for b in batches] == sizes
    assert torch.equal(torch.cat([b.inputs for b in batches]), tensors()[0])


def test_several_inputs_go_by_name(tmp_path):
    batches = load_batches(write(tmp_path / "x.npz", {"input1": X, "input2": X[:, :2], "y": Y}), dtype=torch.float32)
    batch = next(iter(batches))
    assert list(batch.inputs) == ["input1", "input2"]
    assert call_batch(nn.Bilinear(3, 2, 5), batch).shape == (11, 5)


def test_a_folder_is_its_files_in_order(tmp_path):
    for name, part in (("b.npy", X[4:]), ("a.npy", X[:4])):
        np.save(tmp_path / name, part)
    (tmp_path / "notes.txt").write_text("")
    batches = load_batches(str(tmp_path), batch_size=100)
    assert [len(b.inputs) for b in batches] == [4, 7]
    assert torch.equal(torch.cat([b.inputs for b in batches]), tensors()[0])


LOADER = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    x, y = torch.arange(6.0).double().reshape(6, 1), torch.arange(6)
    def loader():
        return DataLoader(TensorDataset(x, y), batch_size=4)
    def generator():
        yield from x.split(4)
    def triples():
        return [(x, y, "extra")]
    def named():
        return [{"ids": x, "mask": x > 2, "labels": y}]
    ready = [x, x]
    def number():
        return 3
    def text():
        return "abc"
    def breaks():
        yield x
        raise OSError("disk")
    def empty_dict():
        return [{"y": y}]
    def empty_tuple():
        return [()]
"""


@pytest.fixture
def loader(tmp_path):
    (tmp_path / "loader.py").write_text(textwrap.dedent(LOADER))
    return str(tmp_path / "loader.py")


def test_the_users_own_batches(loader):
    for name in ("loader", "generator"):
        batches = load_batches(f"{loader}:{name}", dtype=torch.float32)
        for _ in range(2):
            assert [b.inputs.flatten().tolist() for b in batches] == [[0, 1, 2, 3], [4, 5]]
        assert all(b.inputs.dtype == torch.float32 for b in batches)
        labels = [b.labels for b in batches]
        assert torch.equal(labels[1], torch.tensor([4, 5])) if name == "loader" else labels == [None, None]
    (triple,) = load_batches(f"{loader}:triples")
    assert triple.labels.tolist() == list(range(6))
    (named,) = load_batches(f"{loader}:named", dtype=torch.float32)
    assert (named.inputs["ids"].dtype, named.inputs["mask"].dtype, len(named.labels)) == (torch.float32, torch.bool, 6)
    assert len(list(load_batches(f"{loader}:ready"))) == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("number", "number gives a int, which is no batches; return a DataLoader"),
        ("text", "text gives a str, which is no batches"),
        ("breaks", "breaks raises OSError: disk"),
        ("empty_dict", "empty_dict has no inputs, only y"),
        ("empty_tuple", "empty_tuple gives an empty tuple"),
        ("nothing", "has no 'nothing'"),
    ],
)
def test_bad_batches_of_the_users_own(loader, name, words):
    with pytest.raises(bn.BatchNormError) as error:
        list(load_batches(f"{loader}:{name}"))
    assert words in sentence(error)


BAD = {
    "objects.npy": (lambda: np.array([{}, []], dtype=object), "was refused, and nothing in it was run"),
    "objects.npz": (lambda: {"x": np.array([{}, []], dtype=object)}, "was refused, and nothing in it was run"),
    "words.npy": (lambda: np.array(["a", "b"]), "of type <U1, which torch does not have"),
    "one.npy": (lambda: np.array(3.0), "holds a single number"),
    "none.npy": (lambda: X[:0], "holds no samples"),
    "uneven.npz": (lambda: {"x": X, "y": Y[:3]}, "different numbers of samples ([11, 3], [3])"),
    "labels.npz": (lambda: {"y": Y}, "has no inputs, only y"),
    "three.pt": (lambda: [torch.ones(2)] * 3, "holds 3 tensors without names; save a dictionary"),
    "word.pt": (lambda: {"x": torch.ones(2), "mask": "words"}, "holds a str among its tensors"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_one_sentence(tmp_path, name):
    held, words = BAD[name]
    file = write(tmp_path / name, held())
    with pytest.raises(bn.BatchNormError) as error:
        load_batches(file)
    assert words in sentence(error)


def test_no_data_is_one_sentence(tmp_path):
    (tmp_path / "text.npy").write_text("hello")
    (tmp_path / "empty").mkdir()
    for spec, words in [
        ("no.npy", "there is no file no.npy"),
        ("data.csv", "'data.csv' is not a data file; give a file of one of .npy, .npz"),
        (str(tmp_path / "text.npy"), "is not a NumPy file"),
        (str(tmp_path / "empty"), "there is no data file in the folder"),
    ]:
        with pytest.raises(bn.BatchNormError) as error:
            load_batches(spec)
        assert words in sentence(error)
    with pytest.raises(bn.BatchNormError, match="the batch size is 0"):
        load_batches("x.npy", batch_size=0)


def test_calibrate_takes_the_batches_as_they_are(tmp_path):
    file = write(tmp_path / "xy.npz", {"x": X.astype(np.float32), "y": Y})
    model, _ = bn.calibrate(nn.BatchNorm1d(3), load_batches(file, batch_size=5), progress=False)
    np.testing.assert_allclose(model.running_mean, X.mean(0), rtol=1e-5)
    np.testing.assert_allclose(model.running_var, X.var(0, ddof=1), rtol=1e-5)


def test_labels_of_a_batch_that_is_one_already():
    assert split_labels(Batch(1, 2)) == Batch(1, 2)
