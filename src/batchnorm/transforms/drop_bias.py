"""``drop_bias``: remove biases in front of BN, which have no effect because the mean is subtracted."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized

from batchnorm.calling import call_with
from batchnorm.dataflow import Call, Graph
from batchnorm.errors import BatchNormError
from batchnorm.graph import trace
from batchnorm.layers.batch import _BatchNormBase
from batchnorm.layers.foreign import Evaluating, is_foreign
from batchnorm.layers.switches import use_batch_statistics
from batchnorm.optim import Optimizers
from batchnorm.preserve import in_mode, untouched
from batchnorm.records import Certificate, Change, Report
from batchnorm.transforms.bricks import children_behind
from batchnorm.transforms.changed import Changed
from batchnorm.transforms.follow import carry_over, check_changeable, check_optimizers, copied_with
from batchnorm.transforms.freeze import OWN_FORWARD, few_of
from batchnorm.transforms.gradients import step, verify_gradients
from batchnorm.transforms.left_behind import left_behind
from batchnorm.transforms.outputs import TOLERANCE, Forward
from batchnorm.transforms.stages import in_stages
from batchnorm.transforms.verify import check_arguments, verify

# With the batch's own statistics, rounding counts by a channel's deviation, which may be far below the largest output.
_IN_BATCH_MODE = 100


@in_stages
def drop_bias(
    model: nn.Module,
    example: Any,
    *,
    forward: Forward | None = None,
    optimizer: Optimizers = None,
    tolerance: float | None = None,
    modules: Iterable[str] | None = None,
    progress: bool | None = None,
) -> tuple[nn.Module, Report]:
    """Return a copy of the model without the biases that BN cancels, and a report with its certificate.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> lean, report = drop_bias(model, torch.randn(2, 3, 8, 8))
    >>> lean[0].bias is None, report.paths
    (True, ('0', '1'))

    With the batch's statistics the mean that is subtracted contains the bias, whose gradient is zero but for rounding.
    For evaluation, ``running_mean`` is lowered by it. So both functions stay: the certificate is for evaluation mode,
    and the outputs with batch statistics are compared too. Training continues as it would have: the report's
    ``gradients`` are those of all parameters that stay and of the inputs, in training and in evaluation, with what the
    step leaves in the buffers (a running mean without the bias in it). There are none where the example is too small to
    train on (one value per channel) or the model cannot run backward.

    A bias goes if its convolution or linear layer feeds BN layers only, over the right axis, and these are fed by
    nothing else; wherever there is another reason, the report gives it. A frozen BN layer does not cancel a bias.
    ``modules``, if given, are the paths of the only layers to consider.

    ``optimizer``: one or several, made for ``model``; they go over to the copy with their groups and their state,
    without what they held of the biases. ``example`` is what the model is called with, as in `batchnorm.trace`. Above
    the tolerance `NotEquivalent` is raised, and nothing has changed.
    ``progress``: after two seconds a line on stderr says what is being compared; by default, on a terminal.
    """
    check_arguments(model, forward, tolerance, "drop_bias")
    check_changeable(model, "drop_bias")
    wanted = None if modules is None else _paths(model, modules)
    optimizers = check_optimizers(model, optimizer, "drop_bias")
    lean, memo = copied_with(model, where="drop_bias")
    before = in_mode(copied_with(model, where="drop_bias")[0], False)
    with untouched(lean):
        graph = trace(in_mode(lean, False), example, forward=forward)
    changes: list[Change] = []
    left: dict[str, str] = {}
    cancelled: dict[str, str] = {}  # of a BN layer: the layer whose bias it cancelled
    for path, layer in lean.named_modules():
        if not _is_linear(layer) or layer.bias is None or (wanted is not None and path not in wanted):
            continue
        norms = norms_after(graph, lean, path, layer)
        if layer._forward_hooks:
            norms = "it has hooks, which would see other numbers"
        if isinstance(norms, str):
            left[path] = norms
        else:
            changes += take_bias(path, layer, norms)
            cancelled |= dict.fromkeys(norms, path)
    unknown = {path: why for path, why in left.items() if OWN_FORWARD in why}
    if unknown and not changes:
        raise BatchNormError(
            f"nothing could be changed ({few_of(unknown)})", where="drop_bias",
            do="replace these BN layers by torch's or ours",
        )  # fmt: skip
    touched = {change.path for change in changes}
    certificate = gradients = None
    if changes:
        certificate, gradients = _certificates(model, before, lean, touched, cancelled, example, forward, tolerance)
    kept = {id(p) for p in lean.parameters()}
    carry_over(optimizers, {id(p): memo[id(p)] if id(memo[id(p)]) in kept else None for p in model.parameters()})
    left_behind(model, lean, "drop_bias")
    return Changed((lean, Report(tuple(changes), left, certificate, gradients)))


def _certificates(
    model: nn.Module,
    before: nn.Module,
    lean: nn.Module,
    touched: set[str],
    cancelled: dict[str, str],
    example: Any,
    forward: Forward | None,
    tolerance: float | None,
) -> tuple[Certificate, Certificate | None]:
    """Compare outputs in evaluation, and a step."""
    with untouched(lean):
        certificate = verify(
            before, in_mode(lean, False), example, verb="drop_bias", forward=forward, tolerance=tolerance,
            unchanged=lambda path: path not in touched,
        )  # fmt: skip
        trains = _takes_batches(before, example, forward)
    gradients = _verify_gradients(model, lean, cancelled, example, forward, tolerance) if trains else None
    if trains and gradients is None:
        _verify_with_batch_statistics(before, lean, example, forward, tolerance, touched)
    return certificate, gradients


def _paths(model: nn.Module, modules: Iterable[str]) -> set[str]:
    """The same as a set, if the model has them; one module may have several paths, of which the first counts.

    >>> _paths(nn.Sequential(nn.Linear(1, 1)), ["0"])
    {'0'}
    """
    by_path = dict(model.named_modules(remove_duplicate=False))
    first = {id(module): path for path, module in model.named_modules()}
    given = [modules] if isinstance(modules, str) else list(modules)
    unknown = [path for path in given if path not in by_path]
    if unknown:
        raise BatchNormError(f"the model has no module {unknown[0]!r}", where="drop_bias", do="give paths of modules")
    return {first[id(by_path[path])] for path in given}


def norms_after(graph: Graph, model: nn.Module, path: str, layer: nn.Module) -> dict[str, _BatchNorm] | str:
    """Return the BN layers, by path, that cancel the bias of a layer; or why they do not.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4))
    >>> norms_after(trace(model, torch.randn(5, 3)), model, "0", model[0])
    'its output goes to 1, which is not a BN layer'
    """
    held = held_bias(graph, model, layer)
    if held:
        return held
    calls = graph.of(layer)
    if not calls:
        return graph.uncalled(layer)
    found: dict[str, _BatchNorm] = {}
    for call in calls:
        after = _the_one_after(graph, call)
        if isinstance(after, str):
            return after
        norm = after.target
        if isinstance(layer, nn.Linear) and len(graph.values[call.outputs[0]].shape) != 2:
            return f"it is linear in the last axis, and {after.name} normalises axis 1"
        reason = _unfit(norm)
        if reason:
            return f"{after.name} {reason}"
        found[after.name] = norm
    for name, norm in found.items():
        for call in graph.of(norm):
            source = _the_one_before(graph, call)
            if source is None or source.target is not layer:
                other = "something else" if source is None else source.name
                return f"{name} is also fed by {other}, which has another bias"
    return found


def held_bias(graph: Graph, model: nn.Module, layer: nn.Module) -> str:
    """Return why the bias of a layer cannot be removed; empty if it can.

    >>> model = nn.Sequential(nn.Linear(3, 4))
    >>> held_bias(trace(model, torch.randn(5, 3)), model, model[0])
    ''
    """
    if is_parametrized(layer) or "bias" not in layer._parameters:
        return "its bias is computed from something else"
    bias = layer._parameters["bias"]
    names = {f"{p}.{n}" if p else n for p, m in model.named_modules() for n, t in m._parameters.items() if t is bias}
    if any(value.source in names for value in graph.values):
        return "something else reads its bias"
    return ""


@torch.no_grad()
def take_bias(path: str, layer: nn.Module, norms: dict[str, _BatchNorm]) -> list[Change]:
    """Remove a layer's bias, and subtract it from the running means of the BN layers that it feeds.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    >>> print(take_bias("0", model[0], {"1": model[1]})[0])
    0: bias 4 values -> None
    """
    bias = layer.bias
    assert isinstance(bias, torch.Tensor)
    value = bias.detach().double()
    changes = [Change(path, "bias", f"{value.numel()} values", None)]
    for name, norm in norms.items():
        if norm.running_mean is not None:
            norm.running_mean.copy_(norm.running_mean.double() - value.to(norm.running_mean.device))
            changes.append(
                Change(name, "running_mean", "with the bias", f"lower by it (at most {value.abs().max():.3g})")
            )
    layer.register_parameter("bias", None)
    return changes


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, (nn.Linear, _ConvNd))


def _the_one_after(graph: Graph, call: Call) -> Call | str:
    """The BN call that is the only reader of a call's output."""
    value = call.outputs[0]
    while True:
        if graph.feeds_output(value):
            return "the model returns its output"
        readers = graph.consumers(value)
        if len(readers) != 1:
            return f"its output is read by {', '.join(r.name for r in readers) or 'nothing'}"
        reader = readers[0]
        if reader.kind == "module" and type(reader.target) is nn.Identity:
            value = reader.outputs[0]
        elif reader.kind == "module" and isinstance(reader.target, _BatchNorm) and reader.inputs[0] == value:
            return reader
        else:
            return f"its output goes to {reader.name}, which is not a BN layer"


