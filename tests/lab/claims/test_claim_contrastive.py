from functools import partial

import pytest
import torch
import torch.nn.functional as F
from rules import check_rule

from batchnorm.distributed.shuffle import shuffled
from batchnorm.lab.claims import contrastive
from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples

DATA = examples(sets.load("digits"))


def results_of(kind):
    probes = {"confirmed": [0.6] * 5, "refuted": [0.95] * 5, "inconclusive": [0.6, 0.7, 0.95, 0.95, 0.95]}[kind]
    results = []
    for arm in contrastive.ARMS:
        own = [(probe, 0.5) for probe in probes] if arm == contrastive.LEAKY else [(0.9, 1.0)] * 5
        results.append({"rate": 0.1, "sweep": [], "fresh": [{"score": score, "loss": loss} for score, loss in own]})
    return results


def test_the_rule_gives_every_verdict():
    check_rule(contrastive.CLAIM, results_of)


def test_each_view_is_matched_with_the_other_view_of_its_example():
    z = F.normalize(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    expected = 0.0
    for i, partner in enumerate((3, 4, 5, 0, 1, 2)):
        others = [j for j in range(6) if j != i]
        likeness = torch.stack([z[i] @ z[j] / contrastive.TEMPERATURE for j in others])
        expected -= float(likeness.log_softmax(0)[others.index(partner)]) / 6
    assert float(contrastive.matching(z)) == pytest.approx(expected, rel=1e-5)


def test_first_and_second_views_share_statistics_with_the_same_others_until_they_are_shuffled(monkeypatch):
    monkeypatch.setattr(contrastive, "view", lambda x, stream: x)
    monkeypatch.setattr(contrastive, "matching", lambda z: z)
    network = contrastive.Projected(contrastive.LEAKY, 0, 64, [8]).train()
    assert network.encoder.norms[0].virtual_batch_size == 4
    x, stream = DATA.train_inputs[: contrastive.BATCH], torch.Generator().manual_seed(0)
    for shuffle in (False, True):
        forward = partial(shuffled, generator=stream) if shuffle else lambda network, x: network(x)
        first, second = contrastive.contrast(forward, stream, network, x, x).detach().chunk(2)
        assert torch.allclose(first, second, atol=1e-5) != shuffle
        assert float((first * second).sum(1).mean()) > 0.5  # in the order of their examples


def test_views_are_of_the_same_image_moved_by_a_pixel_at_most(monkeypatch):
    monkeypatch.setattr(contrastive, "NOISE", 0.0)
    x = torch.zeros(50, 1, 8, 8)
    x[:, :, 4, 4] = 1.0
    seen = contrastive.view(x, torch.Generator().manual_seed(0))
    places = seen.flatten(1).argmax(1)
    assert set(places.tolist()) == {8 * row + column for row in (3, 4, 5) for column in (3, 4, 5)}


def test_a_probe_of_pixels_is_a_linear_classifier():
    identity = torch.nn.Identity()
    identity.features = lambda x: x.flatten(1)
    assert contrastive.probe(identity, DATA) > 0.9
