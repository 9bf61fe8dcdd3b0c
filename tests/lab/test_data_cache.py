"""The cache of decoded images: used while it is right, made again where it is not, harmless to others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_files import pictures
from test_idx import packed, written

from batchnorm.errors import BatchNormError
from batchnorm.lab.data import cache as caches
from batchnorm.lab.data import idx, imagefolder, mnist
from batchnorm.lab.data.sets import load


@pytest.fixture
def own(tmp_path):
    written(tmp_path / "own")
    return tmp_path / "own"


@pytest.fixture
def decoded(monkeypatch):
    """The folders that were decoded."""
    folders, read = [], mnist.read

    def counted(place):
        folders.append(place)
        return read(place)

    monkeypatch.setattr(mnist, "read", counted)
    return folders


def files(cache):
    return sorted(path for path in cache.rglob("*") if path.is_file())


def same(a, b):
    return a.checksum == b.checksum and all(
        np.array_equal(getattr(getattr(a, part), what), getattr(getattr(b, part), what))
        for part in ("train", "test")
        for what in ("images", "labels")
    )


def test_the_second_time_nothing_is_decoded_and_no_source_is_opened(own, cache, decoded, monkeypatch):
    first = load("idx", own)
    monkeypatch.setattr(idx, "read_bytes", lambda path: pytest.fail("a source was read"))
    monkeypatch.setattr(caches, "sha256", lambda path: pytest.fail("a source was hashed"))
    second = load("idx", own)
    assert len(decoded) == 1
    assert same(first, second)
    for part in (first.train, first.test, second.train, second.test):
        assert isinstance(part.images, np.memmap)
        assert not part.images.flags.writeable
    assert [path.suffix for path in files(cache)] == [".json"] + [".npy"] * 4


def test_another_way_to_write_the_folder_finds_the_same_cache(own, decoded, monkeypatch):
    load("idx", own)
    monkeypatch.chdir(own.parent)
    (own.parent / "link").symlink_to(own)
    for name in ("own", "./own/", "link"):
        assert load("idx", name).classes
    assert len(decoded) == 1


def test_changed_sources_are_decoded_again_and_the_old_arrays_removed(own, cache, decoded):
    before = load("idx", own)
    (own / "t10k-labels-idx1-ubyte").write_bytes(packed(np.ones(12, np.uint8)))
    after = load("idx", own)
    assert len(decoded) == 2
    assert after.test.labels.tolist() == [1] * 12
    assert before.test.labels.tolist() != [1] * 12  # still mapped
    assert len(files(cache)) == 5


def test_a_change_that_keeps_the_size_and_the_time_of_another_file_is_seen(own, decoded):
    load("idx", own)
    file = own / "t10k-labels-idx1-ubyte"
    file.write_bytes(packed(np.ones(12, np.uint8)))
    about = file.stat()
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    assert load("idx", own).test.labels.tolist() == [1] * 12


def test_sources_that_were_only_touched_are_not_decoded_but_hashed_once(own, decoded, monkeypatch):
    first = load("idx", own)
    hashed, sha256 = [], caches.sha256
    monkeypatch.setattr(caches, "sha256", lambda path: hashed.append(path) or sha256(path))
    for path in own.iterdir():
        os.utime(path)
    assert same(first, load("idx", own))
    assert same(first, load("idx", own))
    assert len(decoded) == 1
    assert len(hashed) == 4


def test_sources_that_change_while_they_are_decoded_are_not_kept(own, cache, monkeypatch):
    read = mnist.read

    def slowly(place):
        found = read(place)
        (own / "t10k-labels-idx1-ubyte").write_bytes(packed(np.ones(12, np.uint8)))
        return found

    monkeypatch.setattr(mnist, "read", slowly)
    assert load("idx", own).test.labels.tolist() != [1] * 12
    assert not files(cache)
    monkeypatch.setattr(mnist, "read", read)
    assert load("idx", own).test.labels.tolist() == [1] * 12


def garbled(path):
    content = bytearray(path.read_bytes())
    content[-2] ^= 64
    path.write_bytes(content)


def pickled(path):
    with open(path, "wb") as stream:
        np.save(stream, np.array([{}]), allow_pickle=True)


def piped(path):
    path.unlink()
    os.mkfifo(path)


DAMAGE = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "short": lambda path: path.write_bytes(path.read_bytes()[:9]),
    "empty": lambda path: path.write_bytes(b""),
    "garbled": garbled,
    "gone": lambda path: path.unlink(),
    "pickle": pickled,
    "fifo": piped,
    "text": lambda path: path.write_text("[1, 2"),
    "list": lambda path: path.write_text("[]"),
    "deep": lambda path: path.write_text("[" * 100_000),
    "folder": lambda path: path.unlink() or path.mkdir(),
}


# A manifest in which one letter differs may still say the same.
@pytest.mark.parametrize(("damage", "number"), [(d, n) for d in DAMAGE for n in range(5) if n or d != "garbled"])
def test_a_damaged_cache_is_made_again(own, cache, decoded, damage, number):
    first = load("idx", own)
    kept = (first.train.images.copy(), first.test.labels.copy())
    checksum = first.checksum
    del first  # a mapped file that is cut must not be read any more
    path = files(cache)[number]
    DAMAGE[damage](path)
    for _ in range(2):
        again = load("idx", own)
        assert again.checksum == checksum
        assert np.array_equal(again.train.images, kept[0])
        assert np.array_equal(again.test.labels, kept[1])
    assert len(decoded) == (3 if damage in ("folder", "fifo") else 2)  # which are not replaced


@pytest.mark.parametrize(
    "change",
    [
        {"format": 0},
        {"checksum": "../../../../etc/passwd"},
        {"checksum": None},
        {"classes": []},
        {"classes": 3},
        {"sources": []},
        {"sources": [{"file": "x"}] * 4},
        {"sources": None},
    ],
)
def test_a_manifest_that_is_not_ours_is_not_believed(own, cache, decoded, change):
    load("idx", own)
    manifest = files(cache)[0]
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **change}))
    assert load("idx", own).classes == tuple("0123456789")
    assert len(decoded) == 2


@pytest.mark.parametrize("place", ["/dev/null/none", "/proc/none", "file"])
def test_where_no_cache_can_be_the_images_stay_in_memory(own, tmp_path, monkeypatch, decoded, capfd, place):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("BATCHNORM_CACHE", str(tmp_path / place))
    for number in (1, 2):
        data = load("idx", own)
        assert not isinstance(data.train.images, np.memmap)
        assert len(decoded) == number
    assert capfd.readouterr() == ("", "")


def test_a_full_disk_means_no_cache(own, cache, monkeypatch):
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        data = load("idx", own)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(data.train) == 30
    assert not files(cache)


def test_the_place_of_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("BATCHNORM_CACHE", str(tmp_path / "a"))
    assert caches.root() == tmp_path / "a"
    monkeypatch.delenv("BATCHNORM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert caches.root() == tmp_path / "batchnorm"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unset in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert caches.root() == tmp_path / "home" / ".cache" / "batchnorm"


def test_sizes_of_images_are_kept_apart(tmp_path, monkeypatch):
    pytest.importorskip("PIL")
    pictures(tmp_path)
    assert [load("imagefolder", tmp_path, size=size).train.images.shape[-1] for size in (4, 6)] == [4, 6]
    with monkeypatch.context() as without:
        without.setattr(imagefolder, "decode", lambda path: pytest.fail("an image was decoded again"))
        assert [load("imagefolder", tmp_path, size=size).train.images.shape[-1] for size in (4, 6)] == [4, 6]
    (tmp_path / "val" / "dog" / "1.png").unlink()
    assert len(load("imagefolder", tmp_path, size=4).test) == 3


LOADS = """
import sys
from batchnorm.lab.data.sets import load

