"""``bn.monitor``: what it says and when, what it leaves behind, and that nothing of it can break a training."""

import contextlib
import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from state import snapshot
from torch import nn
from torch.utils.checkpoint import checkpoint

import batchnorm as bn
from batchnorm.doctor import codes
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.watcher import Pass, Watcher


def network(norm=nn.BatchNorm1d):
    return nn.Sequential(nn.Linear(3, 4), norm(4), nn.ReLU(), nn.Linear(4, 1))


def sgd(*models):
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.01)


def train(model, optimizer, steps=3):
    for x in torch.randn(steps, 8, 3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def forget(model):
    with torch.no_grad():
        model(torch.randn(8, 3))


def hooks_of(*models):
    return sum(len(getattr(m, n)) for model in models for m in model.modules() for n in vars(m) if "_hooks" in n)


def global_hooks():
    from torch.optim import optimizer

    return len(optimizer._global_optimizer_pre_hooks) + len(optimizer._global_optimizer_post_hooks)


class Log(Watcher):
    """Writes down what it is told."""

    modules = (nn.ReLU,)

    def __init__(self):
        self.events, self.passes = [], []

    def on_begin(self, run):
        self.events.append("begin")
        return ()

    def on_call(self, run, arguments, keywords):
        self.events.append(("call", run.call, len(arguments), sorted(keywords)))
        return ()

    def on_pass(self, run, seen):
        self.events.append(("pass", seen.path, seen.call, seen.turn))
        fields = ("path", "from_batch", "updates", "gradients", "recomputed", "call", "turn", "values")
        self.passes.append({name: getattr(seen, name) for name in fields})
        return ()

    def on_module(self, run, path, module, arguments, output):
        self.events.append(("module", path))
        return ()

    def on_return(self, run, output):
        self.events.append(("return", output is not None))
        return ()

    def on_copy(self, run, name):
        self.events.append(("copy", name))
        return ()

    def on_backward(self, run, path):
        self.events.append(("backward", path))
        return ()

    def on_step(self, run):
        self.events.append(("step", run.step, run.calls_since_step))
        return ()

    def on_end(self, run):
        self.events.append("end")
        return ()


@pytest.fixture
def watched(monkeypatch):
    """Make a monitor with one rule of the test's own."""

    def make(watcher, *arguments, **options):
        rule = Rule("BN999", "a-test", "warning", "A test.", needs=("run",), watch=lambda: watcher)
        monkeypatch.setattr(codes, "RULES", {"BN999": rule})
        return bn.monitor(*arguments, **{"warn": False, **options})

    return make


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
            run.told(labels)
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
        for one in (copied, loaded):
            forget(one)
            assert hooks_of(one) == 0
            assert torch.equal(one[0].weight, model[0].weight)
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


# ---- what it can bear


def test_a_rule_that_breaks_is_left_out_and_the_training_goes_on(watched):
    class Broken(Watcher):
        passes = 0

        def on_pass(self, run, seen):
            self.passes += 1
            raise ZeroDivisionError("a bug of ours")
            yield

    model, broken = network(), Broken()
    optimizer = sgd(model)
    with watched(broken, model, optimizer, warn=True) as run:
        train(model, optimizer)
    assert run.step == 3
    assert broken.passes == 1
    assert run.failed == {"BN999": "ZeroDivisionError: a bug of ours"}
    assert "BN999 failed here: ZeroDivisionError: a bug of ours" in str(run.findings)


def test_a_model_that_raises(watched):
    class Raises(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.fail = network(), True

        def forward(self, x):
            y = self.net(x)
            if self.fail:
                raise RuntimeError("out of memory")
            return y

    log, model = Log(), Raises()
    with watched(log, model) as run:
        with pytest.raises(RuntimeError, match="out of memory"):
            model(torch.randn(8, 3))
        model.fail = False
        model(torch.randn(8, 3))
    assert run.call == 2
    assert [e for e in log.events if e[0] in ("call", "return")] == [
        ("call", 1, 1, []), ("return", False), ("call", 2, 1, []), ("return", True),
    ]  # fmt: skip


def test_an_interrupt_inside_a_call_does_not_make_the_next_one_seem_nested(watched):
    class Interrupted(nn.ReLU):
        now = True

        def forward(self, x):
            if self.now:
                raise KeyboardInterrupt
            return super().forward(x)

    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Interrupted(), nn.Linear(4, 1))
    optimizer = sgd(model)
    with watched(Log(), model, optimizer) as run:
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(8, 3))
        model[2].now = False
        optimizer.step()
        train(model, optimizer)
    assert run.call == 4


