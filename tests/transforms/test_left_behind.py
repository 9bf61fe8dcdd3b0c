"""No verb leaves an optimizer behind in silence: it follows, or it warns once, and only where there is a reason."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torchs

import batchnorm as bn
from batchnorm.transforms import left_behind as home

BATCHES = torch.randn(32, 3, 6, 6, generator=torch.Generator().manual_seed(1)).split(8)
X = BATCHES[0]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
    )


# Every verb that returns a changed copy, without and with its optimizer.
TRAINABLE = {
    "calibrate": lambda m, **o: bn.calibrate(m, BATCHES, **o),
    "adapt": lambda m, **o: bn.adapt(m, BATCHES, **o),
    "freeze": lambda m, **o: bn.freeze(m, **o),
    "unfreeze": lambda m, **o: bn.unfreeze(m, **o),
    "insert": lambda m, **o: bn.insert(m, X, ["3"], **o),
    "drop_bias": lambda m, **o: bn.drop_bias(m, X, **o),
    "convert": lambda m, **o: bn.convert(m, "group", example=X, **o),
    "fuse": lambda m, **o: bn.fuse(m, X, **o),
    "accelerate": lambda m, **o: bn.accelerate(m, X, steps=2, seconds=0, **o),
    "fix": lambda m, **o: bn.fix(m, [], **o),
}
INFERENCE = {"fold": lambda m: bn.fold(m, X)}
IN_PLACE = ("calibrate", "adapt", "freeze", "unfreeze", "convert")


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **options)


def train(model, optimizer, steps=1, set_to_none=True):
    """Return the warnings of some steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=set_to_none)
            model.train()(X).square().mean().backward()
            optimizer.step()
    return [str(w.message) for w in caught if issubclass(w.category, bn.BatchNormWarning)]


@pytest.fixture(autouse=True)
def _nothing_left():
    for watch in tuple(home._watches):  # of models that modules of tests before this one hold
        home._end(watch)
    assert not home._handles
    before = len(torchs._global_optimizer_post_hooks)
    yield
    if home._watches:
        gc.collect()
    assert not home._watches
    assert len(torchs._global_optimizer_post_hooks) == before


@pytest.mark.parametrize("verb", [*TRAINABLE, *INFERENCE])
def test_the_documented_form_warns_once_if_the_optimizer_stays(verb):
    model = network()
    optimizer = sgd(model)
    train(model, optimizer)
    old = weakref.ref(model)
    model, _ = {**TRAINABLE, **INFERENCE}[verb](model)
    assert old() is None, "something of ours keeps the old model"
    said = train(model, optimizer, 3)
    assert len(said) == 1
    assert said[0].startswith(f"{verb}: an optimizer steps on the parameters of the model that was given to {verb}")
    if verb in TRAINABLE:
        assert f"pass optimizer=optimizer to bn.{verb}" in said[0]
        assert "make a new optimizer from model.parameters()" in said[0]
    assert ("inplace=True" in said[0]) == (verb in IN_PLACE)


@pytest.mark.parametrize("verb", TRAINABLE)
def test_the_remedies_train_the_copy_and_are_silent(verb):
    model = network()
    optimizer = sgd(model)
    train(model, optimizer)
    model, _ = TRAINABLE[verb](model, optimizer=optimizer)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert {id(p) for p in model.parameters()} >= held
    assert set(map(id, optimizer.state)) <= held
    before = model[6].weight.detach().clone()
    assert train(model, optimizer, 2) == []
    assert not torch.equal(model[6].weight, before)
    fresh, _ = TRAINABLE[verb](network())
    assert train(fresh, sgd(fresh), 2) == []


