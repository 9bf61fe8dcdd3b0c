"""NumPy arrays and other things that are no tensors, models or names: one sentence with the problem and the remedy."""

import numpy as np
import pytest
import torch
from torch import nn

import batchnorm as bn

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ARRAY = X.numpy()


def network(training=False):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train(training)


EXAMPLES = {
    "fold": lambda odd: bn.fold(network(), odd),
    "fuse": lambda odd: bn.fuse(network(), odd),
    "check": lambda odd: bn.check(network(), odd),
    "drop_bias": lambda odd: bn.drop_bias(network(True), odd),
    "insert": lambda odd: bn.insert(network(), odd),
    "trace": lambda odd: bn.trace(network(), odd),
    "export": lambda odd: bn.export(network(), odd, "never.pt2"),
    "accelerate": lambda odd: bn.accelerate(network(), odd),
    "convert": lambda odd: bn.convert(network(True), "group", example=odd),
}
MODELS = {
    "fold": lambda odd: bn.fold(odd, X),
    "check": bn.check,
    "calibrate": lambda odd: bn.calibrate(odd, [X]),
    "convert": lambda odd: bn.convert(odd, "group"),
    "freeze": bn.freeze,
    "param_groups": lambda odd: bn.param_groups(odd, 1e-4),
    "no_update": lambda odd: bn.no_update(odd).__enter__(),
    "use_batch_statistics": lambda odd: bn.use_batch_statistics(odd).__enter__(),
    "update_once": bn.update_once,
    "accumulate": lambda odd: bn.accumulate(odd).__enter__(),
    "use_domain": lambda odd: bn.use_domain(odd, "a").__enter__(),
    "use_mask": lambda odd: bn.use_mask(odd, torch.ones(4)).__enter__(),
    "watch": bn.watch,
}
OTHERS = {
    "batches": (lambda: bn.calibrate(network(True), [ARRAY]), "calibrate: a batch is a ndarray.*from_numpy"),
    "a layer": (lambda: bn.BatchNorm2d(3)(ARRAY), "BatchNorm2d: the input is a ndarray; .*from_numpy"),
    "residual": (lambda: bn.BatchNorm2d(3)(X, ARRAY), "residual is a ndarray; .*from_numpy.*or None"),
    "weight": (
        lambda: bn.functional.batch_norm(X, torch.zeros(3), torch.ones(3), weight=ARRAY),
        "weight is a ndarray; .*from_numpy",
    ),
    "shuffled": (lambda: bn.shuffled(nn.Identity(), ARRAY), "shuffled: x is a ndarray; .*from_numpy"),
    "channels": (lambda: bn.BatchNorm2d("3"), "BatchNorm2d: num_features is a str; give the number of channels"),
    "channels in a list": (lambda: bn.BatchNorm2d([3]), "BatchNorm2d: num_features is a list"),
    "leave": (lambda: bn.fold(network(), X, leave=3), "fold: leave is an int; give a name"),
    "leave one": (lambda: bn.fold(network(), X, leave=["1", 2]), "fold: leave has an int in it; give a name"),
    "select": (lambda: bn.check(network(), select=[101]), "check: select or ignore has an int in it"),
    "before": (lambda: bn.check(network(), before=ARRAY), "check: before is a ndarray; give the model as it was"),
    "domains": (lambda: bn.DomainBatchNorm(3, None), "DomainBatchNorm: domains is a NoneType; give a name"),
    "a domain": (lambda: bn.DomainBatchNorm(3, ["a", "b"])(X, domain=7), "DomainBatchNorm: .*give one name for all"),
    "flax": (lambda: bn.from_flax([1.0]), "from_flax: the layer is a list; give its params"),
    "monitor": (lambda: bn.monitor(3), "monitor: the model is a int; give an nn.Module"),
}


@pytest.mark.parametrize("verb", EXAMPLES)
def test_an_example_that_is_an_array(verb):
    with pytest.raises(
        bn.BatchNormError, match=r"a ndarray, not a torch\.Tensor, and 0 raised TypeError; .*from_numpy"
    ):
        EXAMPLES[verb](ARRAY)


@pytest.mark.parametrize("odd", [7, "a"], ids=repr)
@pytest.mark.parametrize("verb", set(EXAMPLES) - {"convert"})
def test_an_example_that_is_something_else(verb, odd):
    with pytest.raises(bn.BatchNormError, match=rf"a {type(odd).__name__}, not a torch\.Tensor.*; give a torch"):
        EXAMPLES[verb](odd)


@pytest.mark.parametrize("odd", [ARRAY, None, 7, X], ids=lambda odd: type(odd).__name__)
@pytest.mark.parametrize("verb", MODELS)
def test_what_is_no_model(verb, odd):
    with pytest.raises(bn.BatchNormError, match=f"{verb}: .* is a {type(odd).__name__}; give an nn.Module"):
        MODELS[verb](odd)


@pytest.mark.parametrize("what", OTHERS)
def test_other_arguments(what):
    act, sentence = OTHERS[what]
    with pytest.raises(bn.BatchNormError, match=sentence) as caught:
        act()
    assert "\n" not in str(caught.value)


def test_a_model_that_takes_arrays_is_called_with_them():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x):
            return self.net(torch.from_numpy(x))

    folded, _ = bn.fold(Reader().eval(), ARRAY)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())


def test_a_mistake_of_the_model_keeps_its_own_words():
    class Wrong(nn.Module):
        def forward(self, x):
            return x.no_such_method()

    with pytest.raises(AttributeError, match="no_such_method"):
        bn.trace(Wrong(), X)


def test_an_array_among_tensors_is_named():
    class Two(nn.Module):
        def forward(self, x, y):
            return torch.relu(x) + torch.relu(y)

    with pytest.raises(bn.BatchNormError, match=r"the example holds a ndarray, not a torch\.Tensor"):
        bn.trace(Two(), (X, ARRAY))


def test_numpys_whole_numbers_are_channels():
    assert bn.BatchNorm2d(np.int64(3)).num_features == 3
