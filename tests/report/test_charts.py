"""The charts in a real browser: drawn at once as plain SVG, by plotly where somebody reaches for one, and on paper."""

import re

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
    """Read back from the drawn points, by the places of the labels 0% and 100%."""
    sketch = fresh.page.locator(".sketch").first
    labels = dict(sketch.locator(".ytick").evaluate_all("all => all.map((t) => [t.textContent, +t.getAttribute('y')])"))
    rows = summarise(race_result).rows
    drawn = dict(sketch.locator(".line").evaluate_all("all => all.map((l) => [l.dataset.name, l.getAttribute('d')])"))
    assert list(drawn) == [row.variant for row in rows]
    for row in rows:
        heights = [float(y) + 0.35 * 13 for y in re.findall(r"[ML][\d.]+,([\d.]+)", drawn[row.variant])]
        read = [(labels["0%"] - y) / (labels["0%"] - labels["100%"]) for y in heights]
        assert read == pytest.approx(list(row.median_accuracy), abs=1e-3)


def test_the_first_maps_have_every_cell_in_its_colour(fresh, race_records, signal_records):
    for chart, figure in enumerate(fresh.page.locator("script[data-for$=-plot]").all_text_contents()):
        if chart in (ACCURACY, RUN):
            continue
        values = fresh.page.evaluate(f"({figure})[0].data[0].z")
        cells = cells_of(fresh, chart)
        assert len(cells) == sum(value is not None for row in values for value in row)
        rows, columns = (sorted({place[axis] for place in cells}) for axis in (1, 0))
        assert len(rows) == len(values)
        colours = {}
        for (x, y), colour in cells.items():
            colours.setdefault(values[rows.index(y)][columns.index(x)] if chart != RATES else None, set()).add(colour)
        assert chart == RATES or all(len(same) == 1 for same in colours.values())
        assert len({colour for same in colours.values() for colour in same}) > 1
    written = fresh.page.locator(".sketch").nth(RATES).locator("text[font-size]").all_text_contents()
    assert len(written) == len(cells_of(fresh, RATES))
    assert all(re.fullmatch(r"\d+%", text) for text in written)


def test_plotlys_numbers_are_the_records(alive, race_result):
    drawn = alive.page.evaluate(
        """() => [...document.querySelectorAll('.plotly-figure')].map((each) => each.data.map((trace) =>
            ({ type: trace.type, name: trace.name, part: trace.meta && trace.meta.part, x: trace.x, y: trace.y })))"""
    )
    rows = summarise(race_result).rows
    lines = {trace["name"]: trace["y"] for trace in drawn[ACCURACY] if trace["part"] == "line"}
    assert lines == {row.variant: list(row.median_accuracy) for row in rows}
    assert drawn[RATES][0]["type"] == "heatmap"
    tried = sorted({curve.member.learning_rate for lane in race_result.lanes for curve in lane.curves})
    assert drawn[RATES][0]["x"] == [f"{rate:g}" for rate in tried]
    table = alive.page.locator("section.table tbody tr").first.inner_text()
    assert table.startswith("Inception")


def test_only_the_chart_that_is_reached_for_is_plotlys(fresh):
    fresh.page.mouse.move(640, 5)
    fresh.page.evaluate("scrollTo(0, document.body.scrollHeight)")  # passing by is not reaching for
    assert fresh.page.evaluate("window.Plotly === undefined")
    figure = fresh.reach_for(PROGRESS)
    assert figure.locator(".main-svg").count() > 0
    assert not figure.locator(".sketch").is_visible()
    assert fresh.page.locator(".main-svg >> visible=true").count() == figure.locator(".main-svg").count()
    assert fresh.page.locator(".sketch >> visible=true").count() == 4


def test_a_tap_reaches_for_a_chart(browser, pages):
    phone = Visit(browser, pages["race"], has_touch=True)
    phone.page.locator(".plotly-figure").first.tap()
    phone.until("document.querySelector('.plotly-figure').matches('[data-live]:not(.reading)')")
    assert phone.page.locator(".plotly-figure .main-svg").count() > 0
    assert phone.complaints == []
    phone.context.close()


def test_a_switch_hides_its_variant(fresh):
    box = fresh.page.get_by_role("checkbox", name="BN-x30")
    names = f"[...{LINES}].map((line) => line.dataset.name)"
    before = fresh.page.evaluate(names)
    box.uncheck()
    assert fresh.page.evaluate(names) == [name for name in before if name != "BN-x30"]
    fresh.reach_for(ACCURACY)  # what was hidden stays hidden
    figure = "document.querySelector('.plotly-figure')"
    drawn = f"{figure}.querySelectorAll('.scatterlayer .trace').length"
    own, shown = len(box.get_attribute("data-traces").split(",")), fresh.page.evaluate(drawn)
    hidden = fresh.page.evaluate(f"{figure}.data.filter((t) => t.visible === false).map((t) => t.name || null)")
    assert {name for name in hidden if name} == {"BN-x30"}
    box.check()
    fresh.until(f"{drawn} === {shown + own}")
    assert fresh.page.evaluate(names) == before


def test_another_quantity_can_be_chosen(fresh):
    before = cells_of(fresh, LAYERS)
    fresh.page.locator(".choose select").select_option("saturation")
    after = cells_of(fresh, LAYERS)
    assert set(after.values()) != set(before.values())
    assert "saturation" in fresh.page.locator(".sketch").nth(LAYERS).locator("text").all_text_contents()
    figure = fresh.reach_for(LAYERS)
    assert figure.evaluate("each => each.data[0].colorbar.title.text") == "saturation"
    fresh.page.locator(".choose select").select_option("mean")
    fresh.until(f"document.querySelectorAll('.plotly-figure')[{LAYERS}].data[0].colorbar.title.text === 'mean'")
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
