"""Flax's BatchNorm as a contender: the same numbers, jitted, in the same memory order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from batchnorm.bench.cases import Case
from batchnorm.bench.inputs import Inputs


def build(case: Case, inputs: Inputs) -> Callable[[], Any]:
    """The step of one cell, compiled by XLA and waited for.

    >>> step = build(case, inputs)  # doctest: +SKIP

    JAX has no memory formats: for channels_last the arrays are given channels last. It records no graph: its
    ``forward`` is the training-mode forward without anything saved for a backward. Its threads are its own
    and do not follow ``--threads``; pin the process (``taskset``) to compare on fewer cores than the machine
    has.
    """
    import jax  # type: ignore[import-not-found]
    import jax.numpy as jnp  # type: ignore[import-not-found]
    from flax import linen  # type: ignore[import-not-found]

    training = case.pass_name != "eval"
    last = case.layout == "channels_last"
    layer = linen.BatchNorm(
        use_running_average=not training,
        momentum=0.9,
        epsilon=1e-5,
        axis=-1 if last else 1,
        dtype=jnp.dtype(case.dtype),
    )

    def array(tensor: torch.Tensor) -> Any:
        values = jnp.asarray(tensor.detach().to(torch.float32).contiguous().numpy())
        return jnp.moveaxis(values, 1, -1) if last and tensor.dim() > 1 else values

    dtype = jnp.dtype(case.dtype)
    x, residual, grad = (array(t).astype(dtype) for t in (inputs.x, inputs.residual, inputs.grad))
    parameters = {"scale": array(inputs.weight), "bias": array(inputs.bias)}
    statistics = {"mean": array(inputs.running_mean), "var": array(inputs.running_var)}

    leaves = (x, parameters, residual) if case.adds else (x, parameters)

    def forward(statistics: Any, x: Any, parameters: Any, *residual: Any) -> Any:
        variables = {"params": parameters, "batch_stats": statistics}
        y, updated = layer.apply(variables, x, mutable=["batch_stats"])
        y = y + residual[0] if residual else y
        return (y if case.operation == "bn" else jax.nn.relu(y)), updated

    def train(statistics: Any, grad: Any, *leaves: Any) -> Any:
        y, pull, updated = jax.vjp(lambda *leaves: forward(statistics, *leaves), *leaves, has_aux=True)
        return y, pull(grad), updated

    if case.pass_name == "train":
        compiled = jax.jit(train)
        return lambda: jax.block_until_ready(compiled(statistics, grad, *leaves))
    compiled = jax.jit(forward)
    return lambda: jax.block_until_ready(compiled(statistics, *leaves))


def tensors(case: Case, result: Any) -> tuple[torch.Tensor, ...]:
    """The output and gradients of a step as torch tensors.

    >>> output, *gradients = tensors(case, step())  # doctest: +SKIP
    """

    def tensor(array: Any) -> torch.Tensor:
        values = torch.from_numpy(np.array(array, dtype=np.float32))
        return values.movedim(-1, 1) if case.layout == "channels_last" and values.dim() > 1 else values

    if case.pass_name != "train":
        return (tensor(result[0]),)
    y, (dx, parameters, *dresidual), _ = result
    return tuple(map(tensor, (y, dx, parameters["scale"], parameters["bias"], *dresidual)))
