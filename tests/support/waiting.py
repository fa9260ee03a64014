"""Other processes: finding them, and waiting for what they do."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def eventually(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Returns the first true value of a condition, or its last one when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return result


def processes(text: str, *variables: str) -> list[int]:
    """Returns all other processes, on all nodes, whose command line holds a text and whose
    environment holds these variables; a zombie has neither.
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
