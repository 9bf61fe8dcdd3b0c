"""Torch's own samples for these modules, with our class in the place of torch's."""

import copy
import pickle

import pytest
import torch
from layer_cases import LAST, OURS, STOCK, same
from torch.func import functional_call

DIMS = pytest.mark.parametrize("dims", [1, 2, 3])
MODES = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)


@pytest.fixture(scope="module")
def module_db():
    # Imported here because it takes seconds, and needs expecttest, of the test extra.
    from torch.testing._internal import common_modules

    return {info.module_cls: info for info in common_modules.module_db}


@pytest.fixture
def samples(module_db):
    def make(dims, dtype, training, requires_grad=True):
        """Pairs of torch's layer and ours in the same state, with the input that torch tests them on."""
        info = module_db[STOCK[dims]]
        inputs = info.module_inputs_func(
            info, device="cpu", dtype=dtype, requires_grad=requires_grad, training=training
        )
        assert len(inputs) >= 6
        for sample in inputs:
            arguments, options = sample.constructor_input.args, sample.constructor_input.kwargs
            stock = STOCK[dims](*arguments, **options, dtype=dtype).train(training)
            ours = OURS[dims](*arguments, **options, dtype=dtype).train(training)
            for name, tensor in stock.state_dict().items():
                if name != "num_batches_tracked":
                    tensor.uniform_(0.5, 1.5)
            ours.load_state_dict(stock.state_dict())
            (x,) = sample.forward_input.args
            yield sample.desc, stock, ours, x

    return make


def outputs_and_gradients(module, x):
    y = module(x)
    torch.manual_seed(3)
    dy = torch.randn_like(y)
    return y, torch.autograd.grad(y, [x, *module.parameters()], dy)


def agree(ours, stock, x, strided=None):
    expected, expected_gradients = outputs_and_gradients(stock, x)
    actual, actual_gradients = outputs_and_gradients(ours, x if strided is None else strided)
    same(actual, expected)
    for a, e in zip(actual_gradients, expected_gradients, strict=True):
        same(a, e)
    for (name, a), (_, e) in zip(ours.state_dict().items(), stock.state_dict().items(), strict=True):
        assert name in stock.state_dict()
        same(a, e)
    return actual, actual_gradients[0]


@DIMS
@MODES
@DTYPES
def test_outputs_gradients_and_buffers(dims, training, dtype, samples, path):
    for _, stock, ours, x in samples(dims, dtype, training):
        agree(ours, stock, x)
        agree(ours, stock, x)


@DIMS
@MODES
@DTYPES
def test_non_contiguous_inputs(dims, training, dtype, samples, path):
    for _, stock, ours, x in samples(dims, dtype, training):
        apart = torch.repeat_interleave(x.detach(), 2, dim=-1)[..., ::2].requires_grad_()
        assert x.numel() == 0 or not apart.is_contiguous()
        agree(ours, stock, x, apart)


@pytest.mark.parametrize("dims", [2, 3])
@MODES
@DTYPES
def test_memory_format(dims, training, dtype, samples, path):
    for _, stock, ours, x in samples(dims, dtype, training):
        for module_last in (False, True):
            a, b = copy.deepcopy(stock), copy.deepcopy(ours)
            if module_last:
                a, b = a.to(memory_format=LAST[dims]), b.to(memory_format=LAST[dims])
            last = x.detach().contiguous(memory_format=LAST[dims]).requires_grad_()
            y, dx = agree(b, a, last)
            assert y.is_contiguous(memory_format=LAST[dims])
            assert dx.is_contiguous(memory_format=LAST[dims])
            y, _ = agree(b, a, x)
            assert y.is_contiguous()


@DIMS
@MODES
def test_gradcheck_and_gradgradcheck(dims, training, samples):
    for _, _, ours, x in samples(dims, torch.float64, training):
        if not x.numel():
            continue
        names = [name for name, _ in ours.named_parameters()]
        parameters = [p.detach().clone().requires_grad_() for p in ours.parameters()]

        def call(x, *parameters, ours=ours, names=names):
            return functional_call(ours, dict(zip(names, parameters, strict=True)), (x,))

        assert torch.autograd.gradcheck(call, (x, *parameters), fast_mode=dims == 3)
        assert torch.autograd.gradgradcheck(call, (x, *parameters), fast_mode=True)


@DIMS
@MODES
def test_pickle(dims, training, samples, path):
    for _, _, ours, x in samples(dims, torch.float32, training, requires_grad=False):
        again = pickle.loads(pickle.dumps(ours))
        assert torch.equal(again(x), ours(x))
        assert repr(again) == repr(ours)


@DIMS
@MODES
def test_error_samples(dims, training, module_db, path):
    info = module_db[STOCK[dims]]
    errors = info.module_error_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=training
    )
    assert errors
    for error in errors:
        sample = error.module_error_input
        arguments, options = sample.constructor_input.args, sample.constructor_input.kwargs
        stock = STOCK[dims](*arguments, **options).train(training)
        (x,) = sample.forward_input.args
        try:
            stock(x)
        except error.error_type:
            with pytest.raises(error.error_type, match=r"eps must be positive|eps is -1\.0; use a number from 0 up"):
                OURS[dims](*arguments, **options).train(training)(x)
        else:
            assert not training
