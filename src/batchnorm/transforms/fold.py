"""``fold``: merge BN layers into the linear layers next to them (the last lines of Algorithm 2)."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

from batchnorm.checks import check_names
from batchnorm.dataflow import Call, Graph
from batchnorm.errors import BatchNormError
from batchnorm.graph import trace
from batchnorm.layers.batch import _BatchNormBase
from batchnorm.preserve import in_mode
from batchnorm.records import Change, Report
from batchnorm.transforms.affine import (
    Affine,
    Finished,
    New,
    affine_of,
    finish_of,
    is_norm,
    is_plain,
    lost_in,
    same,
    scaled_inputs,
    scaled_outputs,
    unfit,
    write,
)
from batchnorm.transforms.changed import Changed
from batchnorm.transforms.clones import Clone, clone_for, in_place_of, memory_of, norms_after
from batchnorm.transforms.follow import copied_with, scripted_norms
from batchnorm.transforms.freeze import OWN_FORWARD, check_reached
from batchnorm.transforms.left_behind import left_behind
from batchnorm.transforms.neighbours import Neighbours, Piece, few, finishes, main
from batchnorm.transforms.outputs import Forward
from batchnorm.transforms.stages import in_stages
from batchnorm.transforms.verify import check_arguments, verify


@in_stages
def fold(
    model: nn.Module,
    example: Any,
    *,
    forward: Forward | None = None,
    tolerance: float | None = None,
    leave: str | Iterable[str] = (),
    clone: bool = True,
    progress: bool | None = None,
) -> tuple[nn.Module, Report]:
    """Return the inference network: BN folded into the layers beside it, wherever that is exact.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> folded, report = fold(model, torch.randn(2, 3, 8, 8))
    >>> folded
    Sequential(
      (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
      (1): Identity()
      (2): ReLU()
    )

    With fixed statistics BN is ``scale * x + shift`` per channel. That goes into the convolution, transposed
    convolution (grouped too) or linear layer before it, if nothing else reads the output of that layer; or into the one
    after it, where that is exact (a linear layer; a convolution without padding); or into another BN layer before it.
    Pooling, upsampling, reshapes, sums and ``torch.cat`` in between are passed where that is exact. Activations and
    residuals fused into our layers stay in place. A layer shared by several places, each with its own BN layer,
    is copied for each place, and the report says how much memory that takes; ``clone=False`` turns this off.

    The model runs once with ``example`` (see `batchnorm.trace`), in evaluation mode. The returned copy is for
    evaluation: after ``train()`` only BN layers that were kept use batch statistics. If the control flow of a model
    depends on its input, it is folded for the calls that ``example`` makes.
    The report lists what was folded into what, every BN layer that is left with the reason, and the largest difference
    in outputs, on the example and on random inputs. Above the tolerance (1e-4 of the largest output in float32, 1e-10
    in float64) `NotEquivalent` is raised. The argument is not changed. ``leave`` names one or several BN
    layers to leave unfolded.
    ``progress``: after two seconds a line on stderr says what is being compared; by default, on a terminal.
    """
    check_arguments(model, forward, tolerance, "fold")
    stay = frozenset(check_names(leave, "leave", "fold"))
    before = in_mode(copied_with(model, where="fold")[0], False)
    folded, _ = copied_with(before, where="fold")
    graph = trace(folded, example, forward=forward, opaque=lambda m: is_norm(m) or is_plain(m))
    work = _Folding(folded, graph, clone)
    work.run(stay)
    check_reached("fold", work.changes, work.left, folded, OWN_FORWARD)
    seen = {call.name for call in graph.calls if call.kind == "module"}
    certificate = verify(
        before, folded, example, verb="fold", forward=forward, tolerance=tolerance,
        unchanged=lambda path: path in seen and path not in work.altered,
    )  # fmt: skip
    left_behind(model, folded, "fold", trains=False)
    return Changed((folded, Report(tuple(work.changes), work.left, certificate)))


class _Folding:
    """One model's BN layers, each folded or left with a reason."""

    def __init__(self, model: nn.Module, graph: Graph, clone: bool) -> None:
        self.model, self.graph, self.clone = model, graph, clone
        self.near = Neighbours(model, graph)
        self.norms = {module: path for path, module in model.named_modules() if is_norm(module)}
        self.kept: set[nn.Module] = set()  # that are to stay
        self.changes: list[Change] = []
        self.left: dict[str, str] = {}
        self.altered: set[str] = set()  # modules that now give something else than before

    def run(self, leave: frozenset[str]) -> None:
        """Fold layers in the order of the run until no more can be folded: one fold may enable another."""
        norms = self.norms
        scripted = scripted_norms(self.model, "fold the model before torch.jit.script")
        if not norms and not scripted:
            raise BatchNormError(
                "the model has no BN layer to fold", where="fold", do="give it a model with BatchNorm layers"
            )
        for path in leave:
            if self.graph.modules.get(path) not in norms:
                raise BatchNormError(
                    f"there is no BN layer {path!r} to leave", where="fold", do=f"use one of {few(norms.values())}"
                )
        self.kept = {self.graph.modules[path] for path in leave}
        first = {norm: calls[0].index if (calls := self.graph.of(norm)) else len(self.graph.calls) for norm in norms}
        waiting = sorted((norm for norm in norms if norm not in self.kept), key=first.__getitem__)
        reasons: dict[nn.Module, str] = dict.fromkeys(self.kept, "it was to be left")
        progress = True
        while waiting and progress:
            reasons.update({norm: self._fold(norm) for norm in waiting})
            progress = any(not reasons[norm] for norm in waiting)
            waiting = [norm for norm in waiting if reasons[norm]]
        self.left = {path: reasons[norm] for norm, path in norms.items() if reasons[norm]} | scripted

    def _fold(self, norm: nn.Module) -> str:
        """Fold one layer; return why not if it cannot be."""
        if norm in self.near.rest:  # it went together with another
            return ""
        affine = self._affine(norm)
        if isinstance(affine, str):
            return affine
        back = self._into_the_one_before(norm, affine)
        if not back:
            return ""
        calls = self.graph.of(norm)
        own = "it has an activation or a residual of its own" if finishes(norm, calls) else ""
        ahead = own or self._into_the_one_after(norm, affine)
        return f"{back}; nor into what follows: {ahead}" if ahead else ""

    def _affine(self, norm: nn.Module) -> Affine | str:
        """What a layer does in evaluation, or why it cannot be taken away."""
        reason = unfit(norm) or self._awkward(norm, self.graph.of(norm))
        if reason:
            return reason
        affine = affine_of(norm)
        return affine if affine.finite else "its statistics, gamma or beta are not finite, or the variance is negative"

    def _awkward(self, norm: nn.Module, calls: list[Call]) -> str:
        """Why a layer cannot be removed because of how it is used; empty if it can."""
        if not calls:
            return self.graph.uncalled(norm)
        if any(set(call.arguments) - {"0", "input"} and not isinstance(norm, _BatchNormBase) for call in calls):
            return "it is called with more than one tensor"
        if any("mask" in call.arguments or "2" in call.arguments for call in calls):
            return "it is called with a mask"
        if any(main(call) is None for call in calls):
            return "its input is not passed as one tensor"
        readers = self.near.functions_reading(norm)
        return f"its tensors are also read by {readers}" if readers else ""

    # ---- the layer before

    def _into_the_one_before(self, norm: nn.Module, affine: Affine) -> str:
        """Write new parameters into every layer that feeds this one; return the reason if that is impossible."""
        route: set[str] = set()
        found = self._linear_calls(norm, affine, route)
        if isinstance(found, str):
            return found
        new: list[New] = []
        clones: list[Clone] = []
        for layer, pieces in found.items():
            name, calls = pieces[0].call.name, [piece.call for piece in pieces]
            if len(calls) < len(self.graph.of(layer)):
                reason = f"{name} is called {len(self.graph.of(layer))} times, and not always for this layer"
                if not self.clone or is_norm(layer):
                    return reason
                clone = clone_for(self.near, layer, calls)
                if isinstance(clone, str):
                    why = self._move(layer, name) if len(found) == 1 else clone
                    return f"{reason}: {why}" if why else ""
                clones.append(clone)
                layer, name = clone.layer, clone.path
            elif self.near.shared(layer) and not self.clone:
                return f"{name} shares its weight with another layer"
            new.append(scaled_outputs(layer, name, pieces[0].affine))
        for change in new:
            if lost_in(change):
                return lost_in(change)
        for clone in clones:
            self._place(clone)
        self.altered |= route
        copied = {clone.layer: f", a copy of the shared layer ({memory_of(clone.layer)} more)" for clone in clones}
        self._write(new, "before", norm, copied)
        return ""

    def _linear_calls(self, norm: nn.Module, affine: Affine, route: set[str]) -> dict[nn.Module, list[Piece]] | str:
        """The layers that feed a BN layer, with their calls that do, or why there are none."""
        found: dict[nn.Module, list[Piece]] = {}
        for call in self.graph.of(norm):
            pieces = self.near.before(call, affine, route)
            if isinstance(pieces, str):
                return pieces
            for piece in pieces:
                group = found.setdefault(piece.call.target, [])
                if group and not same(group[0].affine, piece.affine):
                    return f"{piece.call.name} would have to be scaled in several ways"
                group.append(piece)
        return found

    def _place(self, clone: Clone) -> None:
        """Put a copy in its places."""
        original = clone.calls[0].target
        for holder, name in clone.places:
            holder._modules[name] = clone.layer
            self.near.holders[original].remove((holder, name))
        self.near.holders[clone.layer] = list(clone.places)
        for call in clone.calls:
            self.graph.retarget(call, clone.layer, clone.path)
        names = dict(self.near.holders[original])  # the other calls are known by a path that is still theirs
        for call in self.graph.of(original):
            name = names[self.graph.modules[call.scope]]
            self.graph.retarget(call, original, ".".join(filter(None, [call.scope, name])))

    def _move(self, layer: nn.Module, name: str) -> str:
        """Replace every BN layer that reads a layer by a copy of it; return the reason if that is impossible."""
        norms = norms_after(self.near, layer)
        if isinstance(norms, str):
            return norms
        new: dict[nn.Module, New] = {}
        for norm in norms:
            path = self.norms[norm]
            affine = "it was to be left" if norm in self.kept else self._affine(norm)
            found = affine if isinstance(affine, str) else self._linear_calls(norm, affine, set())
            if isinstance(found, str) or isinstance(affine, str):
                return f"{path} stays, for {found}"
            new[norm] = scaled_outputs(copy.deepcopy(layer), name, affine)
            if lost_in(new[norm]):
                return lost_in(new[norm])
        for norm, change in new.items():
            write(change)
            calls, after = self.graph.of(norm), in_place_of(self._rest(norm), change.layer)
            cost = "which moved here" if norm is next(iter(new)) else f"a copy of it, {memory_of(layer)} more"
            self._replace(norm, after, f"into {name} (before it), {cost}")
            for call in calls:
                self.graph.retarget(call, after, self.norms[norm])
        gone = nn.Identity().eval()
        self.near.rest[layer] = gone
        self.near.put(layer, gone)
        self.altered.add(name)
        return ""

    # ---- the layer after

    def _into_the_one_after(self, norm: nn.Module, affine: Affine) -> str:
        calls = self.graph.of(norm)
        if len(calls) > 1:
            return "it is called several times"
        route: set[str] = set()
        found = self.near.after(calls[0], affine, route)
        if isinstance(found, str):
            return found
        new = []
        for piece in found:
            if self.near.shared(piece.call.target) and not self.clone:
                return f"{piece.call.name} shares its weight with another layer"
            new.append(scaled_inputs(piece.call.target, piece.call.name, piece.affine))
            if lost_in(new[-1]):
                return lost_in(new[-1])
        self.altered |= route
        self._write(new, "after", norm, {})
        return ""

    # ---- writing

    def _write(self, into: list[New], place: str, norm: nn.Module, copied: dict[nn.Module, str]) -> None:
        where = []
        for change in into:
            more = copied.get(change.layer, "")
            if self.near.shared(change.layer) and not more:
                more = f", with a weight of its own now ({memory_of(change.layer)} more)"
                self._untie(change.layer)
            write(change)
            where.append(f"{change.name} ({place} it){more}")
        self._replace(norm, self._rest(norm), f"into {', '.join(where)}")

    def _untie(self, layer: nn.Module) -> None:
        """Replace a layer's shared parameters by its own copies."""
        for name, tensor in self.near.shared(layer):
            self.near.owners[id(tensor)] -= 1
            own = tensor.detach().clone()
            if name in layer._parameters:
                layer._parameters[name] = nn.Parameter(own, requires_grad=tensor.requires_grad)
            else:
                layer._buffers[name] = own

    def _rest(self, norm: nn.Module) -> nn.Module:
        """What replaces a BN layer whose scale and shift were folded elsewhere."""
        rest: nn.Module | None = None
        if finishes(norm, self.graph.of(norm)):
            if isinstance(norm, _BatchNormBase) and not list(norm.children()):
                rest = Finished(activation=norm.activation, negative_slope=norm.negative_slope)
            else:
                rest = finish_of(norm)
        return (rest or nn.Identity()).eval()

    def _replace(self, norm: nn.Module, new: nn.Module, where: str) -> None:
        self.near.rest[norm] = new
        self.near.put(norm, new)
        self.changes.append(Change(self.norms[norm], "folded", type(norm).__name__, where))
