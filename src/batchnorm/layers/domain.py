"""``DomainBatchNorm``: one set of statistics for each named domain, and ``use_domain`` to choose among them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import Unpack

from batchnorm.checks import check_model, check_names
from batchnorm.errors import BatchNormError
from batchnorm.layers.batch import _BatchNormBase
from batchnorm.layers.options import DomainOptions
from batchnorm.layers.switches import Switches

Affine = Literal["shared", "separate", "none"]
AFFINE = get_args(Affine)
Domains = str | Sequence["str | int"] | Tensor


class OneDomain(_BatchNormBase):
    """The statistics of one domain: a BatchNorm for inputs of any dimensions.

    >>> OneDomain(3)(torch.randn(4, 3, 2)).shape
    torch.Size([4, 3, 2])
    """


class DomainBatchNorm(Switches):
    """Batch normalisation that keeps the statistics of several domains apart.

    >>> layer = DomainBatchNorm(3, domains=("photo", "sketch"))
    >>> layer.domain = "photo"
    >>> y = layer(torch.randn(8, 3, 4, 4))
    >>> with use_domain(layer, "sketch"):
    ...     y = layer(torch.randn(8, 3, 4, 4) + 5)
    >>> mixed = layer(torch.randn(4, 3, 4, 4), domain=["photo", "sketch", "sketch", "photo"])

    With a single layer, two kinds of data in turn (source and target, clean and adversarial, real and generated) leave
    running statistics that fit neither. Here each domain has a layer of its own, `OneDomain`, named ``domain_<name>``,
    on which everything that serves BN layers works (`freeze`, `no_update`, `accumulate`, `adapt`). The switches
    ``statistics``, ``update`` and ``learn``, set on this layer, are set for all domains.

    ``affine``: gamma and beta are "shared" by all domains, "separate", or "none". The other keywords are BatchNorm's
    and hold for every domain. Nothing is chosen at first, unless there is only one domain: set ``layer.domain``, use
    `use_domain`, or give ``forward`` a domain, one for all or one for each example. In a mixed batch the examples of
    each domain are normalised by their own moments.

    The ``state_dict`` has BatchNorm's keys under each domain: ``domain_photo.weight``, ``domain_photo.running_mean``
    and so on; a shared gamma or beta is there once for each, and is the same tensor. A dictionary of a plain BatchNorm
    (``weight``, ``running_mean``, ...) loads into every domain, strictly too.
    """

    def __init__(
        self,
        num_features: int,
        domains: Sequence[str] = ("source", "target"),
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: Affine = "shared",
        **arguments: Unpack[DomainOptions],
    ) -> None:
        super().__init__()
        if affine not in AFFINE:
            raise BatchNormError(
                f"affine is {affine!r}", where="DomainBatchNorm", do="use one of " + ", ".join(map(repr, AFFINE))
            )
        names = check_names(domains, "domains", "DomainBatchNorm")
        if not names:
            raise BatchNormError("there are no domains", where="DomainBatchNorm", do="name at least one")
        self.num_features, self.affine = num_features, affine
        self._names: list[str] = []
        self._domain: str | None = None
        for name in names:
            self._add(name, OneDomain(num_features, eps, momentum, affine != "none", **arguments))
        if len(names) == 1:
            self._domain = names[0]
        self.register_load_state_dict_post_hook(_tie)  # type: ignore[no-untyped-call]

    @property
    def domains(self) -> tuple[str, ...]:
        """The names, in the order that indices count.

        >>> DomainBatchNorm(3, domains=("a", "b")).domains
        ('a', 'b')
        """
        return tuple(self._names)

    @property
    def domain(self) -> str | None:
        """The domain that ``forward`` uses unless it is given another; None if none is chosen.

        >>> DomainBatchNorm(3, domains=("a", "b")).domain = "c"
        Traceback (most recent call last):
        batchnorm.errors.BatchNormError: DomainBatchNorm: there is no domain 'c'; use one of 'a', 'b', or add it with \
