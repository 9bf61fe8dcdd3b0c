"""``BatchNormLSTM`` and ``BatchNormGRU``: recurrent batch normalisation, with statistics for every time step.

Cooijmans, Ballas, Laurent, Gülçehre and Courville, "Recurrent Batch Normalization" (2016).
"""

from __future__ import annotations

import warnings
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Proxy
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import Unpack

from batchnorm.errors import BatchNormError, BatchNormWarning
from batchnorm.layers.options import StepOptions
from batchnorm.layers.recurrent_cells import GRUStep, LSTMStep, Recurrent, States


class RecurrentStack(Recurrent):
    """A stack of recurrent layers with the arguments of ``torch.nn.LSTM`` and ``torch.nn.GRU``."""

    num_layers: int
    batch_first: bool
    dropout: float
    bidirectional: bool
    directions: tuple[str, ...]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        gamma: float = 0.1,
        max_length: int = 100,
        **normalizer: Unpack[StepOptions],
    ) -> None:
        super().__init__(input_size, hidden_size, bias)
        where = type(self).__name__
        if proj_size:
            raise BatchNormError(
                f"proj_size is {proj_size}, but this layer has no projection",
                where=where,
                do="leave proj_size out, and put a torch.nn.Linear behind the layer",
            )
        if not isinstance(num_layers, int) or isinstance(num_layers, bool) or num_layers < 1:
            raise BatchNormError(f"num_layers is {num_layers!r}", where=where, do="give a whole number above zero")
        if not isinstance(dropout, Real) or isinstance(dropout, bool) or not 0 <= dropout <= 1:
            raise BatchNormError(f"dropout is {dropout!r}", where=where, do="give a probability from 0 to 1")
        if dropout and num_layers == 1:
            warnings.warn(
                f"{where}: dropout={dropout} does nothing with num_layers=1: it stands between layers",
                BatchNormWarning,
                stacklevel=2,
            )
        self.num_layers, self.batch_first, self.bidirectional = num_layers, batch_first, bidirectional
        self.dropout, self.proj_size = float(dropout), 0
        self.directions = ("", "_reverse") if bidirectional else ("",)
        options = {"gamma": gamma, "max_length": max_length, **normalizer}
        for layer in range(num_layers):
            width = input_size if layer == 0 else hidden_size * len(self.directions)
            for direction in self.directions:
                self._add(f"_l{layer}{direction}", width, device, dtype, options)
        self.reset_parameters()

    def flatten_parameters(self) -> None:
        """Do nothing: torch's layers have this method, for a library that ours do not use.

        >>> BatchNormGRU(2, 3).flatten_parameters()
        """

    def _all_steps(self, input: Tensor | PackedSequence, hx: Any) -> tuple[Tensor | PackedSequence, States]:
        if isinstance(input, PackedSequence):
            data, batch_sizes, ordered, back = input
            self._check(data, "the packed input")
            sizes = batch_sizes.tolist()
            states = self._begin(data, sizes[0], hx, batched=True, ordered=ordered)
            data, last = self._layers(data, sizes, states)
            if back is not None:
                last = tuple(state.index_select(1, back) for state in last)
            return PackedSequence(data, batch_sizes, ordered, back), last
        length, n, x = self._time_first(input)
        batched = input.dim() == 3
        states = self._begin(x, n, hx, batched)
        y, last = self._layers(x.reshape(length * n, self.input_size), [n] * length, states)
        y = y.view(length, n, y.shape[-1])
        if not batched:
            return y.squeeze(1), tuple(state.squeeze(1) for state in last)
        return y.transpose(0, 1) if self.batch_first else y, last

    def _time_first(self, input: Tensor) -> tuple[int, int, Tensor]:
        where = type(self).__name__
        order = "(batch, time, features)" if self.batch_first else "(time, batch, features)"
        if not isinstance(input, Tensor) or input.dim() not in (2, 3):
            found = f"shape {list(input.shape)}" if isinstance(input, Tensor) else f"a {type(input).__name__}"
            raise BatchNormError(
                f"expected an input of 3 dimensions {order}, of 2 (time, features), or a PackedSequence, got {found}",
                where=where,
                do="add what is missing with x.unsqueeze(...)",
            )
        self._check(input, "the input")
        x = input.unsqueeze(1) if input.dim() == 2 else input.transpose(0, 1) if self.batch_first else input
        length, n = x.shape[:2]
        if length == 0:
            raise BatchNormError(
                f"the input of shape {list(input.shape)} has no time step", where=where, do=f"give it as {order}"
            )
        return length, n, x

    def _begin(self, x: Tensor, n: int, hx: Any, batched: bool, ordered: Tensor | None = None) -> States:
        """Return the initial states, in the order of a packed input's sequences."""
        shape = [len(self.suffixes), n, self.hidden_size]
        if hx is None:
            return (x.new_zeros(shape),) * len(self.states)
        states = self._unpack(hx)
        self._check_states(states, shape if batched else [shape[0], shape[2]])
        if not batched:
            return tuple(state.unsqueeze(1) for state in states)
        return states if ordered is None else tuple(state.index_select(1, ordered) for state in states)

    def _layers(self, data: Tensor, sizes: list[int], states: States) -> tuple[Tensor, States]:
        """Take rows, those of each step after those of the one before, through all layers and directions."""
        if sizes[0] == 1:
            self._warn_of_one(stacklevel=7)
        reverse = _reversal(sizes, data.device) if self.bidirectional else None
        last: list[States] = []
        for layer in range(self.num_layers):
            outputs: list[Tensor] = []
            for direction in self.directions:
                begin = tuple(state[len(last)] for state in states)
                suffix = f"_l{layer}{direction}"
                if direction and reverse is not None:
                    y, end = self._walk(suffix, data.index_select(0, reverse), sizes, begin, 0)
                    y = y.index_select(0, reverse)
                else:
                    y, end = self._walk(suffix, data, sizes, begin, 0)
                outputs.append(y)
                last.append(end)
            data = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
            if self.dropout and layer < self.num_layers - 1:
                data = F.dropout(data, self.dropout, self.training)
        return data, tuple(torch.stack(parts) for parts in zip(*last, strict=True))

    def extra_repr(self) -> str:
        """Show torch's own words: what is not at its default.

        >>> BatchNormLSTM(2, 3, num_layers=2, batch_first=True).extra_repr()
        '2, 3, num_layers=2, batch_first=True'
        """
        defaults = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False}
        changed = [f"{name}={getattr(self, name)}" for name, usual in defaults.items() if getattr(self, name) != usual]
        return ", ".join([str(self.input_size), str(self.hidden_size), *changed])


