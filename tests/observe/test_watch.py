"""What is recorded, where, when, and under which name."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from watching import Functional, batches, convolutional, hooks_of, layers_of, of, sgd, stack, train, watched

import batchnorm as bn
from batchnorm.observe.places import places

# ---- the rule


def test_a_signal_is_seen_once_where_it_arrives():
    seen = watched(convolutional(), shape=(8, 1, 6, 6))
    assert layers_of(seen) == ["1", "2", "5", "6", "8"]
    places = {m.setting["layer"]: (m.setting["at"], m.setting["kind"]) for m in of(seen.records, "mean")}
    assert places == {
        "1": ("input", "batch norm"), "2": ("input", "relu"), "5": ("input", "batch norm"), "6": ("input", "sigmoid"),
        "8": ("output", "linear"),
    }  # fmt: skip


def test_functional_activations_are_seen_at_the_outputs_before_them():
    model = Functional()
    x, y = batches(1)[0]
    before = model.first(x).detach()
    with bn.watch(model) as seen:
        train(model, sgd(model), [(x, y)])
    assert layers_of(seen) == ["first", "again", "again (call 2)", "last"]
    low = of(seen.records, "percentiles", "first")[0].samples[0]
    assert low == pytest.approx(before.quantile(0.15).item(), abs=1e-6)  # before the ReLU in place
    assert low < 0


def test_an_output_that_is_not_taken_directly_is_seen():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 3))
    assert layers_of(watched(model)) == ["1", "1 (output)", "3", "4"]
    model[2].eval()  # hands its input on, so the tanh takes the output of the BN layer
    assert layers_of(watched(model)) == ["1", "3", "4"]


def test_what_one_step_has_shown_does_not_change_the_next_steps():
    model = Functional()
    seen = watched(model, steps=4, every=1)
    for step in range(4):
        own = [m.setting["layer"] for m in of(seen.records, "mean") if m.setting["step"] == step]
        assert own == ["first", "again", "again (call 2)", "last"]
    seen = watched(convolutional(), steps=3, shape=(8, 1, 6, 6), every=1)
    assert [m.setting["layer"] for m in of(seen.records, "mean")] == ["1", "2", "5", "6", "8"] * 3


def test_an_activation_inside_of_a_layer():
    model = nn.Sequential(nn.Linear(6, 6), bn.BatchNorm1d(6, activation="relu"), nn.Linear(6, 3))
    seen = watched(model)
    assert layers_of(seen) == ["1", "1 (output)", "2"]
    assert layers_of(seen, "dead") == ["1 (output)"]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("2", ["2"]),
        ("*", ["1", "2", "5", "6", "8"]),
        (["[56]"], ["5", "6"]),
        ({"layer 1": "2", "layer 2": "6"}, ["layer 1", "layer 2"]),
        ("0", ["0"]),  # none of the selected layers takes it
        ("7", ["7"]),  # of no known kind: its input
        ({"flat": "7", "fc": "8"}, ["flat", "fc"]),
    ],
)
def test_layers_select_and_name(layers, expected):
    seen = watched(convolutional(), shape=(8, 1, 6, 6), layers=layers)
    assert layers_of(seen) == expected


def test_a_path_stands_for_all_that_is_in_it():
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 3))
    assert layers_of(watched(model, layers="0")) == ["0.1"]
    with pytest.raises(bn.BatchNormError, match=r"'a' is the name of '0', which holds 2 layers: 0\.0, 0\.1"):
        bn.watch(model, layers={"a": "0"})


def test_a_model_that_is_one_layer_has_its_class_as_a_name():
    assert layers_of(watched(nn.Linear(6, 3))) == ["Linear"]
    assert layers_of(watched(nn.Linear(6, 3)), "weight norm") == ["Linear"]


def test_every_activation_of_torch_is_known_by_its_own_name():
    assert [place.kind for place in places(nn.ReLU6())] == ["relu6"]  # which is a Hardtanh, too
    assert [place.kind for place in places(nn.Hardtanh())] == ["hardtanh"]
    assert places(nn.Softmax(dim=1)) == []
    assert [place.kind for place in places(bn.BatchNorm1d(3, activation="leaky_relu"))] == ["batch norm", "leakyrelu"]


# ---- when


@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
def test_every_so_many_steps_of_the_optimiser(given):
    model = stack()
    optimizer = sgd(model)
    with bn.watch(model, optimizer if given else None, every=3, quantities=["mean", "gradient norm"]) as seen:
        train(model, optimizer, batches(8))
        assert seen.steps == 8
    for quantity in ("mean", "gradient norm"):
        assert sorted({m.setting["step"] for m in of(seen.records, quantity)}) == [0, 3, 6]


def test_between_the_samples_there_are_no_hooks():
    model = stack()
    seen = []
    with bn.watch(model, every=3) as watch:
        seen.append(hooks_of(model))
        train(model, sgd(model), batches(5), lambda loss: seen.append(hooks_of(model)))
        assert watch.running
    assert [count > 0 for count in seen] == [True, False, False, True, False, False]
    assert hooks_of(model) == 0


def test_only_the_first_training_call_of_a_step_counts():
    model, optimizer = stack(), None
    (x, y), (other, _) = batches(2)
    optimizer = sgd(model)
    with bn.watch(model, every=1, quantities="mean", layers="0") as seen:
        model.eval()
        model(100 * other)
        model.train()
        with torch.no_grad():
            model(100 * other)
        expected = model[0](x).mean().item()
        F.cross_entropy(model(x), y).backward()
        F.cross_entropy(model(100 * other), y).backward()
        optimizer.step()
    records = of(seen.records, "mean", "0")
    assert [m.samples[0] for m in records] == [pytest.approx(expected, abs=1e-6)]


def test_accumulated_gradients_are_measured_together():
    model = nn.Linear(6, 3)
    optimizer = sgd(model)
    with bn.watch(model, quantities="gradient norm") as seen:
        for x, y in batches(3):
            F.cross_entropy(model(x), y).backward()
        expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
        optimizer.step()
    assert of(seen.records, "gradient norm")[0].samples[0] == pytest.approx(expected, rel=1e-6)


def test_a_closure_is_called_inside_the_step():
    model = stack()
    optimizer = sgd(model)
    norms, grads = [], []
    with bn.watch(model, every=2) as seen:
        for x, y in batches(4):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                norms.append(model[0].weight.norm().item())
                grads.append(torch.cat([model[0].weight.grad.flatten(), model[0].bias.grad]).norm().item())
                return loss

            optimizer.step(closure)
    assert [m.setting["step"] for m in of(seen.records, "mean", "1")] == [0, 2]
    assert [m.samples[0] for m in of(seen.records, "weight norm", "0")] == pytest.approx(norms[::2], rel=1e-6)
    assert [m.samples[0] for m in of(seen.records, "gradient norm", "0")] == pytest.approx(grads[::2], rel=1e-5)


def test_a_loop_without_an_optimiser_says_when_it_steps():
    model = stack()
    with bn.watch(model, every=2) as seen:
        for x, y in batches(5):
            loss = F.cross_entropy(model(x), y)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
                p.data -= 0.1 * g
            seen.step()
    assert [m.setting["step"] for m in of(seen.records, "mean", "1")] == [0, 2, 4]
    assert of(seen.records, "effective learning rate") == []


def test_steps_that_nobody_sees_are_warned_of():
    model = stack()
    seen = bn.watch(model)
    seen.__enter__()
    for x, _ in batches(3):
        model(x)
    with pytest.warns(bn.BatchNormWarning, match="called 3 times and no step of an optimiser was seen"):
        seen.__exit__(None, None, None)
    assert {m.setting["step"] for m in seen.records.measurements} == {0}


def test_another_models_optimiser_does_not_count():
    model, other = stack(), stack()
    with bn.watch(model, every=1, quantities="mean", layers="0") as seen:
        train(other, sgd(other), batches(3))
        assert seen.steps == 0
        train(model, sgd(model), batches(1))
        assert seen.steps == 1
    assert len(of(seen.records, "mean")) == 1


def test_of_several_optimisers_the_first_counts_and_each_has_its_rate():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[1].parameters(), lr=0.2)
    norms = [layer.weight.norm().item() for layer in model]
    with bn.watch(model, [first, second], every=1) as seen:
        x, y = batches(1)[0]
        F.cross_entropy(model(x), y).backward()
        first.step()
        second.step()
    assert seen.steps == 1
    rates = [m.samples[0] for m in of(seen.records, "effective learning rate")]
    assert rates == pytest.approx([0.1 / norms[0] ** 2, 0.2 / norms[1] ** 2], rel=1e-6)


def test_recomputed_layers_are_seen_once():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = stack()

        def forward(self, x):
            return checkpoint(self.net, x, use_reentrant=False)

    seen = watched(Checkpointed(), steps=2, every=1)
    assert [m.setting["layer"] for m in of(seen.records, "saturation")] == ["net.2", "net.5"] * 2


def test_parts_that_are_called_by_themselves():
    model = nn.ModuleDict({"encoder": stack(), "unused": nn.Linear(1, 1)})
    optimizer = sgd(model)
    with bn.watch(model, every=1) as seen:
        for x, y in batches(2):
            with torch.no_grad():
                model["encoder"](x)
            optimizer.zero_grad()
            F.cross_entropy(checkpoint(model["encoder"], x, use_reentrant=False), y).backward()
            optimizer.step()
    assert [m.setting["layer"] for m in of(seen.records, "saturation")] == ["encoder.2", "encoder.5"] * 2


def test_a_call_that_raised_may_be_tried_again():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.fails = stack(), True

        def forward(self, x):
            y = self.net(x)
            if self.fails:
                raise RuntimeError("out of memory")
            return y

    model = Failing()
    with bn.watch(model, every=1, quantities="mean") as seen:
        with pytest.raises(RuntimeError, match="out of memory"):
            model(100 * batches(1)[0][0])
        model.fails = False
        expected = model.net[0](batches(1)[0][0]).mean().item()
        train(model, sgd(model), batches(1))
    assert layers_of(seen) == ["net.1", "net.2", "net.4", "net.5", "net.6"]
    assert of(seen.records, "mean", "net.1")[0].samples[0] == pytest.approx(expected, abs=1e-6)


def test_replicas_are_not_seen():
    model = nn.Linear(6, 3)
    with bn.watch(model, every=1) as seen:
        replica = model._replicate_for_data_parallel()
        replica.weight, replica.bias = (p.detach().clone().requires_grad_() for p in model.parameters())
        replica(100 * batches(1)[0][0])
        for x, _ in batches(2):
            model(x)
        seen.step()
    assert [m.setting["layer"] for m in of(seen.records, "mean")] == ["Linear"]
    assert of(seen.records, "percentiles")[0].samples[2] < 5


def test_a_run_goes_on_from_where_it_was():
    model = stack()
    with bn.watch(model, every=50, start=95, quantities="mean", layers="0") as seen:
        train(model, sgd(model), batches(12))
        seen.go_to(149)
        train(model, sgd(model), batches(3))
    assert [m.setting["step"] for m in of(seen.records, "mean")] == [100]
    assert seen.steps == 149  # the second optimiser is another one: the first that was found counts


def test_go_to():
    model = stack()
    optimizer = sgd(model)
    with bn.watch(model, optimizer, every=50, quantities="mean", layers="0") as seen:
        seen.go_to(149)
        train(model, optimizer, batches(3))
    assert [m.setting["step"] for m in of(seen.records, "mean")] == [150]
