"""docs/scaling.md says what the code's model gives: bytes, the fit to its own measurements, the extrapolation."""

import pathlib
import re
from statistics import median

import pytest

from batchnorm.bench.collectives import RESNET50, Machine, fit, messages, payload, step

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
CLUSTER = Machine(start=50e-6, message=10e-6, byte=0.8e-9)


def rows(first):
    """The numbers of the table whose header begins so, one list a row."""
    lines = PAGE[PAGE.index(f"| {first} |") :].split("\n\n")[0].splitlines()[2:]
    return [[float(cell.replace(",", "")) for cell in line.strip("| ").split("|")] for line in lines]


MEASURED = {(int(ranks), int(channels)): exchange for ranks, channels, exchange, *_ in rows("ranks | channels")}
FITTED = {int(channels): numbers for channels, *numbers in rows("channels | start")}
EXTRAPOLATED = {int(ranks): numbers for ranks, *numbers in rows("ranks | this host")}


def test_measured_with_2_4_and_8_processes():
    assert sorted({ranks for ranks, _ in MEASURED}) == [2, 4, 8]
    assert sorted({channels for _, channels in MEASURED}) == sorted(FITTED) == [16, 64, 256, 1024]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_bytes_and_messages(direction):
    (line,) = re.findall(rf"\| {direction}: .*", PAGE)
    way = direction == "backward"
    formula = f"8 ({payload(0)[way] // 8} + 2C)"
    assert line.split(" | ")[1:] == ["p - 1", formula, f"{messages(8) * payload(64)[way]:,} |"]


@pytest.mark.parametrize("channels", FITTED)
def test_the_fit_to_2_and_4_ranks_and_what_it_says_of_8(channels):
    start, message, predicted, measured = FITTED[channels]
    size = payload(channels)[0]
    machine = fit({ranks: MEASURED[ranks, channels] * 1e-6 for ranks in (2, 4)}, size, 0.0, cores=2)
    assert [machine.start * 1e6, machine.message * 1e6] == pytest.approx([start, message], abs=1.0)
    assert machine.exchange(8, size) * 1e6 == pytest.approx(predicted, rel=1e-3)
    assert measured == MEASURED[8, channels]


def test_how_far_the_model_misses_at_8_ranks():
    off = [100 * (predicted / measured - 1) for _, _, predicted, measured in FITTED.values()]
    assert f"misses by {min(off):.0f} to +{max(off):.0f}\npercent at 8 ranks" in PAGE


@pytest.mark.parametrize("ranks", EXTRAPOLATED)
def test_the_extrapolation(ranks):
    here, *cluster = EXTRAPOLATED[ranks]
    host = Machine(*(median(numbers[i] for numbers in FITTED.values()) * 1e-6 for i in (0, 1)), byte=0.0)
    # The constants on the page are rounded, those that the host's column was made from were not.
    assert step(host, ranks, RESNET50) * 1e3 == pytest.approx(here, rel=5e-3)
    ways = ("exchange", "ring", "tree")
    assert cluster == [round(step(CLUSTER, ranks, RESNET50, way) * 1e3) for way in ways]


def test_the_extrapolation_reaches_a_thousand_and_names_its_assumptions():
    assert max(EXTRAPOLATED) == 1000
    assert "start 50 us, message 10 us, 10 Gb/s\n(0.8 ns a byte)" in PAGE
    assert "Assumptions: " in PAGE
    cheapest = max(p for p in range(2, 1000) if step(CLUSTER, p, RESNET50) <= step(CLUSTER, p, RESNET50, "tree"))
    assert 35 < cheapest < 50  # "some 40 ranks"
