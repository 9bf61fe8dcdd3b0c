"""A model's dataflow, found by watching one run: which call made each tensor, and which calls used it.

Watching works where symbolic tracing gives up (control flow on values, shapes and types; arguments of any structure),
because the model simply runs. What it shows is that one run, with that example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_forward_hooks_always_called,
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from batchnorm.calling import call_with
from batchnorm.checks import check_model
from batchnorm.dataflow import Call, Graph, Value
from batchnorm.errors import BatchNormError
from batchnorm.kernels.storage import check_memory
from batchnorm.nested import fresh, tensors_in
from batchnorm.preserve import parameters, untouched

# Questions about a tensor, not computations with it. What gives numbers to Python (item, tolist, numpy) is a reader.
_LOOKS = frozenset(
    {
        "size", "dim", "numel", "stride", "is_contiguous", "__len__", "storage_offset", "element_size", "data_ptr",
        "is_floating_point", "is_complex", "is_signed", "is_same_size", "nelement", "ndimension", "get_device",
        "register_hook", "requires_grad_", "retain_grad", "__hash__", "__repr__", "__format__", "backward", "is_pinned",
        "is_inference", "is_shared", "untyped_storage", "storage", "_version", "is_nonzero_static", "result_type",
        "__set__", "__delete__",
    }
)  # fmt: skip


# Of those, what a layer in the tensor's way may change.
_SIZES = frozenset({"shape", "size", "numel", "nelement", "stride", "is_contiguous"})
# These look at the shape of their other argument, or of their only one, and not at its numbers.
_AS = frozenset({"reshape_as", "view_as", "expand_as", "type_as"})
_LIKES = frozenset(
    {"zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_empty"}
)
_GLOBAL_FLAGS = (_global_forward_hooks_always_called, _global_forward_hooks_with_kwargs)


def trace(
    model: nn.Module,
    example: Any,
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    opaque: Callable[[nn.Module], bool] | None = None,
) -> Graph:
    """Run the model once and return what flowed where; the model is left as it was.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.bn = nn.BatchNorm1d(3)
    ...     def forward(self, x):
    ...         return torch.relu(self.bn(x) + x)
    >>> [call.name for call in trace(Block(), torch.randn(4, 3)).calls]
    ['bn', 'add', 'relu']

    ``example`` is what the model is called with: a tensor, a tuple of positional arguments, a dictionary of keyword
    arguments; anything else goes through ``forward(model, example)``. The model gets a copy of it. A module of
    ``torch.nn`` without submodules, or a scripted one, is one call, and what happens inside is not looked at;
    ``opaque`` says of which others the same holds (by default, those that are batch norm).

    The model runs in the mode it is in, without gradients; parameters, buffers, modes, hooks, attributes and random
    states are put back, also if it raises. Every tensor of the run is kept until it ends, so it takes the memory of a
    training step.
    """
    check_ready(model, "trace")
    check_forward(forward, "trace")
    recorder = _Recorder(model, opaque or _is_norm)
    with torch.inference_mode(False), torch.no_grad(), parameters(model), untouched(model), recorder.hooked():
        given = fresh(example)
        recorder.inputs(given)
        with recorder:
            result = call_with(model, given) if forward is None else forward(model, given)
        recorder.finish(result)
    return recorder.graph


def check_shapes(model: nn.Module, where: str) -> None:
    """Raise for a model with layers that do not know their shapes yet: it can neither be copied nor measured.

    >>> check_shapes(nn.Sequential(nn.LazyLinear(2)), "fuse")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: fuse: 0 (LazyLinear) does not know its shapes yet; run the model once first
    """
    check_model(model, where)
    for path, module in model.named_modules():
        if any(map(is_lazy, (*module._parameters.values(), *module._buffers.values()))):
            name = f"{path or 'the model'} ({type(module).__name__})"
            raise BatchNormError(f"{name} does not know its shapes yet", where=where, do="run the model once first")
    check_weights(model, where)


def check_ready(model: nn.Module, where: str) -> None:
    """Raise for a model whose modules cannot be watched one by one: a compiled one, or one without its weights.

    >>> check_ready(nn.LazyLinear(3), "fold")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: fold: the model (LazyLinear) does not know its shapes yet; run the model once first
    """
    check_shapes(model, where)
    for path, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules:  # importing it takes seconds
            raise BatchNormError(
                f"{path or 'the model'} (OptimizedModule) is compiled",
                where=where,
                do="give the model itself (its ._orig_mod), and compile the result",
            )


def check_hookable(model: nn.Module, where: str) -> None:
    """Raise for what `check_ready` raises for, and for a model compiled in place: its hooks would not run as it trains.

    >>> model = nn.Sequential(nn.Linear(2, 1))
    >>> model[0].compile()
    >>> check_hookable(model, "watch")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: watch: 0 (Linear) is compiled; watch some steps without compile() first
    """
    check_ready(model, where)
    for path, module in model.named_modules():
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise BatchNormError(
                f"{path or 'the model'} ({type(module).__name__}) is compiled",
                where=where,
                do=f"{where} some steps without compile() first",
            )


def check_weights(model: nn.Module, where: str) -> None:
    """Raise for a model whose memory was freed or shrunk: copying it or calling torch's layers would end the process.

    >>> model = nn.Linear(2, 1)
    >>> _ = model.weight.untyped_storage().resize_(0)
    >>> check_weights(model, "fold")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: fold: the memory of weight was freed: its shape [1, 2] needs 8 bytes, its storage \
