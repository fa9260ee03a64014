"""HLAT at demo scale: one real run whose checkpoints are scored, a spike and a precision study;
kept and used again.
"""

from pathlib import Path
from typing import Any

from cluster.state import JobState
from kit.data.dataset import Dataset
from kit.errors import RunError
from kit.papers.layers import kept, note_load
from kit.plan import Plan
from kit.recipe import Recipe
from kit.run import Run
from kit.spec import ModelSpec

RUN, SPIKES, PRECISION = "llama-demo", "spikes.json", "precision.json"
"""Where the studies keep what they have made, below one folder."""
STEPS, CHECKPOINT_EVERY = 60, 20
PLAN = Plan(data_parallel=2, micro_batch_size=4, global_batch_size=8)
SUITE = "curve"
"""What is scored at each checkpoint: a part of the items."""
SPIKE_RECIPE = Recipe(
    data="",
    num_steps=130,
    learning_rate=4e-3,
    min_learning_rate=4e-4,
    warmup_steps=20,
    decay_steps=400,
    cosine_floor="clamped",
)
PRECISION_RECIPE = Recipe(
    data="",
    num_steps=100,
    learning_rate=3e-4,
    min_learning_rate=3e-5,
    warmup_steps=20,
    cosine_floor="clamped",
)
"""The learning rates of HLAT's 7B: with larger ones fewer updates are small enough to be rounded
away."""


def demo_run(directory: str | Path, data: str | Path) -> Run:
    """Returns a finished run with HLAT's optimizer and schedule whose checkpoints are all scored,
    made if needed.

    Tasks whose data is not on this machine (`kit eval-data` builds it) are left out of the scores.

    `data` is a dataset made by `kit data build` with a vocabulary of at most 4,096.

    Raises:
        RunError: the run did not end well.
    """
    from kit.evaluate.follow import follow_run
    from kit.launcher import launch

    folder = Path(directory) / RUN
    run = Run.open(folder) if (folder / "job.json").exists() else None
    if run is None or run.job.status().state is JobState.LOST:
        note_load(directory)
        recipe = Recipe(
            data=str(data),
            num_steps=STEPS,
            learning_rate=3e-3,
            min_learning_rate=3e-4,
            warmup_steps=8,
            cosine_floor="clamped",
            validation_every=CHECKPOINT_EVERY,
            checkpoint_every=CHECKPOINT_EVERY,
            keep_every=CHECKPOINT_EVERY,
        )
        run = launch(folder, spec=ModelSpec.preset("demo"), plan=PLAN, recipe=recipe)
    told = list(follow_run(run, SUITE, poll_s=1.0))
    status = run.job.status()
    if status.state is not JobState.DONE:
        raise RunError(
            f"{folder}: {status.state}: {status.reason}. Delete the folder to make the run again."
        )
    if failed := [each for each in told if not each.scored]:
        raise RunError(f"{folder}: {failed[0].line()}")
    return run


def demo_spikes(directory: str | Path, data: str | Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the steps of a small model without a spike, and with one that is answered in four
    ways.
    """
    from kit.papers.hlat_small import ANSWERS, train_with_spike

    return kept(
        Path(directory) / SPIKES,
        lambda: train_with_spike(Dataset.open(data), SPIKE_RECIPE, ANSWERS),
    )


def demo_precision(directory: str | Path, data: str | Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the steps of a small model in each of four precisions."""
    from kit.papers.hlat_small import PRECISIONS, train_in

    return kept(
        Path(directory) / PRECISION,
        lambda: {
            each.name: train_in(Dataset.open(data), PRECISION_RECIPE, each) for each in PRECISIONS
        },
    )
