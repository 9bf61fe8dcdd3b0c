"""Train one network with SGD, in one process or, under torchrun, in many: ``batchnorm lab run train``.

Every process takes its share of each batch; gradients are averaged by DistributedDataParallel, and Batch Normalization
takes its statistics from the whole batch (`batchnorm.SyncBatchNorm`). So the result does not depend on the number of
processes, up to rounding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from batchnorm.checkpoints import mismatch
from batchnorm.errors import BatchNormError
from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import Examples, examples, hold_out
from batchnorm.lab.runs import ranks
from batchnorm.lab.runs.experiments import Option
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.single.networks import NETWORKS
from batchnorm.lab.train import batches
from batchnorm.lab.trainer import CHUNK, SCHEDULES
from batchnorm.records import typed, values_of
from batchnorm.transforms.convert import convert

NORMS = tuple(dict.fromkeys(norm for _, norms in NETWORKS.values() for norm in norms))
DTYPES = {"float32": torch.float32, "float64": torch.float64}
OPTIONS = (
    Option(
        "data",
        "digits",
        "the data set; its files are in --data or BATCHNORM_DATA",
        tuple(spec.name for spec in sets.SETS),
    ),
    Option("size", 32, "pixels of an image's side, with data=imagefolder"),
    Option("network", "residual", "which network", tuple(NETWORKS)),
    Option("norm", "batch", "its norm: batch is ours, torch is torch's Batch Normalization", NORMS),
    Option("depth", 4, "how many blocks or layers"),
    Option("width", 32, "channels or units of a layer"),
    Option("rate", 0.1, "the learning rate"),
    Option("momentum", 0.0, "of SGD"),
    Option("decay", 0.0, "weight decay of the weights; gamma, beta and biases have none"),
    Option("schedule", "constant", "how the rate goes down", tuple(SCHEDULES)),
    Option("batch", 32, "examples a step, over all processes"),
    Option("steps", 500, "training steps"),
    Option("every", 50, "steps between validations"),
    Option("seed", 0, "of the weights and of the order of the examples"),
    Option("dtype", "float32", "of all numbers", tuple(DTYPES)),
)


def check(options: Mapping[str, Any]) -> None:
    """Raise for options that cannot be run.

    >>> check({option.name: option.default for option in OPTIONS} | {"steps": 0})
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: steps is 0; give a whole number from 1 up
    """
    for name in ("depth", "width", "batch", "steps", "every", "size"):
        if options[name] < 1:
            raise BatchNormError(f"{name} is {options[name]}", do="give a whole number from 1 up")
    if not (math.isfinite(options["rate"]) and options["rate"] > 0):
        raise BatchNormError(f"rate is {options['rate']:g}", do="give a number above 0")
    for name in ("momentum", "decay"):
        if not 0 <= options[name] < 1:
            raise BatchNormError(f"{name} is {options[name]:g}", do="give a number from 0, below 1")
    norms = NETWORKS[options["network"]][1]
    if options["norm"] not in norms:
        raise BatchNormError(
            f"the network {options['network']!r} has no norm {options['norm']!r}",
            do=f"choose one of {', '.join(norms)}",
        )


def run(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Train the network and return how well it does.

    >>> run({option.name: option.default for option in OPTIONS}, recorder)  # doctest: +SKIP
    {'accuracy': 0.98, 'best_accuracy': 0.99, ...}
    """
    dtype = DTYPES[options["dtype"]]
    source = sets.load(options["data"], **({"size": options["size"]} if options["data"] == "imagefolder" else {}))
    report = examples(source).to(dtype)
    # Nothing is chosen on test images; the bundled digits have one split.
    data = report if source.name == sets.BUNDLED else hold_out(report)
    rank, world = ranks.place()
    if options["batch"] % world:
        raise BatchNormError(
            f"a batch of {options['batch']} does not divide among {world} processes", do="give a multiple as batch"
        )
    network = build(options, data).to(dtype)
    if world > 1:
        network, _ = convert(network, "sync")
    trained = DistributedDataParallel(network) if world > 1 else network
    optimizer = torch.optim.SGD(grouped(network, options["decay"]), options["rate"], options["momentum"])
    start = restore(recorder, network, optimizer, source.checksum, options["steps"])
    order = batches(options["seed"], len(data.train_labels), options["batch"])
    best = start.get("best", 0.0)
    total, count = start.get("total", 0.0), start.get("count", 0)
    first = start.get("step", 0)
    for step, chosen in enumerate(itertools.islice(order, first, options["steps"]), start=first + 1):
        factor = SCHEDULES[options["schedule"]]((step - 1) / options["steps"])
        for group in optimizer.param_groups:
            group["lr"] = options["rate"] * factor
        own = chosen[rank::world]
        loss = F.cross_entropy(trained(data.train_inputs[own]), data.train_labels[own])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        value = ranks.mean(loss.item())
        if not math.isfinite(value):
            recorder.log(step, loss=value)
            return {
                "diverged_at": step,
                "accuracy": best,
                "best_accuracy": best,
                "headline": f"diverged at step {step}",
            }
        total, count = total + value, count + 1
        if step % options["every"] == 0 or step == options["steps"]:
            accuracy = validate(network, data, rank, world)
            best = max(best, accuracy)
            recorder.log(step, loss=total / count, accuracy=accuracy, rate=options["rate"] * factor)
            total, count = 0.0, 0
        recorder.progress(step, options["steps"], f"best accuracy {best:.1%}")
        if recorder.due():
            facts = {"best": best, "total": total, "count": count, "checksum": source.checksum}
            recorder.save(step, state_of(network, optimizer), **facts)
    recorder.save(options["steps"], state_of(network, optimizer), best=best, checksum=source.checksum)
    accuracy = validate(network, data, rank, world)  # also where a kill came between the checkpoint and the result
    return {
        "accuracy": accuracy,
        "best_accuracy": best,
        "test_accuracy": validate(network, report, rank, world),
        "data": {"name": source.name, "checksum": source.checksum},
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "headline": f"accuracy {accuracy:.1%}",
    }


