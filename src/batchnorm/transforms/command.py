"""The commands ``batchnorm calibrate`` and ``batchnorm fold``; torch is imported only when they run."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from batchnorm.batches import Batch
from batchnorm.checkpoints import SUFFIXES, check_suffix, save_state
from batchnorm.errors import BatchNormError
from batchnorm.files import check_target, replacing
from batchnorm.loading import call_batch, load_batches, load_model, parse_input
from batchnorm.options import Force
from batchnorm.present import Listing, draw, plain_console
from batchnorm.records import Measurement, RecordFile, Report
from batchnorm.specs import called
from batchnorm.terminal import note

if TYPE_CHECKING:
    import torch
    from torch import nn

    from batchnorm.transforms.calibrate import Calibrated

PROGRAMS = (".pt2", ".onnx")

ModelSpec = Annotated[
    str, typer.Argument(metavar="MODEL", help="The model's factory: file.py:factory or package.module:factory.")
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help=f"Weights to load: {', '.join(SUFFIXES)}. No code in the file is run."),
]
Key = Annotated[
    str, typer.Option(metavar="NAME", help="Where in the checkpoint the model is, if that is not clear: ema, a.b.")
]
Json = Annotated[Path | None, typer.Option(metavar="OUT", help="Also write the report to this file.")]


def calibrate(
    model: ModelSpec,
    data: Annotated[
        str,
        typer.Option(
            metavar="DATA",
            help="Data to measure on: .npy, .npz (x, y), .pt, .safetensors, a folder of these, or file.py:factory, "
            "which gives batches (a DataLoader). Preprocessed as for training; labels are not used.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help=f"Write the new state_dict here: {', '.join(SUFFIXES)}.")],
    checkpoint: Checkpoint = None,
    key: Key = "",
    batch_size: Annotated[
        int, typer.Option(help="Samples per batch, where DATA is files. As in training is best.")
    ] = 64,
    until: Annotated[
        float | None,
        typer.Option(help="Stop when no layer's standard error is above this, such as 0.01; by default, read all."),
    ] = None,
    max_batches: Annotated[int | None, typer.Option(help="Stop after so many batches in any case.")] = None,
    formula: Annotated[
        str, typer.Option(help="merged: exact over all samples. paper: the mean over batches (Algorithm 2, line 10).")
    ] = "merged",
    json: Json = None,
    force: Force = False,
) -> None:
    """Recompute the running statistics of a trained model's BN layers from data, and write the checkpoint.

    The running averages of training lag behind the weights, and are wrong after
    averaging or pruning weights, or for other data. This replaces them by the
    exact statistics of the data you give, and says how far each layer moved.
    Weights stay as they are.

    Examples:

      batchnorm calibrate net.py:make --checkpoint last.pt --data train.npz --out calibrated.pt

      batchnorm calibrate torchvision.models:resnet18 --checkpoint swa.pt --data data.py:loader --until 0.01
      --out swa.safetensors
    """
    _check_target("--out", out, force, SUFFIXES)
    _check_target("--json", json, force)
    from batchnorm.transforms.calibrate import calibrate as measure

    network = load_model(model, checkpoint, key=key)
    batches = load_batches(data, batch_size=batch_size, dtype=_dtype_of(network))
    better, calibrated = measure(
        network, batches, forward=_forward, until=until, max_batches=max_batches, formula=cast(Any, formula)
    )
    if not calibrated.report.paths:
        reasons = "; ".join(f"{path or 'the model'}: {why}" for path, why in [*calibrated.report.left.items()][:3])
        raise BatchNormError(f"no layer was calibrated, and nothing is written ({reasons})", where="calibrate")
    save_state(better.state_dict(), out)
    moves = _moves(network, better, calibrated)
    _show_calibrated(calibrated, moves, until)
    note(f"written to {out}")
    if json is not None:
        configuration = {"model": model, "checkpoint": str(checkpoint or ""), "data": data, "out": str(out)}
        options = {"batch_size": batch_size, "until": until, "max_batches": max_batches, "formula": formula}
        summary = {
            "samples": calibrated.samples,
            "batches": calibrated.batches,
            "rejected": calibrated.rejected,
            "standard_error": calibrated.standard_error,
            "enough": calibrated.enough,
            "report": json_module.loads(calibrated.report.to_json()),
        }
        _write_json(json, RecordFile("calibrate", configuration | options, tuple(moves), summary))


def fold(
    model: ModelSpec,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help=f"By its suffix: {', '.join(SUFFIXES)} for the state_dict of the folded network, .pt2 for a program "
            "of torch.export, .onnx for ONNX (with the packages onnx and onnxscript).",
        ),
    ],
    input: Annotated[
        list[str] | None,
        typer.Option(
            "--example",
            "--input",
            metavar="SIZES",
            help="Sizes of the model's input: 1,3,224,224. Again for each further argument, or all of them with ';' "
            "between; other numbers as 1,128:int64<1000 (whole, below 1000); by name as ids=1,128:int64<1000.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="In the place of --example: compare on samples of yours, as calibrate takes them (the first batch).",
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    key: Key = "",
    leave: Annotated[
        str, typer.Option(metavar="A,B,...", help="BN layers to leave unfolded (not for .pt2 and .onnx).")
    ] = "",
    tolerance: Annotated[
        float | None,
        typer.Option(help="How far outputs may differ, as a share of the largest; by default 1e-4 in float32."),
    ] = None,
    json: Json = None,
    force: Force = False,
) -> None:
    """Make the inference network: BN disappears into the layers beside it, and the outputs stay.

    Every BN layer that is left is listed with the reason. The folded network is
    compared with the original, on SIZES of random numbers or on DATA; if the
    outputs differ by more than rounding, nothing is written.

    The .pt and .safetensors files fit the same network built with biases and
    without BN, and batchnorm.fold(model, example)[0]. The .pt2 and .onnx files
    need no Python code of yours; they are read back, run and compared, too.

    Examples:

      batchnorm fold net.py:make --checkpoint best.pt --example 1,3,32,32 --out folded.safetensors

      batchnorm fold torchvision.models:resnet18 --checkpoint best.pt --example 1,3,224,224 --out resnet18.onnx
    """
    _check_target("--out", out, force, (*SUFFIXES, *PROGRAMS))
    _check_target("--json", json, force)
    stays = [name.strip() for name in leave.split(",") if name.strip()]
    if out.suffix in PROGRAMS and (stays or tolerance is not None):
        raise BatchNormError(f"--leave and --tolerance do not go with {out.suffix}", do="leave them out")
    sizes = ";".join(input) if input else None
    if (sizes is None) is (data is None):
        raise BatchNormError("fold needs --example or --data, one of them", do="say sizes as --example 1,3,224,224")
    from batchnorm.transforms.export import export
    from batchnorm.transforms.fold import fold as fold_model

    network = load_model(model, checkpoint, key=key)
    network.eval()
    example = _moved(_example(sizes, data, _dtype_of(network)), network)
    _try(network, example)
    if out.suffix in PROGRAMS:
        with replacing(out) as temporary:
            _, report = called(f"exporting to {out}", lambda: export(network, example, temporary))
            written = sorted(str(out.parent / file.name) for file in temporary.parent.iterdir())
    else:
        written = [str(out)]
        folded, report = fold_model(network, example, leave=stays, tolerance=tolerance)
        save_state(folded.state_dict(), out)
    plain_console().print(report)
    note(f"written to {' and '.join(written)}")
    if json is not None:
        configuration = {"model": model, "checkpoint": str(checkpoint or ""), "out": str(out)}
        configuration |= {"input": sizes or ""} if data is None else {"data": data}
        summary = json_module.loads(report.to_json())
        _write_json(json, RecordFile("fold", configuration, _measured(report), summary))


# ---- what comes in


def _dtype_of(model: nn.Module) -> torch.dtype | None:
    """The kind of floating-point numbers that a model computes with."""
    return next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), None)


def _example(sizes: str | None, data: str | None, dtype: torch.dtype | None) -> Any:
    """What the model is to be called with: random numbers of these sizes, or the first samples of the data."""
    if data is None:
        return parse_input(sizes or "", dtype=dtype)
    first = next(iter(load_batches(data, batch_size=8, dtype=dtype)), None)
    if first is None:
        raise BatchNormError(f"{data} gives no batches")
    return first.inputs


def _moved(inputs: Any, model: nn.Module) -> Any:
    """Inputs where the model is."""
    from torch import Tensor
    from torch.utils._pytree import tree_map

    device = next((p.device for p in model.parameters()), None)
    return inputs if device is None else tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, inputs)


def _forward(model: nn.Module, batch: Batch) -> Any:
    inputs = _moved(batch.inputs, model)
    return called(f"the model, given {_sizes(inputs)},", lambda: call_batch(model, batch._replace(inputs=inputs)))


def _try(model: nn.Module, example: Any) -> None:
    """Run the model once, so that an example that it does not take ends in one sentence."""
    import torch

    from batchnorm.calling import call_with
    from batchnorm.nested import fresh
    from batchnorm.preserve import untouched

    with torch.no_grad(), untouched(model):
        called(f"the model, given {_sizes(example)},", lambda: call_with(model, fresh(example)))


def _sizes(inputs: Any) -> str:
    from batchnorm.nested import tensors_in

    kinds = [f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors_in(inputs)]
    return ", ".join(kinds) or f"a {type(inputs).__name__}"


# ---- what goes out


def _check_target(option: str, path: Path | None, force: bool = False, suffixes: tuple[str, ...] = ()) -> None:
    """Raise for a file that could not be written, or that exists, before anything is computed.

    >>> _check_target("--out", Path("/"))
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: --out is /, a folder; name a file in it
    """
    if path is None:
        return
    if suffixes and not path.is_dir():
        check_suffix(path, suffixes)
    check_target(option, path, force)


def _write_json(path: Path, record: RecordFile) -> None:
    record.write(path)
    note(f"report written to {path}")


def _measured(report: Report) -> tuple[Measurement, ...]:
    found = report.certificate
    return () if found is None else (Measurement("largest difference of outputs", {}, (found.absolute,)),)


def _moves(before: nn.Module, after: nn.Module, calibrated: Calibrated) -> list[Measurement]:
    """How far every channel's mean moved, in standard deviations as they are now, and by what its variance grew."""
    moves: list[Measurement] = []
    for path in calibrated.report.paths:
        old: Any = before.get_submodule(path)
        new: Any = after.get_submodule(path)
        width = (new.running_var.double() + new.eps).sqrt()
        mean = (new.running_mean.double() - old.running_mean.double()).abs() / width
        var = width**2 / (old.running_var.double() + new.eps)
        moves.append(Measurement("move of the mean", {"layer": path}, tuple(mean.tolist()), "standard deviations"))
        moves.append(Measurement("growth of the variance", {"layer": path}, tuple(var.tolist()), "times"))
    return moves


