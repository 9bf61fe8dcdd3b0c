"""``insert``: add BN to a network without it (lines 1 to 5 of Algorithm 2)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from typing_extensions import Unpack

from batchnorm.calling import batch_forward, call_with
from batchnorm.dataflow import Call, Graph
from batchnorm.errors import BatchNormError, NotEquivalent
from batchnorm.graph import trace
from batchnorm.layers.accumulate import AccumulatedMoments
from batchnorm.layers.family import make_norm
from batchnorm.layers.foreign import keeps_statistics
from batchnorm.layers.normed import Normed, append_norm
from batchnorm.layers.options import MakeOptions
from batchnorm.nested import few_samples
from batchnorm.optim import Optimizers
from batchnorm.preserve import in_mode, untouched
from batchnorm.records import Certificate, Change, Report
from batchnorm.transforms.changed import Changed
from batchnorm.transforms.drop_bias import held_bias, takes_steps
from batchnorm.transforms.follow import carry_over, check_changeable, check_optimizers, copied_with, join
from batchnorm.transforms.freeze import few_of
from batchnorm.transforms.gradients import TOLERANCE as GRADIENTS
from batchnorm.transforms.gradients import Step, apart, double, limit_in_float64, step
from batchnorm.transforms.left_behind import left_behind
from batchnorm.transforms.measuring import no_batches, streamed
from batchnorm.transforms.outputs import Forward
from batchnorm.transforms.passing import RESHAPES
from batchnorm.transforms.stages import in_stages
from batchnorm.transforms.verify import check_arguments, verify

Where = str | Iterable[str] | Callable[[str, nn.Module], bool] | None
ONLY = (None, "conv", "linear")
_ACTIVATIONS = {
    "relu", "relu6", "leaky_relu", "silu", "gelu", "sigmoid", "tanh", "elu", "selu", "celu", "hardswish", "hardtanh",
    "hardsigmoid", "mish", "softplus", "softsign", "logsigmoid", "prelu", "rrelu", "clamp", "clamp_min",
}  # fmt: skip
_ACTIVATION_MODULES = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.ELU, nn.SELU, nn.CELU, nn.Hardswish,
    nn.Hardtanh, nn.Hardsigmoid, nn.Mish, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.PReLU, nn.RReLU,
)  # fmt: skip
_MOVES = {*RESHAPES, "transpose", "permute", "contiguous", "movedim", "swapaxes", "swapdims", "mT", "T", "clone"}
_HERE = "insert"
_NO_NONLINEARITY = "no nonlinearity follows"


@in_stages
def insert(
    model: nn.Module,
    example: Any,
    where: Where = None,
    *,
    norm: str | Callable[..., nn.Module] = "batch",
    only: Literal["conv", "linear"] | None = None,
    after_activation: bool = False,
    preserve: Iterable[Any] | Tensor | None = None,
    forward: Forward | None = None,
    optimizer: Optimizers = None,
    tolerance: float | None = None,
    progress: bool | None = None,
    **options: Unpack[MakeOptions],
) -> tuple[nn.Module, Report]:
    """Return a copy of the model with BN on ``Wu``, before each nonlinearity, and a report.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    >>> normed, report = insert(model, torch.randn(2, 3, 8, 8))
    >>> print(report)
    1 module changed
      0: norm None -> BatchNorm2d(8), bias 8 values -> None
    1 left alone
      3: no nonlinearity follows: the model returns its output

    By default, a norm goes behind every convolution and linear layer whose output goes into a nonlinearity, a module or
    a function, and nowhere else. ``where`` chooses other places: names of layers, or ``where(name, module) -> bool``,
    asked of every convolution and linear layer. ``only="conv"`` or ``"linear"`` takes those alone.
    ``after_activation`` puts the norm behind the nonlinearity instead, which has to be a module. ``norm`` and further
    options are those of `make_norm`. Biases that the norm cancels are removed. What is left alone has its reason in the
    report: layers called several times, a norm that is there already. Behind a linear layer over the last axis of a
    sequence the features are the channels, and every position is a row of the batch, padding included.

    A model's forward cannot be changed, so the layer itself becomes one that is followed by a norm (see
    `batchnorm.layers.normed.Normed`): the same object and class, the same keys, and the norm's under ``<name>.norm``.
    `fold` takes it away again, unless the layer's class has a forward of its own.

    ``preserve`` keeps a trained network's function in evaluation: batches (as `calibrate` takes them) on which the
    statistics are measured; then gamma is the standard deviation and beta the mean, so that the norm gives what it
    is given. The report has the certificate, and ``gradients``: those of the parameters that both have and of the
    inputs, in evaluation mode. Above the tolerance `NotEquivalent` is raised. In training mode the norm uses the batch
    and is another function, which is what it is for, so no gradients are compared there. Without ``preserve`` the
    network is as good as new, and is to be trained; nothing is certified.

    ``optimizer``: one or several, made for ``model``; they go over to the copy, and gamma and beta join the group of
    the weight before them (or the first group). The modes of the model stay.
    ``progress``: after two seconds a line on stderr says what is being compared; by default, on a terminal.
    """
    check_arguments(model, forward, tolerance, _HERE)
    check_changeable(model, _HERE)
    optimizers = check_optimizers(model, optimizer, _HERE)
    if only not in ONLY:
        raise BatchNormError(f"only is {only!r}", where=_HERE, do=f"use one of {', '.join(map(repr, ONLY))}")
    if norm == "weight":
        raise BatchNormError(
            "weight normalisation is not put behind a layer", where=_HERE, do='use make_norm("weight", of=layer)'
        )
    changed, memo = copied_with(model, where=_HERE)
    before = in_mode(copied_with(model, where=_HERE)[0], False)
    with untouched(changed):
        graph = trace(in_mode(changed, False), example, forward=forward, opaque=_is_whole)
    places, left = _places(changed, graph, where, only, after_activation)
    norms = {path: _make(norm, graph, path, layer, options) for path, layer in places.items()}
    moments = None if preserve is None else _measure(changed, graph, places, preserve, forward or batch_forward(_HERE))
    changes: list[Change] = []
    added: list[tuple[nn.Module, nn.Module]] = []
    gone: dict[str, Tensor] = {}
    for path, layer in places.items():
        bias = layer._parameters.get("bias") if isinstance(layer, (nn.Linear, _ConvNd)) else None
        if bias is not None and not isinstance(norms[path], (_BatchNorm, _InstanceNorm)):
            bias = None  # only what subtracts each channel's own mean cancels it
        if bias is not None and (_has_own_forward(layer) or held_bias(graph, changed, layer)):
            bias = None
        if moments is not None:
            _keep_function(path, norms[path], moments[path], bias)
        changes.append(Change(path, "norm", None, f"{type(norms[path]).__name__}({_channels(graph, path)})"))
        if bias is not None:
            layer.register_parameter("bias", None)
            gone[path] = bias.detach()
            changes.append(Change(path, "bias", f"{bias.numel()} values", None))
        append_norm(layer, norms[path], rows=_rows(graph, path))
        added.append((layer, norms[path]))
    certificate = gradients = None
    if moments is not None:
        after = in_mode(copy.deepcopy(changed), False)
        certificate = verify(
            before, after, example, verb=_HERE, forward=forward, tolerance=tolerance,
            unchanged=lambda path: path.rpartition(".")[0] not in places,
        )  # fmt: skip

        def widened() -> tuple[nn.Module, nn.Module]:
            wide = copy.deepcopy(after).double()
            for path, seen in moments.items():
                _keep_function(path, wide.get_submodule(f"{path}.norm"), seen, gone.get(path))
            return copy.deepcopy(before).double(), wide

        gradients = _verify_gradients(before, after, widened, example, forward or call_with, tolerance)
    kept = {id(p) for p in changed.parameters()}
    carry_over(optimizers, {id(p): memo[id(p)] if id(memo[id(p)]) in kept else None for p in model.parameters()})
    for layer, new in added:
        join(optimizers, layer.parameters(), new.parameters(), changed, always=True)
    left_behind(model, changed, _HERE)
    return Changed((changed, Report(tuple(changes), left, certificate, gradients)))


# ---- where


def _places(
    model: nn.Module, graph: Graph, where: Where, only: str | None, after_activation: bool
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The layers to put a norm behind, by path, and those left alone, with the reason."""
    modules = dict(model.named_modules())
    linear = {path: m for path, m in modules.items() if isinstance(m, (nn.Linear, _ConvNd))}
    if where is None:
        chosen = linear
    elif callable(where):
        chosen = {path: m for path, m in linear.items() if where(path, m)}
    else:
        names = [where] if isinstance(where, str) else list(where)
        for name in names:
            if name not in modules or not graph.of(name):
                raise BatchNormError(
                    f"the model has no layer {name!r}"
                    + ("" if name not in modules else " that is called, and is one layer"),
                    where=_HERE,
                    do="use names of model.named_modules(): layers, not what contains them",
                )
        chosen = {name: modules[name] for name in names}
    kinds = {"conv": _ConvNd, "linear": nn.Linear, None: nn.Module}[only]
    places: dict[str, nn.Module] = {}
    left: dict[str, str] = {}
    for path, layer in chosen.items():
        found = f"only {only} layers were asked for" if not isinstance(layer, kinds) else ""
        found = found or _unfit(graph, layer)
        if not found and (where is None or after_activation):
            following = _activation(graph, graph.of(layer)[0])
            if isinstance(following, str):
                found = f"{_NO_NONLINEARITY}: {following}"
            elif after_activation and following.kind != "module":
                found = f"{following.name} is called as a function: there is no place behind it"
            elif after_activation and _unfit(graph, following.target):
                found = f"{following.name}: {_unfit(graph, following.target)}"
            elif after_activation:
                path, layer = following.name, following.target
        if found:
            left[path] = found
        else:
            places[path] = layer
    if not places:
        reasons = few_of(left) or "it has no convolution and no linear layer"
        free = where is None and any(reason.startswith(_NO_NONLINEARITY) for reason in left.values())
        raise BatchNormError(
            f"there is no place for a norm ({reasons})",
            where=_HERE,
            do="where=[...] puts norms behind layers that no nonlinearity follows"
            if free
            else "give a model with a convolution or a linear layer that no norm follows",
        )
    return places, left


