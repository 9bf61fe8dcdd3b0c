"""The charts in a real browser: drawn at once as plain SVG, by plotly where one is pointed at, and on paper."""

import re
from itertools import pairwise

import pytest
from visiting import Visit

from batchnorm.lab.summary import summarise
from batchnorm.records import Measurement, RecordFile
from batchnorm.report.load import Run
from batchnorm.report.page import write_page

ACCURACY, RATES, PROGRESS, LAYERS, RUN = range(5)
LINES = "[...document.querySelectorAll('.sketch')][0].querySelectorAll('.line')"


@pytest.fixture
def fresh(browser, pages):
    visit = Visit(browser, pages["race"])
    yield visit
    assert visit.complaints == []
    visit.context.close()


@pytest.fixture(scope="module")
def alive(browser, pages):
    """The page after someone reached for every chart."""
    visit = Visit(browser, pages["race"])
    for chart in (ACCURACY, RATES, PROGRESS, LAYERS, RUN):
        visit.reach_for(chart)
    yield visit
    assert visit.complaints == []
    visit.context.close()


def cells_of(visit, chart):
    """Every cell of a map: its middle and its colour."""
    paths = visit.page.locator(".plotly-figure").nth(chart).locator(".sketch .cells")
    found = paths.evaluate_all("all => all.map((each) => [each.getAttribute('d'), each.getAttribute('fill')])")
    return {
        ((float(x0) + float(x1)) / 2, (float(y0) + float(y1)) / 2): colour
        for path, colour in found
        for x0, y0, x1, y1 in re.findall(r"M([\d.]+),([\d.]+)H([\d.]+)V([\d.]+)", path)
    }


def test_the_first_lines_are_the_recorded_medians(fresh, race_result):
    """Read back from the drawn points, by the places of two labels."""
    sketch = fresh.page.locator(".sketch").first
    labels = dict(sketch.locator(".ytick").evaluate_all("all => all.map((t) => [t.textContent, +t.getAttribute('y')])"))
    rows = summarise(race_result).rows
    drawn = dict(sketch.locator(".line").evaluate_all("all => all.map((l) => [l.dataset.name, l.getAttribute('d')])"))
    assert list(drawn) == [row.variant for row in rows]
    for row in rows:
        heights = [float(y) + 0.35 * 13 for y in re.findall(r"[ML][\d.]+,([\d.]+)", drawn[row.variant])]
        (low, at_low), *_, (high, at_high) = ((float(text[:-1]) / 100, y) for text, y in labels.items())
        read = [low + (high - low) * (y - at_low) / (at_high - at_low) for y in heights]
        assert read == pytest.approx(list(row.median_accuracy), abs=1e-3)


def test_the_first_maps_have_every_cell_in_its_colour(fresh, race_records, signal_records):
    for chart, figure in enumerate(fresh.page.locator("script[data-for$=-plot]").all_text_contents()):
        if chart not in (PROGRESS, LAYERS):
            continue
        values = fresh.page.evaluate(f"({figure})[0].data[0].z")
        cells = cells_of(fresh, chart)
        assert len(cells) == sum(value is not None for row in values for value in row)
        rows, columns = (sorted({place[axis] for place in cells}) for axis in (1, 0))
        assert len(rows) == len(values)
        colours = {}
        for (x, y), colour in cells.items():
            colours.setdefault(values[rows.index(y)][columns.index(x)], set()).add(colour)
        assert all(len(same) == 1 for same in colours.values())
        assert len({colour for same in colours.values() for colour in same}) > 1


def test_plotlys_numbers_are_the_records(alive, race_result):
    drawn = alive.page.evaluate(
        """() => [...document.querySelectorAll('.plotly-figure')].map((each) => each.data.map((trace) =>
            ({ type: trace.type, name: trace.name, part: trace.meta && trace.meta.part, x: trace.x, y: trace.y })))"""
    )
    rows = summarise(race_result).rows
    lines = {trace["name"]: trace["y"] for trace in drawn[ACCURACY] if trace["part"] == "line"}
    assert lines == {row.variant: list(row.median_accuracy) for row in rows}
    tried = {curve.member.learning_rate for lane in race_result.lanes for curve in lane.curves}
    assert {rate for trace in drawn[RATES] for rate in trace["x"]} == tried
    table = alive.page.locator("section.table tbody tr").first.inner_text()
    assert table.startswith("Inception")


