"""Every command given inputs that are no files, or outputs that cannot be: one sentence, no traceback, nothing left."""

import json
import os
import resource
import socket
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running import is_one_sentence, run, start

from batchnorm import BatchNormError
from batchnorm.batches import load_batches
from batchnorm.checkpoints import load_state, save_state
from batchnorm.files import replacing, write_atomically
from batchnorm.records import Measurement, RecordFile

CALIBRATE = ("calibrate", "net.py:make", "--data", "data.npz", "--out")
FOLD = ("fold", "net.py:make", "--input", "4,3", "--out")
WRITERS = {
    "calibrate": (*CALIBRATE, "{}.pt"),
    "calibrate safetensors": (*CALIBRATE, "{}.safetensors"),
    "calibrate json": (*CALIBRATE, "o.pt", "--json", "{}"),
    "fold": (*FOLD, "{}.pt"),
    "fold program": (*FOLD, "{}.pt2"),
    "fold json": (*FOLD, "o.pt", "--json", "{}"),
    "check": ("check", "net.py:make", "--fix", "--out", "{}.pt"),
    "report": ("report", "records.json", "--out", "{}"),
    "bench": ("bench", "--quick", "--json", "{}"),
    "race": ("race", "--json", "{}"),
    "race folder": ("race", "--out", "{}"),
    "watch-demo": ("watch-demo", "--out", "{}"),
}
READERS = {
    "report": ("report", "{}"),
    "check": ("check", "{}.pt"),
    "check into": ("check", "net.py:make", "--checkpoint", "{}.pt"),
    "check data": ("check", "net.py:make", "--data", "{}.npy"),
    "check before": ("check", "net.py:make", "--before", "{}.safetensors"),
    "check code": ("check", "{}.py:make"),
    "check optimizer": ("check", "net.py:make", "--optimizer", "{}.py:make"),
    "calibrate": ("calibrate", "net.py:make", "--data", "{}.npz", "--out", "o.pt"),
    "calibrate into": ("calibrate", "net.py:make", "--checkpoint", "{}.bin", "--data", "data.npz", "--out", "o.pt"),
    "fold": ("fold", "net.py:make", "--data", "{}.safetensors", "--out", "o.pt"),
}


