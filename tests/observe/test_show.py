"""The terminal view against golden files; names as they are, in the terminal and in a notebook.

After a change that is meant: ``python tests/observe/test_show.py`` writes the golden files anew; look at what changed.
"""

import io
import math
from collections import OrderedDict
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from rich.console import Console

import batchnorm as bn
from batchnorm.observe.notebook import band, bars, html
from batchnorm.observe.show import histogram_cells, show, sparkline
from batchnorm.records import Measurement, RecordFile

GOLDEN = Path(__file__).parent / "golden"
HOSTILE = "<script>alert(1)</script>"


def one_stack(name, steps=5, layer="layer 1"):
    """Records as a watch makes them, of numbers that were thought up."""
    more = {"stack": name} if name else {}
    found = []
    for step in range(0, 50 * steps, 50):
        at = {"step": step, "layer": layer, **more, "at": "input", "kind": "sigmoid"}
        wide = 1 + step / 100
        counts = tuple(float(round(100 * math.exp(-((n - 19.5) ** 2) / (20 * wide)))) for n in range(40))
        edges = {"low": -6.0, "high": 6.0, "under": step // 50, "over": 0, "nonfinite": 0}
        found += [
            Measurement("histogram", {**at, **edges}, counts),
            Measurement("percentiles", at, (-wide, step / 1000, wide)),
            Measurement("variance", at, (wide**2,)),
            Measurement("saturation", at, (min(step / 400, 1.0),)),
            Measurement("gap", {**at, "layer": "bn"}, (0.1 * wide, 0.01)),
            Measurement("gamma", {**at, "layer": "bn"}, (1.0, 0.5, 1 + step / 100)),
            Measurement("weight norm", {"step": step, "layer": "fc", **more}, (3.0 + step,)),
            Measurement("gradient norm", {"step": step, "layer": "fc", **more}, (1 / (1 + step),)),
            Measurement("training loss", {"step": step, "layer": "", **more}, (2.3 / (1 + step / 50),)),
        ]
    return found


CASES = {
    "one": RecordFile("watch", {}, tuple(one_stack(""))),
    "two": RecordFile("watch", {}, (*one_stack("without BN"), *one_stack("with [red]BN", steps=1))),
    "long": RecordFile("watch", {}, tuple(one_stack("", steps=300))),
    "hostile": RecordFile("watch", {}, tuple(one_stack("[bold]", layer=HOSTILE + "\x1b[31m"))),
    "few": RecordFile("watch", {}, (Measurement("mean", {"step": 0, "layer": "a"}, (math.nan,)),)),
    "none": RecordFile("watch", {}, ()),
}


def shown(records, width=120):
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False, emoji=False)
    show(records, console)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_the_terminal_view(name):
    assert shown(CASES[name]) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_records_may_come_in_any_order():
    records = tuple(sorted(one_stack(""), key=lambda m: -m.setting["step"]))
    assert shown(RecordFile("watch", {}, records)) == shown(CASES["one"])


def test_show_prints(capsys):
    with bn.watch(torch.nn.Linear(2, 1)) as seen:
        seen.log("training loss", 0.5)
        seen.show()
    assert "training loss   0.5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([3.0], "▁"),
        ([1, 2, 3, 4, 5, 6, 7, 8], "▁▂▃▄▅▆▇█"),
        ([math.nan, 0, math.inf, 1, -math.inf], " ▁ █ "),
        ([math.nan], " "),
        ([-1e300, 1e300], "▁█"),
    ],
)
def test_sparklines(values, line):
    assert sparkline(values) == line


def test_long_series_are_averaged_and_keep_their_ends():
    line = sparkline([0.0] * 100 + [1.0] * 100, width=10)
    assert line == "▁▁▁▁▁█████"


def test_an_empty_histogram():
    record = Measurement("histogram", {"low": 0.0, "high": 1.0, "under": 3, "over": 0}, (0.0, 0.0))
    assert histogram_cells(record) == ("▕  ▏", "100.0%")
    assert "<svg" in bars(record)


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.open = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("br",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.mark.parametrize("name", CASES)
def test_the_notebook_view_is_well_formed_and_shows_names_as_text(name):
    page = Page(html(CASES[name]))
    assert page.open == []
    tags = {tag for tag, _ in page.tags}
    tables = {"table", "caption", "thead", "tbody", "tr", "th", "td", "br", "p"}
    assert tags <= tables | {"svg", "g", "rect", "line", "path", "circle"}
    numbers = [v for tag, own in page.tags if tag in ("rect", "line", "circle", "path") for v in own.values()]
    assert not any("nan" in value or "inf" in value for value in numbers)
    if name == "hostile":
        assert HOSTILE + "\x1b[31m" in page.words
        assert "[bold]: signals, steps 0 to 200" in page.words
    assert all(own["role"] == "img" and own["aria-label"] for tag, own in page.tags if tag == "svg")


def test_the_drawings_show_the_numbers():
    page = Page(html(CASES["one"]))
    drawn = [own for tag, own in page.tags if tag == "rect"]
    counts = [c for c in one_stack("")[-9].samples if c]
    assert len(drawn) == len(counts)
    tall = [float(own["height"]) for own in drawn]
    assert tall == pytest.approx([36 * c / max(counts) for c in counts], abs=0.06)
    assert "-6 to 6, 4 outside" in " ".join(page.words)
    labels = [own["aria-label"] for tag, own in page.tags if tag == "svg"]
    assert "training loss, now 0.46" in labels
    assert "15th, 50th, 85th percentile, now -3, 0.2, 3" in labels


def test_the_notebook_view_has_weights_in_the_order_of_the_model_and_draws_what_was_chosen():
    layers = {"in": torch.nn.Linear(2, 3), "norm": torch.nn.BatchNorm1d(3), "out": torch.nn.Linear(3, 1)}
    model = torch.nn.Sequential(OrderedDict(layers))
    with bn.watch(model) as seen:
        model(torch.randn(4, 2)).sum().backward()
        seen.step()
    page = Page(seen._repr_html_())
    names = [word for word in page.words if word.removesuffix(" (output)") in layers or word.endswith("step 0")]
    assert names == ["signals, step 0", "norm", "norm (output)", "out", "weights, step 0", "in", "norm", "out"]
    with bn.watch(model, quantities="mean") as seen:
        model(torch.randn(4, 2)).sum().backward()
        seen.step()
    labels = [own["aria-label"] for tag, own in Page(seen._repr_html_()).tags if tag == "svg"]
    assert [label.split(",")[0] for label in labels] == ["mean"] * 3


def test_a_long_run_is_drawn_with_as_many_points_as_can_be_seen():
    assert len(html(CASES["long"])) < 60_000
    drawn = band(one_stack("", steps=300)[1::9])
    assert drawn.count(" L") < 1000


def test_a_watch_draws_itself():
    with bn.watch(torch.nn.Linear(2, 1)) as seen:
        assert seen._repr_html_() == "<p>nothing has been recorded yet</p>"
        seen.log("training loss", 1.0)
        assert "training loss" in seen._repr_html_()


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, records in CASES.items():
        (GOLDEN / f"{name}.txt").write_text(shown(records), encoding="utf-8")
