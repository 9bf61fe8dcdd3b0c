"""How far running statistics are from exact ones, which limits apply, and the effect on a model's outputs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from batchnorm.doctor.subject import Norm, Subject
from batchnorm.transforms.calibrate import Calibrated

# A running average over training wanders about the exact values by about this much, and does no harm.
MEAN, VARIANCE = 0.25, 0.4  # standard deviations; natural logarithm of the ratio (a factor of 1.5)
OUTPUT = 0.05  # of the outputs' deviation about their mean
ERRORS = 4.0  # so many standard errors of what the data says
GAIN, ACCURACY = 0.02, 0.05  # of accuracy: what is worth a finding, and what makes it an error
CHANCE = 1e-3  # how likely examples of no difference may be to say that there is one
KNOWN, SURE = 0.5, 4.0  # of the answers; standard deviations of chance
MOST = 10.0  # standard deviations, or a factor: what a single channel counts at most


class Effect:
    """What exact statistics would do to a model's outputs and accuracy on the data."""

    def __init__(self, subject: Subject, fresh: Any, calibrated: Calibrated) -> None:
        old, new = subject.outputs, subject.outputs_of(fresh)
        self.moved = moved_by(old, new)
        self.samples = calibrated.samples
        self.was = self.now = None
        self.gained = self.lost = 0  # examples that are right only with exact statistics, or only without
        before, after = subject.correct(old), subject.correct(new)
        # An encoder's features have no accuracy.
        if before is not None and after is not None and (classify(subject, old) or classify(subject, new)):
            self.was, self.now = float(before.double().mean()), float(after.double().mean())
            self.gained, self.lost = int((after & ~before).sum()), int((before & ~after).sum())
            self.labelled = len(before)

    @property
    def gain(self) -> float | None:
        """By how much accuracy rises; None where there is no accuracy."""
        return None if self.was is None or self.now is None else self.now - self.was

    @property
    def matters(self) -> bool:
        """Whether accuracy significantly rises; without labels, whether the outputs change."""
        if self.gain is None:
            return self.moved > OUTPUT
        return self.gain >= GAIN and by_chance(self.gained, self.lost) < CHANCE

    @property
    def grave(self) -> bool:
        """Whether accuracy is lost."""
        return self.gain is not None and self.matters and self.gain > ACCURACY

    @property
    def reservation(self) -> str:
        """Why a difference of statistics is not reported; empty if it is."""
        if self.gain is None:
            return f"with exact statistics the outputs change by {self.moved:.1%} only"
        what = f"from {self.was:.1%} to {self.now:.1%} of {self.labelled} examples"
        if self.gain < 0:
            return f"exact statistics would lose accuracy: {what}"
        if self.gain < GAIN:
            return f"exact statistics do not raise accuracy: {what}"
        return f"{self.labelled} labelled examples are too few to be sure that exact statistics raise accuracy: {what}"

    @property
    def words(self) -> str:
        """Describe the effect."""
        if math.isinf(self.moved):
            effect = "the outputs have other shapes"
        elif self.moved < 10:
            effect = f"the outputs change by {self.moved:.0%}"
        else:
            effect = f"the outputs change by a factor of {self.moved:.0f}"
        if self.was is not None and self.now is not None:
            effect += f" and accuracy goes from {self.was:.1%} to {self.now:.1%}"
        return f"with exact statistics {effect}"

    @property
    def numbers(self) -> dict[str, Any]:
        """The effect as numbers."""
        known: dict[str, Any] = {"samples": self.samples}
        known |= {} if math.isinf(self.moved) else {"outputs_moved": self.moved}
        if self.was is not None and self.now is not None:
            known |= {"accuracy": self.was, "accuracy_calibrated": self.now}
        return known


def by_chance(gained: int, lost: int) -> float:
    """Return how likely at least so many of the examples that changed sides are gains, if there is no difference.

    >>> by_chance(3, 0), by_chance(0, 3), by_chance(190, 5) < 1e-40
    (0.125, 1.0, True)

    This is the exact one-sided test of McNemar: each example is a pair, right or wrong before and after, and without a
    difference a gain is as likely as a loss.
    """
    number = gained + lost
    term, ways = 1, 0  # the binomial coefficients of 0, 1, ... losses
    for losses in range(lost + 1):
        ways += term
        term = term * (number - losses) // (losses + 1)
    return ways / (1 << number)


