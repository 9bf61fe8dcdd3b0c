"""In one process SyncBatchNorm is plain Batch Normalization."""

import copy
import pickle

import pytest
import torch

import batchnorm as bn
from batchnorm.bench.collectives import Machine
from batchnorm.distributed import membership
from batchnorm.distributed.groups import Held
from batchnorm.moments import Moments, merged


@pytest.mark.parametrize("shape", [(8, 4), (8, 4, 3), (4, 4, 5, 5), (2, 4, 3, 2, 2)])
def test_it_is_plain_batch_norm(shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    layer = bn.SyncBatchNorm(4, activation="relu")
    plain = {2: bn.BatchNorm1d, 3: bn.BatchNorm1d, 4: bn.BatchNorm2d, 5: bn.BatchNorm3d}[x.dim()](4, activation="relu")
    for training in (True, False):
        assert torch.equal(layer.train(training)(x), plain.train(training)(x))
    assert layer.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(layer.running_var, plain.running_var)


def test_arguments_are_torchs_and_ours():
    theirs = torch.nn.SyncBatchNorm(4, 1e-3, 0.2, True, False, None)
    layer = bn.SyncBatchNorm(4, 1e-3, 0.2, True, False, None, activation="relu", statistics="batch")
    layer.load_state_dict(theirs.state_dict())
    assert (layer.eps, layer.momentum, layer.running_mean, layer.activation) == (1e-3, 0.2, None, "relu")
    assert "activation='relu'" in repr(layer)
    assert not isinstance(layer, torch.nn.SyncBatchNorm)  # DistributedDataParallel refuses those on a CPU
    with pytest.raises(bn.BatchNormError, match="process_group is 3"):
        bn.SyncBatchNorm(4, process_group=3.0)
    with pytest.raises(bn.BatchNormError, match="more than 1 value per channel"):
        bn.SyncBatchNorm(4)(torch.ones(1, 4))


def test_copies_and_pickles():
    layer = bn.SyncBatchNorm(4)
    layer._held = Held(None, (0, 2))
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin._held.ranks == (0, 2)
        assert "ranks=[0, 2]" in repr(twin)
        assert twin(torch.randn(3, 4)).shape == (3, 4)  # no process group was started


def test_compiled_alone_without_a_break():
    torch._dynamo.reset()
    layer = bn.SyncBatchNorm(4)
    x = torch.randn(6, 4, 3)
    expected = copy.deepcopy(layer)(x)
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), expected)


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_moments_merge_exactly_whatever_the_counts(offset):
    torch.manual_seed(0)
    parts = [torch.randn(n, 3, dtype=torch.float64) + offset for n in (1, 5, 0, 17)]
    counts = torch.tensor([float(len(p)) for p in parts], dtype=torch.float64)
    means = torch.stack([p.mean(0) if len(p) else torch.zeros(3, dtype=torch.float64) for p in parts])
    variances = torch.stack([p.var(0, correction=0) if len(p) else torch.zeros(3, dtype=torch.float64) for p in parts])
    whole, found = torch.cat(parts), merged(Moments(counts, means, variances))
    torch.testing.assert_close(found.mean, whole.mean(0), rtol=1e-14, atol=0)
    torch.testing.assert_close(found.var, whole.var(0, correction=0), rtol=1e-9 if offset else 1e-13, atol=0)
    assert float(found.count) == 23


def test_the_model_of_the_cost():
    machine = Machine(start=1e-4, message=2e-5, byte=1e-9)
    assert machine.exchange(2, 0) < machine.exchange(3, 0) < machine.exchange(3, 10_000)
    assert machine.ring(100, 0) > machine.exchange(100, 0) > machine.tree(100, 0)
    assert machine.layer(4, 64) == pytest.approx(2 * 1e-4 + 6 * 2e-5 + 3 * 2184e-9)


@pytest.mark.parametrize(("switch", "begun"), [("", 1), ("off", 0)])
def test_no_thread_is_begun_if_that_is_switched_off(monkeypatch, tmp_path, switch, begun):
    found = []
    monkeypatch.setattr(membership, "_Listener", lambda world, store, rank: found.append(rank))
    monkeypatch.setattr(membership, "_listener", None)
    monkeypatch.setattr(membership, "_serves", None)
    monkeypatch.setenv("BATCHNORM_ROLLCALL", switch)
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        bn.SyncBatchNorm(4).process_group = None
    finally:
        torch.distributed.destroy_process_group()
    assert len(found) == begun
