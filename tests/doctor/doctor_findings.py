"""Findings made by hand, with names that a terminal, a browser or GitHub would obey."""

from batchnorm.doctor.findings import Findings
from batchnorm.records import Change, Finding, Report

NASTY = {
    "markup": "a[red]b[/red][link=http://x]c",
    "html": "<script>alert(1)</script>&\"'",
    "github": "x%0A::error title=fake::y\n::warning::z",
    "terminal": "bn\x1b[31m\x07\r\nnothing found",
    "link": "[click](http://x)",
    "unicode": "слой-\u202e-\udc80",
    "emoji": ":smile: {0}",
    "long": "n" * 10_000,
}


def finding(path="conv", code="BN101", severity="advice", **more):
    names = {"BN101": "bias-before-norm", "BN201": "stale-statistics", "BN301": "validation-in-train-mode"}
    return Finding(code, names[code], severity, path, **{"sentence": "its bias does nothing", **more})


def several():
    return Findings(
        [
            finding("conv1", numbers={"values": 8, "largest": float("nan")}, repair="bias=False", fix="safe"),
            finding("", "BN301", "error", sentence="it moved", repair="call model.eval()", step=7),
            finding("bn1", "BN201", "warning", sentence="off by 3", repair="bn.calibrate(model, data)", fix="unsafe"),
            finding("bn2", "BN201", "warning", sentence="off by 4", repair="bn.calibrate(model, data)", fix="unsafe"),
        ],
        {"BN999": "needs batches of data (data=)", "BN998": "needs batches of data (data=)", "BN997": "needs x"},
        {"BN996": "KeyError: 'weight'"},
    )


def nasty(kind):
    name = NASTY[kind]
    return Findings([finding(name, sentence=f"its bias meets {name} only", repair=f"see {name}")])


REPORT = Report((Change("conv1[red]", "bias", "8 values", None),), {"bn<b>": "no repair"})
