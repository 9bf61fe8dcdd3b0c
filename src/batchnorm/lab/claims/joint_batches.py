"""Learning Q with Batch Normalization and no target network: both states of a transition belong in one batch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.contest import TUNING_SEEDS, chosen
from batchnorm.lab.judge.evidence import number, ratio
from batchnorm.lab.judge.trials import each, sweep_of
from batchnorm.lab.loop import Tick, drawn, fit
from batchnorm.lab.networks.chain import Chain
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.report.sections import Bar, Headline, Section, Table

STATES, ACTIONS, DISCOUNT, SLIP = 12, 2, 0.8, 0.1
RIGHT = 1
RATES = (0.003, 0.01, 0.03, 0.1)
BATCH = 64
SEPARATE, JOINT = "BN, separate batches", "BN, joint batches"
ARMS = {SEPARATE: "vermillion", JOINT: "blue", "no norm": "orange", "no norm, target network": "ink"}
EVERY = 50  # steps between two copies to the target network
TIMES = 2.0  # as large an error


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each arm."""
    more = {"steps": 800, "seeds": 5} if budget == "quick" else {"steps": 10000, "seeds": 20}
    return [{"arm": arm, **more} for arm in ARMS]


def transitions() -> tuple[Tensor, Tensor]:
    """Return the chain: where each action leads from each state (with chance 1 - `SLIP`), and the reward there.

    >>> transitions()[0][0].tolist(), float(transitions()[1].sum())
    ([0, 1], 1.0)
    """
    state = torch.arange(STATES)
    leads = torch.stack([(state - 1).clamp_min(0), (state + 1).clamp_max(STATES - 1)], 1)
    reward = torch.zeros(STATES)
    reward[-1] = 1.0  # for being at the right end
    return leads, reward


def exact_values() -> Tensor:
    """Return the exact Q of every state and action, in float64: an action, then always to the right."""
    leads, reward = transitions()
    q = torch.zeros(STATES, ACTIONS, dtype=torch.float64)
    for _ in range(1000):
        value: Tensor = (reward.double() + DISCOUNT * q[:, RIGHT])[leads]  # of what an action leads to
        q = (1 - SLIP) * value + SLIP * value.flip(1)
    return q


def buffer(seed: int, size: int = 4000) -> tuple[Tensor, Tensor]:
    """Return a fixed buffer of a policy that mostly goes left: rows of state, action, reward and next state.

    >>> buffer(0)[0].shape
    torch.Size([4000, 4])
    """
    stream = torch.Generator().manual_seed(seed)
    leads, reward = transitions()
    state = torch.randint(STATES, (size,), generator=stream)
    action = (torch.rand(size, generator=stream) < 0.3).long()
    slips = torch.rand(size, generator=stream) < SLIP
    after = leads[state, torch.where(slips, 1 - action, action)]
    rows = torch.stack([state.float(), action.float(), reward[after], after.float()], 1)
    return rows, torch.zeros(size)


def features(state: Tensor, action: Tensor) -> Tensor:
    """Return what the critic is given: the position at four frequencies, and the action."""
    place = state / (STATES - 1)
    waves = [wave(math.pi * k * place) for k in (0.5, 1, 2, 4) for wave in (torch.sin, torch.cos)]
    return torch.stack([place, *waves, 2.0 * action - 1], 1)


