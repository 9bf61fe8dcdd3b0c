"""Putting data and a script inside a page so that nothing in them can end the element they stand in."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup, escape

# Control characters, and marks that turn the direction of a line: names from a file may have them. In a script the
# escapes mean the same.
UNSEEN = {
    code: ascii(chr(code))[1:-1]
    for code in (*range(9), 11, 12, *range(14, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}


def shown(text: str) -> str:
    r"""Return a page or a picture with characters escaped that a reader would not see, or a file cannot hold.

    >>> shown("conv\x1b[31m\u202e\ud800")
    'conv\\x1b[31m\\u202e\\ud800'
    """
    return text.translate(UNSEEN).encode("utf-8", "backslashreplace").decode("utf-8")


def embedded(value: Any) -> Markup:
    r"""Write a value as JSON for inside of a script element.

    >>> print(embedded({"layer": "</script>", "loss": float("nan")}))
    {"layer":"\u003c/script\u003e","loss":null}
    """
    text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return Markup(text)  # no character that HTML knows is left in it


def plotly_text(text: object) -> str:
    """Write a name so that plotly, which reads some HTML in the texts it is given, shows it as it is.

    >>> plotly_text("<b>conv</b>")
    '&lt;b&gt;conv&lt;/b&gt;'
    """
    return str(escape(str(text))).replace("&#34;", '"').replace("&#39;", "'")


def plotly_script() -> Markup:
    """Return plotly's own script, as it ships in its package, for a script element.

    >>> len(plotly_script()) > 1_000_000
    True
    """
    from plotly.offline import get_plotlyjs

    return guarded(get_plotlyjs())


def guarded(script: str) -> Markup:
    r"""Return a script that cannot end its own element; inside of JavaScript's strings the backslash means nothing.

    >>> print(guarded("a = '</script>'; b = '<!--'"))
    a = '<\/script>'; b = '<\!--'
    """
    return Markup(script.replace("</script", "<\\/script").replace("<!--", "<\\!--"))


def rounded(value: float | None, digits: int = 5) -> float | None:
    """Round to so many significant digits, to keep a page small; what is not finite becomes None.

    >>> rounded(0.123456789), rounded(float("nan")), rounded(12.0)
    (0.12346, None, 12)
    """
    if value is None or not math.isfinite(value):
        return None
    near = float(f"{value:.{digits}g}")
    return int(near) if near == int(near) else near


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
