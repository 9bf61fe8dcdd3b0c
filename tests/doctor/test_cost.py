"""How often a check runs the model on many batches, and that what it finds does not depend on it."""

import pytest
import torch
from doctor_cases import large_mean, padded_input, stale_statistics
from torch import nn

import batchnorm as bn
from batchnorm.doctor.subject import LABELLED, PARTS, Subject, spread
from batchnorm.doctor.tallies import FED, SHARED, shared

NUMBER, SIZE = 60, 32


class Counting(nn.Sequential):
    """Counts its calls and those of its copies."""

    calls = 0

    def forward(self, x):
        Counting.calls += 1
        return super().forward(x)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    Counting.calls = 0


def batches():
    x, labels = stale_statistics.blobs(NUMBER * SIZE)
    return list(zip(x.split(SIZE), labels.split(SIZE), strict=True))


def classifier(calibrated):
    model = Counting(*stale_statistics.trained(0.001)[0])
    return bn.calibrate(model, batches())[0] if calibrated else model


def test_a_sound_model_runs_once_for_the_layers_and_once_for_their_statistics():
    model = classifier(calibrated=True)
    Counting.calls = 0
    findings = bn.check(model, data=batches())
    assert findings.codes == ()
    assert not findings.failed
    # And a few for the dataflow and the nonlinearities; a pass over all for every rule would be 6 * NUMBER.
    assert Counting.calls <= FED + -(-LABELLED // SIZE) + 10 < NUMBER


def test_stale_statistics_take_two_more_passes_over_the_sample():
    model = classifier(calibrated=False)
    Counting.calls = 0
    (finding,) = bn.check(model, data=batches(), select=["BN201"])
    sample = -(-LABELLED // SIZE)
    assert Counting.calls <= 3 * sample + 1
    assert finding.severity == "error"
    assert finding.numbers["samples"] == sample * SIZE
    assert finding.numbers["accuracy_calibrated"] > 0.95


def test_the_sample_is_spread_and_large_enough():
    data = batches()
    with_labels, without = Subject(nn.ReLU(), data=data), Subject(nn.ReLU(), data=[x for x, _ in data])
    for subject, enough in ((with_labels, 800), (without, 512)):
        assert sum(len(subject._input(batch)) for batch in subject.sample) >= enough
        assert subject.sample[0] is subject.batches[0]
        assert subject.sample[-1] is subject.batches[-1]
    assert len(Subject(nn.ReLU(), data=list(torch.randn(40, 1000, 1))).sample) == PARTS
    few = Subject(nn.ReLU(), data=data[:5])
    assert few.sample == few.batches
    assert [spread(list(range(9)), most) for most in (1, 2, 9, 12)] == [[0], [0, 8], [*range(9)], [*range(9)]]
    odd = Subject(nn.ReLU(), data=[{"x": torch.tensor(1.0)}] * 30)
    assert len(odd.sample) == 30  # the number of examples is unknown


@pytest.mark.parametrize(
    ("code", "model", "batch"),
    [
        ("BN206", padded_input.speech, padded_input.sequences),
        ("BN207", lambda: nn.Sequential(nn.BatchNorm2d(4)), lambda: large_mean.images(3e6, channels=4)),
        ("BN205", lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), lambda: torch.randn(2, 3)),
    ],
)
def test_what_is_in_all_of_many_batches_is_found(code, model, batch):
    findings = bn.check(model(), data=[batch() for _ in range(40)])
    assert code in findings.codes
    assert not findings.failed


def test_a_tally_that_breaks_breaks_its_own_rule(monkeypatch):
    class Broken:
        def add(self, x, mask):
            raise ZeroDivisionError("so")

    def make(subject):
        return {layer: Broken() for _, layer in subject.layers}

    monkeypatch.setitem(SHARED, "BN207", make)
    model = padded_input.speech()
    findings = bn.check(model, padded_input.sequences(), select=["BN205", "BN206", "BN207"])
    assert findings.codes == ("BN206",)
    assert findings.failed == {"BN207": "ZeroDivisionError: so"}
    with pytest.raises(ZeroDivisionError):
        shared(Subject(model, padded_input.sequences()), "BN207")