def test_a_model_that_calls_itself_is_one_call(watched):
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x, depth=2):
            x = self.norm(x)
            return self(x, depth=depth - 1) if depth else x

    log = Log()
    with watched(log, Recursive()) as run:
        run.model(torch.randn(8, 3), depth=1)
    assert run.call == 1
    assert [e for e in log.events if e[0] in ("call", "pass")] == [
        ("call", 1, 1, ["depth"]), ("pass", "norm", 1, 0), ("pass", "norm", 1, 0),
    ]  # fmt: skip


def test_part_of_the_model_in_evaluation_mode(watched):
    log, model = Log(), nn.Sequential(network(), nn.Linear(1, 3), network())
    model[0].eval()
    with watched(log, model):
        model(torch.randn(8, 3))
    assert [(p["path"], p["from_batch"], p["updates"]) for p in log.passes] == [
        ("0.1", False, False), ("2.1", True, True),
    ]  # fmt: skip


SWITCHES = {
    "torch": (nn.BatchNorm1d(4), True, True),
    "torch, eval": (nn.BatchNorm1d(4).eval(), False, False),
    "torch, untracked": (nn.BatchNorm1d(4, track_running_stats=False).eval(), True, False),
    "torch, momentum 0": (nn.BatchNorm1d(4, momentum=0.0), True, False),
    "ours": (bn.BatchNorm1d(4), True, True),
    "ours, eval": (bn.BatchNorm1d(4).eval(), False, False),
    "running, updated": (bn.BatchNorm1d(4, statistics="running", update=True), False, True),
    "batch, in eval": (bn.BatchNorm1d(4, statistics="batch").eval(), True, False),
    "update=False": (bn.BatchNorm1d(4, update=False), True, False),
    "one value": (bn.BatchNorm1d(4, one_value="running"), False, False),
    "frozen": (bn.freeze(nn.BatchNorm1d(4))[0], False, False),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_what_a_pass_says_is_what_the_layer_does(name, watched):
    layer, from_batch, updates = SWITCHES[name]
    layer, log = copy.deepcopy(layer), Log()
    before = None if layer.running_mean is None else layer.running_mean.clone()
    x = torch.randn(1 if name == "one value" else 8, 4) + 3
    with watched(log, layer):
        y = layer(x)
    (seen,) = log.passes
    assert (seen["from_batch"], seen["updates"]) == (from_batch, updates)
    assert updates == (before is not None and not torch.equal(before, layer.running_mean))
    assert from_batch == bool(y.mean().abs() < 1e-3)


def test_the_moments_of_a_pass():
    layer, x = nn.BatchNorm1d(4), torch.randn(8, 4)
    seen = Pass("", layer, x, x, None, True, True, True, False, 1)
    torch.testing.assert_close(seen.moments.mean.float(), x.mean(0))
    torch.testing.assert_close(seen.moments.var.float(), x.var(0, unbiased=False))
    assert seen.moments is seen.moments
    assert seen.values == 8


def test_events_in_their_order(watched):
    log, model, ema = Log(), network(), network()
    optimizer = sgd(model)
    with watched(log, model, optimizer, copies={"ema": ema}):
        train(model, optimizer, 1)
        ema(torch.randn(8, 3))
    assert log.events == [
        "begin", ("call", 1, 1, []), ("pass", "1", 1, 0), ("module", "2"), ("return", True), ("backward", "1"),
        ("step", 0, 1), ("copy", "ema"), "end",
    ]  # fmt: skip


@pytest.mark.parametrize(("every", "looked"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4]), (50, [0])])
def test_every(every, looked, watched):
    class Looks(Watcher):
        def __init__(self):
            self.at = []

        def on_pass(self, run, seen):
            if run.looking:
                self.at.append(run.step)
            return ()

    looks, log, model = Looks(), Log(), network()
    optimizer = sgd(model)
    with watched(looks, model, optimizer, every=every):
        train(model, optimizer, 6)
    assert looks.at == looked
    with watched(log, model, optimizer, every=every):
        train(model, optimizer, 6)
    assert log.events.count(("module", "2")) == len(looked)


def test_before_the_first_step_calls_are_counted_instead(watched):
    log, model = Log(), network()
    with watched(log, model, every=3):
        for _ in range(7):
            model(torch.randn(8, 3))
    assert log.events.count(("module", "2")) == 3


# ---- optimisers


def test_optimisers_that_are_not_given_are_found_and_others_are_not(watched):
    model, stranger = network(), network()
    of_model, of_stranger = sgd(model), sgd(stranger)
    with watched(Log(), model) as run:
        train(stranger, of_stranger)
        assert run.step == 0
        train(model, of_model)
        assert run.step == 3
        late = torch.optim.Adam(model.parameters())
        train(model, late)
    assert run.step == 6


