"""A part of a benchmark in a process of its own: its memory is its own, and a process group changes
no state but its own.
"""

import json
import subprocess
import sys
from typing import Any


def alone(module: str, *arguments: object, given: str = "") -> Any:
    """Returns what a module of `tests.benchmarks` prints last, as JSON.

    `given` is its standard input.

    Raises:
        RuntimeError: it failed; with its last words.
    """
    command = [sys.executable, "-W", "ignore", "-m", f"tests.benchmarks.{module}"]
    command += map(str, arguments)
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    if done.returncode:
        told = " ".join(command[4:])
        raise RuntimeError(f"{told} failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])
