import math

import pytest

from batchnorm.bench.cases import (
    OPERATIONS,
    PASSES,
    SHAPES,
    Case,
    floor_copies,
    make_cases,
    parse_names,
    parse_shapes,
    with_kept_memory,
)
from batchnorm.errors import BatchNormError


def test_every_shape_in_every_layout_that_it_has():
    cases = make_cases()
    layouts = [(case.shape, case.layout) for case in cases if case.operation == "bn" and case.pass_name == "eval"]
    assert len(layouts) == len(set(layouts)) == 10 + 6
    assert all((len(shape) == 4) or layout == "contiguous" for shape, layout in layouts)
    assert len(cases) == len(layouts) * len(OPERATIONS) * len(PASSES)


def test_volumes_have_a_channels_last_layout_too():
    assert [case.layout for case in make_cases([(2, 3, 4, 4, 4)], operations=["bn"], passes=["eval"])] == [
        "contiguous",
        "channels_last",
    ]


def test_sizes_in_bytes():
    assert Case((32, 64, 56, 56), "contiguous", "bn", "train").bytes == 4 * math.prod((32, 64, 56, 56))
    assert Case((32, 64), "contiguous", "bn", "train", "bfloat16").bytes == 4096


@pytest.mark.parametrize(
    ("operation", "pass_name", "copies"),
    [
        ("bn", "forward", 1.0),
        ("bn", "train", 2.5),
        ("bn", "eval", 1.0),
        ("bn+relu", "forward", 1.0),
        ("bn+relu", "train", 2.5),
        ("bn+add+relu", "forward", 1.5),
        ("bn+add+relu", "train", 3.5),
        ("bn+add+relu", "eval", 1.5),
    ],
)
def test_the_floor_counts_reads_and_writes(operation, pass_name, copies):
    assert floor_copies(Case((2, 3), "contiguous", operation, pass_name)) == copies


def test_only_large_training_cells_are_measured_again_with_kept_memory():
    again = with_kept_memory(make_cases())
    assert {case.pass_name for case in again} == {"train"}
    assert {case.memory for case in again} == {"kept"}
    assert {case.shape for case in again} == {shape for shape in SHAPES if math.prod(shape) * 4 >= 6_000_000}


def test_shapes_are_read_once_each():
    assert parse_shapes(" 32x64 , 2X3x4x5,32x64,") == [(32, 64), (2, 3, 4, 5)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("32by64", "'32by64', which is not a shape"),
        ("32x", "'32x', which is not a shape"),
        ("32", "'32', but a batch has 2 to 5 sizes"),
        ("1x2x3x4x5x6", "2 to 5 sizes"),
        ("0x3", "sizes of at least 1"),
        ("-2x3", "sizes of at least 1"),
        ("1x64", "one value per channel"),
        ("1x64x1x1", "one value per channel"),
        (",", "--shapes is empty"),
    ],
)
def test_bad_shapes_get_one_sentence(text, message):
    with pytest.raises(BatchNormError, match=message) as caught:
        parse_shapes(text)
    assert "\n" not in str(caught.value)


def test_unknown_names_get_one_sentence():
    with pytest.raises(BatchNormError, match="--passes has 'backward', which is none of forward, train, eval"):
        parse_names("train,backward", "passes", PASSES)
