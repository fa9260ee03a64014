"""The compile phase of a Neuron job: `neuron_parallel_compile python -m kit.train ...` records
graphs, trains nothing.

It runs the command with NEURON_EXTRACT_GRAPHS_ONLY set, in which graphs are written out instead of
executed, compiles them in parallel and puts them into NEURON_COMPILE_CACHE_URL, where the run finds
them. HLAT did four steps.
"""

import os

import torch

from kit.engines import build_engine
from kit.run import Run

STEPS = 4
"""Of github.com/awslabs/HLAT: the first steps make other graphs than those that follow."""


def is_compile_phase() -> bool:
    """Returns whether this process only records graphs."""
    return bool(os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY"))


def record_graphs(run: Run, device: torch.device) -> str:
    """Runs the steps of a run on batches of zeros and returns a sentence; it writes nothing into
    the run directory.

    Graphs depend on shapes alone, and losses are not computed here, so neither data nor checkpoint
    is read.
    """
    engine = build_engine(run.spec, run.plan, run.recipe, device)
    sequences = run.plan.global_batch_size // run.plan.data_parallel
    samples = torch.zeros(sequences, run.spec.sequence_length + 1, dtype=torch.int64)
    for step in range(1, STEPS + 1):
        engine.train_step(samples, run.recipe.learning_rate_at(step))
    if run.recipe.validation_every:
        engine.validation_loss(samples)
    return f"recorded the graphs of {STEPS} steps"
