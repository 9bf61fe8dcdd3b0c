import math

import pytest
import torch
from rules import check_rule

from batchnorm.lab.claims import smart_init


def results_of(kind):
    once = {"confirmed": 0.9, "refuted": 0.6, "inconclusive": 0.75}[kind]
    middle = {smart_init.PLAIN: 0.75, smart_init.SET_ONCE: once, smart_init.SCALED: 0.8, smart_init.WITH: 0.95}
    curve = {"steps": [1, 2], "median": [0.1, 0.2], "low": [0.1, 0.2], "high": [0.1, 0.2]}
    sweep = [{"rate": 0.1, "accuracies": [0.5, 0.6, 0.7], "diverged": 0}]
    frames = [[[[0.0, 1.0, None], [0.5, 0.5, None]], [[], []]]] * len(smart_init.SHARES)
    moving = {"nearer": [2.0, 2.1, 2.2, 2.3, 2.4], "frames": frames, "distances": list(smart_init.SHARES)}
    return [
        {
            "rate": 0.1,
            "sweep": sweep,
            "accuracies": [middle[arm] + each for each in (-0.02, -0.01, 0.0, 0.01, 0.02)],
            "diverged": 0,
            "curve": curve,
            **(moving if arm == smart_init.SET_ONCE else {}),
        }
        for arm in smart_init.ARMS
    ]


def test_the_rule_gives_every_verdict():
    check_rule(smart_init.CLAIM, results_of)


def test_statistics_that_are_set_once_make_the_network_of_bn_on_the_same_data():
    points, _ = smart_init.spirals(200, 3)
    once, normed = (smart_init.build(arm, 0, points) for arm in (smart_init.SET_ONCE, smart_init.WITH))
    torch.testing.assert_close(once.train()(points), normed.train()(points), atol=1e-4, rtol=1e-4)
    before = once.norms[0].running_mean.clone()
    once.train()(points + 1)
    assert torch.equal(once.norms[0].running_mean, before)


def test_the_means_stand_for_biases_and_the_scaled_network_has_none():
    points, _ = smart_init.spirals(200, 3)
    scaled = smart_init.build(smart_init.SCALED, 0, points)
    z = scaled.last_inputs(points).detach()
    torch.testing.assert_close(z.square().mean(0), torch.ones(smart_init.WIDTH), atol=1e-3, rtol=0)
    assert float(scaled.last_inputs(torch.zeros(1, 2)).detach().abs().max()) < 1e-6  # all boundaries pass the origin


def test_the_frames_go_from_no_means_to_the_statistics_of_the_points():
    points, _ = smart_init.spirals(200, 3)
    moving, scaled = (smart_init.build(arm, 0, points) for arm in (smart_init.SET_ONCE, smart_init.SCALED))
    whole = smart_init.boundaries(moving)
    near = smart_init.set_once(moving, points, 1.0)
    assert smart_init.boundaries(moving) == whole
    far = smart_init.set_once(moving, points, 0.0)
    assert smart_init.boundaries(moving) == smart_init.boundaries(scaled)
    assert near < far
    found = smart_init.boundary(smart_init.build(smart_init.SET_ONCE, 0, points), [points], batch_sizes=())
    assert near == pytest.approx(sum(layer.centred for layer in found) / len(found), rel=1e-3)


def test_the_crossings_of_a_circle_lie_on_it():
    axis = [-1 + index / 10 for index in range(21)]
    xs, ys = smart_init.crossings([[x * x + y * y - 0.5 for x in axis] for y in axis], axis)
    found = [math.hypot(x, y) for x, y in zip(xs, ys, strict=True) if x is not None]
    assert len(found) > 20
    assert found == [pytest.approx(math.sqrt(0.5), abs=0.01)] * len(found)
