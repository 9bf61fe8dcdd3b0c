"""Padding: outputs and gradients are those of the same values without it, whatever stands there."""

import copy

import pytest
import torch
from layer_cases import same

import batchnorm as bn

HOSTILE = [0.0, 1e30, float("inf"), float("nan")]


def padded(lengths, size, hostile, channels=20):
    """Sequences of some lengths, as one batch with padding."""
    sequences = [torch.randn(n, channels) * 2 + 1 for n in lengths]
    x = torch.full((len(lengths), channels, size), hostile)
    for i, sequence in enumerate(sequences):
        x[i, :, : len(sequence)] = sequence.T
    return x, torch.cat(sequences)


def marked(y, lengths):
    return torch.cat([y[i, :, :n].T for i, n in enumerate(lengths)])


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("lengths", [(30, 17, 1, 5), (30, 30, 30, 30), (2, 0, 0, 30)], ids=str)
def test_as_if_there_were_no_padding(lengths, activation, hostile, path):
    x, values = padded(lengths, 30, hostile)
    masked = bn.MaskedBatchNorm(20, activation=activation)
    plain = bn.BatchNorm1d(20, activation=activation)
    x.requires_grad_(), values.requires_grad_()
    y, expected = masked(x, torch.tensor(lengths)), plain(values)
    same(marked(y, lengths), expected, 1e-5)
    dy = torch.randn(len(values), 20)
    full, _ = padded(lengths, 30, hostile)  # an upstream gradient on the padding does not matter either
    for i, part in enumerate(dy.split(lengths)):
        full[i, :, : lengths[i]] = part.T
    y.backward(full)
    expected.backward(dy)
    same(marked(x.grad, lengths), values.grad, 1e-4)
    for name in ("weight", "bias"):
        same(getattr(masked, name).grad, getattr(plain, name).grad, 1e-5)
    same(masked.running_mean, plain.running_mean, 1e-5)
    same(masked.running_var, plain.running_var, 1e-5)
    outside = torch.arange(30) >= torch.tensor(lengths)[:, None]
    for t in (y, x.grad):
        assert not t.detach().movedim(1, -1)[outside].any()


def test_every_way_to_say_the_same(path):
    layer, x = bn.MaskedBatchNorm(20, update=False), torch.randn(3, 20, 4, 6)
    heights, widths = torch.tensor([4, 1, 3]), torch.tensor([6, 6, 2])
    mask = (torch.arange(4)[:, None] < heights[:, None, None]) & (torch.arange(6) < widths[:, None, None])
    expected = layer(x, mask)
    assert expected[2, :, :3, :2].any()
    assert not expected[2, :, 3:].any()
    for same_mask in (
        mask.unsqueeze(1),
        torch.stack((heights, widths), 1),
        torch.stack((heights, widths), 1).to(torch.int16),
        mask.transpose(1, 2).contiguous().transpose(1, 2),
    ):
        assert torch.equal(layer(x, same_mask), expected)


def test_the_drop_in_layers_take_masks_too(path):
    x, lengths = torch.randn(4, 20, 18), torch.tensor([18, 3, 7, 9])
    residual = torch.randn_like(x)
    a, b = bn.MaskedBatchNorm(20, activation="relu"), bn.BatchNorm1d(20, activation="relu")
    assert torch.equal(a(x, lengths, residual), b(x, residual, lengths))
    assert torch.equal(a(x, residual=residual, mask=lengths), b(x, mask=lengths, residual=residual))
    for name, buffer in a.named_buffers():
        assert torch.equal(buffer, b.get_buffer(name))
    image = torch.randn(3, 20, 4, 6)
    y = bn.BatchNorm2d(20)(image, mask=torch.tensor([[4, 6], [1, 2], [2, 3]]))
    assert not y[1, :, 1:].any()


def test_a_mask_that_marks_everything_changes_nothing(path):
    x = torch.randn(6, 20, 18)
    own = {"update": False}  # else the second pass of renormalisation would correct towards other statistics
    for layer in (bn.BatchNorm1d(20, **own), bn.GhostBatchNorm(20, 3, **own), bn.BatchRenorm(20, 2.0, 1.0, **own)):
        same(layer(x, mask=torch.ones(6, 18, dtype=torch.bool)), layer(x), 1e-5)


