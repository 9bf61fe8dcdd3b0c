"""What tests of the lab share: a cache and a store of their own, and no data of the person who runs them."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """The folder of the cache, which is not there yet."""
    folder = tmp_path_factory.mktemp("home") / "cache"
    monkeypatch.setenv("BATCHNORM_CACHE", str(folder))
    monkeypatch.setenv("BATCHNORM_LAB", str(folder.parent / "store"))
    monkeypatch.delenv("BATCHNORM_DATA", raising=False)
    return folder
