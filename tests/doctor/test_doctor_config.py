"""``[tool.batchnorm]``: found from a folder upwards, read strictly, and every mistake is one sentence."""

import sys

import pytest

from batchnorm.doctor import config
from batchnorm.doctor.config import Settings, find_settings, read_settings
from batchnorm.errors import BatchNormError

if sys.version_info < (3, 11):
    pytest.importorskip("tomli")

WHOLE = """
[project]
name = "mine"

[tool.batchnorm]
select = ["BN1", "stale-statistics"]
ignore = ["BN101"]
fail-on = "error"
format = "github"

[tool.batchnorm.per-module-ignores]
"backbone.*" = ["BN101", "BN2"]
"""


def written(folder, text):
    file = folder / "pyproject.toml"
    file.write_text(text)
    return file


def test_every_key(tmp_path):
    assert read_settings(written(tmp_path, WHOLE)) == Settings(
        ("BN1", "stale-statistics"), ("BN101",), "error", "github", {"backbone.*": ("BN101", "BN2")}
    )


def test_the_nearest_file_with_a_table_counts(tmp_path):
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    written(tmp_path, WHOLE)
    written(tmp_path / "a", '[tool.other]\nname = "batchnorm"\n')
    assert find_settings(deep).format == "github"
    written(deep, "[tool.batchnorm]\n")
    assert find_settings(deep) == Settings()
    assert find_settings(tmp_path / "a").fail_on == "error"


def test_the_current_folder_is_where_it_begins(tmp_path, monkeypatch):
    written(tmp_path, WHOLE)
    monkeypatch.chdir(tmp_path)
    assert find_settings().fail_on == "error"


def test_no_table(tmp_path):
    assert read_settings(written(tmp_path, "[project]\nname = 'x'\n")) is None
    assert read_settings(written(tmp_path, "dependencies = ['batchnorm']\n")) is None
    assert read_settings(written(tmp_path, "tool = 3\nname = 'batchnorm'\n")) is None
    assert read_settings(written(tmp_path, "this is [not TOML")) is None  # not meant for us


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[tool.batchnorm]\nselct = ["BN1"]', "there is no key 'selct'; did you mean 'select'?"),
        ('[tool.batchnorm]\nfail_on = "error"', "there is no key 'fail_on'; did you mean 'fail-on'?"),
        ("[tool.batchnorm]\nzzz = 1", "there is no key 'zzz'; the keys are select, ignore, fail-on, format"),
        ('[tool.batchnorm]\nselect = "BN1"', "select is 'BN1'; write a list of rules"),
        ("[tool.batchnorm]\nignore = [1]", r"ignore is \[1\]; write a list of rules"),
        ('[tool.batchnorm]\nignore = ["BN999"]', "ignore: there is no rule 'BN999'"),
        ('[tool.batchnorm]\nfail-on = "warnings"', "fail-on is 'warnings'; give one of error, warning, advice, never"),
        ("[tool.batchnorm]\nformat = 3", "format is 3; give one of text, json, sarif, github"),
        ("[tool.batchnorm]\nper-module-ignores = []", "per-module-ignores is not a table"),
        ('[tool.batchnorm.per-module-ignores]\n"a.*" = "BN1"', r"per-module-ignores: a\.\* is 'BN1'; write a list"),
        ("[tool]\nbatchnorm = 3", "this is not a table"),
        ("[tool.batchnorm]\nselect = [", "pyproject.toml is not TOML"),
    ],
)
def test_mistakes(tmp_path, text, sentence):
    with pytest.raises(BatchNormError, match=sentence) as caught:
        read_settings(written(tmp_path, text))
    assert "pyproject.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "pyproject.toml").write_bytes(b"[tool.batchnorm]\n\xff\xfe")
    with pytest.raises(BatchNormError, match="cannot be read"):
        find_settings(tmp_path)


def test_without_a_parser_a_table_is_not_passed_over_in_silence(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "import_module", lambda name: (_ for _ in ()).throw(ModuleNotFoundError(name)))
    assert read_settings(written(tmp_path, "dependencies = ['batchnorm']\n")) is None
    settings = read_settings(written(tmp_path, WHOLE))
    assert settings.select == ()
    assert "has [tool.batchnorm], which is read from Python 3.11 on" in settings.note


def test_the_formats_are_those_that_are_written():
    from batchnorm.doctor.formats import FORMATS

    assert tuple(FORMATS) == config.FORMATS
