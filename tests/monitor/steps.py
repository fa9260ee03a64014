"""Lines of metrics.jsonl as the trainer writes them, with round numbers."""

import json

STEPS = {1: range(1, 31), 2: range(21, 41)}
"""Of the attempts of the run in conftest.py; attempt 2 repeats steps 21 to 30."""


def row(step: int, attempt: int = 1, **values: object) -> dict:
    """Returns one step of 0.5 s and 2,048 tokens; the loss falls by 0.05 a step."""
    return {
        "step": step,
        "attempt": attempt,
        "time": 1e9 + step,
        "step_time_s": 0.5,
        "tokens": 2048,
        "loss": 8 - step / 20,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "memory_bytes": 10**8,
        **values,
    }


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
