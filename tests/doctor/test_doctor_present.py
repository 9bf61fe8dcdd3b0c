"""Findings in a notebook and on a rich console."""

import io
from html.parser import HTMLParser

import pytest
import torch
from doctor_findings import NASTY, finding, nasty, several
from rich.console import Console

import batchnorm as bn
from batchnorm.doctor.findings import Findings
from batchnorm.doctor.present import shorten
from batchnorm.errors import printable


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.cells, self.text, self.open = [], [], "", []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if "td" in self.open:
            self.cells[-1] += data


def read(findings):
    reader = Reader()
    reader.feed(findings._repr_html_())
    reader.close()
    assert not reader.open
    return reader


def test_html_has_a_row_for_every_finding_and_a_summary():
    reader = read(several())
    assert reader.tags.count("tr") == 5
    assert reader.cells[:5] == ["error", "BN301 validation-in-train-mode", "the model", "step 7: it moved",
                                "call model.eval()"]  # fmt: skip
    assert "1 error, 2 warnings, 1 advice" in reader.text
    assert "needs batches of data (data=): BN999, BN998" in reader.text


def test_html_of_nothing():
    reader = read(Findings([]))
    assert "table" not in reader.tags
    assert reader.text == "nothing found"


@pytest.mark.parametrize("kind", NASTY)
def test_html_shows_names_as_they_are(kind):
    reader = read(nasty(kind))
    assert set(reader.tags) <= {"div", "table", "thead", "tbody", "tr", "th", "td", "code", "span", "b"}
    assert reader.cells[2] == shorten(printable(NASTY[kind]))
    assert len(nasty(kind)._repr_html_()) < 15_000


def drawn(value, **options):
    stream = io.StringIO()
    Console(file=stream, width=400, **options).print(value)
    return stream.getvalue()


@pytest.mark.parametrize("kind", NASTY)
def test_rich_shows_names_as_they_are(kind):
    assert shorten(printable(NASTY[kind])) in drawn(nasty(kind))


def test_rich_says_how_to_see_the_rest():
    findings = Findings([finding(f"conv{n}") for n in range(20)])
    assert "and 12 more (print() shows them)" in drawn(findings)


def test_what_was_looked_at_is_said():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2))
    assert "in a model with 2 batch normalisation layers" in drawn(bn.check(model, select=["BN101"]))
    assert "in a model with no batch normalisation layers" in drawn(bn.check(torch.nn.ReLU(), select=["BN101"]))
    checkpoint = bn.check(model[:1].state_dict(), select=["BN101"])
    assert "in a checkpoint with 1 batch normalisation layer" in drawn(checkpoint)
    assert "in a checkpoint with 1 batch normalisation layer" in read(checkpoint).text


def test_shorten():
    assert shorten("a" * 160) == "a" * 160
    assert len(shorten("a" * 161)) == 160
    assert shorten("begin" + "x" * 500 + "end").startswith("begin")
    assert shorten("begin" + "x" * 500 + "end").endswith("end")
    assert len(shorten("abcdefgh", 6)) == 6
