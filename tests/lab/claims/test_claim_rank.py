import numpy as np
import torch
from rules import check_rule
from silent import Silent

from batchnorm.lab.claims import rank


def results_of(kind):
    plain, normed, last = {
        "confirmed": (1.1, 12.0, 0.1), "refuted": (9.0, 12.0, 0.1), "inconclusive": (1.1, 2.83, 0.1)
    }[kind]  # fmt: skip
    spread = (-0.05, -0.02, 0.0, 0.02, 0.05)

    def one(value):
        return {
            "layers": [0, 2],
            "rank": [[8.0, value + each] for each in spread],
            "gap": [[0.5, last + each / 10] for each in spread],
        }

    return [one(plain), one(normed), one(normed)] * 3


def test_the_rule_gives_every_verdict():
    check_rule(rank.CLAIM, results_of)


def test_the_signals_are_those_of_numpy():
    stream = torch.Generator().manual_seed(0)
    images = torch.randn(40, 6, generator=stream)
    options = {"layers": "ReLU, narrow", "arm": rank.WITH, "depth": 2}
    found = rank.signals(images, options, 5, {2})[0].numpy()
    stream = torch.Generator().manual_seed(5)
    h = images[torch.randperm(40, generator=stream)[: rank.NARROW[0]]].double().numpy()
    for _ in range(2):
        triangle = np.linalg.qr(h.T, mode="r")
        drawn = torch.randn(len(triangle), rank.NARROW[1], generator=stream).double().numpy()
        z = triangle.T @ drawn / np.sqrt(h.shape[1])
        h = np.maximum((z - z.mean(0)) / np.sqrt(z.var(0) + 1e-5), 0)
    np.testing.assert_allclose(found, h, atol=1e-5)
    assert rank.stable_rank(torch.tensor(h)) == np.round(
        np.linalg.norm(h) ** 2 / np.linalg.norm(h, 2) ** 2, 6
    )  # fmt: skip


def test_the_gap_does_not_see_the_scale_and_sees_examples_that_are_alike():
    h = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(0))).Q
    assert rank.gap(7 * h) < 1e-6
    h[1] = h[0]
    assert rank.gap(h) > 0.3


def test_a_layer_that_is_drawn_in_the_span_of_the_examples_has_the_law_of_a_whole_one():
    h = torch.randn(3, 7, generator=torch.Generator().manual_seed(1))
    z = rank.random_layer(h, 400_000, torch.Generator().manual_seed(2))
    torch.testing.assert_close(z @ z.T / z.shape[1], h @ h.T / 7, atol=0.01, rtol=0.01)
    assert abs(float((z**4).mean() / 3 / (h.square().sum(1) / 7).square().mean()) - 1) < 0.02


def test_a_short_network_without_bn_is_measured():
    recorder = Silent()
    found = rank.measure({"layers": rank.KINDS[0], "arm": rank.PLAIN, "depth": 3, "seeds": 2}, recorder)
    assert found["layers"] == [0, 1, 2, 3]
    assert all(row[0] > rank.ONE for row in found["rank"])  # what enters has not collapsed
    assert recorder.done == recorder.total == 2
