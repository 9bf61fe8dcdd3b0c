import torch
import torch.nn.functional as F
from rules import check_rule

from batchnorm.lab.attacks import pgd
from batchnorm.lab.claims import two_norms


def results_of(kind):
    separate = {"confirmed": [0.97] * 5, "refuted": [0.9] * 5, "inconclusive": [0.92, 0.94, 0.95, 0.96, 0.97]}[kind]
    results = []
    for arm in two_norms.ARMS:
        own = separate if arm == two_norms.SEPARATE else [0.95] * 5
        results.append({"rate": 0.02, "sweep": [], "fresh": [{"score": score, "robust": 0.5} for score in own]})
    return results


def test_the_rule_gives_every_verdict():
    check_rule(two_norms.CLAIM, results_of)


def test_each_kind_of_example_has_the_statistics_of_its_norm():
    stream = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, 64, generator=stream), torch.randint(10, (32,), generator=stream)
    network = two_norms.network_of(two_norms.SEPARATE, 0).train()
    found = two_norms.loss_of(two_norms.SEPARATE, network, x, y)
    layer = network.norms[0].norm
    means = {name: layer.layer_of(name).running_mean.clone() for name in two_norms.DOMAINS}
    plain = two_norms.network_of(two_norms.SHARED, 0).train()  # the same weights, gamma 1, beta 0
    with two_norms.no_update(plain):
        attacked = pgd(plain, x, y, two_norms.RADIUS, steps=2)
    expected = (F.cross_entropy(plain(x), y) + F.cross_entropy(plain(attacked), y)) / 2
    torch.testing.assert_close(found, expected)
    for name, given in ((two_norms.CLEAN, x), (two_norms.ADVERSARIAL, attacked)):
        torch.testing.assert_close(means[name], 0.1 * network.linears[0](given).mean(0))
