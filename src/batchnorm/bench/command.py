"""The command ``batchnorm bench``; torch is imported only when it runs, so that ``--help`` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchnorm.bench import cases as grid
from batchnorm.errors import BatchNormError
from batchnorm.files import check_target
from batchnorm.options import Force
from batchnorm.progress import bars
from batchnorm.records import RecordFile
from batchnorm.terminal import note, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from batchnorm.bench.run import RunResult

COMPILED = ("off", "target", "all")
MEMORY = {
    None: "as the C library handles it; then the large training cells again with it kept",
    True: "kept in all cells (batchnorm.keep_freed_memory())",
    False: "as the C library handles it",
}


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="A handful of cells, in less than half a minute.")] = False,
    shapes: Annotated[str, typer.Option(help="Such as 32x64x56x56,1024x512; by default ten common ones.")] = "",
    layouts: Annotated[str, typer.Option(help=f"Any of {', '.join(grid.LAYOUTS)}; by default all.")] = "",
    operations: Annotated[str, typer.Option(help=f"Any of {', '.join(grid.OPERATIONS)}; by default all.")] = "",
    passes: Annotated[str, typer.Option(help=f"Any of {', '.join(grid.PASSES)}; by default all.")] = "",
    dtype: Annotated[
        str, typer.Option(help="float32, or bfloat16 activations with float32 parameters, as under autocast.")
    ] = "float32",
    threads: Annotated[int | None, typer.Option(help="Torch's threads; by default its own choice.")] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="Samples per contender and cell, more in short cells; by default 15, quick 7."),
    ] = None,
    compiled: Annotated[
        str,
        typer.Option(
            "--compile",
            help="torch.compile of both layers in no cell (off), in bn+relu training (target), or everywhere (all). "
            "Compiling takes some 6 seconds a cell, the first half a minute. By default target, quick off.",
        ),
    ] = "",
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Add flax and inplace-abn where installed (the extra bench-peers)."),
    ] = False,
    keep_freed_memory: Annotated[
        bool | None,
        typer.Option(
            "--keep-freed-memory/--no-keep-freed-memory",
            help="Call batchnorm.keep_freed_memory() before all cells, for all contenders alike, or never. "
            "By default all cells are measured without it, then training from 6 MB up again with it.",
        ),
    ] = None,
    monitor: Annotated[
        bool,
        typer.Option(
            "--monitor", help="Measure what batchnorm.monitor adds to a training step of a ResNet-18 instead."
        ),
    ] = False,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Measure what batchnorm.watch adds to a training step of a ResNet-18 instead."),
    ] = False,
    lab: Annotated[
        bool, typer.Option("--lab", help="Measure how fast the lab trains many networks, and one by one, instead.")
    ] = False,
    cells: Annotated[bool, typer.Option("--cells/--no-cells", help="Print every cell before the summary.")] = True,
    json: Annotated[Path | None, typer.Option(metavar="OUT", help="Write all samples and the summary here.")] = None,
    force: Force = False,
) -> None:
    """Measure the layers beside torch.nn, torch.compile and the floor, side by side in one process.

    The contenders of a cell (a shape, a layout, an operation, a pass) take
    turns, in an order shuffled for every round. Times are medians, ratios
    are medians of the ratios within a round. A contender whose outputs or
    gradients differ from torch's is not timed. The floor is the time to copy
    the tensor: once for a forward, one and a half times for a backward, and
    half a time more each with a residual. If it moved between the tables,
    the machine did, and no target is judged.

    Passes: forward is the forward of a training step, with the graph
    recorded; train is that and torch.autograd.grad; eval is eval mode under
    no_grad.

    Examples:

      batchnorm bench --quick

      batchnorm bench --json bench.json

      batchnorm bench --shapes 32x64x56x56 --passes train --compile all

      batchnorm bench --monitor --rounds 100

      batchnorm bench --watch

      batchnorm bench --lab

    The full run takes some minutes; Ctrl-C ends it and prints what is done.
    """
    if dtype not in grid.DTYPES:
        raise BatchNormError(f"--dtype is {dtype!r}, which is none of {', '.join(grid.DTYPES)}")
    for option, number in (("threads", threads), ("rounds", rounds)):
        if number is not None and number < 1:
            raise BatchNormError(f"--{option} is {number}, but must be at least 1")
    if json is not None:
        check_target("--json", json, force)
    if monitor + watch + lab > 1:
        raise BatchNormError("--monitor, --watch and --lab are measured apart", do="give one of them")
    if lab:
        _measure_lab(rounds or (2 if quick else 5), threads, json)
        return
    if monitor or watch:
        _measure_observer(watch, rounds or (20 if quick else 60), threads, json)
        return
    compiled = grid.parse_names(compiled or ("off" if quick else "target"), "compile", COMPILED)[0]
    cases = grid.make_cases(
        grid.parse_shapes(shapes) if shapes else grid.QUICK_SHAPES if quick else grid.SHAPES,
        grid.parse_names(layouts, "layouts", grid.LAYOUTS) if layouts else grid.LAYOUTS,
        _names(operations, "operations", grid.OPERATIONS, grid.QUICK_OPERATIONS if quick else grid.OPERATIONS),
        _names(passes, "passes", grid.PASSES, grid.QUICK_PASSES if quick else grid.PASSES),
        dtype,
        "kept" if keep_freed_memory else "default",
    )
    if not cases:
        raise BatchNormError("nothing is left to measure: channels_last needs shapes of 4 or 5 sizes")
    if keep_freed_memory is None:
        cases += grid.with_kept_memory(cases)
    record, result = _measure(cases, rounds or (7 if quick else 15), threads, compiled, peers, keep_freed_memory, cells)
    if json is not None:
        record.write(json)
        note(f"written to {json}")
    if result.interrupted:
        raise typer.Exit(130)
    if any(note.startswith("batchnorm ") for note in result.notes):
        raise typer.Exit(1)


def _measure_observer(watch: bool, rounds: int, threads: int | None, json: Path | None) -> None:
    """Measure the cost of `batchnorm.watch` or `batchnorm.monitor`, print it, write the samples."""
    import torch

    from batchnorm.bench.monitoring import describe, measure_monitor, measure_watch
    from batchnorm.bench.run import threads_set

    with threads_set(threads) as used:
        cost = measure_watch(rounds) if watch else measure_monitor(rounds)
    typer.echo(describe(cost, used))
    if json is not None:
        configuration = {"threads": used, "rounds": rounds, "torch": torch.__version__, "every": cost.every}
        summary = {"between": cost.between, "looking": cost.looking, "share": cost.share}
        record = RecordFile("bench", configuration, cost.measurements({"network": "resnet18"}), summary)
        record.write(json)
        note(f"written to {json}")


def _measure_lab(rounds: int, threads: int | None, json: Path | None) -> None:
    """Measure how fast many networks are trained, print it, write the samples."""
    import torch

    from batchnorm.bench.copies import describe, measure, to_records

    threads, copies = threads or torch.get_num_threads(), 40
    samples = measure(rounds, threads, copies=copies)
    for line in describe(samples, threads, copies):
        say(line)
    if json is not None:
        to_records(samples, threads, rounds, copies).write(json)
        note(f"written to {json}")


def _names(text: str, option: str, known: tuple[str, ...], default: tuple[str, ...]) -> list[str]:
    return grid.parse_names(text, option, known) if text else list(default)


def _measure(
    cases: list[grid.Case],
    rounds: int,
    threads: int | None,
    compiled: str,
    peers: bool,
    keep: bool | None,
    print_cells: bool,
) -> tuple[RecordFile, RunResult]:
    """Run the cases with a progress bar, print the tables, return the record."""
    import torch
    from rich.console import Console

    from batchnorm.bench.contenders import core_distance, describe_path
    from batchnorm.bench.present import heading
    from batchnorm.bench.run import present_contenders, threads_set

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=120, no_color=True)
    names, left_out = present_contenders(compiled, peers)
    with threads_set(threads) as used:
        configuration: dict[str, Any] = {
            "dtype": cases[0].dtype,
            "rounds": rounds,
            "threads": used,
            "torch": torch.__version__,
            "path": describe_path(),
            "memory": MEMORY[keep],
            "compile": compiled,
            "contenders": names,
            "left_out": left_out,
        }
        console.print(heading(RecordFile("bench", configuration, ()), len(cases)), soft_wrap=True)
        distances: list[float | None] = []
        result = _run_with_progress(cases, names, rounds, compiled, lambda: distances.append(core_distance(used)))
    record = _report(console, configuration, result, len(cases), print_cells, distances)
    return record, result


def _run_with_progress(
    cases: list[grid.Case], names: list[str], rounds: int, compiled: str, before_each: Callable[[], None]
) -> RunResult:
    from batchnorm.bench.run import run_cases

    # The bar is drawn between the cells only: its thread must not take time from what is being timed.
    with bars(refresh=False) as bar:
        task = bar.add_task("", total=len(cases))

        def start(case: grid.Case) -> None:
            bar.update(task, description=case.label, refresh=True)
            before_each()

        return run_cases(
            cases,
            names,
            rounds,
            compiled=compiled,
            on_start=start,
            on_done=lambda case: bar.advance(task),
        )


def _report(
    console: Console,
    configuration: dict[str, Any],
    result: RunResult,
    planned: int,
    print_cells: bool,
    distances: list[float | None],
) -> RecordFile:
    """Print the tables of what was measured and return it as a record."""
    from batchnorm.bench.present import cell_tables, explanation, how_far, note_lines, summary_table
    from batchnorm.bench.summary import moved_floor, summarize

    rows = summarize(result.measurements)
    moved = moved_floor(result.measurements)
    notes = (*result.notes, *([moved] if moved else []))
    if print_cells:
        for table in cell_tables(result.measurements):
            console.print()
            console.print(table)
    if rows:
        console.print()
        console.print(summary_table(rows))
        console.print(explanation(), soft_wrap=True)
    if said := how_far(distances):
        console.print(said, soft_wrap=True)
    for line in note_lines(notes):
        console.print(line, soft_wrap=True)
    if result.interrupted:
        console.print(f"interrupted: {result.done} of {planned} cells were measured", soft_wrap=True)
    summary = {
        "rows": [row.to_json() for row in rows],
        "notes": list(notes),
        "cells": {"done": result.done, "planned": planned},
        "core_distance_ns": distances,
    }
    return RecordFile("bench", configuration, result.measurements, summary)