@pytest.mark.parametrize("verb", ["calibrate", "adapt"])
def test_an_optimizer_follows_with_groups_and_state_and_trains_as_the_argument_would(verb):
    torch.manual_seed(0)
    model = network().double()
    optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.01}, {"params": model[3].parameters()}])
    other = sgd(model[6])
    x = X.double()
    act = {"calibrate": bn.calibrate, "adapt": bn.adapt}[verb]

    def step(net, *optimizers):
        for each in optimizers:
            each.zero_grad()
        net.train()(x).square().mean().backward()
        for each in optimizers:
            each.step()

    step(model, optimizer, other)
    twin, one, two = copy.deepcopy((model, optimizer, other))
    new, _ = act(model, [b.double() for b in BATCHES], optimizer=[optimizer, other])
    act(twin, [b.double() for b in BATCHES], inplace=True)
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert optimizer.param_groups[0]["params"][0] is new[0].weight
    assert not any(a is b for a in new.parameters() for b in model.parameters())
    for _ in range(2):
        step(new, optimizer, other)
        step(twin, one, two)
    for a, b in zip(new.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_batch_that_raises_leaves_the_optimizers_where_they_were():
    model = network()
    optimizer = sgd(model)
    for act in (bn.calibrate, bn.adapt):
        with pytest.raises(RuntimeError):
            act(model, [X, X[:, :2]], optimizer=optimizer)
        assert optimizer.param_groups[0]["params"][0] is model[0].weight
    with pytest.raises(bn.BatchNormError, match="calibrate: the optimizer holds no parameter of this model"):
        bn.calibrate(model, BATCHES, optimizer=sgd(network()))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_old_model_in_a_cycle_or_a_frame_is_known_by_its_gradients(set_to_none):
    kept = network()
    kept.itself = [kept]  # not freed by counting references
    optimizer = sgd(kept)
    train(kept, optimizer)
    model, _ = bn.calibrate(kept, BATCHES)
    said = train(model, optimizer, 3, set_to_none)
    assert len(said) == 1
    assert said[0].startswith("calibrate: ")


def test_gradients_left_from_before_are_none():
    """`model.zero_grad()` does not reach the old parameters, whose last gradient goes on moving them."""
    for keep in (True, False):
        model = network()
        optimizer = sgd(model)
        train(model, optimizer)
        old = model if keep else None
        model, _ = bn.freeze(model)
        model.zero_grad()
        model(X).square().mean().backward()
        with pytest.warns(bn.BatchNormWarning, match="freeze: an optimizer steps"):
            optimizer.step()
        del old


def test_an_optimizer_that_calls_the_closure():
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2)
    model, _ = bn.calibrate(model, BATCHES)

    def closure():
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        return loss

    with pytest.warns(bn.BatchNormWarning, match="calibrate: an optimizer steps"):
        optimizer.step(closure)


def test_a_copy_of_a_copy():
    kept = network()
    optimizer = sgd(kept)
    first, _ = bn.calibrate(kept, BATCHES)
    second, _ = bn.freeze(first)
    assert len(train(second, optimizer, 2)) == 1


def test_of_two_optimizers_the_one_that_was_not_given_warns():
    model = network()
    one, two = sgd(model[0]), sgd(nn.Sequential(model[1], model[3], model[6]))
    model, _ = bn.calibrate(model, BATCHES, optimizer=one)
    assert train(model, one, 2) == []
    assert len(train(model, two, 2)) == 1


# ---- no false alarm


@pytest.mark.parametrize("verb", ["calibrate", "freeze", "insert", "convert", "fix", *INFERENCE])
def test_a_copy_for_evaluation_while_the_argument_trains_on(verb):
    model = network()
    optimizer = sgd(model)
    for _ in range(2):
        other, _ = {**TRAINABLE, **INFERENCE}[verb](model)
        other.eval()(X)
        assert train(model, optimizer, 2) == []
        assert train(model, optimizer, 2, set_to_none=False) == []


def test_both_are_trained_each_by_its_own_optimizer():
    student = network()
    one = sgd(student)
    teacher, _ = bn.freeze(student)
    two = sgd(teacher)
    for _ in range(2):
        assert train(teacher, two) == []
        assert train(student, one) == []


def test_one_optimizer_that_holds_both():
    kept = network()
    copied, _ = bn.calibrate(kept, BATCHES)
    optimizer = torch.optim.SGD([*kept.parameters(), *copied.parameters()], lr=0.1)
    assert train(copied, optimizer, 2) == []


def test_accumulated_and_skipped_steps():
    model = network()
    optimizer = sgd(model)
    other, _ = bn.calibrate(model, BATCHES)
    optimizer.zero_grad()
    optimizer.step()  # there are no gradients
    model(X).sum().backward()
    optimizer.step()
    assert train(model, optimizer) == []
    del other


def test_a_part_that_outlives_the_model():
    backbone, head = network(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.1)
    calibrated, _ = bn.calibrate(nn.Sequential(backbone, head), BATCHES)
    calibrated.eval()(X)
    assert train(nn.Sequential(backbone, head), optimizer, 2) == []


