"""The certificate: what counts as equal, and what it says when it is not."""

import copy
import math

import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.calling import call_with
from batchnorm.errors import NotEquivalent
from batchnorm.records import Certificate, Report
from batchnorm.transforms.gradients import limit_in_float64, step
from batchnorm.transforms.outputs import difference, like
from batchnorm.transforms.verify import verify

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


class Give(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.fc = function, nn.Linear(3, 2)

    def forward(self, x):
        return self.function(x)


def test_difference_of_numbers():
    one = torch.tensor
    assert difference([one([1.0, 4.0])], [one([1.0, 3.0])]) == (1.0, 0.25)
    assert difference([one([0.0])], [one([0.0])]) == (0.0, 0.0)
    assert difference([one([0.0])], [one([1e-9])])[1] == math.inf
    assert difference([one([math.nan, math.inf, 1.0])], [one([math.nan, math.inf, 1.0])]) == (0.0, 0.0)
    assert difference([one([1.0])], [one([math.nan])])[1] == math.inf
    assert difference([one([math.inf, 1.0])], [one([-math.inf, 1.0])])[1] == math.inf
    assert difference([torch.ones(0)], [torch.ones(0)]) == (0.0, 0.0)
    assert difference([one([1, 2, 3, 4])], [one([1, 2, 9, 4])]) == (6.0, 0.25)
    assert difference([one([True, False])], [one([True, True])]) == (1.0, 0.5)
    assert difference([one([3 + 4j])], [one([3 + 2j])]) == (2.0, 0.5)
    assert difference([one([2.0]), one([1.0])], [one([2.0]), one([1.5])]) == (0.5, 0.5)


def test_each_output_counts_by_its_own_size():
    big, small = torch.tensor([1e6]), torch.tensor([1.0])
    assert difference([big, small], [big, small + 0.5])[1] == 0.5


def test_random_inputs_are_like_the_example():
    example = {"x": torch.randn(50, 40) * 3 + 7, "i": torch.arange(5), "s": torch.tensor(2.0), "e": torch.ones(0)}
    drawn = like(example, 1)
    assert not torch.equal(drawn["x"], example["x"])
    assert abs(float(drawn["x"].mean()) - 7) < 0.2
    assert abs(float(drawn["x"].std()) - 3) < 0.2
    assert torch.equal(drawn["i"], example["i"])
    assert torch.equal(like(example, 1)["x"], drawn["x"])
    assert not torch.equal(like(example, 2)["x"], drawn["x"])
    layout = torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert like(layout, 0).is_contiguous(memory_format=torch.channels_last)
    assert float(like(torch.full((400,), 5.0), 0).std()) > 0.5


def test_the_tolerance_is_that_of_the_coarsest_numbers():
    for dtype, allowed in ((torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        layer = nn.Linear(3, 2, dtype=dtype)
        assert verify(layer, layer, X.to(dtype), verb="none").tolerance == allowed
    wide = nn.Sequential(nn.Linear(3, 2), Give(lambda x: x.double()))
    assert verify(wide, wide, X, verb="none").tolerance == 1e-4


@pytest.mark.parametrize(("off", "fits"), [(1e-6, True), (1e-2, False)])
def test_over_the_tolerance(off, fits):
    a, b = Give(lambda x: x), Give(lambda x: x * (1 + off))
    if fits:
        certificate = verify(a, b, X, verb="none")
        assert 0 < certificate.relative < 1e-4
        assert certificate.inputs == 3
        return
    with pytest.raises(bn.NotEquivalent, match=r"none: the outputs would differ by .*allowed: 0.0001"):
        verify(a, b, X, verb="none")


def test_a_difference_that_only_random_inputs_show():
    a, b = Give(lambda x: x), Give(lambda x: x if torch.equal(x, X) else x * 2)
    assert verify(a, b, X, verb="none", more=0).absolute == 0.0
    with pytest.raises(bn.NotEquivalent):
        verify(a, b, X, verb="none")


def test_the_first_module_that_parts_is_named():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))

    a, b = make(), make()
    nn.init.ones_(b[2].bias)
    with pytest.raises(bn.NotEquivalent, match="they part at 2;"):
        verify(a, b, X, verb="none")
    with pytest.raises(bn.NotEquivalent, match="they part at 3;"):
        verify(a, b, X, verb="none", unchanged=lambda path: path != "2")
    assert not any(m._forward_hooks for m in [*a.modules(), *b.modules()])


def test_another_shape_or_kind():
    with pytest.raises(bn.NotEquivalent, match="instead of"):
        verify(Give(lambda x: x), Give(lambda x: x.double()), X, verb="none")
    with pytest.raises(bn.NotEquivalent, match="instead of"):
        verify(Give(lambda x: x), Give(lambda x: (x, x + 1)), X, verb="none")


def test_a_changed_model_that_raises():
    def broken(x):
        raise AttributeError("gone")

    with pytest.raises(bn.NotEquivalent, match="the changed model raises AttributeError: gone"):
        verify(Give(lambda x: x), Give(broken), X, verb="none")
    with pytest.raises(AttributeError, match=r"^gone$"):
        verify(Give(broken), Give(broken), X, verb="none")


def test_random_inputs_that_the_model_refuses_are_left_out():
    def picky(x):
        if not torch.equal(x, X):
            raise ValueError("not this one")
        return x

    assert verify(Give(picky), Give(picky), X, verb="none").inputs == 1


def test_outputs_that_tell_nothing_are_refused():
    with pytest.raises(bn.BatchNormError, match="returned no tensors"):
        verify(Give(lambda x: "text"), Give(lambda x: "text"), X, verb="none")
    with pytest.raises(bn.BatchNormError, match="NaN or infinite on the example"):
        verify(Give(lambda x: x * math.nan), Give(lambda x: x * math.nan), X, verb="none")


def test_chance_and_memory_are_the_same_for_both():
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3))
    other = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3))
    state = torch.get_rng_state()
    assert verify(model, other, X, verb="none").absolute == 0.0
    assert torch.equal(torch.get_rng_state(), state)
    assert int(model[1].num_batches_tracked) == 0


