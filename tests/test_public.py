"""The public names, what importing them costs, and that the examples in the docstrings are true."""

import doctest
import importlib
import importlib.metadata
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import batchnorm

# The experiments and the benchmark run theirs beside their own tests.
ELSEWHERE = (
    "batchnorm.lab",
    "batchnorm.doctor.rules.",
    "batchnorm.bench.",
    "batchnorm.cli",
    "batchnorm.commands",
    "batchnorm.__main__",
    "batchnorm.kernels._",
)
DOCUMENTED = [
    "batchnorm",
    *(
        module.name
        for module in pkgutil.walk_packages(batchnorm.__path__, "batchnorm.")
        if not module.name.startswith(ELSEWHERE)
    ),
]


# Internals whose every example would need ranks, or a page of set-up.
UNSHOWN = {
    "batchnorm.distributed.exchange",
    "batchnorm.distributed.rollcall",
    "batchnorm.files",
    "batchnorm.kernels.differentiable",
}


@pytest.mark.parametrize("name", batchnorm.__all__)
def test_every_public_name_resolves(name):
    value = getattr(batchnorm, name)
    assert getattr(batchnorm, name) is value
    assert name in dir(batchnorm)


def test_the_names_are_those_of_the_stub():
    stub = (Path(batchnorm.__file__).parent / "__init__.pyi").read_text(encoding="utf-8")
    named = re.findall(r"(\w+) as \1\b", stub)
    assert batchnorm.__all__ == sorted(named)
    assert len(named) == len(set(named)) > 50
    assert "__version__" in dir(batchnorm)


def test_star_import():
    names = {}
    exec("from batchnorm import *", names)
    assert set(batchnorm.__all__) <= set(names)


def test_unknown_names():
    with pytest.raises(AttributeError, match="module 'batchnorm' has no attribute 'no_such'"):
        _ = batchnorm.no_such
    assert not hasattr(batchnorm, "BatchNorm4d")
    with pytest.raises(ImportError):
        exec("from batchnorm import BatchNorm4d")


def test_importing_the_package_does_not_import_torch():
    program = (
        "import json, sys, batchnorm; before = 'torch' in sys.modules or 'numpy' in sys.modules; "
        "batchnorm.BatchNormError; errors = 'torch' in sys.modules; "
        "batchnorm.BatchNorm2d; print(json.dumps([before, errors, 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [False, False, True]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstring_examples(name):
    module = importlib.import_module(name)
    torch.manual_seed(0)
    # Names that an example needs, and its module imports, are at hand; what is printed must match.
    results = doctest.testmod(module, extraglobs={"torch": torch})
    assert results.failed == 0
    rule = ".doctor.rules." in name  # whose docstring is a page, and whose cases are its tests
    assert results.attempted > 0 or module.__file__.endswith("__init__.py") or name in UNSHOWN or rule


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_command_says_its_version_without_torch(option):
    program = (
        "import sys\nfrom batchnorm.commands import app\ntry:\n    app()\n"
        "except SystemExit as end:\n    sys.stderr.write(f\"{end.code} {'torch' in sys.modules}\")"
    )
    done = subprocess.run([sys.executable, "-c", program, option], capture_output=True, text=True, check=True)
    assert done.stdout == f"batchnorm {batchnorm.__version__}\n"
    assert done.stderr == "0 False"


def test_the_version_is_the_one_of_the_package():
    assert importlib.metadata.version("batchnorm") == batchnorm.__version__
