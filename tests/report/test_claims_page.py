"""The page of all claims: it shows what was judged, rows open and filter in a real browser, strings stay strings."""

import dataclasses
import json
import math

import pytest
from hostile_names import BOLD, HOSTILE, IMAGE
from test_access import CONTRASTS, LARGE, NAMED, READABLE, reader_sees
from typer.testing import CliRunner
from visiting import Visit

from batchnorm.commands import app
from batchnorm.errors import BatchNormError
from batchnorm.lab.judge.evidence import Estimate
from batchnorm.lab.judge.records import COMMAND, restored, stored, to_records
from batchnorm.lab.runs.store import Store
from batchnorm.records import RecordFile
from batchnorm.report.figures import figures_of
from batchnorm.report.intervals import bar, scale
from batchnorm.report.load import Run, load
from batchnorm.report.page import page, write_page
from batchnorm.report.sections import Interval, Line, Panel, Panels
from batchnorm.report.stored import from_plain, to_plain
from lab.claims.made_states import EIGHT, LESS, SECTIONS, WIDE, claim, state, states

BESIDE_PLOTLY = 3_000_000  # bytes


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("claims") / "claims.html"
    return write_page([Run(COMMAND, to_records(states()))], path)


@pytest.fixture
def visit(browser, written):
    seen = Visit(browser, written)
    yield seen
    seen.context.close()


def titles(visit):
    return visit.page.locator(".entry:visible .what strong").all_inner_texts()


def choose(visit, word):
    visit.page.get_by_role("radio", name=word).check(force=True)


# ---- records


@pytest.mark.parametrize("section", SECTIONS[:2] + SECTIONS[3:])
def test_a_section_comes_back_from_a_file(section):
    again = from_plain(json.loads(json.dumps(to_plain(section))))
    assert to_plain(again) == to_plain(section)
    assert type(again) is type(section)


def test_a_section_that_was_tampered_with_is_refused():
    fields = to_plain(SECTIONS[0])
    for change in (
        {"title": 3},
        {"columns": True},
        {"unknown": 1},
        {"kind": "player"},
        {"panels": [{"title": "x", "lines": [{"name": "", "x": [1], "y": [1], "colour": "blue)'><script>"}]}]},
        {"panels": [{"title": "x", "lines": [{"name": "", "x": [1, 2], "y": [1], "colour": "blue"}]}]},
        {"panels": [{"title": "x", "lines": [], "y_range": [0.0]}]},
    ):
        with pytest.raises(ValueError, match=r"is|has"):
            from_plain(fields | change)


@pytest.mark.parametrize("estimate", [EIGHT, LESS, WIDE, Estimate("never", -math.inf, -math.inf, -math.inf, 0.0)])
def test_an_estimate_comes_back_from_a_file(estimate):
    again = restored(json.loads(RecordFile(COMMAND, {}, (), stored(estimate), {}).to_json())["summary"])
    assert str(again) == str(estimate)
    assert again.outcome == estimate.outcome


def test_a_page_is_drawn_again_from_its_records_alone(tmp_path):
    records = to_records(states())
    path = records.write(tmp_path / "claims.json")
    again = load([path])
    assert page(again) == page([Run("claims", records)])


def test_what_is_judged_is_what_is_shown():
    (ledger,) = figures_of(to_records(states()))
    assert ledger.title == "5 claims: 1 confirmed, 1 refuted, 1 inconclusive, 2 not run"
    assert [heading for heading, _ in ledger.groups] == ["Does it work?", "Why?"]
    entries = {entry.name: entry for _, own in ledger.groups for entry in own}
    assert entries["shift"].shown.name == LESS.what  # the one that refutes, not the first
    assert entries["shift"].outcome == "refuted"
    assert entries["shift"].remark[1] == "It does not."
    assert entries["shift"].amounts == ("5 seeds", "2.1 min")
    assert entries["steps"].shown.text == "8x (6x to infinite)"
    assert entries["inception-imagenet"].command.endswith("--data imagenet/")
    assert entries["noise"].outcome == "not run"


