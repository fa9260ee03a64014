"""Waiting for what other processes do."""

import time
from collections.abc import Callable
from typing import Any


def eventually(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Returns the first true value of a condition, or its last one when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return result
