"""How the models of torchvision, timm and transformers fold, beside torch.fx's fuse: the table of docs/zoo-fold.md.

    python benchmarks/fold_zoo.py [--only resnet] [--rows rows.jsonl] > docs/zoo-fold.md

Statistics, gamma and beta are random and far from 0 and 1; the weights are random. ``--rows`` keeps each finished row,
so that the same command goes on where it was interrupted. It takes about half an hour on two cores.
"""

import argparse
import gc
import json
import re
import sys
import warnings
from collections import Counter
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "transforms")]
from fold_cases import Row, measured  # noqa: E402

from peer_models import SUBJECTS  # noqa: E402

PACKAGES = {"vision": "torchvision", "segmentation": "torchvision", "video": "torchvision", "detection": "torchvision"}
HEADER = """\
# What folds in the models of torchvision, timm and transformers

`python benchmarks/fold_zoo.py` wrote this page, with {versions}. Every model has random weights, and running means,
variances, gammas and betas far from 0 and 1. An error is the largest difference of any output, as a share of the
largest number of that output, over four inputs, one of which `bn.fold` did not see. The fx column is what
`torch.fx.experimental.optimization.fuse` folds; a dash says that it cannot trace the model.
Those of transformers are made small by their configuration, and of retinanet the backbone with its pyramid is run.

| model | BN layers | folded | by fx | error, float32 | error, float64 | left |
|---|---|---|---|---|---|---|
"""


def rows(only, kept):
    known = {}
    if kept is not None and kept.exists():
        known = {(row["family"], row["name"]): Row(**row) for row in map(json.loads, kept.read_text().splitlines())}
    for family, name in SUBJECTS:
        if only not in f"{family}/{name}":
            continue
        row = known.get((family, name))
        if row is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row = measured(family, name)
            gc.collect()
            if kept is not None:
                with kept.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
        print(family, name, file=sys.stderr)
        yield row


def line(row):
    left = Counter(plain(reason) for reason in row.left.values())
    why = "; ".join(f"{n} x {reason}" if n > 1 else reason for reason, n in left.items())
    fx = "-" if row.by_fx is None else row.by_fx
    home = PACKAGES.get(row.family, row.family)
    errors = f"{row.float32:.1e} | {row.float64:.1e}"
    return f"| {home} {row.name} | {row.norms} | {row.folded} | {fx} | {errors} | {why} |"


def plain(reason):
    """A reason without the paths of this very place, so that like ones can be counted."""
    return re.sub(r"[\w.]*\.[\w.]+", "…", re.sub(r" \([^()]*(\.|\d)[^()]*\)", "", reason))


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="part of a model's name")
    parser.add_argument("--rows", type=Path, help="keep finished rows in this file, and go on from it")
    options = parser.parse_args()
    found = list(rows(options.only, options.rows))
    versions = ", ".join(f"{p} {version(p)}" for p in ("torch", "torchvision", "timm", "transformers"))
    print(HEADER.format(versions=versions) + "\n".join(map(line, found)))
    norms, folded, theirs = (sum(getattr(r, name) or 0 for r in found) for name in ("norms", "folded", "by_fx"))
    worst = [max(getattr(row, name) for row in found) for name in ("float32", "float64")]
    blind = sum(row.by_fx is None for row in found)
    print(
        f"\n{len(found)} models, {norms} BN layers: {folded} folded, {theirs} by fx, which cannot trace {blind} of the "
        f"models.\nLargest errors: {worst[0]:.1e} in float32, {worst[1]:.1e} in float64."
    )


if __name__ == "__main__":
    main()
