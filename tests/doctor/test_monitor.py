"""``bn.monitor``: what it says and when, what it leaves behind, what it refuses."""

import contextlib
import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from monitored import Log, forget, global_hooks, hooks_of, network, sgd, train
from state import snapshot
from torch import nn

import batchnorm as bn
from batchnorm.doctor import codes
from batchnorm.doctor.watcher import Watcher

# ---- what it says


def test_one_warning_at_the_step_where_it_happens_pointing_at_the_users_line():
    model = nn.Sequential(network(), nn.Linear(1, 3), network())
    optimizer = sgd(model)
    with bn.monitor(model, optimizer, select=["BN301"]):
        train(model, optimizer)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with torch.no_grad():
                model(torch.randn(8, 3))
                model(torch.randn(8, 3))
            train(model, optimizer)
            forget(model)
    (warning,) = said
    assert issubclass(warning.category, bn.BatchNormWarning)
    assert str(warning.message).startswith("step 3, call 4: 0.1: BN301 validation-in-train-mode: ")
    assert "(and 1 more)" in str(warning.message)
    assert "model.eval()" in str(warning.message)
    assert warning.filename == __file__


def test_the_findings_of_every_layer_are_kept_and_nothing_is_said_when_told_so():
    model = nn.Sequential(network(), nn.Linear(1, 3), network())
    optimizer = sgd(model)
    with bn.monitor(model, optimizer, warn=False) as run:
        train(model, optimizer)
        forget(model)
    assert [(f.code, f.path, f.step) for f in run.findings] == [("BN301", "0.1", 3), ("BN301", "2.1", 3)]
    assert run.findings[0].numbers["call"] == 4


def test_what_is_found_at_the_end_is_said_unless_the_loop_raised(watched):
    class AtTheEnd(Watcher):
        def on_end(self, run):
            yield codes.RULES["BN999"].found("", "too late", "do it", step=run.step)

    with pytest.warns(bn.BatchNormWarning, match="too late"), watched(AtTheEnd(), network(), warn=True):
        pass
    with pytest.raises(KeyError), watched(AtTheEnd(), network(), warn=True) as run:
        raise KeyError
    assert len(run.findings) == 1


def test_warnings_as_errors_stop_the_loop_and_still_clean_up():
    model = network()
    optimizer = sgd(model)
    with bn.monitor(model, optimizer) as run:
        train(model, optimizer)
        with pytest.raises(bn.BatchNormWarning):
            forget(model)
        train(model, optimizer)
    assert run.step == 6
    assert hooks_of(model) == 0


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, True), ({"select": ["BN3"]}, True), ({"select": ["validation-in-train-mode"]}, True),
        ({"select": ["BN302"]}, False), ({"ignore": ["BN301"]}, False),
        ({"select": ["BN3"], "ignore": ["BN30"]}, False),
    ],
)  # fmt: skip
def test_select_and_ignore(options, found):
    model = network()
    optimizer = sgd(model)
    with bn.monitor(model, optimizer, warn=False, **options) as run:
        train(model, optimizer)
        forget(model)
    assert bool(run.findings) == found


# ---- what it leaves behind


@pytest.mark.parametrize("error", [None, RuntimeError("from the loop"), KeyboardInterrupt()])
def test_no_hook_stays(error):
    model, ema = network(), network()
    optimizer, before = sgd(model), snapshot(model)["modules"]
    counted = hooks_of(model, ema), len(optimizer._optimizer_step_pre_hooks), global_hooks()

    def loop(given):
        with bn.monitor(model, given, copies={"ema": ema}, warn=False):
            assert hooks_of(model) > counted[0]
            train(model, optimizer)
            if error is not None:
                raise error

    for given in (optimizer, None):
        with contextlib.nullcontext() if error is None else pytest.raises(type(error)):
            loop(given)
        assert (hooks_of(model, ema), len(optimizer._optimizer_step_pre_hooks), global_hooks()) == counted
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        assert [m[:4] for m in snapshot(model)["modules"]] == [m[:4] for m in before]


def test_training_is_the_same_to_the_bit():
    torch.manual_seed(0)
    model = network()
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    train(other, sgd(other), 6)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    optimizer = sgd(model)
    with bn.monitor(model, optimizer, every=1, warn=False):
        train(model, optimizer, 6)
    assert torch.equal(torch.rand(1), drawn)
    for (key, a), (_, b) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(a, b), key


