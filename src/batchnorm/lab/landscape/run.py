"""Train both networks, all seeds of each at once, and walk along the gradient at the recorded steps.

The protocol of Santurkar et al. (2018), section 3: the same rate for both networks, the same weights at the start and
the same batches; before the recorded steps, losses and gradients at 1/2 to 4 times the rate along the gradient of the
step's own batch. With Batch Normalization it is measured again with the hidden weights times 3, which is the same
function.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from batchnorm import interrupts
from batchnorm.lab.curves import Curve, Member
from batchnorm.lab.data.examples import Examples
from batchnorm.lab.depth.arms import Arm
from batchnorm.lab.depth.run import peak_megabytes
from batchnorm.lab.heat import Job, Watch, crew
from batchnorm.lab.landscape.outcome import BandTrack, LandscapeOutcome, track_of
from batchnorm.lab.landscape.settings import PLAIN, SCALE, SCALED, WITH, LandscapeSettings
from batchnorm.lab.landscape.walk import hidden, norms, scaled, walk
from batchnorm.lab.networks.layered import Layered, LayeredCopies
from batchnorm.lab.runs.parts import Parts
from batchnorm.lab.sources import ImageSource
from batchnorm.lab.train import Progress
from batchnorm.lab.trainer import copy_losses, descend, orders, rates, validate

DIGITS = 5  # of what is recorded, so that records are short
QUANTITIES = ("loss low", "loss high", "change low", "change high", "weights")


@dataclass
class Log:
    """What was seen of one network, raw or corrected: for each quantity a row of copies for each recorded step."""

    rows: dict[str, list[Tensor]] = field(default_factory=lambda: {name: [] for name in QUANTITIES})

    def tracks(self, arm: str, corrected: bool, members: Sequence[Member]) -> list[BandTrack]:
        """Return a track for each copy."""
        columns = {name: torch.stack(rows).T.tolist() for name, rows in self.rows.items()}
        return [
            BandTrack(arm, corrected, member.seed, *(tuple(map(rounded, columns[name][index])) for name in QUANTITIES))
            for index, member in enumerate(members)
        ]


def rounded(value: float) -> float:
    """Round to a few significant digits; what is not finite is infinite.

    >>> rounded(0.123456789), rounded(float("nan"))
    (0.12346, inf)
    """
    return float(f"{value:.{DIGITS}g}") if abs(value) < float("inf") else float("inf")


def train_and_walk(
    stack: LayeredCopies,
    members: Sequence[Member],
    data: Examples,
    settings: LandscapeSettings,
    look: Callable[[Progress], None] = lambda progress: None,
) -> tuple[list[BandTrack], list[float]]:
    """Train a stack, measured at the recorded steps; return a track for each state and copy, and the accuracies.

    >>> stack = LayeredCopies([Layered(0, normalised=True, activation="relu", inputs=64, init="he")])
    >>> settings = LandscapeSettings(steps=2)
    >>> tracks, _ = train_and_walk(stack, [Member(0.1, 0)], load("").report, settings)  # doctest: +SKIP
    """
    steps = settings.given_data(bundled=True).steps or 0
    order = orders(members, len(data.train_labels), settings.batch_size, steps)
    start = norms(stack)
    sizes = [settings.rate * factor for factor in settings.factors]
    states = {PLAIN: 1.0} if not stack.normalised else {WITH: 1.0, SCALED: SCALE}
    logs = {(arm, corrected): Log() for arm in states for corrected in (False, True)}
    recorded = set(settings.recorded)
    for step in range(1, steps + 1):
        chosen = order[:, step - 1]
        x, labels = data.train_inputs[chosen], data.train_labels[chosen]
        if step in recorded:
            for (arm, corrected), log in logs.items():
                with scaled(stack, states[arm]):
                    found = walk(stack, x, labels, sizes, start if corrected else None).bands()
                    own = [now for now, one in zip(norms(stack), hidden(stack), strict=True) if one]
                for name, values in (*found.items(), ("weights", torch.linalg.vector_norm(torch.stack(own), dim=0))):
                    log.rows[name].append(values)
        gradients = stack.gradients(copy_losses(stack.scores(x), labels))
        descend(stack.parameters, gradients, rates(members, 0.0, gradients[0].dtype))
        if step < steps:
            look(Progress(step, 0.0))
    accuracies = [round(value, DIGITS) for value in validate(stack, data)]
    look(Progress(steps, max(accuracies)))
    return [track for (arm, c), log in logs.items() for track in log.tracks(arm, c, members)], accuracies


def planned(settings: LandscapeSettings) -> int:
    """Return how many steps of networks both networks take.

    >>> planned(LandscapeSettings(seeds=5, steps=300))
    3000
    """
    return 2 * settings.seeds * (settings.steps or 0)


def run(
    settings: LandscapeSettings,
    source: ImageSource,
    *,
    threads: int = 1,
    watch: Watch | None = None,
    parts: Parts | None = None,
) -> LandscapeOutcome:
    """Measure both networks and return what was found.

    >>> outcome = run(LandscapeSettings(steps=100), load(""))  # doctest: +SKIP

    An interrupt ends it and keeps a network that was done.
    """
    settings = settings.given_data(bundled=source.bundled)
    begun, processor, interrupted = time.perf_counter(), time.process_time(), False
    members = [Member(settings.rate, seed) for seed in range(settings.seeds)]
    found: dict[str, tuple[list[BandTrack], list[float]]] = {}
    try:
        with crew(threads, watch, parts, planned(settings)) as workers:
            heats = []
            for arm in (PLAIN, WITH):
                job = Job(0, (Arm(arm),), tuple(members))

                def measure(part: Sequence[Member], look: Callable[[Progress], None], arm: str = arm) -> list[Curve]:
                    networks = [
                        Layered(
                            member.seed,
                            normalised=arm == WITH,
                            init="he",
                            activation="relu",
                            inputs=source.report.train_inputs.shape[1],
                            width=settings.width,
                            layers=settings.layers,
                            classes=source.report.classes,
                        )
                        for member in part
                    ]
                    found[arm] = train_and_walk(LayeredCopies(networks), part, source.report, settings, look)
                    if parts is not None:
                        tracks, accuracies = found[arm]
                        parts.put(arm, {"tracks": [asdict(track) for track in tracks], "accuracies": accuracies})
                    return []

                kept = parts.get(arm) if parts is not None else None
                if kept is not None:
                    found[arm] = [track_of(track) for track in kept["tracks"]], kept["accuracies"]
                else:
                    heats.append(workers.start(job, measure, steps=settings.steps or 0, largest=len(members)))
            for heat in heats:
                heat.wait()
    except KeyboardInterrupt:
        interrupts.accept()
        interrupted = True
    done = [found[arm] for arm in (PLAIN, WITH) if arm in found]
    names = [arm for arm in (PLAIN, WITH) if arm in found]
    return replace(
        LandscapeOutcome(settings, (), {}, source.name, source.words, source.checksum),
        tracks=tuple(track for tracks, _ in done for track in tracks),
        accuracies={arm: tuple(values) for arm, (_, values) in zip(names, done, strict=True)},
        seconds=time.perf_counter() - begun,
        cpu_seconds=time.process_time() - processor,
        peak_megabytes=peak_megabytes(),
        interrupted=interrupted,
    )
