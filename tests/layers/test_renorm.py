"""Batch renormalisation: what training sees is what inference will see, as far as r and d may go."""

import copy

import numpy as np
import pytest
import torch
from layer_cases import LAST, randomise, same, same_buffers

import batchnorm as bn
from batchnorm import reference as ref

FREE = {"rmax": 1e6, "dmax": 1e6}  # nothing is clipped


def started(channels=20, **options):
    """A layer that has seen something, so that its statistics are near those of the batches."""
    return randomise(bn.BatchRenorm(channels, **options))


@pytest.mark.parametrize("affine", [True, False])
def test_without_corrections_it_is_batch_norm(affine, path):
    """r = 1 and d = 0, as by default in the first 5,000 steps: output, gradients and statistics."""
    for options in ({}, {"rmax": 1.0, "dmax": 0.0}):
        ours = bn.BatchRenorm(20, affine=affine, **options)
        plain = bn.BatchNorm1d(20, affine=affine, momentum=0.01)
        randomise(plain)
        ours.load_state_dict(plain.state_dict())
        x = torch.randn(6, 20, 18, requires_grad=True)
        y, expected = ours(x), plain(x)
        exact = {"rtol": 0, "atol": 0} if path != "torch" else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(y, expected, **exact)
        dy = torch.randn_like(x)
        for a, e in zip(
            torch.autograd.grad(y, [x, *ours.parameters()], dy),
            torch.autograd.grad(expected, [x, *plain.parameters()], dy),
            strict=True,
        ):
            same(a, e, 1e-5)
        same_buffers(ours, plain)


