"""Every Python block of the README and of the guides runs, and every link between them leads somewhere."""

import json
import re
import shlex
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer

from batchnorm.commands import app
from batchnorm.doctor.codes import FILES
from batchnorm.lab.claims import all_claims
from batchnorm.lab.judge.markdown import to_markdown
from batchnorm.records import RecordFile
from printed import agree

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
MADE = set(re.findall(r'"([\w-]+\.html)":', (ROOT / "docs/site.py").read_text(encoding="utf-8")))  # with the site
GUIDES = [README, *sorted((ROOT / "docs").glob("*.md"))]


def script(name):
    """A script beside the pages, as a module."""
    spec = spec_from_file_location(name, ROOT / f"docs/{name}.py")
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


execute = script("execute")
TUTORIALS, NOTEBOOKS = execute.tutorials(), execute.notebooks()
PAGES = [*GUIDES, *TUTORIALS]
BLOCKS = [
    pytest.param(page, *block, id=f"{page.stem}-{number}")
    for page in GUIDES
    for number, block in enumerate(execute.blocks(page))
]


@pytest.mark.parametrize(("page", "code", "shown"), BLOCKS)
def test_a_block_of_a_guide_runs_and_prints_what_is_shown(page, code, shown, capsys):
    exec(compile(code, str(page), "exec"), {"__name__": "__main__"})
    if shown is not None:
        assert agree(shown, capsys.readouterr().out)


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_from_top_to_bottom_and_finds_what_it_shows(page):
    namespace = {"__name__": "__main__"}
    for code, shown, printed in execute.run(page, namespace):
        assert printed == "" if shown is None else agree(shown, printed), f"{code}\nprinted\n{printed}"
    drawing = script("draw")
    if page.stem in drawing.MEASURED:
        assert agree(words_in(picture_of(page.stem)), words_in(drawing.MEASURED[page.stem](namespace)))


@pytest.mark.parametrize("name", script("draw").OTHERS)
def test_a_picture_shows_what_its_page_does(name):
    assert agree(words_in(picture_of(name)), words_in(script("draw").OTHERS[name]()))


def picture_of(name):
    return (ROOT / f"docs/pictures/{name}.svg").read_text(encoding="utf-8")


def words_in(svg):
    return "\n".join(each.text or "" for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"))


def test_every_picture_can_be_made_again_and_is_shown_with_its_command():
    drawing = script("draw")
    assert {path.stem for path in (ROOT / "docs/pictures").iterdir()} == {*drawing.MEASURED, *drawing.OTHERS}
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for path in (ROOT / "docs/pictures").iterdir():
        assert f"pictures/{path.name})" in text
        assert f"`python docs/draw.py {path.stem}`" in text
        assert path.stat().st_size < 50_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_finds_what_it_shows(path):
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package)
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"/(?:home|root|tmp|Users|usr)/|0x[0-9a-f]{6}", text) == []
    assert len(text) < 100_000
    for before, after in zip(json.loads(text)["cells"], execute.executed(path)["cells"], strict=True):
        assert "".join(before["source"]) == after["source"]
        for shown, printed in zip(before.get("outputs", []), after.get("outputs", []), strict=True):
            assert shown["output_type"] == printed["output_type"] != "error"
            assert ("text/html" in shown.get("data", {})) == ("text/html" in printed.get("data", {}))
            assert agree("".join(shown.get("text", "")), "".join(printed.get("text", "")))


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("97.3%", "95.8%", True),
        ("97.3%", "60.9%", False),
        ("drift 5.6", "drift 5.2", True),
        ("drift 5.6", "drift 1.7", False),
        ("2 layers", "3 layers", False),
        ("3e-07 of", "9e-08 of", True),
        ("3e-07 of", "3e-01 of", False),
        ("in 2.1 s", "in 9.9 s", True),
        ("BN201 stale", "BN202 stale", False),
        ("3.bn1: folded", "4.bn1: folded", False),
        ("confirmed", "refuted", False),
    ],
)
def test_shown_and_printed_agree_but_for_rounding_and_time(shown, printed, same):
    assert agree(shown, printed) == same


COMMANDS = sorted(
    {
        (page.name, line.partition("#")[0].strip())
        for page in PAGES
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        for line in block.splitlines()
        if line.startswith("batchnorm ")
    }
)


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=lambda word: word)
def test_a_command_in_a_page_has_the_options_that_are_given_to_it(page, line):
    _, *words = shlex.split(line.partition("&&")[0])
    command = typer.main.get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        command = command.commands[words.pop(0)]
    known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)} | {"--help", "-h"}
    assert {word.partition("=")[0] for word in words if word.startswith("-")} <= known


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "shown"),
    re.findall(
        r"```sh\nbatchnorm ([^\n]*) --open\n```.*?```text\n(.*?)```",
        (ROOT / "docs/tutorials/figures.md").read_text(encoding="utf-8"),
        re.DOTALL,
    ),
    ids=["figure1", "landscape"],
)
def test_a_figure_of_the_paper_is_what_the_tutorial_shows(command, shown, tmp_path):
    words = [sys.executable, "-m", "batchnorm", *shlex.split(command)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    printed = done.stdout.splitlines()
    for line in shown.splitlines():
        assert any(agree(line, each) for each in printed), line


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
