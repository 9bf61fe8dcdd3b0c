"""Charts whose lines are shown in turn: one frame at a time, on axes that stand still, and dots."""

import itertools
import re

from batchnorm.report.panels import charts, picture
from batchnorm.report.sections import Line, Panel, Panels
from batchnorm.report.stored import from_plain, to_plain

FRAMES = tuple((Line("", (0.0, place), (0.0, 2 * place), "blue"),) for place in (1.0, 2.0, 3.0))
DOTS = Line("", (0.0, 1.0, 2.0), (0.0, None, 2.0), "orange", "points", 5.0)
SECTION = Panels("It moves", "", (Panel("plane", (DOTS,), frames=FRAMES),))


def test_every_frame_has_its_slot_and_the_last_one_is_what_stands():
    (chart,) = charts(SECTION)
    delays = [float(found) for found in re.findall(r"animation-delay:(-?[\d.]+)s", chart)]
    assert len(delays) == len(FRAMES)
    assert [round(b - a, 3) for a, b in itertools.pairwise(delays)] == [0.7, 0.7]
    assert re.findall(r'<g class="([^"]+)"', chart) == ["frame", "frame", "frame last"]
    assert "prefers-reduced-motion" in chart


def test_all_frames_have_the_same_axes():
    (chart,) = charts(SECTION)
    ends = re.findall(r'<path class="line" d="M[\d.,]+L([\d.]+),([\d.]+)" stroke-width="2"', chart)
    across = [float(x) for x, _ in ends]
    assert len(across) == 3
    assert abs((across[2] - across[1]) - (across[1] - across[0])) < 0.2  # 1, 2 and 3 on one scale
    assert across[2] > 300


def test_dots_are_drawn_where_there_are_values():
    (chart,) = charts(SECTION)
    (path,) = re.findall(r'd="([^"]*h0)" stroke-width="5" stroke-linecap="round"', chart)
    assert path.count("h0") == path.count("M") == 2


def test_frames_are_kept_in_records_and_drawn_in_files():
    assert from_plain(to_plain(SECTION)) == SECTION
    assert picture(SECTION).count('class="frame') == 3


def test_log_axes_of_little_more_than_a_decade_have_ticks_between():
    panel = Panel("error", (Line("", (2.0, 128.0), (0.02, 0.4), "blue"),), x_log=True, y_log=True, percent=True)
    (chart,) = charts(Panels("", "", (panel,)))
    assert {"2%", "5%", "10%", "20%"} <= set(re.findall(r">([\d.]+%)</text>", chart))
    wide = Panel("error", (Line("", (1.0, 2.0), (1e-3, 1e3), "blue"),), y_log=True)
    (chart,) = charts(Panels("", "", (wide,)))
    assert ">5</text>" not in chart
