"""The one table of rules: a line here and a file in ``rules/`` make a rule."""

from __future__ import annotations

from importlib import import_module

from batchnorm.doctor.rule import Rule
from batchnorm.errors import BatchNormError

FILES = {
    "BN101": "bias_before_norm",
    "BN201": "stale_statistics",
    "BN301": "validation_in_train_mode",
    "BN302": "double_update",
    "BN303": "mixed_forwards",
    "BN304": "accumulation",
    "BN305": "stale_copy",
    "BN306": "batch_leak",
    "BN307": "saturation",
}

RULES: dict[str, Rule] = {
    code: import_module(f"batchnorm.doctor.rules.{file}").RULE for code, file in sorted(FILES.items())
}


def chosen(select: tuple[str, ...] = (), ignore: tuple[str, ...] = ()) -> dict[str, Rule]:
    """Return the rules that are selected and not ignored; ``BN2`` stands for all that begin so, names work too.

    >>> list(chosen(select=("BN10", "stale-statistics"), ignore=("BN101",)))[-1]
    'BN201'
    """
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


def _fits(rule: Rule, word: str) -> bool:
    return bool(word) and (rule.code.startswith(word.upper()) or rule.name == word.lower())
