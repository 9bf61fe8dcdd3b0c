"""Inputs of every layout give torch's numbers, in a layout that the next layer can use."""

import pytest
import torch
from layer_cases import OURS, STOCK, example, pair, same, same_buffers, same_steps, step

import batchnorm as bn

MODES = pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])


def spread(x):
    """The same values, two apart in memory."""
    return torch.stack([x, torch.full_like(x, 1e9)], -1)[..., 0]


# Name -> dimensions of the layer, and a function of the number of channels that makes the input.
LAYOUTS = {
    "rows": (1, lambda c: example(1, shape=(24, c))),
    "columns": (1, lambda c: example(1, shape=(24, c)).t().contiguous().t()),
    "sliced_rows": (1, lambda c: example(1, shape=(24, 2 * c))[:, ::2]),
    "expanded_rows": (1, lambda c: example(1, shape=(24, 1)).expand(24, c)),
    "sequence": (1, lambda c: example(1, shape=(6, c, 20))),
    "sequence_channels_last": (1, lambda c: example(1, shape=(6, c, 20)).transpose(1, 2).contiguous().transpose(1, 2)),
    "sequence_expanded": (1, lambda c: example(1, shape=(6, c, 1)).expand(6, c, 20)),
    "one_position": (1, lambda c: example(1, shape=(24, c, 1))),
    "image": (2, lambda c: example(2, shape=(4, c, 6, 5))),
    "image_channels_last": (2, lambda c: example(2, shape=(4, c, 6, 5), last=True)),
    "image_spread": (2, lambda c: spread(example(2, shape=(4, c, 6, 5)))),
    "image_spread_last": (2, lambda c: example(2, shape=(4, c, 6, 10), last=True)[..., ::2]),
    "image_of_wider_last": (2, lambda c: example(2, shape=(4, c + 3, 6, 5), last=True)[:, 1:-2]),
    "image_batch_sliced": (2, lambda c: example(2, shape=(8, c, 6, 5))[::2]),
    "image_channels_sliced": (2, lambda c: example(2, shape=(4, 2 * c, 6, 5))[:, ::2]),
    "image_transposed": (2, lambda c: example(2, shape=(4, c, 5, 6)).transpose(2, 3)),
    "image_flipped_axes": (2, lambda c: example(2, shape=(c, 4, 6, 5)).transpose(0, 1)),
    "image_expanded_batch": (2, lambda c: example(2, shape=(1, c, 6, 5)).expand(4, c, 6, 5)),
    "image_expanded_positions": (2, lambda c: example(2, shape=(4, c, 1, 1)).expand(4, c, 6, 5)),
    "pixel_channels_last": (2, lambda c: example(2, shape=(24, c, 1, 1), last=True)),
    "volume": (3, lambda c: example(3, shape=(3, c, 2, 4, 5))),
    "volume_channels_last": (3, lambda c: example(3, shape=(3, c, 2, 4, 5), last=True)),
    "volume_spread": (3, lambda c: spread(example(3, shape=(3, c, 2, 4, 5)))),
}


def unsafe_clone(x):
    """A leaf with the very strides of x (clone would make an expanded tensor dense)."""
    return x.detach().as_strided(x.size(), x.stride(), x.storage_offset()).requires_grad_()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("channels", [3, 40])
@MODES
def test_layouts(layout, channels, mode, path):
    dims, make = LAYOUTS[layout]
    stock, ours = pair(dims, channels)
    stock.train(mode), ours.train(mode)
    x = make(channels)
    results = []
    for layer in (stock, ours):
        torch.manual_seed(7)
        leaf = unsafe_clone(x)
        assert leaf.stride() == x.stride()
        y = layer(leaf)
        # The gradient comes back in the output's own layout, and once more in another.
        dy = torch.randn(y.shape)
        like = torch.empty_like(y).copy_(dy)
        results.append(
            [
                y,
                *torch.autograd.grad(y, [leaf, *layer.parameters()], like, retain_graph=True),
                *torch.autograd.grad(y, [leaf, *layer.parameters()], spread(dy)),
            ]
        )
    for actual, expected in zip(results[1], results[0], strict=True):
        same(actual, expected)
    same_buffers(ours, stock)


