"""The callbacks, driven by the real trainers where those are installed."""

import importlib.util
import warnings

import pytest
import torch
from torch import nn

import batchnorm as bn
import peer_models
from batchnorm import trainers
from batchnorm.calling import labels_of
from batchnorm.doctor import lightning as adapter
from batchnorm.doctor import transformers as other
from batchnorm.doctor.attached import Attached

HOMES = {adapter: trainers, other: other}  # who imports the other package


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


def network():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def hooks_of(model):
    return sum(len(getattr(m, name)) for m in model.modules() for name in vars(m) if "_hooks" in name)


class Examples(torch.utils.data.Dataset):
    def __init__(self, size=64, sort=False):
        generator = torch.Generator().manual_seed(0)
        self.y = torch.randint(0, 4, (size,), generator=generator)
        self.y = self.y.sort().values if sort else self.y
        self.x = torch.randn(size, 3, generator=generator) + 3 * self.y[:, None]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def fit(pl, callback, steps=6, forget=False, fail=False, sort=False, shuffle=False):
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, index):
            x, y = batch
            if forget and index == 3:
                with torch.no_grad():
                    self.net(x)
            if fail and index == 2:
                raise RuntimeError("a bug of the user")
            return nn.functional.cross_entropy(self.net(x), y)

        def validation_step(self, batch, index):
            self.log("loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    module = Module()
    data = torch.utils.data.DataLoader(Examples(8 * steps, sort), batch_size=8, shuffle=shuffle)
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", kind)
        warnings.filterwarnings("ignore", message=".*(dataloader|GPU|num_workers|checkpoint|log_every|logging).*")
        trainer = pl.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[callback],
        )  # fmt: skip
        trainer.fit(module, data, data)
    return module


def test_a_healthy_fit_is_silent_and_leaves_no_hooks(lightning):
    callback = adapter.Monitor(every=1)
    module = fit(lightning, callback)
    assert str(callback.findings) == "nothing found"
    assert callback._attached.run.step == 6
    assert hooks_of(module) == 0


def test_lightning_warns_where_it_happens(lightning):
    callback = adapter.Monitor(select=["BN301"])
    with pytest.warns(bn.BatchNormWarning, match="step 3, call 4: net.1: BN301"):
        fit(lightning, callback, forget=True)
    assert callback.findings.codes == ("BN301",)


def test_the_labels_are_told(lightning):
    callback = adapter.Monitor(select=["BN306"], warn=False)
    fit(lightning, callback, steps=96, sort=True)
    assert callback.findings.codes == ("BN306",)


def test_an_exception_takes_the_hooks_away(lightning):
    callback = adapter.Monitor()
    with pytest.raises(RuntimeError, match="a bug of the user"):
        fit(lightning, callback, fail=True)
    assert callback._attached.run is not None
    assert hooks_of(callback._attached.run.model) == 0


def trainer(callback, tmp_path, forget=False):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.calls = network(), 0

        def forward(self, x, labels):
            self.calls += 1
            if forget and self.calls == 4:
                with torch.no_grad():
                    self.net(x)
            logits = self.net(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    data = [{"x": x, "labels": y} for x, y in Examples(48)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=8, num_train_epochs=1, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    return transformers.Trainer(Model(), arguments, train_dataset=data, callbacks=[callback])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_transformers_trainer(tmp_path):
    callback = other.Monitor(every=1, warn=False)
    training = trainer(callback, tmp_path)
    training.train()
    assert callback._attached.run.step == 6
    assert str(callback.findings) == "nothing found"
    assert hooks_of(training.model) == 0


def test_the_protocol_of_transformers_without_a_trainer():
    pytest.importorskip("transformers")
    callback, model = other.Monitor(warn=False), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    callback.on_train_begin(None, None, None, model=model, optimizer=optimizer)
    for x in torch.randn(3, 8, 3):
        model(x).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        model(x)
    callback.on_train_end(None, None, None, model=model)
    assert callback.findings.codes == ("BN301",)
    assert hooks_of(model) == 0


def test_beginning_anew_ends_what_was_begun():
    attached, first, second = Attached(warn=False), network(), network()
    attached.begin(first)
    attached.begin(second)
    assert hooks_of(first) == 0
    assert hooks_of(second) > 0
    attached.end()
    attached.end()
    assert hooks_of(second) == 0


def test_a_wrong_option_is_said_at_once():
    with pytest.raises(bn.BatchNormError, match="every is 0"):
        Attached(every=0)


@pytest.mark.parametrize("module", [adapter, other], ids=["lightning", "transformers"])
def test_what_is_missing_is_said(module, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

    module._monitor.cache_clear()
    monkeypatch.setattr(HOMES[module], "import_module", missing)
    with pytest.raises(bn.BatchNormError, match="is not installed; pip install"):
        _ = module.Monitor
    with pytest.raises(AttributeError, match="no attribute 'Callback'"):
        _ = module.Callback


def test_a_package_that_lacks_one_of_its_own_is_not_called_missing(monkeypatch):
    def broken(name):
        raise ModuleNotFoundError("No module named 'torchmetrics'", name="torchmetrics")

    for module in (adapter, other):
        module._monitor.cache_clear()
        monkeypatch.setattr(HOMES[module], "import_module", broken)
        with pytest.raises(ModuleNotFoundError, match="torchmetrics"):
            _ = module.Monitor


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ((torch.zeros(2, 1), torch.tensor([0, 1])), True),
        ([torch.zeros(2, 1)], False),
        ({"labels": torch.tensor([0, 1])}, True),
        ({"labels": torch.tensor([[0, 1]])}, False),
        ({"x": torch.tensor([0, 1])}, False),
        (torch.tensor([0, 1]), False),
    ],
)
def test_labels(batch, found):
    assert (labels_of(batch) is not None) == found
