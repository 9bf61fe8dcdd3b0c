"""What a test imports from its own folder is gone after it: the commands make the user's folders importable."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _imports_of_this_test_only(tmp_path_factory):
    places, before = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = places
    base = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(base):
            del sys.modules[name]
