"""Short real runs, made once, what every test of the page draws; and a browser to look at them."""

import dataclasses
import shutil

import pytest
import torch
from hostile_names import BOLD, HOSTILE, IMAGE
from torch import nn

from batchnorm.doctor.findings import Findings
from batchnorm.lab import signal
from batchnorm.lab.options import Options
from batchnorm.lab.race import run
from batchnorm.lab.records import to_records
from batchnorm.observe.watch import watch
from batchnorm.records import Finding, Measurement, RecordFile
from batchnorm.report.load import Run
from batchnorm.report.page import write_page


@pytest.fixture(scope="session")
def race_result():
    return run(Options(steps=24, every=4, seeds=2, rates=(0.1, 0.2), batch_size=16), threads=1)


@pytest.fixture(scope="session")
def race_records(race_result):
    return to_records(race_result, threads=1)


@pytest.fixture(scope="session")
def signal_records():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield signal.record(signal.SignalRecipe(steps=60))
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def hostile_records():
    """What watch records of a network whose layers have names that a page must show, not obey."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    layers = {HOSTILE: "1", IMAGE: "2", BOLD: "3"}
    with watch(model, optimizer, every=2, layers=layers, stack=IMAGE) as seen:
        for x in torch.randn(6, 16, 4):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.log("training loss", loss)
            seen.log(HOSTILE, 1.0)
    return dataclasses.replace(seen.records, configuration={BOLD: IMAGE})


@pytest.fixture(scope="session")
def findings():
    return Findings(
        [
            Finding("BN101", "bias-before-norm", "advice", HOSTILE, "a bias that BN cancels", {"values": 8}, "drop it"),
            Finding("BN203", "poisoned-statistics", "error", "bn1", "running_var has 1 NaN", {"nan": 1, "of": 8.25}),
        ],
        {"BN201": "needs data"},
    )


@pytest.fixture(scope="session")
def bench_records():
    setting = {"shape": "8x4", "layout": "contiguous", "operation": "bn", "pass": "train", "memory": "default"}
    setting |= {"dtype": "float32", "bytes": 128}
    times = {"batchnorm": (0.001, 0.002, 0.004), "torch": (0.002, 0.004, 0.008), "floor": (0.001, 0.001, 0.001)}
    measured = [Measurement("time", {**setting, "contender": name}, samples, "s") for name, samples in times.items()]
    row = {"what": "bn train vs torch", "value": 2.0, "cells": 1, "target": 1.8, "unit": "x", "reached": True}
    return RecordFile("bench", {"threads": 1}, tuple(measured), {"rows": [row]})


@pytest.fixture(scope="session")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no chromium here: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        # Without a sandbox: continuous integration runs as root.
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def pages(tmp_path_factory, race_records, signal_records, hostile_records):
    folder = tmp_path_factory.mktemp("pages")
    runs = {
        "race": [Run("race", race_records), Run("signal", signal_records)],
        "film": [Run("signal", signal_records)],
        "hostile": [Run(HOSTILE, hostile_records)],
    }
    return {name: write_page(each, folder / f"{name}.html") for name, each in runs.items()}