def test_only_the_chart_that_is_reached_for_is_plotlys(fresh):
    fresh.page.mouse.move(640, 5)
    fresh.page.evaluate("scrollTo(0, document.body.scrollHeight)")  # passing by is not reaching for
    assert fresh.page.evaluate("window.Plotly === undefined")
    figure = fresh.reach_for(PROGRESS)
    assert figure.locator(".main-svg").count() > 0
    assert figure.locator(".sketch .cells >> visible=true").count() == 0
    assert fresh.page.locator(".main-svg >> visible=true").count() == figure.locator(".main-svg").count()
    others = fresh.page.locator(".plotly-figure:not([data-live]) .sketch .xtick >> visible=true")
    assert others.count() > 4


def test_a_tap_reaches_for_a_chart(browser, pages):
    phone = Visit(browser, pages["race"], has_touch=True)
    phone.page.locator(".plotly-figure").first.tap()
    phone.until("document.querySelector('.plotly-figure').matches('[data-live]:not(.reading)')")
    assert phone.page.locator(".plotly-figure .main-svg").count() > 0
    assert phone.complaints == []
    phone.context.close()


def names_of(chart):
    """Every name at the end of a line: its text, its color and its box, and those of the line."""
    return chart.evaluate(
        """each => [...each.querySelectorAll('.over .name')].map((name) => {
            const line = each.querySelector(`.line[data-line="${name.dataset.line}"]`);
            const box = name.getBoundingClientRect();
            return { text: name.textContent, line: line.dataset.name, top: box.top, bottom: box.bottom, left: box.left,
                right: box.right, ends: line.getBoundingClientRect().right, chart: each.getBoundingClientRect().right };
        })"""
    )


@pytest.mark.parametrize("width", [1280, 390])
def test_every_line_has_its_name_behind_its_end_and_none_is_on_another(fresh, width, race_result):
    fresh.page.set_viewport_size({"width": width, "height": 800})
    fresh.page.wait_for_timeout(100)
    found = names_of(fresh.page.locator(".plotly-figure").first)
    assert sorted(each["text"] for each in found) == sorted(row.variant for row in summarise(race_result).rows)
    assert all(each["text"] == each["line"] for each in found)
    assert all(each["ends"] <= each["left"] and each["right"] <= each["chart"] + 1 for each in found)
    for above, below in pairwise(sorted(found, key=lambda each: each["top"])):
        assert above["bottom"] <= below["top"] + 4  # boxes of text are higher than their letters
    assert fresh.page.locator(".switches").count() == 0  # no legend


def bands_shown(visit):
    return (
        visit.page.locator(".plotly-figure")
        .first.locator(".band")
        .evaluate_all("all => all.filter((each) => each.checkVisibility()).map((each) => Number(each.dataset.line))")
    )


def point_at(visit, line):
    """Rest the mouse on the middle of a line."""
    place = visit.page.locator(".plotly-figure").first.evaluate(
        """(each, line) => {
            const path = each.querySelector(`.line[data-line="${line}"]`), size = each.getBoundingClientRect();
            const at = path.getPointAtLength(path.getTotalLength() * 0.8);
            return [size.left + at.x, size.top + at.y];
        }""",
        line,
    )
    visit.page.mouse.move(*place)


def test_only_the_line_under_the_pointer_has_its_band(fresh):
    fresh.page.locator(".plotly-figure").first.scroll_into_view_if_needed()
    assert bands_shown(fresh) == []
    for line in (0, 3):
        point_at(fresh, line)
        (shown,) = bands_shown(fresh)
        lines = fresh.page.locator(".plotly-figure").first.locator(".line")
        paths = [lines.nth(number).get_attribute("d") for number in (line, shown)]
        assert shown == line or paths[0][-30:] == paths[1][-30:]  # or one that lies on it
    fresh.page.mouse.move(5, 5)
    assert bands_shown(fresh) == []
    fresh.reach_for(ACCURACY)
    point_at(fresh, 0)
    fresh.until("document.querySelectorAll('.plotly-figure .band.near').length === 1")  # of plotly's chart, too


def test_plotly_draws_in_the_place_of_the_sketch_and_has_no_toolbar(fresh):
    figure = fresh.reach_for(ACCURACY)
    area = figure.evaluate(
        """each => { const { l, t, w, h } = each._fullLayout._size; return [l, t, l + w, t + h]; }"""
    )
    grid = figure.locator(".sketch .grid").evaluate_all(
        "all => all.map((each) => ['x1', 'y1', 'x2', 'y2'].map((side) => Number(each.getAttribute(side))))"
    )
    left, top, right, bottom = (
        pick(side) for pick, side in zip((min, min, max, max), zip(*grid, strict=True), strict=True)
    )
    assert [left, top, right, bottom] == pytest.approx(area, abs=1)
    assert figure.locator(".modebar-btn").count() == 0


