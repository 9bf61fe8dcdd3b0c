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
bn.BatchNorm2d(8, activation="rleu")  # type: ignore[arg-type]
bn.BatchNorm2d(8, statistics="runing")  # type: ignore[arg-type]
bn.BatchNorm2d(8, activaton="relu")  # type: ignore[call-arg]
bn.GhostBatchNorm(8, moment=0.1)  # type: ignore[call-arg]
bn.SyncBatchNorm(8, one_value="keep")  # type: ignore[arg-type]
bn.DomainBatchNorm(8, affine="sharde")  # type: ignore[arg-type]
bn.make_norm("group", 8, grups=2)  # type: ignore[call-overload]
bn.convert(model, "group", grups=2)  # type: ignore[call-arg]
bn.insert(model, x, only="convs")  # type: ignore[arg-type]
bn.adapt(model, [x], method="entropie")  # type: ignore[arg-type]
bn.calibrate(model, [x], formula="mreged")  # type: ignore[arg-type]
bn.check(model, purpose="exprot")  # type: ignore[arg-type]
layer = bn.make_norm("batch", 8, activation="relu", momentum=0.1)
masked: torch.Tensor = bn.MaskedBatchNorm(8)(x, torch.tensor([5, 2]))
bn.BatchNorm2d(8)(x, residul=x)  # type: ignore[call-arg]
output, (h, c) = bn.BatchNormLSTM(3, 5, statistics="batch")(torch.randn(7, 2, 3))
hidden: torch.Tensor = h
