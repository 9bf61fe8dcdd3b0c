"""What the tests of ``fold`` share: models of one function, and a comparison by means of their own."""

import warnings

import torch
import torch.nn.functional as F
from torch import nn

import batchnorm as bn
from batchnorm.transforms.affine import is_norm
from zoo import perturb


class Run(nn.Module):
    """A model that is one function of itself and its arguments."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def made(make, dtype=torch.float64):
    torch.manual_seed(0)
    return perturb(make()).to(dtype).eval()


def drawn(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


def count(model):
    return sum(is_norm(module) for module in model.modules())


def folded_by_fx(model):
    """How many BN layers torch.fx folds; None where it cannot trace the model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.fx.experimental.optimization import fuse

        try:
            fused = fuse(model)
        except Exception:
            return None
    # Layers of a class of somebody's own are traced through: what is left of them is a function.
    functions = sum(node.op == "call_function" and node.target is F.batch_norm for node in fused.graph.nodes)
    plain = [sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in each.modules()) for each in (model, fused)]
    return plain[0] - plain[1] - functions


def outputs(model, x):
    with torch.no_grad():
        y = model(x)
    return list(y.values()) if isinstance(y, dict) else [y]


def assert_folds(model, x, left=()):
    """Fold, compare by our own means, and see that each BN layer is either gone or explained."""
    norms = {path for path, module in model.named_modules() if is_norm(module)}
    before = {k: v.clone() for k, v in model.state_dict().items()}
    folded, report = bn.fold(model, x)
    assert set(report.left) == set(left)
    assert set(report.paths) | set(report.left) == norms
    assert count(folded) == len(report.left)
    for a, b in zip(outputs(model, x), outputs(folded, x), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    return folded, report


def assert_left(model, x, path, reason):
    folded, report = bn.fold(model, x)
    assert reason in report.left[path]
    for a, b in zip(outputs(model.eval(), x), outputs(folded, x), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)
    return folded, report
