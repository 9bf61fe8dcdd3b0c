"""BN206, after pytorch/pytorch#70529: sequences of different lengths, padded with zeros, through convolutions."""

from functools import partial

import torch
from torch import nn

import batchnorm as bn

LENGTHS = (40, 31, 22, 12, 38, 9, 17, 25)


def sequences(lengths=LENGTHS, channels=6, size=40, side="right"):
    x = torch.zeros(len(lengths), channels, size)
    for row, length in zip(x, lengths, strict=True):
        where = slice(0, length) if side == "right" else slice(size - length, size)
        row[:, where] = torch.randn(channels, length) + 2
    return x


def pictures():
    """Images of different heights and widths, in the top left corner of a common frame, as detectors batch them."""
    x = torch.zeros(4, 3, 24, 24)
    for image, (height, width) in zip(x, ((24, 24), (16, 20), (12, 24), (20, 10)), strict=True):
        image[:, :height, :width] = torch.randn(3, height, width) + 1
    return x


def digits():
    """Drawings in the middle of a black background: the background belongs to the picture."""
    x = torch.zeros(8, 1, 28, 28)
    for image in x:
        height, width = torch.randint(10, 24, (2,)).tolist()
        top, left = (28 - height) // 2, (28 - width) // 2
        image[:, top : top + height, left : left + width] = torch.rand(height, width)
    return x


def strokes(n=4):
    """Handwriting, as in MNIST: bright strokes in the middle of a black square, some wider on one side."""
    x = torch.zeros(n, 1, 28, 28)
    for image in x:
        row, column = (int(v) for v in torch.randint(9, 19, (2,)))
        for _ in range(30):
            image[:, row : row + 2, column : column + 2] = torch.rand(1) / 2 + 0.5
            row, column = (min(max(v + int(torch.randint(-2, 3, ())), 4), 22) for v in (row, column))
    return x


def handwriting(make, batches, size):
    return {"model": make(), "data": [strokes(size) for _ in range(batches)]}


def strided():
    """Its stride leaves the border on one side only; several layers."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 5, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
    )  # fmt: skip


def scanned():
    """Reads a picture line by line, as a sequence."""
    return nn.Sequential(nn.Flatten(1, 2), nn.Conv1d(28, 8, 3, padding=1), nn.BatchNorm1d(8))


def cropped(batches=6, size=4, width=32, most=8):
    """Images that an augmentation shifts by a few columns and fills up with zeros, to either side."""

    def shifted(image):
        by = int(torch.randint(-most, most + 1, ()))
        moved = image.roll(by, 2)
        moved[..., slice(0, by) if by > 0 else slice(width + by, width)] = 0.0
        return moved

    return [torch.stack([shifted(torch.randn(3, width, width) + 2) for _ in range(size)]) for _ in range(batches)]


class Twice(nn.Module):
    """Takes its images as a dictionary, in which one cannot tell which tensor is padded."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, batch):
        return self.body(batch["pixels"]) + 0 * batch["other"].sum()


class Steps(nn.Module):
    """Sequences with the features last, as recurrent layers take them; ``first``: with time before the batch."""

    def __init__(self, time_first=False):
        super().__init__()
        self.time_first, self.body = time_first, speech()

    def forward(self, x):
        return self.body(x.permute(1, 2, 0) if self.time_first else x.transpose(1, 2))


def pauses(share=0.1):
    """Padded sequences with silent steps inside."""
    x = sequences()
    return x * (torch.rand(len(x), 1, x.shape[2]) > share)


class Tagger(nn.Module):
    """Embeddings of words, of which 0 is padding, through a convolution over time."""

    def __init__(self):
        super().__init__()
        self.words, self.conv, self.norm = nn.Embedding(50, 8), nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.conv(self.words(x).transpose(1, 2)))


def words():
    x = torch.randint(1, 50, (8, 40))
    for row, length in zip(x, LENGTHS, strict=True):
        row[length:] = 0
    return x


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = bn.BatchNorm1d(6)

    def forward(self, x, lengths):
        return self.norm(x, mask=lengths)


