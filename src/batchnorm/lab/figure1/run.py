"""Train the networks of Figure 1, many at once, and follow what their last hidden layer is given.

The protocol. Each network, with Batch Normalization and without, trains from each start at every rate of one grid on
three tuning seeds, 10,000 steps at most; its best rate is chosen. At that rate it trains on fresh seeds. At every
validation the percentiles of the input of each sigmoid of the last hidden layer are taken in evaluation mode, over the
first 1,000 validation images. Plain SGD, batches of 60.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from batchnorm import interrupts
from batchnorm.lab.curves import Curve, Member
from batchnorm.lab.data.examples import Examples
from batchnorm.lab.depth.arms import TUNING_SEEDS, Arm
from batchnorm.lab.depth.run import peak_megabytes
from batchnorm.lab.figure1.outcome import Figure1Entry, Figure1Outcome, Track, choose_rate
from batchnorm.lab.figure1.settings import PLAIN, SHARES, TUNING_STEPS, WITH, Figure1Settings
from batchnorm.lab.heat import Crew, Heat, Job, Watch, crew
from batchnorm.lab.networks.layered import Layered, LayeredCopies
from batchnorm.lab.runs.parts import Parts
from batchnorm.lab.sources import ImageSource
from batchnorm.lab.train import Progress
from batchnorm.lab.trainer import train

OBSERVED = 1000  # validation images of which the percentiles are taken
LARGEST_PART = 8
DIGITS = 5  # of percentiles, so that records are short


@dataclass
class Figure:
    """Figure 1 under way: percentiles that were seen, by start, network and seed."""

    settings: Figure1Settings
    source: ImageSource
    workers: Crew
    tracks: dict[tuple[str, str, int], Track] = field(default_factory=dict)

    def start(self, init: str, name: str, members: Sequence[Member], data: Examples, steps: int) -> Heat:
        """Begin to train; networks on fresh seeds are observed."""
        settings, (_, every) = self.settings, self.settings.amounts
        job = Job(0, (Arm(f"{init}, {name}"),), tuple(members))
        images = data.validation_inputs[:OBSERVED]

        def train_part(part: Sequence[Member], look: Callable[[Progress], None]) -> list[Curve]:
            shape: dict[str, Any] = {"inputs": data.train_inputs.shape[1], "classes": data.classes}
            shape |= {"width": settings.width, "layers": settings.layers}
            networks = [Layered(m.seed, normalised=name == WITH, init=init, **shape) for m in part]
            stack = LayeredCopies(networks)
            seen: dict[int, list[Tensor]] = {}

            def observe(progress: Progress) -> None:
                if data is self.source.report and (progress.step % every == 0 or progress.step == steps):
                    found = percentiles(stack.last_inputs(images))
                    for row, place in enumerate(stack.places):
                        if part[place].seed not in TUNING_SEEDS:
                            seen.setdefault(part[place].seed, []).append(found[row])
                look(progress)

            amounts = {"steps": steps, "batch_size": settings.batch_size, "every": every}
            curves = train(stack, part, data, watch=observe, **amounts)
            for curve in curves if data is self.source.report else ():
                track = followed(curve, seen.get(curve.member.seed, []), settings.width)
                self.tracks[init, name, curve.member.seed] = track
                if self.workers.parts is not None:
                    self.workers.parts.put(track_key(init, name, curve), asdict(track))
            return curves

        return self.workers.start(job, train_part, steps=steps, largest=LARGEST_PART)

    def sweep(self, init: str, name: str) -> Heat:
        """Train a network at all rates on the tuning seeds."""
        members = [Member(rate, seed) for seed in TUNING_SEEDS for rate in self.settings.rates]
        return self.start(init, name, members, self.source.tuning, tuning_steps(self.settings))

    def report(self, init: str, name: str, rate: float) -> Heat:
        """Train a network at one rate on fresh seeds."""
        members = [Member(rate, seed) for seed in range(self.settings.seeds)]
        return self.start(init, name, members, self.source.report, self.settings.amounts[0])

    def track(self, init: str, name: str, curve: Curve) -> Track:
        """Return what was seen of one network."""
        if (init, name, curve.member.seed) in self.tracks:
            return self.tracks[init, name, curve.member.seed]
        assert self.workers.parts is not None  # it was trained before a kill
        kept = self.workers.parts.get(track_key(init, name, curve))
        with self.workers.parts.reading():
            low, middle, high = (tuple(map(number, row)) for row in kept["percentiles"])
            return Track(curve, tuple(map(number, kept["drifts"])), int(kept["unit"]), (low, middle, high))


def track_key(init: str, name: str, curve: Curve) -> str:
    """Return under which key the track of one network is kept."""
    return f"track of {init}, {name}, {curve.member}"


def number(value: float | None) -> float:
    """Return a number that was kept as JSON.

    >>> number(None)
    nan
    """
    return float("nan") if value is None else value


def percentiles(inputs: Tensor) -> Tensor:
    """Return the 15th, 50th and 85th percentiles over the images: (copies, images, units) to (copies, 3, units).

    >>> percentiles(torch.arange(21.0).view(1, 21, 1)).flatten().tolist()
    [3.0, 10.0, 17.0]
    """
    shares = torch.tensor(SHARES, dtype=inputs.dtype)
    return torch.quantile(inputs, shares, dim=1).transpose(0, 1)


def followed(curve: Curve, seen: Sequence[Tensor], units: int) -> Track:
    """Return the drifts of all units and the percentiles of the unit whose drift is the median one.

    >>> curve = Curve(Member(0.1, 0), (10, 20), (0.5, 0.6), (1.0, 0.9))
    >>> track = followed(curve, [torch.zeros(3, 1), torch.tensor([[1.0], [1.0], [4.0]])], units=1)
    >>> track.drift, track.unit, track.percentiles
    (2.0, 0, ((0.0, 1.0), (0.0, 1.0), (0.0, 4.0)))
    """
    if not seen:
        return Track(curve, (float("nan"),) * units, 0, ((), (), ()))
    values = torch.stack(list(seen))  # (validations, 3, units)
    moved = (values.amax(0) - values.amin(0)).mean(0)
    unit = int(moved.argsort(stable=True)[(units - 1) // 2])
    low, middle, high = (tuple(rounded(v) for v in values[:, row, unit].tolist()) for row in range(3))
    return Track(curve, tuple(rounded(v) for v in moved.tolist()), unit, (low, middle, high))


def rounded(value: float) -> float:
    """Round to a few significant digits, so that records are short.

    >>> rounded(0.123456789)
    0.12346
    """
    return float(f"{value:.{DIGITS}g}")


def tuning_steps(settings: Figure1Settings) -> int:
    """Return after how many steps a rate is chosen.

    >>> tuning_steps(Figure1Settings(steps=50_000, every=500)), tuning_steps(Figure1Settings(steps=3000, every=30))
    (10000, 3000)
    """
    return min(settings.amounts[0], TUNING_STEPS)


def planned(settings: Figure1Settings) -> int:
    """Return how many steps of networks all of it takes.

    >>> planned(Figure1Settings(seeds=1, steps=10, every=1, rates=(0.1,), inits=("he",)))
    80
    """
    each = len(TUNING_SEEDS) * len(settings.rates) * tuning_steps(settings) + settings.seeds * settings.amounts[0]
    return 2 * len(settings.inits) * each


def run(
    settings: Figure1Settings,
    source: ImageSource,
    *,
    threads: int = 1,
    watch: Watch | None = None,
    parts: Parts | None = None,
) -> Figure1Outcome:
    """Train everything and return what was measured.

    >>> outcome = run(Figure1Settings(steps=100), load(""))  # doctest: +SKIP

    An interrupt ends it and keeps the networks that were done.
    """
    settings = settings.given_data(bundled=source.bundled)
    begun, processor, interrupted = time.perf_counter(), time.process_time(), False
    entries: list[Figure1Entry] = []
    try:
        with crew(threads, watch, parts, planned(settings)) as workers:
            figure = Figure(settings, source, workers)
            arms = [(init, name) for init in settings.inits for name in (PLAIN, WITH)]
            sweeps = [figure.sweep(*arm) for arm in arms]
            reports = []
            for arm, heat in zip(arms, sweeps, strict=True):
                heat.wait()
                tuned = tuple(heat.curves())
                reports.append((tuned, figure.report(*arm, choose_rate(tuned, settings))))
            for (init, name), (tuned, heat) in zip(arms, reports, strict=True):
                heat.wait()
                tracks = tuple(figure.track(init, name, curve) for curve in heat.curves())
                entries.append(Figure1Entry(name, init, tracks[0].curve.member.learning_rate, tuned, tracks))
    except KeyboardInterrupt:
        interrupts.accept()
        interrupted = True
    return replace(
        Figure1Outcome(settings, tuple(entries), source.name, source.words, source.checksum),
        classes=source.report.classes,
        validated=len(source.report.validation_labels),
        observed=min(OBSERVED, len(source.report.validation_labels)),
        seconds=time.perf_counter() - begun,
        cpu_seconds=time.process_time() - processor,
        peak_megabytes=peak_megabytes(),
        interrupted=interrupted,
    )
