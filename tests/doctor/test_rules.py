"""For every rule of the table: a sick case that fires it, a healthy twin that does not, the fix that silences it."""

import importlib

import pytest
import torch
from state import snapshot

import batchnorm as bn
from batchnorm.doctor.codes import FILES, RULES
from batchnorm.records import HELD, Finding

# Rules that need several processes are tested on them, in test_ranks.py.
ALONE = {code: file for code, file in FILES.items() if "ranks" not in RULES[code].needs}
CASES = {code: importlib.import_module(f"doctor_cases.{file}") for code, file in ALONE.items()}
SICK = [(code, name) for code, case in CASES.items() for name in getattr(case, "SICK", {})]
HEALTHY = [(code, name) for code, case in CASES.items() for name in getattr(case, "HEALTHY", {})]
SICK_RUNS = [(code, name) for code, case in CASES.items() for name in getattr(case, "SICK_RUNS", {})]
HEALTHY_RUNS = [(code, name) for code, case in CASES.items() for name in getattr(case, "HEALTHY_RUNS", {})]


def given(code, name, kind):
    """What the case gives to ``check``, the model under its own name."""
    torch.manual_seed(0)
    return getattr(CASES[code], kind)[name]()


def checked(arguments, code):
    findings = bn.check(**arguments, select=[code])
    assert not findings.failed, findings.failed
    lacking = {of: why for of, why in findings.skipped.items() if not why.startswith(HELD)}
    assert not lacking, lacking
    return findings


def watched(code, name, kind):
    """The findings of a training run: the case calls what it is given as it would call ``bn.monitor``."""
    torch.manual_seed(0)
    runs = []

    def monitor(*arguments, **keywords):
        runs.append(bn.monitor(*arguments, **{"warn": False, "select": [code], "every": 1, **keywords}))
        return runs[-1]

    getattr(CASES[code], kind)[name](monitor)
    (run,) = runs
    assert not run.failed, run.failed
    return run.findings


@pytest.mark.parametrize("code", ALONE)
def test_every_rule_has_its_cases(code):
    rule, case = RULES[code], CASES[code]
    if rule.look is not None:
        assert case.SICK and case.HEALTHY  # noqa: PT018
    if rule.watch is not None:
        assert case.SICK_RUNS and case.HEALTHY_RUNS  # noqa: PT018


@pytest.mark.parametrize(("code", "name"), SICK, ids=str)
def test_sick(code, name):
    arguments = given(code, name, "SICK")
    before = snapshot(arguments["model"])
    findings = checked(arguments, code)
    assert findings.codes == (code,)
    assert snapshot(arguments["model"]) == before
    for finding in findings:
        check_form(finding, arguments["model"])


@pytest.mark.parametrize(("code", "name"), HEALTHY, ids=str)
def test_healthy(code, name):
    assert str(checked(given(code, name, "HEALTHY"), code)) == "nothing found"


@pytest.mark.parametrize(("code", "name"), [(c, n) for c, n in SICK if RULES[c].fix is not None], ids=str)
def test_fixed(code, name):
    arguments = given(code, name, "SICK")
    if not isinstance(arguments["model"], torch.nn.Module):
        pytest.skip("a checkpoint is not repaired")
    before = snapshot(arguments["model"])
    findings = checked(arguments, code)
    reparable = [finding for finding in findings if finding.fix != "none"]
    assert reparable or (getattr(CASES[code], "NO_FIX", ()) and name in CASES[code].NO_FIX)
    if RULES[code].safety == "unsafe":
        _, report = bn.fix(arguments["model"], findings)
        assert not report.changes
        assert report.left
        arguments = given(code, name, "SICK")  # an optimiser has followed to that copy
        before, findings = snapshot(arguments["model"]), checked(arguments, code)
    repaired, report = bn.fix(arguments["model"], findings, unsafe=True)
    if reparable:
        assert report.changes
    assert snapshot(arguments["model"]) == before
    left = [f for f in checked({**arguments, "model": repaired}, code) if f.fix != "none"]
    assert not left, left


@pytest.mark.parametrize(("code", "name"), SICK_RUNS, ids=str)
def test_sick_run(code, name):
    findings = watched(code, name, "SICK_RUNS")
    assert findings.codes == (code,)
    for finding in findings:
        check_form(finding)
        assert finding.step is not None


@pytest.mark.parametrize(("code", "name"), HEALTHY_RUNS, ids=str)
def test_healthy_run(code, name):
    assert str(watched(code, name, "HEALTHY_RUNS")) == "nothing found"


def check_form(finding: Finding, model=None):
    """One sentence, numbers that JSON can hold, a repair in words, a module that exists."""
    assert finding.sentence
    assert "\n" not in finding.sentence
    assert not finding.sentence.endswith(".")
    assert finding.repair
    assert finding.numbers
    for value in finding.numbers.values():
        items = value if isinstance(value, (list, tuple)) else [value]
        assert all(isinstance(item, (int, float, str, bool)) for item in items), finding.numbers
    if isinstance(model, torch.nn.Module):
        assert finding.path in dict(model.named_modules(remove_duplicate=False))


SECTIONS = ("## What it does", "## Why is this bad?", "## Example", "## Use instead", "## Fix safety", "## References")


@pytest.mark.parametrize("code", RULES)
def test_every_page_has_its_parts_in_order(code):
    page = RULES[code].page
    places = [page.index(section) for section in SECTIONS]
    assert places == sorted(places)
    assert RULES[code].title.endswith(".") or ":" in RULES[code].title


@pytest.mark.parametrize("code", RULES)
def test_the_code_and_the_file_agree(code):
    rule = RULES[code]
    assert rule.code == code
    assert rule.name.replace("-", "_") == FILES[code]
