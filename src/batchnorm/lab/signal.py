"""The signal: what four layers of tanh are given, step by step, without Batch Normalization and with it.

Two networks with the same weights at the start, the same order of examples, learning rate and momentum; one has BN
before each tanh. What is recorded is the input of every tanh: where it moves into the flat ends, hardly any gradient
passes. In the network with BN the two stages before are recorded too: what arrives at BN, and its normalized values,
before gamma and beta stretch them again.

The start (standard deviation 1/sqrt(fan_in)), the rate (0.5) and the momentum (0.9) were chosen because all four layers
saturate gradually there: the plain network learns first and is lost afterwards. They are no network's best.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from batchnorm.errors import BatchNormError
from batchnorm.files import write_atomically
from batchnorm.lab.data import digits
from batchnorm.lab.networks.schemes import SCHEMES, deviation
from batchnorm.lab.train import batches
from batchnorm.layers.batch import BatchNorm1d
from batchnorm.observe.quantities.saturation import ENDS
from batchnorm.observe.sinks import Memory
from batchnorm.observe.watch import watch
from batchnorm.records import RecordFile, header_line, line

LAYERS = 4
WITHOUT, WITH = "without BN", "with BN"
QUANTITIES = ("histogram", "mean", "variance", "saturation", "gamma", "beta", "gradient norm")
ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "sigmoid": nn.Sigmoid}
RANGE = {"tanh": (-6.0, 6.0), "sigmoid": (-10.0, 10.0)}  # of the histograms: the flat ends and a bit more
BINS = 40
REMARK = (  # of the default recipe
    "The start, the rate and the momentum were chosen because all layers saturate gradually with them. They are not "
    "the plain network's best: at a tenth of the rate it reads about as many digits as with BN (batchnorm watch-demo "
    "--rate 0.05)."
)
EARLY = 100  # every step before this one is recorded


@dataclass(frozen=True)
class SignalRecipe:
    """How the two networks are trained.

    >>> SignalRecipe(rate=0)
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: --rate is 0; give a number above 0
    """

    init: str = "lecun"
    rate: float = 0.5
    momentum: float = 0.9
    steps: int = 400
    every: int = 5
    activation: str = "tanh"
    batch_size: int = 64
    width: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise for what cannot be trained."""
        if self.init not in SCHEMES:
            raise BatchNormError(f"--init is {self.init!r}", do=f"choose one of {', '.join(SCHEMES)}")
        if self.activation not in ACTIVATIONS:
            raise BatchNormError(f"--activation is {self.activation!r}", do=f"choose one of {', '.join(ACTIVATIONS)}")
        if not 0 <= self.momentum < 1:
            raise BatchNormError(f"--momentum is {self.momentum:g}", do="give a number from 0 up, below 1")
        if not 0 < self.rate < float("inf"):
            raise BatchNormError(f"--rate is {self.rate:g}", do="give a number above 0")
        for name in ("steps", "every"):
            if getattr(self, name) < 1:
                raise BatchNormError(f"--{name} is {getattr(self, name)}", do="give a whole number from 1 up")


def stack(recipe: SignalRecipe, normalised: bool, inputs: int = 64, classes: int = digits.CLASSES) -> nn.Sequential:
    """Build one of the two networks; both draw the same weights.

    >>> [name for name, _ in stack(SignalRecipe(), normalised=True).named_children()][:4]
    ['linear 1', 'normalise 1', 'stretch 1', 'tanh 1']
    >>> torch.equal(stack(SignalRecipe(), True)[4].weight, stack(SignalRecipe(), False)[2].weight)
    True

    BN comes in its two parts, so that what is between them can be seen: one layer normalises by the batch and has no
    gamma and beta; the other has only these, for statistics that stay at mean 0 and variance 1.
    """
    stream = torch.Generator().manual_seed(recipe.seed)
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    for number in range(1, LAYERS + 1):
        # BN would cancel a bias: its own beta takes that place.
        modules[f"linear {number}"] = linear(stream, inputs, recipe.width, recipe.init, bias=not normalised)
        if normalised:
            modules[f"normalise {number}"] = BatchNorm1d(recipe.width, affine=False)
            modules[f"stretch {number}"] = BatchNorm1d(recipe.width, eps=0.0, statistics="running", update=False)
        modules[f"{recipe.activation} {number}"] = ACTIVATIONS[recipe.activation]()
        inputs = recipe.width
    modules["read-out"] = linear(stream, inputs, classes, "lecun")
    return nn.Sequential(modules)


