"""``MaskedBatchNorm``: padded sequences and images, as if there were no padding; ``use_mask`` tells a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.checks import check_model
from batchnorm.errors import BatchNormError
from batchnorm.layers.batch import _BatchNormBase
from batchnorm.layers.domain import DomainBatchNorm


class MaskedBatchNorm(_BatchNormBase):
    """Batch norm of the positions that count, for inputs (N, C, ...) of any number of dimensions.

    >>> import torch
    >>> x = torch.randn(2, 3, 5)
    >>> x[1, :, 2:] = 1e6  # padding: the second sequence has two positions
    >>> y = MaskedBatchNorm(3)(x, torch.tensor([5, 2]))
    >>> bool((y[1, :, 2:] == 0).all()), bool(y.abs().max() < 4)
    (True, True)

    The second argument marks what counts: a boolean tensor of the input's shape without its channels (or with a
    channel axis of size 1), or whole-number lengths, shape (N,) for sequences, (N, 2) for the heights and widths of
    images. Outputs and gradients are those of the same values without padding, and zero on the padding, whatever
    stands there, NaN included. All else is as in `batchnorm.BatchNorm1d`, whose forward takes ``mask=`` too; the
    difference is that this layer insists on one. `batchnorm.use_mask` gives it to all layers of a model at once.
    """

    def forward(  # type: ignore[override]
        self, input: Tensor, mask: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Normalise what the mask marks.

        >>> import torch
        >>> MaskedBatchNorm(3)(torch.randn(4, 3), torch.tensor([True, True, True, False]))[3]
        tensor([0., 0., 0.], grad_fn=<SelectBackward0>)
        """
        if mask is None:
            raise BatchNormError(
                "MaskedBatchNorm needs to know what is padding",
                where=type(self).__name__,
                do="pass a boolean mask (true where a position counts) or lengths as the second argument, or call the "
                "model inside use_mask(model, mask); for batches without padding use BatchNorm1d/2d/3d",
            )
        return super().forward(input, residual, mask)

    if TYPE_CHECKING:

        def __call__(self, input: Tensor, mask: Tensor | None = None, residual: Tensor | None = None) -> Tensor: ...  # type: ignore[override]  # noqa: D102


@contextmanager
def use_mask(model: nn.Module, mask: Tensor | Callable[[Tensor], Tensor]) -> Iterator[nn.Module]:
    """Give a mask, or lengths, to every batch norm of the model that is called without one.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), MaskedBatchNorm(8), nn.ReLU())
    >>> with use_mask(model, torch.tensor([10, 7])):
    ...     y = model(torch.randn(2, 4, 10))
    >>> bool((y[1, :, 7:] == 0).all())
    True

    So a network need not hand the mask on: one that is written once runs with every brick of `make_norm`. It serves all
    batch norms of this package; norms that do not look across examples do what they always do. Where the number of
    positions changes on the way (strides), give a function that takes a layer's input and returns its mask:
    ``use_mask(model, lambda x: lengths * x.shape[-1] // longest)``. Torch's own batch norms count padding and take no
    mask, so a model with one of them is refused: ``convert(model, "masked")`` makes them ours.
    """
    check_model(model, "use_mask")
    layers = []
    for path, layer in model.named_modules():
        if isinstance(layer, _BatchNormBase | DomainBatchNorm) and "mask" in signature(layer.forward).parameters:
            layers.append(layer)
        elif isinstance(layer, _BatchNorm) and not (isinstance(layer, _BatchNormBase) and layer.per_step):
            raise BatchNormError(
                f"{path or 'the model'} is a {type(layer).__name__}, which takes no mask",
                where="use_mask",
                do='make it one of ours first: bn.convert(model, "masked")',
            )

    def tell(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any] | None:
        call = signature(layer.forward).bind(*given, **named)
        if call.arguments.get("mask") is not None:
            return None
        call.arguments["mask"] = mask if isinstance(mask, Tensor) else mask(call.arguments["input"])
        return call.args, call.kwargs

    with ExitStack() as stack:
        for layer in layers:
            # Before the hooks that look at what a layer is given.
            stack.callback(layer.register_forward_pre_hook(tell, with_kwargs=True, prepend=True).remove)
        yield model
