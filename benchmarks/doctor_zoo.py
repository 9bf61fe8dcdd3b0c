"""What the doctor says about stock architectures: ``python benchmarks/doctor_zoo.py > docs/zoo.md``.

Takes about ten minutes on one core. Progress goes to stderr.
"""

import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

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


def main() -> None:
    rows, codes = [], {}
    for number, (family, name) in enumerate(zoo_subjects.SUBJECTS):
        print(f"{number + 1}/{len(zoo_subjects.SUBJECTS)} {family} {name}", file=sys.stderr, flush=True)
        try:
            findings = zoo_subjects.examined(family, name)
        except pytest.skip.Exception as skipped:
            print(f"  left out: {skipped}", file=sys.stderr)
            continue
        rows.append((HOMES[family], name, len(findings.subject.norms), findings))
        for finding in findings:
            codes.setdefault(finding.code, {}).setdefault((HOMES[family], name), []).append(finding)
    versions = {name: version(name) for name in ("torchvision", "timm", "transformers")}
    print(
        HEAD.format(
            **versions,
            torch=torch.__version__.partition("+")[0],
            models=len(rows),
            layers=sum(row[2] for row in rows),
            rules=sum(rule.look is not None for rule in RULES.values()),
            clean=sum(not row[3] for row in rows),
        )
    )
    print("| library | architecture | BN layers | found |\n|---|---|--:|---|")
    for home, name, norms, findings in rows:
        print(f"| {home} | {name} | {norms} | {counted(findings)} |")
    print("\n## What was found, and why it is true\n")
    for code in sorted(codes):
        print(f"### {code} {RULES[code].name}\n")
        print(f"{zoo_subjects.WHY.get(code, 'Not explained yet: true or a false alarm?')}\n")
        for (home, name), own in codes[code].items():
            print(f"- {home} {name}, {len(own)} times, such as `{own[0].path}`: {own[0].sentence}")
        print()
    failed = {(row[1], code): why for row in rows for code, why in row[3].failed.items()}
    for (name, code), why in failed.items():
        print(f"- {code} broke on {name}: {why}")


def counted(findings) -> str:
    counts = {}
    for finding in findings:
        key = f"{finding.severity} {finding.code} {finding.name}"
        counts[key] = counts.get(key, 0) + 1
    return ", ".join(f"{count} x {key}" for key, count in counts.items()) or "nothing"


if __name__ == "__main__":
    main()
