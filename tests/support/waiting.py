"""Functions that find other processes, and that wait for a condition."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def eventually(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Returns the first true value of a condition. After `timeout_s` seconds, returns the last
    value.
    """
    deadline = time.monotonic() + timeout_s
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return result


def processes(text: str, *variables: str) -> list[int]:
    """Returns the numbers of other processes whose command line contains `text` and whose
    environment contains all `variables`. All simulated nodes are searched. A zombie never matches,
    because its command line and environment are empty.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "environ").read_bytes().split(b"\0") if variables else []
            if text.encode() in (entry / "cmdline").read_bytes() and all(
                variable.encode() in words for variable in variables
            ):
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]
