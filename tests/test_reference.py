"""The specification against the paper's identities, finite differences, and torch in float64."""

import doctest
import statistics

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.parametrizations import weight_norm as torch_weight_norm

from batchnorm import reference as ref
from batchnorm.errors import BatchNormError

EXACT = {"rtol": 1e-10, "atol": 1e-10}
SHAPES = [(6, 3), (5, 4, 7), (3, 4, 2, 5), (2, 6, 2, 3, 2)]
ACTIVATIONS = ["none", "relu", "relu6", "leaky_relu", "silu"]
MEMBERS = ["batch", "layer", "instance", "group", "rms"]
TORCH_ACTIVATION = {
    "none": lambda z: z,
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky_relu": lambda z: F.leaky_relu(z, 0.2),
    "silu": F.silu,
}


@pytest.fixture
def rng():
    return np.random.default_rng(2015)


def same(actual, expected):
    np.testing.assert_allclose(actual, expected, **EXACT)


def differ(a, b, by=1e-2):
    assert np.max(np.abs(np.asarray(a) - np.asarray(b))) > by


def slope(f, a, h=1e-6):
    """The gradient of the scalar ``f`` at ``a`` by central differences."""
    d = np.empty_like(a)
    for i in np.ndindex(a.shape):
        step = np.zeros_like(a)
        step[i] = h
        d[i] = (f(a + step) - f(a - step)) / (2 * h)
    return d


def agree(actual, numeric):
    assert actual.shape == numeric.shape
    np.testing.assert_allclose(actual, numeric, rtol=1e-6, atol=1e-7)
    assert np.max(np.abs(numeric)) > 1e-3, "a vanishing gradient tests nothing"


def tensor(a):
    return torch.tensor(a, dtype=torch.float64, requires_grad=True)


def example(rng, shape):
    """Input, output gradient, residual, and a gamma and beta that send some of z below 0 and above 6."""
    channels = shape[1]
    x, dy, residual = (rng.normal(3.0, 2.0, shape), rng.normal(size=shape), rng.normal(size=shape))
    return x, dy, residual, rng.uniform(2.0, 5.0, channels), rng.uniform(1.0, 4.0, channels)


def test_the_examples_in_the_docstrings():
    result = doctest.testmod(ref)
    assert result.attempted > 20
    assert result.failed == 0


# Moments.


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


# Algorithm 1: identities.


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


# Gradients by finite differences.


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


# The same numbers as torch.


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm_is_torchs(rng, shape, activation, training):
    x, dy, residual, gamma, beta = example(rng, shape)
    mean, var = rng.normal(size=shape[1]), rng.uniform(0.5, 2.0, shape[1])
    leaves = [tensor(a) for a in (x, gamma, beta, residual)]
    running = torch.tensor(mean), torch.tensor(var)
    z = F.batch_norm(leaves[0], *running, leaves[1], leaves[2], training, momentum=0.3, eps=1e-3)
    y = TORCH_ACTIVATION[activation](z + leaves[3])
    y.backward(torch.tensor(dy))

    fixed = {} if training else {"mu": mean, "var": var}
    forward = ref.batch_norm_forward(x, gamma, beta, 1e-3, activation, residual, 0.2, **fixed)
    d = ref.batch_norm_backward(dy, x, gamma, beta, 1e-3, activation, residual, 0.2, **fixed)
    same(forward.y, y.detach())
    for ours, leaf in zip((d.dx, d.dgamma, d.dbeta, d.dresidual), leaves, strict=True):
        same(ours, leaf.grad)
    if training:
        updated = ref.update_running(mean, var, forward.mu, forward.var, forward.m, momentum=0.3)
        same(updated[0], running[0])
        same(updated[1], running[1])


