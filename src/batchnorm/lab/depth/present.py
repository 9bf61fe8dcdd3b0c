"""The race of residual networks on a terminal: the sentence, the bars, the claims, the tables."""

from __future__ import annotations

import math

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from batchnorm.lab.depth.arms import (
    NORMALISED,
    NOTES,
    PAPER_NAMES,
    PAPER_RATIO,
    PLAIN,
    SIGMOID,
    SWEPT,
    TUNING_SEEDS,
)
from batchnorm.lab.depth.claims import claims, divergence
from batchnorm.lab.depth.outcome import Depth, DepthOutcome, depth_of, depths_of
from batchnorm.lab.present import ratio_cell, steps_cell
from batchnorm.lab.summary import Steps
from batchnorm.lab.variants import Paper, named
from batchnorm.lab.verdict import CONFIRMED

BAR = 34
FIRST = (PLAIN.name, *(arm.name for arm in NORMALISED))
BESIDE = (*(arm.name for arm in SWEPT if arm.activation == "relu"), SIGMOID.name)
LATE = 0.9  # a best that comes after this share of the steps is one that would still rise


def sentence(outcome: DepthOutcome) -> str:
    """Say in one sentence what the race came to.

    >>> sentence(DepthOutcome(DepthSettings(), (), 10, 450))
    'No arm was finished.'
    """
    depth = depth_of(outcome, outcome.settings.headline)
    if depth is None:
        return "No arm was finished."
    if depth.target is None:
        best = f"{depth.plain_best:.1%}"
        return f"Without Batch Normalization the network did not train ({best} at its best rate): no ratio."
    if depth.fastest is None or depth.fastest not in depth.steps:
        return "The networks with Batch Normalization were not finished."
    normed, plain = depth.steps[depth.fastest], depth.steps[PLAIN.name]
    if normed.median == math.inf:
        return f"With Batch Normalization: never. Without: {plain.median:,.0f} steps."
    ratio = normed.ratio or math.nan
    much = f"{ratio:.1f}x fewer" if ratio >= 1 else f"{1 / ratio:.1f}x more"
    return f"With Batch Normalization: {normed.median:,.0f} steps. Without: {plain.median:,.0f}. {much}."


def bars(depth: Depth, names: tuple[str, ...], *, unicode: bool = True) -> list[str]:
    """Draw the medians of steps of some arms as bars, with a word on those that need one.

    >>> steps = {"without BN": Steps((80,)), "BN x5": Steps((20,))}
    >>> depth = Depth(2, 0.9, 0.9, steps, steps, {"without BN": 0.9, "BN x5": 0.95}, {}, {}, "BN x5")
    >>> print(*bars(depth, ("without BN", "BN x5"), unicode=False), sep="\\n")
      without BN      ##################################  80
      BN x5           ########  20
    """
    longest = max((s.median for s in depth.steps.values() if s.median != math.inf), default=1.0)
    mark, lines = "█" if unicode else "#", []
    for name in names:
        if name not in depth.steps:
            continue
        median = depth.steps[name].median
        note = f"   {NOTES[name]}" if name in NOTES else ""
        if median == math.inf:
            lines.append(f"  {name:14}  never: best {depth.accuracy[name]:.1%}{note}")
        else:
            bar = mark * max(1, round(BAR * median / longest))
            lines.append(f"  {name:14}  {bar}  {median:,.0f}{note}")
    return lines


def answer(outcome: DepthOutcome, *, unicode: bool = True) -> list[str]:
    """Write what is known first: the sentence, what was raced, the bars of the plain network and of BN.

    >>> answer(DepthOutcome(DepthSettings(), (), 10, 450))
    ['No arm was finished.']
    """
    depth = depth_of(outcome, outcome.settings.headline)
    if depth is None or depth.target is None:
        return [sentence(outcome)]
    seeds = outcome.settings.seeds
    return [
        sentence(outcome),
        f"Steps to {depth.target:.1%} of {outcome.settings.images}, the best of the network without BN at its own "
        f"best rate ({depth.blocks} residual blocks, {seeds} seed{'s' * (seeds > 1)}).",
        *bars(depth, FIRST, unicode=unicode),
    ]


