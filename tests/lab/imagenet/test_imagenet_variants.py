"""The variants against the paper's sections 4.2.1 and 4.2.2 and its Figure 3."""

from dataclasses import asdict

import pytest
from torch import nn

from batchnorm.errors import BatchNormError
from batchnorm.lab.imagenet.settings import ImageNetSettings
from batchnorm.lab.imagenet.variants import ENSEMBLE, VARIANTS

OF_THE_PAPER = ("name", "paper_steps", "paper_best", "paper_best_steps", "steps")


def differing(first, second):
    a, b = asdict(VARIANTS[first]), asdict(VARIANTS[second])
    return {name: (a[name], b[name]) for name in a if a[name] != b[name] and name not in OF_THE_PAPER}


def test_figure_3():
    figures = {name: (each.rate, each.paper_steps, each.paper_best) for name, each in VARIANTS.items()}
    assert figures == {
        "inception": (0.0015, 31.0e6, 0.722),
        "bn-baseline": (0.0015, 13.3e6, 0.727),
        "bn-x5": (0.0075, 2.1e6, 0.730),
        "bn-x30": (0.045, 2.7e6, 0.748),
        "bn-x5-sigmoid": (0.0075, None, 0.698),
    }
    assert VARIANTS["bn-x30"].paper_best_steps == 6e6


def test_the_baseline_differs_in_batch_normalization_alone():
    assert differing("inception", "bn-baseline") == {"normalised": (False, True)}


def test_the_seven_changes_of_section_4_2_1():
    changes = differing("bn-baseline", "bn-x5")
    assert set(changes) == {"rate", "dropout", "l2", "decay_speed", "local_response", "thorough", "distortion"}
    assert changes["rate"][1] / changes["rate"][0] == pytest.approx(5)
    assert changes["dropout"] == (0.4, 0.0)
    assert changes["l2"][0] / changes["l2"][1] == pytest.approx(5)
    assert changes["decay_speed"] == (1.0, 6.0)
    assert changes["local_response"] == (True, False)
    assert changes["thorough"] == (False, True)
    assert changes["distortion"][0] > changes["distortion"][1] > 0


def test_the_others_differ_from_x5_in_one_thing():
    assert differing("bn-x5", "bn-x30") == {"rate": (0.0075, 0.045)}
    assert differing("bn-x5", "bn-x5-sigmoid") == {"activation": ("relu", "sigmoid")}


@pytest.mark.parametrize("name", VARIANTS)
def test_networks_are_built_as_the_variant_says(name):
    of = VARIANTS[name]
    model = ImageNetSettings(variant=name, width=1 / 16).network(4)
    kinds = {kind: sum(isinstance(module, kind) for module in model.modules()) for kind in (nn.Sigmoid, nn.BatchNorm2d)}
    assert bool(kinds[nn.BatchNorm2d]) == of.normalised
    assert bool(kinds[nn.Sigmoid]) == (of.activation == "sigmoid")
    assert model.dropout.p == of.dropout
    assert sum(isinstance(module, nn.LocalResponseNorm) for module in model.modules()) == 2 * of.local_response


def test_the_rate_falls_exponentially_and_six_times_as_fast_with_batch_normalization():
    slow, fast = VARIANTS["inception"], VARIANTS["bn-x5"]
    assert slow.rate_at(0) == 0.0015
    assert slow.rate_at(16) == pytest.approx(0.0015 * 0.96**2)
    assert fast.rate_at(4) / fast.rate == pytest.approx(slow.rate_at(24) / slow.rate)
    settings = ImageNetSettings(variant="inception", batch=32)
    assert settings.rate_at(100, examples=400) == pytest.approx(0.0015 * 0.96)  # 8 epochs


def test_the_ensemble_has_six_members_with_changes_of_the_paper():
    assert len(ENSEMBLE) == len({member.seed for member in ENSEMBLE}) == 6
    assert {member.dropout for member in ENSEMBLE} == {0.0, 0.05, 0.1}
    for member in ENSEMBLE:
        assert ImageNetSettings("bn-x30", width=1 / 16, **asdict(member)).network(3).dropout.p == member.dropout


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"variant": "bn-x7"}, "no variant 'bn-x7'"),
        ({"batch": 0}, "batch is 0"),
        ({"steps": -1}, "steps is -1"),
        ({"rate": 0.0}, "rate is 0"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"dropout": 1.5}, "dropout is 1.5"),
        ({"norm": "none"}, "norm is 'none'"),
        ({"size": 16}, "size is 16"),
        ({"variant": "inception", "sync": True}, "inception has no Batch Normalization"),
        ({"norm": "torch", "sync": True}, "sync is for our"),
        ({"precision": "float8"}, "precision is 'float8'"),
        ({"width": 0.0}, "width is 0"),
    ],
)
def test_settings_that_cannot_be_run(options, sentence):
    with pytest.raises(BatchNormError, match=sentence):
        ImageNetSettings.of(options)
