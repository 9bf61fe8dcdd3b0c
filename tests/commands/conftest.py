import numpy as np
import pytest
import torch
from running import NET


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a model, data and a checkpoint, which is the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    generator = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", x=generator.standard_normal((32, 3)).astype("f4"))
    torch.save({"bn.weight": torch.ones(2), "bn.bias": torch.zeros(2)}, tmp_path / "model.pt")
    return tmp_path
