"""Imports point one way: a module imports what stands above it in ``ORDER``, and no two modules import each other."""

import ast
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1] / "src" / "batchnorm"

# The rooms, top to bottom: a folder or a file of the root. Each may import those above it.
ORDER = (
    # What a failure is, and the small things that know nothing else of this package.
    "errors", "options", "extras", "interrupts", "hooks", "nested", "moments", "memory", "dataflow", "reference",
    # Files, tensors and terminals.
    "files", "inflated", "progress", "terminal", "specs", "checkpoints", "masks", "preserve", "calling",
    "batches", "loading",
    # Results as records, and how records are drawn.
    "trainers", "present", "records", "report", "pages", "__init__",
    # Batch normalisation: the kernel, the function, the layers, the transforms.
    "distributed", "kernels", "conventions", "checks", "functional", "graph", "layers", "optim", "transforms",
    # What looks at models and at training.
    "doctor", "observe", "probe", "testing",
    # Experiments, measurements, the command line.
    "lab", "bench", "commands", "cli", "__main__",
)  # fmt: skip

# The starts that have to be quick: what they load may import, inside a function, what they do not load.
STARTS = {
    "batchnorm": "`import batchnorm` loads no torch and no records",
    "batchnorm.cli": "an interrupt is caught before anything slow is imported",
    "batchnorm.commands": "`batchnorm --help` loads no torch",
    "batchnorm.doctor.pages": "`batchnorm explain` and `batchnorm rules` load no torch",
}
# Other packages that may be imported inside a function, anywhere: optional ones, and those that only drawing needs.
LATE = {
    "ray", "onnxruntime", "inplace_abn", "jax", "flax", "PIL", "safetensors",  # optional, or of one file format
    "rich", "plotly", "jinja2",  # for whoever looks at a result
}  # fmt: skip
EXCEPTIONS = {
    ("batchnorm.layers.torch_fusion", "batchnorm.layers.torch_fusion"): "these functions run inside torch's module",
    ("batchnorm.kernels.native", "torch"): "the kernel loads without torch; only its path is needed",
    ("batchnorm.observe.sinks", "torch.utils.tensorboard"): "TensorBoard is optional",
}
# Modules that import others by a name from a table; the tables are in the same file, or filled by ``pages.py``.
TABLES = {
    "batchnorm": "the public names",
    "batchnorm.doctor.codes": "the rules",
    "batchnorm.doctor.config": "tomllib, or tomli on Python 3.10",
    "batchnorm.doctor.transformers": "transformers is optional",
    "batchnorm.lab.claims": "the claims",
    "batchnorm.lab.runs.experiments": "the experiments",
    "batchnorm.layers.family": "layers of torch and of ours, by name",
    "batchnorm.observe.probes.result": "IPython is there in a notebook only",
    "batchnorm.report.figures": "the figures that are registered",
    "batchnorm.specs": "what the user names on the command line",
    "batchnorm.trainers": "lightning is optional",
    "batchnorm.transforms.rewrite": "modules that a user's own forward mentions",
}
COMPILED = {"batchnorm.kernels._call"}  # from call.c


class Import(NamedTuple):
    """One name that a module imports."""

    of: str  # the module, or a name in it
    line: int
    where: str  # "top", "function" or "typing"


def modules() -> dict[str, Path]:
    """The modules of the package by name."""
    found = {}
    for file in sorted(ROOT.rglob("*.py")):
        parts = [ROOT.name, *file.relative_to(ROOT).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = modules()


@cache
def imports(module: str) -> tuple[Import, ...]:
    """What a module imports, in the order of its lines."""
    return tuple(read(MODULES[module].read_text(encoding="utf-8")))


def read(source: str):
    """Yield the imports of a source."""

    def visit(node, where):
        for child in ast.iter_child_nodes(node):
            inside = where
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                inside = "function"
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                inside = "typing"
            elif isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, where) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, f"line {child.lineno}: a relative import"
                names = (f"{child.module}.{alias.name}" for alias in child.names)
                yield from (Import(name, child.lineno, where) for name in names)
            yield from visit(child, inside)

    return visit(ast.parse(source), "top")


def ours(name: str) -> str:
    """The module of this package that a name is of; empty if it is of another package or compiled."""
    while name and name not in MODULES:
        name = "" if name in COMPILED else name.rpartition(".")[0]
    return name


def links(module: str, where: str | None = None) -> list[tuple[str, Import]]:
    """The modules of this package that a module imports."""
    return [(ours(one.of), one) for one in imports(module) if where in (None, one.where) and ours(one.of)]


def room(module: str) -> str:
    """The folder or file of the root that a module belongs to."""
    return [*module.split("."), "__init__"][1]


def place(module: str, line: int) -> str:
    """The file and line of an import."""
    return f"{MODULES[module].relative_to(ROOT.parents[1])}:{line}"


