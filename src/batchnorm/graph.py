"""A model's dataflow, found by watching one run: which call made each tensor, and which calls used it.

Watching works where symbolic tracing gives up (control flow on values, shapes and types; arguments of any structure),
because the model simply runs. What it shows is that one run, with that example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from batchnorm.preserve import untouched

# Questions about a tensor, not computations with it.
_LOOKS = frozenset(
    {
        "size", "dim", "numel", "stride", "is_contiguous", "__len__", "__get__", "storage_offset", "element_size",
        "data_ptr", "is_floating_point", "is_complex", "nelement", "ndimension", "get_device", "register_hook",
        "requires_grad_", "__bool__", "item", "tolist", "__hash__", "__repr__", "__format__", "backward",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Value:
    """A tensor of the run: its shape and type, and who made it (a call's index, or None: an input or a constant)."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    producer: int | None
    source: str  # "input", "constant", a parameter's or buffer's path, or "call"


@dataclass(frozen=True)
class Call:
    """One call of a module or a function, with the values that it read and made."""

    index: int
    kind: str  # "module" or "function"
    name: str  # a module's path; a function's name: "relu", "add", "cat"
    target: Any  # the module, or the function
    scope: str  # the path of the module whose forward made the call
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def __str__(self) -> str:
        what = f"{self.name} ({type(self.target).__name__})" if self.kind == "module" else self.name
        read, made = (", ".join(f"%{v}" for v in values) for values in (self.inputs, self.outputs))
        return f"{made or '-'} = {what}[{read}]"


@dataclass
class Graph:
    """What `trace` saw.

    >>> model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU())
    >>> print(trace(model, torch.randn(2, 3)))
    %1 = 0 (Linear)[%0]  2x4
    %2 = 1 (BatchNorm1d)[%1]  2x4
    %3 = 2 (ReLU)[%2]  2x4
    """

    calls: list[Call] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    unused: tuple[str, ...] = ()  # modules that have no submodules and were not called

    def producer(self, value: int) -> Call | None:
        """Return the call that made a value, or None for an input, a parameter, a constant.

        >>> graph = trace(nn.Sequential(nn.ReLU()), torch.randn(2))
        >>> graph.producer(graph.outputs[0]).name
        '0'
        """
        made_by = self.values[value].producer
        return None if made_by is None else self.calls[made_by]

    def consumers(self, value: int) -> list[Call]:
        """Return the calls that read a value.

        >>> graph = trace(nn.Sequential(nn.ReLU()), torch.randn(2))
        >>> [call.name for call in graph.consumers(graph.inputs[0])]
        ['0']
        """
        return [call for call in self.calls if value in call.inputs]

    def of(self, module: nn.Module | str) -> list[Call]:
        """Return the calls of a module, given itself or its path.

        >>> model = nn.Sequential(nn.ReLU(), nn.Tanh())
        >>> len(trace(model, torch.randn(2)).of("1"))
        1
        """
        return [c for c in self.calls if c.kind == "module" and (c.target is module or c.name == module)]

    def feeds_output(self, value: int) -> bool:
        """Whether a value is (part of) what the model returns.

        >>> graph = trace(nn.Sequential(nn.ReLU(), nn.Tanh()), torch.randn(2))
        >>> graph.feeds_output(graph.of("0")[0].outputs[0])
        False
        """
        return value in self.outputs

    def __str__(self) -> str:
        def shapes(call: Call) -> str:
            return ", ".join("x".join(map(str, self.values[v].shape)) or "scalar" for v in call.outputs)

        return "\n".join(f"{call}  {shapes(call)}" for call in self.calls)


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
    arguments; anything else goes through ``forward(model, example)``. A module of ``torch.nn`` without submodules is
    one call, and what happens inside is not looked at; ``opaque`` says of which others the same holds (by default,
    those that are batch norm). The model runs in the mode it is in, without gradients; buffers, modes, hooks and random
    states are put back, also if it raises.
    """
    recorder = _Recorder(model, opaque or _is_norm)
    with untouched(model), torch.no_grad(), recorder.hooked():
        recorder.inputs(example)
        with recorder:
            result = call_with(model, example) if forward is None else forward(model, example)
        recorder.finish(result)
    return recorder.graph


def call_with(model: nn.Module, example: Any) -> Any:
    """Call a model with an example: a tensor, a tuple of arguments, or a dictionary of named ones.

    >>> call_with(nn.Bilinear(2, 3, 4), (torch.zeros(5, 2), torch.zeros(5, 3))).shape
    torch.Size([5, 4])
    """
    if isinstance(example, dict):
        return model(**example)
    if isinstance(example, (tuple, list)):
        return model(*example)
    return model(example)


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


class _Recorder(TorchFunctionMode):
    """Writes down the calls of one run."""

    def __init__(self, model: nn.Module, opaque: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self.model, self.graph = model, Graph()
        self.paths: dict[nn.Module, str] = {}
        for path, module in model.named_modules():
            self.paths.setdefault(module, path)
        self.leaves = {
            module: opaque(module) or (not any(True for _ in module.children()) and _of_torch(module))
            for module in self.paths
        }
        self.scopes: list[str] = []
        self.inside = 0  # how deep in a module that is one call
        self.known: dict[int, int] = {}  # of a tensor's id: its value
        self.alive: list[Any] = []  # ids are those of living objects only
        self.owned = {id(t): path for path, t in [*model.named_parameters(), *model.named_buffers()]}
        self.called: set[nn.Module] = set()

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Have every module say when it is called."""
        handles = []
        try:
            for module in self.paths:
                handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
                handles.append(module.register_forward_hook(self._leave, with_kwargs=True, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def inputs(self, example: Any) -> None:
        """Note the example's tensors."""
        self.graph.inputs = tuple(self._value(t, None, "input") for t in tree_leaves(example) if isinstance(t, Tensor))

    def finish(self, result: Any) -> None:
        """Note what the model returned, and which modules it did not call."""
        graph = self.graph
        graph.outputs = tuple(self._read(result))
        graph.unused = tuple(
            path for module, path in self.paths.items() if module not in self.called and not any(module.children())
        )

    def _value(self, tensor: Tensor, producer: int | None, source: str) -> int:
        index = len(self.graph.values)
        with torch._C.DisableTorchFunction():  # a look at a tensor's shape is not a call of the model
            shape, dtype = tuple(tensor.shape), tensor.dtype
        self.graph.values.append(Value(index, shape, dtype, producer, source))
        self.known[id(tensor)] = index
        self.alive.append(tensor)
        return index

    def _read(self, *structures: Any) -> list[int]:
        """The values of the tensors in some arguments; one that nobody made is a parameter, a buffer or a constant."""
        found: list[int] = []
        for tensor in tree_leaves(structures):
            if not isinstance(tensor, Tensor):
                continue
            if id(tensor) in self.known:
                index = self.known[id(tensor)]
            else:
                index = self._value(tensor, None, self.owned.get(id(tensor), "constant"))
            if index not in found:
                found.append(index)
        return found

    def _record(self, kind: str, name: str, target: Any, scope: str, read: list[int], result: Any) -> None:
        index = len(self.graph.calls)
        made = [self._value(t, index, "call") for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.graph.calls.append(Call(index, kind, name, target, scope, tuple(read), tuple(made)))

    # ---- modules

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.called.add(module)
        path = self.paths[module]
        if self.leaves[module]:
            self.inside += 1
        self.scopes.append(path)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        self.scopes.pop()
        if not self.leaves[module]:
            return
        self.inside -= 1
        if not self.inside:
            read = self._read(args, kwargs)
            scope = self.scopes[-1] if self.scopes else ""
            self._record("module", self.paths[module], module, scope, read, result)

    # ---- functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.inside:
            return func(*args, **kwargs)
        read = self._read(args, kwargs)
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name not in _LOOKS and any(isinstance(t, Tensor) for t in tree_leaves(result)):
            scope = self.scopes[-1] if self.scopes else ""
            self._record("function", plain(name), func, scope, read, result)
        return result


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


def _of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")
