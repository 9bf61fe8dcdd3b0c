"""The documented example as it is typed; its training in float64 is among the checks of `convert_checks`."""

import json

import pytest
import ranks


@pytest.mark.slow
def test_in_float32_they_part_as_far_as_rounding_drives_them(tmp_path):
    path = tmp_path / "example.json"
    script = ranks.HERE.parent.parent / "examples" / "sync_race.py"
    _, code, output = ranks.launch(script, 4, tmp_path, "--check", "--json", str(path), timeout=600)
    assert code == 0, output
    assert "4 ranks, 21 synchronised layers, 8 samples on each" in output
    found = json.loads(path.read_text())
    assert found["apart"][0] < 1e-5
    assert found["apart"][1] < 4 * found["noise"][1]
