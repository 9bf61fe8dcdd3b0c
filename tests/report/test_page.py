"""The page without a browser: what is on it is what was recorded, and nothing recorded can change the page itself."""

import dataclasses
import json
import math
import re

import pytest
from hostile_names import BOLD, HOSTILE, IMAGE
from typer.testing import CliRunner

from batchnorm.commands import app
from batchnorm.errors import BatchNormError
from batchnorm.lab import signal
from batchnorm.lab.present import accuracy_cell, ratio_cell, steps_cell
from batchnorm.lab.records import to_records
from batchnorm.lab.summary import summarise
from batchnorm.observe.figures import film
from batchnorm.records import Measurement, RecordFile
from batchnorm.report.figures import figures_of
from batchnorm.report.fit import fitting
from batchnorm.report.load import Run, load
from batchnorm.report.page import page
from batchnorm.report.sections import Headline, Player, Plot, thinned
from lab.race_examples import whole_race

LARGEST = 6_000_000
STEPS = [4, 8, 12, 16, 20, 24]


def sections_of(records):
    return {section.title: section for section in figures_of(records)}


# ---- what the figures hold


def test_figure_2_has_the_median_of_every_variant(race_result, race_records):
    plot = sections_of(race_records)["Accuracy over the steps"]
    rows = summarise(race_result).rows
    lines = [trace for trace in plot.figure["data"] if trace["meta"]["part"] == "line"]
    assert [line["name"] for line in lines] == [row.variant for row in rows]
    assert [line["y"] for line in lines] == [list(row.median_accuracy) for row in rows]
    assert all(line["x"] == STEPS for line in lines)
    assert plot.figure["layout"]["xaxis"]["type"] == "log"
    bands = [trace for trace in plot.figure["data"] if trace["meta"]["part"] == "band"]
    for band, lane in zip(bands, race_result.lanes, strict=True):
        seeds = list(zip(*(curve.accuracy for curve in lane.chosen), strict=True))
        assert band["y"] == [max(s) for s in seeds] + [min(s) for s in seeds][::-1]
        assert band["x"] == STEPS + STEPS[::-1]
    # The band of a line stands before it. A variant has a dash as well as a colour.
    parts = [(trace["meta"]["part"], trace["meta"]["colour"]) for trace in plot.figure["data"]]
    for line in lines:
        at = plot.figure["data"].index(line)
        assert parts[at - 1] == ("band", line["meta"]["colour"])
    assert len({(line["meta"]["colour"], line["line"]["dash"]) for line in lines}) == 6


def test_figure_3_has_our_row_and_the_papers_below_it(race_result, race_records):
    table = sections_of(race_records)["Steps to the same accuracy"]
    rows = summarise(race_result).rows
    assert [row[0] for row in table.rows[::2]] == [row.variant for row in rows]
    assert [row[2] for row in table.rows[::2]] == [steps_cell(row.to_best) for row in rows]
    assert [row[6] for row in table.rows[::2]] == [accuracy_cell(row.accuracies) for row in rows]
    assert {row[0] for row in table.rows[1::2]} == {"the paper, ImageNet"}
    assert table.rows[5][2:4] == ("2.1M", "14.8x")
    assert table.muted == (1, 3, 5, 7, 9, 11)


