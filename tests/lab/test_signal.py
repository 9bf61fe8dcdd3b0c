"""The signal of two networks: what is recorded is what the networks did, and BN in two parts is BN."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

from batchnorm.commands import app
from batchnorm.errors import BatchNormError
from batchnorm.lab import signal
from batchnorm.lab.data import digits
from batchnorm.lab.signal import WITH, WITHOUT, SignalRecipe
from batchnorm.lab.train import batches
from batchnorm.records import read

SHORT = SignalRecipe(steps=9)
ENDS = np.log(99) / 2  # where a tanh is within 1% of its ends


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """As the command does: the matrices are too small to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def records():
    return signal.record(SHORT)


def by_name(records):
    return {(m.quantity, m.setting["stack"], m.setting["layer"], m.setting["step"]): m for m in records.measurements}


def plain_training(normalised, recipe=SHORT):
    """The same training with torch's own layers and no recorder: what each tanh was given, and the losses."""
    data = digits.load()
    images, labels = torch.from_numpy(data.train_images).flatten(1), torch.from_numpy(data.train_labels)
    ours = signal.stack(recipe, normalised)
    modules = []
    for name, module in ours.named_children():
        if name.startswith("normalise"):
            modules.append(nn.BatchNorm1d(recipe.width))
        elif not name.startswith("stretch"):
            modules.append(module)
    order, network = batches(recipe.seed, len(labels), recipe.batch_size), nn.Sequential(*modules)
    velocity = [torch.zeros_like(parameter) for parameter in network.parameters()]
    given, losses = [], []
    for _ in range(recipe.steps + 1):
        x, inputs = images[(chosen := next(order))], []
        for module in network:
            if isinstance(module, nn.Tanh):
                inputs.append(x.detach())
            x = module(x)
        loss = F.cross_entropy(x, labels[chosen])
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        with torch.no_grad():
            for parameter, gradient, moving in zip(network.parameters(), gradients, velocity, strict=True):
                moving.mul_(recipe.momentum).add_(gradient)
                parameter -= recipe.rate * moving
        given.append(inputs)
        losses.append(loss.item())
    return given, losses


@pytest.mark.parametrize(("stack", "normalised"), [(WITHOUT, False), (WITH, True)])
def test_what_is_recorded_is_what_torch_computes(records, stack, normalised):
    given, losses = plain_training(normalised)
    found = by_name(records)
    for step in (0, 4, 9):
        assert found["training loss", stack, "", step].samples[0] == pytest.approx(losses[step], rel=1e-4)
        for number, x in enumerate(given[step], start=1):
            layer, values = f"layer {number}", x.double().numpy()
            assert found["mean", stack, layer, step].samples[0] == pytest.approx(values.mean(), abs=1e-4)
            assert found["variance", stack, layer, step].samples[0] == pytest.approx(values.var(), rel=1e-3)
            flat = (np.abs(values) >= ENDS).mean()
            assert found["saturation", stack, layer, step].samples[0] == pytest.approx(flat, abs=2 / values.size)
            record = found["histogram", stack, layer, step]
            counts, _ = np.histogram(values, bins=40, range=(-6, 6))
            assert np.abs(np.array(record.samples) - counts).sum() <= 8  # rounding may move a value over an edge
            assert sum(record.samples) + record.setting["under"] + record.setting["over"] == values.size


def test_both_begin_alike():
    plain, with_bn = signal.stack(SHORT, False), signal.stack(SHORT, True)
    for number in (1, 2, 3, 4):
        assert torch.equal(
            plain.get_submodule(f"linear {number}").weight, with_bn.get_submodule(f"linear {number}").weight
        )
    assert torch.equal(plain.get_submodule("read-out").weight, with_bn.get_submodule("read-out").weight)
    assert with_bn.get_submodule("linear 1").bias is None


def assert_same(one, other):
    """The two stacks train beside each other, and threads add in any order: equal but for order and rounding."""

    def by_name(records):
        keys = ("step", "layer", "stack", "at")
        return {(m.quantity, *(m.setting.get(key) for key in keys)): m.samples for m in records.measurements}

    mine, others = by_name(one), by_name(other)
    assert mine.keys() == others.keys()
    for name, samples in mine.items():
        if name[0] != "histogram":  # where rounding moves a value to the next bin
            assert samples == pytest.approx(others[name], rel=1e-4, abs=1e-5, nan_ok=True), name


@pytest.mark.parametrize(("scheme", "width"), [("xavier", (2 / 500) ** 0.5), ("he", (2 / 400) ** 0.5)])
def test_weights_begin_as_wide_as_their_scheme_says(scheme, width):
    layer = signal.linear(torch.Generator().manual_seed(0), 400, 100, scheme)
    assert layer.weight.std().item() == pytest.approx(width, rel=0.02)
    assert not layer.bias.any()


