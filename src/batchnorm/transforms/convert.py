"""``convert``: change the norms of a model into other kinds, keeping gamma, beta, eps and statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from typing_extensions import Unpack

from batchnorm.calling import batch_forward, call_with
from batchnorm.distributed.groups import hold
from batchnorm.errors import BatchNormError, did_you_mean
from batchnorm.graph import check_forward, check_shapes
from batchnorm.layers.family import find_brick
from batchnorm.layers.foreign import keeps_statistics
from batchnorm.layers.masked import MaskedBatchNorm
from batchnorm.layers.options import NormOptions
from batchnorm.optim import Optimizers
from batchnorm.preserve import untouched
from batchnorm.records import Certificate, Report
from batchnorm.transforms.bricks import OF_BATCHES, kind_of
from batchnorm.transforms.changed import Changed
from batchnorm.transforms.exchange import Exchange, shared
from batchnorm.transforms.follow import (
    carry_over,
    check_changeable,
    check_optimizers,
    copied_with,
    join,
    scripted_norms,
)
from batchnorm.transforms.freeze import check_reached
from batchnorm.transforms.gradients import verify_gradients
from batchnorm.transforms.left_behind import left_behind
from batchnorm.transforms.match import Survey, match
from batchnorm.transforms.measuring import no_batches, streamed
from batchnorm.transforms.outputs import Forward
from batchnorm.transforms.stages import in_stages
from batchnorm.transforms.verify import check_tolerance, verify

Where = str | Iterable[str] | Callable[[str, nn.Module], bool] | None
_HERE = "convert"


@in_stages
def convert(
    model: nn.Module,
    to: str = "sync",
    where: Where = None,
    *,
    example: Any = None,
    data: Iterable[Any] | Tensor | None = None,
    forward: Forward | None = None,
    optimizer: Optimizers = None,
    tolerance: float | None = None,
    process_group: Any = None,
    inplace: bool = False,
    progress: bool | None = None,
    **options: Unpack[NormOptions],
) -> tuple[nn.Module, Report]:
    """Return a copy of the model whose norms are another brick of `make_norm`, and a report.

    >>> model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> grouped, report = convert(model, "group", example=torch.randn(4, 1, 6, 6), groups=32)
    >>> print(report)  # doctest: +ELLIPSIS
    1 module changed
      1: class BatchNorm2d -> GroupNorm, groups None -> 8 of 1 channels, 16 values each (32 wished), keeps \
