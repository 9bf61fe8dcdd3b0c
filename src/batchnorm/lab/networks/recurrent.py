"""Recurrent networks that read a sequence and then classify it: an LSTM plain, or with norms of several kinds."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from batchnorm.errors import BatchNormError
from batchnorm.layers.family import make_norm
from batchnorm.layers.recurrent import BatchNormLSTM

NORMS = ("none", "layer", "naive", "naive, small", "per-step")
SMALL = 0.1  # where gammas begin, as in Cooijmans et al. (2016)


class Reader(nn.Module):
    """Read the values of an example in ``steps`` equal pieces, then classify from the last hidden state.

    >>> Reader(seed=0, norm="per-step", steps=16)(torch.zeros(3, 64)).shape
    torch.Size([3, 10])

    ``norm`` is "none"; "layer"; "naive", which calls one `BatchNorm1d` for each product at every time step, as one
    would with stock layers; "naive, small", the same with gammas that begin at 0.1; or "per-step", which is
    `batchnorm.BatchNormLSTM`, with gammas that begin at 0.1, too. The weights are the same ones.
    """

    def __init__(
        self, seed: int, *, norm: str, steps: int, width: int = 32, inputs: int = 64, classes: int = 10
    ) -> None:
        """Draw the weights from the seed; the recurrent ones are orthogonal, as in the paper."""
        super().__init__()
        if norm not in NORMS:
            raise BatchNormError(f"there is no norm {norm!r}", do=f"choose one of {', '.join(NORMS)}")
        self.steps = steps
        stream = torch.Generator().manual_seed(seed)
        piece = inputs // steps
        self.lstm: nn.Module = (
            BatchNormLSTM(piece, width, max_length=steps) if norm == "per-step" else PlainLSTM(piece, width, norm)
        )
        self.read_out = nn.Linear(width, classes)
        parameters = dict(self.lstm.named_parameters())
        weight_ih, weight_hh, bias = (parameters[f"{name}_l0"] for name in ("weight_ih", "weight_hh", "bias_ih"))
        with torch.no_grad():
            weight_ih.copy_(torch.randn(4 * width, piece, generator=stream) / math.sqrt(piece))
            for gate in weight_hh.chunk(4):
                gate.copy_(torch.linalg.qr(torch.randn(width, width, generator=stream)).Q)
            bias.zero_()
            bias[width : 2 * width] = 1.0  # the forget gate begins open
            self.read_out.weight.copy_(torch.randn(classes, width, generator=stream) / math.sqrt(width))
            self.read_out.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Score a batch of any shape with the samples first."""
        pieces = x.flatten(1).view(len(x), self.steps, -1).transpose(0, 1)
        return cast(Tensor, self.read_out(self.lstm(pieces)[0][-1]))


class PlainLSTM(nn.Module):
    """An LSTM written out, with a norm after each of its products and on the cell state's way out.

    >>> PlainLSTM(3, 5, "layer")(torch.zeros(7, 2, 3))[0].shape
    torch.Size([7, 2, 5])
    """

    def __init__(self, inputs: int, width: int, norm: str) -> None:
        """Make the parameters by torch's names; whoever makes it draws them."""
        super().__init__()
        self.weight_ih_l0, self.weight_hh_l0 = (nn.Parameter(torch.empty(4 * width, n)) for n in (inputs, width))
        self.bias_ih_l0 = nn.Parameter(torch.empty(4 * width))
        name = "batch" if "naive" in norm else norm
        self.norm_ih, self.norm_hh, self.norm_c = (make_norm(name, n, 0) for n in (4 * width, 4 * width, width))
        if "small" in norm:
            for own in (self.norm_ih, self.norm_hh, self.norm_c):
                nn.init.constant_(cast(Tensor, own.weight), SMALL)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the hidden states of all steps of (steps, batch, inputs), and the last hidden and cell states."""
        h = c = x.new_zeros(x.shape[1], self.weight_hh_l0.shape[1])
        found = []
        for piece in x:
            gates = self.norm_ih(piece @ self.weight_ih_l0.T) + self.norm_hh(h @ self.weight_hh_l0.T) + self.bias_ih_l0
            i, f, g, o = gates.chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * self.norm_c(c).tanh()
            found.append(h)
        return torch.stack(found), (h, c)
