"""The rules with their functions, and the selection of rules."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from batchnorm.checks import check_names
from batchnorm.doctor.catalogue import FILES as FILES
from batchnorm.doctor.catalogue import no_rule
from batchnorm.doctor.rule import Rule

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
            raise no_rule(word, "`batchnorm rules` lists them; BN2 stands for all that begin with BN2")
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
    words = given.split(",") if isinstance(given, str) else given
    return tuple(word.strip() for word in check_names(words, "select or ignore", "check"))


def _fits(rule: Rule, word: str) -> bool:
    return bool(word) and (rule.code.startswith(word.upper()) or rule.name == word.lower())
