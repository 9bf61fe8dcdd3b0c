"""Who draws what: rooms and other packages register their figures, and report/ imports none of them."""

import ast
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import batchnorm
from batchnorm import report
from batchnorm.commands import app
from batchnorm.errors import BatchNormError
from batchnorm.records import Measurement, RecordFile
from batchnorm.report import registry
from batchnorm.report.figures import figures_of
from batchnorm.report.load import Run
from batchnorm.report.page import page, title_of
from batchnorm.report.registry import register

ROOMS = {module.name for module in pkgutil.iter_modules(batchnorm.__path__) if module.ispkg} - {"report", "io"}
MENTIONED = re.compile(rf"\bbatchnorm\.({'|'.join(sorted(ROOMS))})\b")


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))


def rooms_in(source, package="batchnorm.report"):
    """Every room that a module of report/ imports, at any depth, or names in a string."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        found |= {match for name in names for match in MENTIONED.findall(name)}
    return found


def test_report_knows_no_room():
    files = sorted(Path(report.__path__[0]).rglob("*.py"))
    assert len(files) > 8
    assert {"lab", "bench", "doctor", "observe", "transforms"} <= ROOMS
    assert {file.name: rooms for file in files if (rooms := rooms_in(file.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from batchnorm.lab.records import from_records",
        "from batchnorm import lab",
        "import batchnorm.lab.records as s",
        "from .. import lab",
        "from ..lab import store",
        "def draw():\n    from batchnorm.lab import store",
        "if TYPE_CHECKING:\n    from batchnorm.lab import store",
        "import_module('batchnorm.lab.figures')",
        "f'batchnorm.lab.{name}'",
    ],
)
def test_the_walk_sees_every_way_to_import(source):
    assert rooms_in(source) == {"lab"}


def test_every_registered_module_has_its_figures():
    registered = [each.figures for each in registry._REGISTERED.values() if isinstance(each.figures, str)]
    assert len(registered) >= 6
    for module in registered:
        figures = sys.modules[module].FIGURES if module in sys.modules else __import__(module, fromlist=["_"]).FIGURES
        assert figures
        assert all(map(callable, figures))


def test_reading_records_needs_no_import_but_report_and_no_torch(tmp_path):
    """A script that knows only report/ draws what watch recorded, as the command does."""
    RecordFile("watch", {}, (Measurement("mean", {"step": 4, "layer": "bn1"}, (0.5,)),)).write(tmp_path / "run.json")
    program = (
        "import sys\nfrom pathlib import Path\nfrom batchnorm.report.load import load\n"
        "from batchnorm.report.page import page\n"
        f"text = page(load([Path({str(tmp_path / 'run.json')!r})]))\n"
        "print('Every layer over the steps' in text, 'The signal in a network' in text, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "False"]


def test_importing_the_package_imports_no_figure():
    program = "import sys, batchnorm; print([m for m in sys.modules if 'figures' in m or 'records' in m])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# ---- other packages


def installed(folder, figures):
    """Make a package of its own, with an entry point, as pip installs one."""
    (folder / "weather.py").write_text(figures)
    about = folder / "weather-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: weather\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[batchnorm.figures]\nweather = weather\n")


def test_the_command_draws_records_of_an_installed_package(tmp_path, monkeypatch):
    installed(
        tmp_path,
        "from batchnorm.report.sections import Headline\n"
        "FIGURES = (lambda records: None, lambda records: Headline('Weather', f'{records.summary[\"rain\"]} mm.'))\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    RecordFile("weather", {}, (), {"rain": 3}).write(tmp_path / "weather.json")
    done = CliRunner().invoke(
        app, ["report", str(tmp_path / "weather.json"), "--out", str(tmp_path / "page.html")], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "3 mm." in text
    assert "Records of weather" not in text


@pytest.mark.parametrize(
    ("figures", "cause"), [("import no_such_module\n", "no_such_module"), ("DRAW = ()\n", "FIGURES")]
)
def test_a_broken_registration_gets_one_sentence(tmp_path, monkeypatch, figures, cause):
    installed(tmp_path, figures)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "weather", raising=False)
    with pytest.raises(BatchNormError, match=f"records of 'weather' .*{cause}.*; register a module"):
        list(figures_of(RecordFile("weather", {}, ())))


def test_functions_can_be_registered_and_replaced():
    records = RecordFile("weather", {}, (), {"rain": 3})
    assert next(figures_of(records)).title == "Records of weather"
    register("weather", [lambda records: report.anything.draw(records)], title="Today")
    assert title_of([Run("a", records)]) == "Today"
    register("weather", [lambda records: None])
    (table,) = figures_of(records)  # no figure had anything to draw
    assert table.title == "Records of weather"
    assert title_of([Run("a", records)]) == "Batch Normalization: a report"


@pytest.mark.parametrize(
    ("commands", "title"),
    [
        (("race", "watch"), "The Batch Normalization race"),
        (("watch", "check"), "The signal in a network"),
        (("claims", "race"), "Batch Normalization: a report"),
    ],
)
def test_a_page_is_titled_by_what_it_begins_with(commands, title):
    assert title_of([Run(command, RecordFile(command, {}, ())) for command in commands]) == title


def test_unknown_records_become_a_table_whatever_they_are_called():
    for command in ("claims", "", "../x", "<b>"):
        text = page([Run("x", RecordFile(command, {}, (Measurement("time", {"layer": "a"}, (1.0,), "s"),)))])
        assert "Every measurement" in text
