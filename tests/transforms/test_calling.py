"""How examples and batches reach a model: tensors, tuples, lists and dictionaries, in everything that takes them."""

from collections import UserDict

import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.calling import batch_forward, call_with, inputs_of, labels_of, raised_in
from batchnorm.doctor.subject import Subject

X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
MASK = torch.ones(8, 1, 8, 8)
Y = torch.arange(8) % 4


class Features(UserDict):
    """As a tokenizer or an image processor of transformers returns it: a mapping that is no dict."""


class Classifier(nn.Module):
    """As those of transformers: named arguments, a loss if there are labels, a dictionary of results."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.plain, self.act, self.head = nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)

    def forward(self, pixel_values, labels=None, mask=None):
        hidden = self.relu(self.bn(self.conv(pixel_values if mask is None else pixel_values * mask)))
        logits = self.head(self.act(self.plain(hidden.mean((2, 3)))))
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


class Plain(Classifier):
    def forward(self, x):
        return super().forward(x)["logits"]


def named(**more):
    return {"pixel_values": X, **more}


BATCHES = {
    "a dictionary": named(),
    "a mapping": Features(named()),
    "with labels that forward takes": named(labels=Y),
    "with labels that forward does not take": named(label=Y),
    "with another argument": Features(named(mask=MASK)),
    "a pair of a dictionary and labels": (named(), Y),
    "a list of both": [Features(named()), Y],
}


def scores(model, batch):
    return call_with(model, inputs_of(model, batch))["logits"]


VERBS = {
    "calibrate": lambda m, batch: bn.calibrate(m, [batch], progress=False)[1].samples == 8,
    "adapt": lambda m, batch: bn.adapt(m, [batch])[1].examples == 8,
    "adapt by entropy": lambda m, batch: bn.adapt(m, [batch], method="entropy", forward=scores)[1].examples == 8,
    "insert": lambda m, batch: bn.insert(m, {"pixel_values": X}, "plain", preserve=[batch])[1].certificate.kept,
    "convert": lambda m, batch: bn.convert(m, "group", data=[batch])[1].certificate is not None,
    "check": lambda m, batch: "BN207" not in bn.check(m, data=[batch], select=["BN1", "BN2"]).skipped,
    "boundary": lambda m, batch: len(bn.probe.boundary(m, [batch], batch_sizes=(2,), draws=2)) == 1,
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("name", VERBS)
def test_batches(name, kind):
    assert VERBS[name](Classifier(), BATCHES[kind])


ALONE = {
    "calibrate": lambda m, batch: bn.calibrate(m, batch, progress=False)[1].samples == 8,
    "adapt": lambda m, batch: bn.adapt(m, batch)[1].examples == 8,
    "insert": lambda m, batch: bn.insert(m, X, "plain", preserve=batch)[1].certificate.kept,
    "convert": lambda m, batch: bn.convert(m, "group", data=batch)[1].certificate is not None,
    "check": lambda m, batch: len(bn.check(m, data=batch, select=["BN2"]).subject.batches) == 1,
    "boundary": lambda m, batch: len(bn.probe.boundary(m, batch, batch_sizes=(2,), draws=2)) == 1,
}


@pytest.mark.parametrize("batch", [X, named(), Features(named(labels=Y))], ids=["tensor", "dictionary", "mapping"])
@pytest.mark.parametrize("name", ALONE)
def test_a_tensor_or_a_mapping_in_the_place_of_batches_is_one(name, batch):
    assert ALONE[name](Classifier(), batch)


@pytest.mark.parametrize("name", ALONE)
def test_what_gives_no_batches_is_named(name):
    with pytest.raises(bn.BatchNormError, match="the batches are a int; give a list of batches, or a DataLoader"):
        ALONE[name](Classifier(), 3)


def test_statistics_are_those_of_the_tensor_alone():
    want, _ = bn.calibrate(Classifier(), [X[:4], X[4:]], progress=False)
    for kind in (dict, Features):
        batches = [kind(pixel_values=part, label=Y[:4]) for part in (X[:4], X[4:])]
        found, _ = bn.calibrate(Classifier(), batches, progress=False)
        assert torch.equal(found.bn.running_mean, want.bn.running_mean)
        assert torch.equal(found.bn.running_var, want.bn.running_var)


EXAMPLES = {
    "a dictionary": named(),
    "a mapping": Features(named()),
    "with labels": Features(named(labels=Y)),
    "with another argument": named(mask=MASK),
}
CHANGES = {
    "trace": lambda m, x: bn.trace(m, x),
    "fold": lambda m, x: bn.fold(m, x),
    "fuse": lambda m, x: bn.fuse(m, x),
    "drop_bias": lambda m, x: bn.drop_bias(m, x),
    "insert": lambda m, x: bn.insert(m, x, "plain"),
    "sync": lambda m, x: bn.convert(m, "sync", example=x),
    "accelerate": lambda m, x: bn.accelerate(m, x, steps=1, seconds=0),
    "check": lambda m, x: bn.check(m, x, select=["BN101"]),
}


@pytest.mark.parametrize("kind", EXAMPLES)
@pytest.mark.parametrize("name", CHANGES)
def test_examples(name, kind):
    result = CHANGES[name](Classifier(), EXAMPLES[kind])
    if name in ("fuse", "drop_bias", "sync"):
        assert result[1].certificate.inputs == 3
        assert result[1].gradients is not None
    if name == "check":
        assert result.codes == ("BN101",)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_gradients_of_the_inputs_are_compared_in_any_mapping(kind):
    from batchnorm.transforms.gradients import step

    names = set(step(Classifier(), EXAMPLES[kind]).kinds["gradients"])
    assert "input 0" in names
    assert ("input 1" in names) == ("another" in kind)


def test_a_single_entry_is_the_first_argument():
    model = Plain()
    want, _ = bn.calibrate(Plain(), [X], progress=False)
    found, _ = bn.calibrate(model, [{"image": X, "label": Y}], progress=False)
    assert torch.equal(found.bn.running_mean, want.bn.running_mean)


def test_entries_that_forward_does_not_take():
    with pytest.raises(
        bn.BatchNormError, match="calibrate: a batch has 'image', and forward of Classifier takes pixel"
    ):
        bn.calibrate(Classifier(), [{"image": X, "other": X}], progress=False)


@pytest.mark.parametrize("batch", [3, "words", {"image": "path"}, (3, X), [], None, {}])
def test_batches_without_a_tensor(batch):
    with pytest.raises(bn.BatchNormError, match=r"^adapt: a batch (is|begins with) a .*, without a tensor in it; give"):
        bn.adapt(Plain(), [batch])


def test_wrapped_models_take_what_their_model_takes():
    wrapped = nn.DataParallel(Plain())
    assert list(inputs_of(wrapped, {"x": X, "label": Y})) == ["x"]
    assert inputs_of(wrapped, {"image": X}) is X

    class Anything(Plain):
        def forward(self, x, **more):
            return super().forward(x)

    assert list(inputs_of(Anything(), {"x": X, "label": Y})) == ["x", "label"]


class Lists(Plain):
    """As detectors take images: a list of them."""

    def forward(self, images, scale=1.0):
        assert isinstance(images, list), "give a list"
        return super().forward(torch.stack(images)) * scale


@pytest.mark.parametrize("verb", [bn.trace, bn.fold, bn.fuse, bn.drop_bias, bn.insert])
def test_a_list_gets_a_hint(verb):
    with pytest.raises(bn.BatchNormError, match=r"entries of a list .* write it inside a tuple: \(\[\.\.\.\],\)"):
        verb(Lists().eval(), [X[0], X[1]])
    verb(Lists().eval(), ([X[0], X[1]],))


def test_a_list_of_arguments_is_one():
    assert call_with(nn.Bilinear(2, 3, 4), [torch.zeros(5, 2), torch.zeros(5, 3)]).shape == (5, 4)


def test_labels_in_a_dictionary_count_for_accuracy():
    subject = Subject(Classifier().eval(), data=[Features(named(labels=Y))] * 3)
    assert subject.labelled
    want = float((Classifier().eval()(X)["logits"].argmax(1) == Y).float().mean())
    assert subject.accuracy(subject.outputs) == pytest.approx(want)
    assert labels_of(Features(named(label=Y))) is Y


def test_where_an_exception_was_raised():
    class Inner(nn.Module):
        def forward(self, x):
            raise KeyError("inside")

    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU(), Inner()))
    with pytest.raises(KeyError) as raised:
        model(X)
    assert raised_in(model, raised.value) == "1.1"
    assert raised_in(nn.ReLU(), raised.value) == ""


class Losses(nn.Module):
    """As torchvision's detectors: losses in training, which need targets, and detections in evaluation."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), Head()

    def forward(self, images, targets=None):
        features = self.bn(self.conv(torch.stack(images))).relu()
        return self.head(features, targets)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.box, self.score = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 1, 1)

    def forward(self, features, targets):
        boxes, scores = self.box(features).flatten(2).transpose(1, 2), self.score(features).flatten(1)
        if self.training:
            assert targets is not None, "targets should not be none when in training mode"
            goal = torch.stack([each["boxes"] for each in targets]).mean(1, keepdim=True)
            return {"boxes": (boxes - goal).abs().mean(), "scores": scores.square().mean()}
        found = []
        for box, score in zip(boxes, scores, strict=True):
            best, order = score.topk(5)
            found.append({"boxes": box[order], "scores": best, "labels": torch.ones(5, dtype=torch.long)})
        return found


