"""A training run under ``watch``: when to sample, and what to record."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from batchnorm.errors import BatchNormError
from batchnorm.hooks import Hook, first_tensor
from batchnorm.layers.recompute import in_backward
from batchnorm.observe.journal import Journal
from batchnorm.observe.notebook import html
from batchnorm.observe.places import Place
from batchnorm.observe.quantity import Quantity
from batchnorm.observe.show import show
from batchnorm.observe.sinks import Sink
from batchnorm.observe.subjects import Signal, Weights
from batchnorm.optim import hook_steps
from batchnorm.records import Measurement, RecordFile

UNSEEN = 3  # calls of the model without a step, after which one says so


class Watch:
    """What `batchnorm.watch` returns: a context manager around the training.

    >>> import batchnorm as bn
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> with bn.watch(model, quantities="mean") as seen:
    ...     y = model(torch.zeros(4, 2))
    ...     seen.step()
    >>> seen.steps, [m.setting["layer"] for m in seen.records.measurements]
    (1, ['1'])

    ``steps`` counts optimiser steps, ``failed`` names what was left out and why.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: tuple[Optimizer, ...],
        places: Sequence[Place],
        weighted: Mapping[str, nn.Module],
        quantities: Sequence[Quantity],
        sinks: list[Sink],
        header: RecordFile,
        start: int,
    ) -> None:
        self.steps = start
        self._model, self._optimizers, self._places, self._weighted = model, optimizers, places, weighted
        self._quantities = {of: [q for q in quantities if q.of == of] for of in ("signal", "weights", "gradients")}
        self._journal, self._header = Journal(sinks, header, start), header
        self._every, self._stack = int(header.configuration["every"]), str(header.configuration["stack"])
        self._params = {id(p) for p in model.parameters()}
        self._kept: dict[str, dict[str, Any]] = {}  # of each layer, for the whole run
        self._taken_by_others: set[str] = set()  # the outputs that are seen where they arrive
        self._around, self._looking = ExitStack(), ExitStack()
        self._state = "new"
        self._sampling = self._seen = self._gradients_due = False
        self._trains = False
        self._inside = self._calls = self._stepped_ever = 0
        self._signals: dict[str, list[Measurement]] = {}  # of the step that is looked at, by layer
        self._made: list[tuple[weakref.ref[Tensor], str]] = []
        self._called: dict[str, int] = {}
        self._others: list[Measurement] = []

    # ---- what the user calls

    def log(self, quantity: str, value: Any, *, step: int | None = None, unit: str = "") -> None:
        """Record a number of the whole run, such as "training loss" or "validation accuracy".

        >>> seen.log("training loss", loss)  # doctest: +SKIP

        ``value`` is a number or a tensor of one element; ``step`` is the step that is under way, or just done.
        """
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise BatchNormError(
                    f"{quantity!r} is a tensor of shape {list(value.shape)}", where="watch.log", do="log one number"
                )
            value = value.detach().clone()  # read when it is written: a look at a value of a GPU waits for it
        else:
            try:
                value = float(value)
            except (TypeError, ValueError) as error:
                raise BatchNormError(
                    f"{quantity!r} is a {type(value).__name__}", where="watch.log", do="log one number"
                ) from error
        setting = self._setting("", self.steps if step is None else step)
        self._journal.log(Measurement(quantity, setting, (), unit), value)
        if self._state == "ended" or self._journal.waits_too_long:
            self._write()

    def step(self) -> None:
        """Mark the end of a step, in a loop without a torch optimiser.

        >>> seen.step()  # doctest: +SKIP
        """
        self._before()
        self._after()

    def go_to(self, step: int) -> None:
        """Continue counting from another step.

        >>> seen.go_to(1000)  # doctest: +SKIP
        """
        self._disarm()
        self.steps = step
        if self._state == "running":
            self._arm()

    @property
    def records(self) -> RecordFile:
        """Everything recorded so far; of a file that several networks share, all of them."""
        if self._state == "new":
            return self._header
        self._write()
        return self._journal.records()

    @property
    def failed(self) -> dict[str, str]:
        """What was disabled after an error, and why."""
        return self._journal.failed

    @property
    def running(self) -> bool:
        """Whether the run has started and not ended."""
        return self._state == "running"

    def show(self, console: Any = None) -> None:
        """Print the signal as it is now, with its past as sparklines.

        >>> seen.show()  # doctest: +SKIP
        """
        show(self.records, console)

    def _repr_html_(self) -> str:
        """Let a notebook draw it."""
        return html(self.records)

    # ---- begin and end

    def __enter__(self) -> Watch:
        if self._state != "new":
            raise BatchNormError("this watch has begun before", where="watch", do="make a new one for every run")
        self._remember(self._journal.open())
        self._state = "running"
        add = self._around.callback
        for optimizer in self._optimizers[:1]:
            add(hook_steps(optimizer, self._steps, self._stepped))
        if not self._optimizers:
            add(register_optimizer_step_pre_hook(self._steps).remove)
            add(register_optimizer_step_post_hook(self._stepped).remove)
        self._arm()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._around.close()
        self._disarm()
        self._state = "ended"
        self._write(whole_step=True)
        self._journal.close(self.steps)
        if error is None and self._calls >= UNSEEN and not self._stepped_ever:
            self._journal.warn(
                f"watch: the model was called {self._calls} times and no step of an optimiser was seen, so only the "
                "first is recorded; give optimizer=, or call watch.step() in a loop without one"
            )

    def _remember(self, there: list[Measurement]) -> None:
        """Give every layer the bins it has in records that are continued."""
        options = self._header.configuration
        if options["range"] is None:
            for record in there:
                if record.quantity == "histogram" and record.setting.get("stack", "") == self._stack:
                    self._of(record.setting["layer"])["range"] = (record.setting["low"], record.setting["high"])

    def _of(self, layer: str) -> dict[str, Any]:
        """What is kept of a layer for the whole run: the bins of its histograms."""
        if layer not in self._kept:
            options = self._header.configuration
            given = {} if options["range"] is None else {"range": options["range"]}
            self._kept[layer] = {"bins": options["bins"], **given}
        return self._kept[layer]

    # ---- when to look

    def _arm(self) -> None:
        """Add the hooks if this step is sampled."""
        if self.steps % self._every or self._sampling:
            return
        self._sampling, self._seen, self._gradients_due = True, False, False
        self._clear()
        add = self._looking.callback
        add(self._model.register_forward_pre_hook(Hook(self._call_begins)).remove)
        for place in self._places if self._quantities["signal"] else ():
            if place.at == "input":
                take = Hook(self._arriving(place))
                add(place.module.register_forward_pre_hook(take, with_kwargs=True).remove)
            else:
                add(place.module.register_forward_hook(Hook(self._leaving(place)), with_kwargs=True).remove)
        add(self._model.register_forward_hook(Hook(self._call_ends), always_call=True).remove)

    def _disarm(self) -> None:
        self._looking.close()
        self._sampling = False

    def _clear(self) -> None:
        self._signals, self._made, self._called = {}, [], {}

    def _call_begins(self, model: nn.Module, arguments: Any) -> None:
        if model is not self._model:  # a replica of nn.DataParallel
            return
        self._inside += 1
        if self._inside == 1:
            self._trains = torch.is_grad_enabled() and model.training
            self._calls += self._trains
            if self._trains and not self._seen:
                self._clear()

    def _call_ends(self, model: nn.Module, arguments: Any, output: Any) -> None:
        if model is not self._model:
            return
        self._inside = max(self._inside - 1, 0)
        if self._inside == 0 and self._trains and not self._seen:
            self._seen = output is not None  # None: it raised, and may be tried again
            self._made = []

    def _now(self, module: nn.Module) -> bool:
        """Whether this call is to be recorded: not a second call, a validation or a recomputation."""
        if self._seen or in_backward() or torch._C._are_functorch_transforms_active():
            return False
        return self._trains if self._inside else torch.is_grad_enabled() and module.training

    def _steps(self, optimizer: Optimizer, *_: Any) -> None:
        if self._owns(optimizer):
            self._before()

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if self._owns(optimizer):
            self._after()

    def _owns(self, optimizer: Optimizer) -> bool:
        """Whether this optimiser's steps are counted: the given one, or the first that steps."""
        if not self._optimizers and any(id(p) in self._params for g in optimizer.param_groups for p in g["params"]):
            self._optimizers = (optimizer,)
        return bool(self._optimizers) and optimizer is self._optimizers[0]

    def _before(self) -> None:
        """A step begins; an optimiser with a closure (Lightning's, LBFGS) calls the model only inside of it."""
        if self._sampling:
            self._others = []
            self._read_weights("weights")
            self._gradients_due = not self._signals and not self._seen
            if not self._gradients_due:
                self._read_weights("gradients")

    def _after(self) -> None:
        if self._sampling:
            if self._gradients_due:
                self._read_weights("gradients")
            self._disarm()
            self._write(whole_step=True)
        self._inside = 0
        self.steps += 1
        self._stepped_ever += 1
        if self.steps % self._every == 0 and self._state == "running":
            self._arm()

    # ---- what to read

    def _arriving(self, place: Place) -> Callable[..., None]:
        def arrive(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            x = first_tensor((*arguments, keywords.get("input"), *keywords.values()))
            if x is None or module is not place.module or not self._now(module):
                return
            for made, layer in self._made:
                if made() is x:
                    self._taken_by_others.add(layer)
                    self._signals.pop(layer, None)
            self._read_signal(place, self._name(place), x, _mask(module, arguments, keywords))

        return arrive

    def _leaving(self, place: Place) -> Callable[..., None]:
        def leave(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
            if not isinstance(output, Tensor) or module is not place.module or not self._now(module):
                return
            layer = self._name(place)
            if layer not in self._taken_by_others:
                self._read_signal(place, layer, output, _mask(module, arguments, keywords))
                self._made.append((weakref.ref(output), layer))

        return leave

    def _name(self, place: Place) -> str:
        """The layer's name in the records; a module that is used several times in a pass has several."""
        self._called[place.layer] = call = self._called.get(place.layer, 0) + 1
        return place.layer if call == 1 else f"{place.layer} (call {call})"

    def _read_signal(self, place: Place, layer: str, x: Tensor, mask: Any) -> None:
        """Read all quantities of a signal at once: nothing of it is kept, and it may be overwritten in place."""
        if not x.dtype.is_floating_point or x.is_nested or x.is_sparse or x.is_meta:
            return
        mask = mask if isinstance(mask, Tensor) else None
        signal = Signal(layer, place.module, place.kind, place.at, x, mask, self._of(layer))
        setting = {**self._setting(layer, self.steps), "at": place.at, "kind": place.kind}
        self._signals[layer] = self._read(self._quantities["signal"], signal, setting)

    def _read_weights(self, of: str) -> None:
        quantities = self._quantities[of]
        if not quantities:
            return
        groups = [group for each in self._optimizers for group in each.param_groups if group.get("lr") is not None]
        rates = {id(p): group["lr"] for group in groups for p in group["params"]}
        for layer, module in self._weighted.items():
            own = {name: p for name, p in module._parameters.items() if p is not None}
            known = [rates[id(p)] for p in own.values() if p.dim() > 1 and id(p) in rates]
            weights = Weights(layer, own, float(known[0]) if known else None)
            self._others += self._read(quantities, weights, self._setting(layer, self.steps))

    def _read(self, quantities: Sequence[Quantity], subject: Any, setting: dict[str, Any]) -> list[Measurement]:
        found = []
        for quantity in quantities:
            if quantity.name in self._journal.failed:
                continue
            try:
                with torch.no_grad():
                    reading = quantity.read(subject)
            except Exception as error:  # what breaks here must not break the training
                self._journal.fail(quantity.name, error, self.steps)
                continue
            if reading is not None:
                found.append(Measurement(quantity.name, {**setting, **reading.setting}, reading.samples, quantity.unit))
        return found

    def _setting(self, layer: str, step: int) -> dict[str, Any]:
        setting: dict[str, Any] = {"step": step, "layer": layer}
        return {**setting, "stack": self._stack} if self._stack else setting

    def _write(self, whole_step: bool = False) -> None:
        """Write logged values, and the records of a completed step."""
        found: list[Measurement] = []
        if whole_step:
            found = [m for own in self._signals.values() for m in own] + self._others
            self._signals, self._others = {}, []
        self._journal.write(found, self.steps)


def _mask(module: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """The mask of a padded batch, which our BN layers take as their third argument."""
    return keywords.get("mask", arguments[2] if isinstance(module, _BatchNorm) and len(arguments) > 2 else None)
