"""The one table of rules: a line here and a file in ``rules/`` make a rule."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from batchnorm.doctor.rule import Rule
from batchnorm.errors import BatchNormError

FILES = {
    "BN101": "bias_before_norm",
    "BN102": "decayed_affine",
    "BN103": "contradictory_flags",
    "BN104": "foreign_momentum",
    "BN105": "partly_frozen",
    "BN106": "sync_on_cpu",
    "BN107": "lossy_conversion",
    "BN108": "shared_norm",
    "BN109": "low_precision_statistics",
    "BN110": "wrong_axis",
    "BN111": "degenerate_group",
    "BN112": "dropout_before_norm",
    "BN113": "dead_channel",
    "BN114": "norm_on_scores",
    "BN115": "gamma_around_zero",
    "BN201": "stale_statistics",
    "BN202": "never_updated",
    "BN203": "poisoned_statistics",
    "BN204": "single_value",
    "BN205": "tiny_batch",
    "BN206": "padded_input",
    "BN207": "large_mean",
    "BN208": "nonfinite_parameters",
    "BN209": "vanished_variance",
    "BN301": "validation_in_train_mode",
    "BN302": "double_update",
    "BN303": "mixed_forwards",
    "BN304": "accumulation",
    "BN305": "stale_copy",
    "BN306": "batch_leak",
    "BN307": "saturation",
    "BN401": "diverged_ranks",
    "BN402": "collective_mismatch",
    "BN403": "rebroadcast_buffers",
    "BN404": "mixed_synchronisation",
    "BN501": "train_mode_export",
    "BN502": "unfoldable",
    "BN503": "wrong_fold",
    "BN504": "stale_after_compression",
}

RULES: dict[str, Rule] = {
    code: import_module(f"batchnorm.doctor.rules.{file}").RULE for code, file in sorted(FILES.items())
}


def chosen(select: Iterable[str] = (), ignore: Iterable[str] = ()) -> dict[str, Rule]:
    """Return the rules that are selected and not ignored; ``BN2`` stands for all that begin so, names work too.

    >>> list(chosen(select=("BN10", "stale-statistics"), ignore="BN101"))[-1]
    'BN201'
    """
    select, ignore = _words(select), _words(ignore)
    for word in (*select, *ignore):
        if not any(_fits(rule, word) for rule in RULES.values()):
            raise BatchNormError(
                f"there is no rule {word!r}", do="`batchnorm rules` lists them; BN2 stands for all that begin with BN2"
            )
    return {
        code: rule
        for code, rule in RULES.items()
        if (not select or any(_fits(rule, word) for word in select)) and not any(_fits(rule, word) for word in ignore)
    }


def _words(given: Iterable[str]) -> tuple[str, ...]:
    """A string is the rules that it names, as on the command line, not its letters.

    >>> _words("BN101, BN2"), _words(["BN101"])
    (('BN101', 'BN2'), ('BN101',))
    """
    return tuple(word.strip() for word in given.split(",")) if isinstance(given, str) else tuple(given)


def _fits(rule: Rule, word: str) -> bool:
    return bool(word) and (rule.code.startswith(word.upper()) or rule.name == word.lower())