def test_the_same_recipe_gives_the_same_records_and_leaves_the_random_numbers_alone(records):
    state = torch.get_rng_state()
    again = signal.record(SHORT)
    assert torch.equal(state, torch.get_rng_state())
    assert_same(again, records)
    assert signal.record(SignalRecipe(steps=1, seed=1)).measurements != records.measurements


def test_progress_is_told():
    reported = []
    signal.record(SignalRecipe(steps=3), reported.append)
    assert reported == [1, 2, 3, 4, 5, 6, 7, 8]  # one pass more in each network shows the result


def test_every_step_is_recorded_early_and_some_later():
    records = signal.record(SignalRecipe(steps=106, every=3))
    for stack in (WITHOUT, WITH):
        steps = [
            step
            for quantity, own, layer, step in by_name(records)
            if (quantity, own, layer) == ("mean", stack, "layer 1")
        ]
        assert steps == [*range(100), 102, 105]
    losses = [step for quantity, own, _, step in by_name(records) if (quantity, own) == ("training loss", WITH)]
    assert losses == steps


def test_all_four_layers_drift_saturate_and_are_kept():
    """The default recipe shows what its chapters say; the plain network learns first and is lost afterwards."""
    found = by_name(signal.record(SignalRecipe(steps=200)))
    layers = [f"layer {number}" for number in (1, 2, 3, 4)]

    def flat(stack, step):
        return [found["saturation", stack, layer, step].samples[0] for layer in layers]

    def logged(quantity, stack, step):
        return found[quantity, stack, "", step].samples[0]

    assert max(flat(WITHOUT, 0)) < 0.1
    for earlier, later in ((0, 10), (10, 20), (20, 50), (50, 200)):  # gradually, in every layer
        assert all(a < b for a, b in zip(flat(WITHOUT, earlier), flat(WITHOUT, later), strict=True))
    assert 0.05 < min(flat(WITHOUT, 10)) < 0.3
    assert min(flat(WITHOUT, 200)) > 0.8
    assert max(flat(WITH, 200)) < 0.3
    assert min(logged("training loss", WITHOUT, step) for step in range(100)) < 0.6
    assert logged("training loss", WITHOUT, 200) > 1
    assert logged("training loss", WITH, 200) < 0.2
    assert logged("validation accuracy", WITHOUT, 200) < 0.5
    assert logged("validation accuracy", WITH, 200) > 0.9
    assert found["variance", WITH, "layer 1", 200].samples[0] > 1.4  # gamma stretched it again
    assert found["gamma", WITH, "layer 1 normalised", 200].samples[2] > 1.5


def test_the_sigmoid_film_has_its_own_ends():
    records = signal.record(SignalRecipe(steps=2, activation="sigmoid"))
    assert records.configuration["flat_ends"][1] == pytest.approx(np.log(99))
    record = by_name(records)["histogram", WITHOUT, "layer 1", 0]
    assert (record.setting["kind"], record.setting["low"]) == ("sigmoid", -10)


def test_the_demo_writes_its_records_and_its_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        app, ["watch-demo", "--steps", "5", "--every", "2", "--rate", "1", "--init", "he", "--gif", "film.svg"]
    )
    assert done.exit_code == 0, done.output
    assert "with BN: up to" in done.output
    assert "The page is batchnorm-watch/report.html" in done.output
    assert "The picture is film.svg" in done.output
    assert (tmp_path / "film.svg").read_text(encoding="utf-8").startswith("<svg ")
    folder = tmp_path / "batchnorm-watch"
    assert sorted(file.name for file in folder.iterdir()) == ["report.html", "signal.jsonl"]
    there = read(folder / "signal.jsonl")
    assert there.command == "watch"
    assert (there.configuration["init"], there.configuration["rate"]) == ("he", 1)
    again = signal.record(SignalRecipe(init="he", rate=1.0, steps=5, every=2))
    assert_same(there, again)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--init", "zeros"], "--init is 'zeros'; choose one of xavier, he, lecun, small-gaussian"),
        (["--rate", "nan"], "--rate is nan; give a number above 0"),
        (["--steps", "0"], "--steps is 0; give a whole number from 1 up"),
        (["--every", "0"], "--every is 0; give a whole number from 1 up"),
        (["--momentum", "1"], "--momentum is 1; give a number from 0 up, below 1"),
        (["--activation", "relu"], "--activation is 'relu'; choose one of tanh, sigmoid"),
        (["--gif", "film.gif"], "--gif is film.gif, but the picture is an animated SVG; name it film.svg"),
        (
            ["--gif", "/dev/null/film.svg"],
            "--gif is /dev/null/film.svg, but /dev/null cannot be written to; choose another place",
        ),
        (["--out", "/dev/null/x"], "--out is /dev/null/x, but /dev/null cannot be written to; choose another place"),
    ],
)
def test_bad_input_gets_one_sentence(arguments, sentence):
    error = CliRunner().invoke(app, ["watch-demo", *arguments]).exception
    assert isinstance(error, BatchNormError)
    assert str(error) == sentence
