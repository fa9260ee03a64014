"""HLAT at demo scale: one real run whose checkpoints are scored, and a small model that this
process trains for a hundred steps in four precisions. Both are made once and read again later.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from cluster.state import JobState
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.data.dataset import Dataset
from kit.engines.native import NativeEngine
from kit.errors import RunError
from kit.papers.hlat_training import PRECISION, Steps
from kit.papers.layers import kept, note_load
from kit.parallel.gradients import local
from kit.run import Run

RUN = "llama-demo"
"""Where the run is, below the folder of the studies."""
STEPS = 60
CHECKPOINT_EVERY = 20
PLAN = Plan(data_parallel=2, micro_batch_size=4, global_batch_size=8)
SUITE = "curve"
"""What is scored at each checkpoint: a part of the items."""
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
SPEC = ModelSpec.llama(
    name="llama-small",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=176,
    vocab_size=4096,
    sequence_length=64,
)
BATCH_SIZE = 8
"""Sequences of a training step of the small model."""
MICRO_BATCH_SIZE = 4
"""Sequences that the small model computes at once."""
VALIDATION_SAMPLES = 32
"""Sequences of the validation loss."""
VALIDATE_EVERY = 10
"""Steps of the small model between two validation losses."""


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
    run = None
    if (folder / "job.json").exists():
        run = Run.open(folder)
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


def demo_precision(directory: str | Path, data: str | Path) -> dict[str, Steps]:
    """Returns the steps of a small model in each of four precisions."""
    return kept(
        Path(directory) / PRECISION,
        lambda: {name: train_in(Dataset.open(data), PRECISION_RECIPE, name) for name in PRECISIONS},
    )


def round_to_nearest(x: Tensor, generator: torch.Generator) -> Tensor:
    """Returns fp32 numbers as bf16, each rounded to the nearest."""
    return x.bfloat16()


def round_stochastically(x: Tensor, generator: torch.Generator) -> Tensor:
    """Returns fp32 numbers as bf16, each rounded up or down with the odds that make the mean exact.

    bf16 is fp32 without its lower 16 bits, so 16 random bits are added to them and then cut off.
    Source: AWS Neuron documentation, "Neuron rounding modes"; Gupta et al. 2015 (arXiv 1502.02551),
    section 3.
    """
    noise = torch.randint(0, 1 << 16, x.shape, generator=generator, dtype=torch.int32)
    return ((x.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32).bfloat16()


PRECISIONS: dict[str, tuple[Literal["fp32", "bf16"], Callable[..., Tensor] | None]] = {
    "fp32": ("fp32", None),
    "bf16, fp32 master weights": ("bf16", None),
    "pure bf16": ("bf16", round_to_nearest),
    "pure bf16, stochastic": ("bf16", round_stochastically),
}
"""In which numbers the forward and backward pass is computed, and how weights and both moments of
AdamW are rounded to bf16 between steps; None: they are kept in fp32."""


@contextlib.contextmanager
def small_training(
    data: Dataset, recipe: Recipe, precision: str = "fp32"
) -> Iterator["SmallTraining"]:
    """Gives a small model in training, alone in a process group that ends with the block."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield SmallTraining(data, recipe, precision)
    finally:
        dist.destroy_process_group()


class SmallTraining:
    """The kit's native engine with one small model, whose numbers are rounded after each step."""

    def __init__(self, data: Dataset, recipe: Recipe, precision: str) -> None:
        compute_dtype, self.rounding = PRECISIONS[precision]
        self.samples = data.samples("train", SPEC.sequence_length, recipe.seed)
        validation = data.samples("validation", SPEC.sequence_length, recipe.seed)
        self.validation_batch = torch.from_numpy(validation.batch(0, VALIDATION_SAMPLES))
        plan = Plan(
            micro_batch_size=MICRO_BATCH_SIZE,
            global_batch_size=BATCH_SIZE,
            precision=compute_dtype,
        )
        self.engine = NativeEngine(SPEC, plan, recipe, torch.device("cpu"))
        self.generator = torch.Generator().manual_seed(recipe.seed)
        self.round()

    def batch(self, number: int) -> Tensor:
        """Returns one batch of text, [B, T + 1]."""
        return torch.from_numpy(self.samples.batch(number * BATCH_SIZE, BATCH_SIZE))

    @torch.no_grad()
    def round(self) -> None:
        """Rounds weights and moments to the numbers that they are stored in."""
        if self.rounding is None:
            return
        for tensor in self.engine.state_dict().values():
            stored = local(tensor)
            stored.copy_(self.rounding(stored, self.generator))


def train_in(data: Dataset, recipe: Recipe, precision: str) -> Steps:
    """Returns the steps of a run in one of PRECISIONS.

    Each row has step, loss, grad_norm, learning_rate and, every VALIDATE_EVERY steps,
    validation_loss, which is None otherwise. Losses are in nats per token.
    """
    rows = []
    with small_training(data, recipe, precision) as training:
        for step in range(1, recipe.num_steps + 1):
            rate = recipe.learning_rate_at(step)
            loss, grad_norm = training.engine.train_step(training.batch(step), rate)
            training.round()
            validation_loss = None
            if step % VALIDATE_EVERY == 0:
                validation_loss = training.engine.validation_loss(training.validation_batch)
            rows.append(
                {
                    "step": step,
                    "loss": loss,
                    "grad_norm": grad_norm,
                    "learning_rate": rate,
                    "validation_loss": validation_loss,
                }
            )
    return rows
