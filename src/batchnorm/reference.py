"""The specification: Batch Normalization and its family in float64 NumPy, to be read beside the paper.

Ioffe & Szegedy, "Batch Normalization: Accelerating Deep Network Training by Reducing Internal Covariate
Shift" (2015). Names are the paper's: ``mu``, ``var``, ``xhat``, ``gamma``, ``beta``, and ``m``, the number of
values behind one mean. The gradient of the loss with respect to ``a`` is called ``da``.

The whole family is one formula, ``xhat = (x - mu) / sqrt(var + eps)``, and three choices: which axes the
moments are taken over, whether the mean is subtracted, and where the statistics come from. The formula and
its derivative stand once, in `standardize` and `standardize_backward`; the choices stand in `FAMILY`.
Axis 0 is the sample, axis 1 the channel, and all that follow are positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchnorm.errors import BatchNormError

Array = NDArray[np.float64]
Maybe = ArrayLike | None
Axes = tuple[int, ...]
Function = Callable[[Array, float], Array]
T = TypeVar("T")

# ---- The formula and its derivative ------------------------------------------------------------------------


def moments(x: ArrayLike, axes: Axes, center: bool = True) -> tuple[Array, Array]:
    """Mean and biased variance over ``axes``, which stay as axes of size 1.

    >>> mu, var = moments([[1.0, 10.0], [3.0, 30.0]], axes=(0,))
    >>> mu.tolist(), var.tolist()
    ([[2.0, 20.0]], [[1.0, 100.0]])

    Not to centre is to hold the mean at zero: the variance is then the mean square, as RMS norm has it.
    """
    x = _float64(x)
    mu = np.mean(x, axis=axes, keepdims=True)
    if not center:
        mu = np.zeros_like(mu)
    # Two passes: E[x^2] - E[x]^2 would lose every digit when the mean is large beside the deviation.
    return mu, np.mean((x - mu) ** 2, axis=axes, keepdims=True)


def standardize(x: Array, mu: Array, var: Array, eps: float) -> Array:
    """Algorithm 1, line 3.

    >>> x = np.array([[1.0], [3.0]])
    >>> standardize(x, *moments(x, axes=(0,)), eps=0.0).tolist()
    [[-1.0], [1.0]]
    """
    return (x - mu) / np.sqrt(var + eps)


def standardize_backward(
    dxhat: Array, x: Array, mu: Array, var: Array, eps: float, axes: Axes, center: bool, fixed: bool
) -> Array:
    """The chain rule through `standardize` and `moments`, in the paper's steps (section 3).

    >>> x = np.array([[1.0], [3.0], [8.0]])
    >>> dx = standardize_backward(2 + x, x, *moments(x, (0,)), eps=0.0, axes=(0,), center=True, fixed=False)
    >>> bool(np.allclose(dx, 0.0))  # shifting x or stretching it leaves xhat as it is
    True

    ``fixed`` statistics, those of a population, do not depend on ``x``: only the first term remains.
    """
    m = _count(x, axes)
    std = np.sqrt(var + eps)
    dx: Array = dxhat / std
    if fixed:
        return dx
    dvar = np.sum(dxhat * (x - mu), axis=axes, keepdims=True) * (-1 / 2) * std**-3
    dx = dx + dvar * 2 * (x - mu) / m
    if center:
        dmu = -np.sum(dxhat, axis=axes, keepdims=True) / std
        # This sum is zero but for rounding; it stands because the paper has it.
        dmu = dmu + dvar * np.sum(-2 * (x - mu), axis=axes, keepdims=True) / m
        dx = dx + dmu / m
    return dx


# ---- The family --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scheme:
    """One member of the family: what has moments of its own, where they come from, whether they centre.

    >>> Scheme(own="C", source="batch").axes(ndim=4)
    (0, 2, 3)

    ``own`` names the axes along which moments stay separate, of N (sample), G (group) and C (channel); they
    are taken over all others. Statistics of a ``batch`` give way to the population's at inference; those of a
    ``sample`` or a ``weight`` are the same in training and at inference.
    """

    own: str
    source: Literal["batch", "sample", "weight"]
    center: bool = True

    def axes(self, ndim: int) -> Axes:
        """The axes of the moments for an input of ``ndim`` axes.

        >>> FAMILY["instance"].axes(4), FAMILY["layer"].axes(4)
        ((2, 3), (1, 2, 3))
        >>> FAMILY["group"].axes(4)  # of the input split into (N, G, C / G, H, W)
        (2, 3, 4)
        """
        layout = ("NGC" if "G" in self.own else "NC") + "P" * (ndim - 2)
        return tuple(axis for axis, letter in enumerate(layout) if letter not in self.own)


FAMILY = {
    "batch": Scheme(own="C", source="batch"),
    "layer": Scheme(own="N", source="sample"),
    "instance": Scheme(own="NC", source="sample"),
    "group": Scheme(own="NG", source="sample"),
    "rms": Scheme(own="N", source="sample", center=False),
    # RMS norm turned on the weight, where the unit that is fed stands in the place of the sample.
    "weight": Scheme(own="N", source="weight", center=False),
}


@dataclass(frozen=True)
class Normalized:
    """What a forward pass computes; ``mu`` and ``var`` have only the axes with moments of their own."""

    y: Array
    xhat: Array
    mu: Array
    var: Array
    m: int


@dataclass(frozen=True)
class Gradients:
    """What a backward pass computes; gamma, beta and residual count as ones, zeros and zeros when absent."""

    dx: Array
    dgamma: Array
    dbeta: Array
    dresidual: Array


def normalize(
    x: ArrayLike, name: str, gamma: Maybe = None, beta: Maybe = None, eps: float = 1e-5,
    groups: int | None = None, mu: Maybe = None, var: Maybe = None,
) -> Normalized:  # fmt: skip
    """``y = gamma * xhat + beta``, by the member of the family called ``name``.

    >>> normalize([[1.0, 3.0], [5.0, 9.0]], "layer", eps=0.0).y.tolist()
    [[-1.0, 1.0], [-1.0, 1.0]]
    >>> normalize([[1.0, 3.0], [5.0, 9.0]], "batch", eps=0.0).y.tolist()
    [[-1.0, -1.0], [1.0, 1.0]]

    The axes of gamma and beta begin at the channel: of shape (C,) they serve channels, of (C, H, W) elements.
    Layer and RMS norm take all axes but the first; to normalise only the last, reshape to (-1, C) before.
    ``groups`` is for group norm alone, and ``mu`` and ``var``, of a population, for batch norm alone.
    """
    scheme = _choose(name, {k: v for k, v in FAMILY.items() if v.source != "weight"})
    if (mu is None) != (var is None) or (mu is not None and scheme.source != "batch"):
        raise BatchNormError("given statistics are a mean and a variance, and for batch norm", do="give both")
    x, axes = _float64(x), scheme.axes(np.ndim(x))
    if x.ndim < 2:
        raise BatchNormError(f"an input of shape {x.shape} has no channels", do="give it the shape (N, C, ...)")
    split, given = _split(x, groups, scheme), (_align(mu, x, absent=0.0), _align(var, x, absent=1.0))
    mu_, var_ = moments(split, axes, scheme.center) if mu is None else given
    xhat = standardize(split, mu_, var_, eps).reshape(x.shape)
    y = _align(gamma, x, absent=1.0) * xhat + _align(beta, x, absent=0.0)
    return Normalized(y, xhat, np.squeeze(mu_, axes), np.squeeze(var_, axes), _count(split, axes))


def normalize_backward(
    dy: ArrayLike, x: ArrayLike, name: str, gamma: Maybe = None, beta: Maybe = None, eps: float = 1e-5,
    groups: int | None = None, mu: Maybe = None, var: Maybe = None,
) -> Gradients:  # fmt: skip
    """The gradients of `normalize`, from that of its output.

    >>> gradients = normalize_backward([[1.0, 0.0], [2.0, 0.0]], [[1.0, 3.0], [5.0, 9.0]], "layer", eps=0.0)
    >>> gradients.dgamma.tolist(), gradients.dbeta.tolist()
    ([-3.0, 0.0], [3.0, 0.0])
    """
    forward, scheme = normalize(x, name, gamma, beta, eps, groups, mu, var), FAMILY[name]
    dy, x, axes = _float64(dy), _float64(x), scheme.axes(np.ndim(x))
    dxhat = dy * _align(gamma, x, absent=1.0)
    mu_, var_ = np.expand_dims(forward.mu, axes), np.expand_dims(forward.var, axes)
    split = _split(dxhat, groups, scheme), _split(x, groups, scheme)
    dx = standardize_backward(*split, mu_, var_, eps, axes, scheme.center, fixed=mu is not None)
    return Gradients(dx.reshape(x.shape), _gather(dy * forward.xhat, gamma), _gather(dy, beta), dy)


# ---- Batch normalization, with what a network puts behind it -----------------------------------------------


def _sigmoid(z: Array) -> Array:
    # Unlike 1 / (1 + exp(-z)), this cannot overflow, and it keeps the relative accuracy of small values.
    return np.exp(-np.logaddexp(0.0, -z))


# Each activation and its derivative, as functions of z and the negative slope; at a kink, torch's choice.
ACTIVATIONS: dict[str, tuple[Function, Function]] = {
    "none": (lambda z, _: z, lambda z, _: np.ones_like(z)),
    "relu": (lambda z, _: np.maximum(z, 0.0), lambda z, _: np.where(z > 0, 1.0, 0.0)),
    "relu6": (lambda z, _: np.clip(z, 0.0, 6.0), lambda z, _: np.where((z > 0) & (z < 6), 1.0, 0.0)),
    "leaky_relu": (lambda z, s: np.where(z > 0, z, s * z), lambda z, s: np.where(z > 0, 1.0, s)),
    "silu": (lambda z, _: z * _sigmoid(z), lambda z, _: _sigmoid(z) * (1 + z * _sigmoid(-z))),
}


def batch_norm_forward(
    x: ArrayLike, gamma: Maybe = None, beta: Maybe = None, eps: float = 1e-5, activation: str = "none",
    residual: Maybe = None, negative_slope: float = 0.01, mu: Maybe = None, var: Maybe = None,
) -> Normalized:  # fmt: skip
    """Algorithm 1, or with the population's ``mu`` and ``var`` inference: ``y = activation(z + residual)``.

    >>> batch = batch_norm_forward([[1.0], [3.0]], gamma=[2.0], beta=[5.0], eps=0.0)
    >>> batch.y.tolist(), batch.mu.tolist(), batch.var.tolist(), batch.m
    ([[3.0], [7.0]], [2.0], [1.0], 2)
    >>> batch_norm_forward([[1.0], [3.0]], eps=0.0, mu=[0.0], var=[4.0]).y.tolist()
    [[0.5], [1.5]]
    """
    forward = normalize(x, "batch", gamma, beta, eps, mu=mu, var=var)
    z = forward.y
    if residual is not None:
        if np.shape(residual) != z.shape:
            raise BatchNormError(f"the residual has shape {np.shape(residual)} but the input {z.shape}")
        z = z + _float64(residual)
    return replace(forward, y=_choose(activation, ACTIVATIONS)[0](z, negative_slope))


def batch_norm_backward(
    dy: ArrayLike, x: ArrayLike, gamma: Maybe = None, beta: Maybe = None, eps: float = 1e-5,
    activation: str = "none", residual: Maybe = None, negative_slope: float = 0.01, mu: Maybe = None,
    var: Maybe = None,
) -> Gradients:  # fmt: skip
    """The gradients of `batch_norm_forward`; statistics that were given are constants.

    >>> batch_norm_backward([[1.0], [0.0]], [[1.0], [3.0]], eps=0.0).dx.tolist()  # m = 2: xhat is always +-1
    [[0.0], [0.0]]
    >>> batch_norm_backward([[1.0], [0.0]], [[1.0], [3.0]], eps=0.0, mu=[0.0], var=[4.0]).dx.tolist()
    [[0.5], [0.0]]
    """
    z = batch_norm_forward(x, gamma, beta, eps, residual=residual, mu=mu, var=var).y
    dz = _float64(dy) * _choose(activation, ACTIVATIONS)[1](z, negative_slope)
    return normalize_backward(dz, x, "batch", gamma, beta, eps, mu=mu, var=var)


# ---- The statistics of the population, and what inference does with them -----------------------------------


def update_running(
    running_mean: ArrayLike, running_var: ArrayLike, mu: ArrayLike, var: ArrayLike, m: int,
    momentum: float | None = 0.1, count: int | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """The running statistics after one more batch; as in torch, ``momentum`` is the weight of the new value.

    >>> mean, var = update_running([0.0], [1.0], mu=[7.0], var=[1.0], m=2, momentum=0.5)
    >>> mean.tolist(), var.tolist()  # the batch is normalised by its biased variance, 1, but remembered as 2
    ([3.5], [1.5])

    With ``momentum=None`` all batches weigh the same; ``count`` is how many were seen, this one included.
    """
    if momentum is None:
        if not count:
            raise BatchNormError("momentum=None is an average over all batches", do="give their count so far")
        momentum = 1 / count
    kept = 1 - momentum
    mean = kept * _float64(running_mean) + momentum * _float64(mu)
    return mean, kept * _float64(running_var) + momentum * _unbiased(_float64(var), m)


def population_statistics(batches: Iterable[ArrayLike]) -> tuple[Array, Array]:
    """Algorithm 2, line 10: ``E[x] = E_B[mu_B]`` and ``Var[x] = m / (m - 1) * E_B[var_B]``, per channel.

    >>> mean, var = population_statistics([[[0.0], [2.0]], [[10.0], [12.0]]])
    >>> mean.tolist(), var.tolist()
    ([6.0], [2.0])

    Right for batches drawn at random from one population; blind to how batches differ from one another. Here
    their means lie 10 apart and the variance does not know: `merged_statistics` does.
    """
    each = _each(batches)
    # The paper's batches are of one size m: then the factor may stand inside the mean as well as before it.
    return np.mean([b.mu for b in each], axis=0), np.mean([_unbiased(b.var, b.m) for b in each], axis=0)


def merged_statistics(batches: Iterable[ArrayLike]) -> tuple[Array, Array]:
    """Mean and biased variance, per channel, of all batches taken together, whatever their sizes.

    >>> mean, var = merged_statistics([[[0.0], [2.0]], [[10.0], [12.0]]])
    >>> mean.tolist(), var.tolist()
    ([6.0], [26.0])

    Two sets merge exactly from their counts, means and variances (Chan, Golub & LeVeque 1979).
    """
    n, mean, var = 0, np.zeros(()), np.zeros(())
    for b in _each(batches):
        share, apart = b.m / (n + b.m), b.mu - mean
        var = (1 - share) * var + share * b.var + share * (1 - share) * apart**2  # within the sets + between
        mean = mean + share * apart
        n += b.m
    return mean, var


def _each(batches: Iterable[ArrayLike]) -> list[Normalized]:
    each = [batch_norm_forward(x) for x in batches]
    if not each:
        raise BatchNormError("there are no batches", do="give at least one")
    return each


def inference_affine(
    gamma: Maybe, beta: Maybe, mean: ArrayLike, var: ArrayLike, eps: float = 1e-5
) -> tuple[Array, Array]:
    """Algorithm 2, line 11: with fixed statistics the layer is ``y = scale * x + shift``.

    >>> scale, shift = inference_affine(gamma=[6.0], beta=[1.0], mean=[5.0], var=[4.0], eps=0.0)
    >>> scale.tolist(), shift.tolist()
    ([3.0], [-14.0])
    """
    scale = _float64(1.0 if gamma is None else gamma) / np.sqrt(_float64(var) + eps)
    return scale, _float64(0.0 if beta is None else beta) - scale * _float64(mean)


# ---- Weight normalization: the same formula, turned on the weight ------------------------------------------


def weight_norm(v: ArrayLike, g: ArrayLike, axes: Axes | None = None) -> Array:
    """``w = g * v / ||v||``, the norm taken over ``axes``: by default all but the first, one norm per unit.

    >>> weight_norm([[3.0, 4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 2.0]], g=[10.0, 1.0]).tolist()
    [[6.0, 8.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]

    A norm is sqrt(n) times a root mean square: hence ``gamma = g / sqrt(n)``, and no new formula.
    """
    v, gamma, mu, var, _ = _weight_parts(v, g, axes)
    return gamma * standardize(v, mu, var, eps=0.0)


def weight_norm_backward(dw: ArrayLike, v: ArrayLike, g: ArrayLike, axes: Axes | None = None) -> tuple[Array, Array]:
    """``(dv, dg)``, the gradients of `weight_norm`; ``dv`` is orthogonal to ``v``.

    >>> dv, dg = weight_norm_backward([[1.0, 5.0, 0.0, 0.0]], v=[[0.0, 2.0, 0.0, 0.0]], g=[6.0])
    >>> dv.tolist(), dg.tolist()
    ([[3.0, 0.0, 0.0, 0.0]], [5.0])
    """
    v, gamma, mu, var, axes = _weight_parts(v, g, axes)
    dw, center = _float64(dw), FAMILY["weight"].center
    dv = standardize_backward(dw * gamma, v, mu, var, 0.0, axes, center, fixed=False)
    dgamma = np.sum(dw * standardize(v, mu, var, eps=0.0), axis=axes)
    return dv, (dgamma / math.sqrt(_count(v, axes))).reshape(np.shape(g))


def _weight_parts(v: ArrayLike, g: ArrayLike, axes: Axes | None) -> tuple[Array, Array, Array, Array, Axes]:
    v, scheme = _float64(v), FAMILY["weight"]
    axes = scheme.axes(v.ndim) if axes is None else axes
    mu, var = moments(v, axes, scheme.center)
    return v, _float64(g).reshape(var.shape) / math.sqrt(_count(v, axes)), mu, var, axes


# ---- Shapes ------------------------------------------------------------------------------------------------


def _float64(x: ArrayLike) -> Array:
    return np.asarray(x, dtype=np.float64)


def _count(x: Array, axes: Axes) -> int:
    return math.prod(x.shape[axis] for axis in axes)


def _unbiased(var: Array, m: int) -> Array:
    if m < 2:
        raise BatchNormError("one value per channel has no unbiased variance", do="use a larger batch")
    return var * (m / (m - 1))


def _split(x: Array, groups: int | None, scheme: Scheme) -> Array:
    """(N, C, ...) as (N, G, C / G, ...) if the scheme has groups."""
    if "G" not in scheme.own:
        return x
    samples, channels, *positions = x.shape
    if not groups or channels % groups:
        raise BatchNormError(f"{channels} channels do not fall into {groups} groups", do="choose a divisor")
    return x.reshape(samples, groups, channels // groups, *positions)


def _align(parameter: Maybe, x: Array, absent: float) -> Array:
    """The parameter with its first axis at the channel, and axes of size 1 around it."""
    p = np.full(x.shape[1], absent) if parameter is None else _float64(parameter)
    if p.shape != x.shape[1 : 1 + p.ndim]:
        raise BatchNormError(f"a parameter of shape {p.shape} does not fit an input of shape {x.shape}")
    return p.reshape(1, *p.shape, *[1] * (x.ndim - 1 - p.ndim))


def _gather(d: Array, parameter: Maybe) -> Array:
    """The transpose of `_align`: the sum over everything that one parameter served."""
    ndim = 1 if parameter is None else np.ndim(parameter)
    total: Array = np.sum(d, axis=(0, *range(1 + ndim, d.ndim)))
    return total


def _choose(name: str, table: Mapping[str, T]) -> T:
    if name not in table:
        raise BatchNormError(f"{name!r} is not one of {', '.join(table)}")
    return table[name]