def pipe(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def plug(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(path))


def loop(path):
    path.symlink_to(path.name)


def in_proc(path):
    path.symlink_to("/proc/self/mem")


def folder_there(path):
    path.mkdir()


def noise(path):
    path.write_bytes(np.random.default_rng(0).bytes(500))


def filled(arguments, name):
    return [argument.replace("{}", name) for argument in arguments]


def target(arguments, name):
    return next(a.replace("{}", name) for a in arguments if "{}" in a).partition(":")[0]


@pytest.fixture
def records(folder):
    RecordFile("fold", {}, ()).write(folder / "records.json")
    return folder


@pytest.mark.parametrize("kind", [pipe, device, plug, loop, in_proc, folder_there, noise])
@pytest.mark.parametrize("reader", READERS)
def test_inputs_that_are_no_files_end_in_a_sentence(capsys, folder, reader, kind):
    kind(folder / target(READERS[reader], "odd"))
    before = sorted(os.listdir(folder))
    assert run(*filled(READERS[reader], "odd")) == 2
    assert is_one_sentence(capsys.readouterr().err)
    assert [name for name in sorted(os.listdir(folder)) if name != "__pycache__"] == before


@pytest.mark.parametrize("kind", [pipe, device, plug])
@pytest.mark.parametrize("writer", WRITERS)
def test_devices_and_pipes_are_not_replaced(capsys, records, writer, kind):
    path = records / target(WRITERS[writer], "odd")
    kind(path)
    before = path.lstat()
    assert run(*filled(WRITERS[writer], "odd")) == 2
    assert is_one_sentence(capsys.readouterr().err)
    now = path.lstat()
    assert (now.st_ino, now.st_mode) == (before.st_ino, before.st_mode)


@pytest.mark.parametrize("link", ["/dev/stdout", "/proc/self/fd/1", "/dev/fd/1"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_stream_that_is_a_file_keeps_its_link(records, writer, link):
    """As with ``--out /dev/stdout > page.html``, where the stream is a regular file; the link stands in for /dev's."""
    (records / target(WRITERS[writer], "stream")).symlink_to(link)
    with open(records / "page.html", "w") as page:
        process = start(*filled(WRITERS[writer], "stream"), stdout=page)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert is_one_sentence(err), err
    assert "a stream of a process, not a file" in err or "a folder" in err or "cannot be written" in err
    assert os.readlink(records / target(WRITERS[writer], "stream")) == link


@pytest.mark.parametrize("place", ["/proc/odd/o", "/proc/odd", "net.py/odd", "x" * 300, "/dev/full/o"])
@pytest.mark.parametrize("writer", WRITERS)
def test_places_where_no_file_can_be(capsys, records, writer, place):
    before = sorted(os.listdir(records))
    assert run(*filled(WRITERS[writer], place)) == 2
    shown = capsys.readouterr()
    assert is_one_sentence(shown.err)
    assert [name for name in sorted(os.listdir(records)) if name not in ("__pycache__", "o.pt")] == before


def small_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


@pytest.mark.parametrize("writer", [w for w in WRITERS if w.startswith(("calibrate", "fold", "check", "report"))])
def test_a_full_disk_ends_in_a_sentence_and_leaves_nothing(records, writer):
    big = (Measurement("m", {"layer": "x" * 50}, (1.0,)),) * 100
    RecordFile("fold", {}, big).write(records / "records.json")
    (records / "net.py").write_text((records / "net.py").read_text().replace("64", "600"))
    process = start(*filled(WRITERS[writer], "out"), preexec_fn=small_disk)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert is_one_sentence(err), err
    assert "File too large" in err or "file too large" in err
    left = set(os.listdir(records)) - {"net.py", "data.npz", "model.pt", "records.json", "__pycache__"}
    assert left <= {"o.pt"}, left


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("arguments", [("rules",), ("rules", "--format", "json"), ("explain", "BN101"), ("--help",)])
def test_streams_that_take_nothing(arguments, stream):
    with open("/dev/full", "w") as full:
        process = start(*arguments, **{stream: full})
        out, err = process.communicate(timeout=60)
    if stream == "stdout":
        assert process.returncode == 2
        assert is_one_sentence(err), err
        assert "no space left" in err
    else:
        assert process.returncode == 0
        assert out


@pytest.mark.parametrize("arguments", [("rules",), ("explain", "BN101"), ("rules", "--format", "json")])
def test_a_reader_that_goes_away_is_met_in_silence(arguments):
    process = start(*arguments)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) in (1, 2)
    assert err == ""


# ---- archives and tensors that are larger than they look


def bomb(path, name="x.npy"):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        entry = archive.open(name, "w", force_zip64=True)
        for _ in range(1100):
            entry.write(bytes(1 << 20))
        entry.close()


@pytest.fixture(scope="module")
def bombs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bombs")
    bomb(folder / "bomb.npz")
    os.link(folder / "bomb.npz", folder / "bomb.pt")
    return folder


@pytest.mark.parametrize("name", ["bomb.npz", "bomb.pt"])
def test_an_archive_that_expands_is_refused_unread(capsys, folder, bombs, name):
    arguments = ("--data", bombs / name) if name.endswith("npz") else ("--checkpoint", bombs / name)
    assert run("check", "net.py:make", *arguments) == 2
    err = capsys.readouterr().err
    assert is_one_sentence(err)
    assert "would expand to 1.07 GiB; it was not read" in err


def test_archives_that_shrink_well_are_read(tmp_path):
    np.savez_compressed(tmp_path / "zeros.npz", x=np.zeros((4096, 100), "f4"))  # by a factor of 1000, but small
    assert len(load_batches(str(tmp_path / "zeros.npz"))) == 64


def test_tensors_that_repeat_a_number(tmp_path):
    torch.save({"model": {"w": torch.zeros(1).expand(10**13)}}, tmp_path / "wide.pt")
    with pytest.raises(BatchNormError, match=r"wide.pt: model.w repeats 4 bytes until it has 36.4 TiB"):
        load_state(tmp_path / "wide.pt")
    torch.save({"w": torch.zeros(1).expand(1000)}, tmp_path / "mask.pt")
    assert load_state(tmp_path / "mask.pt")["w"].shape == (1000,)


def test_dictionaries_in_dictionaries(tmp_path):
    found = {"w": torch.ones(1)}
    for _ in range(60):
        found = {"p": found, "q": found}
    torch.save(found, tmp_path / "laughs.pt")  # 2 to the 60th, if every way is gone
    with pytest.raises(BatchNormError, match="not clear which is the model"):
        load_state(tmp_path / "laughs.pt")
    found = {}
    found["model"] = found
    torch.save(found, tmp_path / "itself.pt")
    with pytest.raises(BatchNormError, match="not clear which is the model"):
        load_state(tmp_path / "itself.pt")


# ---- records of any content


def values(depth=3):
    leaf = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just(10**400), st.just("1" * 9)
    )
    return st.recursive(
        leaf,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    )


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def exchanged(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = exchanged(value[path[0]], path[1:], new)
    return copy


def examples():
    """Records of every command, small."""
    from batchnorm.lab.options import Options
    from batchnorm.lab.records import to_records
    from batchnorm.lab.summary import Result

    setting = {"step": 1, "layer": "a", "stack": "with BN", "low": -1.0, "high": 1.0, "under": 0, "over": 1}
    bars = Measurement("histogram", setting, (1.0, 2.0))
    loss = Measurement("training loss", {"step": 1, "layer": ""}, (2.0,))
    change = {"path": "a", "what": "b", "before": "c", "after": "d"}
    certificate = {"absolute": 1.0, "relative": 0.5, "tolerance": 1.0}
    finding = {"code": "BN101", "name": "n", "severity": "error", "path": "p", "sentence": "s", "numbers": {"a": 1}}
    cell = {"shape": "8x8", "layout": "contiguous", "operation": "bn", "pass": "train", "contender": "torch"}
    found = [
        RecordFile("watch", {"flat_ends": [-4.6, 4.6]}, (bars, loss), {}),
        RecordFile("fold", {}, (loss,), {"changes": [change], "left": {"a": "b"}, "certificate": certificate}),
        RecordFile("calibrate", {}, (loss,), {"report": {"changes": [change], "left": {}}}),
        RecordFile("bench", {"threads": 2}, (Measurement("time", cell, (1.0, 2.0), "ms"),), {"rows": [], "notes": []}),
        to_records(Result(Options(), (), 450, 10), threads=2),
    ]
    return [json.loads(each.to_json()) for each in found] + [{"findings": [finding], "skipped": {"BN1": "x"}}]


EXAMPLES = examples()


@given(st.data())
@settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_records_with_any_value_in_any_field(capsys, tmp_path, data):
    records = data.draw(st.sampled_from(EXAMPLES))
    path = data.draw(st.sampled_from(list(places(records))))
    text = json.dumps(exchanged(records, path, data.draw(values())))
    (tmp_path / "records.json").write_text(text)
    capsys.readouterr()
    code = run("report", tmp_path / "records.json", "--out", tmp_path / "page.html")
    err = capsys.readouterr().err
    assert code == 0 or (code == 2 and is_one_sentence(err)), (code, err, text)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        (
            '{"format": 1, "command": "race", "configuration": {"a": %s}, "measurements": []}' % ("[" * 90 + "]" * 90),
            "deeply",
        ),
        (
            '{"format": 1, "command": "race", "configuration": {"a": %s}, "measurements": []}' % ("9" * 5000),
            "4300 digits",
        ),
        ('{"format": 1, "command": "race", "configuration": {"a": %s}, "measurements": []}' % ("9" * 500), "64 bits"),
        ('{"format": 1, "command": "race", "configuration": {}, "measurements": []}', "'race' cannot be drawn"),
        ('{"format": 1, "command": ["race"], "configuration": {}, "measurements": []}', "command is a list, not a str"),
        (
            '{"format": 1, "command": "a", "configuration": [], "measurements": []}',
            "configuration is a list, not a dict",
        ),
        ('{"format": true, "command": "a", "configuration": {}, "measurements": []}', "format is a bool, not an int"),
        ('{"findings": [3]}', "finding 1 is an int, not a dictionary"),
        ('{"findings": [{"code": 1}]}', "finding 1 has no name"),
    ],
)
def test_records_that_were_never_written(capsys, folder, content, words):
    (folder / "odd.json").write_text(content)
    assert run("report", "odd.json") == 2
    err = capsys.readouterr().err
    assert is_one_sentence(err)
    assert words in err
    assert not (folder / "report.html").exists()


