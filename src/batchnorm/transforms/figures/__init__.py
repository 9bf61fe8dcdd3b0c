"""How the report of a verb is drawn: what it changed, and every measurement."""

from __future__ import annotations

from batchnorm.report import anything
from batchnorm.transforms.figures import changes

FIGURES = (changes.draw, anything.draw)
