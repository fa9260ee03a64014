"""What recording costs a run: metrics, heartbeats, requests and asynchronous checkpoints, from the
run's own records.

Time outside steps is what the stamps of `metrics.jsonl` leave when the step times are taken off. A
checkpoint also slows the steps during which it is written; that is the excess of the steps after it
over the median step.
"""

import dataclasses
from pathlib import Path

import numpy as np

from kit.data import Dataset
from kit.launcher import launch
from kit.plan import Plan
from kit.recipe import Recipe
from kit.run.metrics import Metrics
from kit.show.results import Row, row
from kit.spec import ModelSpec
from tests.benchmarks.startup import wait_until_done

CHECKPOINT_EVERY = 50
NUM_CHECKPOINTS = 5
SLOWED_STEPS = 2
"""Steps after a checkpoint that are taken to overlap with its writing; a demo checkpoint takes
about one."""
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
        cost = costs(run.metrics())
        checkpoint_s = cost.checkpoint_s + cost.slowed_s
        share = (cost.recording_s + checkpoint_s / CHECKPOINT_EVERY) / cost.step_s
        note = (
            f"{1e3 * cost.recording_s:.1f} ms a step; a checkpoint costs {1e3 * checkpoint_s:.0f}"
            f" ms every {CHECKPOINT_EVERY} steps of {cost.step_s:.2f} s"
        )
        rows.append(
            row(f"metrics and checkpoints, {name}", share, "fraction", at_most=0.01, note=note)
        )
    return rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds; the median checkpoint counts for all, so that other work in one of them does not
    decide.
    """

    step_s: float
    """One step."""
    recording_s: float
    """Between two steps: metrics, heartbeat, requests."""
    checkpoint_s: float
    """More than that where a checkpoint starts: the copy that lets training go on."""
    slowed_s: float
    """By how much the steps during which it is written are slower."""


def costs(metrics: Metrics) -> Costs:
    """Returns what recording and checkpoints cost in a run with a checkpoint every
    `CHECKPOINT_EVERY` steps.
    """
    step_s, stamps, steps = metrics["step_time_s"], metrics["time"], metrics["step"]
    between_s = np.diff(stamps) - step_s[1:]
    after = steps[1:] % CHECKPOINT_EVERY == 1
    recording_s = float(np.median(between_s[~after]))
    first = np.flatnonzero(after) + 1
    slowed = [step_s[i : i + SLOWED_STEPS].sum() - SLOWED_STEPS * np.median(step_s) for i in first]
    return Costs(
        step_s=float(np.median(step_s)),
        recording_s=recording_s,
        checkpoint_s=float(np.median(between_s[after])) - recording_s,
        slowed_s=float(np.median(slowed)),
    )
