"""Verbs on models as strangers write them: each keeps the function, looked at in float64, or says why it does not."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import batchnorm as bn
from batchnorm.calling import call_with
from batchnorm.nested import fresh, tensors_in
from batchnorm.transforms.verify import verify

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:Please use quant_min"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True"),
]
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
WIDER = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
ROWS = torch.randn(8, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
SEQUENCES = torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


class Block(nn.Module):
    """A convolution or a linear layer, a norm, and a forward that says how they are used."""

    def __init__(self, layer, norm, use, **more):
        super().__init__()
        self.layer, self.norm = layer, norm
        for name, module in more.items():
            setattr(self, name, module)
        self.use = use

    def forward(self, x):
        return self.use(self, x)


@dataclass
class Found:
    logits: torch.Tensor
    hidden: Any = None


def conv(*args, **more):
    return nn.Conv2d(*args or (3, 4, 3), **more)


def sequential(*layers):
    return nn.Sequential(*layers, nn.ReLU())


def hooked(layer, **hooks):
    for name, hook in hooks.items():
        getattr(layer, f"register_forward_{name}")(hook)
    return layer


def pruned(layer):
    return prune.random_unstructured(layer, "weight", 0.5)


def transposed_weights():
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5), nn.BatchNorm1d(5))
    model[0].weight = nn.Parameter(torch.randn(3, 4, 3, 3).transpose(0, 1))
    model[3].weight = nn.Parameter(torch.randn(144, 5).t())
    return model


def tied():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6))
    model[0].weight = model[2].weight
    return model


def lazy():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU())
    model.eval()(torch.zeros(2, 3, 8, 8))
    return model


def quantisation_aware():
    model = nn.Sequential(torch.ao.quantization.QuantStub(), conv(), nn.BatchNorm2d(4), nn.ReLU())
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
    return torch.ao.quantization.prepare_qat(model)


def bn2():
    return nn.BatchNorm2d(4)


MODELS = {
    "nested outputs": (lambda: Block(conv(), bn2(), lambda m, x: {"a": [m.norm(m.layer(x))], "b": None}), IMAGES),
    "a dataclass": (lambda: Block(conv(), bn2(), lambda m, x: Found(m.norm(m.layer(x)).relu())), IMAGES),
    "a block twice": (lambda: Block(conv(4, 4, 3, padding=1), bn2(),
                                    lambda m, x: m.norm(m.layer(m.norm(m.layer(x)).relu()))), WIDER),
    "one norm, two layers": (lambda: Block(conv(), bn2(), lambda m, x: m.norm(m.layer(x)) + m.norm(m.other(x)).relu(),
                                           other=conv()), IMAGES),
    "a norm as a function": (lambda: Block(conv(), bn2(), lambda m, x: F.batch_norm(
        m.layer(x), m.norm.running_mean, m.norm.running_var, m.norm.weight, m.norm.bias, m.training)), IMAGES),
    "forward called by name": (lambda: Block(conv(), bn2(), lambda m, x: m.norm.forward(m.layer.forward(x))), IMAGES),
    "lists and dictionaries": (lambda: Block(nn.ModuleList([conv()]), nn.ModuleDict({"bn": bn2()}),
                                             lambda m, x: m.norm["bn"](m.layer[0](x)).relu()), IMAGES),
    "lazy, run once": (lazy, IMAGES),
    "weight norm": (lambda: sequential(parametrizations.weight_norm(conv()), bn2()), IMAGES),
    "the old weight norm": (lambda: sequential(nn.utils.weight_norm(conv()), bn2()), IMAGES),
    "spectral norm": (lambda: sequential(parametrizations.spectral_norm(conv()), bn2()), IMAGES),
    "the old spectral norm": (lambda: sequential(nn.utils.spectral_norm(conv()), bn2()), IMAGES),
    "pruned": (lambda: sequential(pruned(conv()), bn2()), IMAGES),
    "an orthogonal weight": (lambda: sequential(parametrizations.orthogonal(nn.Linear(6, 6)), nn.BatchNorm1d(6)), ROWS),
    "stubs": (lambda: nn.Sequential(torch.ao.quantization.QuantStub(), conv(), bn2()), IMAGES),
    "DataParallel": (lambda: nn.DataParallel(sequential(conv(), bn2())), IMAGES),
    "complex numbers": (lambda: Block(conv(), bn2(), lambda m, x: torch.fft.rfft2(m.norm(m.layer(x)))), IMAGES),
    "a hook that changes": (lambda: sequential(hooked(conv(), hook=lambda m, a, y: y * 2 + 1), bn2()), IMAGES),
    "a hook before the norm": (lambda: sequential(conv(), hooked(bn2(), pre_hook=lambda m, a: (a[0].abs(),))), IMAGES),
    "a hook after the norm": (lambda: sequential(conv(), hooked(bn2(), hook=lambda m, a, y: y.square())), IMAGES),
    "a weight read elsewhere": (lambda: Block(conv(), bn2(), lambda m, x: (
        m.norm(m.layer(x)), F.conv2d(x, m.layer.weight), m.layer.weight.norm())), IMAGES),
    "a tied weight": (tied, ROWS),
    "gamma read elsewhere": (lambda: Block(conv(), bn2(), lambda m, x: (
        m.norm(m.layer(x)).relu(), m.norm.weight.abs().sum())), IMAGES),
    "momentum None": (lambda: sequential(conv(), nn.BatchNorm2d(4, momentum=None)), IMAGES),
    "no statistics": (lambda: sequential(conv(), nn.BatchNorm2d(4, track_running_stats=False)), IMAGES),
    "no gamma": (lambda: sequential(conv(), nn.BatchNorm2d(4, affine=False)), IMAGES),
    "the axis of a sequence": (lambda: sequential(nn.Linear(6, 6), nn.BatchNorm1d(5)), SEQUENCES),
    "a transpose between": (lambda: Block(nn.Linear(6, 7), nn.BatchNorm1d(7), lambda m, x: m.norm(
        m.layer(x).transpose(1, 2))), SEQUENCES),
    "transposed convolution": (lambda: sequential(nn.ConvTranspose2d(
        4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), nn.BatchNorm2d(6)), WIDER),
    "before a transposed one": (lambda: nn.Sequential(bn2(), nn.ConvTranspose2d(
        4, 6, 3, stride=2, padding=1, output_padding=1, groups=2)), WIDER),
    "reflected": (lambda: sequential(conv(3, 4, 3, padding=1, padding_mode="reflect"), bn2()), IMAGES),
    "before a reflected one": (lambda: nn.Sequential(bn2(), conv(4, 4, 3, padding=1, padding_mode="reflect")), WIDER),
    "before a circular one": (lambda: nn.Sequential(bn2(), conv(4, 4, 3, padding=1, padding_mode="circular")), WIDER),
    "before a padded one": (lambda: nn.Sequential(bn2(), conv(4, 4, 3, padding=1)), WIDER),
    "weights not contiguous": (transposed_weights, IMAGES),
    "checkpointed": (lambda: Block(conv(), bn2(), lambda m, x: checkpoint(
        lambda t: F.relu(m.norm(m.layer(t))), x, use_reentrant=False)), IMAGES),
    "checkpointed, the old way": (lambda: Block(conv(), bn2(), lambda m, x: checkpoint(
        lambda t: F.relu(m.norm(m.layer(t))), x, use_reentrant=True)), IMAGES),
    "chunks": (lambda: Block(conv(3, 8, 3), bn2(), lambda m, x: [n(t) for n, t in zip(
        (m.norm, m.other), m.layer(x).chunk(2, 1), strict=True)], other=bn2()), IMAGES),
    "two norms in a row": (lambda: sequential(conv(), bn2(), bn2()), IMAGES),
    "always random": (lambda: Block(conv(), bn2(), lambda m, x: F.dropout(m.norm(m.layer(x)), 0.5, True)), IMAGES),
    "named arguments": (lambda: Block(conv(), bn2(), lambda m, x: m.norm(m.layer(x)).relu()), {"x": IMAGES}),
}  # fmt: skip
VERBS = {
    "fold": bn.fold,
    "fuse": bn.fuse,
    "drop_bias": bn.drop_bias,
    "freeze": lambda model, example: bn.freeze(model),
    "none": lambda model, example: bn.convert(model, "none", example=example),
}
# What a verb may say in the place of doing it.
SAID = {
    ("gamma read elsewhere", "none"): "would differ",
    ("a norm as a function", "none"): "has no attribute 'running_mean'",
}


def made(name):
    torch.manual_seed(0)
    make, example = MODELS[name]
    model = make().double()
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is not None:
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.3, 3)
            for parameter in layer.parameters():
                nn.init.normal_(parameter)
    return model, example


def outputs(model, example):
    torch.manual_seed(0)
    with torch.no_grad():
        return tensors_in(call_with(model.eval(), fresh(example)))


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", MODELS)
def test_the_function_is_kept_or_a_sentence_says_why(name, verb):
    model, example = made(name)
    state = copy.deepcopy(model.state_dict())
    if (name, verb) in SAID:
        with pytest.raises(bn.NotEquivalent, match=SAID[name, verb]):
            VERBS[verb](model, example)
        return
    if (name, verb) == ("no statistics", "freeze"):  # the only BN layer cannot be constant
        with pytest.raises(bn.BatchNormError, match=r"cannot be frozen .*it has no running statistics"):
            VERBS[verb](model, example)
        return
    changed, report = VERBS[verb](model, example)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    for old, new in zip(outputs(model, example), outputs(changed, example), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-9, atol=1e-9)
    assert report.changes or report.left
    if verb in ("fold", "fuse"):
        assert report.certificate.relative <= 1e-10


@pytest.mark.parametrize(
    ("name", "verb", "words"),
    [
        ("a hook that changes", "fold", "0 has hooks, which would see other numbers"),
        ("a hook that changes", "drop_bias", "it has hooks, which would see other numbers"),
        ("before a padded one", "fold", "pad"),
        ("a weight read elsewhere", "fold", "the weight of layer is also read by conv2d"),
        ("forward called by name", "fold", "batch_norm (a function) reads its numbers, without a call of it"),
        ("the axis of a sequence", "drop_bias", "axis"),
    ],
)
def test_the_reason_is_in_the_report(name, verb, words):
    _, report = VERBS[verb](*made(name))
    assert any(words in reason for reason in report.left.values()), report.left


@pytest.mark.parametrize("name", ["the old weight norm", "pruned"])
def test_a_weight_that_is_computed_before_each_run_still_learns_in_a_copy(name):
    model, example = made(name)
    changed, _ = bn.drop_bias(model, example)
    before = {key: value.clone() for key, value in changed.named_parameters()}
    assert set(before) == {key for key, _ in model.named_parameters()} - {"0.bias"}
    changed.train()(example).square().mean().backward()
    torch.optim.SGD(changed.parameters(), lr=0.1).step()
    assert all(bool((value != before[key]).any()) for key, value in changed.named_parameters() if key.startswith("0."))


@pytest.mark.parametrize("verb", [bn.fold, bn.fuse])
def test_a_norm_that_a_function_computes_is_not_out_of_reach(verb):
    model, example = made("a norm as a function")
    _, report = verb(model.eval(), example)
    assert "batch_norm (a function) reads its numbers, without a call of it" in report.left["norm"]


def test_an_observer_that_grows_is_put_back():
    model, x = quantisation_aware(), IMAGES.float()
    state = copy.deepcopy(model.state_dict())
    graph = bn.trace(model, x)
    assert "2" in [call.name for call in graph.calls]
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert model[1].weight_fake_quant.activation_post_process.min_val.shape == (0,)


def test_under_autocast_the_certificate_allows_what_its_numbers_do():
    def use(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m.norm(m.layer(x)).float()

    torch.manual_seed(0)
    model, x = Block(conv(), bn2(), use), IMAGES.float()
    model.norm.running_mean.normal_()
    model.norm.running_var.uniform_(0.3, 3)
    for verb in ("fold", "drop_bias"):
        _, report = VERBS[verb](model, x)
        assert report.certificate.tolerance == 5e-2
    with torch.no_grad():
        wrong = copy.deepcopy(model)
        wrong.layer.weight.mul_(1.2)
    with pytest.raises(bn.NotEquivalent):
        verify(model.eval(), wrong.eval(), x, verb="test")


def test_a_model_on_the_meta_device_has_no_numbers_yet():
    with pytest.raises(bn.BatchNormError, match=r"fold: 0\.weight is on the meta device, without numbers; load"):
        bn.fold(sequential(conv(), bn2()).to("meta"), IMAGES)


def test_export_of_what_is_always_random(tmp_path):
    model, x = made("always random")
    bn.export(model.eval(), x, tmp_path / "model.pt2")
    assert (tmp_path / "model.pt2").exists()


@pytest.mark.parametrize(
    ("make", "example", "words"),
    [
        (
            lambda: sequential(parametrizations.weight_norm(conv())),
            IMAGES,
            "its weight is computed by modules inside",
        ),
        (lambda: sequential(conv()), IMAGES[0], "without a batch: give an example of several samples"),
    ],
)
def test_where_insert_has_no_place(make, example, words):
    with pytest.raises(bn.BatchNormError, match=f"^insert: there is no place for a norm .*{words}"):
        bn.insert(make().double(), example)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sequential(nn.utils.weight_norm(conv())),
        lambda: sequential(nn.utils.spectral_norm(conv())),
        lambda: sequential(pruned(conv())),
        lambda: sequential(hooked(conv(), hook=lambda m, a, y: y * 2 + 1)),
        lambda: Block(conv(), nn.Identity(), lambda m, x: (m.layer(x).relu(), m.layer.bias.sum())),
        lambda: Block(conv(), nn.Identity(), lambda m, x: checkpoint(
            lambda t: F.relu(m.layer(t)), x, use_reentrant=False)),
        lambda: nn.DataParallel(sequential(conv())),
    ],
)  # fmt: skip
def test_insert_keeps_the_function(make):
    torch.manual_seed(0)
    model = make().double()
    normed, report = bn.insert(model, IMAGES, preserve=[IMAGES])
    assert len(report.paths) == 1
    for old, new in zip(outputs(model, IMAGES), outputs(normed, IMAGES), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-12, atol=1e-12)


def test_one_value_has_no_variance():
    with pytest.raises(bn.BatchNormError, match="insert: 0: the batches of preserve= give one value per channel"):
        bn.insert(sequential(nn.Linear(6, 4)).double(), ROWS, preserve=[ROWS[:1]])
