"""The page in a real browser: it loads without an error or a request, moves on request, shows what was recorded."""

import re

import pytest
from hostile_names import BOLD, HOSTILE, IMAGE
from visiting import Visit

from batchnorm.lab.depth.records import to_records
from batchnorm.report.figures import figures_of
from batchnorm.report.load import Run
from batchnorm.report.page import write_page
from batchnorm.report.sections import Player
from lab.depth_examples import whole

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
    """A number as a tooltip writes it."""
    return ("0.00" if abs(value) < 0.005 else f"{value:.2f}").replace("-", "−")


def film_data(records):
    return next(section.data for section in figures_of(records) if isinstance(section, Player))


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
    assert charts.count() == 5
    assert charts.locator(".sketch").count() == 5
    assert opened.page.evaluate("window.Plotly === undefined")  # the long script waits until someone wants it


def test_play_moves_the_histograms_and_stops_at_the_end(race):
    before = race.bars()
    assert len(before) == 16
    race.page.locator(".speed select").select_option("4")
    race.page.get_by_role("button", name="Play").click()
    race.until("document.querySelector('.film').dataset.step > 0")
    race.page.get_by_role("button", name="Replay").wait_for()
    race.page.locator(".speed select").select_option("1")
    assert race.step == 60
    after = race.bars()
    assert all(a != b for a, b in zip(before, after, strict=True))


def test_pause_stops_it(race):
    race.page.locator(".speed select").select_option("0.25")
    race.page.get_by_role("button", name="Play").click()
    race.until("document.querySelector('.film').dataset.step > 0")
    race.page.get_by_role("button", name="Pause").click()
    stopped = race.step
    race.page.wait_for_timeout(700)
    race.page.locator(".speed select").select_option("1")
    assert race.step == stopped
    assert race.page.get_by_role("button", name="Play").count() == 1


def test_the_scrubber_moves_everything(race):
    before, cursor = race.bars(), race.page.locator(".cursor").first
    at = float(cursor.get_attribute("x1"))
    race.page.locator(".film input[type=range]").fill("500")  # half of the film
    assert race.step == 9  # of 60: half of the film shows the first 15% of the steps
    assert race.bars() != before
    assert float(cursor.get_attribute("x1")) > at
    assert race.page.locator(".where").inner_text() == "step 9 of 60"
    slider = race.page.get_by_role("slider", name="Training step")
    assert slider.get_attribute("aria-valuetext") == "step 9 of 60"


def test_the_cursor_stands_above_the_thumb_of_the_slider(race):
    """The curves and the slider share the film's time, so that one can read one by the other."""
    for share in (0, 500, 1000):
        race.page.locator(".film input[type=range]").fill(str(share))
        track = race.page.locator(".film input[type=range]").bounding_box()
        thumb = track["x"] + 8 + (track["width"] - 16) * share / 1000
        line = race.page.locator(".cursor").bounding_box()
        assert line["x"] + line["width"] / 2 == pytest.approx(thumb, abs=8)


def test_a_drag_on_the_curve_moves_it_too(race):
    curve = race.page.locator("svg.curves")
    curve.scroll_into_view_if_needed()
    box = curve.bounding_box()
    race.page.mouse.click(box["x"] + 54 + 0.5 * (box["width"] - 54 - 256), box["y"] + 40)
    assert race.step == 9


@pytest.mark.parametrize("focus", [".film", ".film input[type=range]", None])
def test_keys(race, focus):
    """Wherever the focus is, while the film is visible."""
    race.page.locator(".film").scroll_into_view_if_needed()
    if focus:
        race.page.locator(focus).focus()
    else:
        assert race.page.evaluate("document.activeElement === document.body")
    press = race.page.keyboard.press
    steps = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "Home"):
        press(key)
        steps.append(race.step)
    assert steps == [1, 2, 1, 60, 60, 0]
    press("Space")
    race.until("document.querySelector('.film').dataset.step > 0")
    press("Space")
    stopped = race.step
    race.page.wait_for_timeout(400)
    assert race.step == stopped