def test_a_race_that_reached_its_target_says_how_soon():
    """A handmade race: of the variants with BN, BN-x5 met the baseline's best first."""
    race = whole_race()
    summary, sections = summarise(race), sections_of(to_records(race, threads=1))
    rows = sections["Steps to the same accuracy"].rows[::2]
    for cells, row in zip(rows, summary.rows, strict=True):
        assert cells[2:6] == (
            steps_cell(row.to_best), ratio_cell(row.to_best), steps_cell(row.to_share), ratio_cell(row.to_share)
        )  # fmt: skip
    assert any(row[2] != row[4] for row in rows)
    data = sections["Accuracy over the steps"].figure["data"]
    diamonds = {trace["name"]: (trace["x"], trace["y"]) for trace in data if trace["meta"]["part"] == "diamond"}
    assert diamonds == {
        row.variant: ([row.to_best.median], [summary.target])
        for row in summary.rows
        if row.to_best.median != float("inf")
    }
    assert "Sigmoid" not in diamonds
    drawn = next(section for section in sections.values() if isinstance(section, Headline))
    steps = {row.variant: row.to_best.median for row in summary.rows}
    assert drawn.title.startswith(
        f"At the same rate, with Batch Normalization: {steps['BN-Baseline']:g} steps. Without: {steps['Inception']:g}. "
    )
    known = {name: median for name, median in steps.items() if median != float("inf")}
    assert {bar.name: bar.length for bar in drawn.bars if bar.length} == known
    (sigmoid,) = [bar for bar in drawn.bars if bar.name == "Sigmoid"]
    assert (sigmoid.length, sigmoid.text) == (0, "never: best 10.0%")


def test_the_rate_map_has_every_rate_that_was_tried(race_result, race_records):
    plot = sections_of(race_records)["Which learning rates work"]
    lines = plot.figure["data"]
    assert [line["name"] for line in lines] == [
        "ReLU, without BN", "ReLU, with BN", "Sigmoid, without BN", "Sigmoid, with BN",
    ]  # fmt: skip
    assert plot.figure["layout"]["xaxis"]["type"] == "log"  # one axis of rates for all of them
    tried = {lane.variant: {c.member.learning_rate for c in lane.curves} for lane in race_result.lanes}
    cells = {(line["name"], rate) for line in lines for rate in line["x"]}
    assert {rate for network, rate in cells if network == "ReLU, without BN"} == tried["Inception"] == {0.1, 0.2}
    assert {rate for network, rate in cells if network == "Sigmoid, without BN"} == tried["Sigmoid"]
    with_bn = {rate for network, rate in cells if network == "ReLU, with BN"}
    assert with_bn == tried["BN-Baseline"] | tried["BN-x5"] | tried["BN-x30"]


def test_the_player_holds_every_recorded_bar(signal_records):
    section = next(s for s in figures_of(signal_records) if isinstance(s, Player))
    data = section.data
    steps = list(range(61))
    assert data["steps"] == steps
    assert [(network["name"], network["stages"]) for network in data["networks"]] == [
        ("without BN", [""]),
        ("with BN", ["before BN", "normalised", ""]),
    ]
    assert [layer["label"] for layer in data["layers"]] == ["1", "2", "3", "4"]
    names = {"": "", "before BN": " before BN", "normalised": " normalised"}
    recorded = {
        (m.quantity, m.setting["stack"], m.setting["layer"], m.setting["step"]): m for m in signal_records.measurements
    }
    for network, stages in zip(data["networks"], data["cells"], strict=True):
        for stage, cells in zip(network["stages"], stages, strict=True):
            for layer, cell in zip(data["layers"], cells, strict=True):
                for frame, step in enumerate(steps):
                    of = network["name"], layer["name"] + names[stage], step
                    low, high, under, over, counts = cell["bins"][frame]
                    record = recorded[("histogram", *of)]
                    assert counts == list(record.samples)
                    assert (low, high) == (record.setting["low"], record.setting["high"])
                    assert (under, over) == (record.setting["under"], record.setting["over"])
                    assert cell["mean"][frame] == pytest.approx(recorded[("mean", *of)].samples[0], rel=1e-4)
                    assert cell["variance"][frame] == pytest.approx(recorded[("variance", *of)].samples[0], rel=1e-4)
    last = data["cells"][1][2][3]
    gamma = recorded["gamma", "with BN", "layer 4 normalised", 60]
    assert last["gamma"][-1] == pytest.approx(list(gamma.samples), rel=1e-4)
    assert "saturation" in last
    assert "gamma" not in data["cells"][1][1][3]
    gradient = recorded["gradient norm", "without BN", "layer 1 weights", 60].samples[0]
    assert data["cells"][0][0][0]["gradient norm"][-1] == pytest.approx(gradient, rel=1e-4)
    losses = {data["networks"][line["network"]]["name"]: line for line in data["losses"]}
    assert losses["with BN"]["steps"] == steps
    assert losses["with BN"]["values"][20] == pytest.approx(
        recorded["training loss", "with BN", "", 20].samples[0], 1e-4
    )
    assert data["ends"] == pytest.approx(math.log(99) / 2)


