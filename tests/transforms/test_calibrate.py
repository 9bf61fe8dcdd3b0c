"""``calibrate``: against the reference, over odd streams and layers, its standard errors, and several processes."""

import copy
import json
import math
import os
import socket
import traceback

import numpy as np
import pytest
import rich
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import batchnorm as bn
from batchnorm import reference
from batchnorm.lab.data import digits
from batchnorm.moments import Moments
from batchnorm.transforms import calibrate as home

CLASSES = pytest.mark.parametrize("cls", [nn.BatchNorm2d, bn.BatchNorm2d], ids=["stock", "ours"])
FORMULAS = {"merged": reference.merged_statistics, "paper": reference.population_statistics}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def network(cls=bn.BatchNorm2d):
    model = nn.Sequential(cls(6), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(6, 4, 1, bias=False), cls(4, momentum=None))
    with torch.no_grad():
        for layer in (model[0], model[4]):
            layer.weight.uniform_(0.5, 2)
            layer.bias.uniform_(-1, 1)
            layer.running_mean.uniform_(-1, 1)
            layer.running_var.uniform_(0.5, 2)
    model[1].eval()
    return model


def stream(sizes=(8, 8, 3), channels=6):
    return [torch.randn(size, channels, 3, 2) * 3 + 2 + i for i, size in enumerate(sizes)]


def numbers(tensor):
    return tensor.detach().double().numpy()


def assert_same_state(model, before):
    state = model.state_dict()
    assert list(state) == list(before)
    for name, value in before.items():
        assert torch.equal(state[name], value), name


def state_of(model):
    return copy.deepcopy(model.state_dict())


