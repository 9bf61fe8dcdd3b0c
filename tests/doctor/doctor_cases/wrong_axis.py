"""BN110, after dcase2018_baseline#18: batch normalisation over an axis that is not the features'."""

import torch
from torch import nn

import batchnorm as bn


class Recurrent(nn.Module):
    """A recurrent layer over (batch, time, features), and a BN layer behind it."""

    def __init__(self, move, channels, cell=nn.LSTM):
        super().__init__()
        self.rnn, self.norm, self.move = cell(5, 6, batch_first=True), nn.BatchNorm1d(channels), move

    def forward(self, x):
        return self.norm(self.move(self.rnn(x)[0]))


class Convolved(nn.Module):
    """Channels on axis 1, and a linear layer over the positions: an MLP mixer's step, with BN over its channels."""

    def __init__(self):
        super().__init__()
        self.conv, self.mix, self.norm = nn.Conv1d(3, 5, 1, bias=False), nn.Linear(7, 7), nn.BatchNorm1d(5)

    def forward(self, x):
        return self.norm(self.mix(self.conv(x)))


class Around(nn.Module):
    """The right way: features to axis 1 and back."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)


class Flattened(nn.Module):
    """The other right way: every position is a row."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        y = self.linear(x)
        return self.norm(y.flatten(0, 1)).reshape_as(y)


def sequences(*layers, shape=(16, 20, 5)):
    return {"model": nn.Sequential(*layers), "example": torch.randn(shape)}


def channels_of_different_size():
    """(batch, channels, time): a linear layer over the time, and channels that are far apart."""
    scale = torch.tensor([[[0.1], [1.0], [10.0]]])
    return {
        "model": nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(3)),
        "example": scale * (5 + torch.randn(16, 3, 8)),
    }


def words(*layers):
    return {"model": nn.Sequential(nn.Embedding(10, 5), *layers), "example": torch.randint(0, 10, (8, 6))}


def features_of_different_size():
    """(batch, time, features): the features are far apart, the steps are alike."""
    return {
        "model": nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(20)),
        "example": torch.randn(16, 20, 4) + torch.tensor([0.0, 3.0, -5.0, 9.0]),
    }


SICK = {
    "features that are far apart": features_of_different_size,
    "linear": lambda: sequences(nn.Linear(5, 20), nn.BatchNorm1d(20)),
    "another number of features": lambda: sequences(nn.Linear(5, 6), nn.ReLU(), nn.BatchNorm1d(20)),
    "ours, with dropout between": lambda: sequences(nn.Linear(5, 6), nn.Dropout(0.1), bn.BatchNorm1d(20)),
    "two of them": lambda: sequences(nn.Linear(5, 6), nn.BatchNorm1d(20), nn.Linear(6, 6), nn.BatchNorm1d(20)),
    "maps with the features last": lambda: sequences(nn.Linear(3, 8), nn.BatchNorm2d(6), shape=(4, 6, 6, 3)),
    "an embedding": lambda: words(nn.BatchNorm1d(6)),
    "an embedding and a linear layer": lambda: words(nn.Linear(5, 5), nn.BatchNorm1d(6)),
    "a recurrent layer": lambda: {"model": Recurrent(lambda y: y, 20), "example": torch.randn(4, 20, 5)},
    "a reshape instead of a transposition": lambda: {
        "model": Recurrent(lambda y: y.reshape(y.shape[0], y.shape[2], y.shape[1]), 6, nn.GRU),
        "example": torch.randn(4, 20, 5),
    },
}
HEALTHY = {
    "transposed": lambda: {"model": Around(), "example": torch.randn(16, 20, 5)},
    "every position a row": lambda: {"model": Flattened(), "example": torch.randn(16, 20, 5)},
    "a recurrent layer, transposed": lambda: {
        "model": Recurrent(lambda y: y.transpose(1, 2), 6), "example": torch.randn(4, 20, 5)
    },
    "the last step": lambda: {"model": Recurrent(lambda y: y[:, -1], 6), "example": torch.randn(4, 20, 5)},
    "convolution": lambda: sequences(nn.Conv1d(20, 6, 3), nn.BatchNorm1d(6)),
    "linear, without positions": lambda: sequences(nn.Linear(5, 6), nn.BatchNorm1d(6), shape=(16, 5)),
    "a linear layer over positions": lambda: {"model": Convolved(), "example": torch.randn(8, 3, 7)},
    "a linear layer over time": channels_of_different_size,
    "on the input": lambda: sequences(nn.BatchNorm1d(20)),
}  # fmt: skip