def _is_whole(module: nn.Module) -> bool:
    """Whether a module is seen as one call: a layer is, also if its class has a forward of its own."""
    return isinstance(module, _BatchNorm) or (isinstance(module, (nn.Linear, _ConvNd)) and not any(module.children()))


def _has_own_forward(layer: nn.Module) -> bool:
    return not type(layer).forward.__module__.startswith("torch.nn.")


def _unfit(graph: Graph, layer: nn.Module) -> str:
    """Why no norm can stand behind a layer; empty if one can."""
    calls = graph.of(layer)
    held = any(isinstance(graph.modules.get(call.scope), Normed) for call in calls)
    if held or isinstance(layer, Normed) or any(_normalises(graph, r) for r in _readers(graph, calls)):
        return "a norm follows already"
    if not calls:
        inside = any(graph.times[path] for path, module in graph.modules.items() if module is layer)
        return "its weight is computed by modules inside it" if inside else graph.uncalled(layer)
    if len(calls) > 1:
        return f"it is called {len(calls)} times, and each place would need a norm of its own"
    if len(calls[0].outputs) != 1:
        return "it does not return one tensor"
    shape = graph.values[calls[0].outputs[0]].shape
    if isinstance(layer, _ConvNd) and len(shape) != len(layer.kernel_size) + 2:
        return f"its output has the shape {list(shape)}, without a batch: give an example of several samples"
    if len(shape) < 2:
        return f"its output has the shape {list(shape)}, without a batch and channels"
    return ""