def speech(size=3):
    return nn.Sequential(nn.Conv1d(6, 8, size, padding=size // 2), nn.BatchNorm1d(8), nn.ReLU())


def image_network():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())


def loop(monitor, model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with monitor(model, optimizer):
        for batch in batches:
            optimizer.zero_grad()
            model(*batch).square().mean().backward()
            optimizer.step()


SICK = {
    "sequences": lambda: {"model": speech(), "example": sequences()},
    "sequences, as data": lambda: {"model": speech(), "data": [sequences() for _ in range(3)]},
    "on the left": lambda: {"model": speech(), "example": sequences(side="left")},
    "all padded": lambda: {"model": speech(), "example": sequences(LENGTHS[1:])},
    "images": lambda: {"model": image_network(), "example": pictures()},
    "words": lambda: {"model": Tagger(), "example": words()},
    "behind another layer": lambda: {"model": nn.Sequential(speech(), nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)),
                                     "example": sequences()},
    "pauses": lambda: {"model": speech(), "example": pauses()},
    "features last": lambda: {"model": Steps(), "example": sequences().transpose(1, 2)},
    "time first": lambda: {"model": Steps(True), "example": sequences().permute(2, 0, 1)},
    "some batches of equal lengths": lambda: {"model": speech(), "data": [sequences(), sequences((40,) * 8)] * 2},
    "two images": lambda: {"model": image_network(), "example": pictures()[[0, 2]]},
    "images in a dictionary": lambda: {
        "model": Twice(image_network()), "example": ({"pixels": pictures(), "other": torch.randn(4, 3, 5)},)
    },
}  # fmt: skip
HEALTHY = {
    "masked": lambda: {"model": Masked(), "example": (sequences(), torch.tensor(LENGTHS))},
    "equal lengths": lambda: {"model": speech(), "example": sequences((40,) * 8)},
    "equal lengths, padded": lambda: {"model": speech(), "example": sequences((30,) * 8)},
    "a black background": lambda: {
        "model": nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)), "example": digits()
    },
    **{
        f"handwriting, batches of {size}, {kind.__name__}": partial(handwriting, kind, 12, size)
        for size in (2, 4, 8) for kind in (strided, scanned)
    },
    "handwriting in a dictionary": lambda: {
        "model": Twice(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))),
        "data": [({"pixels": strokes(2), "other": torch.randn(2, 3, 5)},) for _ in range(12)],
        "forward": lambda m, batch: m(batch[0]),
    },
    "random shifts": lambda: {"model": image_network(), "data": cropped()},
    "padding in a few batches of many": lambda: {
        "model": speech(), "data": [sequences(), *(sequences((40,) * 8) for _ in range(7))]
    },
    "zeros after a ReLU": lambda: {
        "model": nn.Sequential(nn.Conv1d(6, 1, 1), nn.ReLU(), nn.BatchNorm1d(1)), "example": torch.randn(32, 6, 12)
    },
    "noise": lambda: {"model": image_network(), "example": torch.randn(4, 3, 16, 16)},
    "evaluation mode": lambda: {"model": speech().eval(), "example": sequences()},
    "vectors": lambda: {"model": nn.BatchNorm1d(3), "example": torch.randn(8, 3)},
    "no BN": lambda: {"model": nn.Conv1d(6, 2, 3), "example": sequences()},
}  # fmt: skip
SICK_RUNS = {
    "sequences": lambda monitor: loop(monitor, speech(), [(sequences(),) for _ in range(2)]),
    "words": lambda monitor: loop(monitor, Tagger(), [(words(),) for _ in range(2)]),
}
HEALTHY_RUNS = {
    "masked": lambda monitor: loop(monitor, Masked(), [(sequences(), torch.tensor(LENGTHS)) for _ in range(2)]),
    "equal lengths": lambda monitor: loop(monitor, speech(), [(sequences((40,) * 8),) for _ in range(2)]),
    "handwriting": lambda monitor: loop(monitor, strided(), [(strokes(4),) for _ in range(12)]),
    "random shifts": lambda monitor: loop(monitor, image_network(), [(x,) for x in cropped()]),
    "a batch of several": lambda monitor: loop(monitor, speech(), [(sequences((40,) * 8),)] * 2 + [(sequences(),)]),
}