IMAGES = [X[0], X[1]]
TARGETS = [{"boxes": torch.rand(2, 4), "labels": torch.tensor([1, 2])} for _ in IMAGES]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("verb", [bn.fuse, bn.drop_bias, bn.accelerate])
def test_a_model_that_needs_targets_in_training(verb, training):
    options = {"steps": 1, "seconds": 0} if verb is bn.accelerate else {}
    if verb is bn.accelerate and not training:  # for inference, which needs no targets
        assert not verb(Losses().eval(), (IMAGES,), **options)[0].training
        return
    with pytest.raises(bn.BatchNormError, match=r"head raises AssertionError: targets should not be none .*; give an"):
        verb(Losses().train(training) if verb is not bn.drop_bias else Losses().eval(), (IMAGES,), **options)
    _, report = verb(Losses().train(training), (IMAGES, TARGETS), **options)
    if verb is not bn.accelerate:
        assert report.gradients is not None
        assert report.changes


def test_an_exception_of_the_backward_pass_in_training():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ZeroDivisionError("half way")

    class Model(Plain):
        def forward(self, x):
            y = super().forward(x)
            return Broken.apply(y) if self.training else y

    with pytest.raises(bn.BatchNormError, match="fuse: in training mode the model raises ZeroDivisionError: half way"):
        bn.fuse(Model(), X)


