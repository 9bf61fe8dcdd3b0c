"""The callback, driven by Lightning itself where it is installed."""

import importlib.util
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from watching import batches, hooks_of, of, stack

import batchnorm as bn
import peer_models
from batchnorm import trainers
from batchnorm.observe import lightning as adapter
from batchnorm.records import read


@pytest.fixture
def lightning():
    """Lightning, whose import has warnings of its own, and wants a torchvision that can be imported."""
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("Lightning is not installed")
    peer_models.torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lightning import pytorch
    return pytorch


def fit(pl, callback, fail=False, epochs=2):
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = stack()

        def training_step(self, batch, index):
            if fail and index == 2:
                raise RuntimeError("stop")
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch, index):
            self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    module = Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            max_epochs=epochs, callbacks=[callback] if callback else [], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        )  # fmt: skip
        loaders = [DataLoader(data, batch_size=None) for data in (batches(4), batches(2, seed=1))]
        trainer.fit(module, *loaders)
    return module


def test_a_lightning_module_is_watched(lightning, tmp_path):
    callback = adapter.Watch(every=3, to=tmp_path / "run.jsonl", stack="with BN")
    module = fit(lightning, callback)
    records = read(tmp_path / "run.jsonl")
    assert callback.watch.records == records
    for quantity in ("histogram", "weight norm", "gradient norm", "effective learning rate"):
        assert sorted({m.setting["step"] for m in of(records, quantity)}) == [0, 3, 6]
    assert {m.setting["layer"] for m in of(records, "saturation")} == {"net.2", "net.5"}
    assert [m.setting["step"] for m in of(records, "training loss")] == list(range(1, 9))
    assert [m.setting["step"] for m in of(records, "val_loss")] == [4, 8]
    assert all(m.samples[0] > 0 for m in of(records, "gradient norm", "net.0"))
    assert hooks_of(module) == 0


def test_the_training_is_not_changed(lightning):
    plain, seen = fit(lightning, None), fit(lightning, adapter.Watch(every=1))
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), seen.state_dict().values(), strict=True))


def test_after_an_exception_what_was_recorded_is_there(lightning, tmp_path):
    callback = adapter.Watch(every=1, to=tmp_path / "run.jsonl")
    with pytest.raises(RuntimeError, match="stop"):
        fit(lightning, callback, fail=True)
    assert not callback.watch.running
    assert {m.setting["step"] for m in of(read(tmp_path / "run.jsonl"), "mean")} == {0, 1}


class Trainer:
    """As much of a trainer as the callback uses."""

    is_global_zero, global_step, callback_metrics = True, 0, {}

    def __init__(self, model, **own):
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
        vars(self).update(own)


def test_only_one_process_writes():
    model, events = stack(), adapter.WatchEvents()
    events.on_train_start(Trainer(model, is_global_zero=False), model)
    events.on_train_batch_end(Trainer(model), model, {"loss": torch.tensor(1.0)}, None, 0)
    events.on_validation_end(Trainer(model), model)
    events.on_train_end(Trainer(model), model)
    assert events.watch is None


def test_a_resumed_run_counts_on_and_a_second_one_ends_the_first():
    model, events = stack(), adapter.WatchEvents(every=10)
    events.on_train_start(Trainer(model, global_step=40), model)
    first = events.watch
    assert first.steps == 40
    other = stack()
    events.on_train_start(Trainer(other), other)
    assert not first.running
    assert hooks_of(model) == 0
    events.on_exception(Trainer(other), other, RuntimeError("stop"))
    assert hooks_of(other) == 0


def test_only_metrics_of_the_validation_that_are_one_number():
    model, events = stack(), adapter.WatchEvents()
    metrics = {"val_acc": torch.tensor(0.5), "train_loss": torch.tensor(1.0), "val_all": torch.zeros(3), "val": "no"}
    trainer = Trainer(model, callback_metrics=metrics)
    events.on_validation_end(trainer, model)  # before training: a sanity check
    events.on_train_start(trainer, model)
    events.on_validation_end(trainer, model)
    events.on_train_end(trainer, model)
    assert [m.quantity for m in events.watch.records.measurements] == ["val_acc"]


def test_a_wrong_option_is_said_at_once():
    with pytest.raises(bn.BatchNormError, match="every is 0"):
        adapter.WatchEvents(every=0)
    assert adapter.WatchEvents(layers="net.*").watch is None  # which layers there are is not known yet


def test_what_is_missing_is_said(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

    adapter._watch.cache_clear()
    monkeypatch.setattr(trainers, "import_module", missing)
    with pytest.raises(bn.BatchNormError, match=r"Lightning is not installed; pip install 'lightning>=2.2'"):
        _ = adapter.Watch
    with pytest.raises(AttributeError, match="no attribute 'Callback'"):
        _ = adapter.Callback
