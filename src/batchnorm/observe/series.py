"""Records sorted for drawing: networks, their layers, and the series of each quantity."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchnorm.records import Measurement, RecordFile


@dataclass
class Layer:
    """One layer and what was recorded of it, by quantity, in the order of steps.

    >>> layer = Layer("fc", {"mean": [Measurement("mean", {"step": 0, "layer": "fc"}, (1.5,))]})
    >>> layer.last("mean"), layer.has("variance")
    ((1.5,), False)
    """

    name: str
    series: dict[str, list[Measurement]] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)  # of each quantity: which record was its first

    def of(self, quantity: str) -> list[Measurement]:
        """Return the series of a quantity, empty if there is none."""
        return self.series.get(quantity, [])

    def last(self, quantity: str) -> tuple[float, ...]:
        """Return the newest samples of a quantity, empty if there are none."""
        found = self.of(quantity)
        return found[-1].samples if found else ()

    def place(self, *quantities: str) -> int:
        """Where the first of these quantities that was recorded has its first record, for sorting by it."""
        return next((self.places[quantity] for quantity in quantities if quantity in self.places), -1)

    def has(self, *quantities: str) -> bool:
        """Whether one of these was recorded."""
        return any(quantity in self.series for quantity in quantities)


@dataclass
class NetworkSeries:
    """One network: its layers in the order in which they were first seen, and the series of the whole run."""

    name: str
    layers: list[Layer]
    run: list[list[Measurement]]
    first: int
    last: int


def stacks(records: RecordFile) -> list[NetworkSeries]:
    """Sort the records of a watch by network and layer.

    >>> record = Measurement("mean", {"step": 50, "layer": "fc", "stack": "with BN"}, (0.0,))
    >>> [(stack.name, stack.layers[0].name, stack.last) for stack in stacks(RecordFile("watch", {}, (record,)))]
    [('with BN', 'fc', 50)]
    """
    found: dict[str, dict[str, Layer]] = {}
    for number, record in enumerate(records.measurements):
        layers = found.setdefault(str(record.setting.get("stack", "")), {})
        layer = layers.setdefault(str(record.setting["layer"]), Layer(str(record.setting["layer"])))
        layer.series.setdefault(record.quantity, []).append(record)
        layer.places.setdefault(record.quantity, number)
    made = []
    for name, layers in found.items():
        for layer in layers.values():
            for series in layer.series.values():
                series.sort(key=_step)
        run = layers.pop("", Layer(""))
        steps = [_step(m) for layer in (run, *layers.values()) for series in layer.series.values() for m in series]
        made.append(NetworkSeries(name, list(layers.values()), list(run.series.values()), min(steps), max(steps)))
    return made


def _step(record: Measurement) -> int:
    return int(record.setting["step"])
