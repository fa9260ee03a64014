"""A part of a benchmark in a process of its own: its memory is its own, and a process group changes
no state but its own.
"""

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Alone(NamedTuple):
    """What a function of JSON values returned, and the most memory that its process had."""

    found: Any
    peak_bytes: int
    bare_bytes: int
    """Of the interpreter, before anything was imported for the function."""


def alone(function: Callable[..., Any], *arguments: Any) -> Alone:
    """Returns what a function of a module returns there.

    Raises:
        RuntimeError: it failed; with its last words.
    """
    command = [sys.executable, "-W", "ignore", "-m", "tests.bench.alone"]
    done = subprocess.run(command, input=pickle.dumps((function, arguments)), capture_output=True)
    if done.returncode:
        words = done.stderr.decode().strip().splitlines()[-1]
        raise RuntimeError(f"{function.__name__}{arguments} failed: {words}")
    return Alone(*json.loads(done.stdout.splitlines()[-1]))


def _peak_bytes() -> int:
    """Returns the most memory that this program has had (`ru_maxrss` counts what its parent had
    before it, too).
    """
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


if __name__ == "__main__":
    bare = _peak_bytes()
    function, arguments = pickle.load(sys.stdin.buffer)
    print(json.dumps([function(*arguments), _peak_bytes(), bare]))
