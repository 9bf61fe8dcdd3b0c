import io
from pathlib import Path

import pytest
from rich.console import Console

from batchnorm.bench.cases import Case, floor_copies
from batchnorm.bench.present import cell_tables, explanation, heading, note_lines, summary_table
from batchnorm.bench.summary import summarize
from batchnorm.records import Measurement, RecordFile

GOLDEN = Path(__file__).parent / "golden" / "tables.txt"


def handmade_record():
    """A small run with invented times: some targets reached, some not, one contender missing from a cell."""
    cells = [
        (Case((32, 64, 56, 56), "contiguous", "bn+relu", "train"), (40.0, 36.0, 12.0, 3.0)),
        (Case((32, 64, 56, 56), "channels_last", "bn+relu", "train"), (30.0, 28.0, 26.0, 3.1)),
        (Case((128, 1024), "contiguous", "bn", "eval"), (0.2, None, 0.25, 0.05)),
        (Case((32, 64), "contiguous", "bn", "eval"), (0.0123, None, 0.00411, 0.002)),
        (Case((32, 64, 56, 56), "contiguous", "bn+relu", "train", memory="kept"), (20.0, None, 5.0, 3.0)),
    ]
    measurements = [
        Measurement(
            "time",
            {**case.setting(), "contender": name},
            tuple(1e-3 * t * jitter * (floor_copies(case) if name == "floor" else 1) for jitter in (1.0, 0.98, 1.06)),
            "s",
        )
        for case, times in cells
        for name, t in zip(("torch", "torch.compile", "batchnorm", "floor"), times, strict=True)
        if t is not None
    ]
    configuration = {
        "dtype": "float32",
        "rounds": 3,
        "threads": 2,
        "torch": "2.13.0",
        "path": "native kernel (AVX2, 2 threads)",
        "memory": "as the C library handles it",
        "left_out": ["flax: not installed (pip install flax)"],
    }
    machine = {"processor": "Some CPU", "cores": 2, "system": "Linux x86_64", "python": "3.11.7"}
    return RecordFile("bench", configuration, tuple(measurements), machine=machine)


def draw(record, **options):
    stream = io.StringIO()
    console = Console(file=stream, width=120, highlight=False, markup=False, **options)
    console.print(heading(record, 5), soft_wrap=True)
    for table in cell_tables(record.measurements):
        console.print()
        console.print(table)
    console.print()
    console.print(summary_table(summarize(record.measurements)))
    console.print(explanation(), soft_wrap=True)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def test_the_tables_look_as_they_did():
    """After a wanted change ``python tests/bench/test_bench_present.py`` rewrites the golden file."""
    assert draw(handmade_record()) == GOLDEN.read_text(encoding="utf-8")


def test_the_tables_come_from_the_record_file_alone():
    record = RecordFile.from_json(handmade_record().to_json())
    assert draw(record) == GOLDEN.read_text(encoding="utf-8")


def test_without_a_terminal_there_are_no_control_characters():
    assert all(character.isprintable() or character == "\n" for character in draw(handmade_record()))


def test_on_a_terminal_what_was_not_reached_is_red():
    assert "\x1b[31mno" in draw(handmade_record(), force_terminal=True, color_system="standard")


def test_bfloat16_says_what_the_parameters_are():
    record = handmade_record()
    record = RecordFile("bench", {**record.configuration, "dtype": "bfloat16"}, (), machine=record.machine)
    assert "bfloat16 activations with float32 parameters, as under autocast" in heading(record, 1)


@pytest.mark.parametrize(
    ("notes", "lines"),
    [
        ([], []),
        (["a failed on x: 1"], ["note: a failed on x: 1"]),
        (
            [
                "a failed on x: 1",
                "b failed on x: 2",
                "a failed on y: 1",
                "a failed on z: 1",
                "a disagrees on z",
            ],
            [
                "note: a failed on x: 1 (and 2 more such cells)",
                "note: b failed on x: 2",
                "note: a disagrees on z",
            ],
        ),
    ],
)
def test_notes_are_told_once_for_each_kind(notes, lines):
    assert note_lines(notes) == lines


if __name__ == "__main__":
    GOLDEN.write_text(draw(handmade_record()), encoding="utf-8")
