"""Callbacks for trainers of other packages, which are imported when a callback is first asked for."""

from __future__ import annotations

from importlib import import_module

from batchnorm.errors import BatchNormError

LIGHTNING = ("lightning.pytorch.callbacks", "pytorch_lightning.callbacks")


def lightning_callback(name: str, events: type, module: str, doc: str | None) -> type:
    """Make a callback of Lightning from a class that has its events, in whichever of its two packages is there.

    >>> lightning_callback("Monitor", Events, __name__, __doc__)  # doctest: +SKIP
    <class 'batchnorm.doctor.lightning.Monitor'>
    """
    for home in LIGHTNING:
        try:
            callback = import_module(home).Callback
        except ModuleNotFoundError as error:
            if error.name != home.partition(".")[0]:
                raise
        else:
            return type(name, (events, callback), {"__doc__": doc, "__module__": module})
    raise BatchNormError("Lightning is not installed", where=module, do="pip install 'batchnorm[lightning]'")
