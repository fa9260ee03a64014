"""The hook of the sample run. It records additional metrics and fails once. After the failure it is
disabled until the next attempt."""

import time

FAILS = (33, 42)
"""Steps: one of the second attempt, and one of the attempt that a test adds."""


def on_step(state):
    time.sleep(0.06)  # so that a request to stop comes in time
    if state.step in FAILS:
        raise ArithmeticError(f"step {state.step} is one that fails on purpose")
    square = sum(float(weight.detach().square().sum()) for part in state.parts for weight in part.parameters())
    return {"weight_norm": square**0.5, "tokens_seen": state.tokens}
