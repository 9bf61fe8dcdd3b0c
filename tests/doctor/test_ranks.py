"""BN401, BN402 and BN403 on real processes: one start for all of them."""

import pathlib

import doctor_rank_checks
import pytest

from distributed import ranks

HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    return ranks.launch(HERE / "doctor_rank_checks.py", 3, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", [check.__name__ for check in doctor_rank_checks.CHECKS])
def test_on_three_ranks(launched, check):
    found, _, output = launched
    for rank in range(3):
        assert found[rank] is not None, output
        assert found[rank].get(check, output) == "", f"rank {rank}: {found[rank].get(check, output)}"
