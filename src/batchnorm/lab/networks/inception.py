"""An Inception-style network, many members trained side by side as the groups of one grouped convolution.

A stack of K members holds member k's channels beside member k+1's. Every operation here acts on a group, a
channel or a position alone, so the members never meet: each one computes what it would compute by itself, at
a fraction of the cost of running them in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchnorm.errors import BatchNormError
from batchnorm.functional import moments
from batchnorm.lab.networks.schemes import deviation
from batchnorm.layers.batch import BatchNorm2d, Tensors

BLOCKS = 4
HALVED_BEFORE = (0,)  # the blocks in front of which the maps are halved

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid}

NormFactory = Callable[[int, str], nn.Module]
"""Makes the module that normalises so many channels and then applies the activation of that name."""


def torch_norm(channels: int, activation: str) -> nn.Module:
    """Make torch's own Batch Normalization, followed by the nonlinearity.

    >>> torch_norm(8, "relu")[0].num_features
    8
    """
    return nn.Sequential(nn.BatchNorm2d(channels), ACTIVATIONS[activation]())


class StackNorm(BatchNorm2d):
    """Our Batch Normalization of a stack: a channel whose batch is finite is updated whatever its neighbours do.

    >>> layer = StackNorm(2, momentum=1.0)
    >>> _ = layer(torch.tensor([[1.0, float("nan")], [3.0, 0.0]]).view(2, 2, 1, 1).expand(2, 2, 4, 4))
    >>> layer.running_mean
    tensor([2., 0.])

    A layer alone refuses such a batch as a whole; here the channels are other members, which must not notice.
    """

    def _apply_to(
        self, x: Tensor, residual: Tensor | None, held: Tensors, training: bool, momentum: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | bool | None]:
        y, finite = super()._apply_to(x, residual, held, training, momentum, mask)
        if finite is None or bool(finite) or held.mean is None or held.var is None:
            return y, finite
        count, mean, var = moments(x.detach())
        sound = torch.isfinite(mean) & torch.isfinite(var)
        for kept, found in ((held.mean, mean), (held.var, var * (count / (count - 1)))):
            kept.copy_(torch.where(sound, (1 - momentum) * kept + momentum * found, kept.to(found.dtype)))
        return y, True


def our_norm(channels: int, activation: str) -> nn.Module:
    """Make our Batch Normalization, with the nonlinearity in the same pass where it can be.

    >>> our_norm(8, "relu").activation, len(our_norm(8, "sigmoid"))
    ('relu', 2)
    """
    if activation == "relu":
        return StackNorm(channels, activation="relu")
    return nn.Sequential(StackNorm(channels), ACTIVATIONS[activation]())


def draw(
    streams: Sequence[torch.Generator], outputs: int, inputs: int, kernel: int, scheme: str, copies: int = 1
) -> Tensor:
    """Draw the stacked Gaussian weights of a convolution, each member from its own stream.

    >>> streams = [torch.Generator().manual_seed(seed) for seed in (1, 2, 1)]
    >>> weights = draw(streams, outputs=4, inputs=3, kernel=1, scheme="xavier")
    >>> weights.shape, torch.equal(weights[:4], weights[8:])
    (torch.Size([12, 3, 1, 1]), True)

    ``copies`` convolutions of one shape come side by side; each is scaled as the single convolution it is.
    """
    scale = deviation(scheme, inputs * kernel**2, outputs * kernel**2)
    shape = (copies * outputs, inputs, kernel, kernel)
    return torch.cat([torch.randn(shape, generator=stream) for stream in streams]) * scale


class GroupedConv(nn.Module):
    """A convolution that keeps each member's channels to itself.

    >>> GroupedConv([torch.Generator(), torch.Generator()], 3, 8, kernel=1).weight.shape
    torch.Size([16, 3, 1, 1])
    """

    def __init__(
        self,
        streams: Sequence[torch.Generator],
        inputs: int,
        outputs: int,
        kernel: int,
        *,
        copies: int = 1,
        bias: bool = True,
        scheme: str = "xavier",
    ) -> None:
        """Draw the weights; biases begin at zero."""
        super().__init__()
        self.members, self.padding = len(streams), kernel // 2
        self.weight = nn.Parameter(draw(streams, outputs, inputs, kernel, scheme, copies))
        self.bias = nn.Parameter(torch.zeros(len(self.weight))) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Convolve; the maps keep their size."""
        return F.conv2d(x, self.weight, self.bias, padding=self.padding, groups=self.members)


class MakeUnit(Protocol):
    """Makes a convolution with what follows it: perhaps a normalisation, always a nonlinearity."""

    def __call__(self, inputs: int, outputs: int, kernel: int, *, copies: int = 1) -> nn.Module:
        """Make ``copies`` such convolutions of one input, side by side."""


