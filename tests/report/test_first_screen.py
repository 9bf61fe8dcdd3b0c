"""Every page answers on its first screen: a sentence and the top of its picture, at three sizes, in light and dark."""

import pytest
import torch
from test_access import CONTRASTS, LARGE, READABLE
from torch import nn
from visiting import Visit

import batchnorm as bn
from batchnorm.lab.depth.records import to_records as depth_records
from batchnorm.lab.judge.records import to_records as claim_records
from batchnorm.report.load import Run
from batchnorm.report.page import write_page
from lab.claims.made_states import states
from lab.depth_examples import whole

SIZES = {"phone": (390, 844), "laptop": (1280, 720), "desktop": (1920, 1080)}
NAMES = ("race", "depth", "film", "claims", "check", "bench", "probe", "probes")
PICTURES = ".lengths, .panel, .plotly-figure, .layer, .entry, section.table table"

# Where the first sentence ends, where the first picture begins, and what stands beyond the right edge.
SCREEN = """(pictures) => {
    const shown = (each) => each.checkVisibility() && each.getBoundingClientRect().height > 1;
    const first = (selector) => [...document.querySelectorAll(selector)].find(shown).getBoundingClientRect();
    const inside = (each) => !each.closest('.scroll, details:not([open]), svg');
    const beyond = [...document.querySelectorAll('body *')].filter((each) => shown(each) && inside(each)
        && each.getBoundingClientRect().right > innerWidth + 1);
    return {
        sentence: first('main h2:not(.unseen), main .lead, main .tally').bottom,
        picture: first(pictures).top,
        wide: document.documentElement.scrollWidth - innerWidth,
        beyond: beyond.map((each) => each.tagName + '.' + each.className),
    };
}"""


@pytest.fixture(scope="module")
def first_pages(tmp_path_factory, pages, findings, bench_records):
    folder = tmp_path_factory.mktemp("first")
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    probe = [
        Run(f"{seed}", bn.probe.shift(model, x + seed, lambda m, x: m(x).square().mean(), lr=0.1).records(seed=seed))
        for seed in (0, 1)
    ]
    (folder / "findings.json").write_text(findings.to_json())
    from batchnorm.report.load import load

    runs = {
        "depth": [Run("race", depth_records(whole(), threads=1))],
        "claims": [Run("claims", claim_records(states()))],
        "check": load([folder / "findings.json"]),
        "bench": [Run("bench", bench_records)],
        "probe": probe[:1],
        "probes": probe,
    }
    return {**pages, **{name: write_page(each, folder / f"{name}.html") for name, each in runs.items()}}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_sentence_and_picture_are_on_the_first_screen(browser, first_pages, name, size):
    width, height = SIZES[size]
    visit = Visit(browser, first_pages[name])
    visit.page.set_viewport_size({"width": width, "height": height})
    visit.page.wait_for_timeout(100)
    found = visit.page.evaluate(SCREEN, PICTURES)
    assert found["sentence"] < height / 2
    assert found["picture"] < 0.75 * height
    assert found["wide"] <= 0
    assert found["beyond"] == []
    assert visit.complaints == []
    visit.context.close()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_scrolls_sideways_on_a_phone(browser, first_pages, name):
    """Tables that are open or opened, too."""
    visit = Visit(browser, first_pages[name])
    visit.page.set_viewport_size({"width": 390, "height": 844})
    visit.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    visit.page.wait_for_timeout(100)
    sideways = visit.page.locator("body *:visible").evaluate_all(
        """all => all.filter((each) => each.scrollWidth > each.clientWidth + 1
            && ['auto', 'scroll'].includes(getComputedStyle(each).overflowX))
            .map((each) => each.ariaLabel || each.className)"""
    )
    assert sideways == []
    visit.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["depth", "check", "bench", "probes"])
def test_every_text_of_every_page_stands_out(browser, first_pages, name, scheme):
    visit = Visit(browser, first_pages[name], color_scheme=scheme)
    found = visit.page.evaluate(CONTRASTS)
    assert len(found) > 15
    assert [each for each in found if each["contrast"] < (LARGE if each["large"] else READABLE)] == []
    visit.context.close()


def test_links_are_at_the_side_of_a_long_page_and_behind_a_line_on_a_phone(browser, first_pages):
    visit = Visit(browser, first_pages["race"])
    links, main = visit.page.locator(".contents a"), visit.page.locator("main")
    assert links.count() > 3
    for width in (1280, 1920):
        visit.page.set_viewport_size({"width": width, "height": 720})
        boxes = [each.bounding_box() for each in links.all()]
        assert max(box["x"] + box["width"] for box in boxes) <= main.bounding_box()["x"]
        assert all(box["y"] + box["height"] <= 720 for box in boxes)
    visit.page.set_viewport_size({"width": 390, "height": 844})
    visit.until("!document.querySelector('.contents details').open")
    assert visit.page.locator(".contents").bounding_box()["height"] < 40
    visit.page.get_by_text("On this page").click()
    assert links.first.is_visible()
    visit.context.close()