def test_records_that_hold_no_verdict_are_refused():
    records = to_records(states())
    for field, value in (("outcome", "probably"), ("question", "Who?"), ("seeds", "5"), ("estimates", [{}])):
        claims = [records.summary["claims"][0] | {field: value}]
        with pytest.raises(BatchNormError, match="lab claims"):
            list(figures_of(dataclasses.replace(records, summary={"claims": claims})))


def test_the_bar_stands_where_the_numbers_are():
    interval = Interval("", 8.0, 6.0, 10.0, 2.0, True, "", "", "confirmed")
    at = scale(interval)
    assert 0 < at(2.0) < at(6.0) < at(8.0) < at(10.0) < 200
    assert f'd="M{at(2.0):.1f},0V' in bar(interval, "good")
    assert at(8.0) - at(6.0) == pytest.approx(at(10.0) - at(8.0))  # linear
    tiny = dataclasses.replace(interval, value=1e-12, low=1e-14, high=1e-10)
    assert scale(tiny)(1e-12) - scale(tiny)(1e-14) == pytest.approx(scale(tiny)(1e-10) - scale(tiny)(1e-12))
    unknown = dataclasses.replace(interval, value=math.nan, low=math.nan, high=math.nan)
    assert "span" not in bar(unknown, "open")
    assert "value" not in bar(unknown, "open")


# ---- the command


def test_the_command_writes_the_page_and_its_records(tmp_path):
    store = tmp_path / "runs"
    runner = CliRunner()
    missing = runner.invoke(app, ["lab", "report", "--store", str(store)])
    assert "there is no store" in str(missing.exception)
    Store(store).add(claim().runs("quick")[0])
    done = runner.invoke(app, ["lab", "report", "--store", str(store)])
    assert done.exit_code == 0, done.output
    records = load([store / "claims.json"])[0].records
    text = (store / "claims.html").read_text(encoding="utf-8")
    assert records.command == "lab claims"
    for each in records.summary["claims"]:
        assert each["command"].startswith("batchnorm lab run ")
        assert each["name"] in text
    other = tmp_path / "page.html"
    runner.invoke(app, ["report", str(store / "claims.json"), "--out", str(other)])
    assert "not run" in other.read_text(encoding="utf-8")


# ---- in a browser


