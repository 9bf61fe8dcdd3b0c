"""What the records of a watched run say, and what becomes of one in which something goes wrong."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from watching import batches, hooks_of, of, sgd, stack, train, watched

import batchnorm as bn
from batchnorm.observe.quantities import QUANTITIES
from batchnorm.records import RecordFile

# ---- what is reported


def test_logged_numbers():
    model = stack()
    with bn.watch(model, every=2, stack="with BN") as seen:
        train(model, sgd(model), batches(3), lambda loss: seen.log("training loss", loss))
        seen.log("validation accuracy", 0.5, step=7, unit="share")
    losses = of(seen.records, "training loss", "")
    assert [m.setting for m in losses] == [{"step": s, "layer": "", "stack": "with BN"} for s in (1, 2, 3)]
    assert all(len(m.samples) == 1 and m.samples[0] > 0 for m in losses)
    accuracy = of(seen.records, "validation accuracy")[0]
    assert (accuracy.setting["step"], accuracy.samples, accuracy.unit) == (7, (0.5,), "share")
    seen.log("test accuracy", torch.tensor([0.25]))  # also when it is over
    assert of(seen.records, "test accuracy")[0].samples == (0.25,)


def test_a_logged_tensor_is_as_it_was_when_it_was_logged():
    total = torch.zeros(())
    with bn.watch(stack()) as seen:
        for _ in range(3):
            total += 1
            seen.log("total", total)
    assert [m.samples[0] for m in of(seen.records, "total")] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("value", [torch.zeros(2), "much", None])
def test_what_is_not_one_number_is_refused(value):
    with bn.watch(stack()) as seen, pytest.raises(bn.BatchNormError, match="log one number"):
        seen.log("loss", value)


def test_quantities_are_chosen():
    assert {m.quantity for m in watched(stack()).records.measurements} == set(QUANTITIES) - {"dead"}
    assert {m.quantity for m in watched(stack(), quantities=["mean", "gap"]).records.measurements} == {"mean", "gap"}
    assert {m.quantity for m in watched(stack(), quantities="gradient norm").records.measurements} == {"gradient norm"}


def test_records_say_how_they_were_made():
    seen = watched(stack(), every=7, stack="a", range=(-6, 6), bins=12)
    records = seen.records
    assert isinstance(records, RecordFile)
    assert (records.command, records.configuration["every"], records.configuration["stack"]) == ("watch", 7, "a")
    assert records.machine["cores"] >= 1
    for m in of(records, "histogram"):
        assert (m.setting["low"], m.setting["high"], len(m.samples)) == (-6.0, 6.0, 12)
        assert m.setting["stack"] == "a"


def test_bins_do_not_move():
    model = stack(norm=False)
    with bn.watch(model, every=1, quantities="histogram") as seen:
        for number, (x, y) in enumerate(batches(4)):
            train(model, torch.optim.SGD(model.parameters(), lr=0.0), [(x * 10.0**number, y)])
            seen.step() if number else None
    edges = {(m.setting["layer"], m.setting["low"], m.setting["high"]) for m in of(seen.records, "histogram")}
    assert len(edges) == len({layer for layer, _, _ in edges})
    last = of(seen.records, "histogram", "2")[-1].setting
    assert last["under"] > 0
    assert last["over"] > 0


# ---- what goes wrong


def test_a_quantity_that_fails_is_left_out_and_the_training_goes_on(monkeypatch):
    def fails(signal):
        raise ZeroDivisionError("of no use")

    broken = bn.observe.quantity.Quantity("mean", "signal", fails)
    monkeypatch.setitem(QUANTITIES, "mean", broken)
    model = stack()
    with pytest.warns(bn.BatchNormWarning, match="'mean' failed at step 0 and is disabled") as warned:
        seen = watched(model, steps=3, every=1)
    assert len(warned) == 1
    assert seen.failed == {"mean": "ZeroDivisionError: of no use"}
    assert of(seen.records, "mean") == []
    assert len(of(seen.records, "variance", "1")) == 3


def test_signals_that_are_not_finite():
    model = stack(norm=False)
    model[0].weight.data[0] = float("nan")
    with bn.watch(model, every=1) as seen:
        loss = model(batches(1)[0][0]).sum()
        loss.backward()
    histogram = of(seen.records, "histogram", "2")[0]
    assert histogram.setting["nonfinite"] == 8
    assert sum(histogram.samples) == 40
    assert torch.tensor(of(seen.records, "percentiles", "2")[0].samples).isnan().all()


def test_whole_numbers_and_empty_batches_are_passed_over():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Tanh())
    with bn.watch(model, layers="*", every=1) as seen:
        model(torch.zeros(0, dtype=torch.long)).sum().backward()
        seen.step()
        model(torch.tensor([[1, 2]])).sum().backward()
        seen.step()
    assert seen.failed == {}
    assert {m.setting["step"] for m in of(seen.records, "mean")} == {1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    model = stack(norm=False).to(dtype)
    with bn.watch(model, every=1) as seen:
        model(batches(1)[0][0].to(dtype)).sum().backward()
        seen.step()
    assert seen.failed == {}
    assert len(of(seen.records, "histogram")) == 3


def test_a_copy_of_the_model_is_not_watched():
    model = stack()
    with bn.watch(model, every=1, quantities="mean") as seen:
        other = copy.deepcopy(model)
        other(batches(1)[0][0])
        assert hooks_of(other) == 0
        assert hooks_of(model) > 0
    assert of(seen.records, "mean") == []


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"every": 0}, "every is 0; give a whole number from 1 up"),
        ({"every": 2.5}, "every is 2.5"),
        ({"bins": 0}, "bins is 0"),
        ({"start": -1}, "start is -1; give a whole number from 0 up"),
        ({"quantities": ["mood"]}, "'mood' is not a quantity; use any of histogram"),
        ({"layers": "conv*"}, r"no layer fits 'conv\*'"),
        ({"layers": []}, "layers selects nothing"),
        ({"layers": [3]}, "layers has 3 in it"),
        ({"range": (1, 1)}, r"range is \(1, 1\)"),
        ({"range": (0, float("inf"))}, "range is"),
        ({"range": 3}, "range is 3"),
        ({"to": 3}, "to is a int"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1, requires_grad=True)])}, "holds no parameter of this model"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(options, problem):
    with pytest.raises(bn.BatchNormError, match=problem) as raised:
        bn.watch(stack(), **options)
    assert raised.value.where == "watch"


def test_what_cannot_be_watched_is_refused():
    with pytest.raises(bn.BatchNormError, match="the model is a function"):
        bn.watch(stack)
    with pytest.raises(bn.BatchNormError, match="does not know its shapes yet"):
        bn.watch(nn.LazyLinear(3))
    compiled = stack()
    compiled._compiled_call_impl = lambda *_: None
    with pytest.raises(bn.BatchNormError, match="is compiled"):
        bn.watch(compiled)


def test_a_watch_begins_once():
    seen = watched(stack())
    with pytest.raises(bn.BatchNormError, match="has begun before"):
        seen.__enter__()
    assert not seen.running


@pytest.mark.parametrize(("what", "all_of_them"), [("quantity", QUANTITIES), ("probe", bn.probe.__all__)])
def test_the_guide_names_every_one(what, all_of_them):
    guide = (Path(__file__).parents[2] / "docs" / "understand.md").read_text(encoding="utf-8")
    table = guide[guide.index(f"| {what} |") :].split("\n\n")[0].splitlines()[2:]
    assert {name.strip(" `") for row in table for name in row.split("|")[1].split(",")} == set(all_of_them)
