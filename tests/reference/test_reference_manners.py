"""Arguments are left alone, and bad ones get one clear sentence."""

import numpy as np
import pytest
from reference_cases import ACTIVATIONS, MEMBERS, example

from batchnorm import reference as ref
from batchnorm.errors import BatchNormError


def test_arguments_are_left_as_they_were(rng):
    arguments = x, dy, residual, gamma, beta = example(rng, (4, 6, 2))
    for a in arguments:
        a.flags.writeable = False
    for activation in ACTIVATIONS:
        ref.batch_norm_forward(x, gamma, beta, 1e-5, activation, residual)
        ref.batch_norm_backward(dy, x, gamma, beta, 1e-5, activation, residual)
    for name in MEMBERS:
        ref.normalize_backward(dy, x, name, gamma, beta, groups=3)
    ref.update_running(gamma, gamma, beta, beta, 4)
    ref.merged_statistics([x, x])
    ref.weight_norm_backward(dy, x, beta[:4])


X = np.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: ref.normalize(X, "local"), "'local' is not one of batch, layer, instance, group, rms"),
        (lambda: ref.normalize(X, "weight"), "'weight' is not one of"),
        (lambda: ref.normalize(X, "group"), "4 channels do not fall into None groups"),
        (lambda: ref.normalize(X, "group", groups=3), "4 channels do not fall into 3 groups"),
        (lambda: ref.normalize(X, "layer", mu=np.zeros(3), var=np.ones(3)), "for batch norm"),
        (lambda: ref.batch_norm_forward(X, mu=np.zeros(4)), "give both"),
        (lambda: ref.batch_norm_forward(X, var=np.zeros(4)), "give both"),
        (lambda: ref.batch_norm_forward(X, gamma=np.ones(1)), r"\(1,\) does not fit .* \(3, 4\)"),
        (lambda: ref.batch_norm_forward(X, mu=np.ones(1), var=np.ones(4)), r"\(1,\) does not fit"),
        (lambda: ref.batch_norm_forward(X[0]), r"shape \(4,\) has no channels"),
        (lambda: ref.batch_norm_forward(X, residual=X[:1]), r"\(1, 4\) but the input \(3, 4\)"),
        (lambda: ref.batch_norm_forward(X, activation="gelu"), "'gelu' is not one of none, relu"),
        (lambda: ref.batch_norm_backward(X, X, activation="gelu"), "'gelu' is not one of none, relu"),
        (lambda: ref.update_running(X[0], X[0], X[0], X[0], 3, None), "count"),
        (lambda: ref.update_running(X[0], X[0], X[0], X[0], 1), "no unbiased variance"),
        (lambda: ref.population_statistics([]), "no batches"),
        (lambda: ref.merged_statistics([]), "no batches"),
    ],
)
def test_bad_input_gets_one_clear_sentence(call, sentence):
    with pytest.raises(BatchNormError, match=sentence):
        call()
