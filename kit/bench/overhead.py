"""What recording costs a run: metrics, heartbeats, requests and asynchronous checkpoints, from the run's own records.

Time outside steps is what the stamps of `metrics.jsonl` leave when the step times are taken off. A checkpoint also
slows the steps during which it is written; that is the excess of the steps after it over the median step.
"""

from pathlib import Path

import numpy as np

from kit.bench.results import Row, row
from kit.bench.startup import wait_until_done
from kit.data import Dataset
from kit.launcher import launch
from kit.metrics import Metrics
from kit.plan import Plan
from kit.recipe import Recipe
from kit.spec import ModelSpec

CHECKPOINT_EVERY = 25
NUM_CHECKPOINTS = 6
SLOWED_STEPS = 2
"""Steps after a checkpoint that are taken to overlap with its writing; a demo checkpoint takes about one."""
LAYOUTS = {
    "1 process": Plan(global_batch_size=16, micro_batch_size=4),
    "DP2, 2 processes": Plan(global_batch_size=16, micro_batch_size=4, data_parallel=2),
}


def measure(workplace: Path, dataset: Dataset) -> list[Row]:
    """Returns, as fractions of the run time, what recording and checkpoints cost the demo model.

    Args:
        workplace: an empty folder.
        dataset: to train on; its vocabulary must fit the demo model.
    """
    rows = []
    for name, plan in LAYOUTS.items():
        recipe = Recipe(
            data=str(dataset.directory),
            num_steps=CHECKPOINT_EVERY * (NUM_CHECKPOINTS + 1) - 1,
            learning_rate=1e-3,
            checkpoint_every=CHECKPOINT_EVERY,
        )
        run = launch(workplace / name, spec=ModelSpec.preset("demo"), plan=plan, recipe=recipe)
        wait_until_done(run)
        outside, slowed = costs(run.metrics())
        note = f"{outside:.2%} outside steps, {slowed:.2%} slower steps; a checkpoint every {CHECKPOINT_EVERY} steps"
        label = f"metrics and checkpoints, {name}"
        rows.append(row(label, outside + slowed, "fraction", at_most=0.01, note=note))
    return rows


def costs(metrics: Metrics) -> tuple[float, float]:
    """Returns the share of the run time that passed outside steps, and the share by which checkpoints slowed steps.

    The median checkpoint counts for all, so that other work on the machine in one of them does not decide.
    """
    step_s, stamps, steps = metrics["step_time_s"], metrics["time"], metrics["step"]
    outside_s = np.diff(stamps) - step_s[1:]
    after = steps[1:] % CHECKPOINT_EVERY == 1  # the gap before this step holds the start of a checkpoint
    quiet_s = np.median(outside_s[~after])
    checkpoint_s = np.median(outside_s[after]) - quiet_s
    places = np.flatnonzero(steps % CHECKPOINT_EVERY == 1)[1:]
    slowed_s = np.median([step_s[i : i + SLOWED_STEPS].sum() for i in places]) - SLOWED_STEPS * np.median(step_s)
    total_s = np.median(step_s) + quiet_s + checkpoint_s / CHECKPOINT_EVERY
    return float((quiet_s + checkpoint_s / CHECKPOINT_EVERY) / total_s), float(slowed_s / CHECKPOINT_EVERY / total_s)
