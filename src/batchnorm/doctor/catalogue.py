"""The table of rules and their texts: a line here and a file in ``rules/`` make a rule.

Imports neither the rules nor torch: the pages are read from the source files.
"""

from __future__ import annotations

import ast
import os
import platform
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

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


NAMES = {code: file.replace("_", "-") for code, file in sorted(FILES.items())}


def described() -> dict[str, Rule]:
    """Return every rule with its page and what it needs; its functions are stand-ins.

    >>> described()["BN101"].title
    'A bias in front of batch normalisation, which cancels it.'
    """
    return {code: _read(code) for code in NAMES}


@lru_cache
def _read(code: str) -> Rule:
    """Read the arguments of ``Rule(...)`` in the file of a rule; those that are not constants become stand-ins."""
    file = Path(__file__).parent / "rules" / f"{FILES[code]}.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    call = next(
        statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "RULE"
    )
    assert isinstance(call, ast.Call), file
    page = ast.get_docstring(tree, clean=False)

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return page if node.id == "__doc__" else _stand_in
        return ast.literal_eval(node)

    return Rule(*map(value, call.args), **{str(each.arg): value(each.value) for each in call.keywords})


def _stand_in(*given: Any) -> Any:
    """Stand for the functions of a rule, which need torch and are not called from here."""
    raise NotImplementedError


def rule_named(word: str) -> Rule:
    """Return the rule of a code or a name; say which may have been meant if there is none.

    >>> rule_named("bn101").name, rule_named("Bias-before-norm").code
    ('bias-before-norm', 'BN101')
    >>> rule_named("bias-befor-norm")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: there is no rule 'bias-befor-norm'; did you mean BN101 bias-before-norm?
    """
    plain = _plain(word)
    for code, name in NAMES.items():
        if plain in (code.lower(), name):
            return _read(code)
    raise no_rule(word, "`batchnorm rules` lists them")


def linked(code: str) -> str:
    """Return the style of rich that links a code to its page, or to the file that has it; none where that shows.

    >>> linked("BN999")
    ''
    """
    if code not in FILES or os.environ.get("TERM") in (None, "dumb", "linux"):  # these print what they do not know
        return ""
    here = Path(__file__).resolve()
    page = here.parents[3] / "docs" / "rules" / f"{NAMES[code]}.md"  # in a clone
    target = page if page.is_file() else here.parent / "rules" / f"{FILES[code]}.py"
    return f"link file://{platform.node()}{quote(target.as_posix())}"  # the host, for terminals over ssh


def no_rule(word: str, otherwise: str) -> BatchNormError:
    """Return the error for a word that names no rule: which may have been meant, or what to do ``otherwise``.

    >>> print(no_rule("stale-statistic", "see the list"))
    there is no rule 'stale-statistic'; did you mean BN201 stale-statistics?
    """
    plain = _plain(word)
    begin = [code for code in NAMES if plain and code.lower().startswith(plain)]
    known = {text: code for code, name in NAMES.items() for text in (code.lower(), name)}
    near = get_close_matches(plain, known, 1, 0.85) or get_close_matches(plain, known, 3, 0.6)
    close = begin or list(dict.fromkeys(known[text] for text in near))
    within = close or [code for code, name in NAMES.items() if len(plain) > 2 and plain in name]
    meant = " or ".join(f"{code} {NAMES[code]}" for code in within[:3])
    shown = word if len(word) <= 60 else f"{word[:57]}..."
    return BatchNormError(f"there is no rule {shown!r}", do=f"did you mean {meant}?" if meant else otherwise)


def _plain(word: str) -> str:
    return word.strip().lower().replace("_", "-").replace(" ", "-")
