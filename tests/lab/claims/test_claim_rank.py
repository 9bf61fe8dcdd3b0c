import numpy as np
import torch
from rules import check_rule

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
        z = h @ torch.randn(h.shape[1], rank.NARROW[1], generator=stream).double().numpy() / np.sqrt(h.shape[1])
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
