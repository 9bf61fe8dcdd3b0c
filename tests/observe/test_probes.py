"""Probes against answers that can be written down: a quadratic, linear networks, Theorem 4.1, Ba et al.'s table."""

import math

import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.errors import BatchNormError


class Point(nn.Module):
    """A vector of parameters, and nothing else."""

    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(w)

    def forward(self, x):
        return self.w


def quadratic(seed=0, size=4):
    draw = torch.Generator().manual_seed(seed)
    root = torch.randn(size, size, generator=draw, dtype=torch.float64)
    return root @ root.T, torch.randn(size, generator=draw, dtype=torch.float64)


def untouched_by(model, probe):
    before = {name: t.clone() for name, t in model.state_dict().items()}
    modes, rng = [m.training for m in model.modules()], torch.get_rng_state()
    found = probe()
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    return found


# ---- landscape


def test_landscape_of_a_quadratic_is_exact():
    hessian, w = quadratic()
    model = Point(w)
    found = untouched_by(
        model, lambda: bn.probe.landscape(model, None, lambda m, _: m(None) @ hessian @ m(None) / 2, lr=0.1)
    )
    g = hessian @ w
    assert found.loss == pytest.approx(float(w @ hessian @ w / 2), rel=1e-12)
    assert found.gradient_norm == pytest.approx(float(g.norm()), rel=1e-12)
    for rate, loss, change in zip(found.rates, found.losses, found.changes, strict=True):
        there = w - rate * g
        assert loss == pytest.approx(float(there @ hessian @ there / 2), rel=1e-10)
        assert change == pytest.approx(float(rate * (hessian @ g).norm()), rel=1e-10)
    assert found.beta == pytest.approx(float((hessian @ g).norm() / g.norm()), rel=1e-10)
    assert found.rates[0] == pytest.approx(0.05)
    assert found.rates[-1] == pytest.approx(0.4)
    assert found.loss_range == (min(found.losses), max(found.losses))


def test_beta_is_the_largest_along_the_way():
    model = Point(torch.tensor([2.0], dtype=torch.float64))
    found = bn.probe.landscape(model, None, lambda m, _: m(None).pow(4).sum(), lr=0.01, factors=[0.5, 1.0, 2.0])
    betas = [change / (rate * 32) for change, rate in zip(found.changes, found.rates, strict=True)]  # 4 w**3 = 32
    assert found.beta == max(betas) > min(betas) * 1.1


def test_the_correction_undoes_the_scale_of_weights_in_front_of_bn():
    torch.manual_seed(0)
    x, target = torch.randn(64, 5, dtype=torch.float64), torch.randn(64, 3, dtype=torch.float64)
    found = []
    for scale in (1.0, 10.0):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 3, bias=False), nn.BatchNorm1d(3, eps=1e-30, affine=False)).double()
        with torch.no_grad():
            model[0].weight.mul_(scale)
        # The same way through the space of functions: the step is lr * gradient, which is 1/scale**2 of the weights.
        found.append(
            bn.probe.landscape(
                model, x, lambda m, x: (m(x) - target).square().mean(), lr=0.01 * scale**2, parameters=["0.weight"]
            )
        )
    small, large = found
    assert large.losses == pytest.approx(small.losses, rel=1e-9)
    assert large.beta == pytest.approx(small.beta / 100, rel=1e-9)
    assert large.corrected_beta == pytest.approx(small.corrected_beta, rel=1e-9)
    assert large.corrected_changes == pytest.approx(small.corrected_changes, rel=1e-9)
    assert {m.quantity for m in small.measurements(net="a")} >= {"effective beta", "effective beta, corrected"}


def test_theorem_4_1_holds_with_equality_for_what_landscape_differentiates():
    """||dL/dx||^2 = gamma^2/var * (||g||^2 - <1,g>^2/m - <g,yhat>^2/m), g at the output of BN, eps = 0."""
    torch.manual_seed(0)
    m, gamma = 16, 1.7
    x = torch.randn(m, 1, dtype=torch.float64) * 3 + 2
    layer = nn.BatchNorm1d(1, eps=1e-30).double()
    with torch.no_grad():
        layer.weight.fill_(gamma)
    w = torch.randn(m, 1, dtype=torch.float64)
    point = Point(x)
    found = bn.probe.landscape(point, None, lambda p, _: (layer(p(None)) * w).sum(), lr=1e-3, factors=[1.0])
    xhat = (x - x.mean()) / x.std(correction=0)
    square = gamma**2 / x.var(correction=0) * (w.square().sum() - w.sum() ** 2 / m - (w * xhat).sum() ** 2 / m)
    assert found.gradient_norm**2 == pytest.approx(float(square), rel=1e-10)


