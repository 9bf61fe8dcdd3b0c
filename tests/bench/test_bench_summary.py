import pytest

from batchnorm.bench.cases import Case, floor_copies
from batchnorm.bench.summary import MOVED, Row, geometric_mean, group_cells, moved_floor, summarize
from batchnorm.records import Measurement


def cell(shape="32x64x56x56", layout="contiguous", operation="bn+relu", pass_name="train", dtype="float32", **times):
    """Three equal samples for each named contender (torch_compile stands for torch.compile)."""
    memory = times.pop("memory", "default")
    case = Case(tuple(map(int, shape.split("x"))), layout, operation, pass_name, dtype, memory)
    return [
        Measurement("time", {**case.setting(), "contender": name.replace("_", ".")}, (seconds,) * 3, "s")
        for name, seconds in times.items()
    ]


def row_named(measurements, start):
    rows = [row for row in summarize(measurements) if row.what.startswith(start)]
    assert len(rows) == 1, [row.what for row in summarize(measurements)]
    return rows[0]


def test_measurements_gather_into_cells_in_their_order():
    cells = group_cells([*cell("32x64", torch=2.0, batchnorm=1.0), *cell("16x64", torch=3.0, batchnorm=1.0)])
    assert [(c.setting["shape"], c.speed("torch")) for c in cells] == [("32x64", 2.0), ("16x64", 3.0)]


def test_the_mean_of_ratios_is_geometric():
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([]) != geometric_mean([])


@pytest.mark.parametrize(
    ("operation", "dtype", "speed", "reached"),
    [
        ("bn+relu", "float32", 2.6, True),
        ("bn+relu", "float32", 2.4, False),
        ("bn", "float32", 1.9, True),
        ("bn", "float32", 1.7, False),
        ("bn+add+relu", "float32", 2.4, False),
        ("bn+relu", "bfloat16", 2.1, True),
        ("bn+relu", "bfloat16", 1.9, False),
    ],
)
def test_targets_against_torch(operation, dtype, speed, reached):
    measurements = cell(operation=operation, dtype=dtype, torch=speed, batchnorm=1.0)
    row = row_named(measurements, f"{operation} train vs torch")
    assert row.value == pytest.approx(speed)
    assert row.reached is reached


def test_only_training_has_a_target_and_bn_relu_a_goal():
    measurements = [
        *cell(pass_name="eval", torch=9.0, batchnorm=1.0),
        *cell(pass_name="train", torch=9.0, batchnorm=1.0),
    ]
    assert row_named(measurements, "bn+relu eval").reached is None
    assert row_named(measurements, "bn+relu train vs torch").goal == 4.0


def test_the_worst_cell_is_named():
    measurements = [*cell("32x64", torch=4.0, batchnorm=1.0), *cell("16x64", torch=1.0, batchnorm=1.0)]
    row = row_named(measurements, "bn+relu train vs torch")
    assert row.value == pytest.approx(2.0)
    assert row.cells == 2
    assert row.detail == "worst 1.00x 16x64 contiguous"


def test_slower_cells_count_from_64_kb_up():
    tiny = cell("32x64", torch=0.5, batchnorm=1.0)
    fast = cell("128x1024", torch=2.0, batchnorm=1.0)
    row = row_named([*tiny, *fast], "cells from 64 KB")
    assert (row.value, row.cells, row.reached) == (0, 1, True)
    assert row.detail.startswith("closest 2.00x 128x1024")
    slow = cell("1024x512", operation="bn", pass_name="eval", torch=0.9, batchnorm=1.0)
    row = row_named([*tiny, *fast, *slow], "cells from 64 KB")
    assert (row.value, row.cells, row.reached) == (1, 2, False)
    assert row.detail == "0.90x 1024x512 contiguous bn eval"


@pytest.mark.parametrize(("speed", "reached"), [(3.5, True), (2.5, False)])
def test_the_target_against_compile_is_for_training_with_relu(speed, reached):
    measurements = [
        *cell(torch=9.0, torch_compile=speed, batchnorm=1.0),
        *cell(operation="bn", torch=9.0, torch_compile=speed, batchnorm=1.0),
    ]
    assert row_named(measurements, "bn+relu train vs torch.compile").reached is reached
    assert row_named(measurements, "bn train vs torch.compile").reached is None


