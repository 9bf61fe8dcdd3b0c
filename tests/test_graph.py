"""What watching one run sees: producers, readers, writes in place, shared memory; and that it leaves nothing behind."""

import dataclasses
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import batchnorm as bn
from zoo import Run

X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def names(graph):
    return [call.name for call in graph.calls]


def readers(graph, value):
    return [call.name for call in graph.consumers(value)]


# ---- calls, producers, readers


def test_modules_functions_and_operators_in_order():
    model = Run(lambda m, x: torch.cat([F.relu(m.conv(x)) + 1, x[:, :2]], 1).mean(), conv=nn.Conv2d(3, 2, 1))
    graph = bn.trace(model, X)
    assert names(graph) == ["conv", "relu", "add", "getitem", "cat", "mean"]
    assert [call.kind for call in graph.calls][:2] == ["module", "function"]
    assert readers(graph, graph.inputs[0]) == ["conv", "getitem"]
    assert graph.producer(graph.of("conv")[0].outputs[0]).target is model.conv
    assert graph.producer(graph.inputs[0]) is None
    assert graph.values[graph.of("conv")[0].outputs[0]].shape == (4, 2, 6, 6)
    assert graph.feeds_output(graph.calls[-1].outputs[0])
    assert not graph.feeds_output(graph.inputs[0])


def test_what_is_inside_a_layer_of_torch_is_not_looked_at():
    model = Run(lambda m, x: m.lstm(x)[0], lstm=nn.LSTM(3, 5, 2))
    graph = bn.trace(model, torch.randn(7, 2, 3))
    assert names(graph) == ["lstm"]
    assert len(graph.calls[0].outputs) == 3


def test_the_callers_scope():
    inner = Run(lambda m, x: F.relu(m.bn(x)), bn=nn.BatchNorm2d(3))
    graph = bn.trace(Run(lambda m, x: m.inner(x) * 2, inner=inner), X)
    assert [(call.name, call.scope) for call in graph.calls] == [("inner.bn", "inner"), ("relu", "inner"), ("mul", "")]


def test_looks_at_a_tensor_are_not_calls():
    def forward(m, x):
        assert x.dim() == 4
        assert x.is_contiguous()
        assert x.dtype == torch.float32
        assert len(x) == x.shape[0] == x.size(0)
        return F.relu(x)

    assert names(bn.trace(Run(forward), X)) == ["relu"]


@pytest.mark.parametrize("read", [lambda y: y.sum().item(), lambda y: y.tolist(), lambda y: y.numpy(), lambda y: y.data,
                                  lambda y: y.T if y.dim() == 2 else y.mT, lambda y: bool((y > 0).all())])  # fmt: skip
def test_numbers_that_leave_for_python_have_a_reader(read):
    def forward(m, x):
        y = m.conv(x)
        read(y)
        return m.bn(y)

    graph = bn.trace(Run(forward, conv=nn.Conv2d(3, 3, 1), bn=nn.BatchNorm2d(3)).eval(), X)
    assert len(graph.consumers(graph.of("conv")[0].outputs[0])) == 2


def test_attributes_that_are_tensors_have_a_producer():
    graph = bn.trace(Run(lambda m, x: m.fc(x.mT), fc=nn.Linear(6, 2)), torch.randn(2, 6, 3))
    assert names(graph) == ["mT", "fc"]
    assert graph.producer(graph.of("fc")[0].inputs[0]).name == "mT"


def test_a_tensor_that_only_lends_its_shape_is_not_read():
    def forward(m, x):
        y = m.fc(x)
        return m.bn(y.flatten(0, 1)).reshape_as(y) + torch.zeros_like(y) + y.new_zeros(1)

    model = Run(forward, fc=nn.Linear(3, 4), bn=nn.BatchNorm1d(4)).eval()
    graph = bn.trace(model, torch.randn(2, 5, 3))
    assert readers(graph, graph.of("fc")[0].outputs[0]) == ["flatten"]
    assert readers(graph, graph.of("bn")[0].outputs[0]) == ["reshape_as"]


def test_functions_that_read_a_layers_weights():
    model = Run(lambda m, x: F.conv2d(m.conv(x), m.conv.weight), conv=nn.Conv2d(3, 3, 1))
    graph = bn.trace(model, X)
    assert [call.name for call in graph.readers_of("conv.weight")] == ["conv2d"]
    assert graph.readers_of("conv.bias") == []


