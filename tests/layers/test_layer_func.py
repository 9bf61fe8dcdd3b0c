"""torch.func, forward-mode AD, and tensors without values."""

import copy

import pytest
import torch
from layer_cases import OURS, STOCK, activate, example, pair, same, same_buffers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import batchnorm as bn

MODES = pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
DIMS = pytest.mark.parametrize("dims", [1, 2, 3])


def quiet_pair(dims=2, mode=True, **arguments):
    """Layers that update nothing, which is what torch.func asks of functions."""
    stock, ours = pair(dims, **arguments)
    stock.track_running_stats = False
    ours.update = False
    return stock.train(mode), ours.train(mode)


@DIMS
@MODES
def test_grad(dims, mode, path):
    stock, ours = quiet_pair(dims, mode)
    x = example(dims)
    same(grad(lambda x: ours(x).pow(3).sum())(x), grad(lambda x: stock(x).pow(3).sum())(x))


@MODES
def test_grad_of_fused_layer_with_respect_to_everything(mode, path):
    stock, ours = quiet_pair(2, mode)
    ours.activation = "silu"
    x, r = example(2), torch.randn(6, 24, 5, 7)
    parameters = {name: p.detach() for name, p in ours.named_parameters()}

    def loss(layer, fused):
        def run(parameters, x, r):
            if fused:
                return functional_call(layer, parameters, (x, r)).pow(2).sum()
            return activate(functional_call(layer, parameters, (x,)) + r, "silu").pow(2).sum()

        return run

    actual = grad(loss(ours, True), argnums=(0, 1, 2))(parameters, x, r)
    expected = grad(loss(stock, False), argnums=(0, 1, 2))(parameters, x, r)
    same(actual[1], expected[1])
    same(actual[2], expected[2])
    for name in parameters:
        same(actual[0][name], expected[0][name])


@pytest.mark.parametrize("transform", [grad, vmap])
def test_an_update_inside_a_transform_fails_as_torchs(transform, path):
    x = example(2, shape=(3, 6, 24, 5, 7)) if transform is vmap else example(2)
    for cls in (STOCK[2], OURS[2]):
        layer = cls(24)
        with pytest.raises(RuntimeError, match=r"in.?place"):
            transform(lambda x, layer=layer: layer(x).pow(3).sum())(x)


@DIMS
@MODES
def test_vmap(dims, mode, path):
    stock, ours = quiet_pair(dims, mode)
    x = torch.stack([example(dims) for _ in range(3)])
    same(vmap(ours)(x), vmap(stock)(x))
    same(vmap(ours)(x)[1], ours(x[1]))


def test_replace_all_batch_norm_modules(path):
    model = torch.nn.Sequential(OURS[2](24, activation="relu"), OURS[2](24))
    x = torch.stack([example(2) for _ in range(3)])
    torch.func.replace_all_batch_norm_modules_(model)
    same(vmap(model)(x)[2], model(x[2]))


def test_per_sample_gradients(path):
    _, ours = quiet_pair(2, False)
    x = example(2)
    per_sample = vmap(grad(lambda x: ours(x[None]).pow(2).sum()))(x)
    leaf = x.clone().requires_grad_()
    ours(leaf).pow(2).sum().backward()  # with running statistics, samples do not mix
    same(per_sample, leaf.grad)


@DIMS
@MODES
def test_jvp_and_vjp_agree_with_torch(dims, mode, path):
    stock, ours = quiet_pair(dims, mode)
    x, v = example(dims), torch.randn_like(example(dims))
    for actual, expected in zip(jvp(ours, (x,), (v,)), jvp(stock, (x,), (v,)), strict=True):
        same(actual, expected)
    y, pull = vjp(ours, x)
    z, pull_stock = vjp(stock, x)
    same(y, z)
    same(pull(v)[0], pull_stock(v)[0])


@MODES
def test_forward_mode(mode, path):
    stock, ours = quiet_pair(2, mode)
    ours.activation = "silu"
    x, v, w = example(2), torch.randn(6, 24, 5, 7), torch.randn(6, 24, 5, 7)
    with forward_ad.dual_level():
        dual, residual = forward_ad.make_dual(x, v), forward_ad.make_dual(v, w)
        actual = forward_ad.unpack_dual(ours(dual, residual=residual))
        expected = forward_ad.unpack_dual(activate(stock(dual) + residual, "silu"))
    same(actual.primal, expected.primal)
    same(actual.tangent, expected.tangent)


