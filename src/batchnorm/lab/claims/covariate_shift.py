"""A model that fits one region is wrong in another although the truth is the same; what that has to do with BN."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.evidence import ratio
from batchnorm.lab.judge.trials import each
from batchnorm.lab.loop import Tick, cross_entropy, drawn, fit
from batchnorm.lab.networks.chain import Chain
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.observe.probes.shift import shift
from batchnorm.report.sections import Line, Panel, Panels, Section, Table

COUNT, NOISE = 200, 0.05
HOME, AWAY = (-1.5, 1.0), (1.0, 3.0)  # regions of the inputs; the second is not seen in training
SCALE, MOVE = 2.5, 3.0  # the inputs' units change, and the truth with them
GRID = tuple(HOME[0] + (AWAY[1] - HOME[0]) * step / 40 for step in range(41))
MODELS = {"linear": "orange", "network": "blue"}
WORSE, ALIKE = 2.0, 1.5  # times the error at home


def parts(budget: str) -> list[dict[str, Any]]:
    """One part: every seed draws its own samples."""
    return [{"seeds": 7, "steps": 400} if budget == "quick" else {"seeds": 50, "steps": 4000}]


def truth(x: Tensor) -> Tensor:
    """Return the one ground truth, of inputs in one dimension or two.

    >>> truth(torch.tensor([[0.0], [1.0]])).flatten()
    tensor([0., 1.])
    """
    return (x * (4 - x) / 3).mean(1, keepdim=True)


def samples(region: tuple[float, float], dimensions: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw inputs evenly from a region, and the truth with noise."""
    x = region[0] + (region[1] - region[0]) * torch.rand(COUNT, dimensions, generator=stream)
    return x, truth(x) + NOISE * torch.randn(COUNT, 1, generator=stream)


