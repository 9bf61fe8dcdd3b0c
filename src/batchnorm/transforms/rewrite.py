"""Trace a module's forward by torch.fx and rewrite it with fused layers; the module object stays the same.

The new code runs with the module's own submodules and parameters: only its class is exchanged for a subclass with
another ``forward``. So ``state_dict``, ``isinstance``, hooks, ``deepcopy`` and ``pickle`` go on as before.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from batchnorm.errors import BatchNormError
from batchnorm.layers.options import Activation

_ADDS = {operator.add: False, torch.add: False, operator.iadd: True}
_ADD_METHODS = {"add": False, "add_": True, "__add__": False, "__iadd__": True, "__radd__": False}
_RELUS: dict[Any, Activation] = {
    torch.relu: "relu", F.relu: "relu", torch.relu_: "relu", F.relu_: "relu", F.relu6: "relu6",
    F.leaky_relu: "leaky_relu", F.leaky_relu_: "leaky_relu",
}  # fmt: skip
_RELU_METHODS: dict[str, Activation] = {"relu": "relu", "relu_": "relu"}
_SIMPLE = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class Wanted:
    """What is to be fused into a BN layer: a sum with something else, an activation, or both."""

    residual: bool
    activation: bool


@dataclass(frozen=True)
class Recipe:
    """What a rewritten class is made of: enough to make it again in another process."""

    base: type[nn.Module]
    arguments: tuple[str, ...]
    sources: tuple[str, str]  # in evaluation, in training
    names: tuple[Mapping[str, Any], Mapping[str, Any]]  # the globals of each; modules by name
    fixed: Mapping[str, Any]  # attributes whose values the code was made for

    def key(self) -> tuple[Any, ...]:
        """What two recipes have in common if they make the same class."""
        names = ((k, v if isinstance(v, _Named) else id(v)) for each in self.names for k, v in each.items())
        return (self.base, self.sources, tuple(names), repr(sorted(self.fixed.items())))


Fused = tuple[Activation | None, float]  # an activation and its slope


def rewrite(
    block: nn.Module, wanted: Mapping[str, Wanted], inline: frozenset[str] = frozenset()
) -> tuple[type[nn.Module] | None, dict[str, Fused], dict[str, str]]:
    """Return the class to give a module, what each BN layer then has to do, and why others cannot be fused.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.bn = nn.BatchNorm1d(3)
    ...     def forward(self, x):
    ...         return torch.relu(self.bn(x) + x)
    >>> made, fused, left = rewrite(Block(), {"bn": Wanted(residual=True, activation=True)})
    >>> made.__name__, fused, left
    ('FusedBlock', {'bn': ('relu', 0.0)}, {})

    ``wanted`` names BN layers by their path in the module; ``inline`` the Sequentials whose children are called one
    by one, since a BN layer that ends one is to be fused with what comes after. The module is not changed.
    """
    unfit = _unfit(block)
    if unfit:
        return None, {}, dict.fromkeys(wanted, unfit)
    graphs: list[fx.Graph] = []
    fixed: dict[str, Any] = {}
    for training in (False, True):
        twin = copy.deepcopy(block).train(training)
        before = dict(vars(twin))
        try:
            graph = _Tracer(inline).trace(twin)
        except Exception as error:
            said = str(error).strip().split("\n")[0].rstrip(".")
            reason = f"torch.fx cannot trace {type(block).__name__}: {said or type(error).__name__}"
            return None, {}, dict.fromkeys(wanted, reason)
        after = vars(twin)
        if set(after) != set(before) or any(after[k] is not before[k] for k in before):
            reason = f"{type(block).__name__}.forward keeps something in its attributes"
            return None, {}, dict.fromkeys(wanted, reason)
        names = _attribute_names(type(block))
        fixed |= {k: v for k, v in before.items() if k in names and k != "training" and isinstance(v, _SIMPLE)}
        graphs.append(graph)
    found: list[dict[fx.Node, _Match]] = []
    fused: dict[str, Fused] = {}
    left: dict[str, str] = {}
    for graph in graphs:
        matches, reasons = _match(graph, block, wanted)
        found.append(matches)
        left.update(reasons)
        for match in matches.values():
            path = str(match.norm.target)
            if fused.setdefault(path, match.does) != match.does:
                left[path] = "its calls are followed by different activations"
    for path in wanted:
        if path not in fused and path not in left:
            left[path] = f"the traced forward of {type(block).__name__} does not call it"
    fused = {path: does for path, does in fused.items() if path not in left}
    if not fused:
        return None, {}, left
    for graph, matches in zip(graphs, found, strict=True):
        for match in reversed(matches.values()):
            if match.norm.target in fused:
                _replace(graph, match)
        graph.lint()
    return make(_recipe(block, graphs, fixed)), fused, left


def _unfit(block: nn.Module) -> str:
    name = type(block).__name__
    if "forward" in vars(block):
        return f"this {name} has a forward of its own, apart from its class's"
    if isinstance(block, (torch.jit.ScriptModule, fx.GraphModule)):
        return f"a {name} is code already compiled"
    if hasattr(type(block), "_recipe"):
        return f"the forward of {name} is rewritten already"
    for parameter in list(inspect.signature(type(block).forward).parameters.values())[1:]:
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            return f"{name}.forward takes any arguments (*{parameter.name})"
        if parameter.default is not parameter.empty:
            return f"{name}.forward has an optional argument ({parameter.name}), which traced code would fix"
    return ""


def _attribute_names(kind: type[nn.Module]) -> set[str]:
    """The names that a class's forward, and the methods it may call, look up."""
    names: set[str] = set()
    for base in kind.__mro__:
        if base in (nn.Module, object):
            continue
        for value in vars(base).values():
            code = getattr(inspect.unwrap(value) if callable(value) else None, "__code__", None)
            if code is not None:
                names |= set(code.co_names)
    return names


