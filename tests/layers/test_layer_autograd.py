"""Whatever autograd is asked to do around the layer, it does as around torch's."""

import threading
from contextlib import nullcontext

import pytest
import torch
from layer_cases import OURS, TOLERANCE, example, pair, same, same_buffers
from torch.utils.checkpoint import checkpoint

import batchnorm as bn

NEEDS = {
    "all": ("x", "weight", "bias", "residual"),
    "x": ("x",),
    "weight": ("weight",),
    "bias": ("bias",),
    "residual": ("residual",),
    "parameters": ("weight", "bias"),
    "frozen_weight": ("x", "bias", "residual"),
    "ends": ("x", "residual"),
}


def gradients(layer, needs, activation, fused):
    torch.manual_seed(5)
    x, residual = example(2), torch.randn(6, 24, 5, 7)
    tensors = {"x": x, "residual": residual, "weight": layer.weight, "bias": layer.bias}
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in needs)
    if fused:
        layer.activation = activation
        y = layer(x, residual=residual)
    else:
        y = torch.relu(layer(x) + residual) if activation == "relu" else layer(x) + residual
    y.pow(2).sum().backward()
    return {name: tensor.grad for name, tensor in tensors.items()}


@pytest.mark.parametrize("needs", NEEDS)
@pytest.mark.parametrize("activation", ["none", "relu"])
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_only_what_is_asked_for_gets_a_gradient(needs, activation, mode, path):
    stock, ours = pair(2)
    expected = gradients(stock.train(mode), NEEDS[needs], activation, fused=False)
    actual = gradients(ours.train(mode), NEEDS[needs], activation, fused=True)
    for name in expected:
        assert (actual[name] is not None) == (name in NEEDS[needs])
        same(actual[name], expected[name])


def test_nothing_asked_for_leaves_no_graph(path):
    layer = OURS[2](24)
    layer.learn = False
    assert layer(example(2)).grad_fn is None
    assert OURS[2](24, affine=False)(example(2)).requires_grad is False


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_no_grad_and_inference_mode(context, mode, path):
    stock, ours = pair(2)
    x = example(2).requires_grad_()
    with context():
        y, z = ours.train(mode)(x), stock.train(mode)(x)
    same(y, z)
    assert not y.requires_grad
    assert y.is_inference() == (context is torch.inference_mode)
    same_buffers(ours, stock)
    ours(x).sum().backward()  # and afterwards the layer trains
    assert x.grad is not None


def test_a_layer_born_in_inference_mode(path):
    with torch.inference_mode():
        stock, ours = pair(2)
        x = example(2)
        same(ours(x), stock(x))
        same_buffers(ours, stock)
        same(ours.eval()(x), stock.eval()(x))


def test_in_place_operation_after_the_layer(path):
    stock, ours = pair(2)
    x = example(2)
    results = []
    for layer in (stock, ours):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.mul_(3).add_(1)
        results.append(torch.autograd.grad(y.pow(3).sum(), [leaf, *layer.parameters()]))
    for actual, expected in zip(results[1], results[0], strict=True):
        same(actual, expected)


def test_in_place_operation_on_the_input_is_noticed(path):
    x = example(2).requires_grad_()
    hidden = x * 1
    y = OURS[2](24)(hidden)
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("activation", ["relu", "relu6", "leaky_relu"])
def test_in_place_operation_on_an_output_behind_a_residual_is_noticed_or_harmless(path, activation):
    layer, x = OURS[2](24, activation=activation), example(2).requires_grad_()
    residual = torch.randn_like(x).requires_grad_()
    wanted = [x, residual, layer.weight, layer.bias]
    expected = torch.autograd.grad(layer(x, residual=residual).sum(), wanted)
    y = layer(x, residual=residual)
    y.neg_().sub_(1)
    if path == "torch" and activation == "relu":  # the output determines its slope
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    else:  # by bits of the kernel's own, or by the input
        for actual, other in zip(torch.autograd.grad(-y.sum(), wanted), expected, strict=True):
            same(actual, other)


@pytest.mark.parametrize("training", [True, False])
def test_leaky_relu_has_no_upper_end(path, training):
    layer = OURS[2](24, activation="leaky_relu").train(training)
    x, residual = example(2), torch.zeros_like(example(2))
    residual[1, 2, 0, 0] = torch.inf
    residual.requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x, residual=residual), residual, torch.ones_like(x))
    assert gradient[1, 2, 0, 0] == 1


