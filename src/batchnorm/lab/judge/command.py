"""``batchnorm claims``: the table of claims with the verdicts so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from batchnorm.errors import BatchNormError, printable
from batchnorm.files import check_target, write_atomically
from batchnorm.lab.runs.store import Store
from batchnorm.options import Force
from batchnorm.report.command import announce, page_named
from batchnorm.terminal import note, say

if TYPE_CHECKING:
    from rich.console import Console

    from batchnorm.lab.judge.measure import ClaimState

PAGE, RECORDS = "claims.html", "claims.json"
STYLES = {"confirmed": "green", "refuted": "red", "inconclusive": "yellow", "not judged": "dim"}
WORDS = {"not judged": "not run"}
WIDE = 1000  # characters of a line that goes to a file or a pipe
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

    Run them with batchnorm lab run NAME, or batchnorm lab run --all; batchnorm lab report draws them on one page.
    """
    from batchnorm.lab.claims import all_claims, claim_named
    from batchnorm.lab.judge.measure import state_of

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


def report(
    store: Annotated[
        str,
        typer.Option(
            "--store", help="The folder of runs; by default $BATCHNORM_LAB, or ./batchnorm-lab.", metavar="DIR"
        ),
    ] = "",
    out: Annotated[
        str,
        typer.Option(
            "--out",
            help="Write the page here, as Markdown if it ends in .md; by default claims.html in the store.",
            metavar="FILE",
        ),
    ] = "",
    pictures: Annotated[
        str, typer.Option(help="In Markdown: where the page with the pictures will be.", metavar="ADDRESS")
    ] = "",
    open: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    force: Force = False,
) -> None:
    """Draw all claims on one page: verdicts, figures, pictures, rules and limits, and how to run each.

    The records of which it is drawn are written beside it, as claims.json; batchnorm report draws them again.

    Examples:

      batchnorm lab report --open

      batchnorm lab report --store /shared/runs --out pages/claims.html

      batchnorm lab report --out claims.md
    """
    from batchnorm.lab.claims import all_claims
    from batchnorm.lab.judge.markdown import to_markdown
    from batchnorm.lab.judge.measure import state_of
    from batchnorm.lab.judge.records import COMMAND, drawable, to_records
    from batchnorm.report.load import Run
    from batchnorm.report.page import write_page

    place = Store(store)
    if not place.root.is_dir():
        raise BatchNormError(f"there is no store {place.root}", do="give its folder as --store, or run a claim first")
    page = page_named(out or str(place.root / PAGE))
    for file in (page, page.with_name(RECORDS)):
        check_target("--out", file, force or not out)  # what is in the store was made from it
    states = [drawable(state_of(each, place)) for each in all_claims()]
    records = to_records(states)
    kept = records.write(page.with_name(RECORDS))
    if page.suffix == ".md":
        announce(write_atomically(page, to_markdown(records, pictures)), open)
    else:
        announce(write_page([Run(COMMAND, records)], page), open)
    note(f"Its records are {kept}")
    say_problems(states)


def say_problems(states: list[ClaimState]) -> None:
    """Name the results that could not be judged, on stderr."""
    for state in states:
        if state.problem:
            say(state.problem, error=True)


def table(states: list[ClaimState], console: Console | None = None) -> None:
    """Print the claims by question, and a line that counts the verdicts.

    On a terminal the sentence with the figures stands below each claim; in a file or a pipe each claim is one line.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from batchnorm.lab.judge.claim import QUESTIONS

    console = console or Console(highlight=False)
    piped = not console.is_terminal
    if piped:
        console.width = WIDE
    outcomes = [state.judgement.outcome for state in states]
    columns = [f"{MARKS[outcome]} {WORDS.get(outcome, outcome)}" for outcome in outcomes]
    for key, question in QUESTIONS.items():
        own = [(state, verdict) for state, verdict in zip(states, columns, strict=True) if state.claim.question == key]
        if not own:
            continue
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(min_width=max(map(len, columns)), no_wrap=True)
        if piped:
            grid.add_column(min_width=max(len(state.claim.name) for state in states))
        for state, verdict in own:
            claim, sentence = state.claim, printable(state.judgement.sentence) if state.budget else ""
            style = STYLES[state.judgement.outcome]
            if piped:
                cells = (verdict, claim.name, f"{claim.title}{': ' if sentence else ''}{sentence}")
                grid.add_row(*map(Text, cells))
                continue
            words = Text.assemble(
                (claim.name, "bold"), f": {claim.title}", *([("\n" + sentence, "dim")] * bool(sentence))
            )
            grid.add_row(Text(verdict, style=style), words)
        console.print(Text(question, style="bold underline"))
        console.print(grid)
        console.print()
    counts = [f"{outcomes.count(each)} {WORDS.get(each, each)}" for each in MARKS if each in outcomes]
    console.print(Text(f"{len(states)} claim{'s' * (len(states) != 1)}: {', '.join(counts) or 'none'}"))
    say_problems(states)


def card(state: ClaimState) -> None:
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
        seeds = judgement.seeds or "no"
        say(f"  measured: budget {state.budget}, {seeds} fresh seeds, {state.seconds:.0f} s of one core")
    say(f"  method: {claim.method}")
    say(f"  limits: {claim.limits}")
    if claim.retelling:
        say(f"  retold wrongly: {claim.retelling}")
    say(f"  run it: {claim.how_to_run}")
