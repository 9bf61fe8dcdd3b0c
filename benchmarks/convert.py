"""What converting a trained network's batch norm to another brick costs, and what brings it back.

    python benchmarks/convert.py [--seeds 5] [--steps 10 50] [--json convert.json]

A small network with batch norm is trained on the bundled 8x8 digits. Its norms are converted, plainly and with the
calibrated match, and both are trained on for a few steps. Figures are validation accuracies: means over the seeds, and
the lowest.
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import nn

import batchnorm as bn
from batchnorm.lab.data import digits
from batchnorm.lab.train import batches
from batchnorm.records import Measurement, RecordFile

BRICKS = ("group", "layer", "instance", "rms", "dyt", "filter-response")


def network(seed):
    torch.manual_seed(seed)

    def block(before, after, stride):
        return [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]

    convolutions = [*block(1, 16, 1), *block(16, 32, 1), *block(32, 32, 2), *block(32, 64, 1), *block(64, 64, 2)]
    dense = [nn.Flatten(), nn.Linear(256, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*convolutions, *dense)


def train(model, data, order, steps, rate):
    images, labels = torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels)
    sgd = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    model.train()
    for _ in range(steps):
        chosen = next(order)
        sgd.zero_grad()
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        sgd.step()
    return model


@torch.no_grad()
def accuracy(model, data):
    scores = model.eval()(torch.from_numpy(data.validation_images))
    return float((scores.argmax(1) == torch.from_numpy(data.validation_labels)).float().mean())


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--train", type=int, default=200, help="steps before the conversion")
    parser.add_argument("--steps", type=int, nargs="*", default=[10, 50], help="steps after it")
    parser.add_argument("--rate", type=float, default=0.01, help="learning rate after the conversion")
    parser.add_argument("--json", help="write the samples here")
    options = parser.parse_args()
    data, found = digits.load(), {}
    shown = torch.from_numpy(data.train_images[:512]).split(128)

    def note(brick, way, steps, model):
        found.setdefault((brick, way, steps), []).append(accuracy(model, data))

    for seed in range(options.seeds):
        order = batches(seed, len(data.train_labels), 64)
        stock = train(network(seed), data, order, options.train, 0.05).eval()
        note("batch", "as trained", 0, stock)
        for brick in BRICKS:
            for way, given in (("plain", {"example": shown[0]}), ("matched", {"data": shown})):
                model, report = bn.convert(stock, brick, **given)
                left = f" ({len(report.left)} left)" if report.left else ""
                note(brick + left, way, 0, model)
                for steps in options.steps:
                    after = train(copy.deepcopy(model), data, batches(99, len(data.train_labels), 64), steps,
                                  options.rate)  # fmt: skip
                    note(brick + left, way, steps, after)
    rest = [f"{way}, {steps} steps" if steps else way for way in ("plain", "matched") for steps in (0, *options.steps)]
    print(f"| | {' | '.join(['as trained', *rest])} |\n|---|{'--:|' * (len(rest) + 1)}")
    trained = found.pop(("batch", "as trained", 0))
    for brick in dict.fromkeys(brick for brick, _, _ in found):
        rows = [found[brick, way, steps] for way in ("plain", "matched") for steps in (0, *options.steps)]
        cells = [f"{sum(row) / len(row):.1%} ({min(row):.1%})" for row in (trained, *rows)]
        print(f"| `{brick}` | {' | '.join(cells)} |")
    if options.json:
        measured = [
            Measurement("accuracy", {"brick": brick, "way": way, "steps": steps}, tuple(values))
            for (brick, way, steps), values in {("batch", "as trained", 0): trained, **found}.items()
        ]
        RecordFile("benchmarks/convert", vars(options), tuple(measured)).write(options.json)


if __name__ == "__main__":
    main()