def test_nothing_keeps_activations_alive():
    model, alive = network(), []
    model[1].register_forward_hook(lambda m, given, result: alive.extend(map(weakref.ref, (given[0], result))))
    optimizer = sgd(model)
    with bn.monitor(model, optimizer, every=1, warn=False) as run:
        for labels in torch.zeros(3, 8, dtype=torch.long):
            run.set_labels(labels)
            train(model, optimizer, 1)
        gc.collect()
        assert len(alive) == 6
        assert not any(ref() is not None for ref in alive)
        assert run.labels is None


def test_a_copy_made_inside_is_free_of_it():
    model = network()
    optimizer = sgd(model)
    with bn.monitor(model, optimizer, warn=False) as run:
        train(model, optimizer)
        copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        buffer = io.BytesIO()
        torch.save(model, buffer)
        assert b"batchnorm." not in pickle.dumps(model)  # it can be loaded where this package is not
        for one in (copied, loaded):
            forget(one)
            assert torch.equal(one[0].weight, model[0].weight)
        assert hooks_of(copied) == 0
        assert run.call == 3
        assert len(run.findings) == 0
        forget(model)
    assert run.findings.codes == ("BN301",)


def test_state_dicts_and_optimizers_can_be_copied_inside():
    model = network()
    optimizer = sgd(model)
    with bn.monitor(model, optimizer, warn=False) as run:
        train(model, optimizer)
        other = copy.deepcopy(optimizer)
        other.step()
        assert run.step == 3
        assert set(model.state_dict()) == set(network().state_dict())


# ---- what cannot be looked at


def test_a_monitor_is_entered_once():
    run = bn.monitor(network(), warn=False)
    with run, pytest.raises(bn.BatchNormError, match="this monitor has begun; make a new one"), run:
        pass
    with pytest.raises(bn.BatchNormError, match="this monitor has ended"), run:
        pass


def test_two_monitors_of_one_model_both_see_it():
    model = network()
    optimizer = sgd(model)
    with bn.monitor(model, optimizer, warn=False) as first, bn.monitor(model, warn=False) as second:
        train(model, optimizer)
        forget(model)
    assert first.findings.codes == second.findings.codes == ("BN301",)


def compiled():
    model = network()
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda: {"model": torch.compile(network(), backend="eager")}, "is compiled"),
        (lambda: {"model": compiled()}, "is compiled; monitor some steps without"),
        (lambda: {"model": nn.LazyLinear(3)}, "does not know its shapes yet"),
        (lambda: {"model": network(), "every": 0}, "every is 0; give a whole number"),
        (lambda: {"model": network(), "optimizer": sgd(network())}, "holds no parameter of this model"),
        (lambda: {"model": network(), "copies": {"ema": None}}, "the copy 'ema' is a NoneType"),
        (lambda: {"model": {"G": network(), "D": 3}}, "model 'D' is a int"),
        (lambda: {"model": {"a.b": network()}}, "cannot have this name"),
        (lambda: {"model": network(), "select": ["BN9"]}, "there is no rule 'BN9'"),
    ],
)
def test_bad_input(arguments, words):
    with pytest.raises(bn.BatchNormError, match=words):
        bn.monitor(**arguments())


def test_a_model_that_is_called_through_a_compiled_copy_of_it_is_noticed():
    model = network()
    outside = torch.compile(model, backend="eager")
    optimizer = sgd(model)
    with pytest.warns(bn.BatchNormWarning, match="no call of the model was seen"), bn.monitor(model, optimizer):
        train(outside, optimizer)
    torch.compiler.reset()


def test_tracing_records_nothing_of_it(watched):
    log, model = Log(), network().eval()
    with watched(log, model):
        traced = torch.jit.trace(model, torch.randn(8, 3), check_trace=False)
    assert not log.passes
    assert "mean" not in str(traced.graph)


def test_replicas_share_the_hooks_and_are_not_looked_at(watched):
    log, model = Log(), network()
    with watched(log, model):
        replica = copy.copy(model[1])
        replica(torch.randn(8, 4))
    assert not log.passes