class _Tracer(fx.Tracer):
    """Looks into a module's own forward and nowhere else, except for the Sequentials to inline."""

    def __init__(self, inline: frozenset[str]) -> None:
        super().__init__()
        self.inline = inline

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self.inline


@dataclass(frozen=True)
class _Match:
    """The nodes that become one: the BN call, perhaps a sum, perhaps an activation."""

    norm: fx.Node
    residual: fx.Node | None
    chain: tuple[fx.Node, ...]  # what follows the BN call and is replaced
    does: Fused


def _match(
    graph: fx.Graph, block: nn.Module, wanted: Mapping[str, Wanted]
) -> tuple[dict[fx.Node, _Match], dict[str, str]]:
    matches: dict[fx.Node, _Match] = {}
    left: dict[str, str] = {}
    taken: set[fx.Node] = set()
    order = {node: i for i, node in enumerate(graph.nodes)}
    for path, want in wanted.items():
        for node in graph.find_nodes(op="call_module", target=path):
            match = _match_one(node, want, block, order)
            if isinstance(match, _Match) and taken & set(match.chain):
                match = "the sum is fused into the other layer that it adds"
            if isinstance(match, str):
                left[path] = match
                break
            taken |= set(match.chain)
            matches[node] = match
    return {node: m for node, m in matches.items() if m.norm.target not in left}, left


def _match_one(norm: fx.Node, want: Wanted, block: nn.Module, order: Mapping[fx.Node, int]) -> _Match | str:
    if len(norm.args) != 1 or norm.kwargs or not isinstance(norm.args[0], fx.Node):
        return "it is called with more than one tensor"
    x = norm.args[0]
    last, residual = norm, None
    chain: list[fx.Node] = []
    if want.residual:
        summed = _reader(norm)
        if summed is None:
            return "several calls read its output"
        added = _addends(summed)
        if added is None:
            return f"{summed} follows, which is not a plain sum"
        first, second, inplace = added
        residual = second if first is norm else first
        if not isinstance(residual, fx.Node) or residual is norm:
            return "it is added to a constant, or to itself"
        if inplace and first is not norm:
            return "it is added in place to something that others may hold"
        chain.append(summed)
        last = summed
    does: Fused = (None, 0.0)
    if want.activation:
        activated = _reader(last)
        if activated is None:
            return "several read what goes into the activation"
        activation = _activation(activated, block)
        if isinstance(activation, str):
            return activation
        does = activation
        chain.append(activated)
    # The fused call stands where the last one stood: what it reads must still be what it was.
    for held, since in ((x, norm), (residual, chain[0])):
        users = [user for user in held.users if user not in chain] if held is not None else []
        if any(order[since] < order[user] < order[chain[-1]] for user in users):
            return f"{held} is used in between, and may have changed"
    return _Match(norm, residual, tuple(chain), does)


def _reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _addends(node: fx.Node) -> tuple[Any, Any, bool] | None:
    """The two things that a node adds, and whether into the first of them."""
    if len(node.args) != 2 or node.kwargs:
        return None
    if node.op == "call_function" and node.target in _ADDS:
        return node.args[0], node.args[1], _ADDS[node.target]
    if node.op == "call_method" and node.target in _ADD_METHODS:
        return node.args[0], node.args[1], _ADD_METHODS[str(node.target)]
    return None


