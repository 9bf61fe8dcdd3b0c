"""The five networks of section 4.2.2, the changes of section 4.2.1 between them, and the members of the ensemble.

What the paper does not publish is as in GoogLeNet (Szegedy et al. 2014, section 6): momentum 0.9 and a rate that falls
by 4% every 8 epochs. Neither says the weight of the L2 loss (here 2e-4) nor how strong the photometric distortions are
(here those of Howard 2013, and a quarter of them where the paper says "less").
"""

from __future__ import annotations

from dataclasses import dataclass

from batchnorm.errors import BatchNormError

MOMENTUM = 0.9
DECAY, DECAY_EPOCHS = 0.96, 8.0
L2 = 2e-4
DISTORTION = 0.5  # factors of brightness, contrast and color from 0.5 to 1.5
DROPOUT = 0.4
TARGET = 0.722  # the accuracy to which the paper counts steps
IMAGES = 1_281_167  # of LSVRC2012's training data
BATCH = 32


@dataclass(frozen=True)
class PaperVariant:
    """One network of the paper's Figures 2 and 3, and how it is trained.

    ``paper_steps`` is how many steps of 32 the paper's run took to 72.2%, ``paper_best`` its highest accuracy and
    ``paper_best_steps`` when it reached that. They are the paper's figures; None is what it does not give.
    """

    name: str
    rate: float
    normalised: bool = True
    activation: str = "relu"
    dropout: float = 0.0
    l2: float = L2 / 5
    decay_speed: float = 6.0  # times as fast as Inception's
    local_response: bool = False
    thorough: bool = True  # examples are shuffled within shards, too
    distortion: float = DISTORTION / 4
    paper_steps: float | None = None
    paper_best: float | None = None
    paper_best_steps: float | None = None
    steps: int = 6_000_000  # by default

    def rate_at(self, epochs: float, rate: float | None = None, decay_epochs: float = DECAY_EPOCHS) -> float:
        """Return the learning rate after so many epochs.

        >>> round(VARIANTS["inception"].rate_at(8) / 0.0015, 6), round(VARIANTS["bn-x5"].rate_at(8) / 0.0075, 6)
        (0.96, 0.782758)
        """
        start = self.rate if rate is None else rate
        return float(start * DECAY ** (self.decay_speed * epochs / decay_epochs))


_AS_INCEPTION = {
    "dropout": DROPOUT,
    "l2": L2,
    "decay_speed": 1.0,
    "local_response": True,
    "thorough": False,
    "distortion": DISTORTION,
}

VARIANTS = {
    variant.name: variant
    for variant in (
        PaperVariant(
            "inception",
            0.0015,
            normalised=False,
            **_AS_INCEPTION,  # type: ignore[arg-type]
            paper_steps=31.0e6,
            paper_best=0.722,
            paper_best_steps=31.0e6,
            steps=31_000_000,
        ),
        PaperVariant(
            "bn-baseline",
            0.0015,
            **_AS_INCEPTION,  # type: ignore[arg-type]
            paper_steps=13.3e6,
            paper_best=0.727,
            steps=31_000_000,
        ),
        PaperVariant("bn-x5", 0.0075, paper_steps=2.1e6, paper_best=0.730),
        PaperVariant("bn-x30", 0.045, paper_steps=2.7e6, paper_best=0.748, paper_best_steps=6.0e6),
        PaperVariant("bn-x5-sigmoid", 0.0075, activation="sigmoid", paper_best=0.698),
    )
}
"""By name. BN-Baseline differs from Inception in Batch Normalization alone; BN-x5 has all of section 4.2.1."""


@dataclass(frozen=True)
class EnsembleMember:
    """How one network of the ensemble differs from BN-x30 (section 4.2.3)."""

    seed: int
    initial: float = 1.0
    dropout: float = 0.0
    per_activation: bool = False


ENSEMBLE = (
    EnsembleMember(1, initial=2.0),
    EnsembleMember(2, dropout=0.05),
    EnsembleMember(3, dropout=0.1),
    EnsembleMember(4, per_activation=True),
    EnsembleMember(5, initial=2.0, dropout=0.05, per_activation=True),
    EnsembleMember(6, dropout=0.1, per_activation=True),
)
"""Six: the paper names the three changes, "some of" them for each network, and not which; this choice is ours."""


def variant(name: str) -> PaperVariant:
    """Return a variant by its name.

    >>> variant("bn-x30").rate
    0.045
    >>> variant("bn-x7")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: there is no variant 'bn-x7'; choose one of inception, bn-baseline, bn-x5, bn-x30, \
bn-x5-sigmoid
    """
    if name not in VARIANTS:
        raise BatchNormError(f"there is no variant {name!r}", do=f"choose one of {', '.join(VARIANTS)}")
    return VARIANTS[name]
