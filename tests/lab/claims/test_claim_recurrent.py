import pytest
import torch
from made_up import around, contest
from rules import check_rule
from silent import Silent
from torch import nn

from batchnorm.errors import BatchNormError
from batchnorm.lab.claims import recurrent
from batchnorm.lab.networks.recurrent import PlainLSTM, Reader


def results_of(kind):
    naive = {"confirmed": around(0.5), "refuted": around(0.93), "inconclusive": around(0.89, 0.05)}[kind]
    others = (around(0.9), around(0.94, 0.001), around(0.9), around(0.93, 0.001))
    return [contest(*values) for values in (naive, *others)]


def test_the_rule_gives_every_verdict():
    check_rule(recurrent.CLAIM, results_of)


def test_without_a_norm_it_is_torchs_lstm():
    ours, torchs = PlainLSTM(3, 5, "none"), nn.LSTM(3, 5)
    with torch.no_grad():
        for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0"):
            getattr(ours, name).copy_(getattr(torchs, name))
        torchs.bias_hh_l0.zero_()
        x = torch.randn(7, 2, 3, generator=torch.Generator().manual_seed(0))
        assert torch.allclose(ours(x)[0], torchs(x)[0], atol=1e-6)


def test_the_networks_begin_with_the_same_weights():
    first, *others = (Reader(3, norm=norm, steps=4, inputs=16, width=6) for norm in recurrent.ARMS.values())
    for other in others:
        assert torch.equal(first.lstm.weight_hh_l0, other.lstm.weight_hh_l0)
        assert torch.equal(first.read_out.weight, other.read_out.weight)
    gate = first.lstm.weight_hh_l0[:6]
    assert torch.allclose(gate @ gate.T, torch.eye(6), atol=1e-5)


def test_naive_bn_keeps_one_set_of_statistics_and_bn_per_step_one_for_each_step():
    naive, per_step = (Reader(0, norm=norm, steps=4, inputs=16, width=6) for norm in ("naive", "per-step"))
    for network in (naive, per_step):
        network(torch.randn(8, 16, generator=torch.Generator().manual_seed(0)))
    assert naive.lstm.norm_hh.num_batches_tracked == 4
    assert per_step.lstm.norm_hh_l0.num_batches_tracked.tolist() == [1, 1, 1, 1]
    assert naive.lstm.norm_hh.weight[0] == 1.0
    small = Reader(0, norm="naive, small", steps=4, inputs=16, width=6).lstm
    for norm in (small.norm_ih, small.norm_hh, small.norm_c):
        assert norm.weight[0].item() == pytest.approx(0.1)
    assert per_step.lstm.norm_hh_l0.weight[0].item() == pytest.approx(0.1)


def test_an_unknown_norm_is_refused():
    with pytest.raises(BatchNormError, match="choose one of none, layer, naive, naive, small, per-step"):
        Reader(0, norm="batch", steps=4)


def test_an_arm_is_measured():
    options = {"arm": recurrent.STEPS, "data": "digits", "pieces": 4, "width": 4, "steps": 2, "seeds": 1}
    found = recurrent.measure(options, Silent())
    assert [row["rate"] for row in found["sweep"]] == list(recurrent.RATES)
