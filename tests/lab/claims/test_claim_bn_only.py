import pytest
import torch
from made_up import around, contest
from rules import check_rule
from silent import Silent

from batchnorm.lab.claims import bn_only


def results_of(kind):
    few = {"confirmed": around(0.5), "refuted": around(0.88), "inconclusive": around(0.8, 0.05)}[kind]
    by_arm = {bn_only.ONLY: around(0.9), bn_only.AS_MANY: few, bn_only.LAST: around(0.6), bn_only.ALL: around(0.97)}
    return [{**contest(*values), "trained": 1088} for values in by_arm.values()]


def test_the_rule_gives_every_verdict():
    check_rule(bn_only.CLAIM, results_of)


@pytest.mark.parametrize("arm", [bn_only.ONLY, bn_only.AS_MANY, bn_only.LAST])
def test_only_what_is_meant_to_changes(arm):
    network, before = (bn_only.build(arm, 5, blocks=2) for _ in range(2))
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(network(x), bn_only.build(bn_only.ALL, 5, blocks=2)(x))
    free = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(free, lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        network(x).square().sum().backward()
        optimizer.step()
    moved = 0
    for (name, new), old in zip(network.named_parameters(), before.parameters(), strict=True):
        changed = int((new != old).sum())
        owner = {bn_only.ONLY: "norms.", bn_only.AS_MANY: ".change", bn_only.LAST: "read_out."}[arm]
        assert owner in name or changed == 0, name
        moved += changed
    assert 0.5 * bn_only.trained(network) < moved <= bn_only.trained(network)


def test_an_arm_is_measured():
    options = {"arm": bn_only.AS_MANY, "data": "digits", "blocks": 1, "width": 4, "steps": 2, "seeds": 1}
    found = bn_only.measure(options, Silent())
    assert found["trained"] == 2 * 4 * 3
    assert len(found["sweep"]) == 7