print("ready", flush=True)
sys.stdin.readline()
for _ in range(20):
    data = load("idx", sys.argv[1])
    print(data.checksum, len(data.train), int(data.train.images[-1].sum()))
"""


@pytest.mark.parametrize("damage", ["none", "garbled"])
def test_two_processes_at_once_do_no_harm(own, cache, damage):
    if damage == "garbled":
        load("idx", own)
        garbled(next(path for path in files(cache) if "train-images" in path.name))
    command = [sys.executable, "-c", LOADS, str(own)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, env=environment, **pipes) for _ in range(3)]
    assert [process.stdout.readline() for process in running] == ["ready\n"] * 3
    for process in running:
        process.stdin.write("go\n")
        process.stdin.flush()
    done = [process.communicate(timeout=60) for process in running]
    assert [error for _, error in done] == [""] * 3
    data = load("idx", own)
    line = f"{data.checksum} 30 {int(data.train.images[-1].sum())}\n"
    assert [output for output, _ in done] == [line * 20] * 3
    assert len(files(cache)) == 5
    assert not list(cache.rglob(".*"))


def test_an_interrupted_build_leaves_a_cache_that_is_not_used(own, cache, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(caches, "write_manifest", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load("idx", own)
    assert len(files(cache)) == 4  # arrays without a manifest
    assert load("idx", own).classes
    assert len(files(cache)) == 5


def test_no_pickle_is_read_anywhere():
    for path in Path(caches.__file__).parent.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "import pickle" not in text
        assert "allow_pickle=True" not in text


def test_errors_of_the_sources_are_not_hidden_by_the_cache(own):
    load("idx", own)
    file = own / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-1])
    for _ in range(2):
        with pytest.raises(BatchNormError, match="train-images-idx3-ubyte: it is truncated"):
            load("idx", own)