def test_forward_called_directly_shows_as_functions():
    graph = bn.trace(Run(lambda m, x: m.conv.forward(x), conv=nn.Conv2d(3, 3, 1)), X)
    assert names(graph) == ["conv2d"]
    assert graph.unused == ("conv",)


# ---- tensors that are written to


@pytest.mark.parametrize("write", [
    lambda y: y.relu_(), lambda y: y.add_(1), lambda y: F.relu(y, inplace=True), lambda y: y.__iadd__(1),
    lambda y: y.__setitem__(0, 0.0), lambda y: y.view(-1).relu_(), lambda y: y[:, 0].zero_(),
    lambda y: torch.add(y, 1, out=y), lambda y: y.data.mul_(2),
    lambda y: y.detach().mul_(2), lambda y: torch._foreach_add_([y], 1.0), lambda y: nn.ReLU(inplace=True)(y),
])  # fmt: skip
def test_a_write_makes_a_new_value(write):
    def forward(m, x):
        y = m.conv(x)
        write(y)
        return m.bn(y)

    graph = bn.trace(Run(forward, conv=nn.Conv2d(3, 3, 1), bn=nn.BatchNorm2d(3)).eval(), X)
    made, read = graph.of("conv")[0].outputs[0], graph.of("bn")[0].inputs[0]
    assert made != read
    assert graph.producer(read).kind == "function"


def test_a_write_reaches_the_views_taken_before():
    def forward(m, x):
        y = m.conv(x)
        flat = y.view(4, -1)
        y.relu_()
        return m.fc(flat)

    graph = bn.trace(Run(forward, conv=nn.Conv2d(3, 3, 1), fc=nn.Linear(108, 2)), X)
    assert graph.producer(graph.of("fc")[0].inputs[0]).name == "relu"


def test_what_is_not_written_stays_the_same_value():
    def forward(m, x):
        y = m.conv(x)
        y.view(-1)
        return m.bn(y)

    graph = bn.trace(Run(forward, conv=nn.Conv2d(3, 3, 1), bn=nn.BatchNorm2d(3)).eval(), X)
    assert graph.of("conv")[0].outputs[0] == graph.of("bn")[0].inputs[0]
    assert readers(graph, graph.of("conv")[0].outputs[0]) == ["view", "bn"]


def test_inplace_modules():
    graph = bn.trace(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True), nn.Tanh()), X)
    assert readers(graph, graph.of("0")[0].outputs[0]) == ["1"]
    assert readers(graph, graph.of("1")[0].outputs[0]) == ["2"]
    assert not graph.of("1")[0].passes


def test_writes_inside_inference_mode_are_told_by_the_name():
    def forward(m, x):
        with torch.inference_mode():
            y = m.conv(x)
            flat = y.view(-1)
            y.relu_()
            return flat * 2

    graph = bn.trace(Run(forward, conv=nn.Conv2d(3, 3, 1)), X)
    assert graph.producer(graph.calls[-1].inputs[0]).name == "relu"


def test_calls_that_hand_on_what_they_are_given():
    model = nn.Sequential(nn.Identity(), nn.Dropout(), nn.ReLU()).eval()
    graph = bn.trace(model, X)
    assert [call.passes for call in graph.calls] == [True, True, False]
    assert [call.passes for call in bn.trace(Run(lambda m, x: F.dropout(x.contiguous(), 0.5, False)), X).calls] == [
        True,
        True,
    ]


# ---- modules


def test_a_module_called_several_times():
    model = Run(lambda m, x: m.bn(m.bn(x)), bn=nn.BatchNorm2d(3))
    graph = bn.trace(model, X)
    assert len(graph.of("bn")) == len(graph.of(model.bn)) == graph.times["bn"] == 2
    assert graph.times[""] == 1


def test_a_module_under_two_paths():
    relu = nn.ReLU()
    model = nn.Sequential(relu, nn.Tanh(), relu)
    graph = bn.trace(model, X)
    assert graph.of("0") == graph.of("2")
    assert len(graph.of("0")) == 2
    assert graph.times == {"": 1, "0": 2, "1": 1, "2": 2}


