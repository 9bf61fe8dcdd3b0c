"""The film without a browser: its chapters are true, its captions are the record, its picture is one small file."""

import dataclasses
import math
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from batchnorm.errors import BatchNormError
from batchnorm.observe.figures import chapters as c
from batchnorm.observe.figures import film
from batchnorm.observe.watch import watch
from batchnorm.records import Measurement, RecordFile, read
from batchnorm.report.moving import animated_svg, write_film

PLAIN, BN = "without BN", "with BN"
DOCS = Path(__file__).parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def data(signal_records):
    return film.draw(signal_records).data


@pytest.fixture(scope="module")
def recorded(signal_records):
    return {
        (m.quantity, m.setting["stack"], m.setting["layer"], m.setting["step"]): m.samples
        for m in signal_records.measurements
    }


def changed(records, change):
    """The records with some measurements changed; None leaves one out."""
    kept = (change(m) for m in records.measurements)
    return dataclasses.replace(records, measurements=tuple(m for m in kept if m is not None))


def names(records):
    return [chapter["name"] for chapter in film.draw(records).data["chapters"]]


def numbers(text):
    """The numbers of a caption, as it writes them."""
    found = re.findall(r"−?[\d,]+(?:\.\d+)?(?=%|\b)(?:·10\S+?(?=[);. ]))?%?", text)
    return [each.replace(",", "") for each in found]


# ---- time


def test_half_of_the_film_is_for_the_first_60_of_400_steps():
    steps = [*range(101), *range(105, 401, 5)]
    times = film.film_times(steps)
    assert times[0] == 0
    assert times[60] == pytest.approx(0.5, abs=1e-9)
    assert times[-1] == pytest.approx(1)
    assert all(a < b for a, b in pairwise(times))
    speeds = [(b - a) / (t - s) for a, b, s, t in zip(times, times[1:], steps, steps[1:], strict=False)]
    assert speeds == sorted(speeds, reverse=True)
    assert film.film_times([7]) == [0]
    assert film.film_times([1000, 1400])[-1] == pytest.approx(1)


# ---- chapters and captions


def test_every_frame_has_one_caption_with_its_step(data):
    assert len(data["captions"]) == len(data["steps"])
    for step, caption in zip(data["steps"], data["captions"], strict=True):
        assert caption.startswith(f"Step {step}: ")
        assert len(caption) <= 180
    for before, after in zip(data["chapters"], data["chapters"][1:], strict=False):
        assert before["start"] <= before["frame"] < after["start"]


def test_the_captions_are_the_record(data, recorded):
    """Every number of every caption, from the records themselves."""

    def value(quantity, stack, layer, step, index=0):
        return recorded[quantity, stack, layer, step][index]

    starts = [chapter["start"] for chapter in data["chapters"]]
    kinds = set()
    for frame, (step, caption) in enumerate(zip(data["steps"], data["captions"], strict=True)):
        kind = data["chapters"][sum(start <= frame for start in starts) - 1]["name"]
        found = numbers(caption.split(": ", 1)[1])
        layer = next(iter(re.findall(r"layer \d", caption)), None)
        if kind == "saturate":
            plain, ours = ([value("saturation", s, f"layer {n}", step) for n in (1, 2, 3, 4)] for s in (PLAIN, BN))
            assert found == [f"{x:.0%}" for x in (min(plain), max(plain), max(ours))]
        elif kind == "drift" and "at the start" in caption:
            wide = [math.sqrt(value("variance", PLAIN, layer, at)) for at in (step, 0)]
            assert found[-2:] == [c.number(x) for x in wide]
        elif kind == "snap to 0 and 1":
            mean, variance = (value(q, BN, f"{layer} before BN", step) for q in ("mean", "variance"))
            assert found[1:] == [c.number(mean), c.number(variance), "0.00", "1.00"]
        elif kind == "γ and β":
            low, high = recorded["gamma", BN, f"{layer} normalised", step][1:]
            left, right = recorded["beta", BN, f"{layer} normalised", step][1:]
            after, without = value("variance", BN, layer, step), value("variance", PLAIN, layer, step)
            known = [low, high, left, right]
            assert found == [*map(c.number, known), layer[-1], "1.00", *map(c.number, (after, without))]
        elif kind == "what it buys":
            ours, plain = (value("training loss", stack, "", step) for stack in (BN, PLAIN))
            assert found[:2] == [c.number(ours), c.number(plain)]
            right = [f"{value('validation accuracy', stack, '', step):.0%}" for stack in (BN, PLAIN)]
            assert [each for each in found if "%" in each] == right
        kinds.add(kind)
    assert kinds == {"drift", "saturate", "snap to 0 and 1", "γ and β", "what it buys"}