@pytest.mark.parametrize("activation", ["relu", "relu6"])
@pytest.mark.parametrize("again", [False, True], ids=["first", "create_graph"])
def test_an_infinite_gradient_does_not_pass_where_the_activation_is_flat(path, activation, again):
    layer, x = OURS[2](24, activation=activation), example(2).requires_grad_()
    residual = torch.randn_like(x).requires_grad_()
    y = layer(x, residual=residual)
    dy = torch.where(y == 0, torch.inf, 1.0)
    for gradient in torch.autograd.grad(y, [x, residual], dy, create_graph=again):
        assert gradient.isfinite().all()


def test_saved_tensors_may_come_back_in_another_type(path):
    layer, x = OURS[2](24, activation="relu"), example(2)
    residual = torch.randn_like(x).requires_grad_()
    (expected,) = torch.autograd.grad(layer(x, residual=residual).sum(), residual)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        y = layer(x, residual=residual)
    (found,) = torch.autograd.grad(y.sum(), residual)
    assert torch.equal(found, expected)


def test_in_place_operation_on_a_residual_that_backward_needs_is_noticed(path):
    x = example(2).requires_grad_()
    residual = torch.randn_like(x)
    y = OURS[2](24, activation="silu")(x, residual=residual)
    residual.add_(1)
    if path != "torch":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    else:  # torch's silu keeps the sum instead
        y.sum().backward()


def test_updates_are_visible_to_autograd(path):
    """A running statistic that someone saved for a backward pass has changed, and torch knows."""
    layer = OURS[2](24)
    scale = torch.ones(24, requires_grad=True)
    product = scale * layer.running_var
    layer(example(2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_retain_graph_twice_and_accumulation(path):
    layer, x = OURS[2](24, activation="silu"), example(2).requires_grad_()
    y = layer(x, residual=x.detach()).pow(2).sum()
    y.backward(retain_graph=True)
    once = [t.grad.clone() for t in (x, *layer.parameters())]
    y.backward()
    for tensor, first in zip((x, *layer.parameters()), once, strict=True):
        torch.testing.assert_close(tensor.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_two_passes_before_one_backward(path):
    stock, ours = pair(2)
    a, b = example(2), example(2) * 3
    results = []
    for layer in (stock, ours):
        leaf = a.clone().requires_grad_()
        loss = layer(leaf).pow(3).sum() + layer(b).pow(2).sum()
        results.append(torch.autograd.grad(loss, [leaf, *layer.parameters()]))
    for actual, expected in zip(results[1], results[0], strict=True):
        same(actual, expected)
    same_buffers(ours, stock)


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_the_input_as_its_own_residual(activation, path):
    stock, ours = pair(2)
    ours.activation = activation
    x = example(2)
    act = getattr(torch.nn.functional, activation, lambda z: z)
    results = []
    for run in (lambda x: act(stock(x) + x), lambda x: ours(x, residual=x)):
        leaf = x.clone().requires_grad_()
        results.append(torch.autograd.grad(run(leaf).pow(2).sum(), leaf)[0])
    same(results[1], results[0])


def test_tensor_hooks_see_and_change_gradients(path):
    layer, x = OURS[2](24), example(2).requires_grad_()
    seen = []
    y = layer(x)
    y.register_hook(lambda g: seen.append("y") or g * 2)
    x.register_hook(lambda g: seen.append("x"))
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append("weight"))
    dy = torch.randn_like(y)
    y.backward(dy, retain_graph=True)
    assert sorted(seen) == ["weight", "x", "y"]
    same(layer.bias.grad, 2 * dy.sum((0, 2, 3)))


@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")
def test_anomaly_mode(path):
    layer, x = OURS[2](24), example(2).requires_grad_()
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        y = layer(x)
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        with pytest.raises(RuntimeError, match="returned nan values"):
            torch.autograd.grad(y, x, torch.full_like(y, torch.nan))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non_reentrant"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_checkpoint(reentrant, last, path):
    stock, ours = pair(2)
    x = example(2, last=last)
    results = []
    for layer in (stock, ours):
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        y = checkpoint(lambda t, layer=layer: layer(t).relu(), leaf, use_reentrant=reentrant)
        y.pow(2).sum().backward()
        results.append([leaf.grad, *(p.grad for p in layer.parameters())])
    for actual, expected in zip(results[1], results[0], strict=True):
        same(actual, expected)
    same_buffers(ours, stock)  # torch's, too, moves twice: checkpoint runs the forward pass twice


def backwards(tensor):
    """The same numbers, with the last dimension first in memory."""
    order = tuple(reversed(range(tensor.dim())))
    return tensor.detach().permute(order).contiguous().permute(order)


HOOKS = {
    "transposed": lambda: torch.autograd.graph.saved_tensors_hooks(backwards, lambda t: t),
    "save_on_cpu": lambda: torch.autograd.graph.save_on_cpu(),
    "other_strides": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous(), lambda t: t),
    "through_numpy": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.detach().numpy().copy(order="C"), torch.from_numpy
    ),
}


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_hooks_on_saved_tensors(hooks, last, activation, path):
    stock, ours = pair(2)
    ours.activation = activation
    act = getattr(torch.nn.functional, activation)
    x, residual = example(2, last=last), example(2, last=last)
    results = []
    for run in (lambda x: act(stock(x) + residual), lambda x: ours(x, residual=residual)):
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        with HOOKS[hooks]():
            y = run(leaf)
        results.append(torch.autograd.grad(y.pow(2).sum(), leaf)[0])
    same(results[1], results[0])


