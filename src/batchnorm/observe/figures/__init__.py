"""How watched records are drawn, one figure a file, in the order of the page."""

from __future__ import annotations

from batchnorm.observe.figures import film, layers, run

FIGURES = (film.draw, layers.draw, run.draw)
