"""What all tests share: all paths to the arithmetic, and that what a test imports from its folder is gone after it."""

import signal
import sys

import pytest

from batchnorm import kernels
from batchnorm.kernels import call

# A background job ignores Ctrl-C, nohup the end of the terminal, and processes that tests start would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _imports_of_this_test_only(tmp_path_factory):
    places, before = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = places
    base = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(base):
            del sys.modules[name]


@pytest.fixture(params=["native", "python", "torch"])
def path(request, monkeypatch):
    """How a call goes: to the kernel from C (if the call is plain), to the kernel from Python, or to torch."""
    if request.param == "torch":
        monkeypatch.setattr(kernels, "_kernel", None)
    elif kernels.kernel() is None:
        pytest.skip(f"no compiled kernel: {kernels.describe()}")
    elif request.param == "python":
        monkeypatch.setattr(call, "compiled", None)
    elif call.compiled is None:
        pytest.skip(call.reason)
    return request.param