has 0; give the model with its weights in memory, as before sharding
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        check_memory(tensor, name, where, "give the model with its weights in memory, as before sharding")


def check_forward(forward: Any, where: str) -> None:
    """Raise for a ``forward=`` that cannot be called.

    >>> check_forward(3, "calibrate")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: calibrate: forward is 3; give a function of the model and of what it is called with
    """
    if forward is not None and not callable(forward):
        raise BatchNormError(
            f"forward is {forward!r}", where=where, do="give a function of the model and of what it is called with"
        )


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


class _Recorder(TorchFunctionMode):
    """Writes down the calls of one run."""

    def __init__(self, model: nn.Module, opaque: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self.model, self.graph = model, Graph()
        self.graph.modules = dict(model.named_modules(remove_duplicate=False))
        self.paths: dict[nn.Module, str] = {module: path for path, module in model.named_modules()}
        self.leaves = {module: opaque(module) or _is_one_call(module) for module in self.paths}
        self.scopes: list[str] = []
        self.entered: list[dict[int, tuple[Tensor, int]]] = []  # what the modules that are one call were given
        self.known: dict[int, int] = {}  # of a tensor's id: its value
        self.alive: dict[int, Tensor] = {}  # ids are those of living objects only
        self.sharing: dict[int, list[Tensor]] = {}  # of a memory block: the tensors seen in it
        self.owned = {id(t): path for path, t in [*model.named_parameters(), *model.named_buffers()]}
        self.times: dict[nn.Module, int] = dict.fromkeys(self.paths, 0)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Have every module say when it is called."""
        handles: list[Any] = []
        scripted: list[nn.Module] = [module for module in self.paths if isinstance(module, torch.jit.ScriptModule)]
        try:
            for module in self.paths:
                if module not in scripted:
                    handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
                    # Always called: a model may catch what one of its modules raises, and go on.
                    handles.append(module.register_forward_hook(self._leave, with_kwargs=True, always_call=True))
            if scripted:  # they take no hooks of their own, but those that are for every module reach them
                enter, leave = self._for_scripted(scripted)
                handles.append(register_module_forward_pre_hook(enter))
                handles.append(register_module_forward_hook(leave, with_kwargs=True, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
                for flags in _GLOBAL_FLAGS:  # torch forgets these
                    flags.pop(handle.id, None)

    def _for_scripted(self, scripted: list[nn.Module]) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(module: nn.Module, args: Any) -> None:
            if module in scripted:
                self._enter(module, args, {})

        def leave(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            if module in scripted:
                self._leave(module, args, kwargs, result)

        return enter, leave

    def inputs(self, example: Any) -> None:
        """Note the example's tensors."""
        self.graph.inputs = tuple(self._value(t, None, "input") for t in tensors_in(example))

    def finish(self, result: Any) -> None:
        """Note what the model returned, how often each module was called, and which never."""
        graph = self.graph
        graph.outputs = tuple(self._read(tensors_in(result)))
        graph.times = {path: self.times[module] for path, module in graph.modules.items()}
        graph.unused = tuple(p for m, p in self.paths.items() if not self.times[m] and not list(m.children()))

    def _value(self, tensor: Tensor, producer: int | None, source: str) -> int:
        index = len(self.graph.values)
        with torch._C.DisableTorchFunction():  # a look at a tensor's shape is not a call of the model
            self.graph.values.append(Value(index, tuple(tensor.shape), tensor.dtype, producer, source))
        self.known[id(tensor)] = index
        if id(tensor) not in self.alive:
            self.alive[id(tensor)] = tensor
            self.sharing.setdefault(_memory(tensor), []).append(tensor)
        return index

    def _read(self, tensors: list[Tensor]) -> list[int]:
        """Return the numbers of some tensors; one that no call made is a parameter, a buffer or a constant."""
        return [
            self.known[id(t)] if id(t) in self.known else self._value(t, None, self.owned.get(id(t), "constant"))
            for t in tensors
        ]

    def _record(
        self, kind: str, name: str, target: Any, args: Any, kwargs: Any, before: dict[int, tuple[Tensor, int]],
        result: Any,
    ) -> None:  # fmt: skip
        given = [tensor for tensor, _ in before.values()]
        read = self._read(given)
        slots = {**{str(i): a for i, a in enumerate(args)}, **kwargs}
        arguments = {slot: self.known[id(a)] for slot, a in slots.items() if id(a) in before}
        written = [t for t, version in before.values() if _version(t) != version or (version < 0 and _writes(target))]
        results = tensors_in(result)
        made = {id(t): t for t in results}
        for tensor in written:  # every tensor in that memory has new contents
            made.update({id(t): t for t in self.sharing.get(_memory(tensor), ())})
        passes = not written and len(results) == 1 and bool(given) and results[0] is given[0]
        index = len(self.graph.calls)
        outputs = tuple(self._value(t, index, "call") for t in made.values())
        scope = self.scopes[-1] if self.scopes else ""
        options = {slot: a for slot, a in slots.items() if _is_option(a)}
        call = Call(index, kind, name, target, scope, tuple(read), outputs, arguments, passes, options)
        self.graph.calls.append(call)

    # ---- modules

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.times[module] += 1
        if self.leaves[module]:
            self.entered.append(_versions(args, kwargs))
        self.scopes.append(self.paths[module])

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        self.scopes.pop()
        if not self.leaves[module]:
            return
        before = self.entered.pop()
        if not self.entered:
            # A pre-hook of the user's may have exchanged the arguments since.
            before = {**_versions(args, kwargs), **before}
            with torch._C.DisableTorchFunction():
                self._record("module", self.paths[module], module, args, kwargs, before, result)

    # ---- functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if self.entered or name in _LOOKS:
            if name in _SIZES:
                self._note_measured(args)
            return func(*args, **kwargs)
        before = {} if name in _LIKES else _versions(args[:1], {}) if name in _AS else _versions(args, kwargs)
        result = func(*args, **kwargs)
        if name == "__get__":  # an attribute: x.T is a call, x.shape is a look
            name = getattr(getattr(func, "__self__", None), "__name__", name)
            if not tensors_in(result):
                if name in _SIZES:
                    self._note_measured(args)
                return result
        if before or tensors_in(result):
            self._record("function", plain(name), func, args, kwargs, before, result)
        return result

    def _note_measured(self, args: tuple[Any, ...]) -> None:
        if not self.entered:
            self.graph.measured.update(self.known[id(t)] for t in args if id(t) in self.known)


def _is_option(thing: Any) -> bool:
    """Whether an argument is a number, a word or nothing, or a few of them."""
    if isinstance(thing, (tuple, list)):
        return len(thing) <= 8 and all(isinstance(item, _OPTION) for item in thing)
    return isinstance(thing, _OPTION)


_OPTION = (type(None), bool, int, float, str)


def _memory(tensor: Tensor) -> int:
    """The identity of the memory a tensor lies in; its own if it has none that could be shared."""
    try:
        with torch._C.DisableTorchFunction():
            return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # a sparse tensor, for one
        return -id(tensor)


def _version(tensor: Tensor) -> int:
    """How often a tensor was written to; -1 if torch does not count."""
    with torch._C.DisableTorchFunction():
        return -1 if tensor.is_inference() else int(tensor._version)


def _versions(args: Any, kwargs: Any) -> dict[int, tuple[Tensor, int]]:
    return {id(t): (t, _version(t)) for t in tensors_in(*args, *kwargs.values())}


def _writes(target: Any) -> bool:
    """Whether a module or a function says that it writes to what it is given.

    >>> _writes(torch.relu_), _writes(torch.Tensor.__iadd__), _writes(nn.ReLU())
    (True, True, False)
    """
    if isinstance(target, nn.Module):
        return bool(getattr(target, "inplace", False))
    name = getattr(target, "__name__", "")
    bare = name.strip("_")
    if name.startswith("__"):
        return bare == "setitem" or (bare[:1] == "i" and bare[1:] in _OPERATORS)
    return name.endswith("_")


def plain(name: str) -> str:
    """Return a function's name without what only says how it was called.

    >>> plain("__iadd__"), plain("relu_"), plain("__radd__")
    ('add', 'relu', 'add')
    """
    bare = name.strip("_")
    if name.startswith("__") and bare[:1] in "ir" and bare[1:] in _OPERATORS:
        bare = bare[1:]
    return bare


_OPERATORS = {"add", "sub", "mul", "truediv", "floordiv", "pow", "matmul", "and", "or", "xor", "mod"}


def _is_one_call(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return True  # Python does not see its insides
    return type(module).__module__.startswith("torch.nn.") and not list(module.children())
