"""How the doctor's findings are drawn."""

from __future__ import annotations

from batchnorm.doctor.figures import findings

FIGURES = (findings.draw,)
