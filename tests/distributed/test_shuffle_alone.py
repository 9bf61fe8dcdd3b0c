"""Shuffling in one process: the order comes back, and only a layer that splits the batch notices."""

import pytest
import torch

import batchnorm as bn


def test_outputs_and_gradients_come_back_in_order():
    torch.manual_seed(0)
    x = torch.randn(7, 3, requires_grad=True)
    weight = torch.randn(3, 2)
    y = bn.shuffled(lambda batch: batch @ weight, x)
    torch.testing.assert_close(y, x @ weight)
    dy = torch.randn(7, 2)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], dy @ weight.T)


def test_the_encoder_sees_another_order_which_the_generator_decides():
    x, seen = torch.arange(32.0).view(32, 1), []
    for seed in (3, 3, 4):
        bn.shuffled(lambda batch: seen.append(batch) or batch, x, generator=torch.Generator().manual_seed(seed))
    assert not torch.equal(seen[0], x)
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


def test_a_layer_that_splits_the_batch_notices_and_a_plain_one_does_not():
    torch.manual_seed(0)
    x = torch.cat([torch.randn(8, 3, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64) + 5])
    plain, split = bn.BatchNorm1d(3, dtype=torch.float64), bn.SplitBatchNorm(3, 2, dtype=torch.float64)
    torch.testing.assert_close(bn.shuffled(plain, x), plain(x))
    assert not torch.allclose(bn.shuffled(split, x), split(x))


@pytest.mark.parametrize(
    ("encoder", "x", "message"),
    [
        (lambda batch: batch[:2], torch.ones(4, 1), r"made shape \[2, 1\] of a batch of 4"),
        (lambda batch: (batch, batch), torch.ones(4, 1), "made a tuple"),
        (lambda batch: batch, torch.tensor(1.0), "single number"),
    ],
)
def test_bad_input_gets_a_sentence(encoder, x, message):
    with pytest.raises(bn.BatchNormError, match=message):
        bn.shuffled(encoder, x)
