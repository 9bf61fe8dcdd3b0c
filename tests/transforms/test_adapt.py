"""``adapt``: statistics and entropy, the exact restore, and the warning about sorted streams."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm import reference
from batchnorm.lab.data import digits
from batchnorm.transforms import adapt as home

CLASSES = pytest.mark.parametrize("cls", [nn.BatchNorm2d, bn.BatchNorm2d], ids=["stock", "ours"])
METHODS = pytest.mark.parametrize("method", ["statistics", "entropy"])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def network(cls=bn.BatchNorm2d):
    model = nn.Sequential(
        cls(16),
        nn.Sequential(nn.ReLU(), nn.Dropout(0.5)),
        nn.Conv2d(16, 16, 1),
        cls(16, momentum=None),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 5),
    )
    with torch.no_grad():
        for layer in (model[0], model[3]):
            layer.weight.uniform_(0.5, 2)
            layer.bias.uniform_(-1, 1)
            layer.running_mean.uniform_(-1, 1)
            layer.running_var.uniform_(0.5, 2)
    model[4].eval()  # one module in another mode than the rest
    model[2].weight.requires_grad_(False)
    for p in model[6].parameters():
        p.grad = torch.ones_like(p)
    model[0].weight.grad = torch.full((16,), 3.0)
    return model


def stream(sizes=(8, 8, 3)):
    return list((torch.randn(sum(sizes), 16, 2, 2) * 3 + 2).split(list(sizes)))


def numbers(tensor):
    return tensor.detach().double().numpy()


def picture(model):
    state = {name: (t.detach().clone(), t.requires_grad) for name, t in model.state_dict(keep_vars=True).items()}
    attributes = [
        {k: v for k, v in vars(m).items() if not k.startswith("_") or k == "_forward_pre_hooks"}
        for m in model.modules()
    ]
    return state, copy.copy(attributes), [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_picture(model, before, but=()):
    state, attributes, grads = picture(model)
    for name, (value, learns) in state.items():
        assert learns == before[0][name][1], name
        assert torch.equal(value, before[0][name][0]) != (name in but), name
    assert attributes == before[1]
    for a, b in zip(grads, before[2], strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


STATISTICS = {f"{i}.running_{what}" for i in (0, 3) for what in ("mean", "var")}
AFFINE = {f"{i}.{what}" for i in (0, 3) for what in ("weight", "bias")}


@CLASSES
@pytest.mark.parametrize("prior", [0, 16])
def test_statistics_against_the_reference(cls, prior, path):
    model, batches = network(cls), stream()
    before = picture(model)
    adapted_model, adapted = bn.adapt(model, batches, prior=prior)
    assert_picture(model, before)
    assert_picture(adapted_model, before, but=STATISTICS)

    inputs = [numbers(b) for b in batches]
    for place in (0, 3):
        layer, old = adapted_model[place], model[place]
        mean, var = reference.merged_statistics(inputs)
        share = 19 / (19 + prior)
        for buffer, kept, new in (
            (layer.running_mean, old.running_mean, mean),
            (layer.running_var, old.running_var, var),
        ):
            expected = (1 - share) * numbers(kept) + share * new
            np.testing.assert_allclose(numbers(buffer), expected, rtol=1e-4, atol=1e-5)
        # What comes to the second layer was normalised by each batch's own moments, without dropout.
        weight, bias = numbers(model[2].weight)[:, :, 0, 0], numbers(model[2].bias)
        gamma, beta = numbers(model[0].weight), numbers(model[0].bias)
        inputs = [
            np.einsum("oc,nchw->nohw", weight, reference.batch_norm_forward(x, gamma, beta, activation="relu").y)
            + bias[:, None, None]
            for x in inputs
        ]
    assert (adapted.batches, adapted.examples) == (3, 19)
    assert adapted.report.paths == ("0", "3")
    assert repr(adapted) == "Adapted(2 layers, 3 batches, 19 examples)"


@CLASSES
def test_one_batch_makes_evaluation_what_batch_statistics_are(cls, path):
    model, (x,) = network(cls), stream((12,))
    better, _ = bn.adapt(model, [x])
    with bn.use_batch_statistics(model.eval()):
        expected = model(x)
    torch.testing.assert_close(better.eval()(x), expected, rtol=1e-4, atol=1e-4)


def entropy_by_hand(model, batches, steps, lr):
    """TENT, written plainly: batch statistics, Adam on gamma and beta."""
    model.eval()
    layers = [m for m in model if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
    optimizer = torch.optim.Adam(parameters, lr=lr)
    inputs, last = [], []
    layers[1].register_forward_pre_hook(lambda _, x: inputs.append(numbers(x[0])))
    for x in batches:
        for _ in range(steps):
            with bn.no_update(model), bn.use_batch_statistics(model):
                p = model(x).softmax(1)
            loss = -(p * p.log()).sum(1).mean()
            optimizer.zero_grad()
            loss.backward(inputs=parameters)
            optimizer.step()
        last.append(inputs[-1])
    return last


@CLASSES
@pytest.mark.parametrize("steps", [1, 3])
def test_entropy_is_tent(cls, steps, path):
    model, batches = network(cls), stream()
    before = picture(model)
    twin = copy.deepcopy(model)
    inputs = entropy_by_hand(twin, batches, steps, 0.02)
    better, adapted = bn.adapt(model, batches, method="entropy", steps=steps, lr=0.02)
    assert_picture(model, before)
    assert_picture(better, before, but=STATISTICS | AFFINE)
    for place in (0, 3):
        torch.testing.assert_close(better[place].weight, twin[place].weight, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(better[place].bias, twin[place].bias, rtol=1e-3, atol=1e-4)
    for place, given in ((0, [numbers(b) for b in batches]), (3, inputs)):
        mean, var = reference.merged_statistics(given)
        np.testing.assert_allclose(numbers(better[place].running_mean), mean, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(numbers(better[place].running_var), var, rtol=1e-3, atol=1e-4)
    assert adapted.examples == 19
    assert {c.what for c in adapted.report.changes} == {"running_mean", "running_var", "weight", "bias"}


def test_entropy_goes_down():
    model, batches = network(), stream((16,))
    with bn.no_update(model), bn.use_batch_statistics(model):
        p = model.eval()(batches[0]).softmax(1)
    before = -(p * p.log()).sum(1).mean()
    better, _ = bn.adapt(model, batches, method="entropy", steps=20, lr=0.02)
    p = better(batches[0]).softmax(1)
    assert -(p * p.log()).sum(1).mean() < before - 0.05


@CLASSES
@METHODS
def test_the_way_back(cls, method, path):
    model = network(cls)
    before = picture(model)
    same, adapted = bn.adapt(model, stream(), method=method, inplace=True)
    assert same is model
    assert_picture(model, before, but=STATISTICS | (AFFINE if method == "entropy" else set()))
    model.eval().requires_grad_(False)
    assert adapted.restore() is model
    assert_picture(model, before)
    copied, adapted = bn.adapt(model, stream(), method=method)
    with adapted as inside:
        assert inside is copied
        assert not torch.equal(copied[0].running_mean, model[0].running_mean)
    assert_picture(copied, before)
    assert_picture(model, before)


@CLASSES
@METHODS
def test_a_batch_that_raises_leaves_the_model_as_it_was(cls, method, path):
    model = network(cls)
    before = picture(model)

    def broken():
        yield stream()[0]
        raise ZeroDivisionError

    for batches, error in (
        (broken(), ZeroDivisionError),
        ([stream()[0], torch.randn(4, 7, 2, 2)], (ValueError, RuntimeError)),
        ([stream()[0], "words"], bn.BatchNormError),
    ):
        with pytest.raises(error):
            bn.adapt(model, batches, method=method, inplace=True)
        assert_picture(model, before)


def test_batches_of_all_kinds():
    model, batches = network(), stream()
    expected = bn.adapt(model, batches)[0].state_dict()
    for kind, forward in (
        ([(b, 1) for b in batches], None),
        ([[b] for b in batches], None),
        (iter(batches), None),
        ([{"image": b} for b in batches], lambda m, b: m(b["image"])),
        (torch.utils.data.DataLoader(torch.cat(batches[:2]), batch_size=8), None),
    ):
        got = bn.adapt(model, kind, forward=forward)[0].state_dict()
        if not isinstance(kind, torch.utils.data.DataLoader):
            for name, tensor in got.items():
                assert torch.equal(tensor, expected[name])


def test_progress_changes_nothing():
    model, batches = network(), stream()
    plain, shown = bn.adapt(model, batches)[0], bn.adapt(model, iter(batches), progress=True)[0]
    assert torch.equal(plain[3].running_var, shown[3].running_var)


def test_what_is_left_alone():
    model = nn.Sequential(
        bn.BatchNorm2d(16),
        bn.freeze(bn.BatchNorm2d(16))[0],
        bn.FrozenBatchNorm(16),
        nn.BatchNorm2d(16, track_running_stats=False),
        nn.ModuleDict({"unused": nn.BatchNorm2d(16)}),
    )
    model[4].forward = lambda x: x
    model[2](stream()[0])
    before = picture(model)
    better, adapted = bn.adapt(model, stream(), method="entropy")
    assert_picture(better, before, but={"0.running_mean", "0.running_var", "0.weight", "0.bias"})
    assert adapted.report.left == {
        "1": "it is frozen",
        "2": "it is frozen",
        "3": "it has no running statistics: it uses each batch's own anyway",
        "4.unused": "these batches did not reach it",
    }


def test_padding_does_not_count(path):
    layer, lengths = bn.MaskedBatchNorm(16), torch.tensor([3, 1, 2, 3])
    batches = [torch.randn(4, 16, 3) for _ in range(3)]
    better, adapted = bn.adapt(layer, batches, forward=lambda m, x: m(x, lengths))
    valid = [numbers(x[i, :, :n].T) for x in batches for i, n in enumerate(lengths)]
    mean, var = reference.merged_statistics(valid)
    np.testing.assert_allclose(numbers(better.running_mean), mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(numbers(better.running_var), var, rtol=1e-4, atol=1e-5)
    assert adapted.sortedness == 0


def test_a_domain_of_its_own(path):
    layer = bn.DomainBatchNorm(16, ("old", "new"))
    layer.domain = "new"
    better, _ = bn.adapt(layer, stream())
    assert torch.equal(better.layer_of("old").running_mean, torch.zeros(16))
    torch.testing.assert_close(better.layer_of("new").running_mean.mean(), torch.tensor(2.0), rtol=0.2, atol=0)


def test_a_bad_batch_does_not_get_in(path):
    batches = stream()
    batches[1][0, 0, 0, 0] = float("inf")
    model = nn.Sequential(bn.BatchNorm2d(16))
    with pytest.warns(bn.BatchNormWarning, match="NaN or infinite"):
        better, _ = bn.adapt(model, batches)
    mean, _ = reference.merged_statistics([numbers(batches[0]), numbers(batches[2])])
    np.testing.assert_allclose(numbers(better[0].running_mean), mean, rtol=1e-4, atol=1e-5)
    with pytest.raises(bn.NonFiniteBatch, match="entropy of batch 2"), pytest.warns(bn.BatchNormWarning):
        bn.adapt(network(), batches, method="entropy")


def images():
    split = digits.load()
    order = np.argsort(split.validation_labels, kind="stable")
    return torch.from_numpy(split.validation_images[order])


def small_network():
    first, second = (nn.Sequential(nn.Linear(64, 64), bn.BatchNorm1d(64), nn.ReLU()) for _ in range(2))
    return nn.Sequential(nn.Flatten(), first, second)


def test_sorted_streams_are_noticed():
    x = images()
    with pytest.warns(
        bn.BatchNormWarning, match=r"% of the spread .* sorted by class: .*; shuffle the stream, or keep"
    ):
        _, adapted = bn.adapt(small_network(), x.split(40))
    assert 0.1 < adapted.sortedness < 1


@pytest.mark.parametrize("size", [8, 40, 150])
def test_shuffled_streams_are_not(size):
    x = images()
    for _ in range(5):
        _, adapted = bn.adapt(small_network(), x[torch.randperm(len(x))].split(size))
        assert adapted.sortedness == 0
    assert bn.adapt(small_network(), [x])[1].sortedness == 0  # one batch cannot show it


def test_sortedness_is_the_intraclass_correlation():
    """Groups of equal size, with a known share of variance between them."""
    site = home._ExampleMoments()
    for _ in range(200):
        site.add(torch.randn(20, 6) + torch.randn(1, 6), None)
    assert site.sortedness() == pytest.approx(0.5, abs=0.05)


MISTAKES = {
    "method": (lambda m, b: bn.adapt(m, b, method="tent"), r"adapt: method is 'tent'; use one of 'statistics'"),
    "prior": (lambda m, b: bn.adapt(m, b, prior=-1), r"prior is -1; use a number of examples"),
    "steps": (lambda m, b: bn.adapt(m, b, method="entropy", steps=0), r"steps is 0; use 1 or more"),
    "lr": (lambda m, b: bn.adapt(m, b, method="entropy", lr=0.0), r"lr is 0.0; use a positive"),
    "no batches": (lambda m, b: bn.adapt(m, []), r"adapt: there are no batches; give at least one"),
    "no layer": (lambda m, b: bn.adapt(nn.ReLU(), b), r"there is no BN layer to adapt; give a model"),
    "all frozen": (lambda m, b: bn.adapt(bn.freeze(m)[0], b), r"no BN layer to adapt \(0 and 1 more: it is frozen"),
    "no affine": (lambda m, b: bn.adapt(nn.BatchNorm2d(16, affine=False), b, method="entropy"), r"no BN layer has"),
    "batch": (lambda m, b: bn.adapt(m, [{"x": b[0], "z": b[0]}]), r"a batch has 'x', and forward of Seq"),
    "output": (lambda m, b: bn.adapt(m, b, method="entropy", forward=lambda m, x: [m(x)]), r"returned a list, not"),
    "scores": (lambda m, b: bn.adapt(m, b, method="entropy", forward=lambda m, x: m(x)[:, 0]), r"of shape \[8\], not"),
    "no gradient": (lambda m, b: bn.adapt(m, b, method="entropy", forward=lambda m, x: m(x).detach()), r"not depend"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_get_a_sentence(mistake):
    model = network()
    before = picture(model)
    act, sentence = MISTAKES[mistake]
    with pytest.raises(bn.BatchNormError, match=sentence):
        act(model, stream())
    assert_picture(model, before)
