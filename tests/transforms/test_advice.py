"""What a message advises exists: every option that it names is one of the function that raised it."""

import inspect
import re

import pytest
import torch
from torch import nn

import batchnorm as bn

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.last = nn.Conv2d(4, 4, 3)
        self.runs = 0

    def forward(self, x):
        return self.last(self.relu(self.bn(self.conv(x))))


class NotANumber(Network):
    def forward(self, x):
        return super().forward(x) * float("nan")


class Nothing(Network):
    def forward(self, x):
        super().forward(x)


class Zeros(Network):
    def forward(self, x):
        return super().forward(x) * 0


class Unsteady(Network):
    generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return super().forward(x) + torch.rand(1, generator=self.generator)


class Particular(Network):
    """Gives something else when one of its layers is another."""

    def forward(self, x):
        own = (type(self.bn), type(self.relu), self.conv.bias is None, hasattr(self.last, "norm"))
        return super().forward(x) * (1 if own == (nn.BatchNorm2d, nn.ReLU, False, False) else 2)


class Untrainable(Network):
    def forward(self, x):
        assert not self.training, "no targets"
        return super().forward(x)


class Uncopied(Network):
    def __deepcopy__(self, memo):
        raise TypeError("not me")


class Constant(Network):
    def forward(self, x):
        return super().forward(x).detach().sum()


KINDS = (Network, NotANumber, Nothing, Zeros, Unsteady, Particular, Untrainable, Uncopied, Constant)
EXAMPLES = {
    "a tensor": X,
    "a list": [X[0], X[1]],
    "a dictionary": {"pixel_values": X, "mask": X},
    "a list of names": ["a", "b"],
    "one sample": X[:1],
}
VERBS = {
    "trace": (bn.trace, lambda m, x, path: bn.trace(m, x)),
    "insert": (bn.insert, lambda m, x, path: bn.insert(m, x, "last", preserve=[x])),
    "fold": (bn.fold, lambda m, x, path: bn.fold(m, x)),
    "fuse": (bn.fuse, lambda m, x, path: bn.fuse(m, x)),
    "accelerate": (bn.accelerate, lambda m, x, path: bn.accelerate(m, x, steps=1, seconds=0)),
    "drop_bias": (bn.drop_bias, lambda m, x, path: bn.drop_bias(m, x)),
    "convert": (bn.convert, lambda m, x, path: bn.convert(m, "sync", example=x)),
    "convert, with data": (bn.convert, lambda m, x, path: bn.convert(m, "group", data=[x])),
    "export": (bn.export, lambda m, x, path: bn.export(m.eval(), x, path / "model.pt2")),
    "calibrate": (bn.calibrate, lambda m, x, path: bn.calibrate(m, [x], progress=False)),
    "adapt": (bn.adapt, lambda m, x, path: bn.adapt(m, [x], method="entropy")),
    "freeze": (bn.freeze, lambda m, x, path: bn.freeze(m)),
    "check": (bn.check, lambda m, x, path: bn.check(m, x)),
    "fix": (bn.fix, lambda m, x, path: bn.fix(m, bn.check(m, x, select=["BN101"]))),
    "boundary": (bn.probe.boundary, lambda m, x, path: bn.probe.boundary(m, [x])),
}


CERTIFIED = ("insert", "fold", "fuse", "accelerate", "drop_bias", "convert", "export")


def advised(sentence):
    """The options in a sentence, without those in the examples of calls, ``bn.fold(model, forward=...)``."""
    outside = re.sub(r"[\w.]+\([^()]*\)", "", sentence)
    return {name for name in re.findall(r"\b([a-z_]+)=", outside) if name != "lambda"}


def test_the_words_of_a_sentence():
    assert advised("give forward=, or where=[...]; see bn.fold(m, x, leave=...) and drop_last=True") == {
        "forward", "where", "drop_last",
    }  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("name", VERBS)
@pytest.mark.filterwarnings("ignore")
def test_an_option_that_a_message_advises_exists(name, example, training, tmp_path):
    verb, call = VERBS[name]
    options = set(inspect.signature(verb).parameters) | {"drop_last"}  # of a DataLoader
    kinds = KINDS if example == "a tensor" else KINDS[:1]
    heard: list[bn.BatchNormError] = []
    raw: list[tuple[type, Exception]] = []
    for kind in kinds:
        try:
            call(kind().train(training), EXAMPLES[example], tmp_path)
        except bn.BatchNormError as error:
            heard.append(error)
        except Exception as error:
            raw.append((kind, error))
    assert [(error, advised(error.do) - options) for error in heard if advised(error.do) - options] == []
    if example == "a tensor" and name in CERTIFIED:  # what a model raises in training is quoted by an error of ours
        assert len(heard) >= 3
        assert [kind for kind, _ in raw] in ([], [Uncopied])
