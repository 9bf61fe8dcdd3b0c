"""``export``: fold, write the network as ONNX or as a `torch.export` program, and verify the file."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from batchnorm.calling import call_with
from batchnorm.checks import check_model
from batchnorm.errors import BatchNormError, NotEquivalent
from batchnorm.extras import install
from batchnorm.files import replacing
from batchnorm.nested import fresh, tensors_in
from batchnorm.preserve import random_states
from batchnorm.records import Report
from batchnorm.specs import called
from batchnorm.transforms.affine import is_norm
from batchnorm.transforms.changed import Changed
from batchnorm.transforms.fold import fold
from batchnorm.transforms.left_behind import left_behind
from batchnorm.transforms.outputs import TOLERANCE, difference
from batchnorm.transforms.verify import check_tolerance


def export(
    model: nn.Module,
    example: Any,
    path: str | os.PathLike[str],
    *,
    dynamic_shapes: Any = None,
    tolerance: float | None = None,
) -> tuple[nn.Module, Report]:
    """Fold the BN layers of a model and write it to a file: ``.onnx``, or ``.pt2`` for ``torch.export``.

    >>> model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8))
    >>> export(model, torch.randn(2, 3), "model.onnx")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: export: the model is in training mode, where BN depends on the batch and moves \
its statistics; call model.eval() first

    ``example`` is what the model is called with, as for `fold`, whose results are returned. The file is read back and
    run, in onnxruntime if that is installed; if its outputs differ from the model's, it raises and leaves no file. A
    model without BN is written as it is. ``tolerance`` is the difference allowed in both, as a share of the largest
    output. ``dynamic_shapes`` goes to ``torch.export`` as it is. ONNX needs the packages onnx and onnxscript.
    """
    check_model(model, "export")
    check_tolerance(tolerance, "export")
    file = Path(path)
    if file.suffix not in (".onnx", ".pt2"):
        raise BatchNormError(f"the file is named {file.name!r}", where="export", do="end its name in .onnx or .pt2")
    if any(module.training for module in model.modules()):
        raise BatchNormError(
            "the model is in training mode, where BN depends on the batch and moves its statistics",
            where="export",
            do="call model.eval() first",
        )
    missing = [name for name in ("onnx", "onnxscript") if file.suffix == ".onnx" and find_spec(name) is None]
    if missing:
        raise BatchNormError(f"{' and '.join(missing)} cannot be imported", where="export", do=install("onnx"))
    folded, report = (model, Report())
    if any(is_norm(module) for module in model.modules()):  # there is none after `fold`, or after `convert`
        folded, report = _fold(model, example, tolerance)
    args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (_tuple(example), None)
    with torch.no_grad(), _quiet(), replacing(file) as written:
        program = called(
            "export: torch.export, given this model,",
            # The default is strict in torch 2.7, and fails on more models.
            lambda: torch.export.export(folded, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False),
        )
        expected = _same_chance(lambda: call_with(folded, fresh(example)))
        if file.suffix == ".pt2":
            content = io.BytesIO()  # torch's writer of files ends the process where the disk is full
            torch.export.save(program, content)
            written.write_bytes(content.getvalue())
            loaded = called(
                "export: torch.export.load, given the file (its format lacks some characters in names of modules),",
                lambda: torch.export.load(written).module(),
            )
            got = _same_chance(lambda: call_with(loaded, fresh(example)))
        else:
            called("export: torch.onnx.export", lambda: torch.onnx.export(program, (), written, verbose=False))
            got = _run_onnx(written, example) if find_spec("onnxruntime") is not None else expected
        _, relative = difference(expected, got)
        allowed = max(TOLERANCE.get(t.dtype, 0.0) for t in expected) if tolerance is None else tolerance
        if not relative <= allowed:
            raise NotEquivalent(
                f"{file.name} gives something else than the model, by {relative:.2g} of the largest output",
                where="export",
                do="no file was written; if the model is random in evaluation, switch that off; allow more with "
                "tolerance= only if you know why they differ",
            )
    left_behind(model, folded, "export", trains=False)
    return Changed((folded, report))


def _fold(model: nn.Module, example: Any, tolerance: float | None) -> tuple[nn.Module, Report]:
    """Fold, with the advice in errors reworded for ``export``."""
    try:
        return fold(model, example, tolerance=tolerance)
    except BatchNormError as error:
        if "forward=" not in error.do:
            raise
        do = "fold it with bn.fold(model, example, forward=...), and give the result to torch.export"
        raise type(error)(error.problem, where="export", do=do) from error


def _same_chance(run: Callable[[], Any]) -> list[Tensor]:
    """The output of a run from a fixed random state."""
    with random_states():
        torch.manual_seed(0)
        return [t.detach().clone() for t in tensors_in(run())]


def _tuple(example: Any) -> tuple[Any, ...]:
    return tuple(example) if isinstance(example, (tuple, list)) else (example,)


def _run_onnx(file: Path, example: Any) -> list[Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    given = [tensor.detach().cpu().contiguous().numpy() for tensor in tensors_in(example)]
    names = [wanted.name for wanted in session.get_inputs()]
    return [torch.from_numpy(array) for array in session.run(None, dict(zip(names, given, strict=True)))]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters' own deprecation warnings and graph prints, which a user cannot act on."""
    loggers = [logging.getLogger(f"torch.{name}") for name in ("onnx", "export", "fx.experimental.symbolic_shapes")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