def _reversal(sizes: list[int], device: torch.device) -> Tensor:
    """Return the order of rows that turns every sequence around within its own length; done twice, it is undone.

    >>> _reversal([2, 2, 1], torch.device("cpu"))  # two sequences, of three and of two steps
    tensor([4, 3, 2, 1, 0])
    """
    counts = torch.tensor(sizes)
    starts = counts.cumsum(0) - counts
    lengths = (counts.unsqueeze(1) > torch.arange(sizes[0])).sum(0)
    step = torch.arange(len(sizes)).repeat_interleave(counts, output_size=sum(sizes))
    sequence = torch.arange(len(step)) - starts[step]
    return (starts[lengths[sequence] - 1 - step] + sequence).to(device)


def _node(module: Recurrent, input: Any, hx: Any) -> Any:
    """Be one node of a graph that torch.fx traces, as torch's own layers are."""
    tracer = input.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), (input, hx), {})


class BatchNormLSTM(LSTMStep, RecurrentStack):
    """An LSTM with batch normalisation at every time step, used as ``torch.nn.LSTM`` is.

    >>> lstm = BatchNormLSTM(3, 5, max_length=40)
    >>> output, (h_n, c_n) = lstm(torch.randn(12, 16, 3))  # 12 steps of 16 sequences
    >>> output.shape, h_n.shape, c_n.shape
    (torch.Size([12, 16, 5]), torch.Size([1, 16, 5]), torch.Size([1, 16, 5]))

    At every step ``t``, with gates i, f, g, o in torch's order and BN over the sequences of the batch::

        (i, f, g, o) = BN_t(W_ih x_t; gamma_ih) + BN_t(W_hh h_{t-1}; gamma_hh) + b
        c_t = sigmoid(f) * c_{t-1} + sigmoid(i) * tanh(g)
        h_t = sigmoid(o) * tanh(BN_t(c_t; gamma_c, beta_c))

    The gammas and beta_c are those of all steps; the statistics are each step's own. In training a step is normalised
    by its batch, in evaluation by its running statistics. Arguments, inputs (3-D, 2-D for one sequence, or packed),
    initial states and results are torch's, but for ``proj_size``, which is refused. Beyond torch's:

    - ``gamma``: where the gammas begin. At 1, gates saturate and gradients vanish; the paper's 0.1 is the default.
    - ``max_length``: how many steps have statistics, as a rule as many as the longest sequence of the training. In
      evaluation later steps use those of the last; in training they use their batch and leave nothing behind.
    - ``eps``, ``momentum``, ``statistics``, ``update``, ``nonfinite``: see `BatchNorm1d`. They, and ``learn``, are
      attributes of the normalisers, ``norm_ih_l0``, ``norm_hh_l0``, ``norm_c_l0``, ``norm_ih_l0_reverse`` and so on.
      The three switches, set on the whole layer, are set on all of them. A batch that is not finite is refused for all
      steps of the input, and from its first bad step on for the rest, and is reported once the sequences are through.

    A step that was never seen in training uses the statistics of the last one before it that was. Where sequences end
    at different steps (packed), the batch of a step is the sequences that are still running; where only one is, it has
    no statistics and that step uses running ones. The reverse direction starts every sequence at its own end, and its
    steps are counted from there. With hidden states that begin at zero, the running variance of the first W_hh h is
    zero: do not begin evaluation with other states than training.

    Parameters have torch's names; of the two biases, which would only be added to each other, ``bias_ih_l0`` is kept.
    The weights of a torch layer are loaded with ``load_state_dict(lstm.state_dict(), strict=False)``, which adds its
    biases up; what it reports as missing are the normalisers.
    """

    def forward(self, input: Any, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Any, tuple[Tensor, Tensor]]:
        """Return the hidden states of all steps (packed if the input is), and the last hidden and cell states.

        >>> lstm = BatchNormLSTM(3, 5, bidirectional=True, batch_first=True)
        >>> lengths = torch.tensor([4, 7, 2])
        >>> packed = torch.nn.utils.rnn.pack_padded_sequence(torch.randn(3, 7, 3), lengths, True, enforce_sorted=False)
        >>> output, (h_n, c_n) = lstm(packed)
        >>> torch.nn.utils.rnn.pad_packed_sequence(output, True)[0].shape, h_n.shape
        (torch.Size([3, 7, 10]), torch.Size([2, 3, 5]))
        """
        if isinstance(input, Proxy):
            return cast("tuple[Any, tuple[Tensor, Tensor]]", _node(self, input, hx))
        output, (h, c) = self._all_steps(input, hx)
        return output, (h, c)

    if TYPE_CHECKING:

        def __call__(  # noqa: D102
            self, input: Any, hx: tuple[Tensor, Tensor] | None = None
        ) -> tuple[Any, tuple[Tensor, Tensor]]: ...


