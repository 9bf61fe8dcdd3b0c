"""Who is measured: one table, one entry per contender, built for one cell at a time."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from batchnorm import kernels
from batchnorm.bench import flax_peer
from batchnorm.bench.cases import Case, floor_copies
from batchnorm.bench.inputs import Inputs
from batchnorm.layers import batch

Step = Callable[[], Any]


@dataclass(frozen=True)
class Contender:
    """One way to compute a cell.

    >>> CONTENDERS["torch"].missing()
    ''

    ``build`` returns the step that is timed; it is called once per cell. ``tensors`` turns what a step
    returned into the output, then the gradients of x, weight, bias (and the residual) as torch tensors, for
    the check that everyone computed the same. ``missing`` says why the contender cannot run here, or nothing.
    ``serves`` tells the cells that it can compute. ``scale`` multiplies its times. ``compiled`` ones take seconds to
    build, and run only where they are asked for.
    """

    build: Callable[[Case, Inputs], Step]
    tensors: Callable[[Case, Any], tuple[torch.Tensor, ...]] = lambda case, result: tuple(result)
    missing: Callable[[], str] = lambda: ""
    serves: Callable[[Case], bool] = lambda case: True
    scale: Callable[[Case], float] = lambda case: 1.0
    computes: bool = True
    peer: bool = False
    compiled: bool = False


def describe_path() -> str:
    """Which path our layers take on this machine and why, in one sentence.

    >>> describe_path()  # doctest: +SKIP
    'native kernel (AVX2, 2 threads)'
    """
    return kernels.describe()


def core_distance(threads: int) -> float | None:
    """The nanoseconds that a cache line takes from one core to another now; None without a second one or the kernel.

    >>> core_distance(threads=1)
    """
    kernel = kernels.kernel()
    return None if kernel is None or threads < 2 else kernel.core_distance()


def _layer_class(module: Any, case: Case) -> Any:
    """BatchNorm1d, 2d or 3d of a module, by the dimensions of the case."""
    return getattr(module, {2: "BatchNorm1d", 3: "BatchNorm1d", 4: "BatchNorm2d", 5: "BatchNorm3d"}[len(case.shape)])


def _torch_step(case: Case, inputs: Inputs, layer: Any, forward: Callable[..., torch.Tensor]) -> Step:
    """The timed step of a layer that is a torch module: the forward, and in training the gradients."""
    inputs.load_into(layer)
    layer.train(case.pass_name != "eval")
    arguments = (inputs.x, inputs.residual) if case.adds else (inputs.x,)
    wanted = (inputs.x, layer.weight, layer.bias, *arguments[1:])

    def forward_only() -> tuple[torch.Tensor, ...]:
        return (forward(*arguments),)

    def forward_and_backward() -> tuple[torch.Tensor, ...]:
        output = forward(*arguments)
        return (output, *torch.autograd.grad(output, wanted, inputs.grad))

    return forward_and_backward if case.pass_name == "train" else forward_only


def _torch_forward(case: Case, layer: Any) -> Callable[..., torch.Tensor]:
    """The operation as a careful user of torch.nn writes it.

    In place where autograd allows it (``nn.ReLU(inplace=True)`` is the common idiom): measured, that is
    torch's fastest way to write each of these in nearly all cells, and never behind by more than the noise.
    """

    def bn(x: torch.Tensor) -> torch.Tensor:
        return layer(x)  # type: ignore[no-any-return]

    def bn_relu(x: torch.Tensor) -> torch.Tensor:
        return F.relu_(layer(x))

    def bn_add_relu(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return F.relu_(layer(x).add_(residual))

    forwards: dict[str, Callable[..., torch.Tensor]] = {
        "bn": bn,
        "bn+relu": bn_relu,
        "bn+add+relu": bn_add_relu,
    }
    return forwards[case.operation]


def _build_torch(case: Case, inputs: Inputs) -> Step:
    layer = _layer_class(torch.nn, case)(case.shape[1])
    return _torch_step(case, inputs, layer, _torch_forward(case, layer))


def _build_compiled(case: Case, inputs: Inputs) -> Step:
    # Every cell compiles anew; without a reset the cells would share one cache entry and run into its limit.
    torch._dynamo.reset()
    layer = _layer_class(torch.nn, case)(case.shape[1])
    compiled = torch.compile(_torch_forward(case, layer), fullgraph=True, dynamic=False)
    return _torch_step(case, inputs, layer, compiled)


def _our_layer(case: Case) -> Any:
    activation = {} if case.operation == "bn" else {"activation": "relu"}
    return _layer_class(batch, case)(case.shape[1], **activation)


def _build_batchnorm(case: Case, inputs: Inputs) -> Step:
    layer = _our_layer(case)
    return _torch_step(case, inputs, layer, layer)


def _build_batchnorm_compiled(case: Case, inputs: Inputs) -> Step:
    layer = _our_layer(case)  # no reset: what was compiled for torch.compile in this cell would be gone
    return _torch_step(case, inputs, layer, torch.compile(layer, fullgraph=True, dynamic=False))


def _build_floor(case: Case, inputs: Inputs) -> Step:
    source = inputs.x.detach()
    target = torch.empty_like(source)  # keeps the layout
    return lambda: (target.copy_(source),)


def _build_inplace_abn(case: Case, inputs: Inputs) -> Step:
    from inplace_abn import InPlaceABN  # type: ignore[import-not-found]

    layer = InPlaceABN(case.shape[1], activation="identity")
    # It overwrites its input, which in a network is the output of a layer before; here that output is a copy.
    return _torch_step(case, inputs, layer, lambda x: layer(x.clone()))


def _without_compiler() -> str:
    compiler = os.environ.get("CXX", "g++")
    return "" if shutil.which(compiler) or shutil.which("clang++") else "needs a C++ compiler, and none was found"


def _without(module: str) -> Callable[[], str]:
    def missing() -> str:
        if importlib.util.find_spec(module):
            return ""
        return f"not installed (pip install {module.replace('_', '-')})"

    return missing


CONTENDERS: dict[str, Contender] = {
    "torch": Contender(_build_torch),
    "torch.compile": Contender(_build_compiled, missing=_without_compiler, compiled=True),
    "batchnorm": Contender(_build_batchnorm),
    "batchnorm.compile": Contender(_build_batchnorm_compiled, missing=_without_compiler, compiled=True),
    "floor": Contender(_build_floor, scale=floor_copies, computes=False),
    "flax": Contender(flax_peer.build, flax_peer.tensors, _without("flax"), peer=True),
    "inplace-abn": Contender(
        _build_inplace_abn,
        missing=_without("inplace_abn"),
        serves=lambda case: case.operation == "bn" and case.layout == "contiguous" and case.dtype == "float32",
        peer=True,
    ),
}