@pytest.mark.parametrize("bad", [{"lr": 0.0}, {"lr": 0.1, "factors": []}, {"lr": 0.1, "factors": [-1.0]}])
def test_landscape_refuses(bad):
    with pytest.raises(BatchNormError, match="landscape: lr is"):
        bn.probe.landscape(nn.Linear(1, 1), torch.ones(1, 1), lambda m, x: m(x).sum(), **bad)


def test_a_parameter_that_does_not_exist():
    with pytest.raises(BatchNormError, match="no trainable parameter is called 'nothing'"):
        bn.probe.landscape(nn.Linear(1, 1), None, lambda m, x: 0, lr=0.1, parameters=["nothing"])


def test_a_loss_that_raises_leaves_the_parameters():
    model = nn.Linear(1, 1)
    before = model.weight.clone()
    calls = []

    def loss(m, x):
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("stop")
        return m(x).sum()

    with pytest.raises(RuntimeError, match="stop"):
        bn.probe.landscape(model, torch.ones(1, 1), loss, lr=0.1)
    assert torch.equal(model.weight, before)


# ---- shift


def test_shift_of_a_linear_chain_is_exact():
    w1, w2, w3, x, y, lr = 0.7, -1.3, 0.4, 2.0, 0.5, 0.05
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(3))).double()
    with torch.no_grad():
        for layer, w in zip(model, (w1, w2, w3), strict=True):
            layer.weight.fill_(w)
    batch = torch.tensor([[x]], dtype=torch.float64)
    found = untouched_by(model, lambda: bn.probe.shift(model, batch, lambda m, b: (m(b) - y).square().sum() / 2, lr=lr))

    def gradients(a, b, c):
        error = a * b * c * x - y
        return error * b * c * x, error * a * c * x, error * a * b * x

    g = gradients(w1, w2, w3)
    after_first = gradients(w1 - lr * g[0], w2, w3)
    after_both = gradients(w1 - lr * g[0], w2 - lr * g[1], w3)
    assert found.layers == ("0", "1", "2")
    assert found.norms == pytest.approx([abs(v) for v in g], rel=1e-12)
    assert found.distances == pytest.approx([0.0, abs(after_first[1] - g[1]), abs(after_both[2] - g[2])], rel=1e-10)
    assert found.cosines == pytest.approx([1.0, *(math.copysign(1, u * v) for u, v in zip(
        (after_first[1], after_both[2]), g[1:], strict=True))])  # fmt: skip
    assert found.relative[2] == pytest.approx(found.distances[2] / found.norms[2])
    assert bn.probe.shift(model, batch, lambda m, b: (m(b) - y).square().sum() / 2, lr=lr, layers=["2"]).distances == (
        pytest.approx([found.distances[2]])
    )


def test_shift_follows_the_order_of_the_run_not_of_the_attributes():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(3, 1), nn.Linear(2, 3)

        def forward(self, x):
            return self.last(torch.tanh(self.first(x)))

    torch.manual_seed(0)
    found = bn.probe.shift(Backwards(), torch.randn(4, 2), lambda m, x: m(x).square().mean(), lr=0.1)
    assert found.layers == ("first", "last")
    assert found.distances[0] == 0.0
    assert found.distances[1] > 0
    assert len(found.measurements()) == 6


def test_a_layer_that_shares_its_weight_does_not_step_before_itself():
    first, last = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    last.weight = first.weight
    found = bn.probe.shift(nn.Sequential(first, last), torch.randn(4, 2), lambda m, x: m(x).square().mean(), lr=0.1)
    assert found.distances == (0.0, 0.0)


def test_shift_names_a_layer_that_is_none():
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1))
    with pytest.raises(BatchNormError, match=r"'1' is not a module .* choose among 0, 2"):
        bn.probe.shift(model, torch.ones(1, 1), lambda m, x: m(x).sum(), lr=0.1, layers=["1"])


# ---- boundary


