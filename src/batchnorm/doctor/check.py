"""``check``: run every rule that has the inputs it needs; the model is left as it was."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from batchnorm.doctor.codes import chosen
from batchnorm.doctor.findings import Findings
from batchnorm.doctor.needs import NEEDS
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import BATCHES, Forward, Subject
from batchnorm.errors import BatchNormError, BatchNormWarning, first_line
from batchnorm.graph import check_ready, check_weights
from batchnorm.kernels.storage import check_memory
from batchnorm.optim import Optimizers
from batchnorm.preserve import in_mode, parameters, untouched
from batchnorm.records import HELD, Finding
from batchnorm.transforms.follow import check_optimizers

Purpose = Literal["", "export"]
PURPOSES = get_args(Purpose)


def check(
    model: nn.Module | Mapping[str, Tensor],
    example: Any = None,
    data: Iterable[Any] | None = None,
    optimizer: Optimizers = None,
    *,
    forward: Forward | None = None,
    before: nn.Module | None = None,
    process_group: Any = None,
    purpose: Purpose = "",
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    max_batches: int = BATCHES,
) -> Findings:
    """Look for the classic Batch Normalization bugs in a model, or in the tensors of a checkpoint.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> print(check(model, torch.randn(4, 3, 8, 8), select=["BN101"]))
    advice   0: BN101 bias-before-norm: its bias of 8 values does nothing: 1 subtracts the mean
    1 advice

    More rules can run with more inputs: ``example`` is what the model is called with (a tensor, a tuple of arguments,
    a dictionary of named ones), ``data`` batches of it (pairs with labels, or anything that ``forward(model,
    batch)`` can take; a DataLoader too), ``optimizer`` one or several (or wrappers of them), ``before`` the model
    before it was converted, pruned or folded by another tool, ``process_group`` the ranks that train it together (every
    one of them calls this), ``purpose="export"`` that it is to be exported next. ``findings.skipped`` says which rules
    could not run and what they lack, and which held a result back and why. Rules that need a training run are
    in `batchnorm.monitor`.
    """
    rules = chosen(select, ignore)
    if purpose not in PURPOSES:
        options = ", ".join(map(repr, PURPOSES))
        raise BatchNormError(f"the purpose is {purpose!r}", where="check", do=f"use one of {options}")
    if max_batches < 1:
        raise BatchNormError(f"max_batches is {max_batches}", where="check", do="give a whole number from 1 up")
    if isinstance(model, nn.Module):
        if isinstance(model, torch.jit.ScriptModule):
            raise BatchNormError(
                f"the model ({type(model).__name__}) is TorchScript, whose layers cannot be seen",
                where="check",
                do="give the model that it was made of",
            )
        check_tree(model, "check")
        check_ready(model, "check")
        if before is not None:
            if not isinstance(before, nn.Module):
                raise BatchNormError(
                    f"before is a {type(before).__name__}", where="check", do="give the model as it was, an nn.Module"
                )
            check_weights(before, "check")
        optimizers = check_optimizers(model, optimizer, "check")
        subject = Subject(
            model, example, data, optimizers, before=before, forward=forward, process_group=process_group,
            purpose=purpose, max_batches=max_batches,
        )  # fmt: skip
        if data is not None and not subject.batches:
            raise BatchNormError(
                f"data ({type(data).__name__}) gives no batches",
                where="check",
                do="give some, or leave data out: then the rules that need it are skipped",
            )
    elif isinstance(model, Mapping) and all(isinstance(value, Tensor) for value in model.values()):
        for name, tensor in model.items():
            check_memory(tensor, str(name), "check", "give the checkpoint with its tensors in memory")
        subject = Subject(state=model)
    else:
        raise BatchNormError(
            f"this is a {type(model).__name__}", where="check", do="give an nn.Module, or the state_dict of one"
        )
    with nullcontext() if subject.model is None else parameters(subject.model):
        return _looked(subject, rules)


def _looked(subject: Subject, rules: Mapping[str, Rule]) -> Findings:
    """Run every rule that has its inputs."""
    found: list[Finding] = []
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    if subject.model is not None and subject.example is not None:
        _ = subject.graph  # fail here if the model raises, not once per rule
    for code, rule in rules.items():
        lacks = NEEDS["run"] if rule.look is None else subject.lacks(rule.needs)
        if lacks:
            skipped[code] = f"needs {lacks}"
            continue
        assert rule.look is not None
        try:
            with warnings.catch_warnings(), untouched(subject.model) if subject.model is not None else nullcontext():
                # BN203 reports batches that are not finite; our layers need not warn as well.
                warnings.simplefilter("ignore", BatchNormWarning)
                found += rule.look(subject)
            if code in subject.held:
                skipped[code] = f"{HELD}{subject.held[code]}"
        except Exception as error:
            failed[code] = f"{type(error).__name__}: {error}"
    if failed and subject.model is not None:
        _check_batches(subject)
    return Findings(found, skipped, failed, subject, tuple(rules.values()))


def _check_batches(subject: Subject) -> None:
    """After rules raised: raise an error that says so if the cause is that the model does not accept a batch."""
    for number, batch in enumerate(subject.batches, 1):
        with untouched(subject.net), torch.no_grad():
            try:
                subject.run_batch(in_mode(subject.net, False), batch)
            except Exception as error:
                raise BatchNormError(
                    f"the model raised {type(error).__name__} on batch {number} of the data: {first_line(error)}",
                    where="check",
                    do="data is an iterable of batches, (input, labels) or an input each; forward= says otherwise",
                ) from error


def check_tree(model: nn.Module, where: str) -> None:
    """Raise if a module contains itself: torch's own ``eval()`` and ``state_dict()`` never end on such a model.

    >>> model = nn.Sequential(nn.ReLU())
    >>> model.up = model
    >>> check_tree(model, "check")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: check: up is a module that is inside itself; keep the parent in a list or \
a weak reference, so that torch does not take it for a child
    """
    path: list[tuple[str, nn.Module]] = []
    done: set[int] = set()  # identities: a module may define equality

    def visit(name: str, module: nn.Module) -> None:
        if any(module is above for _, above in path):
            inside = ".".join(part for part, _ in [*path, (name, module)] if part)
            raise BatchNormError(
                f"{inside} is a module that is inside itself",
                where=where,
                do="keep the parent in a list or a weak reference, so that torch does not take it for a child",
            )
        if id(module) in done:
            return
        path.append((name, module))
        for child_name, child in module.named_children():
            visit(child_name, child)
        path.pop()
        done.add(id(module))

    visit("", model)