def test_unused_modules():
    model = Run(lambda m, x: m.a(x), a=nn.ReLU(), b=nn.Tanh(), c=nn.ModuleList([nn.Tanh()]), d=nn.Sequential())
    graph = bn.trace(model, X)
    assert graph.unused == ("b", "c.0", "d")
    assert graph.of("b") == []
    assert graph.of("no such path") == []


def test_lists_and_dictionaries_of_modules():
    model = Run(
        lambda m, x: m.dict["b"](m.list[1](x)),
        list=nn.ModuleList([nn.Tanh(), nn.ReLU()]), dict=nn.ModuleDict({"a": nn.Tanh(), "b": nn.ReLU()}),
    )  # fmt: skip
    assert names(bn.trace(model, X)) == ["list.1", "dict.b"]


def test_a_scripted_module_is_one_call():
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()))
    graph = bn.trace(nn.Sequential(scripted, nn.Tanh()), X)
    assert names(graph) == ["0", "1"]
    assert graph.of("1")[0].inputs == graph.of("0")[0].outputs
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks


def test_a_wrapper_for_several_devices():
    graph = bn.trace(nn.DataParallel(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU())), X)
    assert names(graph) == ["module.0", "module.1"]


def test_a_function_with_its_own_backward():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    model = Run(lambda m, x: m.relu(Double.apply(m.conv(x))), conv=nn.Conv2d(3, 3, 1), relu=nn.ReLU())
    graph = bn.trace(model, X)
    assert graph.consumers(graph.of("conv")[0].outputs[0])
    assert graph.producer(graph.of("relu")[0].inputs[0]) is not None


def test_control_flow_on_values_is_followed():
    model = Run(lambda m, x: m.a(x) if x.mean() > 0 else m.b(x), a=nn.ReLU(), b=nn.Tanh())
    assert names(bn.trace(model, X.abs()))[-1] == "a"
    assert names(bn.trace(model, -X.abs()))[-1] == "b"


def test_opaque_says_what_is_one_call():
    block = Run(lambda m, x: m.relu(x) + 1, relu=nn.ReLU())
    assert names(bn.trace(nn.Sequential(block), X)) == ["0.relu", "add"]
    assert names(bn.trace(nn.Sequential(block), X, opaque=lambda m: m is block)) == ["0"]


def test_an_opaque_module_inside_another_is_not_seen():
    inner = nn.Sequential(nn.ReLU())
    outer = nn.Sequential(inner, nn.Tanh())
    graph = bn.trace(nn.Sequential(outer, nn.Sigmoid()), X, opaque=lambda m: m in (inner, outer))
    assert names(graph) == ["0", "1"]


def test_arguments_by_position_and_by_name():
    layer = bn.BatchNorm2d(3)
    model = Run(lambda m, x: m.bn(residual=x, input=x * 2) + m.bn(x, x), bn=layer)
    graph = bn.trace(model, X)
    first, second = graph.of("bn")
    assert graph.producer(first.arguments["input"]).name == "mul"
    assert first.arguments["residual"] == graph.inputs[0]
    assert second.arguments == {"0": graph.inputs[0], "1": graph.inputs[0]}
    assert second.inputs == (graph.inputs[0],)


def test_half_and_whole_numbers():
    graph = bn.trace(Run(lambda m, i: m.e(i).bfloat16(), e=nn.Embedding(5, 2)), torch.tensor([1, 2]))
    assert [value.dtype for value in graph.values] == [torch.int64, torch.float32, torch.bfloat16]


def test_the_text_of_a_graph():
    text = str(bn.trace(Run(lambda m, x: m.relu(x).sum(), relu=nn.ReLU()), torch.ones(2, 3)))
    assert text.splitlines() == ["%1 = relu (ReLU)[%0]  2x3", "%2 = sum[%1]  scalar"]


def test_questions_do_not_walk_over_all_calls():
    graph = bn.trace(nn.Sequential(*[nn.ReLU() for _ in range(50)]), X)

    class Counted(list):
        walks = 0

        def __iter__(self):
            type(self).walks += 1
            return super().__iter__()

    graph.calls = Counted(graph.calls)
    for value in range(50):
        graph.consumers(value)
        graph.of(str(value))
    assert Counted.walks == 1


