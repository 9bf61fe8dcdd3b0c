"""The names of lines in small charts."""

import re

import pytest

from batchnorm.report.panels import LEFT, RIGHT, ROOM, drawn
from batchnorm.report.sections import Line, Panel

WIDE = 430


def ends_of(*lines):
    """Where each name ends, by its text."""
    svg = "".join(drawn(Panel("ratio", lines, "blocks"), WIDE, 250))
    return {name: float(x) for x, name in re.findall(r'class="name end" x="(\d+)"[^>]*>([^<]*)<', svg)}


def test_a_line_is_named_where_it_ends():
    whole = Line("BN x5", (2, 6, 10, 14), (1.0, 2.0, 3.0, 4.0), "blue")
    early = Line("BN x1", (2, 6, 10, 14), (2.0, 3.0, 4.0, None), "sky")
    first = Line("BN x30", (2, 6, 10, 14), (5.0, None, None, None), "purple")
    across = WIDE - RIGHT - LEFT
    assert ends_of(whole, early, first) == pytest.approx(
        {"BN x5": WIDE - RIGHT - 4, "BN x1": LEFT + across * 8 / 12 - 4, "BN x30": LEFT + ROOM - 4}, abs=0.6
    )
