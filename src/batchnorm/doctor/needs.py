"""The inputs that rules need, in words, and the arguments of `check` that give them.

>>> NEEDS["data"], ARGUMENTS[:2]
('batches of data (data=)', ('model', 'example'))
"""

from __future__ import annotations

# What a rule may need, in the words of the message that says it is missing.
NEEDS = {
    "tensors": "a model or a checkpoint",
    "model": "a model (a checkpoint has only tensors)",
    "example": "an example input (example=)",
    "data": "batches of data (data=)",
    "labels": "batches that are (input, label) pairs (data=)",
    "loader": "a DataLoader (data=)",
    "optimizer": "the optimiser (optimizer=)",
    "before": "the model as it was before (before=)",
    "ranks": "several processes (a process group)",
    "run": "a training run (bn.monitor)",
}
# The arguments of `check`, the easiest first: each gives the need of its name.
ARGUMENTS = tuple(need for need, words in NEEDS.items() if need == "model" or words.endswith(f"({need}=)"))