def _show_calibrated(calibrated: Calibrated, moves: list[Measurement], until: float | None) -> None:
    console = plain_console()
    rows = tuple(
        (
            str(mean.setting["layer"]) or "the model",
            f"{max(mean.samples):.3g}",
            f"{min(var.samples):.3g} to {max(var.samples):.3g}",
            *(f"{error:.2g}" for error in calibrated.standard_errors[str(mean.setting["layer"])]),
        )
        for mean, var in zip(moves[::2], moves[1::2], strict=True)
    )
    columns = ("layer", "mean moved by", "variance times", "error of mean", "of variance")
    layers = len(calibrated.report.paths)
    title = (
        f"{layers} layer{'s' * (layers != 1)} calibrated on {calibrated.samples} samples in {calibrated.batches} "
        f"batch{'es' * (calibrated.batches != 1)}"
        + (f", {calibrated.rejected} more rejected (NaN or infinite)" if calibrated.rejected else "")
    )
    console.print(draw(Listing(title, columns, rows), numbers=columns[1:]))
    for listing in Report((), calibrated.report.left).tables():
        console.print(draw(listing))
    console.print(
        "Moves of the mean are in standard deviations, the largest of all channels; errors are standard errors "
        "(inf: one batch cannot tell).",
        soft_wrap=True,
    )
    if until is not None and not calibrated.enough:
        console.print(
            f"The standard error is {calibrated.standard_error:.2g}, above --until {until:g}: more data would help.",
            soft_wrap=True,
        )
