"""Every Python block of the README runs."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(block):
    exec(compile(block, str(README), "exec"), {})


def test_the_two_commands_are_at_the_top():
    top = README.read_text(encoding="utf-8").split("\n## ")[0]
    assert "pip install -c constraints.txt . && batchnorm race" in top
    assert "pip install -c constraints.txt '.[test]' && pytest" in top