class InceptionBlock(nn.Module):
    """Four branches over one input: 1x1, pool-1x1, 1x1-3x3 and 1x1-3x3-3x3, their outputs side by side.

    >>> def unit(inputs, outputs, kernel, copies=1):
    ...     return GroupedConv([torch.Generator()], inputs, outputs, kernel, copies=copies)
    >>> InceptionBlock(unit, members=1, inputs=16, width=8)(torch.ones(2, 16, 4, 4)).shape
    torch.Size([2, 32, 4, 4])
    """

    BRANCHES = 4

    def __init__(self, unit: MakeUnit, members: int, inputs: int, width: int) -> None:
        """Build the branches from ``unit``."""
        super().__init__()
        self.members = members
        # Three branches begin with a 1x1 convolution of the same input: one call computes all three.
        self.points = unit(inputs, width, 1, copies=3)
        self.pooled = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), unit(inputs, width, 1))
        self.three = unit(width, width, 3)
        self.five = nn.Sequential(unit(width, width, 3), unit(width, width, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Run the branches and put each member's four outputs together."""
        first, third, fourth = apart(self.points(x), self.members, 3)
        return side_by_side((first, self.pooled(x), self.three(third), self.five(fourth)), self.members)


def side_by_side(parts: Sequence[Tensor], members: int) -> Tensor:
    """Concatenate maps so that a member's channels stay neighbours.

    >>> a, b = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1), torch.tensor([10.0, 11.0]).view(1, 2, 1, 1)
    >>> side_by_side((a, b), members=2).flatten().tolist()
    [0.0, 10.0, 1.0, 11.0]
    """
    # Channels come last in memory, so splitting the last axis of this view copies nothing.
    rows = [torch.unflatten(part.permute(0, 2, 3, 1), 3, (members, -1)) for part in parts]
    return torch.cat(rows, dim=4).flatten(3).permute(0, 3, 1, 2)


def apart(maps: Tensor, members: int, parts: int) -> Sequence[Tensor]:
    """Undo ``side_by_side``.

    >>> first, second = apart(torch.tensor([0.0, 10.0, 1.0, 11.0]).view(1, 4, 1, 1), members=2, parts=2)
    >>> first.flatten().tolist(), second.flatten().tolist()
    ([0.0, 1.0], [10.0, 11.0])
    """
    rows = torch.unflatten(maps.permute(0, 2, 3, 1), 3, (members, parts, -1)).unbind(4)
    return [row.flatten(3).permute(0, 3, 1, 2) for row in rows]


class Inception(nn.Module):
    """A stem, four blocks and a linear read-out of the averaged maps: one network for each seed.

    >>> stack = Inception(seeds=[0, 1, 2], norm=our_norm)
    >>> stack(torch.zeros(32, 3, 8, 8)).shape
    torch.Size([32, 3, 10])

    The input has one image per member in its channels, the output one row of class scores. Batch
    Normalization stands between each convolution and its nonlinearity, and those convolutions have no bias:
    the mean that is subtracted would cancel it.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        *,
        norm: NormFactory | None = None,
        activation: str = "relu",
        scheme: str = "xavier",
        width: int = 8,
        channels: int = 1,
        classes: int = 10,
    ) -> None:
        """Build one member for each seed."""
        super().__init__()
        if activation not in ACTIVATIONS:
            raise BatchNormError(f"there is no activation {activation!r}", do=f"choose one of {', '.join(ACTIVATIONS)}")
        streams = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.members = len(streams)

        def unit(inputs: int, outputs: int, kernel: int, *, copies: int = 1) -> nn.Module:
            bias = norm is None
            conv = GroupedConv(streams, inputs, outputs, kernel, copies=copies, bias=bias, scheme=scheme)
            after = ACTIVATIONS[activation]() if norm is None else norm(len(conv.weight), activation)
            return nn.Sequential(conv, after)

        out = InceptionBlock.BRANCHES * width
        self.stem = unit(channels, 2 * width, 3)
        self.blocks = nn.ModuleList(
            InceptionBlock(unit, self.members, 2 * width if index == 0 else out, width) for index in range(BLOCKS)
        )
        self.read_out = GroupedConv(streams, out, classes, 1, scheme=scheme)

    def forward(self, x: Tensor) -> Tensor:
        """Score images of shape (count, members * channels, height, width) as (count, members, classes)."""
        x = self.stem(x.contiguous(memory_format=torch.channels_last))
        for index, block in enumerate(self.blocks):
            x = block(F.max_pool2d(x, 2) if index in HALVED_BEFORE else x)
        scores: Tensor = self.read_out(x.mean((2, 3), keepdim=True))
        return scores.view(len(x), self.members, -1)
