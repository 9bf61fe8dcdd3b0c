"""How findings are written: for the eye, for machines, and always with names as they are."""

import json
import re

import pytest
from doctor_findings import NASTY, REPORT, finding, nasty, several

from batchnorm.doctor.codes import RULES
from batchnorm.doctor.findings import Findings
from batchnorm.doctor.formats import FORMATS, Outcome, as_github, as_json, as_sarif, as_text
from batchnorm.doctor.present import SHOWN, shorten
from batchnorm.errors import printable

TEXT = """\
error  BN301 validation-in-train-mode
  the model: step 7: it moved
  repair: call model.eval()

warning  BN201 stale-statistics (2 places)
  bn1: off by 3
  bn2: off by 4
  repair: bn.calibrate(model, data) (--fix --unsafe-fixes)

advice  BN101 bias-before-norm
  conv1: its bias does nothing
  repair: bias=False (--fix)

BN996 failed, which is a bug: please report it: KeyError: 'weight'
3 rules could not run:
  needs batches of data (--data): BN999, BN998
  needs x: BN997
1 error, 2 warnings, 1 advice"""


def test_text():
    assert as_text(Outcome("net.py:make", several())) == TEXT


def test_text_says_what_was_repaired_and_ignored():
    text = as_text(Outcome("net.py:make", Findings([]), REPORT, ignored=2))
    assert "conv1[red]" in text
    assert "bn<b>" in text
    assert text.endswith("nothing found; 2 ignored in their modules")
    assert as_text(Outcome("m", Findings([]), ignored=1)).endswith("; 1 ignored in its module")


def test_text_shows_the_first_few_unless_asked():
    findings = Findings([finding(f"conv{n}", repair="bias=False") for n in range(SHOWN + 3)])
    text = as_text(Outcome("m", findings))
    assert f"conv{SHOWN - 1}:" in text
    assert f"conv{SHOWN}:" not in text
    assert "and 3 more (--all shows them)" in text
    everything = as_text(Outcome("m", findings, everything=True))
    assert f"conv{SHOWN + 2}:" in everything
    assert "more (" not in everything
    assert everything.count("bias=False") == 1


def test_text_with_different_repairs_says_each():
    text = as_text(Outcome("m", Findings([finding("a", repair="do a", fix="safe"), finding("b", repair="do b")])))
    lines = [line.strip() for line in text.splitlines()]
    assert lines[lines.index("a: its bias does nothing") + 1] == "do a (--fix)"
    assert lines[lines.index("b: its bias does nothing") + 1] == "do b"


def test_text_on_a_terminal_wraps_with_colour():
    text = as_text(Outcome("m", Findings([finding(sentence="word " * 60)])), width=60, colour=True)
    assert "\x1b[" in text
    plain = re.sub(r"\x1b(\[[\d;]*m|\]8;.*?\x1b\\)", "", text)  # colours, and where links begin and end
    assert all(len(line) <= 60 for line in plain.splitlines())
    assert all(line.startswith("  ") for line in plain.splitlines()[1:4])  # the indentation is kept


@pytest.mark.parametrize("kind", NASTY)
def test_text_shows_names_as_they_are(kind):
    text = as_text(Outcome("m", nasty(kind)))
    assert shorten(printable(NASTY[kind])) in text
    assert all(character.isprintable() or character == "\n" for character in text)
    assert len(text.splitlines()) == 5
    assert len(text) < 2 * 10_000 + 3000


@pytest.mark.parametrize("kind", NASTY)
def test_str_shows_names_on_one_line(kind):
    assert len(str(nasty(kind)).splitlines()) == 2
    assert printable(NASTY[kind]) in str(nasty(kind))