@pytest.mark.parametrize(
    "layout",
    [
        name
        for name in LAYOUTS
        if name not in ("columns", "sequence_channels_last", "image_transposed", "pixel_channels_last")
    ],
)
@pytest.mark.parametrize("channels", [3, 16])
def test_results_have_torchs_strides(layout, channels, path):
    dims, make = LAYOUTS[layout]
    x = unsafe_clone(make(channels))
    y, z = OURS[dims](channels)(x), STOCK[dims](channels)(x)
    assert y.stride() == z.stride()
    dy = torch.empty_like(z).normal_()
    assert torch.autograd.grad(y, x, dy)[0].stride() == torch.autograd.grad(z, x, dy)[0].stride()


@pytest.mark.parametrize("channels", [3, 16, 40])
def test_sequences_with_channels_last_are_dense_again(channels, path):
    x = example(1, shape=(6, channels, 20)).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    y = bn.BatchNorm1d(channels)(x)
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    for result in (y, dx):
        assert result.is_contiguous() or result.stride() == x.stride()


@pytest.mark.parametrize("activation", ["relu", "silu", "none"])
@pytest.mark.parametrize("residual_layout", ["image", "image_channels_last", "image_spread", "image_expanded_batch"])
@pytest.mark.parametrize("layout", ["image", "image_channels_last", "image_spread_last"])
@pytest.mark.parametrize("channels", [3, 40])
def test_residuals_of_another_layout(layout, residual_layout, channels, activation, path):
    stock, ours = pair(2, channels)
    ours.activation = activation
    x, r = (LAYOUTS[name][1](channels) for name in (layout, residual_layout))
    results = []
    for run in (
        lambda x, r: getattr(torch.nn.functional, activation, lambda z: z)(stock(x) + r),
        lambda x, r: ours(x, residual=r),
    ):
        torch.manual_seed(7)
        leaves = unsafe_clone(x), unsafe_clone(r)
        y = run(*leaves)
        results.append([y, *torch.autograd.grad(y, leaves, torch.randn(y.shape))])
    for actual, expected in zip(results[1], results[0], strict=True):
        same(actual, expected)


@MODES
def test_input_is_a_parameter_or_a_view_of_a_leaf(mode, path):
    stock, ours = pair(1)
    stock.train(mode), ours.train(mode)
    leaf = torch.nn.Parameter(torch.randn(16, 48))
    for layer in (stock, ours):
        layer(leaf[:, 1::2]).pow(3).sum().backward()
        layer.gradient, leaf.grad = leaf.grad, None
    same(ours.gradient, stock.gradient)
    whole = torch.nn.Parameter(torch.randn(16, 24))
    same(ours(whole), stock(whole))


@MODES
def test_bfloat16_channels_last(mode, path):
    for channels in (5, 40):
        stock, ours = pair(2, channels)
        x = example(2, torch.bfloat16, last=True, shape=(4, channels, 6, 5))
        same_steps(stock.train(mode), ours.train(mode), x, torch.randn_like(x))


def test_non_contiguous_parameters_and_buffers(path):
    stock, ours = pair(2)
    with torch.no_grad():
        apart = [torch.rand(24) + 0.5 for _ in range(4)]
        apart = [torch.stack([t, t], 1)[:, 0] for t in apart]
        ours.weight, ours.bias = map(torch.nn.Parameter, apart[:2])
        ours.running_mean, ours.running_var = apart[2:]
    stock.load_state_dict(ours.state_dict())
    assert not ours.weight.is_contiguous()
    x = example(2)
    for mode in (True, False):
        same_steps(stock.train(mode), ours.train(mode), x, torch.randn_like(x))


def test_a_gradient_of_another_layout_than_the_output(path):
    stock, ours = pair(2)
    x = example(2, last=True)
    dy = torch.randn(x.shape)
    for a, e in zip(step(ours, x, dy), step(stock, x, dy), strict=True):
        same(a, e)
