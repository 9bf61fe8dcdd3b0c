"""A text that is generated: sums in nested brackets, so that what comes next follows from what came before."""

from __future__ import annotations

import random

import torch

from batchnorm.lab.data.examples import Examples

CHARACTERS = "0123456789+=;()[]<>"
PAIRS = ("()", "[]", "<>")


def generated(characters: int, seed: int) -> str:
    """Return a text of so many characters.

    >>> generated(24, seed=1)
    '1+4=5;7+7=4;([04]);(0);8'

    Items end with a semicolon: a sum of two digits with the last digit of its value, or nested brackets around digits.
    """
    chance = random.Random(seed)
    text: list[str] = []
    while len(text) < characters:
        if chance.random() < 0.5:
            a, b = chance.randrange(10), chance.randrange(10)
            text.extend(f"{a}+{b}={(a + b) % 10};")
        else:
            text.extend(nested(chance, depth=4) + ";")
    return "".join(text[:characters])


def nested(chance: random.Random, depth: int) -> str:
    """Return brackets around one or two digits or brackets.

    >>> nested(random.Random(3), depth=2)
    '(<17>)'
    """
    if depth == 0:
        return str(chance.randrange(10))
    pair = chance.choice(PAIRS)
    inside = [nested(chance, depth - 1 if chance.random() < 0.6 else 0) for _ in range(chance.randint(1, 2))]
    return pair[0] + "".join(inside) + pair[1]


def windows(text: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return windows of a text as numbers, half a window apart, and for every place the character that comes next.

    >>> windows("1+2=3;", length=4)
    (tensor([[ 1, 10,  2, 11]]), tensor([[10,  2, 11,  3]]))
    """
    numbers = torch.tensor([CHARACTERS.index(character) for character in text])
    cut = numbers.unfold(0, length + 1, max(1, length // 2))
    return cut[:, :-1].contiguous(), cut[:, 1:].contiguous()


def sentences(characters: int, length: int, *, held_out: bool = False) -> Examples:
    """Return a text to train on, and one a quarter as long to validate on; another one to choose anything (held out).

    >>> sentences(400, length=8).train_inputs.shape
    torch.Size([98, 8])
    """
    inputs, labels = windows(generated(characters, seed=1), length)
    validation, validation_labels = windows(generated(characters // 4, seed=3 if held_out else 2), length)
    return Examples(inputs, labels, validation, validation_labels, len(CHARACTERS))
