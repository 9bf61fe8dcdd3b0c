"""Every Python block of the README and of the guides runs, and every link between them leads somewhere."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from batchnorm.doctor.codes import FILES
from batchnorm.lab.claims import all_claims
from batchnorm.lab.judge.markdown import to_markdown
from batchnorm.records import RecordFile

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
MADE = set(re.findall(r'"([\w-]+\.html)":', (ROOT / "docs/site.py").read_text(encoding="utf-8")))  # with the site
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(page, block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
]


@pytest.mark.parametrize(("page", "block"), BLOCKS)
def test_block_runs(page, block):
    exec(compile(block, str(page), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize(("code", "output"), re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", TEXT, re.DOTALL))
def test_the_readme_shows_what_its_code_prints(code, output, capsys):
    exec(compile(code, str(README), "exec"), {"__name__": "__main__"})
    rounding = re.compile(r"\d(\.\d+)?e-\d\d")  # differs between CPUs
    assert rounding.sub("~", capsys.readouterr().out) == rounding.sub("~", output)


def test_the_readme_shows_the_race_of_the_guide():
    (race,) = re.findall(r"```sh\nbatchnorm race\n```\n\n```text\n(.*?)```", TEXT, re.DOTALL)
    assert race in (ROOT / "docs/understand.md").read_text(encoding="utf-8")


def test_the_figures_of_the_readme_are_those_of_the_pages():
    rows = dict(re.findall(r"^\| (\w[^|]*) \| ([^|]+) \|$", TEXT, re.MULTILINE))
    speed, kept, folded, rules = rows.values()
    measured = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    (training,) = re.findall(r"^\| BN \+ ReLU against torch \| [^|]+ \| ([^|]+) \|", measured, re.MULTILINE)
    assert re.findall(r"[\d.]+(?=x)", speed) == [f"{float(x):.1f}" for x in re.findall(r"[\d.]+(?=x)", training)]
    (stock, ours) = re.findall(r"^\| BN \+ ReLU \| ([\d.]+) \| ([\d.]+) \|$", measured, re.MULTILINE)[0]
    assert [float(x) for x in re.findall(r"\d\.\d", kept)] == [float(ours), float(stock)]
    peaks = re.search(r"^\| MobileNetV2.*\| (\d+) MB \([^)]+\) \| (\d+) MB", measured, re.MULTILINE).groups()
    assert tuple(re.findall(r"\d+(?= MB)", kept)) == peaks[::-1]
    zoo = (ROOT / "docs/zoo-fold.md").read_text(encoding="utf-8")
    counts = re.findall(r"^\| (?:torchvision|timm|transformers) [^|]+ \| (\d+) \| (\d+) \|", zoo, re.MULTILINE)
    assert folded == f"{sum(layers == gone for layers, gone in counts)} of {len(counts)}"
    assert int(rules) == len(FILES)


def test_the_readme_is_short():
    assert len(TEXT.split()) < 700


@pytest.mark.parametrize("command", ["figure1", "landscape"])
def test_pictures_tell_the_figures_of_their_text(command):
    """Each was made by the command below it, and the guide tells what is its title."""
    title = ElementTree.parse(ROOT / f"docs/{command}.svg").findtext("{http://www.w3.org/2000/svg}title")
    guide = (ROOT / "docs/understand.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"\n### [^#]*?{command}\.svg.*?(?=\n##)", guide, re.DOTALL)
    figures = re.findall(r"\d+(?:\.\d+)?", title)
    assert len(figures) >= 4
    assert [figure for figure in figures if figure not in section] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target or target.partition("#")[0] in MADE:
            continue
        path, _, heading = target.partition("#")
        other = (page.parent / path) if path else page
        assert other.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings}, target


def test_the_two_commands_are_at_the_top():
    top = TEXT.split("\n## ")[0]
    assert "pip install -c constraints.txt . && batchnorm race" in top
    assert "pip install -c constraints.txt '.[test]' && pytest" in top


def test_the_snapshot_of_the_claims_is_of_the_claims_as_they_are():
    """What `batchnorm lab report` wrote; after a change of a rule or a protocol it is to be made anew."""
    records = RecordFile.from_json((ROOT / "docs/claims.json").read_text(encoding="utf-8"))
    assert to_markdown(records, "claims-page.html") == (ROOT / "docs/claims.md").read_text(encoding="utf-8")
    found = {each["name"]: (each["version"], each["rule"]) for each in records.summary["claims"]}
    assert found == {claim.name: (claim.version, claim.rule) for claim in all_claims()}