running_mean, running_var, num_batches_tracked -> nothing
    outputs differ by at most ... on 3 inputs; they are not expected to be equal
    >>> synced, report = convert(model, "sync")
    >>> type(convert(synced, "batch")[0][1])
    <class 'torch.nn.modules.batchnorm.BatchNorm2d'>

    A layer is changed in place: its parameters, hooks, mode and name stay, its class and the attributes of the class
    change. ``options`` are the brick's own (see `make_norm`). By default all BN layers are converted, and to a brick
    with the statistics of batches, if there are ``data``, all other norms. ``where`` chooses: names of layers or of
    modules that contain them, patterns (``"layer1.*.bn?"``), or ``where(name, module) -> bool``. Layers left alone have
    the reason in the report.

    - "batch", "ghost", "renorm", "frozen", "masked" keep the function in evaluation (a masked layer takes a
      mask), and so does "none", a scale and a shift with the statistics in them. "batch" also gives a converted
      layer the class it had.
    - "sync" gives a layer's class a subclass that synchronises the class's own statistics, if a trial shows that it
      normalises once and treats all examples alike otherwise. Convert before wrapping in
      DistributedDataParallel.
    - "group" gets the largest number of groups that divides the channels, up to ``groups`` (32), and leaves groups
      of enough values, which takes an example or data to know: on a 1x1 map, a group of one channel would be its bias.
    - "layer", "instance", "rms", "dyt", "filter-response" keep gamma, beta and eps, too, as far as they have them.

    BN classes with an activation inside, as model libraries have them, are converted if a trial shows that they
    compute batch norm followed by their submodules.

    ``data``: batches, as `calibrate` takes them, for the calibrated match. Gamma and beta of a layer that cannot keep
    the function are then set so that each channel of its output has the mean and the variance, over the data, that it
    had in the model as it was, in evaluation. Layers are done in the order in which they are called, each measured in
    the model in which those before it are converted and matched already: one pass over the data for each. A brick with
    the statistics of batches gets them the same way.

    With an ``example`` (or data) the report has a certificate: where the function is kept, in evaluation, and between
    batch, sync (in one process) and masked also in training, it is held to the tolerance, and `NotEquivalent` is
    raised beyond it; else the difference is measured and reported. Without, nothing is compared.
    ``optimizer``: one or several, made for ``model``; they follow, with groups and state.
    ``progress``: after two seconds a line on stderr says what is being compared; by default, on a terminal.
    """
    to = find_brick(to, _HERE).name
    own: dict[str, Any] = {**options}
    _check(to, process_group, own)
    check_changeable(model, _HERE, inplace=inplace)
    check_tolerance(tolerance, _HERE)
    check_forward(forward, _HERE)
    if not inplace or example is not None or data is not None:
        check_shapes(model, _HERE)
    optimizers = check_optimizers(model, optimizer, _HERE)
    wanted = _chosen(model, where)
    batches = None if data is None else list(streamed(data, _HERE))
    if batches == []:
        raise no_batches(_HERE)
    run = forward or call_with
    if example is None and batches is not None:
        example, run = batches[0], forward or batch_forward(_HERE)
    norms = _norms(model, to, wanted, where is None, batches is not None)
    survey = Survey()
    if to not in (*OF_BATCHES, "none") or not all(isinstance(norm, _BatchNorm) for norm in norms.values()):
        known = {
            path: norm for path, norm in norms.items() if kind_of(norm)
        }  # others stay, and may be called in any way
        if batches is not None:
            survey.run(model, known, batches, forward or batch_forward(_HERE), moments=True)
        elif example is not None:
            survey.run(model, known, [example], run, moments=False)
    before = copied_with(model)[0] if inplace and example is not None else model
    changed, memo = (model, {id(p): p for p in model.parameters()}) if inplace else _copied(model)
    with _all_or_nothing(changed) if inplace else ExitStack():
        done = Exchange(to, own, process_group, survey, batches is not None)
        done.run(changed, list(norms), every=where is None)
        for path in [path for path in survey.given if path in done.to_match]:  # in the order of their calls
            norm = done.to_match[path]
            done.changes += match(
                changed, path, norm, survey.given[path], batches or [], forward or batch_forward(_HERE)
            )
        certificates: tuple[Certificate | None, Certificate | None] = (None, None)
        if example is not None and done.changes:
            certificates = _certificates(before, changed, example, run, tolerance, done)
    left = done.left | scripted_norms(changed, "convert it before torch.jit.script")
    check_reached(_HERE, done.changes, left, changed)
    kept = {id(p) for p in changed.parameters()}
    carry_over(optimizers, {old: new if id(new) in kept else None for old, new in memo.items()})
    for layer, had in done.had.items():
        join(optimizers, had, [p for p in layer.parameters() if all(p is not each for each in had)], changed)
    left_behind(model, changed, _HERE, inplace=True)
    return Changed((changed, Report(tuple(done.changes), left, *certificates)))


def _check(to: str, process_group: Any, options: dict[str, Any]) -> None:
    if to == "weight":
        raise BatchNormError(
            "weight normalisation is of the layer before, not in the place of a norm", where=_HERE,
            do='use make_norm("weight", channels, of=layer)',
        )  # fmt: skip
    if to == "batch" and process_group is not None:
        raise BatchNormError("plain layers have no process_group", where=_HERE, do="leave it out")
    if to != "sync" and process_group is not None:
        raise BatchNormError(f"a {to} norm has no process_group", where=_HERE, do='leave it out, or use "sync"')
    if to == "sync" and options:
        raise BatchNormError(f"sync has no option {next(iter(options))!r}", where=_HERE, do="leave it out")
    hold(process_group, _HERE)
    groups = options.get("groups")
    if to == "group" and groups is not None and (type(groups) is not int or groups < 1):
        raise BatchNormError(
            f"groups is {groups!r}", where=_HERE,
            do="use a whole number from 1 up: each layer gets the largest divisor of its channels up to it that leaves "
            "groups of enough values",
        )  # fmt: skip


def _chosen(model: nn.Module, where: Where) -> Callable[[str, nn.Module], bool]:
    """Return a predicate of path and module for the modules that the caller named."""
    if where is None:
        return lambda path, module: True
    if callable(where):
        return where
    names = [where] if isinstance(where, str) else list(where)
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    for name in names:
        if not any(_names(name, path) for path in paths):
            raise BatchNormError(
                f"the model has no module {name!r}",
                where=_HERE,
                do=did_you_mean(name, paths, "use names of model.named_modules(), or patterns"),
            )
    return lambda path, module: any(_names(name, path) for name in names)


def _names(name: str, path: str) -> bool:
    return path == name or not name or path.startswith(f"{name}.") or fnmatchcase(path, name)


def _norms(
    model: nn.Module, to: str, wanted: Callable[[str, nn.Module], bool], default: bool, measured: bool
) -> dict[str, nn.Module]:
    """The norms that may be converted, each once, by path; weight norms belong to the layer that holds the weight."""
    found: dict[nn.Module, str] = {}
    parametrised = {
        part for each in model.modules() if isinstance(each, ParametrizationList) for part in each.modules()
    }
    for path, module in model.named_modules(remove_duplicate=False):
        others = not default or (measured and to in OF_BATCHES) or (to != "sync" and bool(kind_of(module)))
        fits = isinstance(module, _BatchNorm) or (others and _is_norm(module)) or keeps_statistics(module)
        if fits and module not in parametrised and module not in found and wanted(path, module):
            found[module] = path
    return {path: module for module, path in found.items()}


def _is_norm(module: nn.Module) -> bool:
    return bool(kind_of(module)) or (not any(module.children()) and "norm" in type(module).__name__.lower())


def _copied(model: nn.Module) -> tuple[nn.Module, dict[int, Any]]:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise BatchNormError(
            "a DistributedDataParallel cannot be copied", where=_HERE, do="convert the model, then wrap it"
        )
    # Process groups are shared, not copied.
    groups = [vars(layer).get("process_group") for layer in model.modules()]
    try:
        copied, memo = copied_with(model, {id(group): group for group in groups if group is not None})
    except BatchNormError as error:
        lazy = any(isinstance(layer, _LazyNormBase) for layer in model.modules())
        do = "run the model once, so that lazy layers know their channels" if lazy else "use inplace=True"
        raise BatchNormError(error.problem, where=_HERE, do=do) from error
    return copied, {id(p): memo.get(id(p), p) for p in model.parameters()}


@contextmanager
def _all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Restore the model if a conversion fails."""
    norms = [module for module in model.modules() if _is_norm(module)]
    parts = ("_parameters", "_buffers", "_modules")
    before = [(m, type(m), dict(vars(m)), {part: dict(getattr(m, part)) for part in parts}) for m in norms]
    tensors = [t for m in norms for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
    values = [(t, t.detach().clone()) for t in tensors if not is_lazy(t)]
    try:
        yield
    except BaseException:
        for module, kind, own, held in before:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(own)
            for part, entries in held.items():
                getattr(module, part).clear()
                getattr(module, part).update(entries)
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        raise


def _certificates(
    before: nn.Module, after: nn.Module, example: Any, run: Forward, tolerance: float | None, done: Exchange
) -> tuple[Certificate, Certificate | None]:
    """Compare the two models, in evaluation, and where training is kept too, in training."""
    limit = math.inf if tolerance is None and not done.keeps else tolerance
    with untouched(before), untouched(after), _full_masks(before), _full_masks(after):
        before.eval()
        after.eval()
        outputs = verify(before, after, example, verb=_HERE, forward=run, tolerance=limit)
        if not done.keeps_training or shared(before) or shared(after):
            return outputs, None
        # An example of a single sample may not do for training: then there are no gradients to compare.
        return outputs, verify_gradients(
            before, after, example, verb=_HERE, forward=run, tolerance=tolerance, optional=True
        )


@contextmanager
def _full_masks(model: nn.Module) -> Iterator[None]:
    """Use a mask of ones for masked layers that are called without a mask."""

    def fill(layer: nn.Module, arguments: Any, keywords: Any) -> Any:
        x = arguments[0] if arguments else keywords["input"]
        if len(arguments) > 1 or "mask" in keywords:
            return None
        mask = torch.ones((x.shape[0], *x.shape[2:]), dtype=torch.bool, device=x.device)
        return arguments, {**keywords, "mask": mask}

    with ExitStack() as stack:
        for layer in model.modules():
            if isinstance(layer, MaskedBatchNorm):
                stack.callback(layer.register_forward_pre_hook(fill, with_kwargs=True).remove)
        yield
