"""An interval beside a threshold, as a small bar without words: the words stand next to it."""

from __future__ import annotations

import math

from markupsafe import Markup

from batchnorm.report.panels import Scale, short
from batchnorm.report.sections import Interval

WIDE, HIGH = 200.0, 17.0
MARGIN = 6.0  # of the picture, where the mark of an end that is infinite stands
WIDEST = 30.0  # times the smallest number: beyond it the scale is logarithmic


def bar(interval: Interval, look: str) -> Markup:
    """Draw an interval: the claimed side shaded, the threshold a line, the interval a bar, the value a diamond.

    >>> found = bar(Interval("ratio", 8.0, 6.0, math.inf, 2.0, True, "", "", "confirmed"), "good")
    >>> [found.count(f'class="{part}"') for part in ("claimed", "threshold", "span", "beyond", "value")]
    [1, 1, 1, 1, 1]
    """
    at = scale(interval)
    edge = at(interval.threshold)
    left, right = (edge, WIDE) if interval.above else (0.0, edge)
    middle = HIGH / 2
    parts = [f'<rect class="claimed" x="{short(left)}" width="{short(right - left)}" y="0" height="{HIGH:g}" rx="3"/>']
    if not (math.isnan(interval.low) or math.isnan(interval.high)) and interval.low < interval.high:
        low, high = at(interval.low), at(interval.high)
        parts.append(f'<path class="span" d="M{short(low)},{middle:g}H{short(high)}"/>')
        for end, place, turn in ((interval.low, low, -1), (interval.high, high, 1)):
            if math.isinf(end):
                arrow = f"M{short(place)},{middle - 5:g}l{5 * turn},5l{-5 * turn},5Z"
                parts.append(f'<path class="beyond" d="{arrow}"/>')
    parts.append(f'<path class="threshold" d="M{short(edge)},0V{HIGH:g}"/>')
    if not math.isnan(interval.value):
        diamond = f"M{short(at(interval.value))},{middle - 5.5:g}l5.5,5.5l-5.5,5.5l-5.5,-5.5Z"
        parts.append(f'<path class="value" d="{diamond}"/>')
    return Markup(
        f'<svg class="interval look-{look}" viewBox="0 0 {WIDE:g} {HIGH:g}" aria-hidden="true">{"".join(parts)}</svg>'
    )


def scale(interval: Interval) -> Scale:
    """Return where numbers stand: between them and the edges there is room, and infinity stands at an edge.

    >>> at = scale(Interval("error", 1e-12, 1e-12, 1e-12, 1e-8, False, "", "", "confirmed"))
    >>> round(at(1e-10)), at(math.inf)  # logarithmic
    (100, 194.0)
    """
    numbers = [interval.value, interval.low, interval.high, interval.threshold]
    known = [number for number in numbers if math.isfinite(number)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    log = low > 0 and high > WIDEST * low
    if log:
        room = (high / low) ** 0.2
        given = (low / room, high * room)
    else:
        more = 0.2 * (high - low) or 1.0
        given = (low - more, high + more)
    return Scale([], log, MARGIN, WIDE - MARGIN, given)
