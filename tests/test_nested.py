"""Models that take and give tensors in structures of any kind."""

import dataclasses
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.nested import fresh, tensors_in
from zoo import Run

X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    hidden: list


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("wrap", [
    lambda y: (y, 1), lambda y: {"out": [y]}, lambda y: Result(y, []), lambda y: Result(torch.ones(1), [y]),
    lambda y: SimpleNamespace(a=SimpleNamespace(b=y)), Slotted, lambda y: [None, {"a": (y, "text")}],
    lambda y: nn.utils.rnn.pack_padded_sequence(y.flatten(2), torch.tensor([3] * 4), batch_first=True),
])  # fmt: skip
def test_outputs_of_any_structure(wrap):
    graph = bn.trace(Run(lambda m, x: wrap(m.relu(x)), relu=nn.ReLU()), X)
    assert graph.outputs
    relu = graph.of("relu")[0].outputs[0]
    assert graph.feeds_output(relu) or graph.consumers(relu)


@pytest.mark.parametrize(("example", "forward"), [
    (X, None), ((X, 2), None), ([X], None), ({"x": X}, None), (Result(X, []), lambda m, e: m(e.logits)),
    (Slotted(X), lambda m, e: m(e.x)),
])  # fmt: skip
def test_inputs_of_any_structure(example, forward):
    graph = bn.trace(Run(lambda m, x, k=1: m.relu(x) * k, relu=nn.ReLU()), example, forward=forward)
    assert graph.of("relu")[0].inputs == graph.inputs[:1]


def test_the_example_is_not_written_to():
    before = X.clone()
    bn.trace(nn.Sequential(nn.ReLU(inplace=True)), X)
    bn.trace(Run(lambda m, e: e.x.zero_()), (Slotted(X),))
    assert torch.equal(X, before)


def test_tensors_in_objects_that_refer_to_themselves():
    a = SimpleNamespace(x=X)
    a.me = a
    assert tensors_in(a, [a]) == [X]
    assert tensors_in(nn.Linear(2, 2), lambda: X, "text", 3) == []


def test_a_fresh_copy_keeps_what_is_the_same_the_same():
    lock = threading.Lock()
    example = {"a": X, "b": [Slotted(X), lock], "c": 3}
    copy = fresh(example)
    assert copy["a"] is copy["b"][0].x
    assert copy["a"] is not X
    assert torch.equal(copy["a"], X)
    assert copy["b"][1] is lock
    layout = fresh(X.contiguous(memory_format=torch.channels_last))
    assert layout.is_contiguous(memory_format=torch.channels_last)