@CLASSES
@pytest.mark.parametrize("formula", FORMULAS)
def test_against_the_reference(cls, formula, path):
    model, batches = network(cls), stream()
    before, modes = state_of(model), [m.training for m in model.modules()]
    better, calibrated = bn.calibrate(model, batches, formula=formula)
    assert_same_state(model, before)
    assert [m.training for m in better.modules()] == modes == [m.training for m in model.modules()]

    inputs = [numbers(b) for b in batches]
    for place in (0, 4):
        mean, var = FORMULAS[formula](inputs)
        if formula == "merged":  # the unbiased variance of all values
            n = sum(x.size // x.shape[1] for x in inputs)
            var = var * n / (n - 1)
        np.testing.assert_allclose(numbers(better[place].running_mean), mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(numbers(better[place].running_var), var, rtol=1e-4)
        assert int(better[place].num_batches_tracked) == 3
        if place:
            break
        # The second layer is given what each batch's own moments normalised, without dropout.
        gamma, beta = numbers(model[0].weight), numbers(model[0].bias)
        weight = numbers(model[3].weight)[:, :, 0, 0]
        inputs = [
            np.einsum("oc,nchw->nohw", weight, reference.batch_norm_forward(x, gamma, beta, activation="relu").y)
            for x in inputs
        ]
    assert (calibrated.batches, calibrated.samples, calibrated.enough) == (3, 19, None)
    assert calibrated.report.paths == ("0", "4")
    assert repr(calibrated).startswith("Calibrated(2 layers, 3 batches, 19 samples, standard error ")
    assert_same_state(calibrated.restore(), before)


def test_the_merged_formula_sees_what_lies_between_batches_and_does_not_care_for_the_cut():
    x = torch.cat([torch.randn(40, 2, dtype=torch.float64), torch.randn(24, 2, dtype=torch.float64) + 10])
    layer = nn.BatchNorm1d(2, dtype=torch.float64)
    for cut in ([64], [40, 24], [1, 2, 61], [10] * 6 + [4]):
        if 1 in cut:
            layer_of_cut = bn.BatchNorm1d(2, dtype=torch.float64, one_value="running")
            with_one = bn.calibrate(layer_of_cut, x.split(cut))[0]
            np.testing.assert_allclose(numbers(with_one.running_mean), numbers(x[1:].mean(0)), rtol=1e-10)
            continue
        better, _ = bn.calibrate(layer, x.split(cut))
        np.testing.assert_allclose(numbers(better.running_mean), numbers(x.mean(0)), rtol=1e-10)
        np.testing.assert_allclose(numbers(better.running_var), numbers(x.var(0)), rtol=1e-10)
    paper, _ = bn.calibrate(layer, x.split([40, 24]), formula="paper")
    assert bool((paper.running_var < 2).all())


def test_virtual_batches_are_the_papers_batches():
    x = torch.randn(12, 3, dtype=torch.float64)
    layer = bn.GhostBatchNorm(3, virtual_batch_size=4, dtype=torch.float64)
    better, _ = bn.calibrate(layer, [x], formula="paper")
    mean, var = reference.population_statistics([numbers(part) for part in x.split(4)])
    np.testing.assert_allclose(numbers(better.running_mean), mean, rtol=1e-10)
    np.testing.assert_allclose(numbers(better.running_var), var, rtol=1e-10)


class Odd(nn.Module):
    """A layer used twice, one never, one frozen, one without statistics; arguments by name."""

    def __init__(self):
        super().__init__()
        self.twice = nn.BatchNorm1d(3)
        self.never = nn.BatchNorm1d(3)
        self.frozen = bn.FrozenBatchNorm(3)
        self.none = nn.BatchNorm1d(3, track_running_stats=False)

    def forward(self, *, one, two):
        return self.frozen(self.twice(one)), self.none(self.twice(two))


def test_reused_unused_and_frozen_layers_and_any_call():
    model = Odd()
    one, two = torch.randn(10, 3), torch.randn(6, 3) * 4 + 5
    batches = [{"one": one[:5], "two": two[:2]}, {"one": one[5:], "two": two[2:]}]
    better, calibrated = bn.calibrate(model, batches, forward=lambda m, b: m(**b))
    everything = torch.cat([one, two])
    assert torch.allclose(better.twice.running_mean, everything.mean(0), atol=1e-5)
    assert torch.allclose(better.twice.running_var, everything.var(0), rtol=1e-4)
    assert int(better.twice.num_batches_tracked) == 4
    assert (calibrated.batches, calibrated.samples) == (2, 10)
    assert calibrated.report.left == {
        "never": "no batch of finite numbers reached it",
        "frozen": "it is frozen",
        "none": "it has no running statistics: it uses each batch's own anyway",
    }
    assert_same_state(better.frozen, model.frozen.state_dict())
    assert_same_state(better.never, model.never.state_dict())
    paper, _ = bn.calibrate(model, batches, formula="paper", forward=lambda m, b: m(**b))
    mean, var = reference.population_statistics([numbers(t) for b in batches for t in b.values()])
    np.testing.assert_allclose(numbers(paper.twice.running_mean), mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(numbers(paper.twice.running_var), var, rtol=1e-4)


def test_padding_does_not_count():
    x, lengths = torch.randn(4, 3, 7), torch.tensor([7, 2, 5, 1])
    batches = list(zip(x.split(2), lengths.split(2), strict=True))
    better, _ = bn.calibrate(bn.MaskedBatchNorm(3), batches, forward=lambda m, b: m(*b))
    real = torch.cat([x[i, :, :n] for i, n in enumerate(lengths)], 1)
    assert torch.allclose(better.running_mean, real.mean(1), atol=1e-5)
    assert torch.allclose(better.running_var, real.var(1), rtol=1e-4)


def test_a_subclass_that_calls_its_input_something_else():
    class Named(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x).relu()

    x = torch.randn(32, 2) + 4
    assert torch.allclose(bn.calibrate(Named(2), [x])[0].running_mean, x.mean(0), atol=1e-5)


@CLASSES
def test_an_exception_leaves_the_model_as_it_was(cls):
    model = network(cls)
    before, modes = state_of(model), [m.training for m in model.modules()]

    def broken():
        yield from stream()
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        bn.calibrate(model, broken(), inplace=True)
    assert_same_state(model, before)
    assert [m.training for m in model.modules()] == modes
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())


def test_inplace_and_the_way_back():
    model = network()
    before = state_of(model)
    same, calibrated = bn.calibrate(model, stream(), inplace=True)
    assert same is model
    with calibrated as within:
        assert within is model
        assert not torch.equal(model[0].running_mean, before["0.running_mean"])
    assert_same_state(model, before)


@pytest.mark.filterwarnings("ignore::batchnorm.BatchNormWarning")
def test_only_what_was_used_is_counted():
    """What no layer could use is rejected; what the first could use, though not the second, was used."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    good, bad, huge = torch.randn(5, 2), torch.full((4, 2), math.nan), torch.randn(3, 2)
    _, calibrated = bn.calibrate(model, [bad, good, bad])
    assert (calibrated.batches, calibrated.samples, calibrated.rejected) == (1, 5, 2)
    assert "1 batches, 2 more rejected, 5 samples" in repr(calibrated)
    assert json.loads(calibrated.to_json())["rejected"] == 2

    class Overflows(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.BatchNorm1d(2), nn.BatchNorm1d(2)

        def forward(self, x):
            y = self.first(x)
            return self.second(y * math.inf if len(x) == 3 else y)

    better, calibrated = bn.calibrate(Overflows(), [good, huge])
    assert (calibrated.batches, calibrated.samples, calibrated.rejected) == (2, 8, 0)
    assert [int(layer.num_batches_tracked) for layer in (better.first, better.second)] == [2, 1]
    _, calibrated = bn.calibrate(model, [bad])  # not "there are no batches"
    assert (calibrated.batches, calibrated.rejected) == (0, 1)
    assert set(calibrated.report.left.values()) == {"no batch of finite numbers reached it"}


def test_a_batch_that_is_not_finite_does_not_count():
    x = torch.randn(16, 2)
    bad = torch.full((4, 2), math.nan)
    with pytest.warns(bn.BatchNormWarning, match="its statistics were not used"):
        better, _ = bn.calibrate(nn.BatchNorm1d(2), [x, bad])
    assert torch.allclose(better.running_mean, x.mean(0), atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"formula": "median"}, "formula is 'median'; use one of 'merged', 'paper'"),
        ({"until": 0.0}, "until is 0.0"),
        ({"max_batches": 0}, "max_batches is 0"),
        ({"batches": []}, "there are no batches"),
        ({"batches": [{"x": 1}]}, "a batch is a dict"),
        ({"model": nn.Linear(2, 2)}, "there is no BN layer to calibrate"),
        ({"model": bn.FrozenBatchNorm(2)}, "the model: it is frozen"),
        ({"process_group": 3}, "process_group"),
        ({"batches": None}, "the batches are a NoneType; give a list of batches, or a DataLoader"),
        ({"batches": [torch.randn(4, 2), torch.randn(1, 2)]}, "one value per channel.*drop_last=True"),
        ({"model": nn.LazyBatchNorm1d()}, "the model .LazyBatchNorm1d. does not know its shapes yet"),
        ({"model": nn.BatchNorm1d}, "the model is the class BatchNorm1d; call it"),
    ],
)
def test_bad_input(arguments, words):
    given = {"model": nn.BatchNorm1d(2), "batches": [torch.randn(4, 2)], **arguments}
    with pytest.raises(bn.BatchNormError, match=words):
        bn.calibrate(given.pop("model"), given.pop("batches"), **given)


def test_a_tensor_is_one_batch():
    x = torch.randn(16, 3, 4, 4)
    better, calibrated = bn.calibrate(nn.BatchNorm2d(3), x)
    assert (calibrated.batches, calibrated.samples) == (1, 16)
    assert torch.allclose(better.running_mean, x.mean((0, 2, 3)), atol=1e-6)


def test_it_is_shown_and_serialised_as_reports_are(capsys):
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False))
    _, calibrated = bn.calibrate(model, [torch.randn(8, 2)])
    rich.print(calibrated)
    shown = capsys.readouterr().out
    assert all(words in shown for words in ("8 samples", "running_mean", "no running statistics"))
    assert "<table" in calibrated._repr_html_()
    reported = json.loads(calibrated.to_json())
    assert (reported["samples"], reported["batches"], reported["standard_error"]) == (
        8,
        1,
        None,
    )  # 1 batch: unknown
    assert [change["path"] for change in reported["changes"]] == ["0", "0"]
    assert list(reported["left"]) == ["1"]


# ---- when it stops


def test_the_standard_errors_are_those_of_the_estimates():
    """Over many streams, the estimates scatter as much as each stream says by itself."""
    means, variances, reported = [], [], []
    for _ in range(60):
        x = torch.randn(40, 8, 1, 4) * 3 + 1
        x = (x + torch.randn(40, 8, 1, 1) * 2).double()  # positions of an image are alike
        model, calibrated = bn.calibrate(nn.BatchNorm2d(8).double(), x.split(2))
        means.append(numbers(model.running_mean) / math.sqrt(13))
        variances.append(numbers(model.running_var) / 13)
        reported.append(calibrated.standard_errors[""])
    of_mean, of_var = np.mean(reported, 0)
    assert of_mean == pytest.approx(np.std(means, 0).mean(), rel=0.1)
    assert of_var == pytest.approx(np.std(variances, 0).mean(), rel=0.15)
    assert calibrated.standard_error == max(reported[-1])


def test_parts_are_merged_when_there_are_many():
    x = torch.randn(1000, 3, dtype=torch.float64)
    layer = nn.BatchNorm1d(3, dtype=torch.float64)
    site = home._StreamMoments(layer, "merged", home._Count())
    for batch in x.split(4):
        site.add(batch, None)
        site.end_batch()
    assert home.PARTS // 2 <= len(site.parts) <= home.PARTS
    assert sum(int(p.count) for p in site.parts) == 1000
    assert {int(p.count) for p in site.parts[:-1]} == {4 * site.width}
    better, calibrated = bn.calibrate(layer, x.split(4))
    np.testing.assert_allclose(numbers(better.running_var), numbers(x.var(0)), rtol=1e-10)
    assert calibrated.standard_errors[""][0] == pytest.approx(1000**-0.5, rel=0.4)


def test_the_error_of_the_variance_counts_how_far_parts_lie_apart():
    """Parts of the same variance whose means are equally far from the common one say the same of the variance."""
    far = Moments(torch.full((4,), 8.0), torch.tensor([[-3.0], [3.0], [-3.0], [3.0]]), torch.ones(4, 1))
    of_mean, of_var = home.standard_errors(far)
    assert of_var == pytest.approx(0.0, abs=1e-6)
    assert of_mean == pytest.approx((4 / 3 * 4 * 9 / 16 / 10) ** 0.5)


def test_constant_channels_have_no_error():
    parts = Moments(torch.full((3,), 4.0), torch.ones(3, 2), torch.zeros(3, 2))
    assert home.standard_errors(parts) == (0.0, 0.0)


def test_it_stops_when_it_knows_enough():
    used = []

    def endless():
        while True:
            used.append(32)
            yield torch.randn(32, 4)

    errors = {}
    for until in (0.1, 0.03):
        used.clear()
        _, calibrated = bn.calibrate(nn.BatchNorm1d(4), endless(), until=until)
        assert calibrated.enough
        assert calibrated.standard_error <= until
        assert calibrated.samples == 32 * calibrated.batches == sum(used)
        errors[until] = calibrated.samples
    # The variance of n normal numbers has the standard error sqrt(2 / n).
    assert 0.5 * 2 / 0.03**2 < errors[0.03] < 2 * 2 / 0.03**2
    assert errors[0.1] < errors[0.03] / 4

    _, calibrated = bn.calibrate(nn.BatchNorm1d(4), endless(), until=1e-9, max_batches=9)
    assert (calibrated.batches, calibrated.enough) == (9, False)


def test_progress(capsys, monkeypatch):
    bn.calibrate(nn.BatchNorm1d(2), [torch.randn(4, 2)] * 3)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    bn.calibrate(nn.BatchNorm1d(2), (torch.randn(4, 2) for _ in range(3)), progress=True)
    assert "calibrating" in capsys.readouterr().err


# ---- what it is for


@CLASSES
def test_stale_statistics_on_digits_recover(cls):
    data = digits.load()
    images, labels = torch.from_numpy(data.train_images) * 3 + 4, torch.from_numpy(data.train_labels)
    tests, answers = torch.from_numpy(data.validation_images) * 3 + 4, torch.from_numpy(data.validation_labels)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), cls(16, momentum=0.0005), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1), cls(16, momentum=0.0005), nn.ReLU(), nn.Dropout(0.2),
        nn.Conv2d(16, 16, 3, padding=1), cls(16, momentum=0.0005), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), cls(16, momentum=0.0005), nn.Tanh(),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for chosen in torch.randperm(len(images)).split(64)[:-1]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
    model.eval()

    @torch.no_grad()
    def accuracy(network):
        return float((network(tests).argmax(1) == answers).double().mean())

    with bn.use_batch_statistics(model):
        wanted = accuracy(model)
    stale = accuracy(model)
    better, calibrated = bn.calibrate(model, zip(images.split(128), labels.split(128), strict=True))
    assert wanted > 0.9
    assert stale < wanted - 0.1
    assert accuracy(better) > wanted - 0.01
    assert calibrated.samples == len(images)


# ---- several processes


def share_of(rank):
    generator = torch.Generator().manual_seed(rank)
    sizes = [(8, 8, 3), (5,)][rank]
    return [torch.randn(n, 3, generator=generator, dtype=torch.float64) * (rank + 1) + rank for n in sizes]


def on_a_rank(rank, port, queue):
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        layer, group = nn.BatchNorm1d(3, dtype=torch.float64), dist.group.WORLD
        found = []
        for formula in FORMULAS:
            better, c = bn.calibrate(layer, share_of(rank), formula=formula, process_group=group)
            found.append((better.running_mean.tolist(), better.running_var.tolist(), c.batches, c.samples))

        def endless():
            while rank:  # rank 0 has nothing
                yield torch.randn(16, 3, dtype=torch.float64)

        _, c = bn.calibrate(layer, endless(), until=0.1, process_group=group)
        found.append((c.batches, c.samples, c.standard_error, c.enough))

        def breaking():
            yield from share_of(rank)
            if rank == 1:
                raise RuntimeError("my disk is full")

        try:
            bn.calibrate(layer, breaking(), process_group=group)
        except Exception as error:
            found.append(str(error))
        try:
            bn.calibrate(nn.BatchNorm1d(3 + rank), [torch.randn(4, 3 + rank)], process_group=group)
        except Exception as error:
            found.append(str(error))
        queue.put((rank, found))
    except BaseException:
        queue.put((rank, traceback.format_exc()))
        raise
    finally:
        dist.destroy_process_group()


def test_several_processes_share_their_statistics():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    started = [context.Process(target=on_a_rank, args=(rank, port, queue)) for rank in range(2)]
    for process in started:
        process.start()
    found = dict(queue.get(timeout=100) for _ in started)
    for process in started:
        process.join(20)
    assert all(isinstance(f, list) for f in found.values()), found
    batches = [numbers(b) for rank in range(2) for b in share_of(rank)]
    for place, (formula, statistics) in enumerate(FORMULAS.items()):
        mean, var = statistics(batches)
        var = var * 24 / 23 if formula == "merged" else var
        for rank in range(2):
            reported = found[rank][place]
            np.testing.assert_allclose(reported[0], mean, rtol=1e-10)
            np.testing.assert_allclose(reported[1], var, rtol=1e-10)
            assert reported[2:] == (4, 24)
    assert found[0][2] == found[1][2]
    assert found[0][2][3] is True
    assert found[1][3] == "my disk is full"
    assert "rank 1 of the group failed" in found[0][3]
    assert all("the processes have different models" in found[rank][4] for rank in range(2))