@pytest.mark.parametrize("activation", [None, "relu"])
@MODES
def test_forward_mode_over_a_finished_graph(activation, mode, path):
    """A cotangent that carries a tangent, for an output computed before."""
    stock, ours = quiet_pair(2, mode)
    ours.activation = activation
    x, v = example(2), torch.randn(6, 24, 5, 7)
    results = []
    for run in (lambda x: activate(stock(x) + v, activation), lambda x: ours(x, residual=v)):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        with forward_ad.dual_level():
            dy = forward_ad.make_dual(v, v.pow(2))
            results.append(forward_ad.unpack_dual(torch.autograd.grad(y, leaf, dy)[0]))
    same(results[1].primal, results[0].primal)
    same(results[1].tangent, results[0].tangent)


@MODES
def test_hessian_of_a_small_problem(mode, path):
    stock, ours = quiet_pair(1, mode, channels=4)
    stock.double(), ours.double()
    ours.activation = "silu"
    x = torch.randn(5, 4, dtype=torch.float64)
    same(
        hessian(lambda x: ours(x).pow(3).sum())(x),
        hessian(lambda x: torch.nn.functional.silu(stock(x)).pow(3).sum())(x),
    )
    same(jacfwd(ours)(x), jacrev(ours)(x))


def test_functional_call_updates_the_buffers_it_was_given(path):
    stock, ours = pair(2)
    before = copy.deepcopy(ours.state_dict())
    given = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    x = example(2)
    same(functional_call(ours, given, (x,)), stock(x))
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    ours.load_state_dict(given)
    same_buffers(ours, stock)


def test_ensemble_of_layers(path):
    models = [pair(2)[1].eval() for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    x = example(2)
    base = copy.deepcopy(models[0]).to("meta")
    y = vmap(lambda p, b: functional_call(base, (p, b), (x,)))(parameters, buffers)
    for i, model in enumerate(models):
        same(y[i], model(x))


@DIMS
@MODES
def test_meta_tensors(dims, mode, path):
    layer = OURS[dims](24, activation="relu", device="meta").train(mode)
    x = torch.empty_like(example(dims), device="meta", requires_grad=True)
    y = layer(x, residual=x)
    y.sum().backward()
    assert y.is_meta
    assert (y.shape, x.grad.shape) == (x.shape, x.shape)


@MODES
def test_fake_tensors(mode, path):
    for inside in (True, False):
        with FakeTensorMode() as fake:
            layer, x = OURS[2](24, activation="relu").train(mode), torch.randn(6, 24, 5, 7, requires_grad=True)
            if inside:
                y = layer(x)
        if not inside:
            y = layer(x)
        assert y.fake_mode is fake
        assert y.shape == x.shape


@pytest.mark.parametrize("transformed", ["vmap", "jvp", "mode"])
def test_the_kernel_stays_out(transformed, kernel_calls):
    _, ours = quiet_pair(2)
    x = example(2)
    if transformed == "vmap":
        vmap(ours)(x[None])
    elif transformed == "jvp":
        jvp(ours, (x,), (x,))
    else:
        with FakeTensorMode(allow_non_fake_inputs=True):
            ours(x)
    assert not kernel_calls
    bn.functional.batch_norm(x, None, None, training=True)
    assert len(kernel_calls) == 1


@pytest.mark.parametrize("place", ["input", "weight", "residual", "gradient"])
@pytest.mark.parametrize("recording", [True, False], ids=["graph", "no_grad"])
def test_tensors_that_outlived_a_transform(place, recording, path):
    """Such a tensor looks like any other, and has no memory of its own."""
    kept = []
    values = torch.randn(24) if place == "weight" else torch.randn(6, 24, 5, 5)
    grad(lambda w: (kept.append(w * 1), (w * w).sum())[1])(values)
    layer, x = bn.BatchNorm2d(24), torch.randn(6, 24, 5, 5, requires_grad=True)
    results = []
    with torch.set_grad_enabled(recording):
        for tensor in (values, kept[0]):
            if place == "weight":
                del layer.weight
                layer.weight = tensor
            y = layer(tensor if place == "input" else x, residual=tensor if place == "residual" else None)
            if place == "gradient" and recording:
                (y,) = torch.autograd.grad(y, x, tensor)
            results.append(y.detach())
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
