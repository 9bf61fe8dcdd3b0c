"""``fuse``: BN, the sum after it and the activation after that in one pass over memory, for training on CPUs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.calling import call_with, failed_in_training
from batchnorm.dataflow import Call, Graph
from batchnorm.errors import BatchNormError
from batchnorm.graph import trace
from batchnorm.layers.batch import OURS, _BatchNormBase
from batchnorm.layers.options import Activation
from batchnorm.nested import few_samples, fresh
from batchnorm.optim import Optimizers
from batchnorm.preserve import _HOOKS, in_mode, untouched
from batchnorm.records import Change, Report
from batchnorm.transforms.changed import Changed
from batchnorm.transforms.follow import check_changeable, check_optimizers, copied_with, follow
from batchnorm.transforms.freeze import check_reached, is_frozen
from batchnorm.transforms.gradients import TOLERANCE, Step, apart, double, step, verify_gradients
from batchnorm.transforms.inside import become_ours
from batchnorm.transforms.left_behind import left_behind
from batchnorm.transforms.outputs import Forward
from batchnorm.transforms.rewrite import Wanted, activation_of, rewrite
from batchnorm.transforms.stages import in_stages
from batchnorm.transforms.verify import check_arguments, verify

_FUNCTIONS = ("relu", "relu6", "leaky_relu")  # as the graph names them


@in_stages
def fuse(
    model: nn.Module,
    example: Any,
    *,
    forward: Forward | None = None,
    optimizer: Optimizers = None,
    tolerance: float | None = None,
    progress: bool | None = None,
) -> tuple[nn.Module, Report]:
    """Return a copy that trains faster on a CPU: our BN layers, with the sums and activations after them inside.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    >>> fused, report = fuse(model, torch.randn(2, 3, 8, 8))
    >>> fused[1].activation, fused[2]
    ('relu', Identity())
    >>> list(fused.state_dict()) == list(model.state_dict())
    True

    torch's ``BatchNorm1d/2d/3d`` become ours, and so do classes that are batch norm followed by the modules in them, as
    timm's with dropout and activation, which is tried. A ReLU, ReLU6 or LeakyReLU that alone reads what a BN layer
    makes goes into the layer; so does a sum with a tensor of the same shape before it (``relu(bn(x) + identity)``).
    Where both are modules, the activation becomes an ``Identity``; where they are functions, operators, or an
    activation module with other callers, the forward of the smallest module around them is rewritten with torch.fx,
    and the module gets a subclass of its class that has this forward. Code that torch.fx cannot trace stays as it is,
    and its layers are only exchanged: the report says why.

    Keys of the ``state_dict``, hooks, modes, ``deepcopy`` and ``pickle`` go on as before. What a fused layer returns
    is what the activation returned, so a layer or activation that has hooks is left alone; so is whatever a run with
    the example, in training or in evaluation mode, shows to be used in another way. Paths that the example does not
    take are not seen.

    The report has two certificates: outputs in evaluation mode, and gradients (of parameters and inputs, with the
    buffers after the step) in both modes. Above the tolerance `NotEquivalent` is raised. The argument is not changed;
    optimisers that are given go over to the copy, with groups and state.
    ``progress``: after two seconds a line on stderr says what is being compared; by default, on a terminal.
    """
    check_arguments(model, forward, tolerance, "fuse")
    check_changeable(model, "fuse")
    optimizers = check_optimizers(model, optimizer, "fuse")
    before, _ = copied_with(model, where="fuse")
    fused = copy.deepcopy(before)
    work = _Fusing(before, fused, example, forward)
    work.run()
    check_reached("fuse", work.changes, work.left, fused)
    with untouched(before), untouched(fused):
        before.eval()
        fused.eval()
        certificate = verify(
            before, fused, example, verb="fuse", forward=forward, tolerance=tolerance,
            unchanged=lambda path: path not in work.touched,
        )  # fmt: skip
    gradients = verify_gradients(before, fused, example, verb="fuse", forward=forward, tolerance=tolerance)
    follow(optimizers, model, fused)
    left_behind(model, fused, "fuse")
    return Changed((fused, Report(tuple(work.changes), work.left, certificate, gradients)))


@dataclass(frozen=True)
class _Tail:
    """What follows a call of a BN layer."""

    scope: str  # the module in whose forward it happens
    inner: str  # the module that calls the BN layer
    residual: bool
    activation: bool
    module: nn.Module | None  # the activation, if it is a module


class _Fusing:
    """One model's BN layers, each exchanged, fused, or left with a reason."""

    def __init__(self, before: nn.Module, model: nn.Module, example: Any, forward: Forward | None) -> None:
        self.before, self.model, self.example, self.forward = before, model, example, forward
        self.changes: list[Change] = []
        self.left: dict[str, str] = {}
        self.touched: set[str] = set()
        self.tried: set[Any] = set()
        self.paths: dict[nn.Module, str] = {}
        for path, module in model.named_modules():
            self.paths.setdefault(module, path)

    def run(self) -> None:
        norms = self._exchange()
        self.graphs = list(self._watch())
        tails: dict[nn.Module, _Tail] = {}
        for layer in norms:
            tail = self._tail(layer)
            if isinstance(tail, _Tail):
                tails[layer] = tail
            else:
                self.left[self.paths[layer]] = f"not fused: {tail}"
        for norm in self._fuse_modules(tails):
            del tails[norm]
        by_scope: dict[str, dict[nn.Module, _Tail]] = {}
        for norm, tail in tails.items():
            by_scope.setdefault(tail.scope, {})[norm] = tail
        inputs = self._inputs_of(list(by_scope))
        for scope in sorted(by_scope, key=lambda path: -path.count(".")):  # inner ones first
            self._fuse_code(scope, by_scope[scope], inputs.get(scope, []))

    def _exchange(self) -> list[_BatchNormBase]:
        """Give torch's layers our class; return those that may be fused."""
        norms: list[_BatchNormBase] = []
        seen = False
        for module, path in self.paths.items():
            if not isinstance(module, _BatchNorm):
                continue
            seen = True
            ours = OURS.get(type(module))
            if ours is not None:
                self._note(path, "class", f"torch.nn.{type(module).__name__}", f"batchnorm.{ours.__name__}")
                module.__class__ = ours
            if type(module) not in OURS.values():
                was = type(module).__name__
                reason = "it is frozen" if is_frozen(module) else become_ours(module)
                if reason:
                    self.left[path] = reason
                    continue
                self._note(path, "class", was, f"batchnorm.{type(module).__name__}")
                if isinstance(module, _BatchNormBase) and module.activation is not None:
                    self._note(path, "activation", "a module inside", module.activation)
            assert isinstance(module, _BatchNormBase)
            if type(module) in OURS.values() and not self._is_done(path):
                norms.append(module)
        if not seen:
            raise BatchNormError(
                "the model has no BN layer to fuse", where="fuse", do="give it a model with BatchNorm layers"
            )
        return norms

    def _is_done(self, path: str) -> bool:
        """Whether a layer got its activation from inside its old class."""
        return any(change.path == path and change.what == "activation" for change in self.changes)

    def _note(self, path: str, what: str, before: Any, after: Any) -> None:
        self.changes.append(Change(path, what, before, after))
        self.touched.add(path)

    def _watch(self) -> Iterator[Graph]:
        for training in (True, False):
            with untouched(self.model):
                now = in_mode(self.model, training)
                try:
                    found = trace(now, self.example, forward=self.forward)
                except BatchNormError:
                    raise
                except Exception as error:
                    if not training:
                        raise
                    raise failed_in_training(now, error, "fuse") from error
                yield found

    # ---- what follows a layer

    def _tail(self, norm: _BatchNormBase) -> _Tail | str:
        if norm.activation is not None:
            return "it has an activation already"
        if _hooked(norm):
            return "it has hooks, which would see something else"
        tails: set[_Tail] = set()
        for graph in self.graphs:
            for call in graph.of(norm):
                tail = _after(graph, call)
                if isinstance(tail, str):
                    return tail
                tails.add(tail)
        if not tails:
            return self.graphs[0].uncalled(norm)
        if len(tails) > 1:
            return "it is called several times, and followed by different things"
        tail = tails.pop()
        if tail.module is not None and _hooked(tail.module):
            return f"{self.paths[tail.module]} has hooks, which would see something else"
        return tail

    # ---- modules: no code is touched

    def _fuse_modules(self, tails: dict[nn.Module, _Tail]) -> list[nn.Module]:
        """Fuse what needs no new code: an activation module that serves BN layers only."""
        served: dict[nn.Module, list[nn.Module]] = {}
        for norm, tail in tails.items():
            if tail.module is not None and not tail.residual:
                served.setdefault(tail.module, []).append(norm)
        done: list[nn.Module] = []
        for module, norms in served.items():
            fused_calls = [
                (id(graph), reader.index)
                for graph in self.graphs for norm in norms for call in graph.of(norm)
                for reader in graph.consumers(call.outputs[0])
            ]  # fmt: skip
            others: set[str] = set()  # scopes with calls that something else feeds
            scopes: set[str] = set()
            for graph in self.graphs:
                for call in graph.of(module):
                    scopes.add(call.scope)
                    if (id(graph), call.index) not in fused_calls:
                        others.add(call.scope)
            holders = {path: self.model.get_submodule(path) for path in scopes}
            own = all(any(child is module for child in m._modules.values()) for m in holders.values())
            if others and not own:
                continue
            fit = [norm for norm in norms if tails[norm].scope not in others]
            within = [holders[tails[norm].scope] for norm in fit] if own else list(self.model.modules())
            for holder in dict.fromkeys(within):
                for name, child in holder._modules.items():
                    if child is module:
                        holder._modules[name] = nn.Identity().train(module.training)
                        path = f"{self.paths[holder]}.{name}".lstrip(".")
                        self._note(path, "class", type(module).__name__, "Identity")
            for norm in fit:
                does = activation_of(module)
                assert does is not None
                self._activate(norm, does)
            done += fit
        return done

    def _activate(self, norm: nn.Module, does: tuple[Activation | None, float], residual: bool = False) -> None:
        assert isinstance(norm, _BatchNormBase)
        path, (activation, slope) = self.paths[norm], does
        if residual:
            self._note(path, "residual", None, "the sum after it")
        if activation is not None:
            self._note(path, "activation", None, activation)
            norm.activation = activation
            if activation == "leaky_relu":
                norm.negative_slope = slope

    # ---- code

    def _fuse_code(self, scope: str, tails: dict[nn.Module, _Tail], inputs: list[Any]) -> None:
        """Rewrite the forward of one module, if its results stay the same."""
        block = self.model.get_submodule(scope)
        start = f"{scope}." if scope else ""
        wanted: dict[str, Wanted] = {}
        norms: dict[str, nn.Module] = {}
        inline: set[str] = set()
        # A sum of two BN layers goes into one of them: rather one that this forward calls itself.
        for norm, tail in sorted(tails.items(), key=lambda item: item[1].inner != scope):
            between = self._between(norm, tail)
            path = self.paths[norm]
            if isinstance(between, str):
                self.left[path] = f"not fused: {between}"
                continue
            inline |= {inner[len(start) :] for inner in between}
            norms[path[len(start) :]] = norm
            wanted[path[len(start) :]] = Wanted(tail.residual, tail.activation)
        if not wanted:
            return
        made, fused, left = rewrite(block, wanted, frozenset(inline))
        if made is not None:
            reason = self._try(block, scope, made, {norms[p]: does for p, does in fused.items()}, inputs)
            if reason:
                left |= dict.fromkeys(fused, reason)
            else:
                self._note(scope, "class", made.__mro__[1].__name__, made.__name__)
                for inner in inline:
                    self.touched.add(start + inner)
                for path, does in fused.items():
                    self._activate(norms[path], does, wanted[path].residual)
        self.left |= {start + path: f"not fused: {reason}" for path, reason in left.items()}

    def _between(self, norm: nn.Module, tail: _Tail) -> list[str] | str:
        """The Sequentials that the BN layer ends, inside the module whose code is written."""
        block = self.model.get_submodule(tail.scope)
        if isinstance(block, nn.Sequential) and type(block).forward is nn.Sequential.forward:
            return "its activation is also called for other layers"
        found: list[str] = []
        path, last = self.paths[norm], norm
        while True:
            path = path.rpartition(".")[0]
            if path == tail.scope:
                return found
            outer = self.model.get_submodule(path)
            name = type(outer).__name__
            if not path or type(outer).forward is not nn.Sequential.forward or outer._modules == {}:
                return f"it is called inside {path or 'the model'} ({name}), and what follows is outside"
            if list(outer._modules.values())[-1] is not last:
                return f"it is not the last of {path}"
            if _hooked(outer):
                return f"{path} has hooks, which would not be called"
            found.append(path)
            last = outer

    def _inputs_of(self, scopes: list[str]) -> dict[str, list[Any]]:
        """What the modules are called with, in training and in evaluation: the first call of each."""
        found: dict[str, list[Any]] = {scope: [] for scope in scopes}

        def keep(scope: str) -> Any:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                if not any(training is module.training for training, *_ in found[scope]):
                    found[scope].append((module.training, *fresh((args, kwargs))))

            return hook

        run = self.forward or call_with
        for training in (True, False):
            with untouched(self.before), torch.no_grad():
                self.before.train(training)
                for scope in scopes:
                    module = self.before.get_submodule(scope)
                    module.register_forward_pre_hook(keep(scope), with_kwargs=True, prepend=True)
                run(self.before, fresh(self.example))
        return found

    def _try(
        self, block: nn.Module, scope: str, made: type[nn.Module], fused: dict[Any, Any], inputs: list[Any]
    ) -> str:
        """Give the module its class and compare a step with the old one's; take it back if they differ."""
        assert all(isinstance(norm, _BatchNormBase) for norm in fused)
        was, old = type(block), self.before.get_submodule(scope)
        block.__class__ = made
        kept = {norm: (norm.activation, norm.negative_slope) for norm in fused}
        for norm, (activation, slope) in fused.items():
            norm.activation, norm.negative_slope = activation, slope or _BatchNormBase.negative_slope
        reason = ""
        # The same code over the same kinds of modules need not be tried again.
        key = (made, tuple(type(m) for m in block.modules()), tuple(sorted(map(str, fused.values()))))
        for training, args, kwargs in [] if key in self.tried else inputs:
            try:
                few = few_samples((args, kwargs))
                pair = [_exact_step(old, training, few), _exact_step(block, training, few)]
            except Exception:  # a block may not be content with a few samples, or with float64
                try:
                    pair = [_exact_step(m, training, (args, kwargs)) for m in (old, block)]
                except Exception as error:
                    reason = f"the new code of {scope or 'the model'} could not be tried: {error}"
                    break
            for name, (_, relative, dtype) in apart(*pair).items():
                if not relative <= TOLERANCE.get(dtype, 0.0):
                    reason = f"the new code of {scope or 'the model'} gives other {name}"
        for norm, (activation, slope) in kept.items():
            norm.activation, norm.negative_slope = activation, slope
        if reason:
            block.__class__ = was
        else:
            self.tried.add(key)
        return reason


