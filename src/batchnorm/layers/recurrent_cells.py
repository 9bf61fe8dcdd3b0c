"""``BatchNormLSTMCell`` and ``BatchNormGRUCell``: one time step, and the arithmetic that the whole layers share."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from batchnorm.errors import BatchNormError, BatchNormWarning
from batchnorm.kernels.storage import check_memory
from batchnorm.layers.options import StepOptions
from batchnorm.layers.recurrent_norm import StepBatchNorm, StepWalk
from batchnorm.layers.switches import Switches

States = tuple[Tensor, ...]


class Recurrent(Switches):
    """What cells and layers share: parameters by torch's names, their normalisers, and a walk through the steps.

    A cell has one set of them, a layer one for each depth and direction, distinguished by a suffix (``_l0_reverse``).
    """

    gates: int
    states: tuple[str, ...]

    def __init__(self, input_size: int, hidden_size: int, bias: bool) -> None:
        super().__init__()
        for name, size in (("input_size", input_size), ("hidden_size", hidden_size)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise BatchNormError(
                    f"{name} is {size!r}", where=type(self).__name__, do="give it as a whole number above zero"
                )
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bool(bias)
        self.suffixes: tuple[str, ...] = ()

    def _add(self, suffix: str, input_size: int, device: Any, dtype: Any, normalizer: dict[str, Any]) -> None:
        """Register one set of parameters and normalisers."""
        hidden, rows = self.hidden_size, self.gates * self.hidden_size
        like = {"device": device, "dtype": dtype}
        self.suffixes += (suffix,)
        for name, shape in (("weight_ih", (rows, input_size)), ("weight_hh", (rows, hidden)), ("bias_ih", (rows,))):
            value = nn.Parameter(torch.empty(shape, **like)) if self.bias or name != "bias_ih" else None
            self.register_parameter(name + suffix, value)
        self.add_module(f"norm_ih{suffix}", StepBatchNorm(rows, **normalizer, **like))
        self.add_module(f"norm_hh{suffix}", StepBatchNorm(rows, **normalizer, **like))
        self._add_own(suffix, normalizer, like)

    def _add_own(self, suffix: str, normalizer: dict[str, Any], like: dict[str, Any]) -> None:
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Initialise weights and biases as torch does, and reset the normalisers.

        >>> cell = BatchNormGRUCell(2, 4)
        >>> cell.reset_parameters()
        >>> bool((cell.weight_ih.abs() <= 0.5).all()), round(cell.norm_ih.weight[0].item(), 3)
        (True, 0.1)
        """
        bound = 1 / math.sqrt(self.hidden_size)
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)
        for module in self.children():
            if isinstance(module, StepBatchNorm):
                module.reset_parameters()

    def _walk(self, suffix: str, data: Tensor, sizes: list[int], states: States, first: int) -> tuple[Tensor, States]:
        """Take ``states`` through the steps of ``data``, where the rows of each step follow those of the one before.

        Return the hidden states in the same order, and the last states of every sequence. ``sizes`` is how many
        sequences are at each step; it never grows, and those that end are the last of the batch.
        """
        if not torch.compiler.is_compiling():
            for name, tensor in (*self.named_parameters(), *self.named_buffers()):
                check_memory(tensor, name, type(self).__name__)
            for tensor in (data, *states):
                check_memory(tensor, "the input", type(self).__name__)
        norms = {
            name: StepWalk(getattr(self, f"norm_{name}{suffix}"), len(sizes), first)
            for name in ("ih", "hh", "c")
            if hasattr(self, f"norm_{name}{suffix}")
        }
        weight, bias = getattr(self, f"weight_ih{suffix}"), getattr(self, f"bias_ih{suffix}")
        inputs = norms["ih"].products(data, weight, sizes, bias)
        weight, beta = getattr(self, f"weight_hh{suffix}"), self._hidden_bias(suffix)
        outputs: list[Tensor] = []
        ended: list[States] = []
        for step, (n, x) in enumerate(zip(sizes, inputs, strict=True), first):
            if n < states[0].shape[0]:
                halves = [torch.split(state, [n, state.shape[0] - n]) for state in states]
                ended.append(tuple(half[1] for half in halves))
                states = tuple(half[0] for half in halves)
            states = self._step(x, states, F.linear(states[0], weight), beta, norms, step)
            outputs.append(states[0])
        for norm in norms.values():
            norm.end()
        ended.append(states)
        last = tuple(torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*reversed(ended), strict=True))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0], last

    def _hidden_bias(self, suffix: str) -> Tensor | None:
        return None

    def _step(
        self, x: Tensor, states: States, product: Tensor, beta: Tensor | None, norms: dict[str, StepWalk], step: int
    ) -> States:
        raise NotImplementedError

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Take the two biases of a torch layer as the one of ours."""
        for suffix in self.suffixes if self.bias else ():
            b_ih, b_hh = (state_dict.get(f"{prefix}bias_{name}{suffix}") for name in ("ih", "hh"))
            if b_ih is not None and b_hh is not None:
                del state_dict[f"{prefix}bias_hh{suffix}"]  # of the copy that load_state_dict made
                self._merge(state_dict, prefix, suffix, b_ih, b_hh)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _merge(self, state_dict: dict[str, Any], prefix: str, suffix: str, b_ih: Tensor, b_hh: Tensor) -> None:
        raise NotImplementedError

    def _check(self, data: Tensor, what: str) -> None:
        """Raise for values that are not of this layer's size, dtype or device."""
        where, weight = type(self).__name__, getattr(self, f"weight_ih{self.suffixes[0]}")
        if data.shape[-1] != self.input_size:
            raise BatchNormError(
                f"{what} has {data.shape[-1]} features (its last dimension; its shape is {list(data.shape)}), but "
                f"input_size is {self.input_size}",
                where=where,
                do=f"use input_size={data.shape[-1]}, or bring the features into the last dimension",
            )
        if data.device != weight.device:
            raise BatchNormError(
                f"{what} is on {data.device}, the weights are on {weight.device}",
                where=where,
                do=f"move one of them, e.g. with x.to({str(weight.device)!r})",
            )
        if data.dtype != weight.dtype and not torch.is_autocast_enabled(data.device.type):
            raise BatchNormError(
                f"{what} is {data.dtype}, the weights are {weight.dtype}",
                where=where,
                do=f"convert one of them, e.g. with x.to({weight.dtype})",
            )

    def _warn_of_one(self, stacklevel: int) -> None:
        """Say that one sequence alone has no statistics, if its batch's were asked for; the level is the caller's."""
        norm = getattr(self, f"norm_ih{self.suffixes[0]}")
        asked = norm.training if norm.statistics == "auto" else norm.statistics == "batch"
        if asked and not torch.compiler.is_compiling():
            warnings.warn(
                f"{type(self).__name__}: a batch of one sequence has no statistics: the running ones normalise it, "
                "and learn nothing from it; use larger batches",
                BatchNormWarning,
                stacklevel=stacklevel,
            )

    def _unpack(self, hx: Any) -> States:
        """Return what was given as initial states as a tuple of as many as there are."""
        given = (hx,) if isinstance(hx, Tensor) else hx
        names = ", ".join(self.states)
        if not isinstance(given, (tuple, list)) or len(given) != len(self.states):
            wanted = f"the pair ({names})" if len(self.states) > 1 else f"one tensor, {names}"
            found = "one tensor" if isinstance(hx, Tensor) else f"a {type(hx).__name__}"
            raise BatchNormError(f"hx is {found}, but it has to be {wanted}", where=type(self).__name__)
        return tuple(given)

    def _check_states(self, states: States, shape: list[int]) -> None:
        for name, state in zip(self.states, states, strict=True):
            if list(state.shape) != shape:
                raise BatchNormError(
                    f"{name} has shape {list(state.shape)}, but for this input it has to be {shape}",
                    where=type(self).__name__,
                    do="give it that shape, or leave hx out to begin with zeros",
                )


