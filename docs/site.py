"""What mkdocs adds to the site: the claims, the reference of the commands, the changelog, the notebooks as pages."""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click

from batchnorm.commands import app
from batchnorm.report.load import load
from batchnorm.report.page import write_page

PAGES = {"claims-page.html": "claims.json"}  # name in the site: records in docs/


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Draw each page and add it to the files of the site."""
    for name, records in PAGES.items():
        with TemporaryDirectory() as folder:
            page = write_page(load([Path(config.docs_dir) / records]), Path(folder) / name)
            files.append(File.generated(config, name, content=page.read_text(encoding="utf-8")))
    files.append(File.generated(config, "commands.md", content=commands()))
    changes = Path(config.docs_dir).parent / "CHANGELOG.md"
    files.append(File.generated(config, "changelog.md", content=changes.read_text(encoding="utf-8")))
    for notebook in sorted((Path(config.docs_dir) / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=notebook_page(notebook)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to notebooks lead to their pages."""
    return re.sub(r"(notebooks/[\w-]+)\.ipynb\)", r"\1.md)", markdown)


def notebook_page(path: Path) -> str:
    """Return the cells of a notebook and their outputs, as Markdown."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            table = "".join(output.get("data", {}).get("text/html", ""))
            printed = "".join(output.get("text", "")).rstrip()
            parts.append(f"<div>{table}</div>" if table else f"```text\n{printed}\n```")
    download = f'<a href="{path.name}" download>Download the notebook</a>, or open it in `docs/notebooks`.'
    return "\n\n".join([parts[0], download, *parts[1:]])


def commands() -> str:
    """Return what every command takes, as Markdown."""
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="batchnorm", title="Commands")
    return re.sub(r"^  (?=batchnorm )", "    ", text, flags=re.MULTILINE)  # examples are code
