import os
import stat

import pytest

from batchnorm.files import write_atomically


def test_writes_text_and_makes_the_folders(tmp_path):
    target = tmp_path / "a" / "b" / "result.json"
    assert write_atomically(target, "één\n") == target
    assert target.read_text(encoding="utf-8") == "één\n"


def test_replaces_an_old_file_and_leaves_nothing_beside_it(tmp_path):
    target = tmp_path / "result.json"
    write_atomically(target, "old")
    write_atomically(str(target), "new")
    assert target.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_an_interrupted_write_leaves_the_old_file_and_no_temporary(tmp_path, monkeypatch, failing):
    target = tmp_path / "result.json"
    target.write_text("old")

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, failing, interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(target, "new")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask to follow")
def test_the_file_has_the_permissions_of_any_new_file(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("")
    written = write_atomically(tmp_path / "written", "")
    assert stat.S_IMODE(written.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_text_that_cannot_be_encoded_leaves_nothing(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "bad", "\ud800")
    assert list(tmp_path.iterdir()) == []
