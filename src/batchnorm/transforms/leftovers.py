"""A BN layer that could not be folded, as two constants for each channel, where that is faster."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from batchnorm.calling import call_with
from batchnorm.nested import fresh
from batchnorm.preserve import untouched
from batchnorm.records import Change
from batchnorm.transforms.affine import affine_of
from batchnorm.transforms.outputs import Forward
from batchnorm.transforms.timing import measure

LEFTOVERS = ("keep", "measure", "scale")
_WORTH = 0.95  # of the layer's time: less of a gain is noise
_SAMPLES = 9
_LONG_ENOUGH = 2e-4  # seconds of a sample: the clock and the loop around it do not count then


class ScaleShift(nn.Module):
    """``scale * x + shift`` for every channel: BN in evaluation, which ``train()`` does not change.

    >>> layer = ScaleShift(torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0]), dims=2)
    >>> layer(torch.ones(1, 2))
    tensor([[2., 4.]])

    ``at_once`` says by which of torch's ways: one pass (``addcmul``), faster where a channel's numbers are not side by
    side, or two (a product, then a sum in place).
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, scale: Tensor, shift: Tensor, dims: int, at_once: bool = True) -> None:
        super().__init__()
        shape = [1, -1, *[1] * (dims - 2)]
        self.at_once = at_once
        self.register_buffer("scale", scale.reshape(shape).contiguous())
        self.register_buffer("shift", shift.reshape(shape).contiguous())

    def forward(self, input: Tensor) -> Tensor:
        """Scale, then shift.

        >>> ScaleShift(torch.ones(2), torch.ones(2), dims=3, at_once=False)(torch.zeros(1, 2, 3)).sum()
        tensor(6.)
        """
        if self.at_once:
            return torch.addcmul(self.shift, input, self.scale)
        return (input * self.scale).add_(self.shift)

    def extra_repr(self) -> str:
        """Show how many channels there are, and the way.

        >>> ScaleShift(torch.ones(2), torch.ones(2), dims=4)
        ScaleShift(2, at_once=True)
        """
        return f"{self.scale.shape[1]}, at_once={self.at_once}"


@dataclass(frozen=True)
class Seen:
    """What a BN layer is given: enough to draw another like it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def drawn(self) -> Tensor:
        """Numbers of that shape and layout."""
        made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        return made.normal_(generator=torch.Generator(self.device).manual_seed(0))


def scale_leftovers(
    model: nn.Module,
    norms: Mapping[nn.Module, str],
    put: Callable[[nn.Module, nn.Module], None],
    example: Any,
    forward: Forward | None,
    only_if_faster: bool,
) -> list[Change]:
    """Have two constants stand in the place of BN layers, of all or of those where that is faster here."""
    changes = []
    known: dict[Any, tuple[bool | None, str]] = {}
    for norm, seen in _inputs(model, norms, example, forward).items():
        if len({len(each.shape) for each in seen}) != 1 or any(_unlike(norm, each) for each in seen):
            continue  # it is called in several ways, or with numbers of other types than its own
        largest = max(seen, key=lambda each: math.prod(each.shape))
        key = (type(norm), largest)
        if key not in known:
            known[key] = _faster(norm, largest)
        way, words = known[key]
        if way is None:
            if only_if_faster:
                continue
            way, words = largest.strides[1] == 1, "a scale and a shift"
        put(norm, _scaled(norm, largest, way))
        changes.append(Change(norms[norm], "rewritten", type(norm).__name__, words))
    return changes


def _unlike(norm: Any, seen: Seen) -> bool:
    mean = norm.running_mean
    return seen.dtype not in (torch.float32, torch.float64) or seen.dtype != mean.dtype or seen.device != mean.device


def _inputs(
    model: nn.Module, norms: Mapping[nn.Module, str], example: Any, forward: Forward | None
) -> dict[nn.Module, set[Seen]]:
    """What some layers are given in one run; those that are not reached are left out."""
    found: dict[nn.Module, set[Seen]] = {}

    def note(norm: nn.Module, args: Any, kwargs: Any) -> None:
        x = args[0] if args else kwargs["input"]
        found.setdefault(norm, set()).add(Seen(tuple(x.shape), x.stride(), x.dtype, x.device))

    with torch.inference_mode(False), torch.no_grad(), untouched(model):  # which removes the hooks, too
        for norm in norms:
            norm.register_forward_pre_hook(note, with_kwargs=True)
        (forward or call_with)(model, fresh(example))
    return found


def _scaled(norm: nn.Module, seen: Seen, at_once: bool) -> nn.Module:
    affine = affine_of(norm)
    scale, shift = (t.to(seen.device, seen.dtype) for t in (affine.scale, affine.shift))
    return ScaleShift(scale, shift, len(seen.shape), at_once).eval()


def _faster(norm: nn.Module, seen: Seen) -> tuple[bool | None, str]:
    """Which way is faster than the layer, if one is, and how much, in words. They take turns."""
    if seen.device.type != "cpu":
        return None, ""  # elsewhere the clock would tell when the work was handed over, not when it was done
    ways: dict[str, nn.Module] = {"": norm, "once": _scaled(norm, seen, True), "twice": _scaled(norm, seen, False)}
    x = seen.drawn()
    with torch.inference_mode():
        norm(x)
        began = time.perf_counter()
        norm(x)
        times = min(100, max(1, int(_LONG_ENOUGH / max(time.perf_counter() - began, 1e-7))))

        def repeated(layer: nn.Module) -> Callable[[], None]:
            def run() -> None:
                for _ in range(times):
                    layer(x)

            return run

        measured = measure({name: repeated(layer) for name, layer in ways.items()}, _SAMPLES)
    took = {str(m.setting["contender"]): m.quantile(0.25) for m in measured}
    best = min(("once", "twice"), key=took.__getitem__)
    if took[best] > _WORTH * took[""]:
        return None, ""
    return best == "once", f"a scale and a shift, {took[''] / took[best]:.1f} times as fast here"