def test_a_chapter_that_the_run_contradicts_is_left_out(signal_records):
    every = ["drift", "saturate", "snap to 0 and 1", "γ and β", "what it buys"]
    assert names(signal_records) == every

    def without(chapter):
        return [name for name in every if name != chapter]

    def still(m):  # nothing drifts: every step looks like the first
        if m.quantity in ("mean", "variance") and m.setting["stack"] == PLAIN:
            return dataclasses.replace(m, samples=(0.5,))
        return m

    def unsaturated(m):
        return dataclasses.replace(m, samples=(0.1,)) if m.quantity == "saturation" else m

    def as_saturated(m):  # BN saturates as much
        ours = m.quantity == "saturation" and m.setting["stack"] == BN
        return dataclasses.replace(m, samples=(0.9,)) if ours else m

    def shifted(m):  # what should be normalized is not
        shifts = m.quantity == "mean" and m.setting["layer"].endswith("normalised")
        return dataclasses.replace(m, samples=(0.3,)) if shifts else m

    def unlearned(m):
        return dataclasses.replace(m, samples=(1.0, 0.95, 1.05)) if m.quantity == "gamma" else m

    def worse(m):
        bad = m.quantity == "training loss" and m.setting["stack"] == BN
        return dataclasses.replace(m, samples=(5.0,)) if bad else m

    def stages_missing(m):
        return None if m.setting["layer"].endswith(("normalised", "before BN")) else m

    assert names(changed(signal_records, still)) == without("drift")
    assert names(changed(signal_records, unsaturated)) == without("saturate")
    assert names(changed(signal_records, as_saturated)) == without("saturate")
    assert names(changed(signal_records, shifted)) == without("snap to 0 and 1")
    assert names(changed(signal_records, unlearned)) == without("γ and β")
    assert names(changed(signal_records, worse)) == without("what it buys")
    assert names(changed(signal_records, stages_missing)) == ["drift", "saturate", "what it buys"]
    assert names(changed(signal_records, lambda m: m if m.setting["stack"] == BN else None)) == []


@pytest.mark.parametrize(
    "lost", ["saturation", "training loss", "validation accuracy", "variance", "gamma", "gradient norm"]
)
def test_a_film_lacks_no_frame_where_records_lack_a_quantity(signal_records, lost):
    records = changed(signal_records, lambda m: None if m.quantity == lost else m)
    data = film.draw(records).data
    assert len(data["captions"]) == 61
    assert "None" not in " ".join(data["captions"])
    assert animated_svg(film.draw(records)).startswith("<svg")


@pytest.mark.parametrize("last", [0, 1, 2, 5])
def test_short_runs(signal_records, last):
    records = changed(signal_records, lambda m: m if m.setting["step"] <= last else None)
    data = film.draw(records).data
    assert len(data["captions"]) == last + 1
    for chapter in data["chapters"]:
        assert chapter["start"] <= chapter["frame"] <= last
    ElementTree.fromstring(animated_svg(film.draw(records)))


def test_a_run_of_its_own_has_no_chapters(hostile_records):
    data = film.draw(hostile_records).data
    assert data["chapters"] == []
    assert data["captions"] == ["Step 0 of 4.", "Step 2 of 4.", "Step 4 of 4."]
    assert data["opening"] == 2
    assert not data["one_axis"]