def test_the_floor_is_quoted_for_large_tensors_by_layout():
    measurements = [
        *cell("32x64x56x56", floor=1.0, batchnorm=1.5),
        *cell("64x128x28x28", floor=1.0, batchnorm=2.1),
        *cell("16x64x112x112", floor=1.0, batchnorm=1.7),
        *cell("128x64x8x8", floor=1.0, batchnorm=9.0),
        *cell("32x64x56x56", "channels_last", floor=1.0, batchnorm=2.4),
        *cell("32x64x56x56", pass_name="eval", floor=0.4, batchnorm=9.0),
    ]
    contiguous = row_named(measurements, "bn+relu train of floor, contiguous")
    assert (contiguous.value, contiguous.cells, contiguous.reached) == (2.1, 3, False)
    assert contiguous.detail == "median 1.70x, worst 64x128x28x28"
    assert row_named(measurements, "bn+relu train of floor, channels_last").reached is True


def test_cells_with_kept_memory_have_rows_of_their_own():
    measurements = [
        *cell(torch=3.0, floor=1.0, batchnorm=1.0),
        *cell(torch=9.0, floor=1.0, batchnorm=3.0, memory="kept"),
    ]
    rows = {row.what: row.value for row in summarize(measurements)}
    assert rows["bn+relu train vs torch"] == pytest.approx(3.0)
    assert rows["bn+relu train vs torch, from 6 MB, memory kept"] == pytest.approx(3.0)
    floor = "bn+relu train of floor, contiguous"
    assert (rows[floor], rows[floor + ", memory kept"]) == (1.0, 3.0)


def test_a_run_with_kept_memory_throughout_is_summarised_as_usual():
    rows = [row.what for row in summarize(cell(torch=3.0, batchnorm=1.0, memory="kept"))]
    assert rows == ["bn+relu train vs torch", "cells from 64 KB slower than torch"]


def test_peers_get_rows_without_targets():
    row = row_named(cell(torch=3.0, flax=6.0, batchnorm=1.0), "bn+relu train vs flax")
    assert (row.value, row.target) == (pytest.approx(6.0), None)


def test_without_our_layer_there_is_no_summary():
    assert summarize(cell(torch=3.0, floor=1.0)) == []


def test_rows_say_whether_they_reached_their_target():
    assert Row("a", 2.0, 1).reached is None
    assert Row("a", 2.0, 1, target=2.0).reached is True
    assert Row("a", 2.0, 1, target=2.0, at_most=True).reached is True
    assert Row("a", 2.1, 1, target=2.0, at_most=True).to_json()["reached"] is False
    assert Row("a", float("nan"), 1, target=2.0).reached is False


def run_with_floors(**seconds):
    """Two shapes in a table for each operation; ``seconds`` is how long a copy takes there."""
    return [
        measurement
        for name, copy in seconds.items()
        for shape, size in (("32x64x56x56", 1.0), ("16x64x56x56", 0.5))
        for operation in [name.replace("_", "+")]
        for measurement in cell(
            shape, operation=operation, torch=9.0, batchnorm=0.9,
            floor=size * copy * floor_copies(Case((), "contiguous", operation, "train")),
        )
    ]  # fmt: skip


def test_no_target_is_judged_if_the_floor_moved_between_tables():
    measurements = run_with_floors(bn=0.999, bn_relu=1.0, bn_add_relu=1.1 * MOVED)
    said = moved_floor(measurements)
    assert "differ by 1.38x between bn train and bn+add+relu train (at most 1.25x" in said
    assert "no target is judged" in said
    rows = summarize(measurements)
    assert any(row.target is not None for row in rows)
    assert {row.reached for row in rows} == {None}
    assert all(row.to_json()["judged"] is False for row in rows)


def test_opposite_moves_do_not_cancel():
    measurements = [
        *cell("32x64x56x56", operation="bn", floor=1.0), *cell("16x64x56x56", operation="bn", floor=2.0),
        *cell("32x64x56x56", floor=2.0), *cell("16x64x56x56", floor=1.0),
    ]  # fmt: skip
    assert "differ by 2.00x" in moved_floor(measurements)


def test_a_floor_that_stays_is_no_reason():
    measurements = run_with_floors(bn=1.0, bn_relu=1.02, bn_add_relu=0.95 * MOVED)
    assert moved_floor(measurements) == ""
    assert {row.reached for row in summarize(measurements) if row.target is not None} == {True}


def test_other_shapes_and_small_tensors_do_not_count():
    small = [*cell("32x64", operation="bn", floor=1.0), *cell("32x64", floor=9.0)]
    others = [*cell("32x64x56x56", operation="bn", floor=1.0), *cell("64x64x56x56", floor=9.0)]
    assert moved_floor(small) == moved_floor(others) == ""
