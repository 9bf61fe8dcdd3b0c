"""A rank that skips, evaluates, ends or dies is named on the others, with the layer and the step, in time."""

import failure_checks
import pytest

STORIES = {
    "skips": (
        "'two' (SyncBatchNorm, 4 channels)",
        "step 2 (forward)",
        "rank 1 did not arrive",
        "exchange was in 'one'",
    ),
    "evaluates": ("'two' (", "step 2 (forward)", "rank 1 did not arrive: it is in evaluation mode: it ran this layer"),
    "no_backward": (
        "'two' (",
        "step 2 (backward)",
        "rank 1 did not arrive",
        "exchange was in 'two'",
        "failure_checks.py",
    ),
    "dies": ("'two' (", "step 2 (forward)", "rank 1 is gone: process ", " on ", "killed, or out of memory"),
}


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("scenario", STORIES)
def test_the_others_are_told_which_rank_layer_and_step(launched, scenario, rank):
    found, _, output = launched["failures"]
    assert found[rank] is not None, output
    message = found[rank][scenario]["message"]
    for words in STORIES[scenario]:
        assert words in message, message
    blame = [part for part in message.split(";") if "has ended since" not in part]  # as it may after its own error
    assert not [part for part in blame if f"rank {2 - rank} " in part], "a rank that waits as well is not to blame"
    assert found[rank][scenario]["seconds"] < failure_checks.TIMEOUT + 1  # a hang would be there for longer


def test_a_rank_whose_program_ended(launched):
    found, _, output = launched["failures"]
    message = found[0]["ends"]["message"]
    assert "'one' (SyncBatchNorm, 4 channels): step 2 (forward)" in message, output
    assert "rank 2 did not arrive: its program has ended" in message


def test_the_rank_that_strays_is_told_nothing_wrong(launched):
    found, _, _ = launched["failures"]
    assert found[1] == {"skips": None, "evaluates": None, "no_backward": None}


def test_the_store_dies_with_the_rank_that_keeps_it(launched):
    found, _, output = launched["keeper"]
    assert found[1] is not None, output
    assert "step 2 (forward)" in found[1]["message"]  # of this group: a new one counts from its own start
    assert "rank 0 is gone: process " in found[1]["message"]
    assert found[1]["seconds"] < 7


def test_groups_end_in_silence_without_torchrun_too(launched):
    _, _, output = launched["keeper"]
    assert "TCPStore" not in output.split("silence ends here")[0]
