"""The documentation builds into a site that fetches nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import batchnorm

pytest.importorskip("material", reason="mkdocs-material is not installed")
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # a broken link or a page outside the menu is an error
    return folder


def test_every_page_is_there(site):
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert {path for path in pages if not (site / path).exists()} == set()


def test_every_public_name_is_explained_once_and_found_by_the_search(site):
    pages = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    found = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    titles = [entry["title"] for entry in found if entry["location"].startswith("api/")]
    for name in batchnorm.__all__:
        assert pages.count(f'id="batchnorm.{name}"') == 1, name
        assert any(name in title for title in titles), name


def test_every_command_is_explained(site):
    page = (site / "commands.html").read_text(encoding="utf-8")
    for command in ("race", "check", "fold", "lab run", "lab report"):
        assert f"<code>batchnorm {command}</code>" in page
    assert "--checkpoint" in page


def test_examples_of_docstrings_are_code(site):
    pages = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    assert "<blockquote>" not in pages
    assert pages.count("highlight") > 100


def test_nothing_is_fetched(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*>", text)
        assert [tag for tag in fetched if "canonical" not in tag] == [], page.name
