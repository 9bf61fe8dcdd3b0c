"""What the verbs that follow optimisers say of things that are no models."""

import pytest
import torch
from torch import nn

import batchnorm as bn

X = torch.randn(4, 3)
COPYING = pytest.mark.parametrize("verb", ["fuse", "accelerate", "drop_bias", "insert"])


@COPYING
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(3, 2).state_dict(), "the model is a OrderedDict; give an nn.Module as the first argument"),
        (nn.Linear, "the model is the class Linear; call it, and give the result"),
        (nn.Sequential(nn.LazyLinear(2)), r"0 \(LazyLinear\) does not know its shapes yet; run the model once first"),
    ],
)
def test_one_sentence(verb, model, words):
    with pytest.raises(bn.BatchNormError, match=f"^{verb}: {words}$"):
        getattr(bn, verb)(model, X)


@pytest.mark.parametrize("verb", [bn.freeze, bn.convert])
def test_lazy_layers_that_need_no_copy_stay(verb):
    model = nn.Sequential(nn.LazyLinear(2), nn.BatchNorm1d(2))
    changed, report = verb(model, inplace=True)
    assert changed is model
    assert "1" in report.paths
    with pytest.raises(bn.BatchNormError, match="the model is a str"):
        verb("model")
