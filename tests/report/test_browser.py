"""The page in a real browser: it loads without an error or a request, moves when told to, shows what was recorded."""

import re

import pytest
from hostile_names import BOLD, HOSTILE, IMAGE
from visiting import Visit

LARGEST = 6_000_000


@pytest.fixture(scope="module")
def opened(browser, pages):
    visit = Visit(browser, pages["race"])
    yield visit
    visit.context.close()


@pytest.fixture
def race(opened):
    opened.page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    opened.seek(0)
    return opened


def records_of(records):
    return {
        (m.quantity, m.setting.get("stack"), m.setting["layer"], m.setting["step"]): m.samples
        for m in records.measurements
    }


def written(value):
    """A number as the player writes it."""
    return ("0.00" if abs(value) < 0.005 else f"{value:.2f}").replace("-", "−")


def test_it_loads_without_an_error_or_a_request(opened, pages, capsys):
    marks = opened.page.evaluate(
        """() => {
            const page = performance.getEntriesByType('navigation')[0];
            const marks = Object.fromEntries(performance.getEntriesByType('mark').map((m) => [m.name, m.startTime]));
            return { 'page read': page.domContentLoadedEventEnd, ...marks };
        }"""
    )
    with capsys.disabled():
        print("\nthe page of a race:", ", ".join(f"{name} after {ms:.0f} ms" for name, ms in marks.items()))
    assert opened.complaints == []
    assert [url for url in opened.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert opened.requests[0] == pages["race"].as_uri()
    assert pages["race"].stat().st_size <= LARGEST
    charts = opened.page.locator(".plotly-figure")
    assert charts.count() == 4
    assert charts.locator(".sketch").count() == 4
    assert opened.page.evaluate("window.Plotly === undefined")  # the long script waits until someone wants it


def test_play_moves_the_histograms_and_stops_at_the_end(race):
    before = race.bars()
    assert len(before) == 16
    race.page.locator(".speed select").select_option("4")
    race.page.get_by_role("button", name="Play").click()
    race.until("document.querySelector('.signal').dataset.step > 0")
    race.page.get_by_role("button", name="Replay").wait_for()
    race.page.locator(".speed select").select_option("1")
    assert race.step == 44
    after = race.bars()
    assert all(a != b for a, b in zip(before, after, strict=True))


def test_pause_stops_it(race):
    race.page.locator(".speed select").select_option("0.25")
    race.page.get_by_role("button", name="Play").click()
    race.until("document.querySelector('.signal').dataset.step > 0")
    race.page.get_by_role("button", name="Pause").click()
    stopped = race.step
    race.page.wait_for_timeout(700)
    race.page.locator(".speed select").select_option("1")
    assert race.step == stopped
    assert race.page.get_by_role("button", name="Play").count() == 1


def test_the_scrubber_moves_everything(race):
    before, cursor = race.bars(), race.page.locator(".cursor").first
    at = float(cursor.get_attribute("x1"))
    race.seek(7)
    assert race.step == 28
    assert race.bars() != before
    assert float(cursor.get_attribute("x1")) > at
    assert race.page.locator(".where").inner_text() == "step 28"
    slider = race.page.get_by_role("slider", name="Training step")
    assert slider.get_attribute("aria-valuetext") == "step 28 of 44"


def test_a_drag_on_the_curve_moves_it_too(race):
    curve = race.page.locator(".curve svg").first
    curve.scroll_into_view_if_needed()
    box = curve.bounding_box()
    race.page.mouse.click(box["x"] + 0.6 * box["width"], box["y"] + 40)
    assert 16 < race.step < 36


@pytest.mark.parametrize("focus", [".signal", ".signal input[type=range]"])
def test_keys(race, focus):
    race.page.locator(focus).focus()
    press = race.page.keyboard.press
    steps = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "PageDown", "Home"):
        press(key)
        steps.append(race.step)
    assert steps == [4, 8, 4, 44, 44, 4, 0]
    press("Space")
    race.until("document.querySelector('.signal').dataset.step > 0")
    press("Space")
    stopped = race.step
    race.page.wait_for_timeout(400)
    assert race.step == stopped


def test_space_on_the_button_plays_once(race):
    race.page.get_by_role("button", name="Play").focus()
    race.page.keyboard.press("Space")
    assert race.page.get_by_role("button", name="Pause").count() == 1
    race.page.keyboard.press("Space")
    assert race.page.get_by_role("button", name="Pause").count() == 0


