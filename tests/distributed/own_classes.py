"""BN classes with a behaviour of their own, such as are found in model libraries, for the tests of `convert`."""

import torch
import torch.nn.functional as F
from torch import nn

import batchnorm as bn


class NormAct(nn.BatchNorm2d):
    """Written as model libraries write it: torch's forward repeated, F.batch_norm, then dropout and activation."""

    def __init__(self, num_features, act=nn.SiLU, drop=nn.Identity, **more):
        super().__init__(num_features, **more)
        self.drop, self.act = drop(), act()

    def forward(self, x):
        assert x.ndim == 4
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        kept = not self.training or self.track_running_stats
        x = F.batch_norm(
            x,
            self.running_mean if kept else None,
            self.running_var if kept else None,
            self.weight,
            self.bias,
            self.training or (self.running_mean is None and self.running_var is None),
            factor,
            self.eps,
        )
        return self.act(self.drop(x))


class Cooperative(nn.BatchNorm2d):
    def forward(self, input):
        return 2.0 * torch.tanh(super().forward(input))


class ByName(nn.BatchNorm2d):
    def forward(self, input):
        return torch.relu(nn.BatchNorm2d.forward(self, input)), input.flatten(1).sum(1)


class Polite(nn.BatchNorm1d):
    """Overrides other things than the forward pass."""

    def _check_input_dim(self, input):
        if input.dim() != 3:
            raise ValueError("three dimensions, please")

    def extra_repr(self):
        return "polite"


class Fused(bn.BatchNorm2d):
    """A layer of ours with something after it."""

    def forward(self, input, residual=None, mask=None):
        return super().forward(input, residual, mask) + 1.0


class ByHand(nn.BatchNorm2d):
    """Computes its statistics itself: there is nothing that could be replaced."""

    def forward(self, x):
        mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True)
        return (x - mean) / (var + self.eps).sqrt() * self.weight[:, None, None] + self.bias[:, None, None]


class Twice(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(super().forward(x) + 1.0)


class Centred(nn.BatchNorm2d):
    """Looks at the batch once more, after the normalisation."""

    def forward(self, x):
        y = torch.relu(super().forward(x))
        return y - y.mean(0, keepdim=True)


class Named(nn.BatchNorm2d):
    def __init__(self, num_features):
        super().__init__(num_features)
        self.activation = nn.ReLU()

    def forward(self, x):
        return self.activation(super().forward(x))


class Picky(nn.BatchNorm2d):
    def forward(self, x, scale):
        return super().forward(x) * scale


class Fickle(nn.BatchNorm2d):
    """Normalises as it likes."""

    away = False

    def forward(self, x):
        return x if self.away else super().forward(x)


KEPT = (NormAct, Cooperative, ByName, Fused)
LEFT = {
    ByHand: "does not normalise with the batch's statistics by torch's batch_norm or ours",
    Twice: "normalises 2 times",
    Centred: "looks at the batch as a whole",
    Named: "has attributes that mean something else in ours: activation",
    Picky: "could not be tried on a batch: TypeError",
}
