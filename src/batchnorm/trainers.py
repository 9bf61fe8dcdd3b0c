"""Callbacks for trainers of other packages, which are imported when a callback is first asked for."""

from __future__ import annotations

from importlib import import_module

from batchnorm.errors import BatchNormError
from batchnorm.extras import install

LIGHTNING = ("lightning.pytorch.callbacks", "pytorch_lightning.callbacks")


def lightning_callback(
    name: str, events: type, module: str, doc: str | None, homes: tuple[str, ...] = LIGHTNING
) -> type:
    """Make a callback of Lightning from a class that has its events, in whichever of its two packages is there.

    >>> lightning_callback("Watch", object, "observe.lightning", "Watches.", homes=("no_such_package.callbacks",))
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: observe.lightning: Lightning is not installed; pip install 'lightning>=2.2'
    """
    for home in homes:
        try:
            callback = import_module(home).Callback
        except ModuleNotFoundError as error:
            if error.name != home.partition(".")[0]:
                raise
        else:
            return type(name, (events, callback), {"__doc__": doc, "__module__": module})
    raise BatchNormError("Lightning is not installed", where=module, do=install("lightning"))
