import math

import pytest
import torch

from batchnorm.lab.curves import Member
from batchnorm.lab.data import digits
from batchnorm.lab.networks.inception import Inception, our_norm, torch_norm
from batchnorm.lab.train import Progress, batches, member_losses, train

DATA = digits.load()


def stack_of(members, norm=None, dtype=torch.float32):
    return Inception([member.seed for member in members], norm=norm).to(dtype)


def in_float64():
    wide = {name: getattr(DATA, name).astype("float64") for name in ("train_images", "validation_images")}
    return digits.Split(wide["train_images"], DATA.train_labels, wide["validation_images"], DATA.validation_labels)


def member_state(network, index):
    return [tensor.view(network.members, -1)[index] for tensor in network.state_dict().values() if tensor.dim()]


@pytest.mark.parametrize("norm", [None, torch_norm, our_norm])
def test_a_member_trained_in_a_stack_equals_the_same_member_trained_alone(norm):
    members = [Member(0.05, 1), Member(0.1, 2), Member(0.2, 1)]
    data = in_float64()
    stack = stack_of(members, norm, torch.float64)
    together = train(stack, members, data, steps=6, every=3)
    for index, member in enumerate(members):
        network = stack_of([member], norm, torch.float64)
        (alone,) = train(network, [member], data, steps=6, every=3)
        assert alone.accuracy == together[index].accuracy
        assert alone.loss == pytest.approx(together[index].loss, rel=1e-9)
        for mine, theirs in zip(member_state(network, 0), member_state(stack, index), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("norm", [None, torch_norm])
def test_a_neighbour_that_diverges_changes_no_bit_of_a_member(norm):
    calm, wild = Member(0.05, 1), Member(1e30, 2)
    quiet, noisy = stack_of([calm, calm], norm), stack_of([calm, wild], norm)
    expected = train(quiet, [calm, calm], DATA, steps=6, every=2)[0]
    found, lost = train(noisy, [calm, wild], DATA, steps=6, every=2)
    assert found == expected
    for mine, theirs in zip(member_state(quiet, 0), member_state(noisy, 0), strict=True):
        assert torch.equal(mine, theirs)
    assert lost.diverged_at in (2, 3)
    assert math.isnan(lost.accuracy[-1])
    assert math.isnan(lost.loss[-1])
    assert all(torch.isfinite(tensor).all() for tensor in noisy.state_dict().values())


def test_a_neighbour_that_diverges_leaves_members_with_our_layers_alone():
    """Our kernel refuses a batch that is not finite as a whole; the others' statistics are then updated in float64."""
    calm, wild = Member(0.05, 1), Member(1e30, 2)
    quiet, noisy = stack_of([calm, calm], our_norm), stack_of([calm, wild], our_norm)
    expected = train(quiet, [calm, calm], DATA, steps=6, every=2)[0]
    found, lost = train(noisy, [calm, wild], DATA, steps=6, every=2)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    for mine, theirs in zip(member_state(quiet, 0), member_state(noisy, 0), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert lost.diverged_at in (2, 3)
    assert all(torch.isfinite(tensor).all() for tensor in noisy.state_dict().values())


def test_the_rate_of_each_member_is_that_of_torchs_sgd():
    members = [Member(0.03, 5), Member(0.3, 6)]
    data = in_float64()
    stack = stack_of(members, torch_norm, torch.float64)
    train(stack, members, data, steps=4, batch_size=16)
    for index, member in enumerate(members):
        network = stack_of([member], torch_norm, torch.float64)
        optimizer = torch.optim.SGD(network.parameters(), lr=member.learning_rate)
        order = batches(member.seed, len(data.train_labels), 16)
        for _ in range(4):
            chosen = next(order)
            scores = network(torch.from_numpy(data.train_images)[chosen])[:, 0]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(scores, torch.from_numpy(data.train_labels)[chosen]).backward()
            optimizer.step()
        for mine, theirs in zip(member_state(network, 0), member_state(stack, index), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_training_learns_repeats_itself_and_leaves_the_global_stream_alone():
    members = [Member(0.3, 0)]
    before = torch.get_rng_state()
    (first,) = train(stack_of(members, torch_norm), members, DATA, steps=40, every=20)
    (again,) = train(stack_of(members, torch_norm), members, DATA, steps=40, every=20)
    assert first == again
    assert first.accuracy[-1] > 0.5
    assert first.loss[1] < first.loss[0]
    assert torch.equal(before, torch.get_rng_state())


def test_evaluation_uses_running_averages_and_changes_nothing():
    members = [Member(0.3, 0)]
    often, seldom = stack_of(members, torch_norm), stack_of(members, torch_norm)
    train(often, members, DATA, steps=4, every=1)
    train(seldom, members, DATA, steps=4, every=4)
    for mine, theirs in zip(often.state_dict().values(), seldom.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert often.training


def test_the_last_step_is_always_evaluated_and_every_step_is_watched():
    seen = []
    members = [Member(0.1, 0)]
    (curve,) = train(stack_of(members), members, DATA, steps=5, every=2, watch=seen.append)
    assert curve.steps == (2, 4, 5)
    assert [progress.step for progress in seen] == [1, 2, 3, 4, 5]
    assert seen[-1] == Progress(5, max(curve.accuracy))


def test_an_epoch_uses_each_example_at_most_once_and_the_next_has_another_order():
    order = batches(seed=3, examples=100, size=32)
    epoch = torch.cat([next(order) for _ in range(3)])
    following = torch.cat([next(order) for _ in range(3)])
    assert len(epoch.unique()) == 96
    assert not torch.equal(epoch, following)
    assert torch.equal(next(batches(3, 100, 32)), epoch[:32])
    assert not torch.equal(next(batches(4, 100, 32)), epoch[:32])


def test_losses_are_kept_apart():
    scores = torch.zeros(4, 2, 10)
    scores[:, 1] = math.nan
    labels = torch.zeros(4, 2, dtype=torch.int64)
    first, second = member_losses(scores, labels)
    assert first.item() == pytest.approx(math.log(10))
    assert math.isnan(second)
