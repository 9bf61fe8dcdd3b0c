"""The pages of the rules are what the docstrings give now."""

import dataclasses
import io
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from rich.console import Console

from batchnorm.doctor import pages
from batchnorm.doctor.catalogue import NAMES, described
from batchnorm.doctor.codes import RULES
from batchnorm.doctor.findings import Findings

DOCS = Path(__file__).parents[2] / "docs"


def test_committed_pages_are_up_to_date(capsys):
    if not DOCS.exists():
        pytest.skip("the documentation is not beside the tests")
    assert pages.main(["--check", str(DOCS)]) == 0, capsys.readouterr().out


def test_check_finds_changed_missing_and_extra_pages(tmp_path, capsys):
    assert pages.main([str(tmp_path)]) == 0
    assert pages.main(["--check", str(tmp_path)]) == 0
    page = tmp_path / "rules" / "bias-before-norm.md"
    page.write_text(page.read_text() + "more\n")
    assert pages.main(["--check", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "rules/bias-before-norm.md is not what the code gives; make the pages with" in out
    page.unlink()
    assert pages.main(["--check", str(tmp_path)]) == 1
    pages.main([str(tmp_path)])
    gone = tmp_path / "rules" / "no-such-rule.md"
    gone.write_text("# old")
    assert pages.main(["--check", str(tmp_path)]) == 1
    pages.main([str(tmp_path)])
    assert not gone.exists()
    assert pages.main(["--check", str(tmp_path)]) == 0


def test_every_rule_is_in_the_index_under_a_heading():
    index = pages.index()
    for rule in RULES.values():
        assert f"| {rule.code} | [{rule.name}](rules/{rule.name}.md) |" in index
        assert rule.code[:3] in pages.GROUPS


@pytest.mark.parametrize("code", RULES)
def test_a_page_says_what_the_rule_says(code):
    rule, page = RULES[code], pages.page_of(RULES[code])
    assert page.startswith(f"# {code} {rule.name}\n")
    assert f"- severity: {rule.severity}" in page
    assert rule.title in page
    assert page.count("```") % 2 == 0


@pytest.mark.parametrize("code", RULES)
def test_the_catalogue_reads_what_the_rule_is(code):
    read, rule = described()[code], RULES[code]
    functions = {"look", "fix", "watch"}
    for field in (each.name for each in dataclasses.fields(rule)):
        here, there = getattr(read, field), getattr(rule, field)
        assert (here is None) == (there is None) if field in functions else here == there, field
    assert NAMES[code] == rule.name


@pytest.mark.parametrize("words", ["explain BN101", "explain BN999", "rules", "--help", "check --help"])
def test_reading_needs_no_torch(words):
    """Torch alone takes more than a second."""
    code = (
        "import sys\nfrom batchnorm.commands import app\nfrom batchnorm.terminal import ended\n"
        "ended(lambda: app(sys.argv[1:], standalone_mode=False))\nprint('torch' in sys.modules, file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code, *words.split()], capture_output=True, text=True, check=True)
    assert ran.stderr.splitlines()[-1] == "False"


@pytest.mark.parametrize("term", ["xterm-256color", "linux", "dumb", None])
def test_codes_link_to_their_pages_where_terminals_can(monkeypatch, term):
    monkeypatch.delenv("TERM") if term is None else monkeypatch.setenv("TERM", term)
    stream = io.StringIO()
    finding = RULES["BN101"].found("conv", "its bias does nothing", "drop it")
    Console(file=stream, force_terminal=True, width=100).print(Findings([finding]))
    address = re.search(r"\x1b]8;[^;]*;([^\x1b]*)", stream.getvalue())
    if term != "xterm-256color":
        assert address is None
        return
    target = Path(unquote(urlsplit(address[1]).path))
    assert target.stem.replace("_", "-") == "bias-before-norm"
    assert target.is_file()


def test_a_pipe_has_no_links(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = io.StringIO()
    Console(file=stream, width=100).print(Findings([RULES["BN101"].found("conv", "x", "y")]))
    assert "\x1b" not in stream.getvalue()


def test_references_become_links():
    page = pages._linked(
        "see a/b#1\n## References\n- pytorch/pytorch#4741\n- discuss.pytorch.org/t/7146 (x)\n- Li et al. (2019)"
    )
    assert "see a/b#1\n" in page
    assert "[pytorch/pytorch#4741](https://github.com/pytorch/pytorch/issues/4741)" in page
    assert "[discuss.pytorch.org/t/7146](https://discuss.pytorch.org/t/7146) (x)" in page


def test_needs():
    assert pages.short_needs(RULES["BN301"]) == "run"
    assert pages.needs_of(RULES["BN301"]) == "a training run (bn.monitor)"
    assert "batches of data (data=)" in pages.needs_of(RULES["BN201"])
