"""What tests of the lab share: a cache of their own, and no data of the person who runs them."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """The folder of the cache, which is not there yet."""
    folder = tmp_path_factory.mktemp("home") / "cache"
    monkeypatch.setenv("BATCHNORM_CACHE", str(folder))
    monkeypatch.delenv("BATCHNORM_DATA", raising=False)
    return folder
