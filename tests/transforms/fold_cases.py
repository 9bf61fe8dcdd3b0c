"""What the tests of ``fold`` share: models of one function, and a comparison by means of their own."""

import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import batchnorm as bn
from batchnorm.calling import call_with
from batchnorm.nested import tensors_in
from batchnorm.transforms.affine import is_norm
from batchnorm.transforms.outputs import difference
from peer_models import subject
from zoo import (
    Run,  # noqa: F401
    perturb,
)


def made(make, dtype=torch.float64):
    torch.manual_seed(0)
    return perturb(make()).to(dtype).eval()


def drawn(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


def without_beta(norm):
    """What ``bias=False`` makes of a norm, from torch 2.13 on."""
    norm.bias = None
    return norm


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
    # Layers of a user's class are traced through: what is left of them is a function.
    functions = sum(node.op == "call_function" and node.target is F.batch_norm for node in fused.graph.nodes)
    plain = [sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in each.modules()) for each in (model, fused)]
    return plain[0] - plain[1] - functions


@dataclass(frozen=True)
class Row:
    """How one architecture folds: by us and by torch.fx, and how far off the outputs are."""

    family: str
    name: str
    norms: int
    folded: int
    by_fx: int | None  # None: it cannot trace the model
    float32: float  # the largest relative error
    float64: float
    left: dict


def measured(family, name):
    """Fold a peer's model with perturbed statistics, in both types; the error is of inputs that fold did not see."""
    torch.manual_seed(0)
    model, x = subject(family, name)
    perturb(model)
    forward = (lambda m, x: m.backbone(x)) if family == "detection" else call_with
    errors, reports = [], []
    for dtype in (torch.float32, torch.float64):
        model = model.to(dtype)
        folded, report = bn.fold(model, x.to(dtype), forward=forward)
        assert len(report.paths) + len(report.left) == count(model)
        assert count(folded) == len(report.left)
        with torch.no_grad():
            unseen = 2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(7)).to(dtype) + 0.5
            old, new = (tensors_in(forward(m, unseen)) for m in (model, folded))
        errors.append(max(difference(old, new)[1], report.certificate.relative))
        reports.append(report)
    assert reports[0].left == reports[1].left
    theirs = folded_by_fx(model.backbone if family == "detection" else model)  # the part that is run
    return Row(family, name, count(model), len(reports[0].paths), theirs, *errors, dict(reports[0].left))


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


def assert_nothing_known(model, x, path, reason):
    """The only norms are of classes that fold does not know: it did nothing, and says so."""
    with pytest.raises(bn.BatchNormError, match=f"fold: nothing could be changed .*{path}: .*{reason}"):
        bn.fold(model, x)


def assert_left(model, x, path, reason):
    folded, report = bn.fold(model, x)
    assert reason in report.left[path]
    for a, b in zip(outputs(model.eval(), x), outputs(folded, x), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)
    return folded, report