def test_names_leave_a_chart_that_is_enlarged_and_come_back(fresh):
    figure = fresh.reach_for(ACCURACY)
    names = figure.locator(".over .name >> visible=true")
    whole = names.count()
    assert whole == 6
    box = figure.bounding_box()
    fresh.page.mouse.move(box["x"] + 200, box["y"] + 100)
    fresh.page.mouse.down()
    fresh.page.mouse.move(box["x"] + 400, box["y"] + 250, steps=4)
    fresh.page.mouse.up()
    fresh.until("document.querySelector('.plotly-figure').matches('.zoomed')")
    assert names.count() == 0
    fresh.page.wait_for_timeout(500)
    fresh.page.mouse.dblclick(box["x"] + 300, box["y"] + 200)
    fresh.until("!document.querySelector('.plotly-figure').matches('.zoomed')")
    assert names.count() == whole


def test_another_quantity_can_be_chosen(fresh):
    before = cells_of(fresh, LAYERS)
    fresh.page.locator(".choose select").select_option("mean")
    after = cells_of(fresh, LAYERS)
    assert set(after.values()) != set(before.values())
    assert "mean" in fresh.page.locator(".sketch").nth(LAYERS).locator("text").all_text_contents()
    figure = fresh.reach_for(LAYERS)
    assert figure.evaluate("each => each.data[0].colorbar.title.text") == "mean"
    fresh.page.locator(".choose select").select_option("saturation")
    fresh.until(f"document.querySelectorAll('.plotly-figure')[{LAYERS}].data[0].colorbar.title.text === 'saturation'")
    assert cells_of(fresh, LAYERS) == before
    assert figure.evaluate("each => each.layout.xaxis.title.text") == "training steps"


def test_a_chart_fits_a_window_that_becomes_narrow(fresh):
    wide = fresh.page.locator(".sketch").first.get_attribute("viewBox")
    fresh.page.set_viewport_size({"width": 390, "height": 844})
    fresh.until(f"document.querySelector('.sketch').getAttribute('viewBox') !== '{wide}'")
    box = fresh.page.locator(".sketch").first.bounding_box()
    narrow = fresh.page.locator(".sketch").first.get_attribute("viewBox").split()
    assert float(narrow[2]) == pytest.approx(box["width"], abs=1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_paper_gets_every_chart_dark_on_white(browser, pages, scheme):
    visit = Visit(browser, pages["race"], color_scheme=scheme)
    visit.reach_for(RATES)
    visit.page.set_viewport_size({"width": 720, "height": 1000})  # a sheet of A4 between its margins
    visit.page.emulate_media(media="print", color_scheme=scheme)
    assert visit.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0  # paper does not scroll
    assert visit.page.locator(".sketch >> visible=true").count() == 5
    assert visit.page.locator(".plot-container >> visible=true").count() == 0
    assert visit.page.get_by_text("BN-x5-Sigmoid", exact=True).first.is_visible()  # which line is which
    colour = visit.page.evaluate("getComputedStyle(document.querySelector('.sketch text')).fill")
    assert sum(int(part) for part in re.findall(r"\d+", colour)[:3]) < 200
    visit.context.close()


def test_columns_with_long_names_keep_them_all(browser, tmp_path):
    """Names that do not fit beside each other are turned, not left out; numbers that do not fit their cell are."""
    kinds = [
        (operation, direction) for operation in ("bn", "bn+relu", "bn+add+relu") for direction in ("train", "eval")
    ]
    kinds += [(operation, "forward") for operation in ("bn", "bn+relu", "bn+add+relu")]
    measured = [
        Measurement("time", {"shape": "8x4", "layout": "contiguous", "operation": operation, "pass": direction,
                             "memory": "kept", "dtype": "float32", "bytes": 128, "contender": who}, (seconds,), "s")
        for operation, direction in kinds
        for who, seconds in (("batchnorm", 0.001), ("torch", 0.002), ("floor", 0.001))
    ]  # fmt: skip
    page = write_page([Run("bench", RecordFile("bench", {}, tuple(measured)))], tmp_path / "bench.html")
    visit = Visit(browser, page)
    names = visit.page.locator(".sketch .xtick")
    expected = [f"{operation} {direction}, memory kept" for operation, direction in kinds]
    numbers = visit.page.locator(".sketch text[font-size]")
    assert names.all_text_contents() == expected
    assert numbers.all_text_contents() == ["2.00"] * len(kinds)
    visit.page.set_viewport_size({"width": 300, "height": 844})
    visit.until("document.querySelectorAll('.sketch text[font-size]').length === 0")
    assert names.all_text_contents() == expected
    assert visit.complaints == []
    visit.context.close()
