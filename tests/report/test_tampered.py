"""Records of the lab with values that were never written: a page of the right kinds, or one sentence."""

import itertools
import json

import pytest

from batchnorm.commands import app
from batchnorm.lab.runs.compare import COMMAND
from batchnorm.records import Measurement, RecordFile
from batchnorm.report.load import Run
from batchnorm.report.page import write_page
from batchnorm.report.panels import write_picture
from batchnorm.report.sections import Line, Panel, Panels
from batchnorm.terminal import ended

NASTY = "\x1b[31mred\x9b\u202edetrevni\u2066"


def compared(name="rate 0.1"):
    runs = [{"key": "0f", "name": "x", "called": name, "options": {"rate": 0.1}}]
    loss = Measurement("loss", {"run": name, "steps": [10, 20]}, (0.5, 0.25))
    summary = {"options": {"rate": [0.1]}, "results": {"accuracy": [0.5]}, "sentence": "It learns."}
    return RecordFile(COMMAND, {"runs": runs}, (loss,), summary, machine={})


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("measurements", 0, "setting", "steps", 1), NASTY),
        (("measurements", 0, "setting", "steps"), [{}, []]),
        (("measurements", 0, "setting", "run"), 1e308),
        (("measurements", 0, "setting", "run"), ["a"]),
        (("summary", "sentence"), 3),
        (("summary", "options"), {"rate": 3}),
        (("configuration", "runs", 0, "key"), {"a": 1}),
    ],
)
def test_a_section_with_fields_of_another_kind_is_refused(capsys, tmp_path, where, value):
    fields = json.loads(compared().to_json())
    inner = fields
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    (tmp_path / "odd.json").write_text(json.dumps(fields))
    page = tmp_path / "odd.html"
    code = ended(lambda: app(["report", str(tmp_path / "odd.json"), "--out", str(page)], standalone_mode=False))
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert "these records of 'lab compare' cannot be drawn" in line
    assert not page.exists()


def test_a_page_and_a_picture_hold_no_character_that_is_not_seen(tmp_path):
    page = write_page([Run(NASTY, compared(NASTY))], tmp_path / "page.html").read_text(encoding="utf-8")
    line = Line(NASTY, (1, 2), (0.5, 0.25), "blue")
    panels = Panels(NASTY, NASTY, (Panel(NASTY, (line,), "step"),))
    picture = write_picture(panels, tmp_path / "picture.svg").read_text(encoding="utf-8")
    for text in (page, picture):
        assert not set(text) & set(NASTY.replace("detrevni", "").replace("[31mred", ""))
        assert r"\x1b[31mred\x9b\u202edetrevni\u2066" in text


def test_values_that_are_of_the_right_kind_are_drawn(tmp_path):
    for samples in itertools.product([None, 1e308, -1e308, 0, 1e17, 10**18], repeat=2):
        fields = json.loads(compared().to_json())
        fields["measurements"][0]["samples"] = list(samples)
        records = RecordFile.from_json(json.dumps(fields))
        assert write_page([Run("x", records)], tmp_path / "page.html").exists()
