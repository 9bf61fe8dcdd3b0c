"""How the records of a race are drawn, one figure a file, in the order of the page."""

from __future__ import annotations

from batchnorm.lab.figures import accuracy, headline, progress, rates, steps, verdicts

FIGURES = (headline.draw, accuracy.draw, steps.draw, rates.draw, progress.draw, verdicts.draw)