def test_keys_leave_the_page_alone_where_the_film_is_not_visible(race):
    race.page.evaluate("scrollTo(0, document.body.scrollHeight)")
    race.until("document.querySelector('.film').getBoundingClientRect().bottom < 0 || "
               "document.querySelector('.film').getBoundingClientRect().top > innerHeight")  # fmt: skip
    for key in ("ArrowRight", "2"):
        race.page.keyboard.press(key)
    assert race.step == 0
    race.page.evaluate("scrollTo(0, 0)")
    assert race.page.evaluate("document.querySelector('.film').getBoundingClientRect().top > innerHeight")
    race.page.keyboard.press("Space")
    race.until("scrollY > 100")  # the page scrolled
    assert race.page.get_by_role("button", name="Pause").count() == 0


def test_keys_in_a_form_are_the_forms(race):
    race.page.locator(".film").scroll_into_view_if_needed()
    race.page.locator(".speed select").focus()
    race.page.keyboard.press("ArrowRight")
    assert race.step == 0
    race.page.locator(".speed select").select_option("1")


def test_space_on_the_button_plays_once(race):
    race.page.get_by_role("button", name="Play").focus()
    race.page.keyboard.press("Space")
    assert race.page.get_by_role("button", name="Pause").count() == 1
    race.page.keyboard.press("Space")
    assert race.page.get_by_role("button", name="Pause").count() == 0


def test_the_step_is_said_in_words_when_it_stops(race, signal_records):
    race.seek(20)
    said = race.page.locator(".said")
    race.until("document.querySelector('.said').textContent.startsWith('Step 20: ')")
    flat = [records_of(signal_records)["saturation", "without BN", f"layer {n}", 20][0] for n in (1, 2, 3, 4)]
    shares = ", ".join(f"{100 * share:.0f}%" for share in flat)
    assert f"without BN, in the flat ends, layer by layer: {shares}." in said.inner_text()
    assert said.get_attribute("aria-live") == "polite"


def test_the_films_numbers_are_the_records(race, signal_records):
    recorded = records_of(signal_records)
    race.seek(24)
    stacks = ["without BN"] * 4 + ["with BN"] * 4
    rows = race.page.locator(".film .layer").all()
    assert [row.locator("h4").inner_text() for row in rows] == ["1", "2", "3", "4"] * 2
    for row, stack, number in zip(rows, stacks, [1, 2, 3, 4] * 2, strict=True):
        share = recorded["saturation", stack, f"layer {number}", 24][0]
        assert row.locator(".share b").inner_text() == f"{100 * share:.0f}%"
    names = race.page.locator(".curves .who").all_text_contents()
    for text, stack in zip(sorted(names), ("with BN", "without BN"), strict=True):
        assert float(text.removeprefix(stack)) == pytest.approx(recorded["training loss", stack, "", 24][0], rel=0.06)


def test_a_tooltip_has_the_numbers_of_the_bar_under_the_mouse(race, signal_records):
    recorded = records_of(signal_records)
    race.seek(24)
    for number, stack in ((3, "without BN"), (7, "with BN")):
        panel = race.page.locator(".film .layer svg").nth(number)
        panel.scroll_into_view_if_needed()
        box = panel.bounding_box()
        race.page.mouse.move(box["x"] + (22.5 / 40) * box["width"], box["y"] + 30)  # the bar from 0.6 to 0.9
        first, *lines = race.page.locator(".tip span").all_inner_texts()
        assert first == "0.6 to 0.9"
        stages = ["layer 4"] if stack == "without BN" else ["layer 4 before BN", "layer 4 normalised", "layer 4"]
        for line, layer in zip(lines, stages, strict=False):
            counts = recorded["histogram", stack, layer, 24]
            assert f"{counts[22]:.0f} of 2048" in line
            mean, variance = (recorded[name, stack, layer, 24][0] for name in ("mean", "variance"))
            assert f"mean {written(mean)}, variance {written(variance)}" in line
        if stack == "with BN":
            _, low, high = recorded["gamma", stack, "layer 4 normalised", 24]
            assert lines[-1].startswith(f"γ {written(low)} to {written(high)}, β ")
    race.page.mouse.move(5, 5)
    assert not race.page.locator(".tip").is_visible()


def test_the_bars_are_the_recorded_counts(race, signal_records):
    """A bar is as high as its count, beside the highest: read back from what is drawn."""
    race.seek(12)
    path = race.bars()[3]  # layer 4 without BN
    record = next(
        m
        for m in signal_records.measurements
        if m.quantity == "histogram"
        and (m.setting["stack"], m.setting["layer"], m.setting["step"]) == ("without BN", "layer 4", 12)
    )
    counts = list(record.samples)
    counts[0] += record.setting["under"]
    counts[-1] += record.setting["over"]
    tops = [float(y) for y in re.findall(r"V([\d.]+)H", path)]
    assert tops == pytest.approx([72 - 68 * count / max(counts) for count in counts if count], abs=0.06)


