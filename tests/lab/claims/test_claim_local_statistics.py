import torch
from rules import check_rule

from batchnorm.lab.claims import local_statistics as claim
from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples
from batchnorm.lab.networks.chain import Chain


def results_of(kind):
    local = {"confirmed": [0.95] * 5, "refuted": [0.5] * 5, "inconclusive": [0.7, 0.75, 0.8, 0.9, 0.95]}[kind]
    results = []
    for arm in claim.ARMS:
        own = [0.8] * 5 if arm == claim.AVERAGED else local
        results.append({"rate": 0.1, "sweep": [], "fresh": [{"score": score, "clients": [score] * 4} for score in own]})
    return results


def test_the_rule_gives_every_verdict():
    check_rule(claim.CLAIM, results_of)


def clients_after(arm):
    clients = [Chain(seed, inputs=4, widths=(5,), classes=3) for seed in range(2)]
    for seed, client in enumerate(clients):
        for tensor in client.norms[0].state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn(5, generator=torch.Generator().manual_seed(seed)))
    before = [{name: tensor.clone() for name, tensor in client.state_dict().items()} for client in clients]
    claim.average(clients, arm)
    return before, [client.state_dict() for client in clients]


def test_what_is_averaged_depends_on_the_arm():
    local = {claim.AVERAGED: set(), "statistics local": {"running_mean", "running_var"}}
    local[claim.LOCAL] = {"running_mean", "running_var", "weight", "bias"}
    for arm, kept in local.items():
        before, after = clients_after(arm)
        for name in before[0]:
            if name.endswith("num_batches_tracked"):
                continue
            stays = name.startswith("norms.") and name.rpartition(".")[2] in kept
            for own, new in zip(before, after, strict=True):
                expected = own[name] if stays else (before[0][name] + before[1][name]) / 2
                torch.testing.assert_close(new[name], expected, msg=f"{arm}, {name}")


def test_every_client_has_images_of_its_own_moved_in_its_own_way():
    data = examples(sets.load("digits"))
    plain, inverted, _, turned = claim.streams(data, 0, rounds=1)
    images = {tuple(x.tolist()) for x in data.train_inputs[0::4].flatten(1)}
    assert {tuple(x.tolist()) for x in next(plain)[0]} <= images
    images = {tuple((-x).tolist()) for x in data.train_inputs[1::4].flatten(1)}
    assert {tuple(x.tolist()) for x in next(inverted)[0]} <= images
    images = {tuple(x.rot90(1, (1, 2)).flatten().tolist()) for x in data.train_inputs[3::4]}
    assert {tuple(x.tolist()) for x in next(turned)[0]} <= images
