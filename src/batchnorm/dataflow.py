"""What one run of a model was: its calls, the values between them, and the questions one asks about those."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Value:
    """A tensor at one moment of the run: its shape and type, and who made it (a call's index; None: an input, ...).

    A tensor that is written to becomes a new value, and so does every other that shares its memory.
    """

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
    # Of the arguments that are tensors: their position ("0", "1") or name, and the value.
    arguments: Mapping[str, int] = field(default_factory=dict)
    passes: bool = False  # it gave back the very tensor that it was given first, and did not write to it
    # Of the arguments that are numbers, words, or lists of those: their position or name, and the value.
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        what = f"{self.name or 'the model'} ({type(self.target).__name__})" if self.kind == "module" else self.name
        read, made = (", ".join(f"%{v}" for v in values) for values in (self.inputs, self.outputs))
        return f"{made or '-'} = {what}[{read}]"


@dataclass
class Graph:
    """What `batchnorm.trace` saw.

    >>> from batchnorm import trace
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
    modules: dict[str, nn.Module] = field(default_factory=dict, repr=False)  # by path; a shared one has several
    times: dict[str, int] = field(default_factory=dict)  # of every module's path: how often it was called
    measured: set[int] = field(default_factory=set)  # values whose sizes or strides the model's own code asked for
    _index: _Index | None = field(default=None, repr=False, compare=False)

    def producer(self, value: int) -> Call | None:
        """Return the call that made a value, or None for an input, a parameter, a constant.

        >>> from batchnorm import trace
        >>> graph = trace(nn.Sequential(nn.ReLU()), torch.randn(2))
        >>> graph.producer(graph.outputs[0]).name
        '0'
        """
        made_by = self.values[value].producer
        return None if made_by is None else self.calls[made_by]

    def consumers(self, value: int) -> list[Call]:
        """Return the calls that read a value.

        >>> from batchnorm import trace
        >>> graph = trace(nn.Sequential(nn.ReLU()), torch.randn(2))
        >>> [call.name for call in graph.consumers(graph.inputs[0])]
        ['0']
        """
        return list(self._indexed().readers.get(value, ()))

    def of(self, module: nn.Module | str) -> list[Call]:
        """Return the calls of a module, given itself or any of its paths.

        >>> from batchnorm import trace
        >>> model = nn.Sequential(nn.ReLU(), nn.Tanh())
        >>> len(trace(model, torch.randn(2)).of("1"))
        1
        """
        if isinstance(module, str):
            if module not in self.modules:
                return []
            module = self.modules[module]
        return list(self._indexed().by_target.get(module, ()))

    def readers_of(self, path: str) -> list[Call]:
        """Return the functions that read a parameter or a buffer; a module that is one call reads its own unseen.

        >>> from batchnorm import trace
        >>> class Tied(nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(x) @ self.weight
        >>> [call.name for call in trace(Tied(3, 3), torch.randn(2, 3)).readers_of("weight")]
        ['linear', 'matmul']
        """
        return list(self._indexed().by_source.get(path, ()))

    def uncalled(self, module: nn.Module) -> str:
        """Return why a module has no call of its own.

        >>> from batchnorm import trace
        >>> class Written(nn.Linear):
        ...     def forward(self, x):
        ...         return x @ self.weight
        >>> model = Written(3, 3)
        >>> trace(model, torch.randn(2, 3)).uncalled(model)
        'matmul (a function) reads its numbers, without a call of it'
        """
        names = [*module._parameters, *module._buffers]
        paths = [f"{path}." if path else "" for path, each in self.modules.items() if each is module]
        readers = [call.name for path in paths for name in names for call in self.readers_of(path + name)]
        if not readers:
            return "this example does not reach it"
        return f"{readers[0]} (a function) reads its numbers, without a call of it"

    def feeds_output(self, value: int) -> bool:
        """Whether a value is (part of) what the model returns.

        >>> from batchnorm import trace
        >>> graph = trace(nn.Sequential(nn.ReLU(), nn.Tanh()), torch.randn(2))
        >>> graph.feeds_output(graph.of("0")[0].outputs[0])
        False
        """
        return value in self.outputs

    def retarget(self, call: Call, target: nn.Module, name: str) -> None:
        """Say that a call is now one of another module: a layer was exchanged for another.

        >>> from batchnorm import trace
        >>> graph, tanh = trace(nn.Sequential(nn.ReLU()), torch.randn(2)), nn.Tanh()
        >>> graph.retarget(graph.of("0")[0], tanh, "0")
        >>> len(graph.of(tanh))
        1
        """
        self.calls[call.index] = replace(call, target=target, name=name)
        self._index = None

    def _indexed(self) -> _Index:
        if self._index is None or self._index.of is not self.calls or self._index.size != len(self.calls):
            self._index = _Index(self)
        return self._index

    def __str__(self) -> str:
        def shapes(call: Call) -> str:
            return ", ".join("x".join(map(str, self.values[v].shape)) or "scalar" for v in call.outputs)

        return "\n".join(f"{call}  {shapes(call)}".rstrip() for call in self.calls)


class _Index:
    """Who reads what, so that questions do not walk over all calls."""

    def __init__(self, graph: Graph) -> None:
        self.of, self.size = graph.calls, len(graph.calls)
        self.readers: dict[int, list[Call]] = {}
        self.by_target: dict[Any, list[Call]] = {}
        self.by_source: dict[str, list[Call]] = {}
        for call in graph.calls:
            if call.kind == "module":
                self.by_target.setdefault(call.target, []).append(call)
            for value in dict.fromkeys(call.inputs):
                self.readers.setdefault(value, []).append(call)
                source = graph.values[value].source
                if source not in ("input", "constant", "call"):
                    self.by_source.setdefault(source, []).append(call)