def _normalises(graph: Graph, call: Call) -> bool:
    """Whether a call is that of a norm, as a module or inside one of another library."""
    inside = graph.modules.get(call.scope)
    named = call.name if call.kind != "module" else type(call.target).__name__
    return "norm" in named.lower() or (inside is not None and keeps_statistics(inside))


def _readers(graph: Graph, calls: list[Call]) -> list[Call]:
    return [reader for call in calls for value in call.outputs for reader in graph.consumers(value)]


def _activation(graph: Graph, call: Call) -> Call | str:
    """The nonlinearity that alone reads what a call makes, or what does instead."""
    value = call.outputs[0]
    while True:
        if graph.feeds_output(value):
            return "the model returns its output"
        readers = graph.consumers(value)
        if len(readers) != 1 or not (readers[0].passes or _moves(readers[0])):
            break
        value = readers[0].outputs[0]
    others = [r.name for r in readers if not _is_activation(r)]
    if others or not readers:
        return f"its output goes to {', '.join(others) or 'nothing'}"
    return readers[0]


def _moves(call: Call) -> bool:
    """Whether a call only moves numbers to other places, so that a nonlinearity may as well come before it."""
    moves = call.name in _MOVES if call.kind == "function" else isinstance(call.target, (nn.Flatten, nn.Unflatten))
    return moves and len(call.inputs) == len(call.outputs) == 1