add_domain
        """
        return self._domain

    @domain.setter
    def domain(self, name: str | None) -> None:
        if name is not None:
            self._of(name)
        self._domain = name

    def layer_of(self, name: str) -> OneDomain:
        """Return the layer that holds one domain's statistics.

        >>> DomainBatchNorm(2, domains=("a", "b")).layer_of("b").running_mean
        tensor([0., 0.])
        """
        return self._of(name)

    def add_domain(self, name: str, like: str | None = None) -> None:
        """Add a domain: a new one, or a copy of the one that it is ``like``.

        >>> layer = DomainBatchNorm(2, domains=("a", "b"))
        >>> layer.add_domain("c", like="a")
        >>> layer.domains
        ('a', 'b', 'c')

        A shared gamma and beta serve it too. Separate ones are new parameters: give them to the optimiser.
        """
        new = copy.deepcopy(self._of(self._names[0] if like is None else like))
        if like is None:
            new.reset_parameters()
        self._add(name, new)

    def load_from(self, source: nn.Module | Mapping[str, Any]) -> DomainBatchNorm:
        """Give every domain the parameters and statistics of a plain BatchNorm, or of its ``state_dict``.

        >>> layer = DomainBatchNorm(2, domains=("a", "b")).load_from(nn.BatchNorm2d(2))
        >>> layer.layer_of("b").running_var
        tensor([1., 1.])
        """
        if isinstance(source, nn.Module) and not isinstance(source, _BatchNorm | DomainBatchNorm):
            raise BatchNormError(
                f"a {type(source).__name__} has no statistics of batches", where="load_from", do="give it a BatchNorm"
            )
        try:
            self.load_state_dict(source.state_dict() if isinstance(source, nn.Module) else source)
        except RuntimeError as error:
            raise BatchNormError(
                f"these statistics do not fit {self.num_features} features with affine={self.affine!r} "
                f"({str(error).splitlines()[-1].strip()})",
                where="load_from",
                do="give a layer of the same num_features and affine",
            ) from error
        return self

    def forward(
        self,
        input: Tensor,
        residual: Tensor | None = None,
        domain: Domains | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Normalise with the domain chosen, or with ``domain``: a name, or a name or an index for each example.

        >>> layer = DomainBatchNorm(2, domains=("a", "b"))
        >>> x = torch.cat([torch.randn(50, 2), torch.randn(50, 2) + 9])
        >>> y = layer(x, domain=["a"] * 50 + ["b"] * 50)
        >>> bool(y[:50].mean().abs() < 1e-5), bool(y[50:].mean().abs() < 1e-5)
        (True, True)
        """
        if domain is None:
            domain = self._domain
            if domain is None:
                raise BatchNormError(
                    "no domain is chosen",
                    where="DomainBatchNorm",
                    do=f"set layer.domain, or use_domain(model, ...), to one of {self._listed()}",
                )
        if isinstance(domain, str):
            return self._of(domain)(input, residual, mask)
        groups = self._groups(input, domain)
        if len(groups) < 2:  # none in an empty batch, which is treated as one of the first domain
            return self._of(next(iter(groups), self._names[0]))(input, residual, mask)
        for name, rows in groups.items():
            self._check_group(name, len(rows), input)
        parts, order = [], []
        for name, rows in groups.items():
            if rows == list(range(rows[0], rows[-1] + 1)):  # one after the other: no copy
                pick: Any = slice(rows[0], rows[-1] + 1)
            else:
                pick = torch.tensor(rows, device=input.device)
            more = (None if tensor is None else tensor[pick] for tensor in (residual, mask))
            parts.append(self._of(name)(input[pick], *more))
            order += rows
        y = torch.cat(parts)
        if order != sorted(order):
            y = y[torch.tensor(order, device=y.device).argsort()]
        return y

    if TYPE_CHECKING:

        def __call__(  # noqa: D102
            self,
            input: Tensor,
            residual: Tensor | None = None,
            domain: Domains | None = None,
            mask: Tensor | None = None,
        ) -> Tensor: ...

    def _groups(self, input: Tensor, domain: Any) -> dict[str, list[int]]:
        """Which rows belong to each domain, in the domains' own order."""
        if isinstance(domain, Tensor) and (domain.is_floating_point() or domain.dtype == torch.bool):
            raise BatchNormError(
                f"domain is a tensor of {domain.dtype}", where="DomainBatchNorm", do="give integers, or a list of names"
            )
        several = domain if isinstance(domain, Iterable) else [domain]
        given = domain.tolist() if isinstance(domain, Tensor) else list(several)
        if not isinstance(given, list) or len(given) != input.shape[0]:
            size = list(domain.shape) if isinstance(domain, Tensor) else len(given)
            raise BatchNormError(
                f"domain has {size} entries for {input.shape[0]} examples",
                where="DomainBatchNorm",
                do="give one name for all, or one name or index for each example",
            )
        found: dict[str, list[int]] = {name: [] for name in self._names}
        for row, one in enumerate(given):
            if isinstance(one, str):
                self._of(one)
                found[one].append(row)
            elif isinstance(one, int) and 0 <= one < len(self._names):
                found[self._names[one]].append(row)
            else:
                raise BatchNormError(
                    f"there is no domain {one!r}: there are {len(self._names)}, counted from 0",
                    where="DomainBatchNorm",
                    do=f"use the indices of {self._listed()}",
                )
        return {name: rows for name, rows in found.items() if rows}

    def _check_group(self, name: str, count: int, input: Tensor) -> None:
        """Raise for a lonely example before any domain's statistics move."""
        layer = self._of(name)
        from_batch = layer.training if layer.statistics == "auto" else layer.statistics == "batch"
        if from_batch and layer.one_value == "raise" and count * input[0, 0].numel() == 1:
            raise BatchNormError(
                f"Expected more than 1 value per channel when training, got one example of domain {name!r}",
                where="DomainBatchNorm",
                do='draw at least two examples of each domain, or use one_value="running"',
            )

    def _add(self, name: str, layer: OneDomain) -> None:
        if not isinstance(name, str) or not name or "." in name:
            raise BatchNormError(
                f"a domain cannot be called {name!r}", where="DomainBatchNorm", do="use a word without dots"
            )
        if name in self._names:
            raise BatchNormError(
                f"there is a domain {name!r} already", where="DomainBatchNorm", do="use each name once"
            )
        self.add_module(f"domain_{name}", layer)
        self._names.append(name)
        _tie(self)

    def _of(self, name: str) -> OneDomain:
        if name not in self._names:
            raise BatchNormError(
                f"there is no domain {name!r}",
                where="DomainBatchNorm",
                do=f"use one of {self._listed()}, or add it with add_domain",
            )
        return cast(OneDomain, self._modules[f"domain_{name}"])

    def _listed(self) -> str:
        return ", ".join(map(repr, self._names))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Hand the keys of a plain BatchNorm on to every domain."""
        plain = [key for key in state_dict if key.startswith(prefix) and "." not in key[len(prefix) :]]
        for key in plain:
            value = state_dict.pop(key)
            for name in self._names:
                # A copy, because a tensor may be assigned instead of being copied into ours.
                state_dict.setdefault(f"{prefix}domain_{name}.{key[len(prefix) :]}", value.clone())
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        """Show the domains and which is chosen.

        >>> DomainBatchNorm(2, domains=("a", "b")).extra_repr()
        "2, domains=('a', 'b'), affine='shared', domain=None"
        """
        return f"{self.num_features}, domains={self.domains}, affine={self.affine!r}, domain={self._domain!r}"


@contextmanager
def use_domain(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """Let every `DomainBatchNorm` of the model use this domain, and afterwards the one it used before.

    >>> model = nn.Sequential(nn.Linear(4, 2), DomainBatchNorm(2, domains=("a", "b")))
    >>> with use_domain(model, "b"):
    ...     y = model(torch.randn(8, 4))
    >>> model[1].domain is None, int(model[1].layer_of("b").num_batches_tracked)
    (True, 1)
    """
    check_model(model, "use_domain")
    layers = [module for module in model.modules() if isinstance(module, DomainBatchNorm)]
    if not layers:
        raise BatchNormError("the model has no DomainBatchNorm", where="use_domain", do="put one where domains differ")
    before = [layer.domain for layer in layers]
    try:
        for layer in layers:
            layer.domain = name
        yield model
    finally:
        for layer, old in zip(layers, before, strict=True):
            layer.domain = old


def _tie(layer: nn.Module, loaded: Any = None) -> None:
    """Give all domains the first one's gamma and beta, if they share them; load_state_dict(assign=True) parts them."""
    assert isinstance(layer, DomainBatchNorm)
    if layer.affine == "shared":
        first, *others = map(layer.layer_of, layer.domains)
        for other in others:
            other.weight, other.bias = first.weight, first.bias