def test_hooks_on_a_saved_mask(path):
    layer, x = bn.BatchNorm2d(24), example(2)
    mask, dy = torch.rand(x.shape[0], *x.shape[2:]) < 0.7, example(2)
    results = []
    for hooks in (nullcontext(), HOOKS["transposed"]()):
        leaf = x.clone().requires_grad_()
        with hooks:
            y = layer(leaf, mask=mask)
        results.append(torch.autograd.grad(y, leaf, dy)[0])
    same(results[1], results[0])


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_gradients_for_several_cotangents_at_once(mode, path):
    stock, ours = pair(2)
    x = example(2)
    dy = torch.randn(3, *x.shape)
    results = []
    for layer in (stock, ours):
        leaf = x.clone().requires_grad_()
        y = layer.train(mode)(leaf)
        results.append(torch.autograd.grad(y, [leaf, *layer.parameters()], dy, is_grads_batched=True))
    for actual, expected in zip(results[1], results[0], strict=True):
        same(actual, expected)


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_autocast_behaves_as_torchs(mode, path):
    conv = torch.nn.Conv2d(3, 24, 3)
    stock, ours = pair(2)
    image = torch.randn(4, 3, 9, 9)
    results = []
    for layer in (stock, ours):
        x = image.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = conv(x)
            assert hidden.dtype == torch.bfloat16
            y = layer.train(mode)(hidden)
            z = layer(image.repeat(1, 8, 1, 1))  # an input autocast did not touch
        grads = torch.autograd.grad(y.float().pow(3).sum(), [x, *layer.parameters()])
        results.append([y, z, *grads])
    for actual, expected in zip(results[1], results[0], strict=True):
        same(actual, expected, TOLERANCE[torch.bfloat16])  # float32 gradients, too, come through bfloat16 ones
    same_buffers(ours, stock)


@pytest.mark.parametrize(("shape", "repeats"), [((6, 24, 5, 7), 30), ((8, 24, 40, 40), 6)], ids=["small", "large"])
def test_threads_with_layers_of_their_own(shape, repeats, path):
    layers = [bn.BatchNorm2d(24, activation="relu") for _ in range(4)]
    inputs = [example(2, shape=shape) for _ in layers]
    expected = []
    for x in inputs:
        leaf, layer = x.clone().requires_grad_(), bn.BatchNorm2d(24, activation="relu")
        expected.append(torch.autograd.grad(layer(leaf).pow(3).sum(), leaf)[0])
    failures = []

    def work(layer, x, expected):
        try:
            for _ in range(repeats):
                leaf = x.clone().requires_grad_()
                (dx,) = torch.autograd.grad(layer(leaf).pow(3).sum(), leaf)
                same(dx, expected)
            assert int(layer.num_batches_tracked) == repeats
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=a) for a in zip(layers, inputs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
