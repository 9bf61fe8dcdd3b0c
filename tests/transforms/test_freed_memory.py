"""Models whose memory was freed or shrunk, as sharded training does: every verb says so before torch reads it."""

import pytest
import torch
from torch import nn

import batchnorm as bn

WIDE = 4096  # elements: torch copies as few as these with instructions that end the process
X = torch.ones(8, 3)
FREED = {
    "freed": lambda storage: storage.resize_(0),
    "one byte short": lambda storage: storage.resize_(storage.nbytes() - 1),
}
VERBS = {
    "check": lambda model: bn.check(model, example=X),
    "check alone": lambda model: bn.check(model),
    "check a state": lambda model: bn.check(model.state_dict()),
    "check before": lambda model: bn.check(network(nn.BatchNorm1d), before=model),
    "trace": lambda model: bn.trace(model, X),
    "calibrate": lambda model: bn.calibrate(model, [X]),
    "calibrate in place": lambda model: bn.calibrate(model, [X], inplace=True),
    "adapt": lambda model: bn.adapt(model, [X]),
    "fold": lambda model: bn.fold(model.eval(), X),
    "export": lambda model: bn.export(model.eval(), X, "never.pt2"),
    "freeze": lambda model: bn.freeze(model),
    "unfreeze": lambda model: bn.unfreeze(model),
    "drop_bias": lambda model: bn.drop_bias(model, X),
    "insert": lambda model: bn.insert(model, X),
    "fuse": lambda model: bn.fuse(model, X),
    "accelerate": lambda model: bn.accelerate(model, X),
    "convert": lambda model: bn.convert(model, "group", example=X),
    "convert without an example": lambda model: bn.convert(model, "sync"),
    "monitor": lambda model: bn.monitor(model).__enter__(),
    "watch": lambda model: bn.watch(model).__enter__(),
    "to_keras": lambda model: bn.to_keras(model[1]),
    "to_flax": lambda model: bn.to_flax(model[1]),
}


def network(kind):
    return nn.Sequential(nn.Linear(3, WIDE), kind(WIDE), nn.ReLU(), nn.Linear(WIDE, 4))


@pytest.mark.parametrize("how", FREED)
@pytest.mark.parametrize("name", ["1.running_var", "1.weight", "0.weight", "3.bias"])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, bn.BatchNorm1d], ids=["torch", "ours"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_model_without_its_memory_is_refused(tmp_path, monkeypatch, verb, kind, name, how):
    if verb.startswith("to_") and not name.startswith("1."):
        pytest.skip("only the layer is given")
    monkeypatch.chdir(tmp_path)
    model = network(kind)
    tensor = dict([*model.named_parameters(), *model.named_buffers()])[name]
    FREED[how](tensor.detach().untyped_storage())
    short = name.removeprefix("1.")
    with pytest.raises(bn.BatchNormError, match=rf"the memory of (1\.)?{short} was freed"):
        VERBS[verb](model)
    assert not list(tmp_path.iterdir())
