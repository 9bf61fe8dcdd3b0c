"""What a batch is: masks, groups, moments from elsewhere; against reference.py on the values that count."""

import itertools

import pytest
import torch
from kernel_cases import ACTIVATIONS, NATIVE, PATHS, path, threads, took_native
from statistics_cases import SHAPES, Case, answer, inputs, run, wrong

from batchnorm import kernels
from batchnorm.errors import BatchNormError
from batchnorm.functional import Moments, batch_norm, moments
from batchnorm.kernels import native as abi
from batchnorm.kernels.differentiable import _call
from batchnorm.kernels.saved import Setting
from batchnorm.moments import merged

MASKS = ("random", "lengths", "islands", "all", "samples", "rare")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@pytest.fixture(params=PATHS)
def on_path(request):
    with path(request.param), threads(1):
        yield request.param


@pytest.fixture(params=NATIVE)
def native(request):
    with path(request.param), threads(1):
        yield request.param


def all_right(cases, on_path):
    found = [sentence for case in cases for sentence in wrong(case, on_path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(on_path, mask, layout):
    """Every shape and activation, the other choices taking turns."""
    padding = itertools.cycle([float("nan"), 0.0, float("inf"), 1e30, -float("inf")])
    turns = enumerate(itertools.product(SHAPES, ACTIVATIONS))
    all_right(
        (
            Case(
                shape, mask, 1, layout, (torch.float32, torch.bfloat16)[i % 3 == 0], activation, i % 2 == 0, i % 4 != 0,
                next(padding), given=i % 5 == 0, training=i % 7 != 0, seed=i,
            )
            for i, (shape, activation) in turns
        ),
        on_path,
    )  # fmt: skip


GROUPS = {"one": lambda n: 1, "two": lambda n: 2, "uneven": lambda n: 3, "most": lambda n: max(1, n // 2)}


@pytest.mark.parametrize("mask", [None, "random", "lengths"])
@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
@pytest.mark.parametrize("groups", GROUPS)
def test_groups(on_path, groups, layout, mask):
    turns = enumerate(itertools.product([s for s in SHAPES if 5 <= s[0] < 100], ("none", "relu6", "silu")))
    all_right(
        (
            Case(
                shape, mask, GROUPS[groups](shape[0]), layout, (torch.float32, torch.bfloat16)[i % 3 == 1], activation,
                i % 2 == 0, i % 4 != 3, given=i % 3 == 2, training=i % 7 != 5, seed=i,
            )
            for i, (shape, activation) in turns
        ),
        on_path,
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["contiguous", "channel_last", "strided", "inner", "transposed", "expanded"])
@pytest.mark.parametrize("shape", [(34, 19), (7, 18, 17), (5, 17, 6, 5), (4, 16, 3, 4, 2), (6, 3, 5, 4)], ids=str)
def test_layouts(on_path, shape, layout):
    choices = itertools.product([None, "random"], [1, 2], [False, True])
    all_right(
        (Case(shape, m, g, layout, activation="silu", residual=r, padding=0.0, seed=3) for m, g, r in choices), on_path
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_reduce_of_one_process(on_path, activation, dtype):
    """The staged backward pass, in one process: the same answers."""
    choices = itertools.product([(5, 3, 40), (7, 20, 3, 5), (19, 33)], [None, "lengths", "random"], [False, True])
    all_right(
        (
            Case(shape, mask, dtype=DTYPES[dtype], activation=activation, residual=residual, reduce=True, seed=i)
            for i, (shape, mask, residual) in enumerate(choices)
        ),
        on_path,
    )


@pytest.mark.parametrize("mask", [None, "lengths", "random", "islands"])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_float64(mask, groups):
    shapes = [s for s in SHAPES if s[0] >= 5]
    all_right(
        (
            Case(s, mask, groups, dtype=torch.float64, activation=a, residual=True, given=groups == 3)
            for s, a in itertools.product(shapes, ("none", "leaky_relu", "silu"))
        ),
        "torch",
    )


@pytest.mark.parametrize("mask", ["lengths", "random", None])
@pytest.mark.parametrize("shape", [(5, 3, 200), (9, 20, 3, 5), (300, 17)], ids=str)
def test_large_means(on_path, shape, mask):
    """A mean of 5,000 deviations: sums of squares that cancel, and a guess that must not come from the padding."""
    paddings = [0.0, 1e30, float("nan")] if mask else [0.0]
    choices = itertools.product(paddings, [1, 2], [False, True])
    all_right((Case(shape, mask, g, padding=p, mean=1e4, given=given) for p, g, given in choices), on_path)


@pytest.mark.parametrize("mask", ["lengths", None])
def test_means_that_a_float_does_not_hold(native, mask):
    """The part of the mean that float32 loses comes into the sums once, whichever way they take."""
    choices = itertools.product([(5, 3, 200), (9, 20, 3, 5)], [{}, {"given": True}, {"reduce": True}, {"groups": 2}])
    all_right((Case(shape, mask, mean=1e6, **way) for shape, way in choices), native)


LONG = {
    "runs": (Case((6, 5, 1200), "lengths", residual=True, activation="silu"), 3),
    "runs cut into pieces": (Case((2, 1, 70003), "random", activation="relu"), 2),
    "pieces, islands": (Case((2, 2, 66000), "islands"), 2),
    "many channels": (Case((4, 80, 90), "random", residual=True, activation="leaky_relu"), 2),
    "tiles": (Case((63, 400), "random"), 13),
    "rows": (Case((20, 33, 8, 9), "lengths", layout="channel_last", activation="relu6", residual=True), 4),
    "short rows": (Case((1100, 17), "samples"), 5),
}


@pytest.mark.parametrize("grouped", [False, True], ids=["whole", "groups"])
@pytest.mark.parametrize("name", LONG)
def test_threads(native, name, grouped):
    """Right, and to the last bit the same, on any number of threads: large groups share them, small ones have one."""
    case, groups = LONG[name]
    case = Case(**{**vars(case), "groups": groups if grouped else 1})
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append(run(case, inputs(case)))
            if count == 2:
                all_right([case], native)
    for other in results[1:]:
        for quantity, values in results[0].items():
            assert torch.equal(values, other[quantity]), quantity


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("mask", [None, *MASKS])
def test_moments(on_path, mask, groups):
    for shape in SHAPES[:4]:
        if shape[0] < groups * 2:
            continue
        case = Case(shape, mask, groups, padding=1e30, seed=shape[0])
        t, wanted = inputs(case), answer(case)
        found = moments(t["x"], mask=t.get("mask"), groups=groups)
        assert [part.dtype for part in found] == [torch.float64] * 3
        assert found.mean.requires_grad is False
        expected = (torch.from_numpy(wanted[name]) for name in ("means", "variances"))
        for actual, value in zip(found[1:], expected, strict=True):
            torch.testing.assert_close(actual.view(groups, -1), value, rtol=1e-6, atol=1e-6)
        marks = t.get("mask", torch.ones(shape[0], *shape[2:]))
        counts = [part.sum() for part in marks.tensor_split([g * shape[0] // groups for g in range(1, groups)])]
        assert found.count.view(-1).tolist() == counts


def test_the_two_halves_are_the_whole(native):
    """MOMENTS then APPLY is TRAIN; GRAD_SUMS then GRAD_APPLY is BACKWARD_TRAIN: the same bits."""
    for shape, mask in itertools.product([(5, 3, 40), (7, 20, 3, 5), (300, 17)], [None, "random"]):
        for activation, residual in [("none", False), ("relu", True), ("silu", True)]:
            whole = Case(shape, mask, activation=activation, residual=residual)
            t = inputs(whole)
            expected = run(whole, t)
            for halves in ({"given": True}, {"reduce": True}):
                actual = run(Case(**{**vars(whole), **halves}), t)
                assert took_native(actual["y"])
                for name in ("y", "dweight", "dbias", "running_mean", "running_var"):
                    assert torch.equal(actual[name], expected[name]), (name, halves)
                # The sums are handed over relative to the exact mean, not to the one a float holds.
                torch.testing.assert_close(actual["dx"], expected["dx"], rtol=1e-6, atol=1e-6)


# ---- several processes ----------------------------------------------------------------------------------------------


def in_parts(case, sizes):
    """The results of a batch that several processes hold a part of, as one result."""
    t = inputs(case)
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    parts = [
        {n: v[a:b].detach() if v.dim() == len(case.shape) or n == "mask" else v.detach() for n, v in t.items()}
        for a, b in itertools.pairwise(edges)
    ]
    each = [moments(p["x"], mask=p.get("mask")) for p in parts]
    everyones = merged(Moments(*(torch.stack(values) for values in zip(*each, strict=True))))
    sums = []

    def step(part, reduce):
        leaves = {n: part[n].clone().requires_grad_() for n in ("x", "residual", "weight", "bias") if n in part}
        buffers = part["running_mean"].clone(), part["running_var"].clone()
        y = batch_norm(
            leaves["x"], *buffers, leaves["weight"], leaves["bias"], True,
            activation=case.activation, residual=leaves.get("residual"), negative_slope=0.2, mask=part.get("mask"),
            moments=everyones, reduce=reduce,
        )  # fmt: skip
        gradients = torch.autograd.grad(y, list(leaves.values()), part["dy"])
        named = {f"d{n}": g for n, g in zip(leaves, gradients, strict=True)}
        return {"y": y, "running_mean": buffers[0], "running_var": buffers[1], **named}

    def listen(mine):
        assert mine.shape == (2, case.shape[1])
        assert mine.dtype == torch.float64
        sums.append(mine.clone())
        return mine

    for part in parts:
        step(part, listen)
    assert len(sums) == len(parts)
    results = [step(part, lambda mine: torch.stack(sums).sum(0)) for part in parts]
    whole = {n: torch.cat([r[n] for r in results]) for n in ("y", "dx", "dresidual") if n in results[0]}
    whole |= {n: sum(r[n] for r in results) for n in ("dweight", "dbias")}
    return whole | {n: results[0][n] for n in ("running_mean", "running_var")}, results


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("mask", [None, "random", "samples"])
@pytest.mark.parametrize("shape", [(13, 3, 40), (13, 20, 3, 5), (13, 33)], ids=str)
def test_parts_of_a_batch_are_the_batch(on_path, shape, mask, dtype):
    """Parts of unequal sizes, one of them a single sample, one empty."""
    for activation, residual in [("none", True), ("relu", False), ("silu", True)]:
        case = Case(shape, mask, dtype=DTYPES[dtype], activation=activation, residual=residual, padding=7.0)
        actual, results = in_parts(case, (6, 0, 1, 6))
        if on_path != "torch" and dtype == "float32":
            # One sample without positions has one value per channel, and the empty part none: torch's operators.
            assert [took_native(r["y"]) for r in results] == [True, False, len(shape) > 2, True]
        tolerance = 1e-5 if dtype == "float32" else 1e-10
        for name, values in actual.items():
            expected = torch.from_numpy(answer(case)[name])
            unit = max(1.0, expected.abs().max().item())
            torch.testing.assert_close(values.detach().double(), expected, rtol=0, atol=tolerance * unit, msg=name)
        for r in results:
            assert torch.equal(r["running_var"], actual["running_var"])


def test_reduced_sums_of_another_kind(native):
    """What reduce returns is converted if it can be, and refused if it cannot."""
    case = Case((5, 3, 40), reduce=True)
    expected = run(case, inputs(case))
    for strange in (lambda s: s.float(), lambda s: torch.stack((s, s), -1)[..., 0]):
        actual = run(case, inputs(case), strange)
        torch.testing.assert_close(actual["dx"], expected["dx"])
    with pytest.raises(BatchNormError, match=r"shape \[2, 3\] and returned one of shape \[2\]"):
        run(case, inputs(case), lambda s: s.sum(1))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_moments_of_another_kind(on_path, kind):
    """Moments in float32, or in memory that is not contiguous, are as good as they can be."""
    x = torch.randn(6, 20, 9)
    found = moments(x)
    strange = Moments(found.count, *(torch.stack((t, t), -1)[..., 0].to(kind) for t in found[1:]))
    y = batch_norm(x, None, None, training=True, moments=strange)
    torch.testing.assert_close(y, batch_norm(x, None, None, training=True), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("statistics", ["groups", "moments", "reduce"])
def test_evaluation_does_not_ask_what_a_batch_is(on_path, statistics):
    x = torch.randn(6, 20, 9, requires_grad=True)
    mean, var = torch.randn(20), torch.rand(20) + 0.5
    given = {"groups": {"groups": 3}, "moments": {"moments": moments(x)}, "reduce": {"moments": moments(x)}}[statistics]
    if statistics == "reduce":
        given["reduce"] = pytest.fail
    y, expected = batch_norm(x, mean, var, **given), batch_norm(x, mean, var)
    assert torch.equal(y, expected)
    dy = torch.randn_like(x)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(expected, x, dy)[0])


def test_a_mask_that_changes_before_the_backward_pass_is_an_error(on_path):
    x, mask = torch.randn(4, 20, 17, requires_grad=True), torch.ones(4, 17, dtype=torch.bool)
    y = batch_norm(x, None, None, training=True, mask=mask)
    mask[0] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_groups_of_one_sample_are_instance_norm(on_path):
    x = torch.randn(5, 20, 40)
    y = batch_norm(x, None, None, training=True, groups=5)
    torch.testing.assert_close(y, torch.nn.functional.instance_norm(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("operation", "like", "groups", "samples", "mask", "buffers"),
    [
        (abi.TRAIN, (8, 16, 4), 9, 8, None, False),  # more groups than samples
        (abi.TRAIN, (9, 16, 4), 2, 4, None, False),  # rows that are no whole samples
        (abi.TRAIN, (8, 16, 4), 2, 8, None, True),  # groups do not update the running statistics
        (abi.TRAIN, (8, 16, 2), 1, 0, 1, False),  # a mask over few positions
        (abi.TRAIN, (8, 16, 40), 1, 0, 0, False),  # nothing marked
        (abi.TRAIN, (0, 16, 40), 1, 0, None, False),
        (abi.TRAIN, (4, 3, 1), 1, 0, None, False),  # narrower than a vector
    ],
)
def test_the_kernel_refuses(native, operation, like, groups, samples, mask, buffers):
    size = max(1, like[0] * like[1] * like[2])
    x, y, saved = torch.randn(size), torch.full((size,), 7.0), torch.empty(groups * 5 * like[1])
    marks = None if mask is None else torch.full((like[0] * like[2],), mask, dtype=torch.uint8)
    setting = Setting(kernels.kernel().run, like, None, True, 0.1, 1e-5, 0.0, "none", groups, samples, marks)
    statistics = (torch.zeros(like[1]), torch.ones(like[1])) if buffers else (None, None)
    given = {"out": y, "saved": saved, "running_mean": statistics[0], "running_var": statistics[1]}
    addresses = {name: tensor.data_ptr() for name, tensor in given.items() if tensor is not None}
    with pytest.raises(BatchNormError, match="the kernel refused"):
        _call(setting, operation, 0, x, **addresses)
    assert bool((y == 7).all())


def test_nothing_marked_is_zero_moments(on_path):
    x, mask = torch.randn(4, 20, 17), torch.zeros(4, 17, dtype=torch.bool)
    mask[2:, 3:9] = True
    found = moments(x, mask=mask, groups=2)
    assert found.count.tolist() == [0.0, 12.0]
    assert not found.mean[0].any()
    assert not found.var[0].any()
    torch.testing.assert_close(found.mean[1], x[2:, :, 3:9].double().mean((0, 2)), rtol=1e-6, atol=1e-6)
