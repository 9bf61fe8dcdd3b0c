"""Groups of samples with statistics of their own: ``GhostBatchNorm`` by size, ``SplitBatchNorm`` by number."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from batchnorm.layers.batch import Tensors, _BatchNormBase
from batchnorm.layers.checked import SWITCHES, one_of, whole
from batchnorm.layers.options import BatchNormOptions


class GhostBatchNorm(_BatchNormBase):
    """Normalise virtual batches of about ``virtual_batch_size`` samples each (Hoffer et al. 2017).

    >>> import torch
    >>> layer = GhostBatchNorm(8, virtual_batch_size=16)
    >>> y = layer(torch.randn(64, 8))
    >>> bool(torch.allclose(y[:16].mean(0), torch.zeros(8), atol=1e-6))
    True

    A large batch then trains with the noise of a small one. Neighbouring samples form a group. There are as many groups
    as full virtual batches, and a remainder is spread over them: 70 samples at 32 are two groups of 35, so no group is
    small. All groups are done by one call of the kernel. The running statistics are those of the whole batch, because
    at inference an example belongs to no group; in evaluation this is plain batch norm.

    Works on inputs (N, C, ...) of any number of dimensions; what else it takes is described at `batchnorm.BatchNorm1d`.
    """

    virtual_batch_size: int = 32
    switches: ClassVar = {**SWITCHES, "virtual_batch_size": whole}
    additions = (*_BatchNormBase.additions, "virtual_batch_size")

    def __init__(self, num_features: int, virtual_batch_size: int = 32, **options: Unpack[BatchNormOptions]) -> None:
        super().__init__(num_features, **options)
        self.virtual_batch_size = virtual_batch_size

    def _groups(self, x: Tensor) -> int:
        return max(1, x.shape[0] // self.virtual_batch_size)


class SplitBatchNorm(_BatchNormBase):
    """Split every batch into ``splits`` parts with statistics of their own; gamma and beta are shared.

    >>> import torch
    >>> layer = SplitBatchNorm(8, splits=2)
    >>> y = layer(torch.cat([torch.randn(32, 8), torch.randn(32, 8) + 5]))  # two views: neither sees the other
    >>> bool(y[32:].mean().abs() < 1e-6)
    True

    The parts are runs of neighbouring samples, as equal as can be: two views that were concatenated stay apart. With
    ``shuffle=True`` the samples are dealt out to the parts at random in every forward pass, and come back in
    their order: what shares statistics then has nothing to do with what is a pair, which is how a contrastive loss is
    kept from reading its answer off the batch. To shuffle over several processes see `batchnorm.shuffled`.

    The running statistics are those of the whole batch; in evaluation this is plain batch norm.
    """

    splits: int = 2
    shuffle: bool = False
    switches: ClassVar = {**SWITCHES, "splits": whole, "shuffle": one_of(True, False)}
    additions = (*_BatchNormBase.additions, "splits", "shuffle")

    def __init__(
        self, num_features: int, splits: int = 2, shuffle: bool = False, **options: Unpack[BatchNormOptions]
    ) -> None:
        super().__init__(num_features, **options)
        self.splits = splits
        self.shuffle = shuffle

    def _groups(self, x: Tensor) -> int:
        return self.splits

    def _apply_to(
        self, x: Tensor, residual: Tensor | None, held: Tensors, training: bool, momentum: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | bool | None]:
        if not (training and self.shuffle):
            return super()._apply_to(x, residual, held, training, momentum, mask)
        order = torch.rand(x.shape[0], device=x.device).argsort()  # torch.compile fails on randperm here
        dealt = [None if t is None else t[order] for t in (x, residual, mask)]
        assert dealt[0] is not None
        y, finite = super()._apply_to(dealt[0], dealt[1], held, training, momentum, dealt[2])
        return y[torch.argsort(order)], finite
