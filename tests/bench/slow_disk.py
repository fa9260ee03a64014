"""Slowdown of training steps while a metadata server takes 2 s for each rename.

One run of the demo model with short sequences and without checkpoints is measured. Renames are slow
in every second time window.
"""

import time
from pathlib import Path

import numpy as np

from kit.config.recipe import Recipe
from kit.data import Dataset
from kit.launcher import launch
from kit.run import Run
from kit.show.results import Row, row
from tests.bench.overhead import DEMO
from tests.bench.startup import ONE, at_step
from tests.bench.turns import ratio_row, take_turns
from tests.support.failing_disk import FailingDisk, compile_library

DELAY_S = 2.0
WINDOW_S = 10.0
ROUNDS = 12
WARM_STEPS = 5


def measure(
    workplace: Path, dataset: Dataset, *, rounds: int = ROUNDS, window_s: float = WINDOW_S
) -> list[Row]:
    """Returns the ratio of seconds per step between windows with and windows without slow
    renames.
    """
    disk = FailingDisk(compile_library(workplace), workplace / "rules")
    data = str(dataset.directory.resolve())
    recipe = Recipe(data=data, num_steps=10**6, learning_rate=1e-3, checkpoint_every=None)
    with disk.preloaded():
        run = launch(workplace / "run", spec=DEMO, plan=ONE, recipe=recipe)
    try:
        at_step(run, WARM_STEPS)

        def usual(_: int) -> tuple[float, float]:
            disk.end()
            return window(window_s)

        def slow(_: int) -> tuple[float, float]:
            disk.begin(run.directory, ("rename", 0, round(1000 * DELAY_S), "*"))
            return window(window_s)

        windows = take_turns({"usual": usual, "slow": slow}, rounds)
        disk.end()
        time.sleep(2 * DELAY_S + 1)  # wait until the metrics have the last steps
        found = {name: [step_s(run, *each) for each in of] for name, of in windows.items()}
    finally:
        disk.end()
        run.job.cancel()
        run.job.wait(60)
    usual_s = float(np.median(found["usual"]))
    return [
        row(
            "time of a step on the normal file system",
            usual_s,
            "s",
            note="demo model, 32 tokens per step, 1 process, no checkpoint",
        ),
        ratio_row(
            f"step time while each rename takes {DELAY_S:g} s / normal step time",
            found["slow"],
            found["usual"],
            at_most=1.05,
        ),
    ]


def window(length_s: float) -> tuple[float, float]:
    """Waits for `length_s` seconds. Returns (start, end) in Unix time."""
    start = time.time()
    time.sleep(length_s)
    return start, start + length_s


def step_s(run: Run, start: float, end: float) -> float:
    """Returns the mean seconds between the ends of two steps, over steps that end between the Unix
    times `start` and `end`.
    """
    ended_at = run.metrics()["time"]
    inside = ended_at[(ended_at >= start) & (ended_at < end)]
    if len(inside) < 2:
        raise RuntimeError(f"slow_disk: {len(inside)} steps in {end - start:g} s")
    return float((inside[-1] - inside[0]) / (len(inside) - 1))