def test_two_networks_of_ones_own_have_the_chapters_that_they_show(tmp_path):
    """As docs/understand.md says: one file, two stacks, the same names of layers."""
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    for stack in (PLAIN, BN):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            norm = nn.BatchNorm1d(8) if stack == BN else nn.Identity()
            model = nn.Sequential(nn.Linear(4, 8), norm, nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        to = tmp_path / "both.jsonl"
        with watch(model, optimizer, every=1, stack=stack, layers={"layer 1": "2"}, to=to) as seen:
            for step in range(12):
                loss = (model(x * 1.5**step if stack == PLAIN else x) - x[:, :1]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                if stack == BN:
                    optimizer.step()
                else:
                    optimizer.zero_grad()
                    optimizer.step()
                seen.log("training loss", loss, step=step)
    section = film.draw(read(tmp_path / "both.jsonl"))
    assert [each["name"] for each in section.data["chapters"]][:2] == ["drift", "saturate"]
    assert "the flat ends of tanh" in section.data["captions"][section.data["chapters"][1]["frame"]]


def test_a_loss_that_is_lost_has_no_number():
    bins = {"low": -1.0, "high": 1.0, "under": 0, "over": 0}
    measured = []
    for step, loss in enumerate((1.0, 0.2, math.nan)):
        for stack in (PLAIN, BN):
            own = {"step": step, "stack": stack}
            measured.append(Measurement("histogram", {**own, "layer": "a", **bins}, (1.0, 2.0)))
            measured.append(Measurement("training loss", {**own, "layer": ""}, (loss if stack == PLAIN else 0.1,)))
    section = film.draw(RecordFile("watch", {}, tuple(measured)))
    assert section.data["losses"][0]["values"] == [1, 0.2, None]
    assert "nan" not in animated_svg(section).lower()


# ---- the picture


def visible(picture):
    """The frames of the picture: when each begins and how long it stays, in slots."""
    return [group for group in picture.iter(f"{SVG}g") if (group.get("class") or "").startswith("f")]


def test_the_picture_is_small_well_formed_and_without_scripts(signal_records, data):
    text = animated_svg(film.draw(signal_records))
    picture = ElementTree.fromstring(text)
    assert len(text.encode()) < 1_000_000
    assert {each.tag.removeprefix(SVG) for each in picture.iter()} <= {
        "svg", "title", "desc", "style", "rect", "path", "polyline", "circle", "text", "tspan", "g",
    }  # fmt: skip
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    frames = visible(picture)
    assert len(frames) > 30
    (still,) = [frame for frame in frames if "still" in frame.get("class")]
    words = " ".join("".join(each.itertext()) for each in still if each.get("class") == "caption")
    assert words == data["captions"][data["opening"]]
    shares = [each.text for each in still if (each.get("class") or "").startswith("share")]
    flat = [cell["saturation"][data["opening"]] for stages in data["cells"] for cell in stages[-1]]
    assert shares == [f"{share:.0%}" for share in flat]


def test_frames_follow_each_other_without_a_gap(signal_records):
    text = animated_svg(film.draw(signal_records))
    starts, lengths = [], []
    for frame in visible(ElementTree.fromstring(text)):
        name, delay = re.fullmatch(r"animation-name:s(\d+);animation-delay:(-?[\d.]+)s", frame.get("style")).groups()
        starts.append(float(delay) + 16)
        share = re.search(rf"@keyframes s{name}{{0%{{visibility:visible}}([\d.]+)%", text).group(1)
        lengths.append(16 * float(share) / 100)
    assert starts[0] == pytest.approx(0, abs=0.01)
    for start, length, after in zip(starts, lengths, [*starts[1:], 16], strict=True):
        assert start + length == pytest.approx(after, abs=0.01)


def test_names_are_text_in_the_picture(hostile_records):
    text = animated_svg(film.draw(hostile_records))
    assert {each.tag.removeprefix(SVG) for each in ElementTree.fromstring(text).iter()}.isdisjoint(
        {"script", "img", "b"}
    )


def test_records_without_a_film_give_no_picture(tmp_path):
    with pytest.raises(BatchNormError, match="records of 'bench' without histograms give no film"):
        write_film(RecordFile("bench", {}, ()), tmp_path / "film.svg")
    assert not list(tmp_path.iterdir())


def test_the_picture_of_the_documentation():
    """docs/film.svg, made by batchnorm watch-demo --gif docs/film.svg."""
    text = (DOCS / "film.svg").read_text(encoding="utf-8")
    picture = ElementTree.fromstring(text)
    assert len(text.encode()) < 1_000_000
    words = ["".join(each.itertext()) for each in picture.iter(f"{SVG}text")]
    for chapter in ("1 drift", "2 saturate", "3 snap to 0 and 1", "4 γ and β", "5 what it buys"):
        assert any(chapter in each for each in words)
    assert "step 400" in words
    assert "film.svg" in (DOCS / "understand.md").read_text(encoding="utf-8")