class LSTMStep(Recurrent):
    """The step of an LSTM."""

    gates, states = 4, ("h_0", "c_0")

    def _add_own(self, suffix: str, normalizer: dict[str, Any], like: dict[str, Any]) -> None:
        self.add_module(f"norm_c{suffix}", StepBatchNorm(self.hidden_size, beta=True, **normalizer, **like))

    def _step(
        self, x: Tensor, states: States, product: Tensor, beta: Tensor | None, norms: dict[str, StepWalk], step: int
    ) -> States:
        # x holds the normalised input and the bias; the kernel adds it while it normalises the other product.
        i, f, g, o = norms["hh"](product, step, residual=x).chunk(4, 1)
        c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * norms["c"](c, step).tanh(), c

    def _merge(self, state_dict: dict[str, Any], prefix: str, suffix: str, b_ih: Tensor, b_hh: Tensor) -> None:
        state_dict[f"{prefix}bias_ih{suffix}"] = b_ih + b_hh


class GRUStep(Recurrent):
    """The step of a GRU."""

    gates, states = 3, ("h_0",)

    def _add_own(self, suffix: str, normalizer: dict[str, Any], like: dict[str, Any]) -> None:
        value = nn.Parameter(torch.empty(self.hidden_size, **like)) if self.bias else None
        self.register_parameter(f"bias_hn{suffix}", value)

    def _hidden_bias(self, suffix: str) -> Tensor | None:
        bias: Tensor | None = getattr(self, f"bias_hn{suffix}")
        return None if bias is None else F.pad(bias, (2 * self.hidden_size, 0))

    def _step(
        self, x: Tensor, states: States, product: Tensor, beta: Tensor | None, norms: dict[str, StepWalk], step: int
    ) -> States:
        parts = [2 * self.hidden_size, self.hidden_size]
        x_rz, x_n = torch.split(x, parts, 1)
        h_rz, h_n = torch.split(norms["hh"](product, step, bias=beta), parts, 1)
        r, z = (x_rz + h_rz).sigmoid().chunk(2, 1)
        n = (x_n + r * h_n).tanh()
        return (n + z * (states[0] - n),)

    def _merge(self, state_dict: dict[str, Any], prefix: str, suffix: str, b_ih: Tensor, b_hh: Tensor) -> None:
        split = 2 * self.hidden_size
        state_dict[f"{prefix}bias_ih{suffix}"] = torch.cat([b_ih[:split] + b_hh[:split], b_ih[split:]])
        state_dict[f"{prefix}bias_hn{suffix}"] = b_hh[split:]