TORCH_FAMILY = {
    "layer": lambda x, gamma, beta: F.layer_norm(x, x.shape[1:], gamma, beta, 1e-3),
    "instance": lambda x, gamma, beta: F.instance_norm(x, None, None, gamma, beta, True, 0.1, 1e-3),
    "group": lambda x, gamma, beta: F.group_norm(x, 2, gamma, beta, 1e-3),
    "rms": lambda x, gamma, beta: F.rms_norm(x, x.shape[1:], gamma, 1e-3) + beta,
}


@pytest.mark.parametrize("shape", SHAPES[1:])
@pytest.mark.parametrize("name", TORCH_FAMILY)
def test_the_family_is_torchs(rng, name, shape):
    x, dy = rng.normal(1.0, 2.0, shape), rng.normal(size=shape)
    parameters = shape[1:] if name in ("layer", "rms") else shape[1:2]
    gamma, beta = rng.normal(size=parameters), rng.normal(size=parameters)
    leaves = [tensor(a) for a in (x, gamma, beta)]
    y = TORCH_FAMILY[name](*leaves)
    y.backward(torch.tensor(dy))

    same(ref.normalize(x, name, gamma, beta, 1e-3, groups=2).y, y.detach())
    d = ref.normalize_backward(dy, x, name, gamma, beta, 1e-3, groups=2)
    for ours, leaf in zip((d.dx, d.dgamma, d.dbeta), leaves, strict=True):
        same(ours, leaf.grad)


@pytest.mark.parametrize(
    ("layer", "dim", "axes"),
    [
        (lambda: torch.nn.Linear(5, 3, bias=False), 0, None),
        (lambda: torch.nn.Linear(5, 3, bias=False), 1, (0,)),
        (lambda: torch.nn.Conv2d(2, 4, 3, bias=False), 0, None),
        (lambda: torch.nn.ConvTranspose2d(2, 4, 3, bias=False), 1, (0, 2, 3)),
    ],
)
def test_weight_norm_is_torchs(rng, layer, dim, axes):
    module = torch_weight_norm(layer().double(), dim=dim)
    parts = module.parametrizations.weight
    shapes = parts.original0.shape, parts.original1.shape
    g, v = (rng.normal(size=tuple(shape)) for shape in shapes)
    dw = rng.normal(size=v.shape)
    with torch.no_grad():
        parts.original0.copy_(torch.tensor(g))
        parts.original1.copy_(torch.tensor(v))
    w = module.weight
    w.backward(torch.tensor(dw))

    same(ref.weight_norm(v, g, axes), w.detach())
    dv, dg = ref.weight_norm_backward(dw, v, g, axes)
    same(dv, parts.original1.grad)
    same(dg, parts.original0.grad)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_torchs_at_kinks_and_far_out(activation):
    z = np.array([-800.0, -30.0, -1.0, -0.0, 0.0, 1e-300, 3.0, 6.0, 6.5, 800.0])
    leaf = tensor(z)
    y = TORCH_ACTIVATION[activation](leaf)
    y.sum().backward()
    value, derivative = (f(z, 0.2) for f in ref.ACTIVATIONS[activation])
    np.testing.assert_allclose(value, y.detach(), rtol=1e-12)
    np.testing.assert_allclose(derivative, leaf.grad, rtol=1e-11)


# The family.


def test_the_table_names_its_axes():
    # of the input, but for group norm, whose input is split into (N, G, C / G, H, W)
    assert {name: scheme.axes(4) for name, scheme in ref.FAMILY.items()} == {
        "batch": (0, 2, 3),
        "layer": (1, 2, 3),
        "instance": (2, 3),
        "group": (2, 3, 4),
        "rms": (1, 2, 3),
        "weight": (1, 2, 3),
    }
    assert [name for name, scheme in ref.FAMILY.items() if not scheme.center] == ["rms", "weight"]
    assert [name for name, scheme in ref.FAMILY.items() if scheme.source == "batch"] == ["batch"]


def test_statistics_have_the_shape_of_what_owns_them(rng):
    x = rng.normal(size=(3, 4, 2, 5))
    found = {name: ref.normalize(x, name, groups=2) for name in MEMBERS}
    assert {name: (n.mu.shape, n.m) for name, n in found.items()} == {
        "batch": ((4,), 30),
        "layer": ((3,), 40),
        "instance": ((3, 4), 10),
        "group": ((3, 2), 20),
        "rms": ((3,), 40),
    }


