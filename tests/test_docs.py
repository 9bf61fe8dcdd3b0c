"""Every Python block of the README and of the guides runs, and every link between them leads somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(page, block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
]


@pytest.mark.parametrize(("page", "block"), BLOCKS)
def test_block_runs(page, block):
    exec(compile(block, str(page), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        other = (page.parent / path) if path else page
        assert other.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings}, target


def test_the_two_commands_are_at_the_top():
    top = README.read_text(encoding="utf-8").split("\n## ")[0]
    assert "pip install -c constraints.txt . && batchnorm race" in top
    assert "pip install -c constraints.txt '.[test]' && pytest" in top
