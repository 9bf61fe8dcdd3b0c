"""``bn.testing.assert_healthy``: passes what is healthy, and says what is not."""

import pytest
import torch
from torch import nn

import batchnorm as bn

EXAMPLE = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def sick():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    model[1].running_mean.fill_(-9.0)  # of other data
    model[1].num_batches_tracked.fill_(100)
    return model


def shifted():
    return [EXAMPLE.repeat(8, 1, 1, 1) * (5 + n) + 8 + n for n in range(4)]


def test_advice_passes_and_is_returned():
    findings = bn.testing.assert_healthy(sick(), EXAMPLE, select=["BN101"])
    assert findings.codes == ("BN101",)


def test_advice_fails_where_it_is_asked_to():
    with pytest.raises(AssertionError) as caught:
        bn.testing.assert_healthy(sick(), EXAMPLE, select=["BN101"], fail_on="advice")
    lines = str(caught.value).splitlines()
    assert lines[0] == "the model is not healthy: 1 advice"
    assert lines[1].startswith("  advice   0: BN101 bias-before-norm: its bias of 8 values does nothing")
    assert "bn.drop_bias" in lines[2]


def test_warnings_fail():
    with pytest.raises(AssertionError, match="BN201 stale-statistics"):
        bn.testing.assert_healthy(sick(), data=shifted(), select=["BN1", "BN201"], ignore=["BN101"])
    with pytest.raises(AssertionError) as caught:
        bn.testing.assert_healthy(sick(), data=shifted(), select=["BN101", "BN201"])
    assert "BN101" not in str(caught.value)  # which does not fail


def test_what_is_ignored():
    arguments = {"data": shifted(), "select": ["BN201"]}
    assert not bn.testing.assert_healthy(sick(), **arguments, per_module_ignores={"1": ["stale-statistics"]})
    assert not bn.testing.assert_healthy(sick(), data=shifted(), select=["BN2"], ignore=["BN2"])
    assert bn.testing.assert_healthy(sick(), **arguments, fail_on="error").codes == ("BN201",)
    for other in ({"0": ["BN201"]}, {"1": ["BN101"]}, {"1": []}):
        with pytest.raises(AssertionError):
            bn.testing.assert_healthy(sick(), **arguments, per_module_ignores=other)


def test_a_checkpoint():
    assert not bn.testing.assert_healthy(sick().state_dict(), select=["BN101"])


def test_a_word_that_is_no_severity():
    with pytest.raises(bn.BatchNormError, match="'warnings' is not a severity; give one of error, warning, advice"):
        bn.testing.assert_healthy(sick(), fail_on="warnings")


def test_a_model_that_raises_is_no_assertion():
    with pytest.raises(bn.BatchNormError, match="the model raised"):
        bn.testing.assert_healthy(sick(), torch.randn(4, 5, 6, 6))


def test_pytest_shows_the_line_of_the_test():
    with pytest.raises(AssertionError) as caught:
        bn.testing.assert_healthy(sick(), EXAMPLE, select=["BN101"], fail_on="advice")
    assert [entry.ishidden(caught) for entry in caught.traceback] == [False, True]
