"""The same numbers as torch's, in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference_cases import ACTIVATIONS, SHAPES, TORCH_ACTIVATION, example, same, tensor
from torch.nn.utils.parametrizations import weight_norm as torch_weight_norm

from batchnorm import reference as ref


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm_is_torchs(rng, shape, activation, training):
    x, dy, residual, gamma, beta = example(rng, shape)
    mean, var = rng.normal(size=shape[1]), rng.uniform(0.5, 2.0, shape[1])
    leaves = [tensor(a) for a in (x, gamma, beta, residual)]
    running = torch.tensor(mean), torch.tensor(var)
    z = F.batch_norm(leaves[0], *running, leaves[1], leaves[2], training, momentum=0.3, eps=1e-3)
    y = TORCH_ACTIVATION[activation](z + leaves[3])
    y.backward(torch.tensor(dy))

    fixed = {} if training else {"mu": mean, "var": var}
    forward = ref.batch_norm_forward(x, gamma, beta, 1e-3, activation, residual, 0.2, **fixed)
    d = ref.batch_norm_backward(dy, x, gamma, beta, 1e-3, activation, residual, 0.2, **fixed)
    same(forward.y, y.detach())
    for ours, leaf in zip((d.dx, d.dgamma, d.dbeta, d.dresidual), leaves, strict=True):
        same(ours, leaf.grad)
    if training:
        updated = ref.update_running(mean, var, forward.mu, forward.var, forward.m, momentum=0.3)
        same(updated[0], running[0])
        same(updated[1], running[1])


TORCH_FAMILY = {
    "layer": lambda x, gamma, beta: F.layer_norm(x, x.shape[1:], gamma, beta, 1e-3),
    "instance": lambda x, gamma, beta: F.instance_norm(x, None, None, gamma, beta, True, 0.1, 1e-3),
    "group": lambda x, gamma, beta: F.group_norm(x, 2, gamma, beta, 1e-3),
    "rms": lambda x, gamma, beta: F.rms_norm(x, x.shape[1:], gamma, 1e-3) + beta,
}


@pytest.mark.parametrize("shape", SHAPES[1:])
@pytest.mark.parametrize("name", TORCH_FAMILY)
def test_the_family_is_torchs(rng, name, shape):
    x, dy = rng.normal(1.0, 2.0, shape), rng.normal(size=shape)
    parameters = shape[1:] if name in ("layer", "rms") else shape[1:2]
    gamma, beta = rng.normal(size=parameters), rng.normal(size=parameters)
    leaves = [tensor(a) for a in (x, gamma, beta)]
    y = TORCH_FAMILY[name](*leaves)
    y.backward(torch.tensor(dy))

    same(ref.normalize(x, name, gamma, beta, 1e-3, groups=2).y, y.detach())
    d = ref.normalize_backward(dy, x, name, gamma, beta, 1e-3, groups=2)
    for ours, leaf in zip((d.dx, d.dgamma, d.dbeta), leaves, strict=True):
        same(ours, leaf.grad)


@pytest.mark.parametrize(
    ("layer", "dim", "axes"),
    [
        (lambda: torch.nn.Linear(5, 3, bias=False), 0, None),
        (lambda: torch.nn.Linear(5, 3, bias=False), 1, (0,)),
        (lambda: torch.nn.Conv2d(2, 4, 3, bias=False), 0, None),
        (lambda: torch.nn.ConvTranspose2d(2, 4, 3, bias=False), 1, (0, 2, 3)),
    ],
)
def test_weight_norm_is_torchs(rng, layer, dim, axes):
    module = torch_weight_norm(layer().double(), dim=dim)
    parts = module.parametrizations.weight
    shapes = parts.original0.shape, parts.original1.shape
    g, v = (rng.normal(size=tuple(shape)) for shape in shapes)
    dw = rng.normal(size=v.shape)
    with torch.no_grad():
        parts.original0.copy_(torch.tensor(g))
        parts.original1.copy_(torch.tensor(v))
    w = module.weight
    w.backward(torch.tensor(dw))

    same(ref.weight_norm(v, g, axes), w.detach())
    dv, dg = ref.weight_norm_backward(dw, v, g, axes)
    same(dv, parts.original1.grad)
    same(dg, parts.original0.grad)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_torchs_at_kinks_and_far_out(activation):
    z = np.array([-800.0, -30.0, -1.0, -0.0, 0.0, 1e-300, 3.0, 6.0, 6.5, 800.0])
    leaf = tensor(z)
    y = TORCH_ACTIVATION[activation](leaf)
    y.sum().backward()
    value, derivative = (f(z, 0.2) for f in ref.ACTIVATIONS[activation])
    np.testing.assert_allclose(value, y.detach(), rtol=1e-12)
    np.testing.assert_allclose(derivative, leaf.grad, rtol=1e-11)
