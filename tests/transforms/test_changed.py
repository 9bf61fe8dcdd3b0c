"""What a verb returns is a pair, and shows its report in a notebook."""

import copy
import pickle
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.records import Change, Report
from batchnorm.transforms.changed import Changed

X = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def network(training=False, bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=bias), nn.BatchNorm2d(4), nn.ReLU()).train(training)


VERBS = {
    "fold": lambda: bn.fold(network(), X),
    "calibrate": lambda: bn.calibrate(network(True), [X]),
    "adapt": lambda: bn.adapt(network(), [X]),
    "convert": lambda: bn.convert(network(), "sync"),
    "freeze": lambda: bn.freeze(network()),
    "unfreeze": lambda: bn.unfreeze(bn.freeze(network())[0]),
    "fuse": lambda: bn.fuse(network(True), X),
    "drop_bias": lambda: bn.drop_bias(network(True), X),
    "insert": lambda: bn.insert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), X),
    "accelerate": lambda: bn.accelerate(network(), X, steps=2, seconds=0.01),
    "fix": lambda: bn.fix(network(), bn.check(network(), X)),
}


@pytest.mark.parametrize("verb", VERBS)
def test_it_shows_the_report_and_is_a_pair(verb):
    changed = VERBS[verb]()
    model, report = changed
    assert isinstance(changed, tuple)
    assert isinstance(model, nn.Module)
    assert len(changed) == 2
    assert report._repr_html_() in changed._repr_html_()
    assert changed == (model, report)


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags = set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)


def test_names_are_escaped():
    class Odd(nn.Module):
        def extra_repr(self):
            return "<script>alert(1)</script>"

    Odd.__name__ = "<img src=x>"
    reader = Reader()
    reader.feed(Changed((Odd(), Report((Change("<b>", "class", "<i>", "B"),))))._repr_html_())
    assert not reader.tags & {"script", "img", "b", "i"}


def test_copies_are_pairs_too():
    changed = bn.freeze(network())
    for other in (copy.deepcopy(changed), pickle.loads(pickle.dumps(changed))):
        assert isinstance(other, Changed)
        assert other[1] == changed[1]
        assert list(other[0].state_dict()) == list(changed[0].state_dict())