@pytest.mark.parametrize("shape", [(8, 20), (4, 20, 18), (3, 20, 4, 5)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_unclipped_training_is_inference_before_the_update(shape, masked, path):
    layer = started(**FREE, activation="silu")
    before = copy.deepcopy(layer).eval()
    x = torch.randn(shape) * 3 + 2
    mask = torch.rand(shape[0], *shape[2:]) > 0.3 if masked else None
    same(layer(x, mask=mask), before(x, mask=mask), 1e-5)
    assert not torch.equal(layer.running_mean, before.running_mean)
    # And what it learned is the batch's own, not the corrected one's.
    values = x.movedim(1, -1)[mask] if masked else x.movedim(1, -1).reshape(-1, 20)
    same(layer.running_mean, 0.99 * before.running_mean + 0.01 * values.mean(0), 1e-5)


def by_hand(x, layer, rmax, dmax, dy, activation="none"):
    """By reference.py: r and d are constants, and xhat * r + d is batch norm with gamma r and gamma d + beta."""
    x, dy = x.detach().double().numpy(), dy.double().numpy()
    gamma, beta, mean, var = (
        t.detach().double().numpy() for t in (layer.weight, layer.bias, layer.running_mean, layer.running_var)
    )
    batch = ref.batch_norm_forward(x, eps=layer.eps)
    sigma = np.sqrt(var + layer.eps)
    r = np.clip(np.sqrt(batch.var + layer.eps) / sigma, 1 / rmax, rmax)
    d = np.clip((batch.mu - mean) / sigma, -dmax, dmax)
    arguments = (gamma * r, gamma * d + beta, layer.eps, activation)
    y = ref.batch_norm_forward(x, *arguments).y
    back = ref.batch_norm_backward(dy, x, *arguments)
    clipped = (r == rmax) | (r == 1 / rmax), np.abs(d) == dmax
    return [y, back.dx, r * back.dgamma + d * back.dbeta, back.dbeta], clipped


@pytest.mark.parametrize(("rmax", "dmax"), [(1e6, 1e6), (1.2, 0.4), (1.0, 0.3), (1.1, 0.0)])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_output_and_gradients_by_the_paper(rmax, dmax, activation, path):
    layer = started(rmax=rmax, dmax=dmax, activation=activation)
    x, dy = (torch.randn(5, 20, 18) * 1.1 + 0.3).requires_grad_(), torch.randn(5, 20, 18)
    expected, clipped = by_hand(x, layer, rmax, dmax, dy, activation)
    if (rmax, dmax) == (1.2, 0.4):  # some channels of each are clipped, and some are not
        assert [0 < c.sum() < 20 for c in clipped] == [True, True]
    y = layer(x)
    actual = [y, *torch.autograd.grad(y, [x, layer.weight, layer.bias], dy)]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.detach().double(), torch.from_numpy(e), rtol=1e-4, atol=1e-4 * np.abs(e).max())


@pytest.mark.parametrize("options", [{"affine": False}, {"bias": False}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_with_fewer_parameters(options, dtype, path):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    layer = started(**FREE, **options).to(wide)
    before = copy.deepcopy(layer).eval()
    x = torch.randn(5, 20, 18).to(dtype)
    y = layer(x)
    assert y.dtype == dtype
    # Corrections are not rounded to the 8 bits of a bfloat16; only the output is.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float64: 1e-6}[dtype]
    expected = before(x.to(wide))
    torch.testing.assert_close(y.to(wide), expected, rtol=tolerance, atol=tolerance * (3 if path == "torch" else 1))


def test_parameters_in_bfloat16(path):
    layer = started(rmax=3.0, dmax=5.0).to(torch.bfloat16)
    x = torch.randn(5, 20, 18, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == layer.weight.grad.dtype == layer.running_mean.dtype == torch.bfloat16


def test_limits_follow_the_batches_seen():
    layer = bn.BatchRenorm(20)
    seen = {0: (1.0, 0.0), 5000: (1.0, 0.0), 15000: (1.0 + 2 * 10000 / 35000, 2.5), 25000: (1 + 2 * 20000 / 35000, 5.0)}
    for step, limits in {**seen, 40000: (3.0, 5.0), 10**6: (3.0, 5.0)}.items():
        layer.num_batches_tracked.fill_(step)
        assert layer.limits() == pytest.approx(limits)


def test_a_schedule_is_followed(path):
    """Begun as batch norm, the layer comes to see what inference sees."""
    layer = bn.BatchRenorm(20, rmax=bn.Ramp(2, 4, 1.0, 1e6), dmax=bn.Ramp(2, 4, 0.0, 1e6))
    for step in range(6):
        x = torch.randn(6, 20, 18) * 3 + 2
        before = copy.deepcopy(layer)
        y = layer(x)
        if step <= 2:
            same(y, bn.functional.batch_norm(x, None, None, training=True), 1e-5)
        else:
            same(y, before.eval()(x), 1e-5)
    assert int(layer.num_batches_tracked) == 6


def test_any_function_is_a_schedule(path):
    steps = []
    layer = bn.BatchRenorm(20, rmax=lambda step: steps.append(step) or 2.0, dmax=0.0)
    for _ in range(3):
        layer(torch.randn(6, 20, 18))
    assert steps == [0, 1, 2]
    assert layer.limits() == (2.0, 0.0)


@pytest.mark.parametrize("step", [-5, 0, 10, 12.5, 15, 20, 99])
def test_ramp(step):
    assert bn.Ramp(10, 20, 1.0, 3.0)(step) == pytest.approx(np.interp(step, [10, 20], [1.0, 3.0]))


def test_a_ramp_of_no_length_is_a_step():
    assert [bn.Ramp(5, 5, 1.0, 3.0)(step) for step in (4, 5, 6)] == [1.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rmax": 0.5}, "rmax is 0.5; use a number from 1 up, or a function"),
        ({"dmax": -1.0}, "dmax is -1.0; use a number from 0 up"),
        ({"rmax": float("nan")}, "rmax is nan"),
        ({"rmax": "3"}, "rmax is '3'"),
        ({"track_running_stats": False}, "corrects towards running statistics"),
    ],
)
def test_wrong_options(options, sentence):
    with pytest.raises(bn.BatchNormError, match=f"BatchRenorm: .*{sentence}"):
        bn.BatchRenorm(20, **options)


def test_one_value_per_channel(path):
    layer = bn.BatchRenorm(20)
    with pytest.raises(bn.BatchNormError, match="BatchRenorm: Expected more than 1 value per channel"):
        layer(torch.randn(1, 20))
    assert int(layer.num_batches_tracked) == 0


def test_both_layouts(path):
    layer = started(rmax=1.2, dmax=0.3, update=False)
    x = torch.randn(5, 20, 4, 3)
    y = layer(x.contiguous(memory_format=LAST[2]))
    assert y.is_contiguous(memory_format=LAST[2])
    same(y, layer(x), 1e-6)


def test_a_ramp_of_a_tensor():
    ramp = bn.Ramp(10, 20, 1.0, 3.0)
    for step in (0, 10, 13, 20, 50):
        assert ramp(torch.tensor(step)).item() == pytest.approx(ramp(step))


def test_limits_that_change_work_under_vmap():
    layer = bn.BatchRenorm(3, rmax=bn.Ramp(0, 4, 1.0, 3.0), dmax=bn.Ramp(0, 4, 0.0, 5.0))
    x = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0))
    states = [{name: tensor + 0.5 * at for name, tensor in layer.state_dict().items()} for at in (0, 1)]
    for at, state in enumerate(states):
        state["num_batches_tracked"] = torch.tensor(at)
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    found = torch.func.vmap(lambda state, x: torch.func.functional_call(layer, state, (x,)))(stacked, x)
    for at, state in enumerate(states):
        layer.load_state_dict(state)
        torch.testing.assert_close(found[at], layer(x[at]))
