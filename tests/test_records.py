import dataclasses
import json
import math

import pytest

from batchnorm.errors import BatchNormError
from batchnorm.records import Measurement, RecordFile, header_line, line, machine, read


@pytest.mark.parametrize(
    ("samples", "q", "expected"),
    [
        ((3.0,), 0.25, 3.0),
        ((1.0, 2.0, 3.0, 4.0, 5.0), 0.25, 2.0),
        ((5.0, 1.0, 4.0, 2.0, 3.0), 0.75, 4.0),
        ((0.0, 10.0), 0.25, 2.5),
        ((0.0, 10.0), 0.0, 0.0),
        ((0.0, 10.0), 1.0, 10.0),
        ((math.inf, math.inf), 0.5, math.inf),
        ((1.0, 2.0, math.inf), 0.5, 2.0),
    ],
)
def test_quantiles(samples, q, expected):
    assert Measurement("time", {}, samples).quantile(q) == expected


def test_the_median_of_nothing_is_nan():
    assert math.isnan(Measurement("time", {}, ()).median)


def test_records_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Measurement("time", {}, ()).unit = "s"


def test_json_both_ways():
    record = RecordFile(
        "bench",
        {"threads": 2, "shapes": ["32x64"], "dtype": "float32"},
        (
            Measurement("time", {"shape": "32x64", "pass": "train"}, (0.1, 0.25, 1e-9), "s"),
            Measurement("steps", {}, ()),
        ),
        {"rows": [{"what": "speed", "value": 2.5, "target": None, "reached": True}]},
    )
    assert RecordFile.from_json(record.to_json()) == record


def test_numbers_that_json_lacks_become_null_and_come_back_as_nan():
    text = RecordFile("bench", {}, (Measurement("time", {}, (math.nan, math.inf, 1.0)),), {"a": -math.inf}).to_json()
    assert json.loads(text)["measurements"][0]["samples"] == [None, None, 1.0]
    back = RecordFile.from_json(text)
    assert math.isnan(back.measurements[0].samples[0])
    assert back.measurements[0].samples[2] == 1.0
    assert back.summary["a"] is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        "{}",
        '{"format": 1}',
        '{"format": 1, "command": "a", "configuration": {}, "measurements": [3]}',
        '{"format": 1, "command": "a", "configuration": {}, "measurements": null}',
        '{"format": 1, "command": "a", "configuration": {}, "measurements": [], "surprise": 1}',
        '{"format": 1, "command": "a", "configuration": {}, "measurements": [{"quantity": "time"}]}',
    ],
)
def test_what_is_not_a_record_file_is_one_clear_error(text):
    with pytest.raises(BatchNormError, match="not a batchnorm record file"):
        RecordFile.from_json(text)


def test_another_format_is_named():
    with pytest.raises(BatchNormError, match="have format 2, this version reads 1"):
        RecordFile.from_json('{"format": 2}')


def test_write_ends_in_a_newline_and_reads_back(tmp_path):
    record = RecordFile("race", {"seeds": 3}, ())
    path = record.write(tmp_path / "race.json")
    assert path.read_text().endswith("}\n")
    assert RecordFile.from_json(path.read_text()) == record


def test_the_machine_is_named():
    facts = machine()
    assert facts["cores"] >= 1
    assert all(facts[name] for name in ("processor", "system", "python"))


HEADER = '{"format": 1, "command": "watch", "configuration": {"every": 50}, "machine": {"cores": 2}}\n'
MEAN = Measurement("mean", {"step": 0, "layer": "<b>ü</b>", "stack": "with BN"}, (1.5, 0.1))
LOSS = Measurement("training loss", {"step": 50, "layer": ""}, (2.25,), "nats")


def test_a_file_of_lines_is_read(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(HEADER + line(MEAN) + line(LOSS))
    records = read(path)
    assert records.measurements == (MEAN, LOSS)
    assert (records.command, records.configuration, records.machine) == ("watch", {"every": 50}, {"cores": 2})
    path.write_text(header_line(records) + line(MEAN))
    assert read(str(path)) == dataclasses.replace(records, measurements=(MEAN,))


def test_a_kill_at_any_byte_leaves_the_whole_lines(tmp_path):
    path = tmp_path / "run.jsonl"
    whole = (HEADER + line(MEAN) + line(LOSS)).encode()
    for end in range(len(HEADER) - 1, len(whole) + 1):
        path.write_bytes(whole[:end])
        complete = sum(end >= len(HEADER + line(MEAN) + rest) - 1 for rest in ("", line(LOSS)))
        assert read(path).measurements == (MEAN, LOSS)[:complete], end


def test_the_other_form_is_read(tmp_path):
    record = RecordFile("bench", {"threads": 2}, (MEAN, LOSS), {"rows": []})
    assert read(record.write(tmp_path / "bench.json")) == record
    (tmp_path / "flat.json").write_text(json.dumps(json.loads(record.to_json())))  # in one line
    assert read(tmp_path / "flat.json") == record


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not a batchnorm record file"),
        (HEADER.encode()[:20], "not a batchnorm record file"),
        (b"[1, 2]\n", "not a batchnorm record file"),
        (b"\xff\xfe\n", "not text"),
        (HEADER.replace("1", "7").encode(), "format 7"),
        ((HEADER + "{\n" + line(MEAN)).encode(), "line 2 is not a measurement"),
        ((HEADER + line(MEAN) + '{"quantity": "mean"}\n').encode(), "line 3 is not a measurement"),
    ],
)
def test_what_is_no_record_file_is_refused_by_name(tmp_path, content, problem):
    (tmp_path / "run.jsonl").write_bytes(content)
    with pytest.raises(BatchNormError, match=problem) as raised:
        read(tmp_path / "run.jsonl")
    assert raised.value.where.endswith("run.jsonl")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BatchNormError, match=r"nothing\.jsonl cannot be read"):
        read(tmp_path / "nothing.jsonl")