def rest(outcome: DepthOutcome, *, unicode: bool = True) -> RenderableType:
    """Lay out all that follows the answer: what does it too, the claims, the curve over depth, the table, the notes.

    >>> Console().print(rest(outcome))  # doctest: +SKIP
    """
    depth = depth_of(outcome, outcome.settings.headline)
    parts: list[RenderableType] = []
    if depth is not None and (beside := bars(depth, BESIDE, unicode=unicode)):
        parts += [Text("Beside it, each at its own best rate (sigmoids at BN x5's):")]
        parts += [Text(line) for line in beside]
    parts += [Text(""), *(Text(f"{c.claim}: {c.outcome.upper()} ({c.evidence}).") for c in claims(outcome)), Text("")]
    if depths := depths_of(outcome):
        parts.append(depth_table(depths))
    if depth is not None:
        parts.append(arms_table(depth, outcome))
    return Group(*parts, *(Text(line) for line in notes(outcome)))


def as_text(outcome: DepthOutcome, *, width: int = 100, unicode: bool = True) -> str:
    """Render the whole race as plain text.

    >>> as_text(DepthOutcome(DepthSettings(), (), 10, 450)).splitlines()[0]
    'No arm was finished.'
    """
    import io

    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(*map(Text, answer(outcome, unicode=unicode)), rest(outcome, unicode=unicode), sep="\n")
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def depth_table(depths: list[Depth]) -> Table:
    """Make the table of ratios against depth; a plain network that does not train gets no ratio.

    >>> depth_table([]).columns[0].header
    'blocks'
    """
    title = f"Times fewer steps, against depth (the paper, ImageNet, BN-x5: {PAPER_RATIO}x)"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for name in ("blocks", "rate", "without BN: best", "steps", *(arm.name for arm in NORMALISED), "best"):
        table.add_column(name, justify="right", no_wrap=True)
    for depth in depths:
        normed = [depth.accuracy[arm.name] for arm in NORMALISED if arm.name in depth.accuracy]
        best = f"{max(normed):.1%}" if normed else "-"
        rate = f"{depth.rates[PLAIN.name]:g}"
        if depth.target is None:
            table.add_row(
                str(depth.blocks), rate, f"untrained: {depth.plain_best:.1%}", "-", *["-"] * len(NORMALISED), best
            )
            continue
        cells = (ratio_or_never(depth.steps.get(arm.name), arm.name == depth.fastest) for arm in NORMALISED)
        steps = f"{depth.steps[PLAIN.name].median:,.0f}"
        table.add_row(str(depth.blocks), rate, f"{depth.target:.1%}", steps, *cells, best)
    return table


def ratio_or_never(steps: Steps | None, chosen: bool = False) -> str:
    """Write a ratio, with a star at the arm that the tuning seeds chose.

    >>> ratio_or_never(Steps((10,), 2.5), chosen=True), ratio_or_never(Steps((math.inf,))), ratio_or_never(None)
    ('2.5x*', 'never', '-')
    """
    text = "-" if steps is None else "never" if steps.median == math.inf else ratio_cell(steps)
    return f"{text}*" if chosen else text


def arms_table(depth: Depth, outcome: DepthOutcome) -> Table:
    """Make the table of Figure 3 at one depth, with the paper's figures named as the paper's."""
    table = Table(
        title=f"At {depth.blocks} blocks, and the paper's figures (ImageNet)",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        pad_edge=False,
    )
    table.add_column("arm", no_wrap=True)
    best = "best" if depth.target is None else f"{depth.target:.1%}"
    for header in ("rate", f"steps to\n{best}", "times\nfewer", "95%:\nfewer", "best", "lost", "paper"):
        table.add_column(header, justify="right", no_wrap=True)
    for name, entry in outcome.arms(depth.blocks).items():
        paper = named(PAPER_NAMES[name]).paper if name in PAPER_NAMES else None
        table.add_row(
            name,
            f"{entry.rate:g}",
            steps_cell(depth.steps.get(name)),
            ratio_cell(depth.steps.get(name)),
            ratio_cell(depth.to_share.get(name)),
            f"{depth.accuracy[name]:.1%}",
            f"{depth.diverged[name]}/{len(entry.curves)}",
            paper_cell(paper) if paper else "-",
        )
    return table


