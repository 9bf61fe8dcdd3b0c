"""What a message says one should install is what the package asks for, by names that an index knows."""

import re
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from batchnorm.extras import EXTRAS, install

ROOT = Path(__file__).parents[1]


def declared():
    """The optional dependencies in pyproject.toml, by extra; Python 3.10 has no reader of TOML."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = text.split("[project.optional-dependencies]\n")[1].split("\n[project.scripts]")[0]
    entries = re.findall(r"^([\w-]+) = \[(.*?)\]$", table, re.MULTILINE | re.DOTALL)
    return {name: re.findall(r'"([^"]+)"', packages) for name, packages in entries}


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_packages_are_those_of_the_extra(extra):
    known = declared()
    assert len(known) == 10
    if extra in known:
        assert list(EXTRAS[extra]) == known[extra]
    else:
        assert set(EXTRAS[extra]) <= set(known["test"])
    assert "batchnorm" not in install(extra)


def test_no_message_asks_for_this_package_by_name():
    sources = (ROOT / "src" / "batchnorm").rglob("*.py")
    asking = re.compile(r"pip install[^\n]*batchnorm")
    assert not [file.name for file in sources if asking.search(file.read_text(encoding="utf-8"))]


def constraints():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("constraint", constraints(), ids=lambda one: one.name)
def test_a_pinned_version_installs_on_every_python_it_is_pinned_for(constraint):
    try:
        found = metadata(constraint.name)
    except PackageNotFoundError:
        pytest.skip("not installed")
    if found["Version"] not in constraint.specifier:
        pytest.skip(f"installed is {found['Version']}")
    runs_on = SpecifierSet(found["Requires-Python"] or "")
    declared_range = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    oldest = int(re.search(r'requires-python = ">=3\.(\d+)"', declared_range)[1])
    for python in (f"3.{minor}" for minor in range(oldest, 15)):
        if constraint.marker is None or constraint.marker.evaluate({"python_version": python}):
            assert runs_on.contains(f"{python}.99"), f"pip cannot resolve constraints.txt on Python {python}"