# ---- chapters, the address, one screen


@pytest.fixture(scope="module")
def film(browser, pages):
    visit = Visit(browser, pages["film"])
    visit.page.set_viewport_size({"width": 1280, "height": 720})
    yield visit
    assert visit.complaints == []
    visit.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_film_is_one_screen_of_a_laptop(browser, pages, scheme):
    visit = Visit(browser, pages["film"], color_scheme=scheme)
    visit.page.set_viewport_size({"width": 1280, "height": 720})
    visit.page.wait_for_timeout(100)
    parts = ["h1", ".film h2", ".chapters", ".caption", ".network", ".layer", "svg.curves", ".controls", ".link"]
    for part in parts:
        for each in visit.page.locator(part).all():
            box = each.bounding_box()
            assert 0 <= box["y"] < box["y"] + box["height"] <= 720, part
            assert 0 <= box["x"] < box["x"] + box["width"] <= 1280, part
    rows = [each.bounding_box() for each in visit.page.locator(".layer").all()]
    assert max(row["height"] for row in rows) <= 90
    assert [row["y"] for row in rows[:4]] == [row["y"] for row in rows[4:]]  # both networks side by side
    for frame in range(0, 61, 6):  # with every caption
        visit.seek(frame)
        assert visit.page.evaluate("document.querySelector('.controls').getBoundingClientRect().bottom") <= 720
        inside = visit.page.locator(".controls .link").bounding_box()
        card = visit.page.locator(".film").bounding_box()
        assert inside["x"] + inside["width"] <= card["x"] + card["width"] + 1
    visit.context.close()


def test_the_film_of_a_race_fits_a_screen_too(race):
    race.page.set_viewport_size({"width": 1280, "height": 720})
    assert race.page.locator(".film").bounding_box()["height"] <= 720
    race.page.set_viewport_size({"width": 1280, "height": 900})


def test_the_answer_of_a_race_is_one_screen_of_a_laptop(browser, tmp_path):
    visit = Visit(browser, write_page([Run("race", to_records(whole(), threads=1))], tmp_path / "page.html"))
    visit.page.set_viewport_size({"width": 1280, "height": 720})
    answer = visit.page.locator(".card").first
    assert "Why residual networks" in answer.inner_text()
    assert "Where it buys little" in answer.inner_text()
    box = answer.bounding_box()
    assert box["height"] > 300
    assert box["y"] + box["height"] <= 720
    visit.context.close()


def test_it_opens_paused_where_the_networks_differ_most_and_plays_from_the_start(browser, pages, signal_records):
    recorded = records_of(signal_records)

    def difference(step):
        plain, ours = (
            sum(recorded["saturation", stack, f"layer {n}", step][0] for n in (1, 2, 3, 4))
            for stack in ("without BN", "with BN")
        )
        return abs(plain - ours)

    visit = Visit(browser, pages["film"])
    assert difference(visit.step) == pytest.approx(max(map(difference, range(61))), abs=1e-3)
    assert visit.page.get_by_role("button", name="Pause").count() == 0
    assert "#" not in visit.page.url  # no navigation
    visit.page.locator(".speed select").select_option("0.25")
    visit.page.get_by_role("button", name=re.compile("Play|Replay")).click()
    visit.until("document.querySelector('.film').dataset.step < 10")
    visit.context.close()


def test_a_chapter_is_a_button_and_its_caption_the_record(film, signal_records):
    data = film_data(signal_records)
    assert [each["name"] for each in data["chapters"]] == [
        "drift", "saturate", "snap to 0 and 1", "γ and β", "what it buys",
    ]  # fmt: skip
    buttons = film.page.locator(".chapters button")
    assert buttons.all_inner_texts() == [f"{n} {each['name']}" for n, each in enumerate(data["chapters"], start=1)]
    for number, each in enumerate(data["chapters"]):
        if number % 2:
            film.page.keyboard.press(str(number + 1))
        else:
            buttons.nth(number).click()
        assert film.step == data["steps"][each["frame"]]
        assert film.page.locator(".caption").inner_text() == data["captions"][each["frame"]]
        current = film.page.locator(".chapters [aria-current]").all_inner_texts()
        assert current == [f"{number + 1} {each['name']}"]
    solid = "getComputedStyle(document.querySelectorAll('.network')[1].querySelector('.given')).fillOpacity"
    buttons.nth(2).click()
    film.until(f"{solid} < 0.2")  # chapter 3 brings the normalized values forward
    buttons.nth(3).click()
    film.until(f"{solid} > 0.7")


