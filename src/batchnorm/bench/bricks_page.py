"""The page about the bricks, made from the table and from the layers themselves.

``python -m batchnorm.bench.bricks_page > docs/bricks.md`` writes it; ``--check docs/bricks.md`` says whether the page
is what the code gives now, the measured times aside.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor, nn

from batchnorm import kernels
from batchnorm.bench.measure import alternate, ratio
from batchnorm.layers.family import Brick, make_norm, table
from batchnorm.records import Measurement, machine

SHAPE = (32, 64, 28, 28)  # of a batch in an early stage of a ResNet
Cost = tuple[float, float, float]  # the median of the ratios, and the quartiles around it
_COST = "## What they cost"
_LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def write_page(costs: Mapping[str, Mapping[str, Cost]], circumstances: str) -> str:
    """Write the whole page: what the bricks are, from the code, and what they cost, from the given figures.

    >>> write_page({}, "").splitlines()[0]
    '# The bricks'
    """
    rows = [row for row in table() if row.present()]
    return "\n".join([*_facts(rows), "", _COST, "", *_cost_lines(costs, circumstances)]) + "\n"


def facts_of(page: str) -> str:
    """Return the part of a page that is the same on every machine.

    >>> here = write_page({"batch": dict.fromkeys(_LAYOUTS, (1.0, 0.9, 1.1))}, "here")
    >>> facts_of(here) == facts_of(write_page({}, "there"))
    True
    """
    return page.partition(_COST)[0].strip()


def _facts(rows: Sequence[Brick]) -> list[str]:
    lines = [
        "# The bricks",
        "",
        "Made by `python -m batchnorm.bench.bricks_page > docs/bricks.md`: the names and the advice are the table in",
        "`batchnorm/layers/family.py`, everything else is read off the layers that",
        "`bn.make_norm(name, channels, dims=2, of=None, activation=None, **options)` builds. Write a network once:",
        "",
        "```python",
        "import torch",
        "import batchnorm as bn",
        "",
        "conv = torch.nn.Conv2d(3, 64, 3, bias=False)",
        'norm = bn.make_norm("group", 64, of=conv, activation="relu")  # or any name of the table',
        "y = norm(conv(torch.randn(8, 3, 16, 16)))",
        "```",
        "",
        "| name | statistics | use when |",
        "|---|---|---|",
        *(f"| `{row.name}` | {row.statistics} | {row.use_when} |" for row in rows),
        "",
        "## What they learn and keep",
        "",
        "For C channels. *Others matter*: an example's output changes when the other examples of its batch do (tried,",
        "not claimed). *Train = eval*: the two modes give the same output after ten training steps. *Keeps",
        "channels_last*: an input in that layout gives an output in it.",
        "",
        "| name | layer | learns | keeps | others matter in training | in evaluation | train = eval |"
        " keeps channels_last |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        fact = measure_facts(row.name)
        lines.append(f"| `{row.name}` | {' | '.join(fact.values())} |")
    return lines


def measure_facts(name: str, channels: int = 16) -> dict[str, str]:
    """Build the brick and find out what it is.

    >>> measure_facts("group")["in evaluation"]
    'no'
    """
    site = _BrickSite(name, channels)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, channels, 5, 5, generator=generator)
    other = torch.cat([x[:1], 3 * torch.randn(7, channels, 5, 5, generator=generator) + 1])
    # original1 is the weight itself, which the layer before has with any norm.
    learns = {key: p for key, p in site.named_parameters() if not key.endswith("original1")}
    last = site(x.contiguous(memory_format=torch.channels_last))
    facts = {
        "layer": f"`{_class_name(site.norm)}`",
        "learns": _sizes(learns, channels),
        "keeps": _sizes(dict(site.norm.named_buffers()), channels),
        "in training": _yes(_depends(site.train(), x, other)),
    }
    with torch.no_grad():
        for _ in range(10):
            site(x + torch.randn(x.shape, generator=generator))
    facts["in evaluation"] = _yes(_depends(site.eval(), x, other))
    with torch.no_grad():
        trained = copy.deepcopy(site).train()(x)
        facts["train = eval"] = _yes(torch.allclose(site(x), trained, rtol=1e-4, atol=1e-5))
    facts["keeps channels_last"] = _yes(last.is_contiguous(memory_format=torch.channels_last))
    return facts


class _BrickSite(nn.Module):
    """A norm where a network has it: behind a layer that leaves its input as it is, so that it is the norm's."""

    def __init__(self, name: str, channels: int, kernel: int = 1) -> None:
        super().__init__()
        before = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False)
        self.norm = make_norm(name, channels, of=before)
        self.before = before if name == "weight" else None
        self.masked = name == "masked"

    def forward(self, x: Tensor) -> Tensor:
        # Nothing is padding here, but a masked layer needs a mask.
        more = [torch.ones(x.shape[0], *x.shape[2:], dtype=torch.bool)] if self.masked else []
        return self.norm(x if self.before is None else self.before(x), *more)  # type: ignore[no-any-return]


