"""Masks and lengths, made into one kind of tensor."""

import pytest
import torch

from batchnorm.errors import BatchNormError
from batchnorm.masks import as_mask


def test_boolean_masks_come_back_themselves():
    for shape in [(3, 5), (3, 5, 4), (3, 5, 4, 2)]:
        x = torch.zeros(shape)
        mask = torch.rand(shape[0], *shape[2:]) > 0.5
        assert as_mask(mask, x) is mask
        with_channel = as_mask(mask.unsqueeze(1), x)
        assert torch.equal(with_channel, mask)
        assert with_channel.data_ptr() == mask.data_ptr()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_lengths(dtype):
    x = torch.zeros(4, 7, 6)
    lengths = torch.tensor([0, 6, 3, 1], dtype=dtype)
    expected = torch.zeros(4, 6, dtype=torch.bool)
    for i, n in enumerate(lengths.tolist()):
        expected[i, :n] = True
    for given in (lengths, lengths.unsqueeze(1)):
        mask = as_mask(given, x)
        assert mask.dtype == torch.bool
        assert torch.equal(mask, expected)


def test_lengths_along_several_axes():
    x = torch.zeros(2, 3, 4, 5, 6)
    mask = as_mask(torch.tensor([[2, 5, 1], [4, 0, 6]]), x)
    expected = torch.zeros(2, 4, 5, 6, dtype=torch.bool)
    expected[0, :2, :5, :1] = True
    assert torch.equal(mask, expected)


def test_as_many_samples_as_channels():
    """A square input cannot be confused about which axis a mask belongs to."""
    x = torch.zeros(4, 4, 4)
    mask = torch.rand(4, 4) > 0.5
    assert as_mask(mask, x) is mask
    with pytest.raises(BatchNormError):
        as_mask(torch.ones(4, 4, 4, dtype=torch.bool), x)


@pytest.mark.parametrize(
    ("given", "shape", "do"),
    [
        (torch.ones(3, dtype=torch.bool), (4, 5), r"boolean tensor of shape \[4\], true where a position counts$"),
        (torch.tensor([1, 2, 3, 4]), (4, 5), r"boolean tensor of shape \[4\]"),
        (torch.ones(4, 5, dtype=torch.bool), (4, 5, 6), r"shape \[4, 6\].* whole-number lengths of shape \[4\]$"),
        (torch.ones(4), (4, 5, 6), r"has dtype torch.float32 and shape \[4\]"),
        (torch.ones(4, dtype=torch.complex64), (4, 5, 6), "torch.complex64"),
        (torch.tensor([1, 2, 3, 4]), (4, 5, 6, 7), r"whole-number lengths of shape \[4, 2\]$"),
        (torch.ones(4, 3, dtype=torch.int64), (4, 5, 6, 7), r"lengths of shape \[4, 2\]"),
        (torch.ones(()), (4, 5, 6), "torch.float32"),
        (torch.tensor(3), (4, 5, 6), r"torch.int64 and shape \[\]"),
        (None, (4, 5, 6), "is of type NoneType"),
    ],
)
def test_wrong_masks_say_what_is_right(given, shape, do):
    with pytest.raises(BatchNormError, match=do) as error:
        as_mask(given, torch.zeros(shape), "encoder.norm")
    assert error.value.where == "encoder.norm"
    assert f"the input has shape {list(shape)}" in str(error.value)