def loss_of(arm: str, target: nn.Module | None, network: nn.Module, rows: Tensor, _: Tensor) -> Tensor:
    """Return the squared error against reward + discount * the next value, to which no gradient goes.

    The next action is that of the policy that is judged. "Joint" evaluates states and next states in one forward pass,
    in training mode, as CrossQ does.
    """
    state, action, reward, after = rows.unbind(1)
    now, later = features(state, action), features(after, torch.full_like(after, float(RIGHT)))
    if arm == JOINT:
        q, ahead = network(torch.cat([now, later])).flatten().view(2, -1)
    else:
        q = network(now).flatten()
        with torch.no_grad():
            ahead = (target or network)(later).flatten()
    goal = reward + DISCOUNT * ahead.detach()
    error: Tensor = (q - goal).square().mean()
    return error


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Learn from fixed buffers; return the errors of Q in evaluation mode, relative to the spread of the true Q."""
    arm, steps = options["arm"], options["steps"]
    swept = [(rate, seed) for rate in RATES for seed in TUNING_SEEDS[:2]]
    fresh = [(rate, seed) for rate in RATES for seed in range(options["seeds"])]

    def one(case: tuple[float, int], tick: Tick) -> dict[str, Any]:
        found = learned(arm, *case, steps, tick)
        return {**found, "score": -found["error"] if math.isfinite(found["error"]) else None}

    found = each([*swept, *fresh], one, recorder)
    sweep = sweep_of([{"score": row["score"] and math.exp(row["score"])} for row in found], swept)
    rows = [{"rate": rate, **row} for (rate, _), row in zip(fresh, found[len(swept) :], strict=True)]
    return {"rate": chosen(sweep), "sweep": sweep, "fresh": rows}


def learned(arm: str, rate: float, seed: int, steps: int, tick: Tick) -> dict[str, float]:
    """Learn from one buffer; return the error and the bias of Q over all states and actions."""
    norm = "batch" if arm in (SEPARATE, JOINT) else "none"
    network = Chain(seed, norm, inputs=10, widths=(64, 64), classes=1)
    target = Chain(seed, norm, inputs=10, widths=(64, 64), classes=1) if "target" in arm else None

    def copied(step: int) -> None:
        if target is not None and step % EVERY == 0:
            target.load_state_dict(network.state_dict())

    rows, nothing = buffer(seed)
    stream = drawn(rows, nothing, seed=seed, size=BATCH, steps=steps)
    falling = partial(falling_to_zero, rate, steps)
    fit(network, stream, rate=falling, loss=lambda n, x, y: loss_of(arm, target, n, x, y), after=copied, tick=tick)
    true, state = exact_values(), torch.arange(STATES).float()
    with torch.no_grad():
        columns = [network.eval()(features(state, torch.full_like(state, float(a)))).flatten() for a in range(ACTIONS)]
    off, spread = torch.stack(columns, 1).double() - true, float(true.std())
    return {"error": float(off.square().mean().sqrt()) / spread, "bias": float(off.mean()) / spread}


def falling_to_zero(rate: float, steps: int, done: int) -> float:
    """Return the rate of a step: it falls in a straight line, so that the last error is not that of a moving network.

    >>> falling_to_zero(0.1, 100, 50)
    0.05
    """
    return rate * (1 - done / steps)


def errors(part: Part, rate: float) -> list[float]:
    """Return the errors of the fresh seeds at a rate; a network that diverged has an infinite one."""
    return [number(row["error"], math.inf) for row in part.result["fresh"] if row["rate"] == rate]


def judge(parts: Sequence[Part]) -> Judgement:
    """The errors of separate and joint batches, each at its best rate and at the same one."""
    arms = {cast(str, part.options["arm"]): part for part in parts}
    rate = arms[JOINT].result["rate"]
    own, joint = errors(arms[SEPARATE], arms[SEPARATE].result["rate"]), errors(arms[JOINT], rate)
    return judged(
        f"Without a target network the error of Q, as a share of its spread, is {statistics.median(own):.2f} with "
        "separate "
        f"batches and {statistics.median(joint):.2f} with joint ones.",
        [
            ratio("error, separate / joint, best rates", own, joint, TIMES),
            ratio("error, separate / joint, same rate", errors(arms[SEPARATE], rate), joint, TIMES),
        ],
        len(joint),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """The errors of all arms at their best rates; bias as a table."""
    bars, rows = [], []
    for part in parts:
        arm, rate = part.options["arm"], part.result["rate"]
        error = statistics.median(errors(part, rate))
        bars.append(Bar(arm, min(error, 10.0), f"{error:.2f}", ARMS[arm]))
        own = [row for row in part.result["fresh"] if row["rate"] == rate]
        bias = statistics.median(number(row["bias"], math.inf) for row in own)
        at_all = " / ".join(f"{statistics.median(errors(part, each)):.2f}" for each in RATES)
        rows.append((arm, f"{rate:g}", f"{error:.2f}", f"{bias:+.2f}", at_all))
    columns = ("arm", "rate", "error of Q", "bias of Q", f"error at {' / '.join(map(str, RATES))}")
    table = Table("All arms", "Medians of the fresh seeds.", columns, tuple(rows), (1, 2, 3, 4))
    sentence = "Error of the learned Q, as a share of the spread of the exact one; shorter is better."
    return [Headline("One batch for both states", sentence, bars=tuple(bars)), table]


CLAIM = Claim(
    name="joint-batches",
    question="costs",
    title="Learning Q with BN needs both states of a transition in one batch",
    statement="Without a target network, temporal-difference learning of Q with BN has a much larger error if states "
    "and next states are normalised apart than if they share a batch.",
    source=Source(
        "Bhatt et al. 2024 (CrossQ)",
        "arXiv:1902.05605",
        "with separate batches learning fails; joint ones reach the state of the art without target networks",
    ),
    rule="Confirmed if the error of Q with separate batches is surely more than twice that with joint ones, each at "
    "its best rate and both at the best rate of joint ones; refuted if one ratio is surely below 2.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="A chain of 12 states with a reward at its end, two actions, one in ten slips; a fixed buffer of 4,000 "
    "transitions of a policy that mostly goes left; Q of the policy that always goes right, against the exact one. "
    "Critics of two layers of 64; four rates for each arm, falling to 0.",
    limits="One small environment, a fixed buffer and a fixed policy: what an actor that learns adds is not here. A "
    "critic without a norm learns this Q as well, with and without a target network: that BN makes learning faster, as "
    "CrossQ reports, cannot be seen here. The source adds wider critics, Adam and Batch Renormalization.",
    version=2,
)