def test_the_index_follows_when_somebody_changes_the_calls():
    model = nn.Sequential(nn.ReLU(), nn.Tanh())
    graph = bn.trace(model, X)
    assert len(graph.of("1")) == 1
    graph.calls.append(graph.of("1")[0])
    assert len(graph.of("1")) == 2
    graph.calls = [dataclasses.replace(call, target=model[0]) for call in graph.calls]  # as many as there were
    assert len(graph.of("0")) == 3


# ---- nothing is left behind


def state(model):
    return (
        {k: v.clone() for k, v in model.state_dict().items()},
        [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks), sorted(vars(m))) for m in model.modules()],
    )


def same(a, b):
    return a[1] == b[1] and a[0].keys() == b[0].keys() and all(torch.equal(a[0][k], b[0][k]) for k in a[0])


class Failing(nn.Module):
    def forward(self, x):
        self.seen = x
        raise KeyError("from the model")


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails):
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(), bn.FrozenBatchNorm(3), Failing() if fails else nn.ReLU())
    model[1].eval()
    model[0].register_forward_hook(lambda *a: None)
    before, random = state(model), torch.get_rng_state()
    if fails:
        with pytest.raises(KeyError, match="from the model"):
            bn.trace(model, X)
    else:
        bn.trace(model.train(), X)
        before = (before[0], state(model)[1])
    assert same(state(model), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.overrides._get_current_function_mode() is None
    assert torch.is_grad_enabled()


def test_an_error_that_the_model_catches():
    def forward(m, x):
        try:
            m.bad(x)
        except KeyError:
            return m.inner(x)

    inner = Run(lambda m, x: F.relu(x))
    graph = bn.trace(Run(forward, bad=Failing(), inner=inner), X)
    assert [(call.name, call.scope) for call in graph.calls] == [("relu", "inner")]
    torch_layer = nn.Conv2d(7, 7, 1)  # raises: the example has 3 channels

    def again(m, x):
        try:
            m.bad(x)
        except RuntimeError:
            return F.relu(x)

    graph = bn.trace(Run(again, bad=torch_layer), X)
    assert names(graph) == ["bad", "relu"]
    assert graph.calls[0].outputs == ()


def test_under_inference_mode_and_with_gradients():
    with torch.inference_mode():
        graph = bn.trace(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True)), X)
    assert names(graph) == ["0", "1"]
    assert len(bn.trace(nn.Sequential(nn.ReLU(inplace=True)), X.clone().requires_grad_()).calls) == 1


def test_a_compiled_model_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, while it imports its compiler
        compiled = nn.Sequential(torch.compile(nn.Linear(3, 3)))
    with pytest.raises(bn.BatchNormError, match=r"0 \(OptimizedModule\) is compiled; .*_orig_mod"):
        bn.trace(compiled, torch.randn(2, 3))


def test_a_model_without_its_shapes_is_refused():
    with pytest.raises(bn.BatchNormError, match=r"1 \(LazyBatchNorm1d\) does not know its shapes yet"):
        bn.trace(nn.Sequential(nn.Linear(3, 3), nn.LazyBatchNorm1d()), torch.randn(2, 3))


def test_plain_arguments_are_noted():
    graph = bn.trace(Run(lambda m, x: F.avg_pool1d(x.mean(dim=[-1], keepdim=True).squeeze(3), 1, padding=0)), X)
    mean, squeeze, pool = graph.calls
    assert dict(mean.options) == {"dim": [-1], "keepdim": True}
    assert dict(squeeze.options) == {"1": 3}
    assert dict(pool.options) == {"1": 1, "padding": 0}


def test_values_whose_sizes_were_asked_for():
    def forward(m, x):
        a, b, c = x + 1, x + 2, x + 3
        assert a.shape == b.stride() or b.size(0)
        assert c.dtype is not None
        return m.part(a + b + c)

    graph = bn.trace(Run(forward, part=nn.BatchNorm2d(3)), X)  # which looks at its input's shape, unseen
    assert graph.measured == {graph.calls[0].outputs[0], graph.calls[1].outputs[0]}


def test_giving_back_the_second_argument_is_not_passing():
    class Second(nn.Module):
        def forward(self, a, b):
            return b

    for order, passes in ((lambda m, x: m.part(x, x + 1), False), (lambda m, x: m.part(x, x), True)):
        graph = bn.trace(Run(order, part=Second()), X, opaque=lambda module: isinstance(module, Second))
        assert graph.calls[-1].passes is passes