def _is_activation(call: Call) -> bool:
    if call.kind == "module":
        return isinstance(call.target, _ACTIVATION_MODULES)
    return call.name in _ACTIVATIONS


# ---- what


def _rows(graph: Graph, path: str) -> bool:
    """Whether channels are the last axis of what a layer makes: those of a linear layer are, and of what reads it."""
    call = graph.of(path)[0]
    if isinstance(call.target, _ACTIVATION_MODULES):
        call = graph.producer(call.inputs[0]) or call
    return isinstance(call.target, nn.Linear) and len(graph.values[call.outputs[0]].shape) > 2


def _channels(graph: Graph, path: str) -> int:
    return graph.values[graph.of(path)[0].outputs[0]].shape[-1 if _rows(graph, path) else 1]


def _make(
    norm: str | Callable[..., nn.Module], graph: Graph, path: str, layer: nn.Module, options: MakeOptions
) -> nn.Module:
    made = graph.values[graph.of(path)[0].outputs[0]]
    dims = 0 if _rows(graph, path) else len(made.shape) - 2
    new = make_norm(cast(Any, norm), _channels(graph, path), dims, **options)
    weight = next(iter(layer.parameters()), None)
    new.to(device=None if weight is None else weight.device, dtype=made.dtype)
    return new.train(layer.training)


def _measure(
    model: nn.Module, graph: Graph, places: dict[str, nn.Module], batches: Iterable[Any] | Tensor, forward: Forward
) -> dict[str, AccumulatedMoments]:
    """What the layers make of the batches, in evaluation mode."""
    seen = {path: AccumulatedMoments() for path in places}
    with ExitStack() as stack:
        stack.enter_context(untouched(model))
        stack.enter_context(torch.no_grad())
        model.eval()
        for path, layer in places.items():

            def look(module: nn.Module, arguments: Any, made: Tensor, path: str = path) -> None:
                if not seen[path].add(made.flatten(0, -2) if _rows(graph, path) else made):
                    raise BatchNormError("it makes NaN or infinite values", where=f"{_HERE}: {path}")

            stack.callback(layer.register_forward_hook(look).remove)
        for batch in streamed(batches, _HERE):
            forward(model, batch)
    if all(each.moments is None for each in seen.values()):
        raise no_batches(_HERE)
    return seen


