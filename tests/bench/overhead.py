"""Cost of recording (metrics, heartbeats, requests, asynchronous checkpoints) as a share of a run's
time, and milliseconds per step outside the engine.

The share is computed from the run's own records. Time outside steps is the difference between two
time stamps of `metrics.jsonl` minus the step time. A checkpoint also slows the steps during which
it is written. This slowdown is the excess of the steps after the save over the median step.
"""

import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.data import Dataset
from kit.engines.process_group import keep_freed_memory
from kit.run.metrics import Metrics
from kit.show.results import Row, row
from kit.trainer import heartbeat, loop
from tests.bench.alone import alone
from tests.bench.contestants import join_alone
from tests.bench.startup import ONE, trained
from tests.support.workers import local_run

RECORDED = {"1 process": ONE, "DP2, 2 processes": ONE.replace(data_parallel=2)}
CHECKPOINT_EVERY = 50
NUM_CHECKPOINTS = 5
SLOWED_STEPS = 2
"""Number of steps after a save that count as slowed by the writing of the checkpoint. The writing
of a demo checkpoint takes about one step."""
WATCHED_STEPS, WARM_STEPS = 400, 5
DEMO = ModelSpec.preset("demo").replace(sequence_length=32)
SHORT = Plan(global_batch_size=1)
"""Plan with very short steps, so that most steps include neither a check for requests nor a
heartbeat. The optimizer still empties the CPU caches."""
HOOK = "def on_step(state):\n    return {'one': 1.0}\n"
REQUESTS, BEAT = "requests", "heartbeat"


def measure(workplace: Path, dataset: Dataset) -> list[Row]:
    """Returns the cost of recording and checkpoints for the demo model, as fractions of the run
    time.
    """
    rows, steps = [], CHECKPOINT_EVERY * (NUM_CHECKPOINTS + 1) - 1
    for name, plan in RECORDED.items():
        run = trained(
            workplace / name, plan, dataset, num_steps=steps, checkpoint_every=CHECKPOINT_EVERY
        )
        step_s, recording_s, checkpoint_s, slowed_s = costs(run.metrics()).values()
        checkpoint_s += slowed_s
        share = (recording_s + checkpoint_s / CHECKPOINT_EVERY) / step_s
        note = (
            f"recording takes {1e3 * recording_s:.1f} ms per step of {step_s:.2f} s; a checkpoint"
            f" takes {1e3 * checkpoint_s:.0f} ms every {CHECKPOINT_EVERY} steps"
        )
        told = f"recording and checkpoints, as a share of the step time, {name}"
        rows.append(row(told, share, "fraction", at_most=0.01, note=note))
    return rows


def costs(metrics: Metrics) -> dict[str, float]:
    """Returns the median seconds that recording and checkpoints cost in a run with a checkpoint
    every `CHECKPOINT_EVERY` steps.

    The keys are: step_s, time of one step. recording_s, time between two steps for metrics,
    heartbeat and requests. checkpoint_s, additional time between two steps in which a checkpoint is
    copied before training continues. slowed_s, slowdown of the steps during which a checkpoint is
    written. Medians are used because other load may disturb a single checkpoint.
    """
    step_s, stamps, steps = metrics["step_time_s"], metrics["time"], metrics["step"]
    between_s = np.diff(stamps) - step_s[1:]
    after = steps[1:] % CHECKPOINT_EVERY == 1
    recording_s = float(np.median(between_s[~after]))
    first = np.flatnonzero(after) + 1
    slowed = [step_s[i : i + SLOWED_STEPS].sum() - SLOWED_STEPS * np.median(step_s) for i in first]
    return {
        "step_s": float(np.median(step_s)),
        "recording_s": recording_s,
        "checkpoint_s": float(np.median(between_s[after])) - recording_s,
        "slowed_s": float(np.median(slowed)),
    }