def _exact_step(block: nn.Module, training: bool, given: Any) -> Step:
    """A step in float64: there, two ways to compute the same do not differ but in the last digits."""
    twin = copy.deepcopy(block).double().train(training)
    return step(twin, double(given), lambda m, given: m(*given[0], **given[1]))


def _after(graph: Graph, call: Call) -> _Tail | str:
    """What follows one call of a BN layer, or why nothing of it can be fused."""
    if len(call.inputs) != 1 or len(call.outputs) != 1:
        return "it is called with more than one tensor"
    value = call.outputs[0]
    reader = _only_reader(graph, value, "its output")
    if isinstance(reader, str):
        return reader
    if _activates(reader):
        module = reader.target if reader.kind == "module" else None
        return _Tail(reader.scope, call.scope, False, True, module)
    if reader.kind != "function" or reader.name != "add":
        kind = f" ({type(reader.target).__name__})" if reader.kind == "module" else ""
        return f"{reader.name}{kind} follows"
    shapes = {(graph.values[v].shape, graph.values[v].dtype) for v in (*reader.inputs, *reader.outputs)}
    if len(reader.inputs) != 2 or len(shapes) != 1:
        return "it is added to something of another shape or type"
    summed = _only_reader(graph, reader.outputs[0], "the sum")
    if isinstance(summed, str) or not _activates(summed) or summed.scope != reader.scope:
        return _Tail(reader.scope, call.scope, True, False, None)
    module = summed.target if summed.kind == "module" else None
    return _Tail(reader.scope, call.scope, True, True, module)


def _only_reader(graph: Graph, value: int, what: str) -> Call | str:
    readers = graph.consumers(value)
    if graph.feeds_output(value):
        return f"the model returns {what}"
    if len(readers) != 1:
        names = ", ".join(reader.name for reader in readers)
        return f"{what} is read by several ({names})" if readers else f"nothing reads {what}"
    return readers[0]


def _activates(call: Call) -> bool:
    if call.kind == "module":
        return activation_of(call.target) is not None
    return call.name in _FUNCTIONS and len(call.inputs) == 1


def _hooked(module: nn.Module) -> bool:
    return any(getattr(module, name, None) for name in _HOOKS)