class Cell(Recurrent):
    """One step, with the arguments of ``torch.nn.LSTMCell`` and ``torch.nn.GRUCell``, and which step it is."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        gamma: float = 0.1,
        max_length: int = 100,
        **normalizer: Unpack[StepOptions],
    ) -> None:
        super().__init__(input_size, hidden_size, bias)
        self._add("", input_size, device, dtype, {"gamma": gamma, "max_length": max_length, **normalizer})
        self.reset_parameters()

    def _once(self, input: Tensor, hx: Any, step: int | None) -> States:
        where = type(self).__name__
        if not isinstance(input, Tensor) or input.dim() not in (1, 2):
            found = f"shape {list(input.shape)}" if isinstance(input, Tensor) else f"a {type(input).__name__}"
            raise BatchNormError(
                f"expected an input of shape (batch, {self.input_size}) or ({self.input_size},), got {found}",
                where=where,
                do="give it one time step at a time",
            )
        self._check(input, "the input")
        if step is None and hx is not None:
            raise BatchNormError(
                "there are statistics for every time step, and this call does not say which step it is",
                where=where,
                do="pass step=0 at the beginning of the sequences, then 1, 2, ...",
            )
        if step is not None and step < 0:
            raise BatchNormError(f"step is {step}", where=where, do="count the steps from 0")
        batch = list(input.shape[:-1])
        if hx is None:
            zeros = input.new_zeros([*batch, self.hidden_size])
            states: States = (zeros,) * len(self.states)
        else:
            states = self._unpack(hx)
            self._check_states(states, [*batch, self.hidden_size])
        if not batch:
            input, states = input.unsqueeze(0), tuple(state.unsqueeze(0) for state in states)
        if input.shape[0] == 1:
            self._warn_of_one(stacklevel=6)
        states = self._walk("", input, [input.shape[0]], states, step or 0)[1]
        return states if batch else tuple(state.squeeze(0) for state in states)

    def extra_repr(self) -> str:
        """Show torch's own words.

        >>> BatchNormLSTMCell(2, 3, bias=False).extra_repr()
        '2, 3, bias=False'
        """
        return f"{self.input_size}, {self.hidden_size}" + ("" if self.bias else ", bias=False")


class BatchNormLSTMCell(LSTMStep, Cell):
    """One step of `BatchNormLSTM`, used as ``torch.nn.LSTMCell`` is, with ``step`` to say which.

    >>> cell = BatchNormLSTMCell(3, 5)
    >>> state = None
    >>> for step, x in enumerate(torch.randn(7, 16, 3)):
    ...     state = cell(x, state, step=step)
    >>> state[0].shape, cell.norm_hh.num_batches_tracked[:9]
    (torch.Size([16, 5]), tensor([1, 1, 1, 1, 1, 1, 1, 0, 0]))

    ``step`` may be left out only where ``hx`` is: that is step 0. For everything else see `BatchNormLSTM`.
    """

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None, *, step: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the next hidden state and the next cell state.

        >>> [tuple(state.shape) for state in BatchNormLSTMCell(3, 5).eval()(torch.randn(3))]
        [(5,), (5,)]
        """
        h, c = self._once(input, hx, step)
        return h, c

    if TYPE_CHECKING:

        def __call__(  # noqa: D102
            self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None, *, step: int | None = None
        ) -> tuple[Tensor, Tensor]: ...


class BatchNormGRUCell(GRUStep, Cell):
    """One step of `BatchNormGRU`, used as ``torch.nn.GRUCell`` is, with ``step`` to say which.

    >>> cell = BatchNormGRUCell(3, 5)
    >>> h = cell(torch.randn(16, 3))
    >>> cell(torch.randn(16, 3), h, step=1).shape
    torch.Size([16, 5])

    ``step`` may be left out only where ``hx`` is: that is step 0. For everything else see `BatchNormGRU`.
    """

    def forward(self, input: Tensor, hx: Tensor | None = None, *, step: int | None = None) -> Tensor:
        """Return the next hidden state.

        >>> BatchNormGRUCell(3, 5).eval()(torch.randn(3)).shape
        torch.Size([5])
        """
        return self._once(input, hx, step)[0]

    if TYPE_CHECKING:

        def __call__(self, input: Tensor, hx: Tensor | None = None, *, step: int | None = None) -> Tensor: ...  # noqa: D102
