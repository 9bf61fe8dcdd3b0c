"""Run the code of tutorials and notebooks, and write what it prints below it: ``python docs/execute.py [FILE...]``."""

import contextlib
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
BLOCK = re.compile(r"```python\n(?P<code>.*?)```(?:\n\n```text\n(?P<output>.*?)```)?", re.DOTALL)


def tutorials() -> list[Path]:
    """Return the pages of which all blocks run in order, in one namespace."""
    return sorted((DOCS / "tutorials").glob("*.md"))


def notebooks() -> list[Path]:
    """Return the notebooks."""
    return sorted((DOCS / "notebooks").glob("*.ipynb"))


def blocks(page: Path) -> list[tuple[str, str | None]]:
    """Return the code of each Python block of a page, with the output that the page shows for it."""
    return [(found["code"], found["output"]) for found in BLOCK.finditer(page.read_text(encoding="utf-8"))]


def run(page: Path, namespace: dict[str, Any]) -> Iterator[tuple[str, str | None, str]]:
    """Run the blocks of a page in one namespace; yield code, the output that is shown, and what was printed."""
    for code, shown in blocks(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(page), "exec"), namespace)
        yield code, shown, printed.getvalue()


def execute_page(page: Path) -> None:
    """Write what each block prints below it, where the page shows an output."""
    printed = iter([text for _, _, text in run(page, {"__name__": "__main__"})])

    def with_output(found: re.Match[str]) -> str:
        text = next(printed)
        return f"```python\n{found['code']}```\n\n```text\n{text}```" if found["output"] is not None else found[0]

    page.write_text(BLOCK.sub(with_output, page.read_text(encoding="utf-8")), encoding="utf-8")


def executed(path: Path) -> Any:
    """Return a notebook with the outputs that it has now, and without times, paths and versions."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=120, kernel_name="python3", record_timing=False, coalesce_streams=True).execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "text/html" in output.get("data", {}):
                output.data.pop("text/plain")  # the same again, or an address in memory
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return notebook


def main(names: list[str]) -> None:
    """Execute the files that are named, by default all."""
    for path in map(Path, names) if names else [*tutorials(), *notebooks()]:
        if path.suffix == ".md":
            execute_page(path)
        else:
            notebook = executed(path)
            path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
