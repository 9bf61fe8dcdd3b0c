"""What type checkers must see in a user's program; run by mypy with --warn-unused-ignores, not by pytest."""

import torch

import batchnorm as bn

x = torch.randn(4, 8, 5, 5)
y: torch.Tensor = bn.BatchNorm2d(8, activation="relu")(x, residual=x)
model, report = bn.fold(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)), x)
relative: float = report.certificate.relative if report.certificate else 0.0
unknown = bn.nope  # type: ignore[attr-defined]
bn.fold(model, x, tolerence=1e-4)  # type: ignore[call-arg]
bn.BatchNorm2d("8")  # type: ignore[arg-type]
