import pytest
import torch
from rules import check_rule

from batchnorm.lab.claims import joint_batches as claim
from batchnorm.lab.networks.chain import Chain


def results_of(kind):
    apart = {"confirmed": [1.0] * 5, "refuted": [0.1] * 5, "inconclusive": [0.1, 0.15, 0.25, 1.0, 1.0]}[kind]
    results = []
    for arm in claim.ARMS:
        errors = apart if arm == claim.SEPARATE else [0.1] * 5
        fresh = [{"rate": r, "error": e, "bias": 0.0} for r in claim.RATES for e in errors]
        results.append({"rate": 0.03, "sweep": [], "fresh": fresh})
    return results


def test_the_rule_gives_every_verdict():
    check_rule(claim.CLAIM, results_of)


def test_the_exact_values_solve_the_equation():
    q, (leads, reward) = claim.exact_values(), claim.transitions()
    for state in (0, 5, claim.STATES - 1):
        for action in range(2):
            expected = 0.0
            for chance, taken in ((0.9, action), (0.1, 1 - action)):
                after = int(leads[state, taken])
                expected += chance * (float(reward[after]) + 0.8 * float(q[after, 1]))
            assert float(q[state, action]) == pytest.approx(expected, rel=1e-9)


def test_rewards_of_the_buffer_are_those_of_the_next_state():
    rows, _ = claim.buffer(0)
    state, _, reward, after = rows.unbind(1)
    assert torch.equal(reward, (after == claim.STATES - 1).float())
    assert bool(((after - state).abs() <= 1).all())


def test_joint_batches_share_their_statistics_and_separate_ones_do_not():
    rows, nothing = claim.buffer(0)
    rows = rows[:16]
    state, action, reward, after = rows.unbind(1)
    network = Chain(0, inputs=10, widths=(8,), classes=1)
    z = network.linears[0](torch.cat([claim.features(state, action), claim.features(after, torch.ones(16))]))

    def out(z):
        return network.read_out(torch.relu((z - z.mean(0)) / (z.var(0, correction=0) + 1e-5).sqrt())).flatten()

    for arm, values in ((claim.JOINT, out(z)), (claim.SEPARATE, torch.cat([out(z[:16]), out(z[16:])]))):
        goal = reward + 0.8 * values[16:].detach()
        expected = (values[:16] - goal).square().mean()
        found = claim.loss_of(arm, None, network.train(), rows, nothing)
        torch.testing.assert_close(found, expected)