def test_the_address_has_the_step(browser, pages):
    visit = Visit(browser, pages["film"], hash="#step=36")
    assert visit.step == 36
    visit.page.keyboard.press("ArrowRight")
    visit.until("location.hash === '#step=37'")
    visit.page.locator(".chapters button").nth(1).click()
    visit.until(f"location.hash === '#step={visit.step}'")
    visit.page.evaluate("location.hash = 'step=7'")
    visit.until("document.querySelector('.film').dataset.step === '7'")
    for nonsense in ("step=x", "step=", "figure-1"):
        visit.page.evaluate(f"location.hash = '{nonsense}'")
        visit.page.wait_for_timeout(50)
        assert visit.step == 7
    visit.page.evaluate("location.hash = 'step=999'")
    visit.until("document.querySelector('.film').dataset.step === '60'")
    visit.page.get_by_role("button", name="link").click()
    assert visit.page.url.endswith("#step=60")
    assert visit.complaints == []
    visit.context.close()


def test_an_address_with_a_step_shows_the_film_wherever_it_is_on_the_page(browser, pages):
    for name in ("race", "film"):
        visit = Visit(browser, pages[name], hash="#step=20")
        assert visit.step == 20
        box = visit.page.locator(".film").bounding_box()
        assert 0 <= box["y"] < box["y"] + box["height"] <= 900, name
        visit.context.close()


def test_two_films_on_a_page_do_not_share_keys_or_address(browser, tmp_path, signal_records):
    page = write_page([Run(name, signal_records) for name in ("one", "two")], tmp_path / "two.html")
    visit = Visit(browser, page, hash="#step2=11")
    first, second = visit.page.locator(".film").all()
    steps = [each.get_attribute("data-step") for each in (first, second)]
    assert steps[1] == "11"
    assert steps[0] != "11"
    second.scroll_into_view_if_needed()
    visit.page.evaluate("document.querySelectorAll('.film')[1].scrollIntoView()")
    visit.page.keyboard.press("ArrowRight")
    visit.until("location.hash === '#step2=12'")
    first.locator(".chapters button").first.click()
    visit.until("location.hash.startsWith('#step=')")
    assert second.get_attribute("data-step") == "12"
    assert visit.complaints == []
    visit.context.close()


def test_reduced_motion_shows_few_frames(browser, pages):
    visit = Visit(browser, pages["film"], reduced_motion="reduce")
    visit.page.evaluate(
        "window.seen = new Set(); new MutationObserver(() => seen.add(document.querySelector('.film').dataset.step))"
        ".observe(document.querySelector('.film'), { attributes: true, attributeFilter: ['data-step'] })"
    )
    visit.page.locator(".speed select").select_option("4")
    visit.page.locator(".play").click()
    visit.until("document.querySelector('.film').dataset.step === '60'")
    # 18 seconds at four times the speed, 8 pictures a second at most
    assert 3 < visit.page.evaluate("seen.size") <= 40
    assert visit.page.evaluate("getComputedStyle(document.querySelector('.bars')).transitionDuration") == "0s"
    visit.context.close()


def test_a_film_prints_as_it_stands(film):
    film.seek(20)
    film.page.emulate_media(media="print")
    assert film.page.locator(".caption").is_visible()
    assert film.page.locator(".layer .bars").first.is_visible()
    assert not film.page.locator(".controls").is_visible()
    film.page.emulate_media(media="screen")


def test_names_are_shown_and_not_obeyed(browser, pages):
    visit = Visit(browser, pages["hostile"])
    assert visit.complaints == []
    assert visit.dialogs == []
    assert visit.page.locator("h4").all_text_contents() == [HOSTILE, IMAGE, BOLD]
    assert visit.page.locator(".film h3").all_text_contents() == [IMAGE]
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
    film = visit.page.locator(".film")
    tops = [each.bounding_box()["y"] for each in film.locator(".layer").all()]
    assert tops == sorted(set(tops))  # one column, in the same order
    order = [film.locator(part).first.bounding_box()["y"] for part in (".chapters", ".caption", ".layer", ".losses")]
    assert order == sorted(order)
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
