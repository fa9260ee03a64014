"""Runs part of a benchmark in its own process. The process measures only its own peak memory, and a
process group in it changes no state of the caller.
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
    """JSON result of a function that ran in its own process, and the peak memory of the process."""

    found: Any
    peak_bytes: int
    bare_bytes: int
    """Peak memory of the interpreter in bytes, before the modules of the function were imported."""


def alone(function: Callable[..., Any], *arguments: Any) -> Alone:
    """Runs a module-level function in a new process and returns its result and peak memory.

    Raises:
        RuntimeError: The function failed. The message has the last line of its error output.
    """
    command = [sys.executable, "-W", "ignore", "-m", "tests.bench.alone"]
    done = subprocess.run(command, input=pickle.dumps((function, arguments)), capture_output=True)
    if done.returncode:
        words = done.stderr.decode().strip().splitlines()[-1]
        raise RuntimeError(f"{function.__name__}{arguments} failed: {words}")
    return Alone(*json.loads(done.stdout.splitlines()[-1]))


def _peak_bytes() -> int:
    """Returns the peak memory of this program in bytes. Reads VmHWM, because `ru_maxrss` includes
    the memory of the parent process before exec.
    """
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


if __name__ == "__main__":
    bare = _peak_bytes()
    function, arguments = pickle.load(sys.stdin.buffer)
    print(json.dumps([function(*arguments), _peak_bytes(), bare]))
