"""The backward formulas against finite differences."""

import numpy as np
import pytest
from reference_cases import ACTIVATIONS, MEMBERS, agree, example, same, slope

from batchnorm import reference as ref


@pytest.mark.parametrize("statistics_from", ["batch", "population"])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_batch_norm_gradients(rng, activation, with_residual, statistics_from):
    x, dy, residual, gamma, beta = example(rng, (5, 3, 2))
    residual = residual if with_residual else None
    fixed = {}
    if statistics_from == "population":
        fixed = {"mu": rng.normal(3.0, 0.5, 3), "var": rng.uniform(1.0, 3.0, 3)}

    def forward(**changed):
        given = {"x": x, "gamma": gamma, "beta": beta, "residual": residual, "eps": 0.1, **fixed, **changed}
        return ref.batch_norm_forward(activation=activation, negative_slope=0.2, **given).y

    z = ref.batch_norm_forward(x, gamma, beta, 0.1, "none", residual, **fixed).y
    assert min(np.abs(z).min(), np.abs(z - 6).min()) > 1e-4, "a kink within reach of the difference"
    assert z.min() < 0 < 6 < z.max()

    d = ref.batch_norm_backward(dy, x, gamma, beta, 0.1, activation, residual, 0.2, **fixed)
    agree(d.dx, slope(lambda a: np.sum(dy * forward(x=a)), x))
    agree(d.dgamma, slope(lambda a: np.sum(dy * forward(gamma=a)), gamma))
    agree(d.dbeta, slope(lambda a: np.sum(dy * forward(beta=a)), beta))
    at = np.zeros_like(x) if residual is None else residual
    agree(d.dresidual, slope(lambda a: np.sum(dy * forward(residual=a)), at))


@pytest.mark.parametrize("elementwise", [False, True])
@pytest.mark.parametrize("shape", [(4, 6, 3), (3, 4, 2, 2)])
@pytest.mark.parametrize("name", MEMBERS)
def test_family_gradients(rng, name, shape, elementwise):
    x, dy = rng.normal(1.0, 2.0, shape), rng.normal(size=shape)
    parameters = shape[1:] if elementwise else shape[1:2]
    gamma, beta = rng.normal(size=parameters), rng.normal(size=parameters)

    def loss(x=x, gamma=gamma, beta=beta):
        return np.sum(dy * ref.normalize(x, name, gamma, beta, eps=0.1, groups=2).y)

    d = ref.normalize_backward(dy, x, name, gamma, beta, eps=0.1, groups=2)
    agree(d.dx, slope(lambda a: loss(x=a), x))
    agree(d.dgamma, slope(lambda a: loss(gamma=a), gamma))
    agree(d.dbeta, slope(lambda a: loss(beta=a), beta))
    same(d.dresidual, dy)


@pytest.mark.parametrize("axes", [None, (1,), (0, 2), (0, 1, 2)])
def test_weight_norm_gradients(rng, axes):
    v, dw = rng.normal(size=(3, 4, 2)), rng.normal(size=(3, 4, 2))
    g = rng.normal(size=ref.moments(v, axes or (1, 2))[0].shape)
    dv, dg = ref.weight_norm_backward(dw, v, g, axes)
    agree(dv, slope(lambda a: np.sum(dw * ref.weight_norm(a, g, axes)), v))
    agree(dg, slope(lambda a: np.sum(dw * ref.weight_norm(v, a, axes)), g))


def test_absent_parameters_count_as_ones_and_zeros(rng):
    x, dy, *_ = example(rng, (4, 3, 2))
    implied = ref.batch_norm_backward(dy, x)
    stated = ref.batch_norm_backward(dy, x, np.ones(3), np.zeros(3), residual=np.zeros_like(x))
    for field in ("dx", "dgamma", "dbeta", "dresidual"):
        assert np.array_equal(getattr(implied, field), getattr(stated, field))
