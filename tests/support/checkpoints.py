"""Checkpoint writers and manifest fields for the tests of checkpoints."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.engines.neuron.checkpoint import NxdCheckpoints
from kit.run.checkpoint import Checkpoints
from kit.run.checkpoint_writer import CheckpointWriter

ALONE = Plan()


def facts(spec: ModelSpec, step: int, plan: Plan = ALONE) -> dict[str, Any]:
    """Returns the manifest fields that depend on a step. The writer adds attempt, time and
    files.
    """
    samples = step * plan.global_batch_size
    return {
        "step": step,
        "samples": samples,
        "tokens": samples * spec.sequence_length,
        "seed": 1234,
        "spec": spec,
        "plan": plan,
    }


def writer_in(directory: Path, keep_last: int = 2) -> CheckpointWriter:
    return CheckpointWriter(Checkpoints(directory), attempt=1, keep_last=keep_last, keep_every=None)


def nxd_in(directory: Path, spec: ModelSpec, engine: Any) -> NxdCheckpoints:
    recipe = Recipe(data="none", num_steps=10)
    run: Any = SimpleNamespace(checkpoints=Checkpoints(directory), spec=spec, recipe=recipe)
    return NxdCheckpoints(run, engine, attempt=1)
