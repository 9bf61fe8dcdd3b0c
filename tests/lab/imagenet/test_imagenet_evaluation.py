"""Evaluation: probabilities are averaged over crops and networks, and errors are counted as in the paper."""

import json

import numpy as np
import pytest
import torch
from imagenet_recorder import Recorder
from safetensors.torch import save_file
from torch import nn

from batchnorm.errors import BatchNormError
from batchnorm.lab.imagenet.evaluate import evaluate, evaluate_paths, load, population, probabilities
from batchnorm.lab.imagenet.examples import looks, open_folder, training_batches
from batchnorm.lab.imagenet.settings import ImageNetSettings
from batchnorm.lab.imagenet.train import run


@pytest.fixture(scope="module")
def index(folder):
    return open_folder(str(folder))


class Fixed(nn.Module):
    """Scores that are given for each image, whatever the view adds to them."""

    def __init__(self, scores):
        super().__init__()
        self.scores = nn.Parameter(torch.tensor(scores, dtype=torch.float64))

    def forward(self, x):
        number, view = x[:, 0, 0, 0].long(), x[:, 1, 0, 0].long()
        return self.scores[number, view]


def batch(images, views):
    x = torch.zeros(images, views, 3, 1, 1, dtype=torch.float64)
    x[:, :, 0] = torch.arange(images).view(-1, 1, 1, 1)
    x[:, :, 1] = torch.arange(views).view(1, -1, 1, 1)
    return x


def softmax(scores):
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_views_are_averaged_as_probabilities(chunk):
    scores = np.random.default_rng(0).normal(0, 3, (5, 6, 4))
    found = probabilities(Fixed(scores), batch(5, 6), chunk)
    np.testing.assert_allclose(found, softmax(scores).mean(1), atol=1e-12)


def test_the_ensemble_is_the_mean_of_probabilities_and_not_of_scores():
    scores = np.random.default_rng(1).normal(0, 3, (3, 200, 2, 10))
    labels = np.random.default_rng(2).integers(0, 10, 200)
    views = [(batch(200, 2)[:120], torch.tensor(labels[:120])), (batch(200, 2)[120:], torch.tensor(labels[120:]))]
    found = evaluate([Fixed(each) for each in scores], views)
    expected = softmax(scores).mean(2)
    for score, of in zip(found, [*expected, expected.mean(0)], strict=True):
        ranks = (of > of[np.arange(200), labels][:, None]).sum(1)
        assert (score.images, score.wrong, score.missed) == (200, (ranks > 0).sum(), (ranks > 4).sum())
        assert score.top1 == score.wrong / 200
    assert [score.name for score in found] == ["network 1", "network 2", "network 3", "ensemble"]
    logits = scores.mean((0, 2)).argmax(1)
    assert found[-1].wrong != (logits != labels).sum()


def test_few_classes_have_no_more_than_all_of_them_among_the_likeliest():
    (score,) = evaluate([Fixed(np.zeros((3, 1, 2)))], [(batch(3, 1), torch.tensor([0, 1, 1]))])
    assert (score.wrong, score.missed) == (2, 0)


@pytest.fixture(scope="module")
def runs(folder, tmp_path_factory):
    """Two runs that are saved, and their options."""
    base = tmp_path_factory.mktemp("runs")
    torch.set_num_threads(1)
    small = {"size": 32, "width": 1 / 16, "steps": 4, "batch": 8, "data": str(folder), "variant": "bn-x5"}
    for seed in (1, 2):
        run({**small, "seed": seed}, Recorder(base / str(seed)))
    return [base / str(seed) / "checkpoint.safetensors" for seed in (1, 2)], small


def test_networks_from_files_are_evaluated_by_one_crop_or_144(runs, index):
    paths, options = runs
    for crops in (1, 144):
        first, second, both = evaluate_paths(paths, index, crops=crops, options=options, limit=6)
        assert [each.images for each in (first, second, both)] == [6, 6, 6]
        models = [load(path, options)[0] for path in paths]
        wrong = 0
        for views, labels in looks(index, crops=crops, size=32, limit=6):
            assert views.shape[1] == crops
            with torch.no_grad():
                own = [model(views.flatten(0, 1)).softmax(1).view(len(labels), crops, -1).mean(1) for model in models]
            wrong += int((((own[0] + own[1]) / 2).argmax(1) != labels).sum())
        assert both.wrong == wrong


def test_a_limit_takes_images_of_all_classes(index):
    labels = torch.cat([labels for _, labels in looks(index, size=32, limit=6)])
    assert labels.tolist() == [0, 0, 1, 1, 2, 2]
    parts = [torch.cat([y for _, y in looks(index, size=32, rank=rank, processes=2)]) for rank in (0, 1)]
    assert sorted(torch.cat(parts).tolist()) == sorted(label for _, label in index.val)


def test_population_statistics_are_algorithm_2s(runs, index):
    paths, options = runs
    model, settings, _ = load(paths[0], options)
    better = population(model, index, settings, 3)
    norm = model.conv1[2]
    means, variances = [], []
    for images, _ in list(training_batches(index, settings, first=1))[:3]:
        with torch.no_grad():
            maps = model.conv1[1](model.conv1[0](images)).double()
        means.append(maps.mean((0, 2, 3)))
        variances.append(maps.var((0, 2, 3), unbiased=True))
    found = better.conv1[2]
    torch.testing.assert_close(found.running_mean.double(), torch.stack(means).mean(0), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.running_var.double(), torch.stack(variances).mean(0), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(norm.running_mean, found.running_mean)
    assert not better.training
    scores = evaluate_paths(paths[:1], index, options=options, statistics=3)
    assert len(scores) == 1


def test_what_cannot_be_evaluated(runs, index, tmp_path):
    paths, options = runs
    with pytest.raises(BatchNormError, match="no network was given"):
        evaluate_paths([], index)
    with pytest.raises(BatchNormError, match="give 1 or 144"):
        evaluate_paths(paths, index, crops=10, options=options)
    with pytest.raises(BatchNormError, match="does not fit bn-x5"):
        load(paths[0], {"variant": "bn-x5"})
    with pytest.raises(BatchNormError, match="has 3 classes, the folder has 1000"):
        load(paths[0], options, classes=1000)
    save_file({"weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(BatchNormError, match="holds no Inception"):
        load(tmp_path / "other.safetensors", options)
    assert json.dumps(ImageNetSettings.of(options).variant) == '"bn-x5"'
