"""The identities of the paper, to 1e-10."""

import doctest
import statistics

import numpy as np
import pytest
import torch
from reference_cases import (
    differ,
    example,
    same,
)

from batchnorm import reference as ref


def test_the_examples_in_the_docstrings():
    result = doctest.testmod(ref)
    assert result.attempted > 20
    assert result.failed == 0


def test_moments_against_the_standard_library(rng):
    x = rng.normal(size=(3, 4, 2, 5))
    mu, var = ref.moments(x, (0, 2, 3))
    assert mu.shape == var.shape == (1, 4, 1, 1)
    for c in range(4):
        values = x[:, c].ravel().tolist()
        assert mu[0, c, 0, 0] == pytest.approx(statistics.fmean(values), abs=1e-13)
        assert var[0, c, 0, 0] == pytest.approx(statistics.pvariance(values), abs=1e-13)


def test_moments_without_centring_are_zero_and_the_mean_square(rng):
    x = rng.normal(5.0, 1.0, (4, 6))
    mu, var = ref.moments(x, (1,), center=False)
    assert not mu.any()
    same(var[:, 0], (x**2).sum(axis=1) / 6)


def test_moments_survive_a_mean_large_beside_the_deviation(rng):
    x = np.round(rng.normal(size=(64, 2)), 3)
    _, var = ref.moments(x + 2.0**30, (0,))
    np.testing.assert_allclose(var, ref.moments(x, (0,))[1], rtol=1e-6)


def test_everything_is_computed_in_float64():
    x = np.array([[1, 2], [3, 5], [4, 4]])
    for given in (x, x.astype(np.float32), x.tolist(), torch.tensor(x, dtype=torch.float32)):
        forward = ref.batch_norm_forward(given)
        assert {a.dtype for a in (forward.y, forward.xhat, forward.mu, forward.var)} == {np.dtype("float64")}
        same(forward.y, ref.batch_norm_forward(x.astype(np.float64)).y)


def test_a_convolution_is_normalised_over_batch_and_positions(rng):
    x, _, _, gamma, beta = example(rng, (3, 4, 2, 5))
    conv = ref.batch_norm_forward(x, gamma, beta)
    rows = ref.batch_norm_forward(np.moveaxis(x, 1, -1).reshape(-1, 4), gamma, beta)
    assert conv.m == rows.m == 3 * 2 * 5
    assert conv.mu.shape == conv.var.shape == (4,)
    same(conv.mu, rows.mu)
    same(np.moveaxis(conv.y, 1, -1).reshape(-1, 4), rows.y)


def test_xhat_has_mean_zero_and_variance_one_but_for_eps(rng):
    x = rng.normal(3.0, 2.0, (50, 3))
    forward = ref.batch_norm_forward(x, eps=0.5)
    same(forward.xhat.mean(axis=0), np.zeros(3))
    same(forward.xhat.var(axis=0), forward.var / (forward.var + 0.5))


@pytest.mark.parametrize("a", [0.01, 3.0, 250.0])
def test_the_scale_of_the_weight_is_cancelled(rng, a):
    u, w, dy = rng.normal(size=(9, 5)), rng.normal(size=(4, 5)), rng.normal(size=(9, 4))
    gamma, beta = rng.normal(size=4), rng.normal(size=4)

    def layer(w):
        x = u @ w.T
        dx = ref.batch_norm_backward(dy, x, gamma, beta, eps=0.0).dx
        return ref.batch_norm_forward(x, gamma, beta, eps=0.0).y, dx @ w, dx.T @ u

    (y, du, dw), (y_a, du_a, dw_a) = layer(w), layer(a * w)
    same(y_a, y)
    same(du_a, du)
    same(a * dw_a, dw)
    differ(dw, 0.0)


def test_the_gradient_of_a_bias_is_zero(rng):
    x, dy, _, gamma, beta = example(rng, (8, 5))
    db = ref.batch_norm_backward(dy, x, gamma, beta).dx.sum(axis=0)
    same(db, np.zeros(5))
    fixed = ref.batch_norm_backward(dy, x, gamma, beta, mu=x.mean(axis=0), var=x.var(axis=0)).dx.sum(axis=0)
    differ(fixed, 0.0)  # it is the subtracted mean that takes the bias away, so not at inference


def test_the_identity_can_be_represented_with_population_statistics_only(rng):
    x = rng.normal(4.0, 3.0, (200, 3))
    mean, var = ref.moments(x, (0,))
    gamma, beta = np.sqrt(var[0] + 1e-5), mean[0]
    same(ref.batch_norm_forward(x[:8], gamma, beta, mu=mean[0], var=var[0]).y, x[:8])
    differ(ref.batch_norm_forward(x[:8], gamma, beta).y, x[:8], by=0.1)


def test_training_is_not_linear_and_inference_is_affine(rng):
    a, b, beta = rng.normal(size=(6, 3)), rng.normal(size=(6, 3)), rng.normal(size=3)
    mean, var = rng.normal(size=3), rng.uniform(0.5, 2.0, 3)

    def train(x):
        return ref.batch_norm_forward(x, beta=beta, eps=0.0).y

    def infer(x):
        return ref.batch_norm_forward(x, beta=beta, eps=0.0, mu=mean, var=var).y

    same(train(5 * a), train(a))
    differ(train(0.3 * a + 0.7 * b), 0.3 * train(a) + 0.7 * train(b))
    same(infer(0.3 * a + 0.7 * b), 0.3 * infer(a) + 0.7 * infer(b))
    differ(infer(5 * a), infer(a))


def test_two_samples_come_out_as_plus_and_minus_one(rng):
    x = rng.normal(size=(2, 50))
    y = ref.batch_norm_forward(x, eps=0.0).y
    same(y, np.sign(x - x[::-1]))


def test_one_sample_comes_out_as_beta(rng):
    x, dy, _, gamma, beta = example(rng, (1, 5))
    assert np.array_equal(ref.batch_norm_forward(x, gamma, beta).y, beta[None])
    gradients = ref.batch_norm_backward(dy, x, gamma, beta)
    assert not gradients.dx.any()
    assert not gradients.dgamma.any()


@pytest.mark.parametrize("m", [2, 3, 10, 100])
def test_xhat_is_bounded_by_the_square_root_of_m_minus_1(rng, m):
    x = rng.standard_cauchy((m, 40))
    assert np.abs(ref.batch_norm_forward(x, eps=0.0).xhat).max() <= np.sqrt(m - 1) + 1e-10
    outlier = np.zeros((m, 1))
    outlier[0] = 1e6
    same(ref.batch_norm_forward(outlier, eps=0.0).xhat.max(), np.sqrt(m - 1))  # and the bound is reached


def test_theorem_4_1_of_santurkar_is_an_equality(rng):
    x, g, _, gamma, beta = example(rng, (7, 4))
    forward = ref.batch_norm_forward(x, gamma, beta, eps=0.0)
    dx = ref.batch_norm_backward(g, x, gamma, beta, eps=0.0).dx
    kept = (g**2).sum(axis=0) - g.sum(axis=0) ** 2 / 7 - (g * forward.xhat).sum(axis=0) ** 2 / 7
    same((dx**2).sum(axis=0), gamma**2 / forward.var * kept)