def test_a_model_that_writes_into_its_input():
    before = X.clone()
    assert verify(Give(lambda x: x.mul_(2)), Give(lambda x: x * 2), X, verb="none").absolute == 0.0
    assert torch.equal(X, before)


def test_the_records():
    certificate = Certificate(0.5, 0.25, 1e-4, 1)
    assert "on 1 input;" in str(certificate)
    assert str(Report((), {}, certificate)).endswith(str(certificate))
    assert '"relative": 0.25' in Report((), {}, certificate).to_json()


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e30])
def test_what_counts_is_the_share_of_the_largest_however_large(size):
    a, near, far = Give(lambda x: x * size), Give(lambda x: x * size * (1 + 1e-6)), Give(lambda x: x * size * 1.01)
    assert 0 < verify(a, near, X, verb="none").relative < 1e-5
    with pytest.raises(bn.NotEquivalent, match=r"\(0.01 of the largest"):
        verify(a, far, X, verb="none")


def test_nan_is_never_equal():
    def first_row(x):
        return torch.cat([x[:1] * math.nan, x[1:]])

    with pytest.raises(bn.BatchNormError, match="NaN or infinite on the example before anything is changed; give an"):
        verify(Give(first_row), Give(first_row), X, verb="none")
    with pytest.raises(bn.NotEquivalent, match="differ by inf"):
        verify(Give(lambda x: x), Give(first_row), X, verb="none")
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()).eval()
    model[1].running_var[0] = -1
    with pytest.raises(bn.BatchNormError, match=r"the first to make them is 1, a BatchNorm1d\)"):
        verify(model, model, X, verb="none")


def test_random_inputs_that_give_nan_are_left_out():
    root = Give(lambda x: torch.sqrt(x))
    positive = X.abs() ** 3 + 0.01
    assert verify(root, root, positive, verb="none").inputs == 1
    assert verify(root, root, positive + 100, verb="none").inputs == 3


class Silent(nn.Module):
    """It returns nothing that would show what its layers do."""

    def __init__(self, end):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.act, self.end = nn.Linear(3, 3), nn.Tanh(), end

    def forward(self, x):
        return self.end(self.act(self.fc(x)))


