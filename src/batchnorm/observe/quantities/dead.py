"""Dead: which share of a ReLU's units is zero for the whole batch.

Of those no gradient flows into the weights before them. A unit is a channel, at all positions; in sequences (three
axes) channels may be either of the two last axes, and the smaller share is recorded. For our layers with an
``activation="relu"``, their output is read.
"""

from __future__ import annotations

from batchnorm.doctor.activations import measure
from batchnorm.observe.quantity import Quantity, Reading
from batchnorm.observe.subjects import Signal

KINDS = ("relu", "relu6")


def read(signal: Signal) -> Reading | None:
    """Look at what goes into a ReLU, or comes out of one: dead is what is nowhere above zero.

    >>> import torch
    >>> x = torch.tensor([[-5.0, 0.0, 1.0, -1.0], [-1.0, -2.0, -1.0, 1.0]])
    >>> read(Signal("act", torch.nn.ReLU(), "relu", "input", x)).samples
    (0.5,)
    """
    if signal.kind not in KINDS or signal.x.dim() < 2 or not signal.x.numel():
        return None
    return Reading((measure(signal.layer, "relu", signal.x).dead,))


QUANTITY = Quantity("dead", "signal", read)