def test_it_loads_whole_and_small_without_an_error_or_a_request(visit, written):
    assert visit.complaints == []
    assert [url for url in visit.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    text = written.read_text(encoding="utf-8")
    plotly = text.index('id="plotly-source"')
    assert len(text[:plotly].encode()) < BESIDE_PLOTLY
    visit.page.set_viewport_size({"width": 1280, "height": 720})
    assert visit.page.locator(".tally").bounding_box()["y"] < 120
    assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_bar_on_top_filters_by_verdict(visit):
    everything = titles(visit)
    assert len(everything) == 5
    choose(visit, "1 refuted")
    assert titles(visit) == ["BN removes the shift of the inputs of a layer"]
    assert visit.page.locator(".group h3:visible").all_inner_texts() == ["Does it work?"]
    choose(visit, "1 inconclusive")
    assert titles(visit) == ["BN makes the loss smoother"]
    visit.page.keyboard.press("ArrowRight")
    assert len(titles(visit)) == 2  # not run
    choose(visit, "5 claims")
    assert titles(visit) == everything


def test_a_chart_is_drawn_when_its_row_opens_and_plotly_takes_over(visit):
    assert visit.page.locator(".plotly-figure").count() == 3
    assert visit.page.locator(".sketch").count() == 0
    row = visit.page.locator(".entry").first
    row.locator("summary").first.focus()
    visit.page.keyboard.press("Enter")
    row.locator(".sketch").wait_for()
    assert visit.page.locator(".sketch").count() == 1
    assert row.locator(".sketch").bounding_box()["width"] > 500  # not that of a closed row
    assert row.locator(".panel").first.is_visible()
    assert row.get_by_text("Confirmed if the interval is above 2.").is_visible()
    assert row.get_by_text("batchnorm lab run steps").last.is_visible()
    visit.reach_for(0)
    assert row.locator(".main-svg").count() > 0
    visit.page.emulate_media(color_scheme="dark")  # draws what is drawn anew, and nothing else
    assert visit.page.locator(".sketch").count() == 1
    assert visit.complaints == []


def test_an_address_opens_a_row_also_one_that_is_filtered_out(browser, written):
    visit = Visit(browser, written, hash="#claim-shift")
    assert visit.page.locator("#claim-shift").get_attribute("open") is not None
    choose(visit, "1 confirmed")
    visit.page.evaluate("location.hash = 'claim-smooth'")
    visit.until("document.getElementById('claim-smooth').open")
    assert visit.page.locator("#claim-smooth").is_visible()
    visit.page.evaluate("location.hash = '%'")  # no name of a row
    assert visit.complaints == []
    visit.context.close()


def test_it_fits_a_phone(browser, written):
    visit = Visit(browser, written)
    visit.page.set_viewport_size({"width": 390, "height": 844})
    visit.page.evaluate("document.querySelectorAll('details.entry').forEach((each) => { each.open = true; })")
    visit.page.locator(".sketch").first.wait_for()
    assert visit.page.evaluate("document.documentElement.scrollWidth") == 390
    bars = visit.page.locator(".ours:has(.interval)")
    assert min(bars.evaluate_all("all => all.map((each) => each.clientWidth)")) > 250  # a column of its own
    beyond = "all => all.filter((each) => each.getBoundingClientRect().right > 390 && !each.closest('.scroll')).length"
    assert visit.page.locator(".entry *:visible").evaluate_all(beyond) == 0
    visit.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_and_reached(browser, written, scheme):
    visit = Visit(browser, written, color_scheme=scheme)
    found = visit.page.evaluate(CONTRASTS)
    assert len(found) > 100
    assert [each for each in found if each["contrast"] < (LARGE if each["large"] else READABLE)] == []
    roles = reader_sees(visit)
    assert {role: names for role, names in roles.items() if role in NAMED and "" in names} == {}
    assert "5 claims: 1 confirmed, 1 refuted, 1 inconclusive, 2 not run" in roles["heading"]
    visit.context.close()


def test_hostile_strings_are_shown_and_not_obeyed(browser, tmp_path):
    lines = (Line(HOSTILE, (1, 2), (1.0, 2.0), "blue"),)
    sections = (Panels(BOLD, IMAGE, (Panel(HOSTILE, lines, IMAGE),)),)
    words = dict.fromkeys(("statement", "rule", "method", "limits", "retelling"), f"{HOSTILE} {IMAGE} {BOLD}")
    source = dataclasses.replace(claim().source, paper=HOSTILE, link=f"javascript:alert(3) {IMAGE}", reported=BOLD)
    bad = claim(HOSTILE, title=IMAGE, sections=sections, source=source, **words)
    found = state(bad, Estimate(IMAGE, 8.0, 6.0, 9.0, threshold=2.0, unit=HOSTILE), sentence=BOLD)
    path = write_page([Run(HOSTILE, to_records([found]))], tmp_path / "hostile.html")
    context = browser.new_context()
    opened = context.new_page()
    dialogs, complaints = [], []
    opened.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    opened.on("console", lambda message: complaints.append(message.text))
    opened.goto(path.as_uri())
    opened.locator("summary").first.click()
    assert opened.locator(".entry .what strong").inner_text() == IMAGE
    assert opened.locator(".entry .found").inner_text() == BOLD
    assert opened.locator("main img, main b b, main script:not([data-for])").count() == 0
    assert opened.locator("a[href^=javascript]").count() == 0
    assert (dialogs, complaints) == ([], [])
    context.close()