def test_a_sparse_file_of_terabytes(capsys, folder):
    with open(folder / "wide.json", "wb") as stream:
        stream.truncate(1 << 40)
    import batchnorm.files

    most, batchnorm.files.LARGEST = batchnorm.files.LARGEST, 1 << 20
    try:
        assert run("report", "wide.json") == 2
    finally:
        batchnorm.files.LARGEST = most
    assert "too large to be read at once" in capsys.readouterr().err


# ---- the functions below


def test_writes_keep_what_is_no_file(tmp_path):
    for make in (pipe, device):
        path = tmp_path / f"{make.__name__}.pt"
        make(path)
        for write in (lambda p: write_atomically(p, "x"), lambda p: save_state({"w": torch.ones(1)}, p)):
            with pytest.raises(BatchNormError, match=r"\.pt is a (named pipe|device), not a file; name a file"):
                write(path)
        assert [each.name for each in tmp_path.iterdir()] == [path.name]
        path.unlink()


def test_an_error_of_the_system_is_one_sentence(tmp_path):
    words = r"o\.txt cannot be written \(No space left on device\)"
    with pytest.raises(BatchNormError, match=words), replacing(tmp_path / "o.txt"):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "odd.pt"),
        ("check", "net.py:make", "--checkpoint", "odd.pt"),
        (*CALIBRATE[:2], "--data", "odd.pt", "--out", "o.pt"),
    ],
    ids=["alone", "into", "data"],
)
def test_nested_tensors_have_no_shape(capsys, folder, arguments):
    torch.save({"0.weight": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])}, "odd.pt")
    assert run(*arguments) == 2
    err = capsys.readouterr().err
    assert is_one_sentence(err)
    assert "odd.pt: 0.weight is a nested tensor" in err
