import torch
from rules import check_rule
from scipy.stats import wasserstein_distance

from batchnorm.lab.claims import noise
from batchnorm.lab.ensemble import Copies

SPAN = [-0.002, -0.001, 0.0, 0.001, 0.002]


def around(value):
    return [value + each for each in SPAN]


def results_of(kind):
    drift, noisy = {"confirmed": (0.4, 0.95), "refuted": (0.4, 0.90), "inconclusive": (0.4, 0.939)}[kind]
    accuracies = {noise.PLAIN: 0.8, noise.WITH: 0.96, noise.NOISY: noisy, noise.CONTROL: 0.3}
    curve = {"steps": [1, 2], "median": [0.1, 0.2], "low": [0.1, 0.2], "high": [0.1, 0.2]}
    sweep = [{"rate": 0.1, "accuracies": [0.5, 0.6, 0.7], "diverged": 0}]
    course = {"mean": [0.0, 0.1], "deviation": [1.0, 1.1], "at": [2, 3]}
    return [
        {"rate": 0.1, "sweep": sweep, "accuracies": around(accuracies[arm]), "diverged": 0, "curve": curve}
        | {"drifts": around(drift if arm == noise.NOISY else 0.1), **course}
        for arm in noise.ARMS
    ]


def test_the_rule_gives_every_verdict():
    check_rule(noise.CLAIM, results_of)


def test_the_noise_has_the_moments_of_the_paper_and_differs_at_every_step():
    torch.manual_seed(0)
    layer, x = noise.Noise(), torch.zeros(4096, 200)
    first, second = layer(x), layer(x)
    assert abs(float(first.mean(0).std()) - 12**-0.5) < 0.03  # means of units: U(-0.5, 0.5)
    assert abs(float(first.std(0).mean()) - 0.2 / 12**0.5) < 0.002  # around them U(-0.1, 0.1)
    assert not torch.equal(first, second)
    ones = layer(torch.ones(4096, 200)) - layer(x).mean()
    assert abs(float(ones.mean()) - 1.125) < 0.05


def test_the_shift_is_the_wasserstein_distance_of_normal_samples_in_deviations():
    stream = torch.Generator().manual_seed(1)
    # Quantiles of a normal distribution: sorted samples of one shape, so that the optimal coupling is known.
    sample = torch.randn(2000, generator=stream).sort().values
    a, b = 2 * sample + 1, 3 * sample - 1
    found = noise.drift((a.mean().view(1, 1), a.std().view(1, 1)), (b.mean().view(1, 1), b.std().view(1, 1)))
    assert abs(float(found) - float((a - b).square().mean().sqrt() / a.std())) < 1e-3
    assert wasserstein_distance(a.numpy(), b.numpy()) <= float(found * a.std())  # W1 is at most W2


def test_the_moments_are_those_of_the_inputs_of_the_last_nonlinearity():
    options = {"arm": noise.WITH, "layers": 2, "width": 4}
    networks = [noise.build(options, seed, 6) for seed in (0, 1)]
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    mean, deviation = noise.moments(Copies(networks), x)
    for copy, network in enumerate(networks):
        inputs = network.train().last_inputs(x).detach()
        torch.testing.assert_close(mean[copy], inputs.mean(0), atol=1e-5, rtol=0)
        torch.testing.assert_close(deviation[copy], inputs.std(0), atol=1e-5, rtol=0)
