"""From what the user names to what is raced: networks for each seed, with and without BN, and examples."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.batches import load_batches
from batchnorm.errors import BatchNormError, first_line
from batchnorm.lab.data.digits import SPLIT_SEED, stratified_split
from batchnorm.lab.data.examples import Examples
from batchnorm.lab.ensemble import Copies
from batchnorm.specs import called, made_by
from batchnorm.transforms.insert import insert

MOST_VALIDATED = 1000  # examples: more would take longer than the training between two validations


@dataclass(frozen=True)
class RaceSubject:
    """A user's network for each seed, without and with BN, and the examples.

    ``alone`` says why copies cannot be trained side by side; empty if they can.
    """

    plain: dict[int, nn.Module]
    normed: dict[int, nn.Module]
    places: tuple[str, ...]
    data: Examples
    alone: str = ""
    code: bytes = b""

    @property
    def checksum(self) -> str:
        """The SHA-256 of the networks' code, of their weights as they begin, and of the examples."""
        digest = hashlib.sha256(self.code)
        examples = self.data
        tensors = [examples.train_inputs, examples.train_labels, examples.validation_inputs, examples.validation_labels]
        for network in self.plain.values():
            tensors += network.state_dict().values()
        for tensor in tensors:
            digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def load(model: str, data: str, seeds: Sequence[int], batch_size: int) -> RaceSubject:
    """Make the networks and the examples that a user names.

    >>> load("net.py:make", "train.npz", seeds=[0], batch_size=32)
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: there is no file net.py; write file.py:factory or package.module:factory
    """
    plain: dict[int, nn.Module] = {}
    with torch.random.fork_rng(devices=()):
        factory = made_by(model, object)
        if isinstance(factory, nn.Module) or not callable(factory):
            raise BatchNormError(
                f"{model} is a {type(factory).__name__}, and every seed needs a network of its own",
                do="name a function or class that makes one",
            )
        for seed in seeds:
            torch.manual_seed(seed)
            made = called(f"{model}()", factory)
            if not isinstance(made, nn.Module):
                raise BatchNormError(
                    f"{model} gives a {type(made).__name__}, not a torch.nn.Module",
                    do="name a function that returns a model",
                )
            plain[seed] = made.train()
        first = plain[seeds[0]]
        held = [name for name, module in first.named_modules() if isinstance(module, _BatchNorm)]
        if held:
            raise BatchNormError(
                f"{model} has Batch Normalization already ({held[0]})", do="name the network without it"
            )
        examples = load_examples(data, first)
        batch = examples.train_inputs[:batch_size]
        report = called("inserting BN", lambda: insert(first, batch))[1]
        normed = {seed: insert(network, batch)[0].train() for seed, network in plain.items()}
        alone = obstacle([plain[seeds[0]], normed[seeds[0]]], examples, batch_size)
    return RaceSubject(plain, normed, report.paths, examples, alone, code_of(factory))


def code_of(factory: Any) -> bytes:
    """Return the file that a factory is written in, nothing if there is none.

    >>> code_of(len)
    b''
    """
    try:
        return Path(inspect.getsourcefile(factory) or "").read_bytes()
    except (TypeError, OSError):
        return b""


def load_examples(data: str, network: nn.Module) -> Examples:
    """Read labelled data, and split it: a quarter of every class, at most 1,000 examples, is for validation.

    >>> load_examples("train.txt", nn.Flatten())
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: 'train.txt' is not a data file; give a file of one of .npy, .npz, .pt, .pth, \
.ckpt, .bin, .safetensors, a folder of them, or file.py:factory
    """
    kind = next((p.dtype for p in network.parameters() if p.dtype.is_floating_point), torch.float32)
    inputs, labels = [], []
    for batch in load_batches(data, dtype=kind):
        if not isinstance(batch.inputs, Tensor):
            raise BatchNormError(f"{data} has several inputs", do="the race takes networks of one input")
        if not isinstance(batch.labels, Tensor) or batch.labels.dim() != 1 or batch.labels.dtype.is_floating_point:
            raise BatchNormError(
                f"{data} has no whole-number labels, one for each example", do="give inputs and labels"
            )
        inputs.append(batch.inputs)
        labels.append(batch.labels.long())
    if not inputs:
        raise BatchNormError(f"{data} gives no batches")
    x, y = torch.cat(inputs), torch.cat(labels)
    scores = called("calling the network", lambda: network.eval()(x[:2]))
    network.train()
    if not isinstance(scores, Tensor) or scores.dim() != 2:
        what = f"scores of shape {list(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise BatchNormError(f"the network gives {what}", do="return one row of class scores for each example")
    if int(y.min()) < 0 or int(y.max()) >= scores.shape[1]:
        raise BatchNormError(
            f"the labels of {data} are {int(y.min())} to {int(y.max())}, "
            f"and the network scores {scores.shape[1]} classes"
        )
    train, validation = stratified_split(np.asarray(y))
    if len(validation) > MOST_VALIDATED:
        validation = np.sort(np.random.default_rng(SPLIT_SEED).permutation(validation)[:MOST_VALIDATED])
    if not len(validation):
        raise BatchNormError(
            f"{data} has {len(y)} examples, too few to validate on", do="give 4 of some class, or more"
        )
    a, b = torch.from_numpy(train), torch.from_numpy(validation)
    return Examples(x[a], y[a], x[b], y[b], scores.shape[1])


def obstacle(networks: Sequence[nn.Module], data: Examples, batch_size: int) -> str:
    """Say why copies of a network cannot be trained side by side; empty if they can.

    >>> data = Examples(torch.zeros(4, 3), torch.zeros(4), torch.zeros(4, 3), torch.zeros(4), 2)
    >>> obstacle([nn.Linear(3, 2)], data, batch_size=2)
    ''
    """
    batch = data.train_inputs[:batch_size]
    for network in networks:
        try:
            copies = Copies([network, network])
            copies.gradients(copies.scores(torch.stack([batch, batch])).sum((1, 2)))
            copies.evaluate(batch)
        except Exception as error:  # whatever the user's forward does that vmap does not know
            return first_line(error) if str(error) else type(error).__name__
    return ""
