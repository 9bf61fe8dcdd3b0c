"""What the checks that run on ranks share: a table of them, batches in shares, the comparison with one process."""

import copy
import json
import pathlib
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import batchnorm as bn
from batchnorm import kernels

CHECKS = {}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def check(*cases):
    """Register a function, once for each of the arguments given."""

    def register(function):
        for case in cases or ((),):
            case = case if isinstance(case, tuple) else (case,)
            name = "-".join([function.__name__, *(str(part).replace("torch.", "") for part in case)])
            CHECKS[name] = lambda case=case: function(*case)
        return function

    return register


def near(actual, expected, tolerance):
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    expected = expected.to(actual.dtype)
    largest = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * max(largest, 1e-3))


def total(tensor):
    tensor = tensor.detach().to(torch.float64).clone()
    dist.all_reduce(tensor)
    return tensor


def shares(sizes, rest, dtype=torch.float64, offset=1.0):
    """Every rank's batch, made alike on every rank; channels differ in mean and scale."""
    whole = torch.randn(sum(sizes), *rest, dtype=torch.float64)
    per_channel = (1, rest[0], *[1] * (len(rest) - 1))
    whole = whole * (torch.rand(per_channel, dtype=torch.float64) + 0.5)
    whole = whole + offset * torch.randn(per_channel, dtype=torch.float64)
    return list(whole.to(dtype).split(sizes))


def equal_sizes(size=3):
    return [size] * dist.get_world_size()


def single(channels, dims, dtype, **arguments):
    """Torch's layer in a state that no default would produce."""
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[dims]
    layer = kind(channels, dtype=dtype, **arguments)
    with torch.no_grad():
        for tensor, low, high in (
            (layer.weight, 0.5, 2.0),
            (layer.bias, -1.0, 1.0),
            (layer.running_mean, -1.0, 1.0),
            (layer.running_var, 0.5, 2.0),
        ):
            if tensor is not None:
                tensor.uniform_(low, high)
    return layer


def ours(layer, process_group=None, **more):
    arguments = {"affine": layer.affine, "track_running_stats": layer.track_running_stats, "dtype": more.pop("dtype")}
    made = bn.SyncBatchNorm(
        layer.num_features, layer.eps, layer.momentum, process_group=process_group, **arguments, **more
    )
    made.load_state_dict(copy.deepcopy(layer.state_dict()))
    return made


def relaid(x, layout):
    if layout == "last" and len(x):
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "permuted":
        return x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)
    if layout == "sliced":
        return torch.stack((x, x), -1)[..., 0]
    return x


def compare(xs, dtype, *, activation=None, residual=False, layout="plain", group=None, mine=None, tolerance=None):
    """One training step of both, and everything that comes out of it."""
    mine = dist.get_rank() if mine is None else mine
    dims, channels = xs[0].dim(), xs[0].shape[1]
    # The truth is torch's, in float64, on the whole batch.
    stock = single(channels, dims, dtype)
    layer = ours(stock, group, dtype=dtype, activation=activation)
    stock = stock.double()
    whole = torch.cat(xs).double().requires_grad_()
    others = torch.randn_like(whole).to(dtype)
    dy = torch.randn_like(whole).to(dtype)
    truth = stock(whole)
    added = others.double().requires_grad_()
    if residual:
        truth = truth + added
    truth = {None: lambda z: z, "relu": torch.relu, "silu": nn.functional.silu}[activation](truth)
    truth.backward(dy.double())

    start = sum(len(x) for x in xs[:mine])
    part = slice(start, start + len(xs[mine]))
    x = relaid(xs[mine], layout).detach().requires_grad_()
    r = relaid(others[part], layout).detach().requires_grad_() if residual else None
    y = layer(x, residual=r) if residual else layer(x)
    y.backward(relaid(dy[part], layout))
    tolerance = tolerance or TOLERANCE[dtype]
    near(y.detach(), truth.detach()[part], tolerance)
    near(x.grad, whole.grad[part], tolerance)
    assert y.dtype == dtype
    if layout == "last" and len(x):
        assert y.is_contiguous(memory_format=torch.channels_last)
    if residual:
        near(r.grad, added.grad[part], tolerance)
    if group is None:
        for parameter, expected in ((layer.weight, stock.weight), (layer.bias, stock.bias)):
            near(total(parameter.grad), expected.grad, tolerance)
    for name in ("running_mean", "running_var"):
        near(getattr(layer, name), getattr(stock, name), tolerance)
    assert int(layer.num_batches_tracked) == 1
    return layer


KERNELS = ("native", "torch")
FLOATS = (torch.float64, torch.float32)


class on_kernel:
    def __init__(self, name):
        self.name = name

    def __enter__(self):
        kernels.kernel()
        self.before = kernels._kernel
        if self.name == "torch":
            kernels._kernel = None

    def __exit__(self, *_):
        kernels._kernel = self.before


def raised(function):
    try:
        function()
    except bn.BatchNormError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def raised_on_all(message, *parts):
    for part in parts:
        assert part in message, message


def main(folder):
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    found = {}
    for name, function in CHECKS.items():
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                function()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    pathlib.Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
