"""Accessibility of the page: names for a screen reader, text readable in both modes, tables that fit a phone."""

import pytest
from visiting import Visit

NAMED = ("button", "checkbox", "combobox", "heading", "image", "link", "radio", "region", "slider", "table", "figure")
READABLE = 4.5  # the contrast that WCAG asks of text (AA)
LARGE = 3.0  # and of large text

# Every visible text, with the contrast of its colour to the first solid background behind it.
CONTRASTS = """() => {
    const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = (part) => (part /= 255) <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    const brightness = ([red, green, blue]) => 0.2126 * light(red) + 0.7152 * light(green) + 0.0722 * light(blue);
    const behind = (element) => {
        for (let each = element; each; each = each.parentElement) {
            const colour = numbers(getComputedStyle(each).backgroundColor);
            if (colour.length === 3 || colour[3] === 1) return colour;
        }
        return [255, 255, 255];
    };
    document.querySelectorAll('details').forEach((each) => { each.open = true; });
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
        const drawnOnCell = element.closest('.sketch') && element.style.fill;  // black or white, by the cell's colour
        if (!text || element.closest('script, style, option') || drawnOnCell || !element.checkVisibility()) continue;
        const style = getComputedStyle(element), own = element.closest('svg') ? style.fill : style.color;
        const [low, high] = [brightness(numbers(own)), brightness(behind(element))].sort((a, b) => a - b);
        found.push({ text, contrast: (high + 0.05) / (low + 0.05), large: parseFloat(style.fontSize) >= 24 });
    }
    return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out(browser, pages, scheme):
    visit = Visit(browser, pages["race"], color_scheme=scheme)
    found = visit.page.evaluate(CONTRASTS)
    assert len(found) > 300
    assert [each for each in found if each["contrast"] < (LARGE if each["large"] else READABLE)] == []
    visit.context.close()


def reader_sees(visit):
    """The names of everything in the tree that a screen reader walks, by role."""
    nodes = visit.context.new_cdp_session(visit.page).send("Accessibility.getFullAXTree")["nodes"]
    roles = {}
    for node in nodes:
        if not node["ignored"]:
            roles.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", "").strip())
    return roles


@pytest.mark.parametrize("name", ["race", "hostile"])
def test_everything_one_can_reach_has_a_name(browser, pages, name):
    visit = Visit(browser, pages[name])
    roles = reader_sees(visit)
    assert {role: names for role, names in roles.items() if role in NAMED and "" in names} == {}
    assert {"button", "slider", "image", "region"} <= roles.keys()
    assert len(set(roles["region"])) == len(roles["region"])
    visit.context.close()


def test_a_step_is_said_once_it_is_reached_not_while_it_plays(browser, pages):
    visit = Visit(browser, pages["race"])
    live = visit.page.locator("[aria-live], [role=status], [role=alert], output")
    assert live.evaluate_all("all => all.map((each) => each.className)") == ["unseen said"]
    visit.context.close()


def test_without_scripts_there_are_the_tables_and_a_word_about_it(browser, pages):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(pages["race"].as_uri())
    assert page.locator("noscript p").bounding_box()["height"] > 0
    assert page.locator(".plotly-figure >> visible=true").count() == 0
    page.get_by_text("As numbers").first.click()
    assert page.get_by_role("table", name="Median validation accuracy", exact=True).is_visible()
    context.close()


def test_wide_tables_fit_a_phone(browser, pages):
    visit = Visit(browser, pages["race"])
    table = visit.page.locator("section.table > .scroll.stacked").first
    columns = table.locator("thead th").all_inner_texts()
    visit.page.set_viewport_size({"width": 390, "height": 844})
    assert table.evaluate("each => each.scrollWidth - each.clientWidth") <= 0
    cells = table.locator("tbody tr").first.locator("td")
    assert cells.evaluate_all("all => all.map((cell) => cell.dataset.column)") == columns[1:]
    assert "rowheader" in reader_sees(visit)  # blocks on the screen are still a table to a reader
    visit.context.close()
