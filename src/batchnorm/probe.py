"""Probes of a network at one moment: ``bn.probe.landscape(model, batch, loss, lr=0.1)`` and its five neighbours."""

from batchnorm.observe.probes.boundary import boundary
from batchnorm.observe.probes.interaction import interaction
from batchnorm.observe.probes.invariance import invariance
from batchnorm.observe.probes.landscape import landscape
from batchnorm.observe.probes.margin import margin
from batchnorm.observe.probes.shift import shift

__all__ = ["boundary", "interaction", "invariance", "landscape", "margin", "shift"]
