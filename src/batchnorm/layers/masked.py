"""``MaskedBatchNorm``: padded sequences and images, normalised as if there were no padding."""

from __future__ import annotations

from torch import Tensor

from batchnorm.errors import BatchNormError
from batchnorm.layers.batch import _Fast


class MaskedBatchNorm(_Fast):
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
    difference is that this layer insists on one.
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
                do="pass a boolean mask (true where a position counts) or lengths as the second argument; for "
                "batches without padding use BatchNorm1d/2d/3d",
            )
        return super().forward(input, residual, mask)