def test_how_the_signal_was_made_is_said(signal_records):
    notes = " ".join(next(s for s in figures_of(signal_records) if isinstance(s, Player)).notes)
    for words in ("32 tanh units", "'lecun' from seed 0", "learning rate 0.5 and momentum 0.9", "60 steps"):
        assert words in notes
    assert "chosen" not in notes  # only the default recipe mentions it
    remarked = dataclasses.replace(signal_records, summary={"remark": signal.REMARK})
    assert "were chosen because" in " ".join(film.draw(remarked).notes)


def test_a_network_has_one_color_in_all_figures(signal_records):
    sections = sections_of(signal_records)
    traces = {trace["name"]: trace["meta"]["colour"] for trace in sections["The run as a whole"].figure["data"]}
    assert traces == {"without BN": "vermillion", "with BN": "blue"}  # of one quantity: the axis names it
    networks = sections["Steadying the signal"].data["networks"]
    assert [(each["name"], each["color"]) for each in networks] == [("without BN", "vermillion"), ("with BN", "blue")]


def test_the_normalised_stage_has_mean_0_and_variance_1(signal_records):
    means, variances = (
        [m.samples[0] for m in signal_records.measurements if m.quantity == q and "normalised" in m.setting["layer"]]
        for q in ("mean", "variance")
    )
    assert len(means) == 4 * 61
    assert means == pytest.approx([0.0] * len(means), abs=1e-6)
    assert variances == pytest.approx([1.0] * len(variances), abs=2e-3)