def test_json():
    content = json.loads(as_json(Outcome("net.py:make", several(), REPORT, ignored=3)))
    assert content["format"] == 1
    assert content["subject"] == "net.py:make"
    assert [f["code"] for f in content["findings"]] == ["BN301", "BN201", "BN201", "BN101"]
    assert content["findings"][3]["numbers"] == {"values": 8, "largest": None}
    assert content["findings"][0]["step"] == 7
    assert content["skipped"]["BN997"] == "needs x"
    assert content["failed"] == {"BN996": "KeyError: 'weight'"}
    assert content["fixed"]["changes"][0]["path"] == "conv1[red]"
    assert content["ignored"] == 3
    assert json.loads(as_json(Outcome("m", Findings([]))))["fixed"] is None


@pytest.mark.parametrize("kind", NASTY)
@pytest.mark.parametrize("name", ["json", "sarif"])
def test_machines_get_the_whole_name(kind, name):
    text = FORMATS[name](Outcome("m", nasty(kind)))
    assert text.isascii()
    content = json.loads(text)
    if name == "json":
        assert content["findings"][0]["path"] == NASTY[kind]
    else:
        (where,) = content["runs"][0]["results"][0]["locations"][0]["logicalLocations"]
        assert where["fullyQualifiedName"] == NASTY[kind]


# ---- SARIF: what the schema of version 2.1.0 requires and allows of the objects that we write

REQUIRED = {
    "log": {"version", "runs"}, "run": {"tool"}, "tool": {"driver"}, "driver": {"name"}, "rule": {"id"},
    "result": {"message"}, "text": {"text"}, "invocation": {"executionSuccessful"}, "notification": {"message"},
    "location": set(), "logical": set(), "physical": {"artifactLocation"}, "artifact": set(), "region": {"startLine"},
    "configuration": set(), "reference": {"id"},
}  # fmt: skip
ALLOWED = {
    "log": {"$schema", "version", "runs"},
    "run": {"tool", "columnKind", "invocations", "results"},
    "tool": {"driver"},
    "driver": {"name", "version", "semanticVersion", "informationUri", "rules"},
    "rule": {"id", "name", "shortDescription", "fullDescription", "help", "helpUri", "defaultConfiguration",
             "properties"},
    "result": {"ruleId", "ruleIndex", "level", "message", "locations", "partialFingerprints", "properties"},
    "text": {"text", "markdown"},
    "invocation": {"executionSuccessful", "toolExecutionNotifications"},
    "notification": {"level", "associatedRule", "message"},
    "location": {"logicalLocations", "physicalLocation"},
    "logical": {"name", "fullyQualifiedName", "kind"},
    "physical": {"artifactLocation", "region"},
    "artifact": {"uri"},
    "region": {"startLine"},
    "configuration": {"level"},
    "reference": {"id"},
}  # fmt: skip
KINDS = {
    "runs": "run", "tool": "tool", "driver": "driver", "rules": "rule", "results": "result", "message": "text",
    "shortDescription": "text", "fullDescription": "text", "help": "text", "invocations": "invocation",
    "toolExecutionNotifications": "notification", "locations": "location", "logicalLocations": "logical",
    "physicalLocation": "physical", "artifactLocation": "artifact", "region": "region",
    "defaultConfiguration": "configuration", "associatedRule": "reference",
}  # fmt: skip


def check_sarif(value, kind="log"):
    assert isinstance(value, dict), kind
    assert REQUIRED[kind] <= set(value) <= ALLOWED[kind], kind
    for key, inner in value.items():
        if key in KINDS:
            for item in inner if isinstance(inner, list) else [inner]:
                check_sarif(item, KINDS[key])
        elif key == "level":
            assert inner in ("none", "note", "warning", "error")
        elif key not in ("properties", "partialFingerprints", "ruleIndex", "startLine", "executionSuccessful"):
            assert isinstance(inner, str), key
            assert inner, key


