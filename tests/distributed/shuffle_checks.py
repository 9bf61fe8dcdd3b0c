"""Examples dealt out over the ranks, and brought back."""

import torch
import torch.distributed as dist
from rank_checks import check, equal_sizes, near, raised, shares, total
from torch import nn

import batchnorm as bn


def unequal(size):
    return [3, 5, 2, 4][:size] if size > 2 else [3, 5]


@check("equal", "unequal", "empty")
def shuffled_outputs_come_back_in_order(kind):
    """An encoder that looks at one example at a time gives what it gives without shuffling; so do its gradients."""
    size, me = dist.get_world_size(), dist.get_rank()
    sizes = {"equal": equal_sizes(), "unequal": unequal(size), "empty": [0, *equal_sizes()[1:]]}[kind]
    xs = shares(sizes, (4, 3))
    weight = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    plain = xs[me].clone().requires_grad_()
    mixed = xs[me].clone().requires_grad_()
    dy = torch.randn(sizes[me], 4, 5, dtype=torch.float64)
    expected = torch.tanh(plain @ weight)
    expected_grads = torch.autograd.grad(expected, (plain, weight), dy)
    y = bn.shuffled(lambda batch: torch.tanh(batch @ weight), mixed)
    grads = torch.autograd.grad(y, (mixed, weight), dy)
    near(y.detach(), expected.detach(), 1e-12)
    near(grads[0], expected_grads[0], 1e-12)
    # Whoever encoded an example has its part of the weight's gradient; the sum over ranks is the same.
    near(total(grads[1]), total(expected_grads[1]), 1e-12)


@check()
def an_encoder_sees_examples_of_other_ranks():
    """Over a few draws every rank meets every rank's examples, as many in each draw as it brought."""
    size, me = dist.get_world_size(), dist.get_rank()
    seen = []

    def look(batch):
        seen.append(batch.flatten().tolist())
        return batch

    for _ in range(6):
        bn.shuffled(look, torch.full((4, 1), float(me)))
    assert all(len(batch) == 4 for batch in seen)
    assert {number for batch in seen for number in batch} == set(range(size))
    assert len({tuple(batch) for batch in seen}) > 1
    # All examples are somewhere: nothing is lost or doubled.
    counts = total(torch.bincount(torch.tensor(seen[0]).long(), minlength=size).double())
    assert counts.tolist() == [4.0] * size


@check()
def the_order_is_the_first_ranks():
    """The first rank's generator decides, whatever the others have."""
    me = dist.get_rank()
    seen = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(7 if me == 0 else 100 + len(seen))
        bn.shuffled(
            lambda batch: seen.append(batch.clone()) or batch,
            torch.arange(3.0).view(3, 1) + 3 * me,
            generator=generator,
        )
    assert torch.equal(seen[0], seen[1])


@check()
def shuffled_statistics_are_of_other_examples():
    """Behind a batch norm layer the answer to "whose statistics" changes, and gradients still reach every rank."""
    me = dist.get_rank()
    layer = nn.BatchNorm1d(2, dtype=torch.float64)
    x = (torch.randn(6, 2, dtype=torch.float64) + 10.0 * me).requires_grad_()
    own = layer(x)
    y = bn.shuffled(layer, x)
    assert not torch.allclose(own, y)
    y.square().sum().backward()
    assert bool(x.grad.isfinite().all())


@check()
def an_encoder_that_loses_examples_is_told():
    assert "the encoder made shape [1]" in raised(lambda: bn.shuffled(lambda batch: batch.sum().view(1), torch.ones(4)))