def measure_beside(
    workplace: Path, dataset: Dataset, *, steps: int = WATCHED_STEPS, spec: ModelSpec = DEMO
) -> list[Row]:
    """Returns rows with milliseconds outside the engine: per step with a hook that does nothing,
    the additional time of a check for requests and of a heartbeat, and the total.
    """
    data = str(dataset.directory.resolve())
    found = alone(beside, workplace, data, steps, spec).found[WARM_STEPS:]

    def middle(name: str, chosen: list[dict[str, float]]) -> float:
        return 1e3 * statistics.median(each.get(name, 0.0) for each in chosen)

    beats = [each for each in found if BEAT in each]
    asked = [each for each in found if REQUESTS in each and BEAT not in each]
    others = [each for each in found if REQUESTS not in each and BEAT not in each]
    if not (beats and asked and others):
        raise RuntimeError("beside: every step took half a second. Measure on a quieter machine.")
    parts = {name: middle(name, others) for name in others[0]}
    whole = parts.pop("all")
    parts["metrics row and rest of the loop"] = whole - sum(parts.values())
    told = ", ".join(f"{name} {ms:.3f}" for name, ms in parts.items() if ms >= 0.001) + " ms"
    look = middle("all", asked) - whole
    agreed = f"{middle('broadcast', asked):.3f} ms of it for the broadcast to all ranks"
    beat = middle("all", beats) - whole
    files = "difference of two medians, so it can be negative; another thread writes the two files"
    files += f" of a heartbeat in {middle(BEAT, beats):.3f} ms"
    outside = "work outside the engine"
    both = f"{outside} in a step of 0.5 s, with requests and heartbeat"
    summed = "sum of the first two rows and half of the third row"
    return [
        row(f"{outside} in each step", whole, "ms", at_most=0.3, note=told),
        row("additional time of a check for requests, every 0.5 s", look, "ms", note=agreed),
        row("additional time of a heartbeat, every second", beat, "ms", note=files),
        row(both, whole + look + beat / 2, "ms", at_most=0.3, note=summed),
    ]


def beside(folder: Path, data: str, steps: int, spec: ModelSpec) -> list[dict[str, float]]:
    """Returns a dict for each step of a model trained in this process. It maps each component of
    the trainer to its seconds between the engine's end of one step and its start of the next step.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    join_alone()
    hook = folder / "constant.py"
    hook.write_text(HOOK)
    recipe = Recipe(data=data, num_steps=steps, learning_rate=1e-3, hook=str(hook))
    run = local_run(folder / "run", spec, SHORT, recipe)
    trainer = loop.Trainer(run, attempt=1, device=torch.device("cpu"))
    found: list[dict[str, float]] = []
    spent = defaultdict[str, float](float)

    def watch(owner: Any, method: str, name: str) -> None:
        call = getattr(owner, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            done = call(*arguments, **named)
            spent[name] += time.perf_counter() - start
            return done

        setattr(owner, method, timed)

    for callback in trainer.callbacks:
        name = type(callback).__name__.lower()
        watch(callback, "before_step", name)
        watch(callback, "after_step", name)
    watch(trainer.watchdog, "after_step", "watchdog")
    watch(trainer.telemetry, "after_step", "telemetry")
    watch(trainer.bad_steps, "after_step", "recovery")
    watch(trainer.checkpoints, "poll", "recovery")
    watch(trainer.heartbeat, "after_step", "step recorded for the heartbeat")
    # Another thread calls these two functions and competes with the steps for the interpreter.
    watch(heartbeat, "write_rank_heartbeat", BEAT)
    watch(heartbeat, "update_state", BEAT)
    watch(trainer.batches, "local_batch", "next batch")
    watch(trainer.metrics, "add", "metrics")
    watch(trainer.requests, "take", REQUESTS)
    watch(torch.distributed, "broadcast", "broadcast")
    begin, ended = trainer.engine.begin_step, [time.perf_counter()]

    def begin_step(*arguments: Any) -> Any:
        # The dict is copied at once, because the other thread may add a name while it is read.
        found.append({"all": time.perf_counter() - ended[0], **spent.copy()})
        spent.clear()
        begun = begin(*arguments)
        ended[0] = time.perf_counter()
        return begun

    setattr(trainer.engine, "begin_step", begin_step)  # noqa: B010 - of an instance
    trainer.train()
    return found
