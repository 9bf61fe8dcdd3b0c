"""`update_once`: with activation checkpointing, the running statistics are those of training without it."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import batchnorm as bn
from batchnorm.layers.recompute import updates_once


class Act(nn.BatchNorm1d):
    """A user's subclass."""

    def forward(self, x):
        return super().forward(x).relu()


LAYERS = {
    "torch": nn.BatchNorm1d,
    "ours": bn.BatchNorm1d,
    "subclass": Act,
    "cumulative": lambda c: nn.BatchNorm1d(c, momentum=None),
    "renorm": bn.BatchRenorm,
    "without statistics": lambda c: nn.BatchNorm1d(c, track_running_stats=False),
}


def block(name, last):
    torch.manual_seed(0)
    tail = () if last else (nn.ReLU(), nn.Linear(4, 4))
    return nn.Sequential(nn.Linear(3, 4), LAYERS[name](4), *tail)


def step(model, x, how):
    x = x.clone().requires_grad_()
    y = model(x) if how is None else checkpoint(model, x, use_reentrant=how)
    y.square().sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("last", [False, True], ids=["inside", "last"])
@pytest.mark.parametrize("how", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("name", LAYERS)
def test_as_without_checkpointing(name, how, last):
    plain, once = block(name, last), bn.update_once(block(name, last))
    buffers = [id(b) for b in once.buffers()]
    for x in torch.randn(3, 8, 3, generator=torch.Generator().manual_seed(1)):
        for a, b in zip(step(plain, x, None), step(once, x, how), strict=True):
            torch.testing.assert_close(a, b)
    for (key, a), (_, b) in zip(plain.state_dict().items(), once.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, msg=key)
    assert [id(b) for b in once.buffers()] == buffers
    assert [sorted(vars(m)) for m in once.modules()] == [sorted(vars(m)) for m in plain.modules()]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_keep_it(copied):
    model = copied(bn.update_once(block("torch", False)))
    step(model, torch.randn(8, 3), False)
    assert int(model[1].num_batches_tracked) == 1


def test_twice_is_once():
    layer = bn.update_once(bn.update_once(nn.BatchNorm1d(2)))
    assert updates_once(layer)
    assert (len(layer._forward_hooks), len(layer._forward_pre_hooks)) == (1, 1)


def test_a_layer_that_raises_in_the_recomputation_gets_its_buffers_back():
    class Fails(nn.BatchNorm1d):
        def forward(self, x):
            y = super().forward(x)
            if torch._C._current_graph_task_id() != -1:
                raise RuntimeError("no memory")
            return y

    model = bn.update_once(nn.Sequential(nn.Linear(3, 4), Fails(4)))
    mean = model[1].running_mean
    with pytest.raises(RuntimeError, match="no memory"):
        step(model, torch.randn(8, 3), True)
    assert model[1].running_mean is mean
    assert int(model[1].num_batches_tracked) == 1
    assert "_before_recomputation" not in vars(model[1])


def test_it_can_be_folded_and_compiled():
    model = bn.update_once(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))).eval()
    folded, _ = bn.fold(model, torch.randn(8, 3))
    assert not any(isinstance(m, nn.BatchNorm1d) for m in folded.modules())
    model.train()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(torch.ones(4, 3)), model(torch.ones(4, 3)))


def test_another_hook_still_keeps_a_layer_from_being_folded():
    model = bn.update_once(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))).eval()
    model[1].register_forward_hook(lambda *what: None)
    _, report = bn.fold(model, torch.randn(8, 3))
    assert "hooks" in report.left["1"]