def test_each_layer_counts_the_steps_of_its_own_optimiser(watched):
    g, d, log = network(), network(), Log()
    of_g, of_d = sgd(g), sgd(d)
    with watched(log, {"G": g, "D": d}, (of_g, of_d)) as run:
        for _ in range(2):
            train(d, of_d, 2)
            train(g, of_g, 1)
    assert run.step == 6
    assert [(p["path"], p["turn"]) for p in log.passes] == [
        ("D.1", 0), ("D.1", 1), ("G.1", 0), ("D.1", 2), ("D.1", 3), ("G.1", 1),
    ]  # fmt: skip
    assert [p["call"] for p in log.passes] == [1, 2, 3, 4, 5, 6]


def test_two_optimisers_for_one_network(watched):
    model, log = network(lambda c: nn.BatchNorm1d(c, affine=False)), Log()
    first, second = sgd(model[0]), sgd(model[3])
    with watched(log, model, [first, second]) as run:
        model(torch.randn(8, 3)).sum().backward()
        first.step()
        second.step()
        model(torch.randn(8, 3))
    assert run.step == 2
    assert log.passes[-1]["turn"] == 2  # it has no parameters, so both are its own


def test_a_skipped_step_of_a_gradient_scaler(watched):
    model, log = network(), Log()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    with watched(log, model, optimizer) as run:
        for scale in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(8, 3)).mean() * scale).backward()
            scaler.step(optimizer)
            scaler.update()
    assert run.step == 2
    assert [p["turn"] for p in log.passes] == [0, 1, 1]


def test_lbfgs_calls_the_model_in_its_step(watched):
    class Stepping(Watcher):
        def __init__(self):
            self.seen = []

        def on_pass(self, run, seen):
            self.seen.append(run.stepping)
            return ()

    model, watcher = network(), Stepping()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(8, 3) * torch.arange(8.0)[:, None]).square().mean()
        loss.backward()
        return loss

    with watched(watcher, model, optimizer) as run:
        optimizer.step(closure)
        model(torch.randn(8, 3))
    assert run.step == 1
    assert watcher.seen[0] is optimizer
    assert watcher.seen[-1] is None


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


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
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


# ---- wrappers, checkpoints, repairs


def test_a_wrapper_and_what_is_in_it(watched):
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    log, inner = Log(), network()
    outer = Wrapper(inner)
    with watched(log, outer) as run:
        outer(torch.randn(8, 3))
        inner(torch.randn(8, 3))  # as somebody does who evaluates without the wrapper
    assert run.call == 2
    assert [p["path"] for p in log.passes] == ["module.1", "module.1"]
    log = Log()
    with watched(log, inner) as run:
        outer(torch.randn(8, 3))
    assert (run.call, log.passes[0]["path"]) == (1, "1")


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_pass_is_recomputed_and_was_for_gradients(reentrant, watched):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x):
            return checkpoint(self.net, x, use_reentrant=reentrant)

    log, model = Log(), Model()
    with watched(log, model):
        model(torch.randn(8, 3, requires_grad=True)).sum().backward()
    assert [(p["recomputed"], p["gradients"]) for p in log.passes] == [(False, True), (True, True)]


def test_the_fix_of_a_double_update_silences_it():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x):
            return checkpoint(self.net, x, use_reentrant=False)

    model = Model()
    optimizer = sgd(model)
    with bn.monitor(model, optimizer, warn=False) as run:
        train(model, optimizer)
    (finding,) = run.findings
    assert (finding.code, finding.numbers["updates"], finding.numbers["calls"]) == ("BN302", 2, 1)
    assert int(model.net[1].num_batches_tracked) == 6
    repaired, report = bn.fix(model, run.findings, example=torch.randn(8, 3))
    assert [(change.path, change.before, change.after) for change in report.changes] == [("net.1", 2, 1)]
    assert report.certificate is not None
    optimizer = sgd(repaired)
    with bn.monitor(repaired, optimizer, warn=False) as run:
        train(repaired, optimizer)
    assert str(run.findings) == "nothing found"
    assert int(repaired.net[1].num_batches_tracked) == 9


def test_the_fix_of_a_stale_copy_calibrates_it():
    model, data = network(), [x + 2 for x in torch.randn(6, 16, 3)]
    ema = copy.deepcopy(model).eval()
    optimizer = sgd(model)
    with bn.monitor(model, optimizer, copies={"ema": ema}, warn=False) as run:
        for x in data:
            model(x).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                for p, q in zip(ema.parameters(), model.parameters(), strict=True):
                    p.lerp_(q, 0.1)
        ema(data[0])
    assert [(f.code, f.path, f.severity, f.step) for f in run.findings] == [("BN305", "ema", "error", 6)]
    better, report = bn.fix(ema, run.findings, data=data, example=data[0])
    assert not report.changes
    better, report = bn.fix(ema, run.findings, data=data, example=data[0], unsafe=True)
    assert report.changes
    torch.testing.assert_close(better[1].running_mean, better[0](torch.cat(data)).mean(0))