def test_padding_of_the_residual_does_not_matter(path):
    layer = bn.MaskedBatchNorm(20, activation="silu")
    x, lengths = torch.randn(4, 20, 18), torch.tensor([18, 3, 7, 9])
    outside = (torch.arange(18) >= lengths[:, None]).unsqueeze(1).expand_as(x)
    results = []
    for hostile in (0.0, float("nan")):
        residual = torch.randn(4, 20, 18, generator=torch.Generator().manual_seed(1))
        residual[outside] = hostile
        residual.requires_grad_()
        layer.zero_grad()
        y = layer(x, lengths, residual)
        y.sum().backward()
        results.append([y, residual.grad, layer.weight.grad, layer.bias.grad])
    for clean, hostile in zip(*results, strict=True):
        assert torch.equal(clean, hostile)
    assert not results[1][1][outside].any()


def test_without_a_mask():
    with pytest.raises(bn.BatchNormError, match="MaskedBatchNorm needs to know what is padding; pass a boolean mask"):
        bn.MaskedBatchNorm(20)(torch.randn(4, 20, 18))


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        (torch.ones(4, 17, dtype=torch.bool), r"has dtype torch.bool and shape \[4, 17\]; the input has shape"),
        (torch.ones(4, 20, 18, dtype=torch.bool), r"shape \[4, 20, 18\]"),
        (torch.ones(4, 18), r"has dtype torch.float32 and shape \[4, 18\]"),
        (torch.ones(4, 18, dtype=torch.uint8), r"has dtype torch.uint8 and shape \[4, 18\]"),
        (torch.tensor([1, 2, 3]), r"has dtype torch.int64 and shape \[3\]"),
        ([18, 3, 7, 9], "is of type list"),
        (torch.ones(4, 18, dtype=torch.bool, device="meta"), "is on meta, the input on cpu"),
    ],
)
@pytest.mark.parametrize("layer", [bn.MaskedBatchNorm, bn.BatchNorm1d, bn.BatchRenorm, bn.GhostBatchNorm])
def test_wrong_masks(layer, mask, sentence, path):
    with pytest.raises(bn.BatchNormError, match=f"{layer.__name__}: the mask .*{sentence}.*boolean tensor of shape"):
        layer(20)(torch.randn(4, 20, 18), mask=mask)


@pytest.mark.parametrize("left", [0, 1])
@pytest.mark.parametrize("layer", [bn.MaskedBatchNorm, bn.BatchNorm1d, bn.BatchRenorm])
def test_masks_that_leave_too_little(layer, left, path):
    layer = layer(20)
    x, mask = torch.randn(4, 20, 18), torch.zeros(4, 18, dtype=torch.bool)
    mask[0, :left] = True
    with pytest.raises(bn.BatchNormError, match=f"more than 1 value .* mask leaves {left} of the 72 in the batch"):
        layer(x, mask=mask)
    assert not layer.running_mean.any()
    assert not layer.eval()(x, mask=mask)[1:].any()  # with running statistics one value, or none, is enough


def test_a_group_that_the_mask_leaves_too_little():
    mask = torch.ones(5, 18, dtype=torch.bool)
    mask[2:] = False
    with pytest.raises(bn.BatchNormError, match="the mask leaves 0 of the 54 in a group"):
        bn.SplitBatchNorm(20)(torch.randn(5, 20, 18), mask=mask)


# ---- A mask for a whole model ------------------------------------------------------------------------------

