"""The public names, what importing them costs, and that the examples in the docstrings are true."""

import doctest
import importlib
import importlib.metadata
import importlib.util
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
    "batchnorm.distributed.membership",
    "batchnorm.files",
    "batchnorm.kernels.differentiable",
}


# What follows "bn." or "batchnorm." in the documentation and is no name of Python.
NO_NAMES = {"train", "figures", "per", "sarif", "weight", "bias"}


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


def documented():
    """Every ``bn.NAME`` and ``batchnorm.NAME`` of the documentation, and where it stands."""
    root = Path(__file__).parents[1]
    for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))] if (root / "docs").exists() else []:
        for name in re.findall(r"\b(?:bn|batchnorm)((?:\.[A-Za-z_]\w*)+)", page.read_text(encoding="utf-8")):
            yield name[1:], page.relative_to(root).as_posix()


def test_every_documented_name_exists():
    """Also those below a module, such as ``batchnorm.doctor.lightning``."""
    names = dict(documented())
    assert len(names) > 60
    lost = [f"{page}: {name}" for name, page in names.items() if name not in NO_NAMES and not exists(name)]
    assert lost == []


def exists(name):
    value, module = batchnorm, "batchnorm"
    for part in name.split("."):
        module = f"{module}.{part}"
        if hasattr(value, part):
            value = getattr(value, part)
        elif isinstance(value, type(batchnorm)) and importlib.util.find_spec(module):
            value = importlib.import_module(module)
        else:
            return False
    return True


def test_a_misspelt_name_is_asked_for():
    done = subprocess.run([sys.executable, "-c", "import batchnorm as bn\nbn.chek"], capture_output=True, text=True)
    assert "Did you mean: 'check'?" in done.stderr


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
