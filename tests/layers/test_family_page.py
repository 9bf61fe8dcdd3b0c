"""The page about the bricks: it is what the code gives now, and what it says is found out, not claimed."""

from pathlib import Path

import pytest
import torch
from family_cases import NAMES
from torch import nn

from batchnorm.bench import bricks_page
from batchnorm.layers.family import BRICKS

PAGE = Path(__file__).parents[2] / "docs" / "bricks.md"


def test_committed_page_is_up_to_date(capsys):
    if not PAGE.exists():
        pytest.skip("the documentation is not beside the tests")
    assert bricks_page.main(["--check", str(PAGE)]) == 0, capsys.readouterr().out
    text = PAGE.read_text()
    for brick in BRICKS.values():
        if brick.present():
            assert text.count(f"\n| `{brick.name}` |") == 3  # what it is, what it keeps, what it costs
    assert "Measured on" in text
    assert f"torch {torch.__version__.split('.')[0]}." in text


def test_check_finds_a_changed_page(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(bricks_page.write_page({}, "a machine"))
    assert bricks_page.main(["--check", str(page)]) == 0
    page.write_text(page.read_text() + "| `batch` | 7.00 | 7.00 |\n")  # the times are the machine's own
    assert bricks_page.main(["--check", str(page)]) == 0
    page.write_text(page.read_text().replace("| no |", "| yes |", 1))
    assert bricks_page.main(["--check", str(page)]) == 1
    assert "make it with python -m batchnorm.bench.bricks_page" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_measured_facts_agree_with_the_table(name):
    row, facts = BRICKS[name], bricks_page.measure_facts(name)
    assert facts["in training"] == ("yes" if row.depends == "training" else "no")
    assert facts["in evaluation"] == "no"
    if row.depends == "never":
        assert facts["train = eval"] == "yes"
    for key in row.parameters:
        assert key in facts["learns"]
    for key in row.state:
        assert key in facts["keeps"]


def test_dependence_is_really_tried():
    x = torch.randn(8, 16, 5, 5)
    other = torch.cat([x[:1], torch.randn(7, 16, 5, 5)])
    assert bricks_page._depends(nn.BatchNorm2d(16), x, other)
    assert not bricks_page._depends(nn.BatchNorm2d(16).eval(), x, other)


def test_quartiles_of_two_ratios_lie_between_them(monkeypatch):
    def rounds(steps, count):
        return {name: (1.0, 1.0) if not name else (1.0, 9.0) for name in steps}

    monkeypatch.setattr(bricks_page, "alternate", rounds)
    for by_layout in bricks_page.measure_costs(rounds=2, shape=(2, 4, 3, 3)).values():
        assert set(by_layout.values()) == {(5.0, 3.0, 7.0)}


def test_costs_are_ratios_to_torch():
    costs = bricks_page.measure_costs(rounds=2, shape=(2, 4, 3, 3))
    assert set(costs) == {name for name, brick in BRICKS.items() if brick.present()}
    assert all(min(cost) > 0 for by_layout in costs.values() for cost in by_layout.values())
    costs["none"] = {"contiguous": (0.5, 0.25, 0.75), "channels_last": (2.0, 1.0, 3.0)}
    page = bricks_page.write_page(costs, "a machine of ours.")
    assert "| `none` | 0.50 (0.25-0.75) | 2.00 (1.00-3.00) |" in page
    assert "Measured on a machine of ours." in page
    assert "torch" in bricks_page.describe_circumstances()
