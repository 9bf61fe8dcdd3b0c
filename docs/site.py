"""What mkdocs adds to the site: the page of all claims, drawn from its records."""

from pathlib import Path
from tempfile import TemporaryDirectory

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from batchnorm.report.load import load
from batchnorm.report.page import write_page

PAGES = {"claims-page.html": "claims.json"}  # name in the site: records in docs/


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Draw each page and add it to the files of the site."""
    for name, records in PAGES.items():
        with TemporaryDirectory() as folder:
            page = write_page(load([Path(config.docs_dir) / records]), Path(folder) / name)
            files.append(File.generated(config, name, content=page.read_text(encoding="utf-8")))
    return files
