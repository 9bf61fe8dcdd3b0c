"""SyncBatchNorm on two and four real processes beside one process with the whole batch: see `sync_checks`."""

import pytest
import sync_checks


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", sync_checks.CHECKS)
def test_check(launched, name, ranks):
    found, _, output = launched[f"exact-{ranks}"]
    for rank in range(ranks):
        assert found[rank] is not None, output
        assert found[rank][name] == "", f"rank {rank}:\n{found[rank][name]}"


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ranks_end_well_and_in_silence(launched, ranks):
    _, code, output = launched[f"exact-{ranks}"]
    assert code == 0, output
    assert "terminate" not in output
    assert "Traceback" not in output