def paper_cell(paper: Paper) -> str:
    """Write the paper's ratio and below it its best accuracy.

    >>> paper_cell(named("BN-x5").paper), paper_cell(named("Sigmoid").paper)
    ('14.8x\\n73.0%', 'chance')
    """
    return "\n".join(part for part in (paper.ratio, paper.accuracy) if part != "-")


def notes(outcome: DepthOutcome) -> list[str]:
    """Write how to read the figures, and what to beware of.

    >>> notes(DepthOutcome(DepthSettings(), (), 10, 450))[-1]
    '0 networks of 1500 steps in 0 s (0 s of processor time); peak memory 0 MB.'
    """
    settings, depths = outcome.settings, depths_of(outcome)
    text = []
    if why := regime(outcome):
        text.append(why)
    if little := little_gain(depths):
        text.append(little)
    if depths:
        text.append(
            f"Rates are the best of {len(settings.rates)} on {len(TUNING_SEEDS)} tuning seeds, of those at which none "
            "diverges; figures are medians over fresh seeds. * is the rate with BN that the tuning seeds chose."
        )
    if settings.strict:
        text.append(
            "Strict: for each target the network without BN also runs at the rate that is soonest there on the tuning "
            "seeds; the sooner of the two is its figure."
        )
    late = [str(d.blocks) for d in depths if d.target and d.steps[PLAIN.name].median > LATE * settings.steps]
    if late:
        text.append(
            f"At {', '.join(late)} blocks the network without BN is still improving when its {settings.steps} steps "
            "end: a longer race changes its best and the ratio. The steps to 95% of it depend less on the length."
        )
    text += edges(outcome)
    if outcome.interrupted:
        text.append("Interrupted: only what was finished is shown.")
    return [
        *text,
        f"{outcome.networks} networks of {settings.steps} steps in {outcome.seconds:.0f} s "
        f"({outcome.cpu_seconds:.0f} s of processor time); peak memory {outcome.peak_megabytes:.0f} MB.",
    ]


def regime(outcome: DepthOutcome) -> str:
    """Say why these networks are raced, as far as this run shows it.

    >>> regime(DepthOutcome(DepthSettings(), (), 10, 450))
    ''
    """
    verdict, evidence = divergence(outcome)
    if verdict != CONFIRMED:
        return ""
    return (
        "Why residual networks: as in the paper, the plain network cannot bear the raised rate "
        f"({evidence}). Each block adds variance, so its highest usable rate falls with depth; with BN it does not."
    )


def little_gain(depths: list[Depth]) -> str:
    """Say where Batch Normalization buys least, with the measured figure.

    >>> little_gain([])
    ''
    """
    found = [depth for depth in depths if depth.target is not None and depth.fastest]
    if len(found) < 2:
        return ""
    depth = min(found, key=lambda each: each.ratio or 0.0)
    same = depth.steps.get("BN x1")
    at_same = f", and {ratio_or_never(same)} at the same rate" if same is not None else ""
    gain = f"{depth.ratio:.1f}x" if depth.ratio else "BN at the rate that its tuning seeds chose does not get there"
    return (
        f"Where it buys little: at {depth.blocks} blocks {gain}{at_same}. A network that bears a high rate "
        "without BN gains little from it. Another such network: batchnorm race --network inception."
    )


def edges(outcome: DepthOutcome) -> list[str]:
    """Warn where a best rate is the lowest or highest of its grid.

    >>> edges(DepthOutcome(DepthSettings(), (), 10, 450))
    []
    """
    text = []
    for entry in outcome.entries:
        rates = sorted({curve.member.learning_rate for curve in entry.tuning})
        if len(rates) > len(NORMALISED) and entry.rate in (rates[0], rates[-1]):
            end = "lowest" if entry.rate == rates[0] else "highest"
            text.append(f"{entry.blocks} blocks, {entry.arm}: the best rate, {entry.rate:g}, is the {end} of the grid.")
    return text
