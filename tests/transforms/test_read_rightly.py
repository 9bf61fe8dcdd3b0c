"""Verbs on models whose layouts torch's backward pass misreads: certificates compare with gradients that are right."""

import copy

import pytest
import torch
from torch import nn

import batchnorm as bn


class Spectrogram(nn.Module):
    """Frequencies become channels and go back, as in audio transformers: the width of what BN reads is 1."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(6)
        self.mix = nn.Conv2d(1, 3, 3, padding=1)
        self.after = nn.BatchNorm2d(3)

    def forward(self, x):
        x = self.norm(x.transpose(1, 3)).transpose(1, 3)
        return self.after(self.mix(x)).relu()


class Rightly(nn.Module):
    """The same in elementary operations, around the same parameters."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        def norm(layer, x):
            axes, shape = (0, 2, 3), (1, -1, 1, 1)
            if layer.training:
                mean, var = x.mean(axes), x.var(axes, correction=0)
            else:
                mean, var = layer.running_mean, layer.running_var
            z = (x - mean.view(shape)) / (var.view(shape) + layer.eps).sqrt()
            return z * layer.weight.view(shape) + layer.bias.view(shape)

        m = self.model
        x = norm(m.norm, x.transpose(1, 3)).transpose(1, 3)
        return norm(m.after, m.mix(x)).relu()


def gradients(model, x, mode):
    model.train(mode)
    y = model(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    named = dict(model.named_parameters())
    found = torch.autograd.grad((y * weights.to(y)).sum(), list(named.values()), allow_unused=True)
    return dict(zip((name.removeprefix("model.") for name in named), found, strict=True))


VERBS = {
    "fuse": lambda model, x: bn.fuse(model, x),
    "drop_bias": lambda model, x: bn.drop_bias(model, x),
    "sync": lambda model, x: bn.convert(model, "sync", example=x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("samples", [1, 2, 5])
def test_the_gradients_of_the_result_are_right(verb, dtype, samples):
    torch.manual_seed(0)
    model, x = Spectrogram().to(dtype), torch.randn(samples, 1, 9, 6).to(dtype)
    changed, report = VERBS[verb](model, x)
    assert report.gradients.relative <= (1e-4 if dtype is torch.float32 else 1e-9)
    if verb == "drop_bias":
        assert changed.mix.bias is None
        return  # its layers are still torch's
    for mode in (True, False):
        found = gradients(copy.deepcopy(changed).double(), x.double(), mode)
        expected = gradients(Rightly(copy.deepcopy(model).double()), x.double(), mode)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-6)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
