"""How an example or a batch is handed to a model, and what is reported if the model raises: decided here only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from batchnorm.errors import BatchNormError, first_line, give_tensor
from batchnorm.nested import tensors_in

Forward = Callable[[nn.Module, Any], Any]
LABELS = ("labels", "label", "targets", "target", "y")  # names under which batches keep labels


def call_with(model: nn.Module, example: Any) -> Any:
    """Call a model with an example: a tensor, a tuple of positional arguments, or a dictionary of named ones.

    >>> import torch
    >>> call_with(nn.Bilinear(2, 3, 4), (torch.zeros(5, 2), torch.zeros(5, 3))).shape
    torch.Size([5, 4])
    >>> call_with(nn.ReLU(), {"input": torch.tensor([-1.0])})
    tensor([0.])

    Any mapping counts as a dictionary, such as what a tokenizer or an image processor of transformers returns. A list
    counts as a tuple. A model that takes one list gets it inside a tuple: ``([image, image],)``.
    """
    try:
        if isinstance(example, Mapping):
            return model(**example)
        if isinstance(example, tuple):
            return model(*example)
        if not isinstance(example, list):
            return model(example)
    except (TypeError, AttributeError) as error:
        odd = next((each for each in tree_leaves(example) if _is_array(each)), example)
        if isinstance(error, BatchNormError) or (tensors_in(example) and odd is example):
            raise  # the model's own mistake, in its own words
        place = raised_in(model, error) or "the model"
        raise BatchNormError(
            f"the example {'is' if odd is example else 'holds'} a {type(odd).__name__}, not a torch.Tensor, and "
            f"{place} raised {type(error).__name__}",
            do=give_tensor(odd, ", a tuple of arguments or a dictionary of them"),
        ) from error
    return _spread(model, example, "([...],)")


def _spread(model: nn.Module, entries: list[Any], instead: str, where: str = "") -> Any:
    """Call a model with the entries of a list as its arguments; if it raises, say how a list itself is written."""
    try:
        return model(*entries)
    except BatchNormError:
        raise
    except Exception as error:
        raise BatchNormError(
            f"the entries of a list were passed as the {len(entries)} arguments of the model, which raised "
            f"{type(error).__name__}: {first_line(error)}",
            where=where,
            do=f"if the model takes the list itself, write it inside a tuple: {instead}",
        ) from error


def inputs_of(model: nn.Module | None, batch: Any, where: str = "") -> Any:
    """Return the part of a batch that the model is called with.

    >>> import torch
    >>> inputs_of(nn.ReLU(), (torch.ones(1), "label"))
    tensor([1.])
    >>> inputs_of(nn.ReLU(), {"input": torch.ones(1), "label": 3})
    {'input': tensor([1.])}

    - Of a tuple or list, as DataLoaders give them, that is the first entry; the second is the labels.
    - Of a dictionary (any mapping) it is all entries, as named arguments; labels only if ``forward`` takes an argument
      of that name. A single entry whose name ``forward`` does not know is its first argument.
    """
    if isinstance(batch, (tuple, list)) and batch:
        batch = batch[0]
    if not isinstance(batch, Mapping) or model is None:
        return batch
    given = {str(name): value for name, value in batch.items()}
    taken = _arguments(model)
    if taken is None:
        return given
    given = {name: value for name, value in given.items() if name in taken or name not in LABELS}
    unknown = [name for name in given if name not in taken]
    if len(given) == 1 and unknown:
        return given[unknown[0]]
    if unknown:
        raise BatchNormError(
            f"a batch has {unknown[0]!r}, and forward of {type(model).__name__} takes {', '.join(taken) or 'nothing'}",
            where=where,
            do="leave it out of the batches, or give the model in a module whose forward takes it",
        )
    return given


def batch_forward(where: str) -> Forward:
    """Return how verbs call a model with a batch unless ``forward`` is given.

    >>> import torch
    >>> batch_forward("calibrate")(nn.Identity(), (torch.ones(1), "label"))
    tensor([1.])
    """

    def forward(model: nn.Module, batch: Any) -> Any:
        inputs = inputs_of(model, batch, where)
        if not tensors_in(inputs):
            several = isinstance(batch, (tuple, list)) and batch
            kind = f"begins with a {type(batch[0]).__name__}" if several else f"is a {type(batch).__name__}"
            array = next(filter(_is_array, tree_leaves(batch)), None)
            raise BatchNormError(
                f"a batch {kind}, without a tensor in it",
                where=where,
                do="make tensors of NumPy arrays with torch.from_numpy(...)"
                if array is not None
                else "give tensors, tuples that begin with one, dictionaries of arguments, or "
                "forward=lambda model, batch: ...",
            )
        if isinstance(inputs, list):  # as loaders of detection data give them: images, targets
            return _spread(model, inputs, "(([...],), labels)", where)
        alike = isinstance(batch, list) and len(batch) > 1 and all(_like(each, batch[0]) for each in batch)
        try:
            return call_with(model, inputs)
        except BatchNormError:
            raise
        except Exception as error:
            if not alike:
                raise  # the model's own mistake, in its own words
            raise BatchNormError(
                f"the first of a batch of {len(batch)} tensors was passed to the model, which raised "
                f"{type(error).__name__}: {first_line(error)}",
                where=where,
                do="if the model takes the list itself, write it inside two tuples: (([...],),)",
            ) from error

    return forward


def _like(one: Any, other: Any) -> bool:
    """Whether two entries of a batch look like two samples, not like inputs and labels."""
    return (
        isinstance(one, Tensor) and isinstance(other, Tensor) and (one.dim(), one.dtype) == (other.dim(), other.dtype)
    )


def _is_array(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "numpy"


def labels_of(batch: Any) -> Tensor | None:
    """Return the class labels of a batch: its second entry, or an entry of that name; None if there are none.

    >>> import torch
    >>> labels_of((torch.zeros(2, 3), torch.tensor([0, 1])))
    tensor([0, 1])
    >>> labels_of({"pixels": torch.zeros(2, 3), "labels": torch.tensor([0.5, 0.1])})
    """
    found: Any = None
    if isinstance(batch, (tuple, list)):
        found = batch[1] if len(batch) > 1 else None
    elif isinstance(batch, Mapping):
        found = next((batch[name] for name in LABELS if name in batch), None)
    whole = isinstance(found, Tensor) and not (found.dtype.is_floating_point or found.dtype.is_complex)
    return found if whole and found.dim() == 1 else None


def raised_in(model: nn.Module, error: BaseException) -> str:
    """Return the path of the innermost module of a model in which an exception was raised; empty if unknown.

    >>> model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    >>> try:
    ...     model("no tensor")
    ... except TypeError as error:
    ...     raised_in(model, error)
    '0'
    """
    paths = {id(module): path for path, module in model.named_modules()}
    found, trace = "", error.__traceback__
    while trace is not None:
        found = paths.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found


def in_training(model: nn.Module, example: Any, run: Forward, where: str) -> Any:
    """Call a model that is in training mode; what it raises becomes an error that says what to do.

    >>> class Detector(nn.Module):
    ...     def forward(self, images, targets=None):
    ...         assert targets is not None, "no targets"
    >>> in_training(Detector(), {"images": 1}, call_with, "fuse")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: fuse: in training mode the model raises AssertionError: no targets; give an \
example, or forward=, that works in training mode too: detectors need their targets there
    """
    try:
        return run(model, example)
    except BatchNormError:
        raise
    except Exception as error:
        raise failed_in_training(model, error, where) from error


def failed_in_training(model: nn.Module, error: Exception, where: str) -> BatchNormError:
    """Return the error for a model that raised in training mode.

    >>> failed_in_training(nn.ReLU(), ValueError("too small"), "fuse").problem
    'in training mode the model raises ValueError: too small'
    """
    path = raised_in(model, error)
    return BatchNormError(
        f"in training mode {path or 'the model'} raises {type(error).__name__}: {first_line(error)}",
        where=where,
        do="give an example, or forward=, that works in training mode too: detectors need their targets there",
    )


def _arguments(model: nn.Module) -> list[str] | None:
    """The names of the arguments of a model's forward; None if it takes any, or if they are unknown."""
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return _arguments(model.module)
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
