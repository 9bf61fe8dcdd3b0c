import importlib.util

import pytest
import torch

from batchnorm.bench.cases import OPERATIONS, PASSES, Case, make_cases
from batchnorm.bench.cell import TOLERANCE, disagreement, run_cell
from batchnorm.bench.contenders import CONTENDERS, Contender
from batchnorm.bench.inputs import make_inputs

TINY = [(6, 4), (3, 4, 5), (3, 4, 5, 3), (2, 4, 3, 2, 2)]
COMPILED_MARKS = (pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning"))  # torch's own
MATCHES = [
    pytest.param(name, case, id=f"{name}-{case.label.replace(' ', '-')}", marks=marks)
    for name, contender in CONTENDERS.items()
    if contender.computes and name != "torch" and not contender.missing()
    for marks in [COMPILED_MARKS if contender.compiled else ()]
    for case in make_cases(TINY)
    if contender.serves(case)
]


def compute(name, case):
    contender = CONTENDERS[name]
    with torch.set_grad_enabled(case.pass_name != "eval"):
        return contender.tensors(case, contender.build(case, make_inputs(case))())


@pytest.mark.parametrize(("name", "case"), MATCHES)
def test_all_contenders_compute_the_same(name, case):
    expected = compute("torch", case)
    result = compute(name, case)
    assert len(result) == len(expected) == (1 if case.pass_name != "train" else 5 if case.adds else 4)
    for value, right in zip(result, expected, strict=True):
        torch.testing.assert_close(value, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("pass_name", PASSES)
def test_our_layer_computes_the_same_in_bfloat16(operation, pass_name):
    case = Case((8, 4, 5, 3), "channels_last", operation, pass_name, "bfloat16")
    result = compute("batchnorm", case)
    assert [t.dtype for t in result] == [t.dtype for t in compute("torch", case)]
    assert result[0].dtype == torch.bfloat16
    assert not disagreement(result, compute("torch", case), TOLERANCE["bfloat16"])


def test_torch_is_given_the_operation_that_it_names():
    """The yardstick against formulas written out: the others must not be compared with a mistake."""
    case = Case((6, 4), "contiguous", "bn+add+relu", "forward")
    inputs = make_inputs(case)
    x, residual = inputs.x.detach().double(), inputs.residual.detach().double()
    normalised = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt() * inputs.weight + inputs.bias
    for operation, right in {
        "bn": normalised,
        "bn+relu": normalised.relu(),
        "bn+add+relu": (normalised + residual).relu(),
    }.items():
        (value,) = compute("torch", Case((6, 4), "contiguous", operation, "forward"))
        assert value.requires_grad
        torch.testing.assert_close(value.detach().double(), right, rtol=1e-5, atol=1e-5)


def test_eval_uses_running_statistics_and_records_no_graph():
    case = Case((6, 4), "contiguous", "bn", "eval")
    inputs = make_inputs(case)
    (value,) = compute("torch", case)
    scale = inputs.weight / (inputs.running_var + 1e-5).sqrt()
    torch.testing.assert_close(value, (inputs.x.detach() - inputs.running_mean) * scale + inputs.bias)
    assert not value.requires_grad


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", make_cases(TINY, operations=["bn"], passes=["train"]), ids=lambda case: case.label)
def test_the_floor_copies_in_the_same_layout_and_dtype(case, dtype):
    case = Case(case.shape, case.layout, case.operation, case.pass_name, dtype)
    inputs = make_inputs(case)
    step = CONTENDERS["floor"].build(case, inputs)
    (copy,) = step()
    assert copy.data_ptr() != inputs.x.data_ptr()
    assert copy.data_ptr() == step()[0].data_ptr()
    assert (copy.stride(), copy.dtype) == (inputs.x.stride(), inputs.x.dtype)
    assert torch.equal(copy, inputs.x.detach())


@pytest.mark.parametrize("case", make_cases(TINY, operations=["bn"], passes=["train"]), ids=lambda case: case.label)
def test_all_activations_have_the_layout_of_the_case(case):
    inputs = make_inputs(case)
    for tensor in (inputs.x, inputs.residual, inputs.grad):
        assert (tensor.stride(1) == 1) is (case.layout == "channels_last" or len(case.shape) == 2)
    assert inputs.x.requires_grad
    assert inputs.residual.requires_grad
    assert not inputs.grad.requires_grad


def test_inputs_are_the_same_for_the_same_seed():
    case = Case((6, 4), "contiguous", "bn", "train")
    assert torch.equal(make_inputs(case).x, make_inputs(case).x)
    assert not torch.equal(make_inputs(case).x, make_inputs(case, seed=1).x)


def test_a_contender_that_is_wrong_or_fails_is_left_out_and_named(monkeypatch):
    torch_ = CONTENDERS["torch"]

    def wrong(case, inputs):
        step = torch_.build(case, inputs)
        return lambda: (step()[0], *(2 * gradient for gradient in step()[1:]))

    def failing(case, inputs):
        raise RuntimeError("no such instruction\nat line 3")

    monkeypatch.setitem(CONTENDERS, "wrong", Contender(wrong))
    monkeypatch.setitem(CONTENDERS, "failing", Contender(failing))
    case = Case((6, 4), "contiguous", "bn", "train")
    result = run_cell(case, ["torch", "wrong", "failing", "floor"], rounds=1)
    assert [m.setting["contender"] for m in result.measurements] == ["torch", "floor"]
    assert result.notes == (
        "wrong disagrees with torch on 6x4 contiguous bn train: the gradient of x is off by 1 times its norm",
        "failing failed on 6x4 contiguous bn train: RuntimeError: no such instruction",
    )


def test_the_floor_is_the_copy_times_its_count():
    def measure(steps, rounds, seed):
        return dict.fromkeys(steps, (1.0,) * rounds)

    case = Case((6, 4), "contiguous", "bn+add+relu", "train")
    torch_time, floor = run_cell(case, ["torch", "floor"], rounds=2, measure=measure).measurements
    assert (torch_time.samples, floor.samples) == ((1.0, 1.0), (3.5, 3.5))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(3), ""),
        (torch.ones(3) + 1e-5, ""),
        (torch.ones(3) * 1.5, "the output is off by 0.5"),
        (torch.full((3,), float("nan")), "the output is off by nan"),
        (torch.ones(4), "the output has shape (4,) and not (3,)"),
    ],
)
def test_disagreement_in_words(value, words):
    problem = disagreement((value,), (torch.ones(3),), 1e-3)
    assert problem.startswith(words) if words else problem == ""


def test_disagreement_when_gradients_are_missing():
    assert disagreement((torch.ones(3),), (torch.ones(3),) * 4, 1e-3) == "it returned 1 tensors and not 4"


def test_absent_peers_and_an_absent_compiler_are_told(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert CONTENDERS["flax"].missing() == "not installed (pip install flax)"
    assert CONTENDERS["inplace-abn"].missing() == "not installed (pip install inplace-abn)"
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert CONTENDERS["torch.compile"].missing() == "needs a C++ compiler, and none was found"
