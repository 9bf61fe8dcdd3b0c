"""The switches of many BN layers: context managers for those of a model, attributes for those inside one module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.checks import check_model
from batchnorm.errors import BatchNormError
from batchnorm.layers.batch import _BatchNormBase
from batchnorm.layers.foreign import Evaluating, hold, is_foreign, keeps_statistics


@contextmanager
def no_update(model: nn.Module) -> Iterator[nn.Module]:
    """Let no running statistic of the model move, whatever mode it is in.

    >>> import torch
    >>> layer = nn.BatchNorm1d(2)
    >>> with no_update(layer):
    ...     y = layer(torch.randn(8, 2))
    >>> layer.running_mean, int(layer.num_batches_tracked)
    (tensor([0., 0.]), 0)

    It serves every layer that keeps statistics, torch's, ours and those of other libraries: for a second forward pass
    on other data (a GAN's fake images, a teacher, a gradient penalty).
    """

    check_model(model, "no_update")

    def switches(layer: nn.Module) -> dict[str, Any]:
        if isinstance(layer, _BatchNormBase):
            return {"update": False}
        return {"track_running_stats": False} if isinstance(layer, _BatchNorm) else {}

    with turned(model, switches, held=lambda layer: True):
        yield model


@contextmanager
def use_batch_statistics(model: nn.Module) -> Iterator[nn.Module]:
    """Normalise with the statistics of each batch, in evaluation mode too; what is updated does not change.

    >>> import torch
    >>> layer = nn.BatchNorm1d(2).eval()
    >>> with use_batch_statistics(layer):
    ...     y = layer(torch.full((8, 2), 5.0))
    >>> bool(y.abs().max() < 1e-3), layer.training, layer.running_mean
    (True, False, tensor([0., 0.]))
    """

    check_model(model, "use_batch_statistics")

    def trains(layer: nn.Module) -> bool:
        return layer.training and not isinstance(layer, Evaluating)

    def switches(layer: nn.Module) -> dict[str, Any]:
        if isinstance(layer, _BatchNormBase) and not is_foreign(layer):
            return {"statistics": "batch"}
        return {} if trains(layer) else from_batch(layer)

    with turned(model, switches, held=lambda layer: not trains(layer)):
        yield model


def from_batch(layer: nn.Module) -> dict[str, Any]:
    """Return the attributes with which a layer normalises by each batch; `turned` sets them, and holds its statistics.

    >>> from batchnorm import BatchNorm1d
    >>> from_batch(nn.BatchNorm1d(2)), from_batch(BatchNorm1d(2))
    ({'training': True, 'track_running_stats': False}, {'statistics': 'batch', 'update': False})
    """
    if isinstance(layer, _BatchNormBase) and not is_foreign(layer):
        return {"statistics": "batch", "update": False}
    if isinstance(layer, Evaluating):
        return {"_uses_batch": True}
    return {"training": True, **({"track_running_stats": False} if isinstance(layer, _BatchNorm) else {})}


@contextmanager
def turned(
    model: nn.Module, switches: Callable[[Any], dict[str, Any]], *, held: Callable[[nn.Module], bool]
) -> Iterator[None]:
    """Set the attributes that ``switches`` names for each layer with statistics, and restore them in the end.

    >>> from batchnorm import BatchNorm1d
    >>> layer = BatchNorm1d(2)
    >>> with turned(layer, lambda layer: {"update": False}, held=lambda layer: False):
    ...     layer.update
    False

    Whether such a layer listens to them is known of torch's classes and ours. The statistics of others are held besides
    (see `batchnorm.layers.foreign.hold`) if ``held`` says so.
    """
    before: list[tuple[nn.Module, dict[str, Any]]] = []
    with ExitStack() as stack:
        try:
            for layer in model.modules():
                own = isinstance(layer, _BatchNorm) and not is_foreign(layer)
                if not own and not isinstance(layer, _BatchNorm) and not keeps_statistics(layer):
                    continue
                if not own and held(layer):
                    stack.callback(hold(layer))
                new = switches(layer)
                before.append((layer, {name: getattr(layer, name) for name in new}))
                for name, value in new.items():
                    setattr(layer, name, value)
            yield
        finally:
            for layer, old in before:
                for name, value in old.items():
                    setattr(layer, name, value)


def uses(layer: _BatchNorm, training: bool | None = None) -> tuple[bool, bool]:
    """Whether a layer normalises with the batch's statistics, and whether its running ones move.

    >>> uses(nn.BatchNorm1d(2)), uses(nn.BatchNorm1d(2).eval())
    ((True, True), (False, False))

    It is asked of the mode that the layer is in, or of the one that ``training`` says.
    """
    if isinstance(layer, Evaluating):
        return False, False
    training = layer.training if training is None else training
    tracked = layer.running_mean is not None and layer.running_var is not None
    if isinstance(layer, _BatchNormBase):
        auto = layer.statistics == "auto"
        from_batch = (training or not tracked) if auto else layer.statistics == "batch"
        moves = training and layer.track_running_stats if layer.update is None else layer.update
    else:
        from_batch = training or not tracked
        moves = training and layer.track_running_stats
    return from_batch, bool(tracked and moves and layer.momentum != 0.0)


class Switches(nn.Module):
    """The three switches of a module that holds several batch norms: set, they are set on all of them.

    >>> from batchnorm import DomainBatchNorm
    >>> layer = DomainBatchNorm(3, domains=("photo", "sketch"))
    >>> layer.update = False
    >>> layer.layer_of("sketch").update
    False
    """

    @property
    def statistics(self) -> str:
        """Which statistics normalise, the same in all of them; see `BatchNorm1d`.

        >>> from batchnorm import BatchNormGRU
        >>> BatchNormGRU(2, 3).statistics
        'auto'
        """
        return str(self._common("statistics"))

    @statistics.setter
    def statistics(self, value: str) -> None:
        self._set_all("statistics", value)

    @property
    def update(self) -> bool | None:
        """Whether the running statistics move, the same in all of them; see `BatchNorm1d`.

        >>> from batchnorm import BatchNormGRU
        >>> BatchNormGRU(2, 3, update=True).update
        True
        """
        value: bool | None = self._common("update")
        return value

    @update.setter
    def update(self, value: bool | None) -> None:
        self._set_all("update", value)

    @property
    def learn(self) -> bool:
        """Whether the gammas and betas learn, the same in all of them; see `BatchNorm1d`.

        >>> from batchnorm import BatchNormGRU
        >>> BatchNormGRU(2, 3).learn
        True
        """
        return bool(self._common("learn"))

    @learn.setter
    def learn(self, value: bool) -> None:
        self._set_all("learn", value)

    def _inside(self) -> dict[str, _BatchNormBase]:
        return {name: layer for name, layer in self.named_children() if isinstance(layer, _BatchNormBase)}

    def _set_all(self, switch: str, value: Any) -> None:
        for layer in self._inside().values():
            setattr(layer, switch, value)

    def _common(self, switch: str) -> Any:
        values = {name: getattr(layer, switch) for name, layer in self._inside().items()}
        if len(set(values.values())) > 1:
            found = ", ".join(f"{value!r} in {name}" for name, value in values.items())
            raise BatchNormError(
                f"{switch} is {found}", where=type(self).__name__, do="ask these layers, or set it here for all of them"
            )
        return next(iter(values.values()))
