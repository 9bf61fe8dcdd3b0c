"""Whether code printed what a page shows: words and whole numbers exactly, measured numbers within a tolerance."""

import re

TIMES = re.compile(r"\d+(\.\d+)?( (s|ms|us)\b| times as fast, .*)")  # differ in every run
NUMBER = re.compile(r"(?<![\w.])[-−]?\d+(?:\.\d+)?(?:e[-+]?\d+)?%?(?![\w.]*\w)")
ROUNDING = 1e-4  # of a certificate: smaller numbers differ between CPUs
POINTS, SHARE = 8.0, 0.15  # how far percentages and other measured numbers may be from those shown


def agree(shown, printed):
    """Return whether two texts agree.

    >>> agree("97.3% in 2.1 s", "95.8% in 9.9 s"), agree("97.3%", "88.0%"), agree("2 layers", "3 layers")
    (True, False, False)
    """
    shown, printed = (TIMES.sub("TIME", text.rstrip()) for text in (shown, printed))
    if NUMBER.sub("#", shown) != NUMBER.sub("#", printed):
        return False
    return all(_close(a, b) for a, b in zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True))


def _close(shown, printed):
    a, b = (float(text.replace("−", "-").rstrip("%")) for text in (shown, printed))
    if shown.endswith("%") or printed.endswith("%"):
        return shown.endswith("%") == printed.endswith("%") and abs(a - b) <= POINTS
    if not set(".e") & set(shown + printed):
        return a == b
    return abs(a - b) <= max(SHARE * abs(a), 2 * 10.0 ** -_decimals(shown)) or max(abs(a), abs(b)) < ROUNDING


def _decimals(text):
    return len(text.partition(".")[2]) if "e" not in text else 300
