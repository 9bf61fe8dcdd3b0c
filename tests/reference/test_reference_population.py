"""Algorithm 2: the statistics of the population, and inference."""

import numpy as np
import pytest
import torch
from reference_cases import differ, example, same

from batchnorm import reference as ref
from batchnorm.errors import BatchNormError


def test_running_statistics_take_the_known_trace():
    mean, var = np.zeros(1), np.ones(1)
    trace = []
    for _ in range(3):
        batch = ref.batch_norm_forward([[7.0], [7.0], [7.0]])
        mean, var = ref.update_running(mean, var, batch.mu, batch.var, batch.m)
        trace.append((mean.item(), var.item()))
    same(trace, [(0.7, 0.9), (1.33, 0.81), (1.897, 0.729)])

    row = ref.batch_norm_forward([[7.0]])
    with pytest.raises(BatchNormError, match="larger batch"):
        ref.update_running(mean, var, row.mu, row.var, row.m)
    same(ref.batch_norm_forward([[7.0]], mu=mean, var=var).y, (7 - 1.897) / np.sqrt(0.729 + 1e-5))


@pytest.mark.parametrize("momentum", [0.1, 0.75, None])
def test_running_statistics_are_torchs(rng, momentum):
    layer = torch.nn.BatchNorm2d(3, momentum=momentum, dtype=torch.float64)
    mean, var = np.zeros(3), np.ones(3)
    for count in range(1, 5):
        x = rng.normal(count, 2.0, (4, 3, 2, 2))
        layer(torch.tensor(x))
        batch = ref.batch_norm_forward(x)
        mean, var = ref.update_running(mean, var, batch.mu, batch.var, batch.m, momentum, count)
        same(mean, layer.running_mean)
        same(var, layer.running_var)


def test_merged_statistics_are_those_of_all_data_at_once(rng):
    batches = [rng.normal(k, 1 + k, (n, 3, 2)) for k, n in enumerate((5, 1, 17, 2))]
    mean, var = ref.merged_statistics(batches)
    everything = ref.batch_norm_forward(np.concatenate(batches))
    same(mean, everything.mu)
    same(var, everything.var)
    one_by_one = ref.merged_statistics(x[None] for x in np.concatenate(batches))
    same(one_by_one, (mean, var))


def test_merged_statistics_are_precise_bn_weighted_by_size(rng):
    batches = [rng.normal(k, 1.0, (n, 3)) for k, n in enumerate((4, 9, 2))]
    each, weights = [ref.batch_norm_forward(x) for x in batches], [4 / 15, 9 / 15, 2 / 15]
    first = sum(w * b.mu for w, b in zip(weights, each, strict=True))
    second = sum(w * (b.mu**2 + b.var) for w, b in zip(weights, each, strict=True))
    same(ref.merged_statistics(batches), (first, second - first**2))


def test_the_papers_variance_leaves_out_what_lies_between_batches(rng):
    m = 6
    batches = [rng.normal(k, 1.0, (m, 3)) for k in range(4)]
    (mean, paper), (merged_mean, merged) = ref.population_statistics(batches), ref.merged_statistics(batches)
    between = np.var([x.mean(axis=0) for x in batches], axis=0)
    same(mean, merged_mean)
    same(merged, (m - 1) / m * paper + between)
    assert np.all(merged > paper + 0.1)


def test_the_papers_mean_weighs_batches_not_samples(rng):
    batches = [rng.normal(0.0, 1.0, (20, 2)), rng.normal(8.0, 1.0, (4, 2))]
    same(ref.population_statistics(batches)[0], (batches[0].mean(axis=0) + batches[1].mean(axis=0)) / 2)
    differ(ref.population_statistics(batches)[0], ref.merged_statistics(batches)[0], by=1.0)


def test_the_papers_variance_is_unbiased(rng):
    batches = [rng.normal(size=(2, 30_000)) for _ in range(3)]
    assert np.mean(ref.population_statistics(batches)[1]) == pytest.approx(1.0, abs=0.03)
    assert np.mean([x.var(axis=0) for x in batches]) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("affine", [True, False])
def test_inference_is_one_affine_map(rng, affine):
    x, _, _, gamma, beta = example(rng, (4, 3, 2))
    if not affine:
        gamma = beta = None
    mean, var = rng.normal(size=3), rng.uniform(0.5, 2.0, 3)
    scale, shift = ref.inference_affine(gamma, beta, mean, var, eps=1e-3)
    y = ref.batch_norm_forward(x, gamma, beta, 1e-3, mu=mean, var=var).y
    same(scale[:, None] * x + shift[:, None], y)
