import torch
from made_up import around, contest
from rules import check_rule
from silent import Silent

from batchnorm.lab.claims import no_norm


def results_of(kind):
    skip = {"confirmed": around(0.98, 0.001), "refuted": around(0.9), "inconclusive": around(0.97)}[kind]
    accuracies = dict.fromkeys(no_norm.COLORS, around(0.98, 0.001)) | {"SkipInit": skip}
    return [contest(*values) for values in accuracies.values()]


def test_the_rule_gives_every_verdict():
    check_rule(no_norm.CLAIM, results_of)


def test_the_networks_differ_in_nothing_else():
    networks = {arm: no_norm.build(arm, 3, blocks=2) for arm in no_norm.COLORS}
    for network in networks.values():
        assert torch.equal(network.linears[1].weight, networks["BN"].linears[1].weight)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        z = networks["DyT"].linears[0](x)
        assert torch.equal(networks["DyT"].unit(0, x), torch.relu(torch.tanh(0.5 * z)))
        skip = networks["SkipInit"]
        assert torch.equal(skip(x), skip.read_out(skip.unit(0, x)))  # every branch begins at 0
        assert not torch.equal(networks["nothing"](x), skip(x))


def test_an_arm_is_measured_and_clipped():
    options = {"data": "digits", "blocks": 1, "steps": 2, "seeds": 1}
    plain, clipped, dyt = (no_norm.measure({"arm": arm, **options}, Silent()) for arm in ("nothing", "clipping", "DyT"))
    assert plain["sweep"] != clipped["sweep"]
    assert len(dyt["accuracies"]) == 1