def model_of(kind: str, x: Tensor, y: Tensor, seed: int, steps: int, tick: Tick) -> nn.Module:
    """Fit a straight line (a plane) by least squares, or a small network by SGD; inputs are standardised first."""
    mean, deviation = x.mean(0), x.std(0)
    standard = Standard(mean, deviation)
    if kind == "linear":
        layer = nn.Linear(x.shape[1], 1)
        # In float64: LAPACK's last digits differ from run to run with where its memory is, and would show in float32.
        known = torch.cat([standard(x), torch.ones(len(x), 1)], 1).double()
        found = torch.linalg.lstsq(known, y.double()).solution
        with torch.no_grad():
            layer.weight.copy_(found[:-1].T)
            layer.bias.copy_(found[-1])
        return nn.Sequential(standard, layer)
    network = nn.Sequential(standard, Chain(seed, "none", inputs=x.shape[1], widths=(32, 32), classes=1))

    def loss(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(network(x), y)

    fit(network, drawn(x, y, seed=seed, size=50, steps=steps), rate=0.02, loss=loss, tick=tick)
    return network


class Standard(nn.Module):
    """Subtract a mean and divide by a deviation, both fixed.

    >>> Standard(torch.tensor([1.0]), torch.tensor([2.0]))(torch.tensor([[5.0]]))
    tensor([[2.]])
    """

    def __init__(self, mean: Tensor, deviation: Tensor) -> None:
        """Keep them."""
        super().__init__()
        self.mean, self.deviation = mean, deviation

    def forward(self, x: Tensor) -> Tensor:
        """Standardise."""
        return (x - self.mean) / self.deviation


@torch.no_grad()
def error(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the root mean squared error."""
    return float((model(x) - y).square().mean().sqrt())


@torch.no_grad()
def curve(model: nn.Module) -> list[float]:
    """Return what a model says of `GRID`."""
    return [round(value, 4) for value in model(torch.tensor(GRID)[:, None]).flatten().tolist()]


@torch.no_grad()
def restandardised(model: nn.Module, x: Tensor) -> nn.Sequential:
    """Return the model with the mean and the deviation of new inputs: what BN does to a layer's inputs."""
    assert isinstance(model, nn.Sequential)
    return nn.Sequential(Standard(x.mean(0), x.std(0)), model[1])


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Return the errors of both models in each situation; correlations; the shift inside a network that learns."""

    def one(seed: int, tick: Tick) -> dict[str, Any]:
        found: dict[str, Any] = {"inside": inside(seed, tick), "correlation": correlations(seed), "fits": {}}
        for dimensions in (1, 2):
            stream = torch.Generator().manual_seed(seed)
            home, test, away, more = (samples(r, dimensions, stream) for r in (HOME, HOME, AWAY, AWAY))
            moved, again = (SCALE * test[0] + MOVE, test[1]), SCALE * home[0] + MOVE
            for kind in MODELS:
                model = model_of(kind, *home, seed, options["steps"], tick)
                if dimensions == 1:
                    found["fits"][kind] = curve(model)
                found[f"{kind}, {dimensions}-D"] = {
                    "home": error(model, *test),
                    "away": error(model, *away),
                    "away, refitted": error(model_of(kind, *more, seed, options["steps"], tick), *away),
                    "away, standardised anew": error(restandardised(model, more[0]), *away),
                    "other units": error(model, *moved),
                    "other units, standardised anew": error(restandardised(model, again), *moved),
                }
        return found

    return {"seeds": each(range(options["seeds"]), one, recorder)}


def inside(seed: int, tick: Tick) -> dict[str, list[float]]:
    """Return how far the last layer's gradient moves, as a share, when the layers before it step, as they learn."""
    data = examples(sets.load("digits"), flat=True)
    found: dict[str, list[float]] = {}
    for norm in ("none", "batch"):
        network, rows = Chain(seed, norm), []
        for _, batch in zip(
            range(5), drawn(data.train_inputs, data.train_labels, seed=seed, size=64, steps=5), strict=True
        ):
            moves = shift(network.train(), batch, lambda m, b: cross_entropy(m, *b), lr=0.1, layers=["read_out"])
            rows.append(moves.relative[0])
            fit(network, [batch] * 5, rate=0.1, momentum=0.0, tick=tick)
        found[norm] = rows
    return found


def correlations(seed: int) -> list[float]:
    """Return the correlation of two related quantities over all of the range, and over its upper quarter only."""
    stream = torch.Generator().manual_seed(seed)
    x = torch.randn(2000, generator=stream)
    y = x + torch.randn(2000, generator=stream)
    upper = x > x.quantile(0.75)
    return [float(torch.corrcoef(torch.stack([x[own], y[own]]))[0, 1]) for own in (x > -torch.inf, upper)]


def judge(parts: Sequence[Part]) -> Judgement:
    """Errors as multiples of those at home; for every model, in one dimension and two."""
    seeds = parts[0].result["seeds"]
    estimates = []
    for name in names():
        own = {key: [seed[name][key] for seed in seeds] for key in seeds[0][name]}
        home = own["home"]
        estimates += [
            ratio(f"{name}: away / home", own["away"], home, WORSE),
            ratio(f"{name}: other units / home", own["other units"], home, WORSE),
            ratio(
                f"{name}: units, standardised anew / home",
                own["other units, standardised anew"],
                home,
                ALIKE,
                above=False,
            ),
            ratio(f"{name}: away, refitted / home", own["away, refitted"], home, ALIKE, above=False),
            ratio(f"{name}: away, standardised anew / home", own["away, standardised anew"], home, WORSE),
        ]
    name = names()[-1]
    middle = {key: statistics.median(seed[name][key] for seed in seeds) for key in seeds[0][name]}
    return judged(
        f"In two dimensions the error of a network is {middle['away'] / middle['home']:.1f} times that at home in "
        "another region, "
        f"{middle['away, refitted'] / middle['home']:.1f} after refitting, "
        f"{middle['away, standardised anew'] / middle['home']:.1f} with inputs standardised anew; after a change of "
        "units "
        f"{middle['other units'] / middle['home']:.1f}, standardised anew "
        f"{middle['other units, standardised anew'] / middle['home']:.1f}.",
        estimates,
        len(seeds),
    )


def names() -> list[str]:
    """Return the names of the models.

    >>> names()[0]
    'linear, 1-D'
    """
    return [f"{kind}, {dimensions}-D" for kind in MODELS for dimensions in (1, 2)]


def draw(parts: Sequence[Part]) -> list[Section]:
    """The truth and the fits of one seed; all errors; the shift inside a network; restriction of range."""
    seeds = parts[0].result["seeds"]
    lines = [Line("truth", GRID, truth(torch.tensor(GRID)[:, None]).flatten().tolist(), "ink", "dot")]
    lines += [Line(kind, GRID, seeds[0]["fits"][kind], colour) for kind, colour in MODELS.items()]
    looks = ("without BN", "none", "vermillion"), ("with BN", "batch", "blue")
    steps = [0, 5, 10, 15, 20]
    moves = [
        Line(name, steps, [statistics.median(s["inside"][norm][at] for s in seeds) for at in range(5)], colour)
        for name, norm, colour in looks
    ]
    panels = (
        Panel(f"fitted on inputs below {HOME[1]:g}", tuple(lines), "input"),
        Panel("shift of the last layer's gradient, rate 0.1", tuple(moves), "step"),
    )
    keys = list(seeds[0][names()[0]])
    rows = tuple((name, *(f"{statistics.median(s[name][key] for s in seeds):.3f}" for key in keys)) for name in names())
    whole, upper = (statistics.median(seed["correlation"][at] for seed in seeds) for at in (0, 1))
    notes = (
        f"Restriction of range, its cousin in statistics: a correlation of {whole:.2f} over all cases is {upper:.2f} "
        "among the upper quarter, although the relation is one and the same.",
    )
    table = Table(
        "Errors", "Root mean squared errors, medians.", ("model", *keys), rows, tuple(range(1, 7)), notes=notes
    )
    sentence = (
        "One truth: a fit is right where it has seen inputs. Inside a network inputs move because earlier layers learn."
    )
    return [Panels("Covariate shift", sentence, panels, columns=2, height=320), table]


CLAIM = Claim(
    name="covariate-shift",
    question="why",
    title="A fit fails where inputs move; standardising repairs what is affine",
    statement="When inputs move to another region a model's error rises although the truth is the same, and it has to "
    "be refitted; standardising the inputs anew repairs a change of units and not a change of region.",
    source=Source(
        "Shimodaira 2000; Ioffe & Szegedy 2015, section 1", "doi:10.1016/S0378-3758(00)00115-4, arXiv:1502.03167"
    ),
    rule="For a linear fit and a small network, in one dimension and two, against the error in the region of training: "
    "surely more than twice in another region, standardised anew or not, and after a change of units; surely less than "
    "1.5 times after refitting, and after a change of units when standardised anew. Refuted if one is surely not so.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="200 samples of one parabola with noise; inputs from -1.5 to 1 in training and from 1 to 3 away, or "
    "multiplied by 2.5 and moved by 3. Least squares; a ReLU network of 32 and 32 units.",
    limits="It shows what covariate shift is and what standardising can do, not that it is why BN works: see the "
    "claims ics and noise. The shift inside a network, of the last layer of a shallow one in its first steps at one "
    "rate, is shown and not judged: the claim ics measures it over training.",
)
