"""Draw the pictures of the documentation from what its pages measure or show: ``python docs/draw.py [NAME...]``.

A picture of a tutorial runs the code of the tutorial; one of a table reads the table.
"""

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from execute import DOCS, blocks, run
from markupsafe import escape
from torch import nn

import batchnorm as bn
from batchnorm.report.moving import palette
from batchnorm.report.panels import STYLE, picture, text
from batchnorm.report.sections import Line, Panel, Panels

WIDE, EDGE, NAMES, ROW = 720, 20, 275, 26  # of pictures with bars or boxes
Group = tuple[str, Sequence[tuple[str, float, str, str]]]  # a heading; name, value, text and color of its bars


def measured(page: str) -> dict[str, Any]:
    """Run a tutorial and return what it has computed."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for _ in run(DOCS / "tutorials" / f"{page}.md", namespace):
        pass
    return namespace


def framed(title: str, sentence: str, high: int, body: str) -> str:
    """Return a picture with the colors and letters of the pages."""
    light, dark = palette()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {high}" role="img" font-family="system-ui,'
        f'-apple-system,Segoe UI,Roboto,Noto Sans,sans-serif"><title>{escape(title)}</title>'
        f"<desc>{escape(sentence)}</desc><style>svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"
        f'{STYLE}</style><rect class="card" width="{WIDE}" height="{high}" rx="12"/>'
        f"{text(EDGE, 36, title, 'title')}{body}</svg>\n"
    )


def bars(title: str, sentence: str, groups: Sequence[Group]) -> str:
    """Draw bars below headings, each group on its own scale."""
    parts, y = [], 48
    for heading, rows in groups:
        largest = max(value for _, value, _, _ in rows)
        y += 24
        parts.append(text(EDGE, y, heading, "head"))
        y += 8
        for name, value, words, color in rows:
            long = (WIDE - NAMES - 80) * value / largest
            parts.append(text(NAMES - 10, y + 16, name, "end"))
            parts.append(
                f'<rect x="{NAMES}" y="{y + 3}" width="{long:.1f}" height="{ROW - 8}" rx="3" '
                f'style="fill:var(--{color})"/>'
            )
            parts.append(text(NAMES + long + 8, y + 16, words, ""))
            y += ROW
    return framed(title, sentence, y + EDGE, "".join(parts))


def sized(drawn: str) -> str:
    """Return a picture that is shown in its own size, where there is room."""
    return re.sub(r'viewBox="0 0 (\d+) (\d+)"', r'width="\1" height="\2" \g<0>', drawn, count=1)


def percent(value: float) -> str:
    """Write a share."""
    return f"{value:.1%}"


def faster_resnet() -> str:
    """Times and memory of whole networks, from the tables in performance.md."""
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    number = r"\| (?:\*\*[^|]*\*\*, )?{} \| ([\d.]+)"
    groups: list[Group] = []
    for network in ("ResNet-18", "MobileNetV2"):
        table = page.split(f"| **{network}")[1].split("| **")[0]
        stock = re.findall(r"contiguous, torch \| (\d+)", table)[0]
        rows = [("PyTorch", float(stock), f"{stock} ms", "vermillion")]
        for way in ("contiguous, fused", "channels_last, fused", "channels_last, fused, freed memory kept"):
            (time,) = re.findall(number.format(re.escape(way)), table)
            rows.append((way.replace("contiguous, ", ""), float(time), f"{time} ms", "blue"))
        groups.append((f"{network}: a training step of 32 images", rows))
    found = re.findall(r"^\| MobileNetV2.*\| (\d+) MB \([^)]+\) \| (\d+) MB", page, re.MULTILINE)[0]
    rows = [
        (name, float(size), f"{size} MB", color)
        for name, size, color in zip(("PyTorch", "fused"), found, ("vermillion", "blue"), strict=True)
    ]
    groups.append(("MobileNetV2: peak memory of that step", rows))
    return bars("What bn.accelerate and bn.fuse gain", "Times and peak memory; shorter is better.", groups)


def worse_in_evaluation(found: dict[str, Any]) -> str:
    """Accuracy in training, in evaluation, and in evaluation with exact statistics."""
    right, behind = found["right"] / len(found["images"]), found["findings"][0].numbers["accuracy"]
    repaired = found["accuracy"](found["calibrated_model"].eval())
    rows = [
        ("training images, in training", right, percent(right), "blue"),
        ("unseen images, model.eval()", behind, percent(behind), "vermillion"),
        ("the same after bn.calibrate", repaired, percent(repaired), "green"),
    ]
    title = "The weights are right, the running statistics are not"
    return bars(title, "Accuracy of one network.", [("accuracy after three epochs, of the same weights", rows)])


def freeze(found: dict[str, Any]) -> str:
    """Accuracy of the old head while a new one is trained."""
    steps = range(0, 51, 5)
    lines = (
        Line("bn.freeze", steps, found["kept_frozen"], "blue", nudge=20),
        Line("requires_grad_(False)", steps, found["kept"], "vermillion"),
    )
    panel = Panel("accuracy on the old task", lines, "training step of the new head", y_range=(0.6, 1.02), percent=True)
    left, kept = found["kept"][-1], found["kept_frozen"][-1]
    title = f"A frozen backbone that changes: {left:.1%} of the old task, {kept:.1%} with bn.freeze"
    return picture(Panels(title, "Accuracy over the steps.", (panel,), columns=1, height=280))


def batches_of_2(found: dict[str, Any]) -> str:
    """Accuracy of each norm with large and small batches."""
    groups: list[Group] = []
    for heading, key in (("fully connected layers", "in_dense"), ("convolutions", "in_convolutions")):
        for size, number in ((32, 0), (2, 1)):
            rows = [
                (norm, each[number], percent(each[number]), "vermillion" if norm == "batch" else "blue")
                for norm, each in found[key].items()
            ]
            groups.append((f"{heading}, batches of {size}", rows))
    return bars("Batches of 2: BN fails where a channel has 2 values", "Accuracy on unseen digits.", groups)


def classroom(found: dict[str, Any]) -> str:
    """Accuracy of the network of sigmoids over the steps."""
    steps = range(20, 201, 20)
    lines = (
        Line("with BN", steps, found["with_bn"], "blue", nudge=20),
        Line("without BN", steps, found["without"], "vermillion"),
    )
    panel = Panel("accuracy on unseen digits", lines, "training step", y_range=(0, 1), percent=True)
    title = f"Four layers of sigmoids: {found['with_bn'][-1]:.1%} with BN, {found['without'][-1]:.1%} without"
    return picture(Panels(title, "Accuracy over the steps.", (panel,), columns=1, height=280))


def race() -> str:
    """The bars of the race, from understand.md."""
    page = (DOCS / "understand.md").read_text(encoding="utf-8")
    title = re.findall(r"^With Batch Normalization: .*$", page, re.MULTILINE)[0]
    shown = re.findall(r"^  (\S.*?) +█+ +([\d,]+)", page.split(title)[1].split("```")[0], re.MULTILINE)
    rows = [
        (name, float(steps.replace(",", "")), steps, "blue" if name.startswith("BN") else "vermillion")
        for name, steps in shown
    ]
    return bars(title, "Training steps; shorter is better.", [("training steps to the same accuracy", rows)])


def check() -> str:
    """Accuracy of the network of check.md, with its running statistics and with recomputed ones."""
    code = next(code for code, _ in blocks(DOCS / "check.md") if "accuracy_calibrated" in code)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code.split("fixed, report")[0], "check.md", "exec"), namespace)
    finding = namespace["findings"][0]
    before, after = finding.numbers["accuracy"], finding.numbers["accuracy_calibrated"]
    rows = [
        ("running statistics", before, percent(before), "vermillion"),
        ("exact statistics", after, percent(after), "blue"),
    ]
    return bars(f"{finding.code}: what bn.check found, measured", "Accuracy.", [("accuracy in evaluation", rows)])


def verbs() -> str:
    """What the verbs change in a small network: its layers before and after, and the measured difference."""
    torch.manual_seed(0)
    example = torch.randn(4, 3, 12, 12)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    calls: Sequence[tuple[str, nn.Module, Callable[[nn.Module], Any]]] = (
        ("insert", plain, lambda net: bn.insert(net, example)),
        ("fuse", model, lambda net: bn.fuse(net, example)),
        ("convert", model, lambda net: bn.convert(net, "group", example=example)),
        ("freeze", model, bn.freeze),
        ("fold", model.eval(), lambda net: bn.fold(net, example)),
    )  # fmt: skip
    parts, y = [], 56
    for name, before, verb in calls:
        after, report = verb(before)
        parts.append(text(EDGE, y + 20, f"bn.{name}", "name"))
        x = 165.0
        for words in layers(before):
            x = box(parts, x, y, words, "shade")
        parts.append(text(x + 4, y + 20, "→", ""))
        x += 28
        old = layers(before)
        for words in layers(after):
            x = box(parts, x, y, words, "shade" if words in old else "blue")
        sure = report.certificate
        if sure is not None:
            gap = f"differ by {'at most ' if sure.kept else ''}{sure.relative:.0{'e' if sure.relative < 0.01 else '%'}}"
            words = f"outputs {gap} of the largest" if sure.relative else "outputs are the same"
            parts.append(text(165, y + 44, words, "soft small"))
        y += 62
    sentence = "Layers before and after each verb; what is new is blue."
    return framed("What the verbs change", sentence, y + 4, "".join(parts))


def layers(model: nn.Module) -> list[str]:
    """Return the layers that compute something, with the switches that a verb sets."""
    found = []
    for module in model.modules():
        if list(module.children()) or isinstance(module, nn.Identity):
            continue
        name = type(module).__name__
        if getattr(module, "activation", None):
            name += f" + {module.activation}"
        if getattr(module, "update", None) is False:
            name += ", fixed"
        if isinstance(module, nn.Conv2d):
            name += " + bias" if module.bias is not None else ""
        found.append(name)
    return found


def box(parts: list[str], x: float, y: float, words: str, color: str) -> float:
    """Draw a box with words, and return where the next may begin."""
    wide = 18 + 7.2 * len(words)
    fill = "fill:var(--shade)" if color == "shade" else f"fill:var(--{color});fill-opacity:.35"
    parts.append(f'<rect x="{x:.0f}" y="{y}" width="{wide:.0f}" height="30" rx="6" style="{fill}"/>')
    parts.append(text(x + wide / 2, y + 20, words, "middle"))
    return x + wide + 8


MEASURED: dict[str, Callable[[dict[str, Any]], str]] = {  # by a tutorial of that name
    "batches-of-2": batches_of_2,
    "classroom": classroom,
    "freeze": freeze,
    "worse-in-evaluation": worse_in_evaluation,
}
OTHERS: dict[str, Callable[[], str]] = {"check": check, "faster-resnet": faster_resnet, "race": race, "verbs": verbs}


def main(names: list[str]) -> None:
    """Draw the pictures that are named, by default all."""
    for name in names or [*MEASURED, *OTHERS]:
        drawn = MEASURED[name](measured(name)) if name in MEASURED else OTHERS[name]()
        (DOCS / "pictures" / f"{name}.svg").write_text(sized(drawn), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