def test_the_family_meets_at_its_edges(rng):
    x, _, _, gamma, beta = example(rng, (3, 4, 2, 5))

    def y(x, name, groups=None):
        return ref.normalize(x, name, gamma, beta, groups=groups).y

    same(y(x, "group", 1), y(x, "layer"))
    same(y(x, "group", 4), y(x, "instance"))
    same(y(x[:1], "instance"), y(x[:1], "batch"))
    centred = x - x.mean(axis=(1, 2, 3), keepdims=True)
    same(y(centred, "rms"), y(x, "layer"))
    differ(y(x, "rms"), y(x, "layer"))


def test_only_batch_norm_lets_one_sample_see_another(rng):
    x = rng.normal(size=(3, 4, 2, 5))
    changed = x.copy()
    changed[2] *= 3.0
    for name in MEMBERS:
        before, after = (ref.normalize(a, name, groups=2).y[:2] for a in (x, changed))
        assert np.array_equal(before, after) == (ref.FAMILY[name].source == "sample")


def test_weight_norm_makes_g_the_norm_and_v_only_a_direction(rng):
    v, g, dw = rng.normal(size=(4, 3, 5)), rng.uniform(0.5, 2.0, 4), rng.normal(size=(4, 3, 5))
    w = ref.weight_norm(v, g)
    same(np.sqrt((w**2).sum(axis=(1, 2))), g)
    same(ref.weight_norm(7 * v, g), w)
    dv, dg = ref.weight_norm_backward(dw, v, g)
    same((dv * v).sum(axis=(1, 2)), np.zeros(4))
    assert dg.shape == g.shape