def _the_one_before(graph: Graph, call: Call) -> Call | None:
    source = graph.producer(call.inputs[0])
    while source is not None and source.kind == "module" and type(source.target) is nn.Identity:
        source = graph.producer(source.inputs[0])
    return source


def _unfit(norm: _BatchNorm) -> str:
    """Why a BN layer does not cancel a bias; empty if it does."""
    if isinstance(norm, Evaluating) or (isinstance(norm, _BatchNormBase) and norm.statistics == "running"):
        return "always uses its running statistics (frozen), and so does not cancel a bias"
    if is_foreign(norm) and (isinstance(norm, _BatchNormBase) or isinstance(children_behind(norm), str)):
        return f"{OWN_FORWARD} ({type(norm).__name__})"
    if norm.running_mean is not None and norm.running_mean.dim() != 1:
        return "has statistics for every time step"
    return ""


def _takes_batches(model: nn.Module, example: Any, forward: Forward | None) -> bool:
    """Whether the example is large enough for batch statistics: more than one value per channel."""
    with use_batch_statistics(model), untouched(model), torch.no_grad():
        try:
            (forward or call_with)(model, copy.deepcopy(example))
        except (ValueError, BatchNormError):
            return False
    return True


def _verify_with_batch_statistics(
    before: nn.Module,
    after: nn.Module,
    example: Any,
    forward: Forward | None,
    tolerance: float | None,
    touched: set[str],
) -> None:
    """Compare the two as in training, but without dropout."""
    dtypes = [p.dtype for p in after.parameters()]
    allowed = max([TOLERANCE.get(d, 0.0) for d in dtypes], default=0.0) if tolerance is None else tolerance
    with untouched(after), use_batch_statistics(before), use_batch_statistics(after):
        verify(
            in_mode(before, False), in_mode(after, False), example, verb="drop_bias, with batch statistics",
            forward=forward, tolerance=allowed * _IN_BATCH_MODE, more=0, unchanged=lambda path: path not in touched,
        )  # fmt: skip