def test_long_runs_are_thinned_and_it_is_said(signal_records):
    total = sum(len(m.samples) for m in signal_records.measurements)
    (run,) = fitting([Run("signal", signal_records)], most=total // 2)
    section = film.draw(run.records)
    assert section.data["steps"] == [*range(0, 60, 3), 60]
    assert "Drawn are 21 of the 61 recorded steps" in " ".join(section.notes)
    assert {m.quantity for m in run.records.measurements} == {m.quantity for m in signal_records.measurements}
    assert fitting([Run("signal", signal_records)], most=total)[0].records is signal_records


def test_thinning_keeps_the_ends():
    for count in range(1, 40):
        for most in range(2, 12):
            kept = thinned(range(count), most)
            assert len(kept) <= most
            assert kept[0] == 0
            assert kept[-1] == count - 1


def test_every_layer_has_a_map_of_every_quantity(signal_records):
    plot = sections_of(signal_records)["Every layer over the steps"]
    assert {choice.name for choice in plot.choices} == {
        "mean",
        "variance",
        "saturation",
        "gamma (mean)",
        "beta (mean)",
        "gradient norm",
    }
    saturation = next(choice.figure["data"][0] for choice in plot.choices if choice.name == "saturation")
    record = next(
        m
        for m in signal_records.measurements
        if (m.quantity, m.setting["stack"], m.setting["layer"], m.setting["step"])
        == ("saturation", "without BN", "layer 4", 40)
    )
    row, column = saturation["y"].index("without BN, layer 4"), saturation["x"].index(40)
    assert saturation["z"][row][column] == pytest.approx(record.samples[0], rel=1e-3)


def test_findings_are_told_the_gravest_first(tmp_path, findings):
    (tmp_path / "findings.json").write_text(findings.to_json())
    (run,) = load([tmp_path / "findings.json"])
    table = next(iter(figures_of(run.records)))
    assert [row[:3] for row in table.rows] == [
        ("error", "BN203 poisoned-statistics", "bn1"),
        ("advice", "BN101 bias-before-norm", HOSTILE),
    ]
    assert table.rows[0][4] == "nan 1, of 8.25"
    assert table.title == "Found: 1 error, 1 advice."
    assert table.sentence == "The gravest is of bn1: running_var has 1 NaN."
    assert table.notes == ("Rules that could not run, and what they need: BN201 (data).",)


def test_a_benchmark_is_described(bench_records):
    sections = sections_of(bench_records)
    assert sections["Speed, in short"].rows == (("bn train vs torch", "1", "2x", "≥ 1.8x", "yes", ""),)
    plot = sections["Speed against torch, cell by cell"]
    assert plot.figure["data"][0]["z"] == [[2]]
    assert plot.table.rows == (("8x4 contiguous", "bn train", "2", "4", "2.00"),)


def test_what_a_verb_changed_is_listed(tmp_path):
    """Of a real fold, as the command writes it: what went where, what stayed and why, how far the outputs are apart."""
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4))\n"
    )
    out = tmp_path / "fold.json"
    arguments = [
        "fold",
        f"{tmp_path}/net.py:make",
        "--input",
        "2,4",
        "--out",
        str(tmp_path / "f.pt"),
        "--json",
        str(out),
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    (run,) = load([out])
    table, measured = figures_of(run.records)
    assert [row[:2] for row in table.rows] == [("3", "folded"), ("0", "left alone")]
    assert table.sentence == "Modules changed: 1; left alone: 1."
    assert table.notes[0].startswith("Outputs differ by at most ")
    assert measured.title == "Records of fold"


def test_other_records_become_a_table():
    measured = tuple(Measurement("time", {"layer": str(n)}, (float(n),), "s") for n in range(501))
    (table,) = figures_of(RecordFile("claims", {}, measured))
    assert len(table.rows) == 500
    assert table.rows[7] == ("time", "layer 7", "1", "7", "7", "7", "s")
    assert table.notes == ("Shown are the first 500 of 501 measurements.",)


@pytest.mark.parametrize("fixture", ["race_records", "signal_records", "hostile_records", "bench_records"])
def test_every_chart_is_one_that_plotly_takes(request, fixture):
    import plotly.graph_objects as go

    plots = [s for s in figures_of(request.getfixturevalue(fixture)) if isinstance(s, Plot)]
    assert plots
    for plot in plots:
        for figure in [plot.figure, *(choice.figure for choice in plot.choices)]:
            go.Figure(figure)  # refuses names and values that plotly does not know
        assert plot.sentence.endswith(".")
        assert plot.label


def test_an_interrupted_race_and_an_empty_one_have_a_page(race_records):
    from batchnorm.lab.options import Options
    from batchnorm.lab.summary import Result

    text = page([Run("race", to_records(Result(Options(), (), 450, 10, interrupted=True), threads=1))])
    assert "No arm was finished." in text
    assert "plotly-source" not in text  # nothing to draw: no script of five megabytes


# ---- nothing recorded changes the page


def test_names_are_text(hostile_records, findings):
    checked = RecordFile("check", {}, (), json.loads(findings.to_json()), machine={IMAGE: HOSTILE})
    other = RecordFile("claims", {HOSTILE: BOLD}, (Measurement(HOSTILE, {IMAGE: BOLD}, (1.0,), BOLD),))
    text = page([Run(HOSTILE, hostile_records), Run(BOLD, checked), Run(IMAGE, other)])
    own = re.sub(r'<script type="text/plain" id="plotly-source">.*?</script>', "", text, flags=re.DOTALL)
    for name in (HOSTILE, IMAGE, BOLD, "<b>bold"):
        assert name not in own
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in own
    assert own.count("</script>") == own.count("<script")
    for block in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', own, flags=re.DOTALL):
        assert json.loads(block)


def test_the_page_asks_nobody_for_anything(race_records, signal_records):
    text = page([Run("race", race_records), Run("signal", signal_records)])
    own = re.sub(r'<script type="text/plain" id="plotly-source">.*?</script>', "", text, flags=re.DOTALL)
    assert re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', own) == []
    assert "http" not in own.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "default-src 'none'" in own
    assert text.count("* plotly.js v") == 1
    assert len(text.encode()) <= LARGEST


def test_a_long_run_of_many_layers_stays_small():
    histogram = {"low": -1.0, "high": 1.0, "under": 0, "over": 0}
    measured = [
        Measurement("histogram", {"step": step, "layer": f"layer {layer}", **histogram}, (12345.0,) * 60)
        for step in range(0, 2000, 10)
        for layer in range(40)
    ]
    measured += [
        Measurement("mean", {"step": step, "layer": f"layer {layer}"}, (step / 7,))
        for step in range(0, 20000, 10)
        for layer in range(10)
    ]
    runs = [Run(name, RecordFile("watch", {}, tuple(measured))) for name in ("first", "second")]
    assert len(page(runs).encode()) <= LARGEST


# ---- the command


def invoke(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_command_draws_files_and_folders(tmp_path, race_records, signal_records, findings):
    folder = tmp_path / "runs"
    race_records.write(folder / "race.json")
    signal_records.write(folder / "signal.json")
    (tmp_path / "findings.json").write_text(findings.to_json())
    out = tmp_path / "new" / "page.html"
    done = invoke(folder, tmp_path / "findings.json", "--out", out)
    assert done.exit_code == 0, done.output
    assert f"The page is {out}" in done.output.replace("\n", "")
    text = out.read_text(encoding="utf-8")
    for words in ("The Batch Normalization race", "Steadying the signal", "Found: 1 error, 1 advice."):
        assert words in text
    assert [file.name for file in out.parent.iterdir()] == ["page.html"]


def test_the_command_opens_the_page_if_asked_to(tmp_path, monkeypatch, bench_records):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    bench_records.write(tmp_path / "bench.json")
    out = tmp_path / "page.html"
    assert invoke(tmp_path / "bench.json", "--out", out).exit_code == 0
    assert opened == []
    assert invoke(tmp_path / "bench.json", "--out", out, "--open", "--force").exit_code == 0
    assert opened == [out.as_uri()]


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "there is no {0}/run.json; name a file of records, or a folder of them"),
        ({"run.json": "{]"}, "{0}/run.json: this is not a batchnorm record file"),
        ({"run.json": '{"findings": 3}'}, "{0}/run.json: this is not a batchnorm record file"),
        (
            {"run.json": "{}"},
            "{0}/run.json: this is not a batchnorm record file (it has no format, command, configuration); "
            "give what a command wrote with --json",
        ),
        ({"run.json": ""}, "{0}/run.json: this is not a batchnorm record file (it is empty); give what"),
        ({"run.json": "\n"}, "{0}/run.json: this is not a batchnorm record file (it is empty); give what"),
        ({"run.json/notes.txt": ""}, "{0}/run.json has no file of records; name one that has some (.json, .jsonl)"),
    ],
)
def test_bad_input_gets_one_sentence(tmp_path, files, sentence):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    error = invoke(tmp_path / "run.json", "--out", tmp_path / "page.html").exception
    assert isinstance(error, BatchNormError)
    assert str(error).startswith(sentence.format(tmp_path))
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(("name", "exists"), [("pages", True), ("pages/", True), ("pages/", False)])
def test_a_page_in_a_folder(tmp_path, bench_records, monkeypatch, name, exists):
    monkeypatch.chdir(tmp_path)
    bench_records.write("bench.json")
    if exists:
        (tmp_path / "pages").mkdir()
    done = invoke("bench.json", "--out", name)
    assert done.exit_code == 0, done.output
    assert "The page is pages/report.html" in done.output
    assert (tmp_path / "pages" / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_page_that_cannot_be_written_is_refused_first(tmp_path):
    error = invoke(tmp_path / "none.json", "--out", "/dev/null/page.html").exception
    assert "cannot be written to" in str(error)
    error = invoke(tmp_path / "none.json", "--out", "/dev/null/").exception
    assert "--out is /dev/null/report.html, but /dev/null cannot be written to" in str(error)
