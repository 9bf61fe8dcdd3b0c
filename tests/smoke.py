"""What must hold wherever the package was installed: a script, not a test. ``python tests/smoke.py native|torch``."""

import subprocess
import sys

import torch

import batchnorm as bn
from batchnorm import kernels


def main(expected):
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, {bn.__file__}: {kernels.describe()}")
    assert (kernels.kernel() is not None) == (expected == "native"), f"expected the arithmetic to be {expected}"
    for command in (["--help"], ["rules"]):
        done = subprocess.run([sys.executable, "-m", "batchnorm", *command], capture_output=True, text=True, check=True)
        assert done.stdout, command
    torch.manual_seed(0)
    for shape in ((16, 8), (4, 8, 9), (4, 8, 5, 7), (2, 8, 3, 4, 5)):
        compare(shape)


def compare(shape):
    """Train and evaluate our layer beside torch's."""
    kind = f"BatchNorm{max(len(shape) - 2, 1)}d"
    ours, theirs = getattr(bn, kind)(8), getattr(torch.nn, kind)(8)
    x = torch.randn(shape)
    for training in (True, False):
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        for layer, input in zip((ours, theirs), inputs, strict=True):
            layer.train(training)(input).square().sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    main(*sys.argv[1:])