def test_boundary_distances_of_three_points():
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1, eps=1e-30)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[3.0, 4.0]]))  # length 5
        model[1].weight.fill_(2.0)
        model[1].bias.fill_(1.0)
    data = torch.tensor([[1.0, 0.0], [1.0, 0.0], [7.0, 0.0]], dtype=torch.float64)  # w.z = 3, 3, 21: 9 +- sqrt(72)
    (found,) = untouched_by(model, lambda: bn.probe.boundary(model, [data], batch_sizes=[2]))
    assert found.layer == "1"
    assert found.without == pytest.approx((3 + 3 + 21) / 3 / 5)
    assert found.centred == pytest.approx((6 + 6 + 12) / 3 / 5)
    switch = 9 - 1 * math.sqrt(72) / 2
    assert found.learned == pytest.approx((2 * abs(3 - switch) + abs(21 - switch)) / 3 / 5)


def test_jitter_of_gaussian_data_is_one_over_the_root_of_the_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32))
    (found,) = bn.probe.boundary(model, [torch.randn(20000, 8)], batch_sizes=[16, 64], draws=400)
    for size in (16, 64):
        mean, deviation = found.jitter[size]
        assert mean == pytest.approx(1 / math.sqrt(size), rel=0.05)
        assert deviation == pytest.approx(1 / math.sqrt(2 * size), rel=0.08)
    assert any(m.quantity == "boundary jitter" and m.setting["batch"] == 64 for m in found.measurements())


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Conv2d(3, 6, 3, groups=3), (4, 3, 6, 6)), (nn.ConvTranspose2d(4, 6, 3, groups=2), (4, 4, 5, 5))],
)
def test_lengths_of_grouped_convolutions(layer, shape):
    """A unit's length is how far its output moves for a unit change of its input window, at most: its gradient's."""
    layer = layer.double()
    model = nn.Sequential(layer, nn.BatchNorm2d(6).double())
    x = torch.randn(shape, dtype=torch.float64)
    (found,) = bn.probe.boundary(model, [x], batch_sizes=[])
    probe = torch.zeros(1, *shape[1:], dtype=torch.float64, requires_grad=True)
    y = layer(probe)
    lengths = torch.stack([torch.autograd.grad(y[0, c, 3, 3], probe, retain_graph=True)[0].norm() for c in range(6)])
    values = layer(x).detach()
    assert found.without == pytest.approx(float((values.abs() / lengths.view(1, -1, 1, 1)).mean()), rel=1e-10)


def test_boundary_needs_a_norm_behind_a_linear_layer():
    with pytest.raises(BatchNormError, match="no BN layer stands right behind"):
        bn.probe.boundary(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.BatchNorm1d(2)), [torch.randn(4, 2)])
    with pytest.raises(BatchNormError, match="there are no batches"):
        bn.probe.boundary(nn.BatchNorm1d(2), [])


# ---- margin


def test_margin_of_a_linear_classifier_is_exact():
    torch.manual_seed(0)
    model = nn.Linear(5, 4).double()
    x = torch.randn(20, 5, dtype=torch.float64)
    found = untouched_by(model, lambda: bn.probe.margin(model, x))
    scores = model(x).detach()
    mine = scores.argmax(1)
    weight = model.weight.detach()
    for i in range(20):
        others = [c for c in range(4) if c != mine[i]]
        exact = min(float((scores[i, mine[i]] - scores[i, c]) / (weight[mine[i]] - weight[c]).norm()) for c in others)
        assert float(found.distances[i]) == pytest.approx(exact, rel=1e-5)
    assert bool((model(found.changed).argmax(1) != mine).all())


def test_margin_is_zero_where_the_label_is_wrong_and_infinite_where_nothing_helps():
    model = nn.Linear(2, 2)
    x = torch.randn(3, 2)
    wrong = 1 - model(x).argmax(1)
    assert bn.probe.margin(model, x, wrong).distances.tolist() == [0.0, 0.0, 0.0]
    constant = nn.Sequential(nn.Linear(2, 2), nn.Softmax(1))
    with torch.no_grad():
        constant[0].weight.zero_()
        constant[0].bias.copy_(torch.tensor([1.0, 0.0]))
    assert bn.probe.margin(constant, x).distances.tolist() == [math.inf] * 3