# Ba et al. 2016, table 1, and RMS norm by the same measure. A layer is a norm of u @ W.T.
CHANGES = {
    "weight matrix rescaled": lambda w, u: (3.0 * w, u),
    "weight matrix recentred": lambda w, u: (w + np.linspace(-1, 2, w.shape[1]), u),
    "weight vector rescaled": lambda w, u: (w * np.where(np.arange(len(w)) == 1, 3.0, 1.0)[:, None], u),
    "data set rescaled": lambda w, u: (w, 3.0 * u),
    "data set recentred": lambda w, u: (w, u + np.linspace(-1, 2, u.shape[1])),
    "single case rescaled": lambda w, u: (w, u * np.where(np.arange(len(u)) == 1, 3.0, 1.0)[:, None]),
}
INVARIANT = {
    "batch": {"weight matrix rescaled", "weight vector rescaled", "data set rescaled", "data set recentred"},
    "weight": {"weight matrix rescaled", "weight vector rescaled"},
    "layer": {
        "weight matrix rescaled",
        "weight matrix recentred",
        "data set rescaled",
        "single case rescaled",
    },
    "rms": {"weight matrix rescaled", "data set rescaled", "single case rescaled"},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", INVARIANT)
def test_invariances(rng, name, change):
    w, u, gain = rng.normal(size=(4, 5)), rng.normal(size=(7, 5)), rng.uniform(0.5, 2.0, 4)

    def layer(w, u):
        if name == "weight":
            return u @ ref.weight_norm(w, gain).T
        return ref.normalize(u @ w.T, name, gain, eps=0.0).y

    (same if change in INVARIANT[name] else differ)(layer(*CHANGES[change](w, u)), layer(w, u))


# Algorithm 2: the statistics of the population.


def test_running_statistics_take_the_known_trace():
    mean, var = np.zeros(1), np.ones(1)
    trace = []
    for _ in range(3):
        batch = ref.batch_norm_forward([[7.0], [7.0], [7.0]])
        mean, var = ref.update_running(mean, var, batch.mu, batch.var, batch.m)
        trace.append((mean.item(), var.item()))
    same(trace, [(0.7, 0.9), (1.33, 0.81), (1.897, 0.729)])

    row = ref.batch_norm_forward([[7.0]])
    with pytest.raises(BatchNormError, match="larger batch"):
        ref.update_running(mean, var, row.mu, row.var, row.m)
    same(ref.batch_norm_forward([[7.0]], mu=mean, var=var).y, (7 - 1.897) / np.sqrt(0.729 + 1e-5))


@pytest.mark.parametrize("momentum", [0.1, 0.75, None])
def test_running_statistics_are_torchs(rng, momentum):
    layer = torch.nn.BatchNorm2d(3, momentum=momentum, dtype=torch.float64)
    mean, var = np.zeros(3), np.ones(3)
    for count in range(1, 5):
        x = rng.normal(count, 2.0, (4, 3, 2, 2))
        layer(torch.tensor(x))
        batch = ref.batch_norm_forward(x)
        mean, var = ref.update_running(mean, var, batch.mu, batch.var, batch.m, momentum, count)
        same(mean, layer.running_mean)
        same(var, layer.running_var)


def test_merged_statistics_are_those_of_all_data_at_once(rng):
    batches = [rng.normal(k, 1 + k, (n, 3, 2)) for k, n in enumerate((5, 1, 17, 2))]
    mean, var = ref.merged_statistics(batches)
    everything = ref.batch_norm_forward(np.concatenate(batches))
    same(mean, everything.mu)
    same(var, everything.var)
    one_by_one = ref.merged_statistics(x[None] for x in np.concatenate(batches))
    same(one_by_one, (mean, var))


def test_merged_statistics_are_precise_bn_weighted_by_size(rng):
    batches = [rng.normal(k, 1.0, (n, 3)) for k, n in enumerate((4, 9, 2))]
    each, weights = [ref.batch_norm_forward(x) for x in batches], [4 / 15, 9 / 15, 2 / 15]
    first = sum(w * b.mu for w, b in zip(weights, each, strict=True))
    second = sum(w * (b.mu**2 + b.var) for w, b in zip(weights, each, strict=True))
    same(ref.merged_statistics(batches), (first, second - first**2))


def test_the_papers_variance_leaves_out_what_lies_between_batches(rng):
    m = 6
    batches = [rng.normal(k, 1.0, (m, 3)) for k in range(4)]
    (mean, paper), (merged_mean, merged) = ref.population_statistics(batches), ref.merged_statistics(batches)
    between = np.var([x.mean(axis=0) for x in batches], axis=0)
    same(mean, merged_mean)
    same(merged, (m - 1) / m * paper + between)
    assert np.all(merged > paper + 0.1)


def test_the_papers_mean_weighs_batches_not_samples(rng):
    batches = [rng.normal(0.0, 1.0, (20, 2)), rng.normal(8.0, 1.0, (4, 2))]
    same(ref.population_statistics(batches)[0], (batches[0].mean(axis=0) + batches[1].mean(axis=0)) / 2)
    differ(ref.population_statistics(batches)[0], ref.merged_statistics(batches)[0], by=1.0)


def test_the_papers_variance_is_unbiased(rng):
    batches = [rng.normal(size=(2, 30_000)) for _ in range(3)]
    assert np.mean(ref.population_statistics(batches)[1]) == pytest.approx(1.0, abs=0.03)
    assert np.mean([x.var(axis=0) for x in batches]) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("affine", [True, False])
def test_inference_is_one_affine_map(rng, affine):
    x, _, _, gamma, beta = example(rng, (4, 3, 2))
    if not affine:
        gamma = beta = None
    mean, var = rng.normal(size=3), rng.uniform(0.5, 2.0, 3)
    scale, shift = ref.inference_affine(gamma, beta, mean, var, eps=1e-3)
    y = ref.batch_norm_forward(x, gamma, beta, 1e-3, mu=mean, var=var).y
    same(scale[:, None] * x + shift[:, None], y)


# Manners.


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
