import torch
from rules import check_rule

from batchnorm.lab.claims import nonlinear


def results_of(kind):
    training, evaluation = {
        "confirmed": ([0.5] * 5, 1e-15),
        "refuted": ([0.5] * 5, 1e-3),
        "inconclusive": ([0.01, 0.01, 0.5, 0.5, 0.09], 1e-15),
    }[kind]
    defects = {
        "training": {"scaling": training, "sums": training},
        "evaluation": {"scaling": [evaluation] * 5, "sums": [evaluation] * 5},
    }
    sizes = [1.0] * len(nonlinear.SCALES)
    return [{"defects": defects, "sizes": {"training": sizes, "evaluation": sizes}}]


def test_the_rule_gives_every_verdict():
    check_rule(nonlinear.CLAIM, results_of)


def test_the_defects_of_known_functions():
    x, y, a = nonlinear.inputs(3)
    assert max(nonlinear.defects(lambda x: 3 * x - 2, x, y, a)) < 1e-14
    scaling, sums = nonlinear.defects(lambda x: x.square(), x, y, a)
    expected = ((x + y) ** 2 - x**2 - y**2).abs().max() / (x**2 + y**2).abs().max()
    assert abs(sums - float(expected)) < 1e-12
    assert abs(scaling - (a - 1)) < 1e-12  # a squared instead of a


def test_the_layer_is_affine_in_evaluation_only():
    x, y, a = nonlinear.inputs(0)
    layer = nonlinear.layer_of(0)
    assert max(nonlinear.defects(layer.eval(), x, y, a)) < 1e-14
    assert min(nonlinear.defects(layer.train(), x, y, a)) > 0.1


def test_the_spread_in_training_is_gammas():
    x, _, _ = nonlinear.inputs(1)
    layer = nonlinear.layer_of(1).train()
    expected = float(layer.weight[0].detach()) * (16 / 15) ** 0.5  # the layer divides by the biased deviation
    for scale in (0.1, 100.0):
        assert abs(nonlinear.spread(layer, scale * x) - expected) < 1e-2
    assert torch.is_grad_enabled()