def names(network: nn.Sequential) -> dict[str, str]:
    """Return the modules whose inputs are recorded, by the names of their signals.

    >>> list(names(stack(SignalRecipe(), normalised=False)).items())[:2]
    [('layer 1 weights', 'linear 1'), ('layer 1', 'tanh 1')]
    >>> list(names(stack(SignalRecipe(), normalised=True)))[:4]
    ['layer 1 weights', 'layer 1 before BN', 'layer 1 normalised', 'layer 1']
    """
    words = {
        "linear": " weights",
        "normalise": " before BN",
        "stretch": " normalised",
        **dict.fromkeys(ACTIVATIONS, ""),
    }
    parts = (path.split(" ") for path, _ in network.named_children())
    return {f"layer {number[0]}{words[kind]}": f"{kind} {number[0]}" for kind, *number in parts if kind in words}


def linear(stream: torch.Generator, inputs: int, outputs: int, scheme: str, bias: bool = True) -> nn.Linear:
    """Make a linear layer with Gaussian weights of a named scheme, and biases of 0.

    >>> linear(torch.Generator().manual_seed(0), 3, 2, "xavier").bias.tolist()
    [0.0, 0.0]
    """
    with torch.random.fork_rng(devices=()):  # torch's own initial weights are overwritten; do not advance its generator
        layer = nn.Linear(inputs, outputs, bias=bias)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(outputs, inputs, generator=stream) * deviation(scheme, inputs, outputs))
        if bias:
            layer.bias.zero_()
    return layer


def record(recipe: SignalRecipe, look: Callable[[int], None] = lambda done: None) -> RecordFile:
    """Train both networks and return the records; ``look`` is called with the number of steps done by both.

    >>> seen = record(SignalRecipe(steps=2, every=1))
    >>> sorted({m.setting["stack"] for m in seen.measurements})
    ['with BN', 'without BN']
    """
    data, memory = digits.load(), Memory()
    for index, name in enumerate((WITHOUT, WITH)):
        train(recipe, name, data, memory, look, already=index * (recipe.steps + 1))
    ends = ENDS[recipe.activation](None)
    configuration = {**asdict(recipe), "layers": LAYERS, "data": "digits", "optimizer": "SGD", "flat_ends": ends}
    summary = {"remark": REMARK} if recipe == SignalRecipe(seed=recipe.seed) else {}
    return replace(memory.records(), configuration=configuration, summary=summary)


def train(
    recipe: SignalRecipe,
    name: str,
    data: digits.Split,
    memory: Memory,
    look: Callable[[int], None] = lambda done: None,
    already: int = 0,
) -> None:
    """Train one of the two networks, watched.

    >>> memory = Memory()
    >>> train(SignalRecipe(steps=1), WITH, digits.load(), memory)
    >>> memory.records().measurements[-1].quantity
    'validation accuracy'
    """
    network = stack(recipe, name == WITH, data.train_images[0].size, data.classes)
    images, labels = torch.from_numpy(data.train_images).flatten(1), torch.from_numpy(data.train_labels)
    optimizer = torch.optim.SGD(network.parameters(), recipe.rate, recipe.momentum)
    order = batches(recipe.seed, len(labels), recipe.batch_size)
    for steps, every in schedule(recipe):
        with watch(
            network,
            optimizer,
            every=every,
            quantities=QUANTITIES,
            to=memory,
            stack=name,
            layers=names(network),
            range=RANGE[recipe.activation],
            bins=BINS,
            start=steps.start,
        ) as seen:
            for step in steps:
                chosen = next(order)
                loss = F.cross_entropy(network(images[chosen]), labels[chosen])
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                if step % every == 0:
                    seen.log("training loss", loss, unit="nats")
                    seen.log("validation accuracy", validate(network, data), step=step)
                optimizer.step()
                look(already + step + 1)


def schedule(recipe: SignalRecipe) -> list[tuple[range, int]]:
    """Return the parts of a run and how often each is recorded; one pass more than there are steps shows the result.

    >>> schedule(SignalRecipe(steps=400, every=5)), schedule(SignalRecipe(steps=9))
    ([(range(0, 100), 1), (range(100, 401), 5)], [(range(0, 10), 1)])
    """
    early, end = min(EARLY, recipe.steps + 1), recipe.steps + 1
    return [(range(early), 1), *([(range(early, end), recipe.every)] if end > early else [])]


@torch.no_grad()
def validate(network: nn.Module, data: digits.Split) -> float:
    """Give the share of validation images that are read right, with the running statistics.

    >>> 0 <= validate(stack(SignalRecipe(), True), digits.load()) <= 1
    True
    """
    network.eval()
    scores = network(torch.from_numpy(data.validation_images).flatten(1))
    network.train()
    right: torch.Tensor = scores.argmax(1) == torch.from_numpy(data.validation_labels)
    return right.double().mean().item()


def write(records: RecordFile, path: Path) -> Path:
    """Write records as a file of lines, as ``watch`` does, in one step.

    >>> write(record(SignalRecipe()), Path("signal.jsonl"))  # doctest: +SKIP
    PosixPath('signal.jsonl')
    """
    return write_atomically(path, header_line(records) + "".join(map(line, records.measurements)))