def test_sarif_has_the_form_that_the_standard_requires(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = json.loads(as_sarif(Outcome("net.py:make", several(), file="a folder/net.py", line=12)))
    check_sarif(content)
    assert content["version"] == "2.1.0"
    assert content["$schema"].endswith("sarif-schema-2.1.0.json")
    (run,) = content["runs"]
    assert run["columnKind"] in ("utf16CodeUnits", "unicodeCodePoints")
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == list(RULES)
    assert len({rule["name"] for rule in rules}) == len(rules)
    assert all(re.fullmatch(r"([A-Z][A-Za-z0-9]*)+", rule["name"]) for rule in rules)
    assert all("## Why is this bad?" in rule["help"]["markdown"] for rule in rules)
    assert [result["level"] for result in run["results"]] == ["error", "warning", "warning", "note"]
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        (location,) = result["locations"]
        assert location["physicalLocation"]["artifactLocation"]["uri"] == "a%20folder/net.py"
        assert location["physicalLocation"]["region"] == {"startLine": 12}
    assert run["results"][0]["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "the model"
    assert run["results"][3]["message"]["text"] == "conv1: its bias does nothing; bias=False"
    assert run["results"][3]["properties"]["numbers"] == {"values": 8, "largest": None}
    prints = [result["partialFingerprints"]["batchnorm/v1"] for result in run["results"]]
    assert len(set(prints)) == 4
    (failure,) = run["invocations"][0]["toolExecutionNotifications"]
    assert failure["associatedRule"] == {"id": "BN996"}
    assert run["invocations"][0]["executionSuccessful"] is False


def test_sarif_without_findings_or_file(tmp_path, monkeypatch):
    check_sarif(json.loads(as_sarif(Outcome("m", Findings([])))))
    (result,) = json.loads(as_sarif(Outcome("m", Findings([finding()]))))["runs"][0]["results"]
    assert "physicalLocation" not in result["locations"][0]
    monkeypatch.chdir(tmp_path)  # a file elsewhere has its whole address
    outcome = Outcome("m", Findings([finding()]), file=str(tmp_path.parent / "net.py"))
    (result,) = json.loads(as_sarif(outcome))["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"].startswith("file:///")


def test_sarif_sees_no_link_in_a_name():
    (result,) = json.loads(as_sarif(Outcome("m", nasty("link"))))["runs"][0]["results"]
    assert "\\[click\\](http://x)" in result["message"]["text"]


# ---- GitHub


def test_github():
    lines = as_github(Outcome("net.py:make", several(), file="net.py", line=3)).splitlines()
    assert lines == [
        "::error file=net.py,line=3,title=BN301 validation-in-train-mode::the model: it moved; call model.eval()",
        "::warning file=net.py,line=3,title=BN201 stale-statistics::bn1: off by 3; bn.calibrate(model, data)",
        "::warning file=net.py,line=3,title=BN201 stale-statistics::bn2: off by 4; bn.calibrate(model, data)",
        "::notice file=net.py,line=3,title=BN101 bias-before-norm::conv1: its bias does nothing; bias=False",
    ]
    assert as_github(Outcome("m", Findings([]))) == ""


def read_as_github_does(line):
    """A workflow command: its name, its properties, its message, each as the runner decodes them."""
    command, _, message = line.removeprefix("::").partition("::")
    name, _, listed = command.partition(" ")
    properties = dict(pair.split("=", 1) for pair in listed.split(","))

    def decode(text, more=False):
        pairs = [("%0D", "\r"), ("%0A", "\n"), *([("%3A", ":"), ("%2C", ",")] if more else []), ("%25", "%")]
        for code, character in pairs:
            text = text.replace(code, character)
        return text

    return name, {key: decode(value, True) for key, value in properties.items()}, decode(message)


@pytest.mark.parametrize("kind", NASTY)
def test_github_reads_one_annotation_with_the_name_in_it(kind):
    text = as_github(Outcome("m", nasty(kind), file="a,b:c%\n\r.py"))
    (line,) = text.splitlines()
    name, properties, message = read_as_github_does(line)
    assert name == "notice"
    assert properties == {"file": "a,b:c%\n\r.py", "title": "BN101 bias-before-norm"}
    assert message.startswith(f"{shorten(printable(NASTY[kind]))}: its bias meets ")
