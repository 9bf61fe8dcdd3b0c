"""Which module draws the records of which command of this package; imported only when a page is drawn.

>>> from batchnorm.report.registry import drawing_of
>>> drawing_of("fold").figures
'batchnorm.transforms.figures'
"""

from __future__ import annotations

from batchnorm.report.registry import register

register("race", "batchnorm.lab.figures", "The Batch Normalization race")
register("race --network residual", "batchnorm.lab.depth.figures", "The Batch Normalization race")
register("race --model", "batchnorm.lab.own.figures", "The race of your network")
register("figure1", "batchnorm.lab.figure1.figures", "Figure 1: what a sigmoid is given")
register("landscape", "batchnorm.lab.landscape.figures", "The landscape of the loss")
register("lab claims", "batchnorm.lab.judge.figures", "Claims about Batch Normalization, run here")
register("lab compare", "batchnorm.lab.runs.figures", "Runs compared")
register("watch", "batchnorm.observe.figures", "The signal in a network")
register("probe", "batchnorm.observe.figures.probe", "A probe of a network")
register("check", "batchnorm.doctor.figures", "What the doctor found")
register("bench", "batchnorm.bench.figures", "How fast is Batch Normalization")
register("calibrate", "batchnorm.transforms.figures")
register("fold", "batchnorm.transforms.figures")
