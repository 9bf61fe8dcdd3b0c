"""The Inception network of Ioffe & Szegedy (2015), with Batch Normalization and without.

The rows of `TABLE` are those of Figure 5 in the appendix of arXiv 1502.03167; what they leave open is as in GoogLeNet
(Szegedy et al. 2014, arXiv 1409.4842), to which the appendix refers. Where the table contradicts itself:

- The filters of 4c and 4d add up to 608 maps with the printed projection of 128, but the printed outputs are 576, and
  the 1,024 maps of 4e need 576. `TABLE` keeps the outputs: 4c and 4d project to 96. ``projection=128`` keeps the
  filters.
- The outputs of 3c and 4e are printed at the size of their input (28x28, 14x14). They have stride 2, and the rows that
  follow are at half that size.
- The second convolution has depth 1 and a 1x1 reduction to 64 in the same row. Both are built.

The text has 13.6 million parameters; this table has 11.2 million with its classifier. One side classifier, with the
shape of Inception-v3's, makes the difference (``side=True``); the paper mentions none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from batchnorm.errors import BatchNormError
from batchnorm.layers.batch import BatchNorm1d, BatchNorm2d
from batchnorm.layers.sync import SyncBatchNorm

SIZE = 224
STRIDE = 32  # from the image to the maps of 5b
MULTIPLIER = 8  # of the depthwise part of the first convolution
SIDE_AFTER = "4d"
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid}

NormFactory = Callable[[int, str], nn.Module]
"""Makes the module that normalises so many channels and then applies the activation of that name."""


@dataclass(frozen=True)
class InceptionRow:
    """One Inception module of the table; ``projection`` 0 passes the pooled maps through."""

    name: str
    one: int
    three: tuple[int, int]  # reduction, then filters
    double: tuple[int, int]
    pool: str
    projection: int
    stride: int = 1

    def outputs(self, inputs: int) -> int:
        """Return how many maps the module makes of so many.

        >>> TABLE[0].outputs(192), TABLE[2].outputs(320)
        (256, 576)
        """
        return self.one + self.three[1] + self.double[1] + (self.projection or inputs)


TABLE = (
    InceptionRow("3a", 64, (64, 64), (64, 96), "avg", 32),
    InceptionRow("3b", 64, (64, 96), (64, 96), "avg", 64),
    InceptionRow("3c", 0, (128, 160), (64, 96), "max", 0, stride=2),
    InceptionRow("4a", 224, (64, 96), (96, 128), "avg", 128),
    InceptionRow("4b", 192, (96, 128), (96, 128), "avg", 128),
    InceptionRow("4c", 160, (128, 160), (128, 160), "avg", 96),
    InceptionRow("4d", 96, (128, 192), (160, 192), "avg", 96),
    InceptionRow("4e", 0, (128, 192), (192, 256), "max", 0, stride=2),
    InceptionRow("5a", 352, (192, 320), (160, 224), "avg", 128),
    InceptionRow("5b", 352, (192, 320), (192, 224), "max", 128),
)


def our_norm(channels: int, activation: str) -> nn.Module:
    """Make our Batch Normalization, with the nonlinearity in the same pass where it can be.

    >>> our_norm(8, "relu").activation, len(our_norm(8, "sigmoid"))
    ('relu', 2)
    """
    return _fused(BatchNorm2d, channels, activation)


def sync_norm(channels: int, activation: str) -> nn.Module:
    """Make our Batch Normalization over the batch of all processes.

    >>> type(sync_norm(8, "relu")).__name__
    'SyncBatchNorm'
    """
    return _fused(SyncBatchNorm, channels, activation)


def torch_norm(channels: int, activation: str) -> nn.Module:
    """Make torch's own Batch Normalization, followed by the nonlinearity.

    >>> torch_norm(8, "relu")[0].num_features
    8
    """
    return nn.Sequential(nn.BatchNorm2d(channels), ACTIVATIONS[activation]())


def _fused(layer: type[BatchNorm2d | SyncBatchNorm | BatchNorm1d], channels: int, activation: str) -> nn.Module:
    if activation == "relu":
        return layer(channels, activation="relu")
    return nn.Sequential(layer(channels), ACTIVATIONS[activation]())


class PerActivation(nn.Module):
    """Normalise every position of every map by itself, over the batch alone, as the paper's ensemble does at its end.

    >>> PerActivation(8, 7, "relu")(torch.randn(4, 8, 7, 7)).shape
    torch.Size([4, 8, 7, 7])
    """

    def __init__(self, channels: int, side: int, activation: str) -> None:
        """Make one gamma and beta for each of ``channels * side * side`` activations."""
        super().__init__()
        self.norm = _fused(BatchNorm1d, channels * side * side, activation)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise maps of the size that the layer was made for."""
        y: Tensor = self.norm(x.flatten(1))
        return y.view(x.shape)