@cache
def loaded_by(start: str) -> frozenset[str]:
    """The modules of this package that are loaded when one is imported."""
    found, left = set(), [start]
    while left:
        module = left.pop()
        if module not in found:
            found.add(module)
            left += [other for other, _ in links(module, "top")]
            left += [module.rpartition(".")[0]] if "." in module else []
    return frozenset(found)


def upwards() -> list[str]:
    """The imports that point up."""
    level = {name: number for number, name in enumerate(ORDER)}
    return [
        f"{place(module, one.line)}: {module} imports {other}, and {room(other)} stands below {room(module)}; move the "
        f"function that needs it down to {room(other)}, or what it needs up to {room(module)}"
        for module in MODULES
        for other, one in links(module)
        if level[room(other)] > level[room(module)]
    ]


def ring() -> list[str]:
    """The modules of a ring, each importing the next; empty if there is none."""
    state: dict[str, str] = {}

    def follow(module: str, path: list[str]) -> list[str]:
        state[module] = "open"
        for other, _ in links(module):
            if other == module:
                continue
            if state.get(other) == "open":
                return [*path[path.index(other) :], other]
            if other not in state and (found := follow(other, [*path, other])):
                return found
        state[module] = "done"
        return []

    for module in MODULES:
        if module not in state and (found := follow(module, [module])):
            return found
    return []


def hidden() -> list[str]:
    """The imports in functions or behind TYPE_CHECKING that no start needs."""
    found = []
    for module in MODULES:
        for one in imports(module):
            other, top = ours(one.of), one.of.split(".")[0]
            if one.where == "top" or any(module == who and one.of.startswith(what) for who, what in EXCEPTIONS):
                continue
            quick = [start for start in STARTS if module in loaded_by(start)]
            if other:
                allowed = any(other not in loaded_by(start) for start in quick)
            else:
                allowed = top in LATE or top in sys.stdlib_module_names or bool(quick) or one.where == "typing"
            if not allowed:
                found.append(
                    f"{place(module, one.line)}: {module} imports {one.of} "
                    f"{'inside a function' if one.where == 'function' else 'behind TYPE_CHECKING'}; import it at the "
                    "top of the file: no quick start (see STARTS) gets slower"
                )
    return found


def test_every_room_has_its_place():
    rooms = {room(module) for module in MODULES}
    assert rooms == set(ORDER), "add a new room to ORDER, in tests/test_imports.py, and remove one that is gone"
    assert len(set(ORDER)) == len(ORDER)


def test_imports_point_one_way():
    found = upwards()
    assert not found, "\n".join(found)


def test_no_modules_import_each_other():
    path = ring()
    lines = [
        f"{place(module, next(one.line for to, one in links(module) if to == other))}: {module} imports {other}"
        for module, other in pairwise(path)
    ]
    assert not path, "\n".join([*lines, "move what two of them share into a module that both import"])


def test_no_import_is_hidden():
    found = hidden()
    assert not found, "\n".join(found)


def test_only_the_tables_import_by_name():
    found = [
        f"{place(module, one.line)}: {module} imports {one.of}; import the module itself, or add a table to TABLES"
        for module in MODULES
        for one in imports(module)
        if one.of in ("importlib.import_module", "importlib") and module not in TABLES
    ]
    assert not found, "\n".join(found)
    assert TABLES.keys() == {
        module
        for module in MODULES
        if any(one.of in ("importlib.import_module", "importlib") for one in imports(module))
    }


@pytest.mark.parametrize("start", STARTS)
def test_quick_starts_load_no_torch(start):
    slow = [
        f"{place(module, one.line)}: {module} imports {one.of}, and {STARTS[start]}; import it inside the function"
        for module in sorted(loaded_by(start))
        for one in imports(module)
        if one.where == "top" and one.of.split(".")[0] in ("torch", "numpy", "rich", "jinja2", "plotly")
    ]
    assert not slow, "\n".join(slow)


def test_what_is_wrong_is_found(monkeypatch):
    fake = {
        "batchnorm.errors": "def f():\n    from batchnorm.layers import batch\n",
        "batchnorm.layers.batch": "import batchnorm.layers.sync\n",
        "batchnorm.layers.sync": "if TYPE_CHECKING:\n    import batchnorm.layers.batch\n",
    }
    monkeypatch.setattr(sys.modules[__name__], "imports", lambda module: tuple(read(fake.get(module, ""))))
    loaded_by.cache_clear()
    try:
        (up,) = upwards()
        assert up.startswith("src/batchnorm/errors.py:2: batchnorm.errors imports batchnorm.layers.batch, and layers")
        assert ring() == ["batchnorm.layers.batch", "batchnorm.layers.sync", "batchnorm.layers.batch"]
        assert [line.split(":")[0] for line in hidden()] == [
            "src/batchnorm/errors.py",
            "src/batchnorm/layers/sync.py",
        ]
    finally:
        loaded_by.cache_clear()
