"""What mkdocs adds to the site: the page of all claims, the reference of the commands, and the changelog."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
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
    return files


def commands() -> str:
    """Return what every command takes, as Markdown."""
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="batchnorm", title="Commands")
    return re.sub(r"^  (?=batchnorm )", "    ", text, flags=re.MULTILINE)  # examples are code