@pytest.mark.parametrize(
    "end",
    [lambda y: y * 0, lambda y: (y > -9).long(), lambda y: (y * 0, y.shape), lambda y: [{"boxes": y[y > 9]}]],
)
def test_behind_zeros_and_labels_the_layers_are_compared(end):
    a, b = Silent(end), Silent(end)
    certificate = verify(a, b, X, verb="none")
    assert certificate.absolute == 0.0
    assert str(certificate).startswith("the outputs are empty, zeros or labels; layers inside differ by at most 0 ")
    nn.init.ones_(b.fc.bias)
    with pytest.raises(bn.NotEquivalent, match=r"what fc makes would differ by .*, zeros or labels, do not show it"):
        verify(a, b, X, verb="none")
    with pytest.raises(bn.NotEquivalent, match="what act makes would differ"):
        verify(a, b, X, verb="none", unchanged=lambda path: path != "fc")


def test_zeros_all_the_way_are_refused():
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    with pytest.raises(bn.BatchNormError, match="nothing shows whether the function is kept; give an example"):
        verify(nn.Sequential(model), nn.Sequential(model), X, verb="none")


def test_labels_count_by_the_share_that_differs():
    a, b = Give(lambda x: (x, x.argmax(1))), Give(lambda x: (x, x.argmax(1).clamp(max=1)))
    with pytest.raises(bn.NotEquivalent, match="of the largest"):
        verify(a, b, X, verb="none")


def test_a_model_with_a_chance_of_its_own():
    calls = []

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            calls.append(1)  # not in the model, where it would be restored
            return self.fc(x) * len(calls)

    with pytest.raises(bn.BatchNormError, match="none: the model as it is gives something else when it is run again"):
        verify(Noisy(), Noisy().eval(), X, verb="none")


class Chaotic(nn.Module):
    """A network that makes much of little: ``factor`` times what rounding does to its BN layer."""

    def __init__(self, factor, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.conv, self.norm, self.factor = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), factor
        with torch.no_grad():
            self.norm.running_mean.uniform_(-1, 1)
            self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x):
        return torch.sin(self.factor * self.norm(self.conv(x)))


IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2))


def test_outputs_that_rounding_moves_as_far_are_equal():
    report = bn.fold(Chaotic(3e3).eval(), IMAGES)[1]
    assert 1e-4 < report.certificate.relative < 1e-2
    assert report.certificate.what == "outputs, which rounding moves as far,"
    assert bn.fold(Chaotic(1.0).eval(), IMAGES)[1].certificate.what == "outputs"


@pytest.mark.parametrize("factor", [1.0, 3e3])
@pytest.mark.parametrize("name", ["conv.weight", "norm.bias", "norm.running_var"])
def test_a_difference_beyond_rounding_is_none(factor, name):
    before = Chaotic(factor).eval()
    after = copy.deepcopy(before)
    with torch.no_grad():
        after.state_dict()[name].mul_(1.01).add_(1e-3)
    with pytest.raises(NotEquivalent, match=r"the outputs would differ by .*allow more with tolerance= only if"):
        verify(before, after, IMAGES, verb="a test")


def test_where_rounding_is_all_there_is_float64_is_advised():
    model = Chaotic(1e7).eval()
    with pytest.raises(NotEquivalent, match=r"rounding moves them by .*; give model.double\(\), in which they can be"):
        bn.fold(model, IMAGES)
    assert bn.fold(model.double(), IMAGES.double())[1].certificate.relative < 1e-7


def test_a_tolerance_that_was_given_is_kept():
    with pytest.raises(NotEquivalent, match="allowed: 1e-05"):
        bn.fold(Chaotic(3e3).eval(), IMAGES, tolerance=1e-5)


@pytest.mark.parametrize(("apart", "allowed"), [(1e-10, 1e-9), (3e-9, 4e-8), (1e-3, 1e-9)])
def test_in_float64_gradients_may_differ_by_what_rounding_does_there(apart, allowed):
    model, images = Chaotic(1e7).double(), IMAGES.double()
    found = {"gradients of conv.weight": (apart, apart, torch.float64)}
    limit = limit_in_float64(model, images, call_with, step(model, images), found)
    assert allowed / 40 <= limit <= allowed * 40 if apart == 3e-9 else limit == allowed