def build(options: Mapping[str, Any], data: Examples) -> nn.Module:
    """Build the network that the options name, for this data.

    >>> build({"network": "conv", "norm": "group", "depth": 1, "width": 4, "seed": 0}, digits)  # doctest: +SKIP
    """
    make, _ = NETWORKS[options["network"]]
    shape = tuple(data.train_inputs.shape[1:])
    return make(options["seed"], options["norm"], options["depth"], options["width"], shape, data.classes)


def grouped(network: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Return parameter groups: weights decay, vectors do not."""
    parameters = list(network.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def state_of(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return what a checkpoint keeps: the network's state, and each parameter's momentum."""
    state = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
    for name, parameter in network.named_parameters():
        momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
        if momentum is not None:
            state[f"momentum.{name}"] = momentum
    return state


def restore(
    recorder: Recorder, network: nn.Module, optimizer: torch.optim.Optimizer, checksum: str, steps: int
) -> Mapping[str, Any]:
    """Put the last checkpoint into the network and its optimizer; return its facts and its step."""
    saved = recorder.restored()
    if saved is None:
        return {}
    if saved.facts.get("checksum") != checksum:
        raise BatchNormError(
            "the data are not those that this run began with", do="give the folder that it began with as --data"
        )
    tensors = saved.tensors
    own = {name.removeprefix("network."): t for name, t in tensors.items() if name.startswith("network.")}
    momentum = {name.removeprefix("momentum."): t for name, t in tensors.items() if name.startswith("momentum.")}
    parameters = dict(network.named_parameters())
    wrong = mismatch(own, network.state_dict()) or mismatch(
        momentum, {name: parameter for name, parameter in parameters.items() if name in momentum}
    )
    if wrong or saved.step > steps:
        raise BatchNormError(
            f"its checkpoint is not of this run ({wrong or f'of step {saved.step:,}'})", do="delete the run"
        )
    network.load_state_dict(own)
    for name, tensor in momentum.items():
        optimizer.state[parameters[name]]["momentum_buffer"] = tensor.clone()
    facts = {"best": float, "total": float, "count": int, "checksum": str}
    with values_of("its checkpoint", "delete the run"):
        typed(dict(saved.facts), facts, "it")
    return {**saved.facts, "step": saved.step}


@torch.no_grad()
def validate(network: nn.Module, data: Examples, rank: int = 0, world: int = 1) -> float:
    """Return the validation accuracy in evaluation mode; every process looks at its share."""
    network.eval()
    inputs, labels = data.validation_inputs[rank::world], data.validation_labels[rank::world]
    right = sum(
        int((network(inputs[start : start + CHUNK]).argmax(1) == labels[start : start + CHUNK]).sum())
        for start in range(0, len(labels), CHUNK)
    )
    network.train()
    return ranks.total(right) / len(data.validation_labels)