class BatchNormGRU(GRUStep, RecurrentStack):
    """A GRU with batch normalisation at every time step, used as ``torch.nn.GRU`` is.

    >>> gru = BatchNormGRU(3, 5, num_layers=2)
    >>> output, h_n = gru(torch.randn(12, 16, 3))
    >>> output.shape, h_n.shape
    (torch.Size([12, 16, 5]), torch.Size([2, 16, 5]))

    Both products of each gate are normalised, before the reset gate meets the second one::

        (x_r, x_z, x_n) = BN_t(W_ih x_t; gamma_ih) + b
        (h_r, h_z, h_n) = BN_t(W_hh h_{t-1}; gamma_hh)
        r = sigmoid(x_r + h_r)
        z = sigmoid(x_z + h_z)
        n = tanh(x_n + r * (h_n + b_hn))
        h_t = (1 - z) * n + z * h_{t-1}

    The state itself is not: it is a mean of values of tanh, and has no other way from step to step. Of torch's two
    biases, ``bias_ih_l0`` is kept whole and of the other the part that is not added to it, ``bias_hn_l0``. All else is
    as at `BatchNormLSTM`, how to load the weights of a torch layer too.
    """

    def forward(self, input: Any, hx: Tensor | None = None) -> tuple[Any, Tensor]:
        """Return the hidden states of all steps (packed if the input is), and the last ones.

        >>> output, h_n = BatchNormGRU(3, 5).eval()(torch.randn(12, 3))
        >>> output.shape, h_n.shape
        (torch.Size([12, 5]), torch.Size([1, 5]))
        """
        if isinstance(input, Proxy):
            return cast("tuple[Any, Tensor]", _node(self, input, hx))
        output, (h,) = self._all_steps(input, hx)
        return output, h

    if TYPE_CHECKING:

        def __call__(self, input: Any, hx: Tensor | None = None) -> tuple[Any, Tensor]: ...  # noqa: D102
