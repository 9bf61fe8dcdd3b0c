"""``batchnorm claims``: the table of claims with the verdicts so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from batchnorm.errors import BatchNormError, printable
from batchnorm.terminal import say

if TYPE_CHECKING:
    from batchnorm.lab.judge.measure import State

STYLES = {"confirmed": "green", "refuted": "red", "inconclusive": "yellow", "not judged": "dim"}
MARKS = {"confirmed": "+", "refuted": "x", "inconclusive": "?", "not judged": "."}


def claims(
    name: Annotated[str, typer.Argument(metavar="[CLAIM]", help="Show one claim: its card and its figures.")] = "",
    store: Annotated[
        str, typer.Option("--store", help="The folder of runs; by default $BATCHNORM_LAB, or ./batchnorm-lab.")
    ] = "",
    verdict: Annotated[
        str, typer.Option("--verdict", help="Only these: confirmed, refuted, inconclusive, not-judged.")
    ] = "",
) -> None:
    """List the claims about Batch Normalization with their verdicts so far, or show the card of one.

    Examples:

      batchnorm claims

      batchnorm claims noise

      batchnorm claims --verdict refuted

    Run them with batchnorm lab run NAME, or batchnorm lab run --all.
    """
    from batchnorm.lab.claims import all_claims, claim_named
    from batchnorm.lab.judge.measure import state_of
    from batchnorm.lab.runs.store import Store

    place = Store(store)
    if name:
        card(state_of(claim_named(name), place))
        return
    wanted = verdict.replace("-", " ")
    if wanted and wanted not in MARKS:
        known = ", ".join(each.replace(" ", "-") for each in MARKS)
        raise BatchNormError(f"--verdict is {verdict!r}", do=f"choose one of {known}")
    table(
        [state for state in (state_of(each, place) for each in all_claims()) if wanted in ("", state.judgement.outcome)]
    )


def table(states: list[State]) -> None:
    """Print one row for each claim, by question, and a line that counts the verdicts."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from batchnorm.lab.judge.claim import QUESTIONS

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    for key, question in QUESTIONS.items():
        own = [state for state in states if state.claim.question == key]
        if not own:
            continue
        grid = Table(box=None, pad_edge=False, show_header=False, title=question, title_justify="left")
        for state in own:
            outcome = state.judgement.outcome
            grid.add_row(
                Text(f"{MARKS[outcome]} {outcome}", style=STYLES[outcome]),
                Text(state.claim.name, style="bold"),
                Text(state.claim.title),
                Text(printable(state.judgement.sentence) if state.budget else "", style="dim"),
            )
        console.print(grid)
    counts = {outcome: sum(state.judgement.outcome == outcome for state in states) for outcome in MARKS}
    words = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    say(f"{len(states)} claims: {words or 'none'}")


def card(state: State) -> None:
    """Print one claim: statement, source, rule, verdict, figures, method and limits."""
    claim, judgement = state.claim, state.judgement
    say(f"{claim.name}: {claim.statement}")
    say(f"  source: {claim.source.paper} ({claim.source.link})")
    if claim.source.reported:
        say(f"  reported there: {claim.source.reported}")
    say(f"  rule: {claim.rule}")
    say(f"  verdict: {judgement.outcome}. {judgement.sentence}")
    for estimate in judgement.estimates:
        say(f"    {estimate.outcome}: {estimate}")
    if state.budget:
        say(f"  measured: budget {state.budget}, {judgement.seeds or 'no'} fresh seeds, {state.seconds:.0f} s")
    say(f"  method: {claim.method}")
    say(f"  limits: {claim.limits}")
    if claim.retelling:
        say(f"  retold wrongly: {claim.retelling}")
    say(f"  run it: batchnorm lab run {claim.name}")