def classify(subject: Subject, outputs: list[list[Tensor]]) -> bool:
    """Whether outputs look like scores of the classes: the largest is of one that there is, and right beyond chance.

    >>> import torch
    >>> labels = torch.arange(64) % 4
    >>> subject = Subject(torch.nn.Identity(), data=[(torch.zeros(64, 4), labels)])
    >>> scores = torch.nn.functional.one_hot(labels, 4).float()
    >>> classify(subject, [[scores]]), classify(subject, [[torch.randn(64, 4)]]), classify(subject, [[scores[:, :2]]])
    (True, False, False)
    """
    right = subject.accuracy(outputs)
    if right is None:
        return False
    labels = torch.cat([subject.labels(batch).cpu() for batch in subject.sample])  # type: ignore[union-attr]
    widths = {given[0].shape[1] for given in outputs}
    if len(widths) > 1 or int(labels.min()) < 0 or int(labels.max()) >= min(widths):
        return False
    counts = [
        torch.bincount(values, minlength=min(widths)).double() / len(labels)
        for values in (torch.cat([given[0].argmax(1).cpu() for given in outputs]), labels)
    ]
    known = float(counts[0][counts[1] > 0].sum())  # the share of answers that are classes of the data
    chance = float((counts[0] * counts[1]).sum())  # of answers as frequent as these, given without looking
    return known > KNOWN and right - chance > SURE * math.sqrt(chance * (1 - chance) / len(labels))


def limits(calibrated: Calibrated, path: str) -> tuple[float, float]:
    """Return the distances of means and variances beyond which a layer is off, whatever the accuracy says: more than
    a running average normally fluctuates, and more than the sampling error of the data."""
    of_mean, of_var = errors(calibrated, path)
    return max(MEAN, ERRORS * of_mean), max(VARIANCE, ERRORS * of_var)


def errors(calibrated: Calibrated, path: str) -> tuple[float, float]:
    """Return the sampling errors of a layer's mean and variance, in the units of `distance`."""
    # One batch has no standard error, and that of few batches is unsure: as if an example were a single value.
    few = 1 / math.sqrt(max(calibrated.samples, 1))
    of_mean, of_var = (e if e < math.inf else 0.0 for e in calibrated.standard_errors[path])
    return max(of_mean, few), max(of_var, math.sqrt(2) * few)


def distance(norm: Norm, exact: Any) -> tuple[float, float]:
    """How far running statistics are from exact ones: the means, in standard deviations, and the variances, as the
    logarithm of their ratio; root mean square over channels. NaN where they are not finite (BN203).

    The larger of the two deviations counts, and no channel for more than so much: one that gives a constant has a
    variance of nothing, which is infinitely far from any other, and does no harm.
    """
    assert norm.running_mean is not None
    assert norm.running_var is not None
    mean, var, running_mean, running_var = (
        t.detach().double().cpu() for t in (exact.running_mean, exact.running_var, norm.running_mean, norm.running_var)
    )
    off = (running_mean - mean) / (var.maximum(running_var) + norm.eps).sqrt()
    apart = ((running_var + norm.eps) / (var + norm.eps)).log()
    off, apart = off.clamp(-MOST, MOST), apart.clamp(-math.log(MOST), math.log(MOST))
    return float(off.square().mean().sqrt()), float(apart.square().mean().sqrt())


def moved_by(old: list[list[Tensor]], new: list[list[Tensor]]) -> float:
    """By how much outputs differ, as a share of their deviation about their mean (root mean squares).

    Where there are no real numbers among them (labels, masks), the share of those that differ; infinity if they have
    other shapes; NaN if none is finite.
    """
    pairs = [(a, b) for x, y in zip(old, new, strict=True) for a, b in zip(x, y, strict=False)]
    if any(len(x) != len(y) for x, y in zip(old, new, strict=True)) or any(a.shape != b.shape for a, b in pairs):
        return math.inf
    floats = [(a.double(), b.double()) for a, b in pairs if a.dtype.is_floating_point and a.numel()]
    if not floats:
        count = sum(a.numel() for a, _ in pairs)
        return sum(int((a != b).sum()) for a, b in pairs) / count if count else 0.0
    both = [(a, b, a.isfinite() & b.isfinite()) for a, b in floats]  # a batch with a NaN is not the statistics' fault
    real = [(a[fit], b[fit]) for a, b, fit in both]
    count = sum(b.numel() for _, b in real)
    if not count:
        return math.nan
    mean = sum(float(b.sum()) for _, b in real) / count
    spread = math.sqrt(sum(float((b - mean).square().sum()) for _, b in real) / count)
    apart = math.sqrt(sum(float((a - b).square().sum()) for a, b in real) / count)
    scale = spread if spread > 1e-6 * abs(mean) else abs(mean)  # an output that does not vary has no deviation
    return apart / scale if scale > 0 else 0.0


def few(values: Tensor | None) -> list[float]:
    """The first numbers of a statistic, for a finding.

    >>> import torch
    >>> few(torch.arange(9) / 3)
    [0.0, 0.3333, 0.6667, 1.0]
    """
    assert values is not None
    return [float(f"{v:.4g}") for v in values.detach().flatten()[:4].tolist()]
