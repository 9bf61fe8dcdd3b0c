"""How the records of a benchmark are drawn, one figure a file, in the order of the page."""

from __future__ import annotations

from batchnorm.bench.figures import cells, headline, speed

FIGURES = (headline.draw, speed.draw, cells.draw)