def _activation(node: fx.Node, block: nn.Module) -> Fused | str:
    name: Activation | None = None
    slope: Any = 0.0
    if node.op == "call_module":
        found = activation_of(block.get_submodule(str(node.target)))
        return found if found is not None and len(node.all_input_nodes) == 1 else f"{node.target} follows"
    if node.op == "call_function":
        name = _RELUS.get(node.target)
    elif node.op == "call_method":
        name = _RELU_METHODS.get(str(node.target))
    if name is None or len(node.all_input_nodes) != 1:
        return f"{node} follows"
    if name == "leaky_relu":
        slope = node.args[1] if len(node.args) > 1 else node.kwargs.get("negative_slope", 0.01)
        if not isinstance(slope, (int, float)) or slope < 0:
            return f"the negative slope of {node} is {slope}"
    return name, float(slope)


def activation_of(module: nn.Module) -> Fused | None:
    """Return an activation module's name among ours and its slope, or None if we have no such.

    >>> activation_of(nn.LeakyReLU(0.2)), activation_of(nn.Tanh())
    (('leaky_relu', 0.2), None)
    """
    kind = type(module)
    if isinstance(module, nn.LeakyReLU) and kind is nn.LeakyReLU:
        return ("leaky_relu", float(module.negative_slope)) if module.negative_slope >= 0 else None
    names: dict[type, Activation] = {nn.ReLU: "relu", nn.ReLU6: "relu6"}
    name = names.get(kind)
    return None if name is None else (name, 0.0)


def _replace(graph: fx.Graph, match: _Match) -> None:
    last = match.chain[-1]
    named: dict[str, Any] = {} if match.residual is None else {"residual": match.residual}
    with graph.inserting_before(last):
        new = graph.call_module(str(match.norm.target), match.norm.args, named)
    last.replace_all_uses_with(new)
    for node in (*reversed(match.chain), match.norm):
        graph.erase_node(node)


# ---- the class


def _recipe(block: nn.Module, graphs: list[fx.Graph], fixed: Mapping[str, Any]) -> Recipe:
    sources, names = [], []
    for graph in graphs:
        code = graph.python_code("self")
        sources.append(code.src)
        used = set(next(c for c in compile(code.src, "<fused>", "exec").co_consts if hasattr(c, "co_names")).co_names)
        used |= set(compile(code.src, "<fused>", "exec").co_names)
        names.append({k: _Named(v.__name__) if isinstance(v, ModuleType) else v
                      for k, v in code.globals.items() if k in used})  # fmt: skip
    arguments = tuple(inspect.signature(type(block).forward).parameters)[1:]
    return Recipe(type(block), arguments, (sources[0], sources[1]), (names[0], names[1]), dict(fixed))


@dataclass(frozen=True)
class _Named:
    """A Python module, by name: the thing itself cannot be pickled."""

    name: str


_made: dict[tuple[Any, ...], type[nn.Module]] = {}


def make(recipe: Recipe) -> type[nn.Module]:
    """Make the class of a recipe: a subclass that differs in ``forward`` only.

    >>> source = "def forward(self, x):\\n    return self.fc(x)"
    >>> make(Recipe(nn.Module, ("x",), (source, source), ({}, {}), {})).__name__
    'FusedModule'
    """
    if recipe.key() in _made:  # blocks that do the same have the same class, as before, and so have copies
        return _made[recipe.key()]
    evaluate, train = (_compiled(s, n) for s, n in zip(recipe.sources, recipe.names, strict=True))
    if recipe.sources[0] == recipe.sources[1]:
        train = evaluate
    fixed, arguments = tuple(recipe.fixed.items()), recipe.arguments

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        for name, value in fixed:
            if getattr(self, name) != value:
                raise BatchNormError(
                    f"{name} is {getattr(self, name)!r}, but the forward was rewritten for {value!r}",
                    where=made.__name__,
                    do="set it first, then fuse",
                )
        if named:
            given = (*given, *(named.pop(name) for name in arguments[len(given) :] if name in named))
            if named:
                raise TypeError(f"{made.__name__}.forward() has no argument {next(iter(named))!r}")
        return (train if self.training else evaluate)(self, *given)

    def reduce(self: Any, protocol: Any) -> Any:
        parts = super(made, self).__reduce_ex__(max(2, int(protocol)))
        return (_empty, (recipe,), *parts[2:])

    body = {"forward": forward, "__reduce_ex__": reduce, "_recipe": recipe, "__doc__": recipe.base.__doc__}
    made: Any = type(f"Fused{recipe.base.__name__}", (recipe.base,), {**body, "__module__": __name__})
    _made[recipe.key()] = made
    return _made[recipe.key()]


def _compiled(source: str, names: Mapping[str, Any]) -> Callable[..., Any]:
    space: dict[str, Any] = {k: import_module(v.name) if isinstance(v, _Named) else v for k, v in names.items()}
    exec(compile(source, "<fused>", "exec"), space)
    function: Callable[..., Any] = space["forward"]
    return function


def _empty(recipe: Recipe) -> nn.Module:
    made = make(recipe)
    return made.__new__(made)
