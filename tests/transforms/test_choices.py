"""Models that sort, select and threshold: rounding decides between equal scores, and is not taken for a fault."""

import copy

import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm import NotEquivalent
from batchnorm.nested import tensors_in
from batchnorm.transforms.choices import with_same_choices
from batchnorm.transforms.gradients import verify_gradients
from batchnorm.transforms.verify import verify

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Detector(nn.Module):
    """Boxes and scores; the scores are equal but for the last digits, as those of an untrained head."""

    def __init__(self, select, spread=3e-7):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.box, self.score = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 1, 1)
        self.select, self.spread = select, spread
        nn.init.uniform_(self.bn.weight, 0.5, 1.5)
        nn.init.uniform_(self.bn.running_var, 0.5, 2.0)
        nn.init.normal_(self.bn.running_mean)

    def forward(self, x):
        features = self.bn(self.conv(x)).relu()
        scores = 1 + self.spread * self.score(features).flatten()
        return self.select(self.box(features).transpose(0, 1).flatten(1).T, scores)


def by_topk(boxes, scores):
    best, order = scores.topk(20)
    return {"boxes": boxes[order], "scores": best, "order": order}


def by_sort(boxes, scores):
    return boxes[scores.argsort(descending=True)]


def by_threshold(boxes, scores):  # of a size that depends on the input's content
    keep = scores > 1
    return boxes[keep], scores[keep]


def by_where(boxes, scores):
    (index,) = torch.where(scores >= scores.median())
    return boxes[index]


def by_size(boxes, scores):
    count = int((scores > 1).sum())
    return boxes[:count]


def by_maximum(boxes, scores):
    best, index = scores.max(0)
    return boxes[index], best


def by_rounding(boxes, scores):
    return boxes * torch.floor(scores)[:, None]


def by_suppression(boxes, scores):
    """As non-maximum suppression does it."""
    order, kept = scores.argsort(descending=True, stable=True), []
    while len(order) and len(kept) < 20:
        kept.append(order[0])
        order = order[1:][(boxes[order[1:]] - boxes[order[0]]).abs().amax(1) > 0.5]
    return [{"boxes": boxes[torch.stack(kept)], "labels": torch.stack(kept) % 3}]


SELECT = (by_topk, by_sort, by_threshold, by_where, by_size, by_maximum, by_rounding, by_suppression)


def changed_a_little(model, share):
    """Another model of the same function but for rounding: its scores move by a few of their last digits."""
    twin = Detector(model.select, model.spread).eval()
    with torch.no_grad():
        twin.score.bias += share
    return twin


@pytest.mark.parametrize("select", SELECT)
def test_equal_scores(select):
    model = Detector(select).eval()
    after = changed_a_little(model, -0.3)  # a few last digits of the scores
    with torch.no_grad():
        old, new = (m(X) for m in (model, after))
    assert not same(old, new)  # else this shows nothing
    certificate = verify(model, after, X, verb="test")
    assert certificate.relative <= 1e-4
    assert "selected" in certificate.what


@pytest.mark.parametrize("select", SELECT)
def test_other_scores_are_a_fault(select):
    """The same selections, from scores that differ by more than rounding."""
    model = Detector(select, spread=0.4).eval()
    after = changed_a_little(model, 0.0)
    with torch.no_grad():
        after.score.weight.neg_()
    with pytest.raises(NotEquivalent):
        verify(model, after, X, verb="test")


@pytest.mark.parametrize("select", [by_topk, by_threshold, by_suppression])
def test_a_fault_behind_equal_scores(select):
    model = Detector(select).eval()
    after = changed_a_little(model, -0.3)
    with torch.no_grad():
        after.box.weight *= 1.01
    with pytest.raises(NotEquivalent):
        verify(model, after, X, verb="test")


@pytest.mark.parametrize("select", SELECT)
@pytest.mark.parametrize("verb", [bn.fold, bn.fuse, bn.drop_bias])
def test_verbs(verb, select):
    model = Detector(select).eval()
    _, report = verb(model, X)
    assert report.certificate.relative <= 1e-4


def test_what_is_compared_is_what_was_chosen_from():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])

    def chosen(first, second, near):
        def observed(function):
            def run(within):
                with within:
                    return function()

            return run

        return with_same_choices(observed(first), observed(second), near)

    assert chosen(a.argmax, b.argmax, lambda x, y: True) is not None
    assert chosen(a.argmax, b.argmax, lambda x, y: bool((x[0] == y[0]).all())) is None
    assert chosen(a.argmax, lambda: b * 2, lambda x, y: True) is None  # it chooses nothing
    assert chosen(lambda: a * 2, lambda: b * 2, lambda x, y: True) is None


def test_what_was_tried_leaves_the_models_as_they_were():
    """Statistics are restored outside of what is observed: comparisons of theirs are no choices of the model."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2)) for _ in range(2)]
    before = [copy.deepcopy(model.state_dict()) for model in models]
    with pytest.raises(NotEquivalent):
        verify_gradients(*models, X, verb="test")
    for model, was in zip(models, before, strict=True):
        assert all(torch.equal(now, was[name]) for name, now in model.state_dict().items())


def same(old, new):
    pairs = list(zip(tensors_in(old), tensors_in(new), strict=True))
    return all(a.shape == b.shape and torch.allclose(a.double(), b.double(), atol=1e-4) for a, b in pairs)
