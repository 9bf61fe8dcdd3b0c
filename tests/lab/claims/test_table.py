"""Every claim of the table is whole, and has a test of its rule."""

from pathlib import Path

import pytest

from batchnorm.errors import BatchNormError
from batchnorm.lab.claims import NAMES, all_claims, claim_named
from batchnorm.lab.judge.claim import BUDGETS, QUESTIONS, not_run
from batchnorm.lab.judge.command import card
from batchnorm.lab.judge.measure import ClaimState, state_of
from batchnorm.lab.runs.store import Store

CLAIMS = Path(claim_named.__code__.co_filename).parent


def test_every_file_is_in_the_table():
    files = {path.stem.replace("_", "-") for path in CLAIMS.glob("*.py")} - {"--init--"}
    assert files == set(NAMES)
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("name", NAMES)
def test_a_claim_is_whole(name, capsys):
    claim = claim_named(name)
    assert claim.name == name
    assert claim.question in QUESTIONS
    assert claim.statement.endswith(".")
    assert len(claim.title.split()) <= 14
    for budget in BUDGETS:
        runs = claim.runs(budget)
        assert len({run.key for run in runs}) == len(runs)
        assert bool(runs) != bool(claim.command)  # what has no parts says what carries it out
    card(ClaimState(claim, "", (), not_run(claim), 0.0))
    text = capsys.readouterr().out
    assert claim.rule in text
    assert f"run it: {claim.how_to_run}" in text


@pytest.mark.parametrize("name", [claim.name for claim in all_claims() if not claim.command])
def test_a_claim_has_a_test_of_its_rule(name):
    test = Path(__file__).parent / f"test_claim_{name.replace('-', '_')}.py"
    assert "check_rule(" in test.read_text(encoding="utf-8")


def test_the_claims_are_in_the_order_of_the_table():
    assert tuple(claim.name for claim in all_claims()) == NAMES


def test_a_claim_without_parts_is_never_judged(tmp_path):
    claim = claim_named("inception-imagenet")
    state = state_of(claim, Store(tmp_path))
    assert (state.budget, state.judgement.outcome) == ("", "not judged")
    with pytest.raises(BatchNormError, match="--set variant=inception"):
        claim.measure({}, None)
