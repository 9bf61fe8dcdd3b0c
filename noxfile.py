"""Every Python, both ends of torch's range, every compiler and every way to install: `nox -l` lists the sessions.

`nox -s smoke` takes minutes, `nox -s tests-3.12` half an hour; `nox -s tests-3.12 -- tests/layers` runs a part.
"""

import shutil
from pathlib import Path

import nox

nox.options.sessions = ["smoke", "clang", "no_compiler", "sdist", "wheel", "editable"]
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
# torch, and the oldest or newest Python it runs on with our own; docs/install.md has the same.
OLDEST, NEWEST = ("2.7.0", "3.10"), ("2.15.0", "3.14")
BASIC = ["pytest", "hypothesis", "expecttest"]
SHORT = ["tests/test_functional.py", "tests/layers"]


@nox.session(python=PYTHONS)
def tests(session):
    """The suite with the versions in constraints.txt."""
    session.install("-c", "constraints.txt", ".[test]")
    session.run("pytest", "-q", *session.posargs)


@nox.session(python=PYTHONS)
def smoke(session):
    """The layers with the torch of constraints.txt and nothing optional."""
    install(session, "-c", "constraints.txt", ".", *BASIC)


@nox.session(python=OLDEST[1])
def torch_oldest(session):
    """The suite with the oldest torch. Tests of packages that need a newer one are skipped."""
    at_torch(session, OLDEST[0])


@nox.session(python=NEWEST[1])
def torch_newest(session):
    """The suite with the newest torch."""
    at_torch(session, NEWEST[0])


@nox.session
def clang(session):
    """The kernel built by clang."""
    install(session, "-c", "constraints.txt", ".", *BASIC, env={"CC": "clang"}, tests=["tests/kernels", *SHORT])


@nox.session
def no_compiler(session):
    """Torch's operators alone, as on a machine without a compiler."""
    install(session, "-c", "constraints.txt", ".", *BASIC, env={"CC": "false"}, arithmetic="torch")


@nox.session
def sdist(session):
    """Installed from the source distribution."""
    from_build(session, "sdist")


@nox.session
def wheel(session):
    """Installed from the wheel."""
    from_build(session, "wheel")


@nox.session
def editable(session):
    """Installed with -e, which builds the kernel into src/."""
    install(session, "-c", "constraints.txt", "-e", ".", *BASIC)


def at_torch(session, version):
    """Run the suite with a torch of its own."""
    install(session, f"torch=={version}", ".[onnx,ray,tensorboard]", *BASIC, tests=["tests"])


def from_build(session, kind):
    """Build a distribution and install it."""
    session.install("build")
    out = Path(session.create_tmp()).resolve() / kind
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree("build", ignore_errors=True)
    session.run("python", "-m", "build", f"--{kind}", "--outdir", str(out))
    install(session, "-c", "constraints.txt", *map(str, out.iterdir()), *BASIC)


def install(session, *arguments, env=None, arithmetic="native", tests=SHORT):
    """Install, run the smoke test, and these tests or those named on the command line."""
    shutil.rmtree("build", ignore_errors=True)  # setuptools would take the kernel that another compiler built
    session.install(*arguments, env=env)
    session.run("python", "tests/smoke.py", arithmetic)
    session.run("pytest", "-q", *(session.posargs or tests))