def _verify_gradients(
    model: nn.Module,
    lean: nn.Module,
    cancelled: dict[str, str],
    example: Any,
    forward: Forward | None,
    tolerance: float | None,
) -> Certificate | None:
    """Compare a step of the two, running means without the biases; None if the model cannot take a step."""
    before, _ = copied_with(model)
    for path in set(cancelled.values()):
        before.get_parameter(f"{path}.bias").requires_grad_(False)  # its gradient has no partner
    biases = {norm: before.get_parameter(f"{path}.bias").detach() for norm, path in cancelled.items()}
    means: dict[str, torch.Tensor] = {}
    for norm in cancelled:
        mean = before.get_submodule(norm).running_mean
        if isinstance(mean, torch.Tensor):
            means[norm] = mean

    # What is written here is put back after the step. Buffers are exchanged, not written into: the backward needs them
    # as they were. And those of the old model are lowered after the backward, which may run layers once more.
    def norms_of(now: nn.Module, taken: bool) -> dict[str, Any]:
        fed = {norm: now.get_submodule(cancelled[norm]).bias is None for norm in means}
        return {norm: now.get_submodule(norm) for norm in means if fed[norm] is taken}

    def run(now: nn.Module, given: Any) -> Any:
        for norm, layer in norms_of(now, taken=True).items():
            if layer.running_mean.dtype != means[norm].dtype:  # float64: as if lowered there
                layer.running_mean = means[norm].to(layer.running_mean) - biases[norm].to(layer.running_mean)
        return (forward or call_with)(now, given)

    def finish(now: nn.Module) -> None:
        for norm, layer in norms_of(now, taken=False).items():
            layer.running_mean = layer.running_mean.detach() - biases[norm].to(layer.running_mean)

    allowed = None if tolerance is None else tolerance * _IN_BATCH_MODE
    found = verify_gradients(
        before, lean, example, verb="drop_bias", forward=run, tolerance=allowed, finish=finish, optional=True
    )
    if found is None and takes_steps(in_mode(before, False), example, forward or call_with):
        step(in_mode(before, True), example, forward or call_with, where="drop_bias")  # raises, and says why
    return found


def takes_steps(model: nn.Module, example: Any, run: Forward) -> bool:
    """Return whether a model can run backward; one made for inference may use operations without gradients.

    >>> takes_steps(nn.Linear(2, 2), torch.ones(1, 2), call_with)
    True
    """
    try:
        step(model, example, run)
    except Exception:
        return False
    return True