KINDS = {
    "batch": lambda: bn.BatchNorm1d(20),
    "masked": lambda: bn.MaskedBatchNorm(20),
    "sync": lambda: bn.SyncBatchNorm(20),
    "ghost": lambda: bn.GhostBatchNorm(20, virtual_batch_size=2),
    "split": lambda: bn.SplitBatchNorm(20, splits=2),
    "renorm": lambda: bn.BatchRenorm(20, rmax=2.0, dmax=1.0),
    "frozen": lambda: bn.FrozenBatchNorm(20),
    "domain": lambda: bn.DomainBatchNorm(20, domains=("only",)),
    "converted": lambda: bn.convert(torch.nn.Sequential(torch.nn.BatchNorm1d(20)), "masked")[0],
}


@pytest.mark.parametrize("kind", KINDS)
def test_use_mask_tells_every_batch_norm_what_is_padding(kind):
    torch.manual_seed(0)
    layer, lengths = KINDS[kind](), torch.tensor([9, 4, 7, 2])
    x = torch.randn(4, 20, 9)
    twin = copy.deepcopy(layer)
    direct = twin[0] if kind == "converted" else twin
    expected = direct(x, mask=lengths)
    model = torch.nn.Sequential(torch.nn.Identity(), layer)
    with bn.use_mask(model, lengths):
        y = model(x)
    assert torch.equal(y, expected)
    assert not y[1, :, 4:].any()
    for after, before in zip(layer.buffers(), twin.buffers(), strict=True):
        assert torch.equal(after, before)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_use_mask_leaves_a_mask_that_is_given():
    layer, x = bn.BatchNorm1d(20, update=False), torch.randn(4, 20, 9)
    lengths, others = torch.tensor([9, 4, 7, 2]), torch.tensor([1, 9, 9, 3])
    with bn.use_mask(layer, others):
        assert torch.equal(layer(x, mask=lengths), layer(x, None, lengths))
        y = layer(x, mask=lengths)
    assert torch.equal(y, layer(x, mask=lengths))
    assert not torch.equal(y, layer(x, mask=others))


def test_use_mask_with_strides_takes_a_function():
    model = torch.nn.Sequential(
        bn.MaskedBatchNorm(20), torch.nn.Conv1d(20, 20, 2, stride=2, bias=False), bn.MaskedBatchNorm(20)
    )
    lengths = torch.tensor([8, 4, 6, 2])
    with bn.use_mask(model, lambda x: lengths * x.shape[-1] // 8):
        y = model(torch.randn(4, 20, 8))
    assert not y[1, :, 2:].any()
    assert y[1, :, :2].all()


def test_use_mask_is_seen_by_what_watches_inputs():
    layer, x, lengths = bn.MaskedBatchNorm(20), torch.randn(4, 20, 9), torch.tensor([9, 4, 7, 2])
    twin = copy.deepcopy(layer)
    twin(x, lengths)
    with bn.accumulate(layer), bn.use_mask(layer, lengths):
        layer(x)
    torch.testing.assert_close(layer.running_var, twin.running_var)


def test_use_mask_refuses_layers_that_count_padding_and_cannot_be_told():
    model = torch.nn.Sequential(torch.nn.Conv1d(20, 20, 1), torch.nn.BatchNorm1d(20))
    message = r'1 is a BatchNorm1d, which takes no mask.*convert\(model, "masked"\)'
    with pytest.raises(bn.BatchNormError, match=message), bn.use_mask(model, torch.tensor([9])):
        model(torch.randn(1, 20, 9))


def test_use_mask_in_a_batch_of_several_domains():
    layer, x, lengths = bn.DomainBatchNorm(20, update=False), torch.randn(4, 20, 9), torch.tensor([9, 4, 7, 2])
    expected = layer(x, domain=[0, 1, 0, 1], mask=lengths)
    with bn.use_mask(layer, lengths):
        assert torch.equal(layer(x, domain=[0, 1, 0, 1]), expected)


def test_use_mask_is_over_after_an_exception():
    layer = bn.MaskedBatchNorm(20)
    with pytest.raises(bn.BatchNormError, match="the mask has"), bn.use_mask(layer, torch.tensor([9, 4])):
        layer(torch.randn(4, 20, 9))
    with pytest.raises(bn.BatchNormError, match=r"needs to know what is padding.*use_mask\(model, mask\)"):
        layer(torch.randn(4, 20, 9))
