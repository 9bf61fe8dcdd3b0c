"""Many copies trained side by side are the copies trained alone: curves, parameters and buffers."""

import math

import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.errors import BatchNormError
from batchnorm.lab.curves import Member
from batchnorm.lab.data import digits
from batchnorm.lab.data.examples import Examples
from batchnorm.lab.ensemble import Copies, Single
from batchnorm.lab.networks.residual import Residual, ResidualCopies
from batchnorm.lab.trainer import train, train_apart

MEMBERS = [
    Member(0.05, 1),
    Member(0.1, 2, momentum=0.9, schedule="cosine"),
    Member(0.2, 1, clip=0.5),
    Member(0.2, 3, schedule="linear"),
]
KINDS = {
    "plain": {"norm": "none"},
    "ours": {},
    "torch": {"norm": "torch"},
    "sigmoid": {"activation": "sigmoid"},
    "skip-init": {"norm": "none", "skip_init": True},
}


@pytest.fixture(autouse=True)
def one_thread():
    """The products are too small to share: on a busy machine, threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def examples(dtype=torch.float64):
    split = digits.load()
    parts = [torch.from_numpy(getattr(split, name)) for name in ("train_images", "train_labels", "validation_images")]
    return Examples(
        parts[0].to(dtype), parts[1], parts[2].to(dtype), torch.from_numpy(split.validation_labels), split.classes
    )


def residual(member, kind, blocks=2):
    return Residual(member.seed, blocks=blocks, width=16, **KINDS[kind])


class Convolutional(nn.Module):
    """What a user may bring: convolutions, a frozen and an unused parameter, a layer used twice."""

    def __init__(self, seed, norm=bn.BatchNorm2d):
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.stem, self.body = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, padding=1, bias=False)
            self.norm, self.read_out = norm(4), nn.Linear(4, 10)
        self.stem.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x = self.body(self.body(x)).relu()
        return self.read_out(x.mean((2, 3)))


def assert_same_as_alone(stack, make, data, members=MEMBERS, **amounts):
    together = train(stack, members, data, **amounts)
    for index, member in enumerate(members):
        network = make(member)
        (alone,) = train(Single(network), [member], data, **amounts)
        assert alone.accuracy == together[index].accuracy
        assert alone.loss == pytest.approx(together[index].loss, rel=1e-5)
        state = stack.state(index)
        assert state.keys() == network.state_dict().keys()
        for name, theirs in network.state_dict().items():
            torch.testing.assert_close(state[name], theirs, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_the_networks_trained_alone(kind):
    def make(member):
        return residual(member, kind).double()

    assert_same_as_alone(Copies([make(m) for m in MEMBERS]), make, examples(), steps=9, every=4)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "torch"])
def test_copies_written_by_hand_are_the_networks_trained_alone(kind):
    def make(member):
        return residual(member, kind).double()

    assert_same_as_alone(ResidualCopies([make(m) for m in MEMBERS]), make, examples(), steps=9, every=4)


@pytest.mark.parametrize("norm", [bn.BatchNorm2d, nn.BatchNorm2d])
def test_any_module_can_be_copied(norm):
    def make(member):
        return Convolutional(member.seed, norm).double()

    assert_same_as_alone(Copies([make(m) for m in MEMBERS]), make, examples(), steps=5, every=2)


def test_a_network_alone_is_trained_as_torchs_sgd_trains_it():
    member, data = Member(0.1, 4, momentum=0.9, clip=0.7), examples()
    stack = Copies([residual(member, "ours").double()])
    train(stack, [member], data, steps=5, batch_size=16)
    network = residual(member, "ours").double()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    from batchnorm.lab.train import batches

    order = batches(member.seed, len(data.train_labels), 16)
    for _ in range(5):
        chosen = next(order)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(data.train_inputs[chosen]), data.train_labels[chosen]).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 0.7)
        optimizer.step()
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(stack.state(0)[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stack_of", [Copies, ResidualCopies])
@pytest.mark.parametrize("kind", ["plain", "ours"])
def test_a_copy_that_diverges_leaves_the_others_alone(stack_of, kind):
    """Its neighbours keep their parameters and their running statistics, also in the step in which it diverges."""
    data = examples()
    calm, wild = [Member(0.05, 1), Member(0.1, 2)], Member(1e150, 3)
    expected, found = (
        stack_of([residual(m, kind).double() for m in members]) for members in (calm, [calm[0], wild, calm[1]])
    )
    alone = train(expected, calm, data, steps=8, every=2)
    first, lost, second = train(found, [calm[0], wild, calm[1]], data, steps=8, every=2)
    assert [first, second] == alone
    for index in range(2):
        for name, tensor in expected.state(index).items():
            torch.testing.assert_close(found.state(index)[name], tensor, rtol=0, atol=1e-10)
    assert lost.diverged_at in range(2, 6)
    assert math.isnan(lost.accuracy[-1])
    assert math.isnan(lost.loss[-1])
    assert len(lost.accuracy) == 4


def test_when_all_copies_have_diverged_the_curves_still_have_their_length():
    members = [Member(1e30, 1), Member(1e30, 2)]
    seen = []
    curves = train(
        Copies([residual(m, "plain") for m in members]),
        members,
        examples(torch.float32),
        steps=9,
        every=3,
        watch=seen.append,
    )
    assert all(curve.diverged_at is not None for curve in curves)
    assert all(curve.steps == (3, 6, 9) and math.isnan(curve.accuracy[-1]) for curve in curves)
    assert [progress.step for progress in seen] == list(range(1, 10))


def test_it_learns_repeats_itself_and_leaves_the_global_stream_alone():
    before, data = torch.get_rng_state(), examples(torch.float32)
    members = [Member(0.3, 0), Member(0.3, 1)]
    runs = [
        train(ResidualCopies([residual(m, "ours") for m in members]), members, data, steps=60, every=20)
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert min(curve.accuracy[-1] for curve in runs[0]) > 0.5
    assert torch.equal(before, torch.get_rng_state())


def test_weights_are_the_same_whatever_the_norm():
    plain, ours = (Residual(7, blocks=2, norm=norm) for norm in ("none", "ours"))
    for one, other in zip(plain.linears, ours.linears, strict=True):
        assert torch.equal(one.weight, other.weight)
    assert ours.linears[0].bias is None
    wide = Residual(7, blocks=1, width=400)
    assert wide.linears[1].weight.std().item() == pytest.approx(math.sqrt(2 / 400), rel=0.02)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"norm": "mine"}, "there is no norm 'mine'; choose one of ours, torch, none"),
        ({"activation": "cubic"}, "there is no activation 'cubic'; choose one of relu, sigmoid"),
    ],
)
def test_bad_networks_are_refused(options, sentence):
    with pytest.raises(BatchNormError) as caught:
        Residual(0, blocks=1, **options)
    assert str(caught.value) == sentence


def test_more_examples_a_batch_than_there_are_is_refused():
    members = [Member(0.1, 0)]
    with pytest.raises(BatchNormError, match="batch size is 5000 but there are 1347 examples"):
        train(Copies([residual(members[0], "ours")]), members, examples(torch.float32), steps=1, batch_size=5000)


def test_networks_trained_apart_are_the_copies_and_progress_is_their_mean():
    data, members, seen = examples(torch.float32), MEMBERS[:2], []
    amounts = {"steps": 6, "batch_size": 16, "every": 3}
    together = train(Copies([residual(member, "ours") for member in members]), members, data, **amounts)
    apart = train_apart([residual(member, "ours") for member in members], members, data, watch=seen.append, **amounts)
    for one, other in zip(apart, together, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.accuracy == pytest.approx(other.accuracy, abs=0.01)
    assert [progress.step for progress in seen] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
    best = [round(progress.best_accuracy, 5) for progress in seen]
    assert best == sorted(best)
    assert best[-1] == pytest.approx(max(max(curve.accuracy) for curve in apart), abs=1e-5)