def test_batch_forward_calls_with_several_inputs():
    model = nn.Bilinear(2, 3, 4)
    pair = (torch.ones(5, 2), torch.ones(5, 3))
    assert torch.equal(batch_forward("calibrate")(model, (pair, Y)), model(*pair))


class TakesAList(nn.Module):
    """It takes a list of images of any sizes, and returns one tensor an image."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, images, targets=None):
        assert isinstance(images, (list, tuple)), "images are no list"
        return [self.bn(self.conv(image[None])) for image in images]


SAMPLES = [X[0], X[1, :, 2:], X[2]]
WITH_LISTS = {
    "calibrate": lambda batch: bn.calibrate(TakesAList(), [batch], progress=False),
    "adapt": lambda batch: bn.adapt(TakesAList().eval(), [batch]),
    "convert": lambda batch: bn.convert(TakesAList(), "layer", data=[batch]),
}


@pytest.mark.parametrize("verb", WITH_LISTS)
@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((SAMPLES, [{}, {}, {}]), "passed as the 3 arguments"),  # as a loader of detection data gives it
        ([SAMPLES, [{}, {}, {}]], "passed as the 3 arguments"),
        ((SAMPLES,), "passed as the 3 arguments"),
        (SAMPLES, "the first of a batch of 3 tensors was passed"),
    ],
)
def test_a_list_in_a_batch_ends_in_what_to_write_instead(verb, batch, words):
    with pytest.raises(bn.BatchNormError, match=words) as raised:
        WITH_LISTS[verb](batch)
    advice = "(([...],), labels)" if "arguments" in words else "(([...],),)"
    assert str(raised.value).endswith(advice)
    WITH_LISTS[verb](((SAMPLES,), [{}, {}, {}]))  # what is advised
    WITH_LISTS[verb](((SAMPLES,),))


def test_a_model_that_fails_on_inputs_and_labels_fails_in_its_own_words():
    with pytest.raises(AssertionError, match="images are no list"):
        bn.calibrate(TakesAList(), [[X, Y]], progress=False)
