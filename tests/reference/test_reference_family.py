"""The family: who shares moments with whom, and which rescalings each member cancels."""

import numpy as np
import pytest
from reference_cases import MEMBERS, differ, example, same

from batchnorm import reference as ref


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