@torch.no_grad()
def _keep_function(path: str, norm: nn.Module, seen: AccumulatedMoments, bias: Tensor | None) -> None:
    """Let a BN layer give what it is given, in evaluation, with the bias that was before it."""
    if not isinstance(norm, _BatchNorm) or norm.running_mean is None or norm.running_var is None:
        raise BatchNormError(
            f"a {type(norm).__name__} depends on its input in evaluation, and cannot keep the function",
            where=f"{_HERE}: {path}",
            do='use norm="batch" with preserve=, or insert without it and train',
        )
    if norm.weight is None or norm.bias is None:
        raise BatchNormError("a norm without gamma and beta cannot keep the function", where=f"{_HERE}: {path}")
    if seen.moments is None:
        raise BatchNormError(
            "the batches of preserve= do not reach it", where=f"{_HERE}: {path}", do="give batches that do, or where="
        )
    if seen.count < 2:
        raise BatchNormError(
            "the batches of preserve= give one value per channel, which has no variance", where=f"{_HERE}: {path}",
            do="give more samples",
        )  # fmt: skip
    mean, var = seen.moments.mean, seen.moments.var * (seen.count / (seen.count - 1))
    # From the variance as it is stored, so that what rounding takes is given back.
    norm.running_var.copy_(var)
    norm.weight.copy_(torch.sqrt(norm.running_var.double() + norm.eps))
    norm.running_mean.copy_(mean if bias is None else mean - bias.double())
    back = norm.running_mean.double() if bias is None else norm.running_mean.double() + bias.double()
    norm.bias.copy_(back)


def _verify_gradients(
    before: nn.Module,
    after: nn.Module,
    widened: Callable[[], tuple[nn.Module, nn.Module]],
    example: Any,
    run: Forward,
    tolerance: float | None,
) -> Certificate | None:
    """Compare the gradients of what both models have, in evaluation mode, in which they are.

    Rounding can put a value on the other side of a kink, and much of a gradient with it; so where they differ by more
    than the tolerance, float64 decides, with a few samples. None where it cannot be asked, or nothing runs backward.
    """
    if not takes_steps(before, example, run):
        return None
    worst, share, allowed, within = _apart(before, after, example, run, tolerance)
    if within:
        return Certificate(worst, share, allowed, 1, "gradients in evaluation mode")
    if tolerance is None:
        try:
            pair = widened()
            wide, wide_share, wide_allowed, within = _apart(*pair, double(few_samples(example)), run, None, exact=True)
        except Exception:  # an operation without float64, a batch that cannot be cut
            return None
        if within:
            what = f"gradients in evaluation mode, in float64 (in the model's own numbers: {share:.2g}, by rounding)"
            return Certificate(wide, wide_share, wide_allowed, 1, what)
        worst, share, allowed = wide, wide_share, wide_allowed
    raise NotEquivalent(
        f"in evaluation, gradients would differ by {worst:.3g} ({share:.2g} of the largest, allowed: {allowed:g})",
        where=_HERE,
        do="the model was left as it was; allow more with tolerance= only if you know why they differ",
    )


def _apart(
    before: nn.Module, after: nn.Module, example: Any, run: Forward, tolerance: float | None, exact: bool = False
) -> tuple[float, float, float, bool]:
    """The largest differences of gradients that both have, what is allowed, and whether all are within that."""
    first = step(before, example, run)
    old, new = first.kinds["gradients"], step(after, example, run).kinds["gradients"]
    inner = {  # parameters of a layer that a norm stands behind have its name in between
        f"{path}.layer.{name}".lstrip("."): f"{path}.{name}".lstrip(".")
        for path, layer in after.named_modules() if isinstance(layer, Normed)
        for name, _ in layer.get_submodule("layer").named_parameters()
    }  # fmt: skip
    new = {inner.get(name, name): gradient for name, gradient in new.items()}
    shared = {name: gradient for name, gradient in old.items() if name in new}
    named = apart(Step({"gradients": shared}), Step({"gradients": new}))
    found = named.values()
    if exact:
        tolerance = limit_in_float64(before, example, run, first, named)
    limits = [GRADIENTS.get(dtype, 0.0) if tolerance is None else tolerance for *_, dtype in found]
    within = all(relative <= limit for (_, relative, _), limit in zip(found, limits, strict=True))
    worst = max((absolute for absolute, _, _ in found), default=0.0)
    share = max((relative for _, relative, _ in found), default=0.0)
    return worst, share, max(limits, default=0.0), within
