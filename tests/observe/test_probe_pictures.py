"""Results of probes: a picture and numbers on a terminal, in a notebook and on a page, whatever layers are called."""

import base64
import re
import sys
import types
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.observe.probes.result import ProbeResult, aligned
from batchnorm.records import read
from batchnorm.report.figures import figures_of
from batchnorm.report.load import load
from batchnorm.report.page import page
from batchnorm.report.sections import Panels, Table

HOSTILE = "<img src=x onerror=alert(1)>"


def network(normed=True):
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module(HOSTILE, nn.Linear(4, 8))
    if normed:
        model.add_module("</script>", nn.BatchNorm1d(8))
    model.add_module("act", nn.ReLU())
    model.add_module("out", nn.Linear(8, 3))
    return model


def squared(model, x):
    return model(x).square().mean()


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
PROBES = {
    "boundary": lambda model: bn.probe.boundary(model, [X], batch_sizes=(2, 4), draws=5),
    "interaction": lambda model: bn.probe.interaction(model, X),
    "invariance": lambda model: bn.probe.invariance(model, X, layer=HOSTILE),
    "landscape": lambda model: bn.probe.landscape(model, X, squared, lr=0.1),
    "margin": lambda model: bn.probe.margin(model.eval(), X, steps=5),
    "shift": lambda model: bn.probe.shift(model, X, squared, lr=0.1),
}


def test_every_probe_is_tried():
    assert sorted(PROBES) == sorted(bn.probe.__all__)


@pytest.fixture(params=sorted(PROBES))
def found(request):
    return PROBES[request.param](network())


@pytest.fixture
def opened(monkeypatch):
    """The addresses that were given to a browser."""
    addresses = []
    monkeypatch.setattr("webbrowser.open", addresses.append)
    return addresses


def test_a_result_is_text_of_three_digits(found):
    assert isinstance(found, ProbeResult)
    title, *rows = str(found).splitlines()
    assert title in repr(found)
    assert len(rows) >= 2  # columns, and at least one row
    numbers = re.findall(r"\d+\.\d+", str(found))
    assert numbers
    assert [each for each in numbers if len(each.replace(".", "").lstrip("0")) > 3] == []


def test_a_notebook_draws_it_and_obeys_no_name(found):
    html = found._repr_html_()
    assert "onerror=alert" not in html.replace("&lt;img src=x onerror=alert(1)&gt;", "")
    assert "</script>" not in html
    (image,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    drawing = ElementTree.fromstring(base64.b64decode(image))
    kinds = {element.tag.rpartition("}")[2] for element in drawing.iter()}
    assert kinds <= {"svg", "title", "desc", "style", "rect", "g", "text", "path"}
    assert {"path", "rect"} & kinds


def test_show_prints_the_numbers_and_opens_the_page(found, opened, capsys, tmp_path):
    target = tmp_path / "page.html"
    found.show(target)
    printed = capsys.readouterr().out
    assert printed.startswith(str(found).splitlines()[0])
    assert printed.endswith(f"The picture is {target}\n")
    assert opened == [target.as_uri()]
    text = target.read_text(encoding="utf-8")
    assert '<svg class="panel"' in text
    assert HOSTILE not in text


def test_show_writes_a_picture_for_a_document(opened, tmp_path):
    PROBES["shift"](network()).show(tmp_path / "shift.svg")
    assert ElementTree.parse(tmp_path / "shift.svg").getroot().tag.endswith("svg")


def test_show_in_a_notebook_writes_nothing(found, opened, capsys, monkeypatch):
    displayed = []
    monkeypatch.setitem(
        sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=object()))
    )
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=displayed.append))
    found.show()
    assert displayed == [found]
    assert opened == []
    assert capsys.readouterr().out == ""


def test_show_without_a_path_opens_a_temporary_file(opened, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    PROBES["margin"](network()).show()
    (written,) = tmp_path.iterdir()
    assert opened == [written.as_uri()]


def test_the_records_are_drawn_by_the_command(found, tmp_path):
    path = found.records(norm="batch").write(tmp_path / "probe.json")
    (section,) = figures_of(read(path))
    assert isinstance(section, Panels)
    assert section.title == found.picture().title
    assert page(load([path])).count("<svg class=") == len(section.panels)


def test_the_records_keep_every_figure(found):
    records = found.records(norm="batch")
    assert records.measurements == found.measurements(norm="batch")
    assert records.configuration == {"norm": "batch"}


def test_margins_that_were_not_found_are_counted_not_drawn():
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    found = bn.probe.margin(model, torch.ones(3, 2), torch.zeros(3, dtype=torch.long), steps=1)
    assert "For 3 of 3 none was found" in str(found)
    assert "∞" in str(found)
    assert "data:image" in found._repr_html_()


def test_examples_that_do_not_interact_have_blank_cells():
    (panel,) = bn.probe.interaction(network().eval(), X).picture().panels
    assert [value > 0 for row in panel.cells for value in row] == [at % 7 == 0 for at in range(36)]


def test_two_results_share_their_axes(tmp_path):
    """The layers of one network are some of those of the other: each stays at its place."""
    paths = [
        PROBES["shift"](network(normed)).records(norm=name, lr=0.1).write(tmp_path / f"{name}.json")
        for name, normed in (("none", False), ("batch", True))
    ]
    text = page(load(paths))
    assert text.count('<svg class="panel"') == 2
    assert [text.count(f">norm {name}</text>") for name in ("none", "batch")] == [2, 2]


def test_aligned_tables_keep_columns():
    lines = aligned(Table("", "", ("a", "longer"), (("long cell", "1"),), numbers=(1,)))
    assert len({len(line) for line in lines}) == 1
