"""A report as tables: names as they are, whatever they look like."""

import io
from html.parser import HTMLParser

import pytest
from rich.console import Console

from batchnorm.errors import printable
from batchnorm.records import Certificate, Change, Report

NAMES = ["[red]", "[/bold]", "[link=x]y[/link]", ":smile:", "a&b", "<script>alert(1)</script>", 'q"q', "ünï.çödé"]
CERTIFICATES = (Certificate(1.5e-6, 3e-7, 1e-4, 3), Certificate(2e-6, 1e-8, 1e-4, 1, "gradients"))


def report_of(names):
    changes = [Change(name, f"what {name}", f"old {name}", f"new {name}") for name in names]
    return Report(tuple(changes), {f"left {name}": f"because {name}" for name in names}, *CERTIFICATES)


def printed(report, width=200, **options):
    """As ``rich.print`` does it: with markup, emoji and highlighting on."""
    console = Console(file=io.StringIO(), width=width, **options)
    console.print(report)
    return console.file.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_names_are_shown_as_they_are(name):
    text = printed(report_of([name]))
    lines = text.splitlines()
    assert lines[0].rstrip() == "1 module changed"
    assert lines[2].split("  ")[0] == name
    for words in (f"what {name}", f"old {name}", f"new {name}", f"left {name}", f"because {name}"):
        assert words in text
    assert "outputs differ by at most 1.5e-06 (3e-07 of the largest) on 3 inputs" in text
    assert "gradients differ by at most 2e-06" in text


class Cells(HTMLParser):
    def __init__(self):
        super().__init__()
        self.cells, self.tags, self.inside = [], set(), False

    def handle_starttag(self, tag, attributes):
        assert not attributes
        self.tags.add(tag)
        self.inside = tag in ("td", "p")
        if self.inside:
            self.cells.append("")

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.cells[-1] += data


def test_a_notebook_gets_every_name_escaped():
    parser = Cells()
    parser.feed(report_of(NAMES)._repr_html_())
    assert parser.tags == {"table", "caption", "thead", "tbody", "tr", "th", "td", "p"}
    cells = [cell.strip() for cell in parser.cells]
    for name in NAMES:
        for words in (name, f"what {name}", f"old {name}", f"new {name}", f"left {name}", f"because {name}"):
            assert words in cells
    assert any(cell.startswith("gradients differ") for cell in cells)


def test_no_code_reaches_the_terminal():
    text = printed(report_of(["\x1b[31mred\x07", "two\nlines"]), force_terminal=True, color_system=None)
    assert "\\x1b[31mred\\x07" in text
    assert "two\\nlines" in text
    assert printable("tab\tend") == "tab\\tend"


def test_a_name_is_said_once_and_the_model_has_one():
    report = Report((Change("", "a", 1, 2), Change("", "b", 1, 2), Change("x", "c", None, True)))
    lines = [line.split() for line in printed(report).splitlines()]
    assert lines == [
        ["2", "modules", "changed"],
        ["module", "what", "before", "after"],
        ["the", "model", "a", "1", "2"],
        ["b", "1", "2"],
        ["x", "c", "None", "True"],
    ]
    assert printed(Report()).strip() == "no module changed"
    assert Report()._repr_html_() == "<p>no module changed</p>"


def test_long_names_fold_and_lose_nothing():
    name = "block." * 30 + "bn"
    text = printed(Report((Change(name, "class", "A", "B"),)), width=60)
    assert name in "".join(line[:60].split("  ")[0].strip() for line in text.splitlines()[2:])


def test_str_is_as_it_was():
    assert str(report_of(["[red]"])).splitlines()[1] == "  [red]: what [red] old [red] -> new [red]"