Unit = Callable[..., nn.Module]
"""Makes a convolution with its normalisation and nonlinearity: inputs, outputs, kernel, stride."""


class Module(nn.Module):
    """One Inception module: up to four branches over one input, their maps side by side.

    >>> unit = lambda inputs, outputs, kernel, stride=1: nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2)
    >>> Module(TABLE[2], 320, unit)(torch.ones(1, 320, 28, 28)).shape
    torch.Size([1, 576, 14, 14])
    """

    def __init__(self, row: InceptionRow, inputs: int, unit: Unit) -> None:
        """Build the branches of a row."""
        super().__init__()
        if row.one:
            self.conv1x1 = unit(inputs, row.one, 1)
        self.conv3x3 = nn.Sequential(unit(inputs, row.three[0], 1), unit(*row.three, 3, row.stride))
        reduced, filters = row.double
        self.double3x3 = nn.Sequential(
            unit(inputs, reduced, 1), unit(reduced, filters, 3), unit(filters, filters, 3, row.stride)
        )
        pool = nn.MaxPool2d(3, row.stride, 1) if row.pool == "max" else nn.AvgPool2d(3, 1, 1, count_include_pad=False)
        self.pool = nn.Sequential(pool, unit(inputs, row.projection, 1)) if row.projection else pool

    def forward(self, x: Tensor) -> Tensor:
        """Run the branches that there are."""
        return torch.cat([branch(x) for branch in self.children()], 1)


