"""The claims as Markdown: every verdict with its figures, and nothing that Markdown takes for a sign."""

from dataclasses import replace

import pytest
from made_states import EIGHT, LESS, claim, state, states

from batchnorm.lab.judge.markdown import plain, to_markdown
from batchnorm.lab.judge.records import to_records

TEXT = to_markdown(to_records(states()), "page.html")


def rows_of(text):
    return [line for line in text.splitlines() if line.startswith(("| ✓", "| ✗", "| ?", "| –"))]


def test_each_claim_has_a_row_with_its_verdict_first():
    verdicts = [(line.split("**")[1], line.split("[")[1].split("]")[0]) for line in rows_of(TEXT)]
    assert verdicts == [
        ("confirmed", "steps"),
        ("refuted", "shift"),
        ("not run", "inception-imagenet"),
        ("inconclusive", "smooth"),
        ("not run", "noise"),
    ]


def test_the_estimate_that_decides_stands_beside_its_threshold():
    (row,) = (line for line in rows_of(TEXT) if "[shift]" in line)
    assert "lost accuracy: 20.0% (10.0% to 30.0%), claimed below 5.0%" in row
    assert "14.8 times fewer steps" in row  # of the source, in a column of its own
    assert row.count(" | ") == 5


def test_a_card_names_every_estimate_and_the_command():
    card = TEXT.split("\n### shift\n")[1].split("\n### ")[0]
    assert card.count(", claimed ") == 2
    assert "`batchnorm lab run shift`" in card
    assert "[arXiv:1502.03167](https://arxiv.org/abs/1502.03167)" in card
    assert "[Pictures](page.html#claim-shift)" in card


def test_the_command_names_the_budget_that_was_run():
    text = to_markdown(to_records([replace(state(claim(), EIGHT), budget="full")]))
    assert "- Run it: `batchnorm lab run steps --budget full`" in text


def test_what_is_retold_wrongly_has_a_place_of_its_own():
    assert "## Retold wrongly\n\n- [shift](#shift): It does not.\n" in TEXT


def test_it_says_when_and_on_what_machine_only_what_all_claims_share():
    first = replace(state(claim(), EIGHT), measured="2026-03-01", machine={"torch": "2.13.0", "cores": 2})
    second = replace(state(claim("later"), EIGHT), measured="2026-03-04", machine={"torch": "2.12.0", "cores": 2})
    text = to_markdown(to_records([first, second]))
    assert "Measured 2026-03-01 to 2026-03-04 (cores 2), by:" in text


@pytest.mark.parametrize("hostile", ["a|b", "<script>", "*so*", "`x`", "[a](b)", "line\n\n## break", "$x$", "_a_"])
def test_words_are_only_words(hostile):
    made = state(claim(title=hostile, retelling=hostile), EIGHT, LESS, sentence=hostile)
    text = to_markdown(to_records([made]))
    assert plain(hostile) in text
    assert hostile not in text
    assert len(rows_of(text)) == 1
    assert "\n## break" not in text