def test_the_step_is_said_in_words_when_it_stops(race, signal_records):
    race.seek(5)
    said = race.page.locator(".said")
    race.until("document.querySelector('.said').textContent.startsWith('Step 20 of 44.')")
    mean = records_of(signal_records)["mean", "without BN", "layer 4", 20][0]
    assert f"without BN: layer 4 has mean {written(mean)}" in said.inner_text()
    assert said.get_attribute("aria-live") == "polite"


def test_the_players_numbers_are_the_records(race, signal_records):
    recorded = records_of(signal_records)
    race.seek(6)
    step, told = 24, race.page.locator(".panel .numbers").all_inner_texts()
    assert len(told) == 16
    stages = [("without BN", ""), ("with BN", " before BN"), ("with BN", " normalised"), ("with BN", "")]
    for number, text in enumerate(told):
        (stack, stage), layer = stages[number % 4], f"layer {number // 4 + 1}"
        mean, variance = (recorded[quantity, stack, layer + stage, step][0] for quantity in ("mean", "variance"))
        assert f"mean {written(mean)}" in text
        assert f"var {written(variance)}" in text
        if not stage:
            assert f"flat {100 * recorded['saturation', stack, layer, step][0]:.0f}%" in text
        if (stack, stage) == ("with BN", ""):
            _, low, high = recorded["gamma", stack, f"{layer} normalised", step]
            assert f"γ {written(low)} to {written(high)}" in text
    loss, accuracy = (race.page.locator(".curve figcaption").nth(number).inner_text() for number in (0, 1))
    for stack in ("without BN", "with BN"):
        assert f"{stack} {written(recorded['training loss', stack, '', step][0])}" in loss
        assert f"{stack} {100 * recorded['validation accuracy', stack, '', step][0]:.1f}%" in accuracy


def test_the_bars_are_the_recorded_counts(race, signal_records):
    """A bar is as high as its count, beside the highest: read back from what is drawn."""
    race.seek(3)
    path = race.bars()[12]  # layer 4 without BN
    record = next(
        m
        for m in signal_records.measurements
        if m.quantity == "histogram"
        and (m.setting["stack"], m.setting["layer"], m.setting["step"]) == ("without BN", "layer 4", 12)
    )
    counts = [count for count in record.samples if count]
    tops = [float(y) for y in re.findall(r"M[\d.]+,72V([\d.]+)H", path)]
    assert len(tops) == len(counts)
    assert tops == pytest.approx([72 - 68 * count / max(counts) for count in counts], abs=0.06)


def test_names_are_shown_and_not_obeyed(browser, pages):
    visit = Visit(browser, pages["hostile"])
    assert visit.complaints == []
    assert visit.dialogs == []
    assert visit.page.locator("h4").all_inner_texts() == [HOSTILE, IMAGE, BOLD]
    assert visit.page.locator("img, .card b:text('bold')").count() == 0
    assert visit.page.title() == "The signal in a network"
    names = {f"{IMAGE}, {HOSTILE}", f"{IMAGE}, {BOLD}"}
    assert names <= set(visit.page.locator(".plotly-figure .ytick").all_text_contents())
    assert names <= set(visit.reach_for(0).locator(".ytick text").all_text_contents())
    assert visit.complaints == []
    assert visit.dialogs == []
    visit.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_all_in_its_width(browser, pages, scheme):
    visit = Visit(browser, pages["race"], color_scheme=scheme, reduced_motion="reduce")
    visit.page.set_viewport_size({"width": 390, "height": 844})
    assert visit.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert visit.page.locator(".panel:visible").count() == 8
    visit.page.get_by_role("radio", name="normalised").check()
    assert visit.page.locator(".column:visible h3").all_inner_texts() == ["Without BN", "With BN: normalised"]
    red, green, blue = (
        int(part)
        for part in re.findall(r"\d+", visit.page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]
    )
    assert (red + green + blue < 200) == (scheme == "dark")
    drawn = ".plotly-figure .ytick", ".plotly-figure .ytick text"  # before plotly, and by it
    for text in drawn:
        colour = visit.page.evaluate(f"getComputedStyle(document.querySelector('{text}')).fill")
        assert (sum(int(part) for part in re.findall(r"\d+", colour)[:3]) > 400) == (scheme == "dark")
        visit.reach_for(0)
    assert visit.complaints == []
    visit.context.close()
