"""The first page: what it says can be done is done, in its order, by somebody who has nothing
yet.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.headlines import plan_example

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text()
COMMANDS = re.findall(r"^\| [^|`]+ \| `(kit [^`]+)` \|", TEXT, re.M)
SAID = re.compile(r"^```python\n(.*?)^```|^\$ (kit [^\n]+)$|`(kit [^`\n]+)`", re.M | re.S)
"""What a reader may type, in its order: Python, a command with its answer, one within a text."""
ON_A_CLUSTER = ("mine.toml", "runs/web")
"""Words of commands that need Slurm; `tests/cluster` runs them."""
LONGEST = 96
"""Characters of a code block that the page shows without cutting them off."""


def test_its_code_is_not_cut_off():
    blocks = re.findall(r"^```\w*\n(.*?)^```", TEXT, re.M | re.S)
    assert len(blocks) >= 3
    assert [line for block in blocks for line in block.splitlines() if len(line) > LONGEST] == []


def test_it_says_first_what_is_good():
    head = TEXT.splitlines()[:12]
    assert any(line.startswith("**Measured:**") and "median error" in line for line in head), (
        "made by `make bench`"
    )
    for heading in ("Install", "Who it is for", "What it is not", "What holds"):
        assert f"\n## {heading}\n" in TEXT
    met = re.findall(r"\| (yes|\*\*no\*\*) \|", TEXT)
    assert met == sorted(met, reverse=True), "what was met stands before what was missed"
    assert len(COMMANDS) <= 8 and "Never run" not in TEXT


def test_its_plan_is_what_the_command_says_now():
    assert plan_example(README) in TEXT, "refresh it: `python -m tests.benchmarks.headlines`"


# A minute and a half alone; on a busy machine several times that.
@pytest.mark.timeout(1800)
def test_its_commands_run_in_their_order_for_somebody_who_has_nothing(tmp_path):
    (tmp_path / "home").mkdir()
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "XDG_", "KIT_"))
    }
    environment |= {"HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    launched = [command.split()[2] for command in COMMANDS if command.startswith("kit launch ")]
    assert len(launched) == 1, "each launch has a directory of its own"
    ran = []
    for python, *commands in SAID.findall(TEXT):
        command = "".join(commands).replace("NAME", "frontier-strong-scaling")
        if any(word in command for word in ON_A_CLUSTER):
            continue
        words = ["-c", python] if python else ["-m", *shlex.split(command)]
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, f"{command or python}\n{done.stdout}\n{done.stderr}"
        assert "loss" in done.stdout or not python
        print(command or python, done.stdout, sep="\n")
        ran.append(command)
    assert {*COMMANDS, "", "kit --help"} < {*ran}, "and the Python between them"
    assert list(tmp_path.glob("*.png")), "the figure"
