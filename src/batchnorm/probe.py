"""Probes of a network at one moment, after the papers that asked why Batch Normalization works.

>>> import batchnorm as bn
>>> layer = torch.nn.BatchNorm1d(3)
>>> x = torch.randn(8, 3)
>>> bn.probe.interaction(layer.train(), x).others > 0, bn.probe.interaction(layer.eval(), x).others
(True, 0.0)
"""

from batchnorm.observe.probes.boundary import boundary
from batchnorm.observe.probes.interaction import interaction
from batchnorm.observe.probes.invariance import invariance
from batchnorm.observe.probes.landscape import landscape
from batchnorm.observe.probes.margin import margin
from batchnorm.observe.probes.shift import shift

__all__ = ["boundary", "interaction", "invariance", "landscape", "margin", "shift"]