def test_margin_of_a_network_in_training_mode_uses_evaluation():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).train()
    x = torch.randn(6, 4)
    found = untouched_by(model, lambda: bn.probe.margin(model, x))
    model.eval()
    assert bool((model(found.changed).argmax(1) != model(x).argmax(1)).all())
    # An example's margin does not depend on the others.
    alone = bn.probe.margin(model, x[:1]).distances
    assert float(alone) == pytest.approx(float(found.distances[0]), rel=1e-3)


def test_margin_wants_scores():
    with pytest.raises(BatchNormError, match="one row of class scores"):
        bn.probe.margin(nn.Linear(2, 1), torch.randn(3, 2))


# ---- invariance


ROWS = {  # Ba et al. (2016), table 1: what each leaves as it is
    "batch": {"weight matrix rescaled", "weight vector rescaled", "data set rescaled", "data set recentred"},
    "layer": {"weight matrix rescaled", "weight matrix recentred", "data set rescaled", "single case rescaled"},
    "weight": {"weight matrix rescaled", "weight vector rescaled"},
    "none": set(),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_table_of_invariances(name):
    torch.manual_seed(0)
    linear = nn.Linear(6, 5, bias=False).double()
    if name == "weight":
        linear = nn.utils.parametrizations.weight_norm(linear)
    norm = {"batch": nn.BatchNorm1d(5, eps=1e-30), "layer": nn.LayerNorm(5, eps=1e-30)}.get(name, nn.Identity())
    model = nn.Sequential(linear, norm).double()
    x = torch.randn(32, 6, dtype=torch.float64)
    found = untouched_by(model, lambda: bn.probe.invariance(model, x, layer="0", tolerance=1e-9))
    assert {transformation for transformation, holds in found.holds.items() if holds} == ROWS[name]
    assert len(found.measurements(norm=name)) == 6


def test_bn_in_evaluation_mode_has_no_invariance():
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)).eval()
    assert not any(bn.probe.invariance(model, torch.randn(8, 6), layer="0").holds.values())


def test_invariance_wants_a_weight():
    with pytest.raises(BatchNormError, match="'1' is not a module with a weight matrix"):
        bn.probe.invariance(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.randn(3, 2), layer="1")


# ---- interaction


def test_interaction_of_one_unit_is_the_written_out_jacobian():
    torch.manual_seed(0)
    m = 7
    x = torch.randn(m, 1, dtype=torch.float64) * 2 + 1
    model = nn.BatchNorm1d(1, eps=1e-30).double().train()
    found = untouched_by(model, lambda: bn.probe.interaction(model, x))
    xhat = (x - x.mean()) / x.std(correction=0)
    exact = (torch.eye(m, dtype=torch.float64) - 1 / m - xhat @ xhat.T / m) / x.std(correction=0)
    assert torch.allclose(found.matrix, exact.abs(), atol=1e-12)
    off = exact.abs().sum() - exact.abs().diagonal().sum()
    assert found.others == pytest.approx(float(off) / (m * (m - 1)))
    assert found.own == pytest.approx(float(exact.abs().diagonal().mean()))
    assert bn.probe.interaction(model.eval(), x).others == 0.0


def test_interaction_falls_like_one_over_the_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3)).double().train()
    shares = [bn.probe.interaction(model, torch.randn(m, 4, dtype=torch.float64)).share for m in (8, 32)]
    assert shares[0] / shares[1] == pytest.approx(4, rel=0.35)


def test_random_directions_estimate_the_same():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 40), nn.BatchNorm1d(40)).double().train()
    x = torch.randn(6, 4, dtype=torch.float64)
    exact, drawn = bn.probe.interaction(model, x, directions=40), bn.probe.interaction(model, x, directions=10)
    assert drawn.own == pytest.approx(exact.own, rel=0.25)  # without its factor it would be half as much
    assert drawn.others == pytest.approx(exact.others, rel=0.3)


def test_layer_norm_does_not_interact():
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).train()
    assert bn.probe.interaction(model, torch.randn(5, 4)).others == 0.0


def test_interaction_wants_a_batch():
    with pytest.raises(BatchNormError, match="give a batch of 2 examples or more"):
        bn.probe.interaction(nn.Linear(2, 2), torch.randn(1, 2))
    with pytest.raises(BatchNormError, match="returned"):
        bn.probe.interaction(nn.Flatten(0), torch.randn(3, 2))
