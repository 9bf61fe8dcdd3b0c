"""The command ``batchnorm check``; torch is imported only when it runs."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchnorm.batches import Batch
from batchnorm.checkpoints import SUFFIXES, check_suffix, save_state
from batchnorm.doctor import config
from batchnorm.errors import BatchNormError
from batchnorm.files import check_target
from batchnorm.loading import call_batch, load_batches, load_model, load_state, parse_input
from batchnorm.options import Force
from batchnorm.present import plain_console
from batchnorm.records import Report
from batchnorm.specs import called, made_by
from batchnorm.terminal import note

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import nn

    from batchnorm.doctor.findings import Findings
    from batchnorm.doctor.formats import Outcome


def check(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|CHECKPOINT",
            help="file.py:factory or package.module:factory, which gives the model; "
            "or a checkpoint (.pt, .pth, .ckpt, .bin, .safetensors), whose tensors are checked.",
        ),
    ],
    checkpoint: Annotated[str, typer.Option(help="Weights to load; no code in the file is run.")] = "",
    key: Annotated[str, typer.Option(help="Where in the checkpoint the model is, such as ema.state_dict.")] = "",
    example: Annotated[
        list[str] | None,
        typer.Option(
            "--example",
            "--input",
            help="Sizes of a random input, such as 8,3,224,224 or ids=2,9:int64<99; again for each further argument of "
            "the model, or all of them with ';' between.",
        ),
    ] = None,
    data: Annotated[
        str, typer.Option(help="Batches: .npy, .npz, .pt, .safetensors, a folder of them, or file.py:factory.")
    ] = "",
    batch_size: Annotated[int, typer.Option(help="Batch size for data from a file.")] = 64,
    max_batches: Annotated[int, typer.Option(help="Read at most so many batches of the data.")] = 64,
    optimizer: Annotated[
        str, typer.Option(help="file.py:function, which is called with the model and gives the optimiser.")
    ] = "",
    before: Annotated[
        str,
        typer.Option(help="The model before it was converted, pruned or folded: file.py:factory, or its checkpoint."),
    ] = "",
    purpose: Annotated[str, typer.Option(help="What the model is to be used for, if that matters: export.")] = "",
    fix: Annotated[bool, typer.Option("--fix", help="Repair what is safe to repair; write it to --out.")] = False,
    unsafe_fixes: Annotated[
        bool, typer.Option("--unsafe-fixes", help="With --fix: also repairs that change what the model computes.")
    ] = False,
    out: Annotated[
        str, typer.Option(metavar="FILE", help="Where the repaired state_dict goes (.pt, .pth, .bin, .safetensors).")
    ] = "",
    select: Annotated[
        list[str] | None, typer.Option(help="Only these rules: codes, their beginnings (BN2) or names; with commas.")
    ] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="Not these rules.")] = None,
    fail_on: Annotated[
        str, typer.Option(help="Exit with 1 from this severity on: error, warning (the default), advice; or never.")
    ] = "",
    format: Annotated[
        str, typer.Option("--output-format", "--format", help="text (the default), json, sarif or github.")
    ] = "",
    force: Force = False,
    everything: Annotated[bool, typer.Option("--all", help="Show every finding of a rule, not the first few.")] = False,
) -> None:
    """Look for the classic Batch Normalization bugs in a model or in a checkpoint.

    The more is given (an input, data, the optimiser), the more rules can look;
    the last lines say which could not. The model is not changed. `batchnorm
    rules` lists the rules, `batchnorm explain BN201` explains one.

    Examples:

      batchnorm check net.py:make --example 8,3,224,224

      batchnorm check net.py:make --checkpoint best.pt --data val.npz

      batchnorm check best.safetensors --format sarif > batchnorm.sarif

      batchnorm check net.py:make --example 8,3,32,32 --fix --out fixed.pt

    Exit codes: 0 if nothing was found that fails, 1 if something was, 2 if
    the check could not be done. Errors and warnings fail, advice is shown
    (--fail-on). After --fix, what is left counts.

    What is not given comes from the table tool.batchnorm of the nearest
    pyproject.toml: select, ignore, fail-on, format, per-module-ignores.
    """
    settings = config.find_settings()
    if settings.note:
        note(f"batchnorm: {settings.note}", error=True)
    _check_options(fix, unsafe_fixes, out, force, batch_size, max_batches)
    fail_on = config.one_of(fail_on or settings.fail_on, config.FAIL_ON, "--fail-on")
    format = config.one_of(format or settings.format, config.FORMATS, "--output-format")
    sizes = ";".join(example or ())
    chosen = _words(select, "--select") or settings.select, _words(ignore, "--ignore") or settings.ignore
    wants_model = {
        "--checkpoint": checkpoint, "--example": sizes, "--data": data, "--optimizer": optimizer, "--before": before,
        "--purpose": purpose, "--fix": fix,
    }  # fmt: skip
    with redirect_stdout(sys.stderr):  # the user's code may print; what is printed here may be read by a machine
        if is_checkpoint(model):
            given = [option for option, value in wants_model.items() if value]
            if given:
                raise BatchNormError(
                    f"{given[0]} needs the model, and {model} is a checkpoint",
                    do=f"give file.py:factory --checkpoint {model}",
                )
            subject: Any = load_state(model, key=key)
            arguments: dict[str, Any] = {}
        else:
            subject, arguments = _load(model, checkpoint, key, sizes, data, batch_size, optimizer, before)
        arguments |= {"select": chosen[0], "ignore": chosen[1], "max_batches": max_batches, "purpose": purpose}
        findings, ignored, report = _examine(subject, arguments, settings, unsafe_fixes, out)
    from batchnorm.doctor.formats import Outcome

    file, line = where_written(model)
    _show(Outcome(model, findings, report, file, line, ignored, everything), format)
    if findings.at_least(fail_on):
        raise typer.Exit(1)


def _words(given: list[str] | None, option: str) -> tuple[str, ...]:
    words = tuple(word.strip() for text in given or () for word in text.split(",") if word.strip())
    if words:
        config.check_rules(words, option)
    return words


def _check_options(fix: bool, unsafe_fixes: bool, out: str, force: bool, batch_size: int, max_batches: int) -> None:
    """Raise on options that exclude each other, before anything is loaded."""
    if fix and not out:
        raise BatchNormError("--fix does not change your files", do="say where the repaired weights go: --out fixed.pt")
    for option, given in (("--out", out), ("--unsafe-fixes", unsafe_fixes)):
        if given and not fix:
            raise BatchNormError(f"{option} without --fix has no meaning", do="add --fix")
    if out:
        if not Path(out).is_dir():
            check_suffix(Path(out), SUFFIXES)
        check_target("--out", out, force)
    for option, number in (("--batch-size", batch_size), ("--max-batches", max_batches)):
        if number < 1:
            raise BatchNormError(f"{option} is {number}", do="give a whole number from 1 up")


def is_checkpoint(model: str) -> bool:
    """Whether what a user names is a file of tensors, and not code that makes a model.

    >>> is_checkpoint("best.pt"), is_checkpoint("net.py:make"), is_checkpoint("torchvision.models:resnet18")
    (True, False, False)
    """
    try:
        return Path(model).suffix in SUFFIXES or (Path(model).exists() and Path(model).suffix != ".py")
    except (OSError, ValueError):  # no name that a file could have
        return False


def _load(
    spec: str, checkpoint: str, key: str, example: str, data: str, batch_size: int, optimizer: str, before: str
) -> tuple[nn.Module, dict[str, Any]]:
    """Make the model and whatever else was given, as arguments of `batchnorm.check`."""
    import torch
    from torch import Tensor

    torch.manual_seed(0)  # a model without a checkpoint has the same weights every time
    model = load_model(spec, checkpoint or None, key=key)
    arguments: dict[str, Any] = {"example": parse_input(example) if example else None}
    if data:
        batches = load_batches(data, batch_size=batch_size)
        first = _first(batches, data)
        narrower = None if hasattr(batches, "source") else _narrower(model, first)  # the user's code says what it means
        if narrower is not None:  # NumPy's numbers are double unless one says otherwise
            name = str(narrower).removeprefix("torch.")
            note(f"batchnorm: {data} holds float64, and is given to the model as {name}", error=True)
            batches = load_batches(data, batch_size=batch_size, dtype=narrower)
        arguments["data"] = batches
        if not isinstance(first.inputs, Tensor):  # several arguments: the verbs need `forward`
            arguments["forward"] = call_batch
            if example:
                arguments["example"] = Batch(arguments["example"])
    if optimizer:
        arguments["optimizer"] = _optimizer(optimizer, model)
    if before:
        if is_checkpoint(before):
            arguments["before"] = load_model(spec, before)
        else:
            arguments["before"] = load_model(before)
    return model, arguments


def _narrower(model: nn.Module, batch: Batch) -> torch.dtype | None:
    """The one type that all of a model's weights have, if the batch is float64 and they are not.

    >>> import torch
    >>> from batchnorm.batches import Batch
    >>> _narrower(torch.nn.Linear(2, 2), Batch(torch.zeros(1, 2, dtype=torch.float64)))
    torch.float32
    >>> _narrower(torch.nn.Linear(2, 2).double(), Batch(torch.zeros(1, 2, dtype=torch.float64)))
    """
    import torch

    from batchnorm.nested import tensors_in

    own = {p.dtype for p in model.parameters() if p.dtype.is_floating_point}
    double = any(t.dtype == torch.float64 for t in tensors_in(batch.inputs))
    return own.pop() if double and len(own) == 1 and torch.float64 not in own else None


def _first(batches: Iterable[Batch], source: str) -> Batch:
    for batch in batches:
        return batch
    raise BatchNormError(f"{source} gives no batches")


def _optimizer(spec: str, model: nn.Module) -> Any:
    from batchnorm.optim import is_optimizer, unwrapped

    function = made_by(spec, object)  # as it is: it is to be called with the model
    if not callable(function):
        raise BatchNormError(f"{spec} is a {type(function).__name__}, not a function of the model")
    made = called(f"{spec}(model)", lambda: function(model))
    several = made if isinstance(made, (list, tuple)) and made else [made]
    if not all(is_optimizer(unwrapped(one)) for one in several):
        raise BatchNormError(
            f"{spec}(model) gives a {type(made).__name__}", do="return the optimiser, or a list of several"
        )
    return made


def _examine(
    subject: Any, arguments: dict[str, Any], settings: config.Settings, unsafe: bool, out: str
) -> tuple[Findings, int, Report | None]:
    """Check; with a file to write, repair and check again, and return the remaining findings.

    Returns the findings, how many more are ignored in their modules, and the report of the repairs.
    """
    from batchnorm.doctor.check import check
    from batchnorm.doctor.fix import fix

    every: Findings = called("checking the model", lambda: check(subject, **arguments))
    findings, report = every.without(settings.per_module_ignores), None
    if out:
        repaired, report = called("repairing the model", lambda: fix(subject, findings, unsafe=unsafe))
        written = save_state(repaired.state_dict(), out)
        note(f"written to {written}{_keys(subject, repaired)}", error=True)
        every = called("checking the repaired model", lambda: check(repaired, **arguments))
        findings = every.without(settings.per_module_ignores)
    return findings, len(every) - len(findings), report


def _keys(old: nn.Module, new: nn.Module) -> str:
    """Describe how the keys changed, because the code that makes the model has to be changed as well."""
    before, after = old.state_dict(), new.state_dict()
    words = [
        f"{len(names)} {'key is' if len(names) == 1 else 'keys are'} {what} ({', '.join(names[:3])}"
        f"{', ...' if len(names) > 3 else ''})"
        for what, names in (
            ("gone", [k for k in before if k not in after]),
            ("new", [k for k in after if k not in before]),
        )
        if names
    ]
    return f"; {', '.join(words)}: the code that makes the model has to follow" if words else ""


def where_written(spec: str) -> tuple[str, int | None]:
    """Return the file that a spec names, and the line of its factory.

    >>> where_written("best.pt"), where_written("no.such:thing")
    (('best.pt', None), ('', None))
    """
    import ast
    import importlib.util

    if is_checkpoint(spec):
        return spec, None
    place, _, name = spec.rpartition(":")
    try:
        if not place.endswith(".py"):
            found = importlib.util.find_spec(place)
            place = found.origin or "" if found is not None else ""
        tree = ast.parse(Path(place).read_bytes())
    except (OSError, ValueError, SyntaxError, ImportError, AttributeError):
        return "", None
    kinds = (ast.FunctionDef, ast.ClassDef)
    lines = [node.lineno for node in tree.body if isinstance(node, kinds) and node.name == name.partition(".")[0]]
    return place, lines[-1] if lines else None


def _show(outcome: Outcome, format: str) -> None:
    from rich.console import Console

    from batchnorm.doctor.formats import FORMATS, as_text

    if format == "text":
        console = Console()
        seen = console.is_terminal
        typer.echo(as_text(outcome, width=console.width if seen else None, colour=seen and not console.no_color))
        return
    if outcome.report is not None and format != "json":
        plain_console(stderr=True).print(outcome.report)
    text = FORMATS[format](outcome)
    if text:
        typer.echo(text)