class BNInception(nn.Module):
    """The network of Figure 5; ``norm=None`` is the one without Batch Normalization, with biases instead.

    >>> model = BNInception(classes=10, width=1 / 16)
    >>> model(torch.randn(2, 3, 224, 224)).shape
    torch.Size([2, 10])

    - ``activation``: "relu" or "sigmoid".
    - ``width``: a factor of all channels, for tests. ``size``: of the image, for the layers that depend on it.
    - ``dropout`` before the classifier and ``local_response``: GoogLeNet's, which the paper removes with BN.
    - ``separable``: the first convolution as the paper has it, each color by itself with 8 filters, then 1x1.
    - ``side``: a side classifier after 4d; a training forward pass returns the scores of both.
    - ``per_activation``: normalise 5b per activation; ``initial``: a factor of the first weights of the convolutions.
    - ``projection``: of the pooled maps in 4c and 4d: 96 as the printed outputs need, 128 as printed.

    The paper does not say how weights start: convolutions are drawn as in He et al. (2015), the classifier with a
    standard deviation of 0.01, biases at zero, from ``seed`` alone. Average pooling leaves padding out.
    """

    def __init__(
        self,
        norm: NormFactory | None = our_norm,
        *,
        activation: str = "relu",
        classes: int = 1000,
        width: float = 1.0,
        size: int = SIZE,
        dropout: float = 0.0,
        local_response: bool = False,
        separable: bool = True,
        side: bool = False,
        per_activation: bool = False,
        initial: float = 1.0,
        projection: int = 96,
        seed: int = 0,
    ) -> None:
        """Build the rows of the table and draw the weights."""
        super().__init__()
        if activation not in ACTIVATIONS:
            raise BatchNormError(f"there is no activation {activation!r}", do=f"choose one of {', '.join(ACTIVATIONS)}")
        if size < STRIDE or (per_activation and size % STRIDE):
            raise BatchNormError(f"size is {size}", where="BNInception", do=f"use a multiple of {STRIDE}")
        if per_activation and norm is None:
            raise BatchNormError("per_activation is a kind of normalisation, and norm is None", do="give a norm")

        def wide(channels: int) -> int:
            return max(1, round(channels * width)) if channels else 0

        def follow(channels: int) -> nn.Module:
            return ACTIVATIONS[activation]() if norm is None else norm(channels, activation)

        def convolution(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Module:
            return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=norm is None)

        def unit(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Module:
            return nn.Sequential(convolution(inputs, outputs, kernel, stride), follow(outputs))

        def last(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Module:
            after = PerActivation(outputs, size // STRIDE, activation)
            return nn.Sequential(convolution(inputs, outputs, kernel, stride), after)

        def response() -> nn.Module:
            return nn.LocalResponseNorm(5, 1e-4, 0.75) if local_response else nn.Identity()

        first, second = wide(64), wide(192)
        self.conv1 = unit(3, first, 7, 2)
        if separable:
            depthwise = nn.Conv2d(3, 3 * MULTIPLIER, 7, 2, 3, groups=3, bias=False)
            point = nn.Conv2d(3 * MULTIPLIER, first, 1, bias=norm is None)
            self.conv1 = nn.Sequential(depthwise, point, follow(first))
        self.pool1 = nn.Sequential(nn.MaxPool2d(3, 2, 1), response())
        self.conv2 = nn.Sequential(unit(first, first, 1), unit(first, second, 3), response())
        self.pool2 = nn.MaxPool2d(3, 2, 1)
        inputs, self.side = second, None
        for row in TABLE:
            scaled = InceptionRow(
                row.name,
                wide(row.one),
                (wide(row.three[0]), wide(row.three[1])),
                (wide(row.double[0]), wide(row.double[1])),
                row.pool,
                wide(projection if row.name in ("4c", "4d") else row.projection),
                row.stride,
            )
            own = last if per_activation and row.name == "5b" else unit
            self.add_module(f"inception{row.name}", Module(scaled, inputs, own))
            inputs = scaled.outputs(inputs)
            if side and row.name == SIDE_AFTER:
                self.side = Side(inputs, classes, unit, wide, math.ceil(size / 16))
        self.pool = nn.AdaptiveAvgPool2d(1)  # 7x7 at 224
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(inputs, classes)
        draw(self, seed, initial)

    def stages(self) -> dict[str, nn.Module]:
        """Return the rows of the table by their names, in order.

        >>> list(BNInception(width=1 / 16).stages())[:5]
        ['convolution', 'max pool', 'convolution 2', 'max pool 2', 'inception (3a)']
        """
        modules = {f"inception ({row.name})": self.get_submodule(f"inception{row.name}") for row in TABLE}
        start = {"convolution": self.conv1, "max pool": self.pool1, "convolution 2": self.conv2}
        return {**start, "max pool 2": self.pool2, **modules, "avg pool": self.pool}

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return class scores; in training with a side classifier, its scores as well."""
        beside = None
        for name, stage in self.stages().items():
            x = stage(x)
            if self.side is not None and self.training and name == f"inception ({SIDE_AFTER})":
                beside = self.side(x)
        scores: Tensor = self.classifier(self.dropout(x.flatten(1)))
        return scores if beside is None else (scores, beside)


class Side(nn.Module):
    """A side classifier: 5x5 average pool of stride 3, 128 and 768 maps, scores; the shape of Inception-v3's."""

    def __init__(self, inputs: int, classes: int, unit: Unit, wide: Callable[[int], int], size: int) -> None:
        """Build it for maps of a size."""
        super().__init__()
        self.pool = nn.AvgPool2d(5, 3) if size >= 5 else nn.Identity()
        pooled = (size - 5) // 3 + 1 if size >= 5 else size
        self.reduce = unit(inputs, wide(128), 1)
        # One position is left of the maps, so this is a convolution that does not slide; normalised like the others.
        self.whole = nn.Sequential(nn.PixelUnshuffle(pooled), unit(wide(128) * pooled**2, wide(768), 1))
        self.classifier = nn.Linear(wide(768), classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the side classifier."""
        scores: Tensor = self.classifier(self.whole(self.reduce(self.pool(x))).flatten(1))
        return scores


def draw(model: nn.Module, seed: int, initial: float = 1.0) -> None:
    """Draw the first weights of convolutions and linear layers, from the seed alone.

    >>> draw(nn.Conv2d(3, 8, 1), seed=0)
    """
    stream = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                deviation = initial * math.sqrt(2 / module.weight[0].numel())
            elif isinstance(module, nn.Linear):
                deviation = 0.01
            else:
                continue
            module.weight.normal_(0, deviation, generator=stream)
            if module.bias is not None:
                module.bias.zero_()
