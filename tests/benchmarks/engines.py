"""Step time of the demo model under each engine, on one GPU or CPU process: the same weights,
batches and AdamW.
"""

import statistics
from pathlib import Path

import torch

from kit.show.results import Row, row
from tests.benchmarks.contestants import DEMO
from tests.benchmarks.train_speed import Entrant, take_turns

NATIVE = "native engine"
ENTRANTS = {
    NATIVE: Entrant(name="kit", keep_freed_memory=True),
    "DeepSpeed, ZeRO 0": Entrant(name="deepspeed_zero0", keep_freed_memory=True),
    "DeepSpeed, ZeRO 1": Entrant(name="deepspeed_zero1", keep_freed_memory=True),
    "plain torch loop": Entrant(name="plain", keep_freed_memory=True),
}
ROUNDS = 6


def measure(workplace: Path, *, rounds: int = ROUNDS) -> list[Row]:
    """Returns each engine's step time, and how much longer than the native engine's it is, turn by
    turn.

    Args:
        workplace: an empty folder.
        rounds: in which each engine has its turn.

    Raises:
        RuntimeError: a process failed, or the engines do not train the same model.
    """
    setup = DEMO.replace(device="cuda" if torch.cuda.is_available() else "cpu")
    turns = take_turns(ENTRANTS, workplace, threads=1, rounds=rounds, setup=setup)
    rows = []
    for name, times in turns.items():
        note = f"median of {rounds} rounds, {1000 * min(times):.0f} to {1000 * max(times):.0f}"
        rows.append(row(f"{name}, 1 thread", 1000 * statistics.median(times), "ms", note=note))
    for name, times in turns.items():
        if name != NATIVE:
            ratios = [theirs / ours for ours, theirs in zip(turns[NATIVE], times, strict=True)]
            note = f"median of {rounds} rounds, {min(ratios):.2f} to {max(ratios):.2f}"
            rows.append(
                row(f"{name} / {NATIVE}, step time", statistics.median(ratios), "x", note=note)
            )
    return rows
