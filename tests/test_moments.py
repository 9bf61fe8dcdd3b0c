"""Moments as values: merging, and what running statistics keep of them."""

import pytest
import torch

from batchnorm import reference as ref
from batchnorm.errors import BatchNormError
from batchnorm.functional import Moments, batch_norm, moments
from batchnorm.moments import merged, replace_if_finite, update_running


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def stacked(parts):
    return Moments(*(torch.stack(values) for values in zip(*parts, strict=True)))


@pytest.mark.parametrize("sizes", [(5, 7), (1, 1, 30), (4, 0, 9), (1000, 1), (6,)], ids=str)
def test_merging_is_exact(sizes):
    parts = [torch.randn(n, 3, dtype=torch.float64) * 3 + 10 * i for i, n in enumerate(sizes)]
    count, mean, var = merged(stacked([moments(p) for p in parts]))
    whole = torch.cat(parts)
    assert count == len(whole)
    torch.testing.assert_close(mean, whole.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(var, whole.var(0, correction=0), rtol=1e-12, atol=1e-12)
    expected = ref.merged_statistics([p.numpy() for p in parts if len(p)])
    torch.testing.assert_close(var, torch.from_numpy(expected[1]), rtol=1e-12, atol=1e-12)


def test_means_far_apart_do_not_cancel():
    parts = [torch.randn(50, 2, dtype=torch.float64) + 1e8, torch.randn(20, 2, dtype=torch.float64) + 1e8 + 1]
    _, _, var = merged(stacked([moments(p) for p in parts]))
    torch.testing.assert_close(var, torch.cat(parts).var(0, correction=0), rtol=1e-7, atol=0)


def test_nothing_merges_to_nothing():
    count, mean, var = merged(stacked([moments(torch.zeros(0, 3)), moments(torch.zeros(0, 3))]))
    assert count == 0
    assert not mean.any()
    assert not var.any()


def test_what_has_no_values_may_be_nan():
    parts = Moments(torch.tensor([2.0, 0.0]), torch.tensor([[1.0], [torch.nan]]), torch.tensor([[3.0], [torch.nan]]))
    assert [part.tolist() for part in merged(parts)] == [2.0, [1.0], [3.0]]


def test_moments_without_groups_stay():
    found = moments(torch.randn(4, 3))
    assert merged(found) is found


@pytest.mark.parametrize("momentum", [0.0, 0.1, 1.0])
def test_running_statistics_by_the_reference(momentum):
    x = torch.randn(6, 3, 4) * 2 + 1
    mean, var = torch.randn(3), torch.rand(3) + 0.5
    batch = ref.normalize(x.numpy(), "batch")
    expected = ref.update_running(mean.numpy(), var.numpy(), batch.mu, batch.var, batch.m, momentum)
    assert update_running(mean, var, moments(x), momentum)
    for actual, e in zip((mean, var), expected, strict=True):
        torch.testing.assert_close(actual.double(), torch.from_numpy(e), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_values_move_nothing(count):
    mean, var = torch.zeros(3), torch.ones(3)
    assert update_running(mean, var, moments(torch.randn(count, 3)), 0.5)
    assert torch.equal(mean, torch.zeros(3))
    assert torch.equal(var, torch.ones(3))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", ["mean", "var"])
def test_all_or_none(bad, which):
    mean, var = torch.zeros(3), torch.ones(3)
    batch = Moments(torch.tensor(5.0), torch.ones(3), torch.ones(3))
    getattr(batch, which)[1] = bad
    assert not update_running(mean, var, batch, 0.5)
    assert torch.equal(mean, torch.zeros(3))
    assert torch.equal(var, torch.ones(3))


def test_a_statistic_that_was_not_finite_before_is_not_the_batchs_fault():
    mean, var = torch.tensor([0.0, torch.nan]), torch.ones(2)
    assert replace_if_finite(mean, var, torch.tensor([1.0, torch.nan]), torch.full((2,), 2.0))
    assert mean[0] == 1
    assert torch.equal(var, torch.full((2,), 2.0))


def test_a_variance_beyond_float32_is_refused():
    mean, var = torch.zeros(1), torch.ones(1)
    batch = Moments(*(torch.tensor(v, dtype=torch.float64) for v in (9.0, [1e20], [1e40])))
    assert not update_running(mean, var, batch, 0.1)
    assert var.item() == 1


def test_moments_of_a_batch():
    x = torch.randn(5, 3, 4, requires_grad=True)
    count, mean, var = moments(x)
    assert (count.item(), mean.dtype, mean.requires_grad) == (20.0, torch.float64, False)
    torch.testing.assert_close(mean, x.detach().double().mean((0, 2)))
    torch.testing.assert_close(var, x.detach().double().var((0, 2), correction=0))
    count, mean, var = moments(x, groups=2)
    assert count.tolist() == [8.0, 12.0]
    torch.testing.assert_close(mean[1], x.detach()[2:].double().mean((0, 2)))
    assert [part.tolist() for part in moments(torch.zeros(0, 3))] == [0.0, [0.0] * 3, [0.0] * 3]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"groups": 0}, "moments: groups is 0; use a whole number from 1 up"),
        ({"groups": 2.0}, "moments: groups is 2.0"),
        ({"groups": 6}, "moments: 5 samples do not fall into 6 groups"),
        ({"mask": torch.ones(5)}, "moments: the mask has dtype torch.float32"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "torch"])
def test_moments_of_what_is_no_batch(arguments, sentence, dtype):
    with pytest.raises(BatchNormError, match=sentence):
        moments(torch.randn(5, 20, 4, dtype=dtype), **arguments)


def test_moments_want_channels():
    with pytest.raises(BatchNormError, match="moments: expected an input of at least 2 dimensions"):
        moments(torch.randn(5))


FIT = moments(torch.ones(4, 20))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"groups": 3}, "4 samples in 3 groups leave a group with 1; use fewer groups"),
        ({"groups": 5}, "4 samples do not fall into 5 groups"),
        ({"groups": 0}, "groups is 0; use a whole number"),
        ({"groups": 1.5}, "groups is 1.5; use a whole number"),
        (
            {"moments": moments(torch.ones(4, 3))},
            r"shapes \[\], \[3\], \[3\], expected \[\], \[20\], \[20\]; use functional",
        ),
        ({"moments": FIT, "groups": 2}, r"shapes \[\], \[20\], \[20\], expected \[2\], \[2, 20\], \[2, 20\]"),
        ({"moments": FIT._replace(count=torch.ones(20))}, r"shapes \[20\], \[20\], \[20\], expected \[\]"),
        ({"moments": FIT._replace(var=torch.ones(1))}, r"shapes \[\], \[20\], \[1\]"),
        ({"reduce": torch.clone}, "reduce needs the merged moments, and one group; pass moments="),
        ({"reduce": torch.clone, "moments": FIT, "groups": 2}, "reduce needs the merged moments, and one group"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "torch"])
def test_what_does_not_fit_is_refused(arguments, sentence, dtype):
    with pytest.raises(BatchNormError, match=f"batch_norm: .*{sentence}"):
        batch_norm(torch.randn(4, 20, dtype=dtype), None, None, training=True, **arguments)