def _depends(site: nn.Module, x: Tensor, other: Tensor) -> bool:
    """Whether the output for the first example changes with the other examples."""
    with torch.no_grad():
        return not torch.equal(copy.deepcopy(site)(x)[0], copy.deepcopy(site)(other)[0])


def _class_name(layer: nn.Module) -> str:
    home = type(layer).__module__
    return f"{'torch.nn' if home.startswith('torch.nn') else 'batchnorm'}.{type(layer).__name__}"


def _sizes(tensors: Mapping[str, Tensor], channels: int) -> str:
    """Say what there is and how many numbers: C for one per channel."""
    sizes: dict[str, list[str]] = {}
    for key, tensor in tensors.items():
        count = "C" if tensor.numel() == channels else str(tensor.numel())
        sizes.setdefault(count, []).append(key.replace("before.parametrizations.weight.", "").removeprefix("norm."))
    return (
        "; ".join(f"{', '.join(keys)}: {count}" + (" each" * (len(keys) > 1)) for count, keys in sizes.items()) or "-"
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"


# ---- Cost --------------------------------------------------------------------------------------------------


def measure_costs(rounds: int = 25, shape: tuple[int, ...] = SHAPE) -> dict[str, dict[str, Cost]]:
    """Time forward and backward of every brick against ``torch.nn.BatchNorm2d``, taking turns in one process.

    >>> sorted(measure_costs(rounds=1, shape=(2, 4, 3, 3))["group"])
    ['channels_last', 'contiguous']
    """
    costs: dict[str, dict[str, Cost]] = {}
    for layout, memory_format in _LAYOUTS.items():
        x = torch.randn(shape).contiguous(memory_format=memory_format)
        dy = torch.randn(shape).contiguous(memory_format=memory_format)
        steps: dict[str, Callable[[], Any]] = {"": _step(nn.BatchNorm2d(shape[1]), x, dy)}
        for row in table():
            if row.present():
                steps[row.name] = _step(_BrickSite(row.name, shape[1], kernel=3), x, dy)
        times = {name: Measurement("time", {}, samples) for name, samples in alternate(steps, rounds).items()}
        for name, measured in times.items():
            if name:
                each = [a / b for a, b in zip(measured.samples, times[""].samples, strict=True)]
                low, _, high = quantiles(each, n=4, method="inclusive") if len(each) > 1 else each * 3
                costs.setdefault(name, {})[layout] = (ratio(measured, times[""]), low, high)
    return costs


def _step(layer: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], Any]:
    leaf, parameters = x.clone().requires_grad_(), list(layer.parameters())
    before: Any = getattr(layer, "before", None)
    if before is None:
        return lambda: torch.autograd.grad([layer(leaf)], [leaf, *parameters], [dy])
    norm = layer.get_submodule("norm")
    # The norm is of a weight: its cost is computing that, and not the convolution that uses it.
    along = torch.randn_like(before.weight)
    return lambda: torch.autograd.grad([norm(leaf), before.weight], [leaf, *parameters], [dy, along])


def _cost_lines(costs: Mapping[str, Mapping[str, Cost]], circumstances: str) -> list[str]:
    lines = [
        f"Forward and backward in training on {' x '.join(map(str, SHAPE))}, float32, as a multiple of the time of",
        "`torch.nn.BatchNorm2d` in the same layout: the median of the ratios within each round and their quartiles,",
        "the contenders taking turns in one process. No activation, except that `filter-response` has its own.",
        "`weight` is of a 3x3 convolution: its cost is that of computing the weight, and of a bias.",
        "",
        f"Measured on {circumstances}",
        "",
        f"| name | {' | '.join(_LAYOUTS)} |",
        "|---|--:|--:|",
    ]
    for name, by_layout in costs.items():
        figures = " | ".join("{:.2f} ({:.2f}-{:.2f})".format(*by_layout[layout]) for layout in _LAYOUTS)
        lines.append(f"| `{name}` | {figures} |")
    return lines


def describe_circumstances() -> str:
    """Say on what the costs are measured.

    >>> describe_circumstances().endswith(".")
    True
    """
    here, threads = machine(), torch.get_num_threads()
    return (
        f"{here['processor']} ({here['system']}), {threads} {'thread' if threads == 1 else 'threads'}, torch "
        f"{torch.__version__}; our batch norms on the {kernels.describe()}."
    )


def main(arguments: Sequence[str]) -> int:
    """Print the page, or with ``--check PATH`` compare one.

    >>> main(["--check", "no-such-file"])
    no-such-file: there is no such page; make it with python -m batchnorm.bench.bricks_page > no-such-file
    1
    """
    if list(arguments[:1]) != ["--check"]:
        sys.stdout.write(write_page(measure_costs(), describe_circumstances()))
        return 0
    path = Path(arguments[1] if len(arguments) > 1 else "docs/bricks.md")
    again = f"make it with python -m batchnorm.bench.bricks_page > {path}"
    if not path.exists():
        print(f"{path}: there is no such page; {again}")
        return 1
    if facts_of(path.read_text(encoding="utf-8")) != facts_of(write_page({}, "")):
        print(f"{path}: the page is not what the code gives; {again}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
