"""The documented example: four ranks train the race's network along the curve of one process."""

import json

import pytest
import ranks

EXAMPLE = ranks.HERE.parent.parent / "examples" / "sync_race.py"


@pytest.fixture(scope="module")
def differences(tmp_path_factory):
    folder = tmp_path_factory.mktemp("example")
    found = {}
    for precision, steps in (("--double", "12"), ("--check", "4")):  # the second is the default, float32
        path = folder / f"{precision}.json"
        _, code, output = ranks.launch(
            EXAMPLE, 4, folder, "--check", precision, "--steps", steps, "--json", str(path)
        )
        assert code == 0, output
        assert "4 ranks, 21 synchronised layers, 8 samples on each" in output
        found[precision] = json.loads(path.read_text())
    return found


def test_in_float64_the_curves_are_one(differences):
    assert 0 <= differences["--double"]["apart"][1] < 1e-10


def test_in_float32_they_differ_by_rounding(differences):
    assert differences["--check"]["apart"][0] < 1e-5
