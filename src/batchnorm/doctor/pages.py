"""The rules' pages for ``batchnorm explain`` and docs/rules, made from their docstrings.

``python -m batchnorm.doctor.pages`` writes docs/rules.md and docs/rules/; ``--check`` says whether they are what the
code gives now.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from batchnorm.doctor.catalogue import described
from batchnorm.doctor.needs import NEEDS
from batchnorm.doctor.rule import Rule
from batchnorm.files import write_atomically

GROUPS = {
    "BN1": "How the model is built",
    "BN2": "What the statistics say",
    "BN3": "What the training loop does",
    "BN4": "Several processes",
    "BN5": "Folding and export",
}
FIXES = {
    "safe": "safe (`batchnorm check --fix`, `bn.fix`)",
    "unsafe": "unsafe (`batchnorm check --fix --unsafe-fixes`, `bn.fix(unsafe=True)`)",
    "none": "no automatic fix",
}
MAKE = "python -m batchnorm.doctor.pages"


def needs_of(rule: Rule) -> str:
    """Say in words what a rule looks at.

    >>> needs_of(described()["BN101"])
    'a model (a checkpoint has only tensors), an example input (example=)'
    """
    words = [NEEDS[need] for need in rule.needs] if rule.look is not None else []
    if rule.watch is not None and NEEDS["run"] not in words:
        words.append(f"or {NEEDS['run']}" if words else NEEDS["run"])
    return ", ".join(words)


def page_of(rule: Rule) -> str:
    """Write the page of a rule, in Markdown.

    >>> print(page_of(described()["BN101"])[:24])
    # BN101 bias-before-norm
    """
    facts = [f"- severity: {rule.severity}", f"- needs: {needs_of(rule)}", f"- fix: {FIXES[rule.safety]}"]
    return "\n".join([f"# {rule.code} {rule.name}", "", *facts, "", _linked(rule.page.strip())]) + "\n"


def _linked(page: str) -> str:
    """The page with its references as links."""
    body, heading, references = page.partition("## References")
    thread = re.compile(r"(?<![\w/\[])([\w.-]+/[\w.-]+)#(\d+)")
    references = thread.sub(r"[\1#\2](https://github.com/\1/issues/\2)", references)
    references = re.sub(r"(?<![\w/])(discuss\.pytorch\.org/t/\d+)", r"[\1](https://\1)", references)
    return body + heading + references


def index() -> str:
    """Write the page that lists all rules.

    >>> index().splitlines()[0]
    '# The rules'
    """
    lines = [
        "# The rules",
        "",
        f"Made by `{MAKE}` from the docstrings of `batchnorm/doctor/rules/`. `batchnorm explain BN101` prints a page,",
        "`batchnorm rules` this list; [the guide](check.md) says how to check a model. Errors and warnings fail a",
        "check, advice is shown (`--fail-on`). A safe fix keeps what the model computes in evaluation, or evidently",
        "what is meant; an unsafe one must be requested.",
    ]
    for prefix, title in GROUPS.items():
        own = [rule for code, rule in described().items() if code.startswith(prefix)]
        if own:
            lines += ["", f"## {title}", "", "| code | name | what it finds | severity | looks at | fix |"]
            lines.append("|---|---|---|---|---|---|")
            lines += [
                f"| {rule.code} | [{rule.name}](rules/{rule.name}.md) | {_cell(rule.title.removesuffix('.'))} |"
                f" {rule.severity} | {_cell(short_needs(rule))} | {rule.safety} |"
                for rule in own
            ]
    return "\n".join(lines) + "\n"


def short_needs(rule: Rule) -> str:
    """Say in single words what a rule looks at.

    >>> short_needs(described()["BN101"])
    'model, example'
    """
    words = list(rule.needs) if rule.look is not None else []
    return ", ".join([*words, *(["run"] if rule.watch is not None and "run" not in words else [])])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def pages() -> dict[str, str]:
    """Return every page by its place under docs.

    >>> sorted(pages())[0]
    'rules.md'
    """
    return {"rules.md": index(), **{f"rules/{rule.name}.md": page_of(rule) for rule in described().values()}}


def main(arguments: Sequence[str]) -> int:
    """Write the pages into a folder (by default docs), or with ``--check`` compare those that are there.

    >>> main(["--check", "no-such-folder"])
    no-such-folder: rules.md is not what the code gives; make the pages with python -m batchnorm.doctor.pages \
no-such-folder
    1
    """
    wanted = [argument for argument in arguments if argument != "--check"]
    folder = Path(wanted[0] if wanted else "docs")
    made = pages()
    extra = [file for file in sorted((folder / "rules").glob("*.md")) if f"rules/{file.name}" not in made]
    if "--check" not in arguments:
        for name, text in made.items():
            write_atomically(folder / name, text)
        for file in extra:  # of a rule that is gone, or has another name
            file.unlink()
        return 0
    wrong = [name for name, text in made.items() if not _is(folder / name, text)]
    wrong += [f"rules/{file.name}" for file in extra]
    if wrong:
        more = f" (nor are {len(wrong) - 1} more)" if len(wrong) > 1 and folder.exists() else ""
        print(f"{folder}: {wrong[0]} is not what the code gives{more}; make the pages with {MAKE} {folder}")
        return 1
    return 0


def _is(file: Path, text: str) -> bool:
    return file.is_file() and file.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
