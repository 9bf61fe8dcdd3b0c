"""How the records of a race of residual networks are drawn, in the order of the page."""

from __future__ import annotations

from batchnorm.lab.depth.figures import accuracy, curve, headline, rates, tables

FIGURES = (headline.draw, accuracy.draw, curve.draw, tables.claims, tables.arms, rates.draw)