def test_parameters_shared_with_another_model_or_called_as_a_function():
    inner = nn.Sequential(nn.Flatten(), nn.Linear(108, 4), nn.BatchNorm1d(4))
    other = nn.Sequential(nn.Flatten(), nn.Linear(108, 4))
    other[1].weight, other[1].bias = inner[1].weight, inner[1].bias
    optimizer = sgd(other)
    inner, _ = bn.calibrate(inner, BATCHES)
    assert train(other, optimizer, 4) == []

    model = network()
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(list(parameters.values()), lr=0.1)
    model, _ = bn.calibrate(model, BATCHES)
    for _ in range(4):
        optimizer.zero_grad()
        torch.func.functional_call(model, parameters, (X,)).square().mean().backward()
        optimizer.step()


def test_a_backward_pass_that_was_under_way():
    model = network()
    optimizer = sgd(model)
    loss = model(X).square().mean()
    model, _ = bn.calibrate(model, BATCHES, optimizer=optimizer)
    loss.backward()
    optimizer.step()
    assert train(model, optimizer, 2) == []


def test_a_frozen_part_of_the_optimizer():
    model = network()
    for p in model.parameters():
        p.requires_grad_(False)
    head = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    model, _ = bn.calibrate(model, BATCHES)
    assert train(nn.Sequential(model, head), optimizer, 2) == []


def test_the_argument_changed_in_place_is_not_watched():
    model = network()
    optimizer = sgd(model)
    for verb in IN_PLACE:
        TRAINABLE[verb](model, inplace=True)
        assert not home._watches
    assert train(model, optimizer, 2) == []


# ---- what the watch itself does


def test_nothing_is_kept_alive_copied_or_pickled():
    kept = network()
    optimizer = sgd(kept)
    model, _ = bn.calibrate(kept, BATCHES)
    assert len(home._watches) == 1
    for _ in range(3):
        bn.calibrate(kept, BATCHES)
    assert len(home._watches) == 1  # one for each living argument
    assert "batchnorm" not in str(pickle.dumps(optimizer))
    copy.deepcopy((kept, optimizer, model))
    references = [weakref.ref(p) for p in (*kept.parameters(), *model.parameters())]
    del kept, optimizer, model
    assert not any(each() is not None for each in references)
    assert not home._watches
    assert not home._handles


def test_a_model_that_is_freed_during_a_step_does_not_disturb_the_hooks():
    model = network()
    other = nn.Linear(2, 2)
    mine = sgd(other)
    copied, _ = bn.calibrate(model, BATCHES)
    box, calls = [model], []
    del model
    handle = torchs.register_optimizer_step_post_hook(lambda *_: calls.append(1))
    first = mine.register_step_post_hook(lambda *_: box.clear())
    mine.step()
    assert calls == [1]
    assert not home._watches
    handle.remove()
    first.remove()
    bn.calibrate(copied, BATCHES)  # the next watch takes the hook over, and away
    del copied


def test_an_optimizer_that_accelerate_wraps():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = network()
    optimizer = accelerator.prepare(sgd(model))
    model, _ = bn.calibrate(model, BATCHES)
    optimizer.zero_grad()
    accelerator.backward(model(X).square().mean())
    with pytest.warns(bn.BatchNormWarning, match="calibrate: an optimizer steps"):
        optimizer.step()


def test_a_wrapped_optimizer_follows_and_names_stay_with_their_parameters():
    accelerate = pytest.importorskip("accelerate")
    model = network()
    named = torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.9)
    optimizer = accelerate.Accelerator(cpu=True).prepare(named)
    train(model, optimizer)
    model, _ = bn.calibrate(model, BATCHES, optimizer=optimizer)
    model, _ = bn.drop_bias(model, X, optimizer=optimizer)
    (group,) = named.param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert group["param_names"] == [names[id(p)] for p in group["params"]]
    assert "0.bias" not in group["param_names"]
    model, _ = bn.insert(model, X, ["3"], optimizer=optimizer)
    assert train(model, optimizer, 2) == []
    assert group["param_names"][-2:] == ["3.norm.weight", "3.norm.bias"]
    assert len(group["param_names"]) == len(group["params"])


def test_a_compiled_step_runs():
    model = network()
    optimizer = sgd(model)
    other, _ = bn.calibrate(model, BATCHES)
    model(X).square().mean().backward()
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit
        torch.compile(optimizer.step, backend="eager")()
    torch._dynamo.reset()
    assert train(model, optimizer) == []
    del other
