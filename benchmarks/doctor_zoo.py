"""What the doctor says about stock architectures: ``python benchmarks/doctor_zoo.py > docs/zoo.md``.

Takes some minutes on a quiet core. Progress goes to stderr. With a file as argument, what was found is kept there, and
the same command continues after an interruption; take the file away after a change of a rule.
"""

import argparse
import json
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from batchnorm.doctor.codes import RULES

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "doctor")]
zoo_subjects = import_module("zoo_subjects")  # the tests check the same models

HOMES = {
    "vision": "torchvision", "segmentation": "torchvision", "video": "torchvision", "detection": "torchvision",
    "timm": "timm", "transformers": "transformers",
}  # fmt: skip
HEAD = """# The zoo

Made by `python benchmarks/doctor_zoo.py > docs/zoo.md`. Stock architectures of torchvision {torchvision}, timm {timm}
and transformers {transformers} (torch {torch}), with random weights, the exact statistics of random data
(`bn.calibrate`), and an optimiser with `bn.param_groups`; those of transformers in small. Each is checked as it is
deployed, on data, and as it is trained, with an example and the optimiser. `tests/doctor/test_zoo.py` asserts that
there is no error and no warning but those that are listed below as true.

{models} architectures, {layers} BN layers, {rules} rules; {clean} architectures have no findings.
"""


def main(store: Path | None) -> None:
    rows = []
    for number, (family, name) in enumerate(zoo_subjects.SUBJECTS):
        print(f"{number + 1}/{len(zoo_subjects.SUBJECTS)} {family} {name}", file=sys.stderr, flush=True)
        row = known(store).get((family, name))
        if row is None:
            try:
                row = examined(family, name)
            except pytest.skip.Exception as skipped:
                print(f"  left out: {skipped}", file=sys.stderr)
                continue
            if store is not None:
                with store.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        rows.append(row)
    versions = {name: version(name) for name in ("torchvision", "timm", "transformers")}
    print(
        HEAD.format(
            **versions,
            torch=torch.__version__.partition("+")[0],
            models=len(rows),
            layers=sum(row["layers"] for row in rows),
            rules=sum(rule.look is not None for rule in RULES.values()),
            clean=sum(not row["findings"] for row in rows),
        )
    )
    print("| library | architecture | BN layers | found |\n|---|---|--:|---|")
    for row in rows:
        print(f"| {HOMES[row['family']]} | {row['name']} | {row['layers']} | {counted(row['findings'])} |")
    print("\n## What was found, and why it is true")
    for code in sorted({finding["code"] for row in rows for finding in row["findings"]}):
        print(f"\n### {code} {RULES[code].name}\n")
        print(f"{zoo_subjects.WHY.get(code, 'Not explained yet: true, or a false alarm?')}\n")
        for row in rows:
            own = [finding for finding in row["findings"] if finding["code"] == code]
            if own:
                times = "" if len(own) == 1 else f" and {len(own) - 1} more"
                print(f"- {HOMES[row['family']]} {row['name']}: `{own[0]['path']}`{times}: {own[0]['sentence']}")
    for row in rows:
        for code, why in row["failed"].items():
            print(f"- {code} broke on {row['name']}: {why}")


def examined(family, name) -> dict[str, Any]:
    findings = zoo_subjects.examined(family, name)
    content = findings.content()
    return {"family": family, "name": name, "layers": len(findings.subject.norms), "findings": content["findings"],
            "failed": content["failed"]}  # fmt: skip


def known(store: Path | None) -> dict[tuple[str, str], dict[str, Any]]:
    """What an earlier run has found, which need not be measured again."""
    lines = store.read_text(encoding="utf-8").splitlines() if store is not None and store.exists() else []
    return {(row["family"], row["name"]): row for row in map(json.loads, lines)}


def counted(findings) -> str:
    counts = {}
    for finding in findings:
        key = f"{finding['severity']} {finding['code']} {finding['name']}"
        counts[key] = counts.get(key, 0) + 1
    return ", ".join(f"{count} x {key}" for key, count in counts.items()) or "nothing"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", nargs="?", type=Path, help="keep what was found here, and continue from it")
    main(parser.parse_args().store)
