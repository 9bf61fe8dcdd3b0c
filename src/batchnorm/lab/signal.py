"""The signal: what four layers of sigmoids are given, step by step, without Batch Normalization and with it.

Two networks of four sigmoid layers, with the same weights at the start, the same order of examples and the same
learning rate; one has BN before each sigmoid. What is recorded is what the sigmoids are given: where it drifts into
their flat ends, hardly a gradient comes back. In the network with BN the two stages before are recorded too: what
arrives at BN, and what is left of it with mean 0 and variance 1, before gamma and beta stretch it again.

The start (Xavier) and the rate (3) were chosen because they show it within 600 steps. They are no network's best: from
larger weights, or given more steps, the plain one learns as well. Other choices are options.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchnorm.errors import BatchNormError
from batchnorm.lab.data import digits
from batchnorm.lab.networks.schemes import SCHEMES, deviation
from batchnorm.lab.train import batches
from batchnorm.records import Measurement, RecordFile

LAYERS = 4
WITHOUT, WITH = "without BN", "with BN"
ARRIVES, NORMALISED = "before BN", "normalised"


@dataclass(frozen=True)
class Recipe:
    """How the two networks are trained.

    >>> Recipe(rate=0)
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: --rate is 0; give a number above 0
    """

    init: str = "xavier"
    rate: float = 3.0
    steps: int = 600
    every: int = 4
    batch_size: int = 60  # the paper's, in its Figure 1
    width: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        if self.init not in SCHEMES:
            raise BatchNormError(f"--init is {self.init!r}", do=f"choose one of {', '.join(SCHEMES)}")
        if not 0 < self.rate < float("inf"):
            raise BatchNormError(f"--rate is {self.rate:g}", do="give a number above 0")
        for name in ("steps", "every"):
            if getattr(self, name) < 1:
                raise BatchNormError(f"--{name} is {getattr(self, name)}", do="give a whole number from 1 up")


def stack(recipe: Recipe, normalised: bool, inputs: int = 64, classes: int = digits.CLASSES) -> nn.Sequential:
    """Build one of the two networks; both draw the same weights.

    >>> [name for name, _ in stack(Recipe(), normalised=True).named_children()][:3]
    ['linear 1', 'bn 1', 'layer 1']
    >>> torch.equal(stack(Recipe(), True)[3].weight, stack(Recipe(), False)[2].weight)
    True
    """
    stream = torch.Generator().manual_seed(recipe.seed)
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    for number in range(1, LAYERS + 1):
        # BN would cancel a bias: its own beta takes that place.
        modules[f"linear {number}"] = linear(stream, inputs, recipe.width, recipe.init, bias=not normalised)
        if normalised:
            modules[f"bn {number}"] = nn.BatchNorm1d(recipe.width)
        modules[f"layer {number}"] = nn.Sigmoid()
        inputs = recipe.width
    modules["read-out"] = linear(stream, inputs, classes, "xavier")
    return nn.Sequential(modules)


def linear(stream: torch.Generator, inputs: int, outputs: int, scheme: str, bias: bool = True) -> nn.Linear:
    """Make a linear layer with Gaussian weights of a named scheme, and biases of 0.

    >>> linear(torch.Generator().manual_seed(0), 3, 2, "xavier").bias.tolist()
    [0.0, 0.0]
    """
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(outputs, inputs, generator=stream) * deviation(scheme, inputs, outputs))
        if bias:
            layer.bias.zero_()
    return layer


def record(recipe: Recipe, look: Callable[[int], None] = lambda done: None) -> RecordFile:
    """Train both networks and return what was seen; ``look`` is told how many steps of both are done.

    >>> seen = record(Recipe(steps=2, every=1))
    >>> sorted({m.setting["stack"] for m in seen.measurements})
    ['with BN', 'without BN']
    """
    data = digits.load()
    measurements: list[Measurement] = []
    for index, name in enumerate((WITHOUT, WITH)):
        measurements += train(recipe, name, data, lambda step, done=index: look(done * recipe.steps + step))
    configuration = {**asdict(recipe), "layers": LAYERS, "data": "digits", "optimizer": "SGD"}
    return RecordFile("watch", configuration, tuple(measurements))


def train(recipe: Recipe, name: str, data: digits.Split, look: Callable[[int], None]) -> list[Measurement]:
    """Train one of the two networks and return what was seen of it.

    >>> train(Recipe(steps=1), WITH, digits.load(), print)[-1].quantity
    1
    'validation accuracy'
    """
    network = stack(recipe, name == WITH, data.train_images[0].size, data.classes)
    images, labels = torch.from_numpy(data.train_images).flatten(1), torch.from_numpy(data.train_labels)
    optimizer = torch.optim.SGD(network.parameters(), recipe.rate)
    order = batches(recipe.seed, len(labels), recipe.batch_size)
    found: list[Measurement] = []
    for step in range(recipe.steps):
        chosen = next(order)
        seen: dict[str, Tensor] = {}
        hooks = [
            m.register_forward_pre_hook(lambda m, x, path=path: seen.__setitem__(path, x[0].detach()))
            for path, m in network.named_children()
        ]
        loss = F.cross_entropy(network(images[chosen]), labels[chosen])
        for hook in hooks:
            hook.remove()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % recipe.every == 0 or step == recipe.steps - 1:
            found += observe(network, seen, {"step": step, "stack": name})
            run = {"step": step, "stack": name, "layer": ""}
            found.append(Measurement("training loss", run, (loss.item(),), "nats"))
            found.append(Measurement("validation accuracy", run, (validate(network, data),)))
        look(step + 1)
    return found


def observe(network: nn.Sequential, seen: dict[str, Tensor], about: dict[str, object]) -> list[Measurement]:
    """TEMPORARY: until watch is there."""
    found = []
    for number in range(1, LAYERS + 1):
        values = seen[f"layer {number}"]
        setting = {**about, "layer": f"layer {number}"}
        stages: dict[str, Tensor] = {"": values}
        if f"bn {number}" in seen:
            bn = network.get_submodule(f"bn {number}")
            x = seen[f"bn {number}"]
            stages[ARRIVES] = x
            stages[NORMALISED] = F.batch_norm(x, None, None, training=True)
            for what, p in (("gamma", bn.weight), ("beta", bn.bias)):
                found.append(Measurement(what, setting, (p.mean().item(), p.min().item(), p.max().item())))
        for stage, v in stages.items():
            own = {**setting, "stage": stage} if stage else setting
            low, high = -10.0, 10.0
            counts = torch.histc(v, 50, low, high)
            under, over = (v < low).sum().item(), (v > high).sum().item()
            found.append(
                Measurement(
                    "histogram",
                    {**own, "low": low, "high": high, "under": under, "over": over},
                    tuple(map(int, counts.tolist())),
                )
            )
            found.append(Measurement("mean", own, (v.mean().item(),)))
            found.append(Measurement("variance", own, (v.var(correction=0).item(),)))
        found.append(Measurement("saturation", setting, ((values.abs() > 4).float().mean().item(),)))
    return found


@torch.no_grad()
def validate(network: nn.Module, data: digits.Split) -> float:
    """Give the share of validation images that are read right, with the running statistics.

    >>> 0 <= validate(stack(Recipe(), True), digits.load()) <= 1
    True
    """
    network.eval()
    scores = network(torch.from_numpy(data.validation_images).flatten(1))
    network.train()
    return (scores.argmax(1) == torch.from_numpy(data.validation_labels)).double().mean().item()
