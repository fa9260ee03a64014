"""The trainings of the HLAT paper at demo scale, on this machine: one complete run whose
checkpoints are scored, and a small model that is trained in four precisions and with two
learning-rate schedules.

The small model is trained in this process. Each training is made once, and its result is stored for
later calls.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

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
from kit.papers.hlat_training import AVERAGING, NUM_AVERAGED, PRECISION, Steps
from kit.papers.layers import read_or_make, record_load
from kit.parallel.gradients import local
from kit.run import Run

RUN = "llama-demo"
"""Name of the run directory of the complete demo run."""
STEPS = 60
"""Number of training steps of the complete demo run."""
CHECKPOINT_EVERY = 20
"""Number of training steps between two checkpoints of the complete demo run."""
PLAN = Plan(data_parallel=2, micro_batch_size=4, global_batch_size=8)
SUITE = "curve"
"""Name of the task suite (`kit.evaluate.benchmarks.SUITES`) with which each checkpoint is scored.
The suite contains only a part of each task's items."""
PRECISION_RECIPE = Recipe(
    data="",
    num_steps=100,
    learning_rate=3e-4,
    min_learning_rate=3e-5,
    warmup_steps=20,
    cosine_floor="clamped",
)
"""Recipe of the small model that is trained in four precisions, with the learning rates of HLAT's
7B model. With larger learning rates, fewer updates would be so small that rounding to bf16 loses
them."""
AVERAGING_RECIPE = Recipe(
    data="", num_steps=400, learning_rate=1e-2, min_learning_rate=0.0, warmup_steps=10
)
"""Recipe of the small model whose weights are averaged. The learning rate is so large that the
weights fluctuate clearly from step to step."""
AVERAGING_SCHEDULES = ("constant", "cosine")
"""Learning-rate schedules (`Recipe.schedule`) with which the small model is trained for the study
of averaged weights."""
WEIGHTS_EVERY = 20
"""Number of training steps between two copies of the weights that are averaged."""
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
"""Number of sequences per training step of the small model."""
MICRO_BATCH_SIZE = 4
"""Number of sequences per micro-batch of the small model."""
VALIDATION_SAMPLES = 32
"""Number of sequences over which the validation loss of the small model is computed."""
VALIDATE_EVERY = 10
"""Number of training steps between two validation losses of the small model."""


def demo_run(directory: str | Path, data: str | Path) -> Run:
    """Returns a finished run that was trained with HLAT's optimizer and schedule, and whose
    checkpoints are all scored.

    Makes the run if it does not exist. Tasks whose data are not on this machine are not scored.
    `kit eval-data` builds these data. `data` is a dataset made by `kit data build` with a
    vocabulary of at most 4,096.

    Raises:
        RunError: The run did not finish, or a checkpoint could not be scored.
    """
    from kit.evaluate.follow import follow_run
    from kit.launcher import launch

    folder = Path(directory) / RUN
    run = None
    if (folder / "job.json").exists():
        run = Run.open(folder)
    if run is None or run.job.status().state is JobState.LOST:
        record_load(directory)
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
    """Trains the small model in each of four precisions, or reads the stored result. Returns a dict
    from the name of the precision to rows, one per training step, with losses and gradient norm.
    """
    return read_or_make(
        Path(directory) / PRECISION,
        lambda: {name: train_in(Dataset.open(data), PRECISION_RECIPE, name) for name in PRECISIONS},
    )


def demo_averaging(directory: str | Path, data: str | Path) -> dict[str, Steps]:
    """Trains the small model with each of the schedules in AVERAGING_SCHEDULES, or reads the stored
    result. Returns a dict from the name of the schedule to the rows of `train_and_average`.
    """
    return read_or_make(
        Path(directory) / AVERAGING,
        lambda: {
            name: train_and_average(Dataset.open(data), AVERAGING_RECIPE.replace(schedule=name))
            for name in AVERAGING_SCHEDULES
        },
    )


def round_to_nearest(x: Tensor, generator: torch.Generator) -> Tensor:
    """Returns fp32 numbers as bf16, each rounded to the nearest bf16 number."""
    return x.bfloat16()


def round_stochastically(x: Tensor, generator: torch.Generator) -> Tensor:
    """Returns fp32 numbers as bf16, each rounded up or down at random so that the expected value is
    exact.

    A bf16 number is the upper half of an fp32 number. So 16 random bits are added to the lower 16
    bits of the fp32 number, and the lower 16 bits are then set to zero. Source: AWS Neuron
    documentation, "Neuron rounding modes"; Gupta et al. 2015 (arXiv 1502.02551), section 3.
    """
    noise = torch.randint(0, 1 << 16, x.shape, generator=generator, dtype=torch.int32)
    return ((x.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32).bfloat16()


PRECISIONS: dict[str, tuple[Literal["fp32", "bf16"], Callable[..., Tensor] | None]] = {
    "fp32": ("fp32", None),
    "bf16, fp32 master weights": ("bf16", None),
    "pure bf16": ("bf16", round_to_nearest),
    "pure bf16, stochastic": ("bf16", round_stochastically),
}
"""Maps the name of each precision to (dtype of the forward and backward pass, rounding function).
After each step, the rounding function rounds weights and both AdamW moments to bf16. If the
rounding function is None, weights and moments stay in fp32."""


@contextlib.contextmanager
def small_training(
    data: Dataset, recipe: Recipe, precision: str = "fp32"
) -> Iterator["SmallTraining"]:
    """Yields a `SmallTraining` in a process group with one rank. The process group ends with the
    `with` block.
    """
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield SmallTraining(data, recipe, precision)
    finally:
        dist.destroy_process_group()


class SmallTraining:
    """Training of the small model by the kit's native engine. After each step, weights and AdamW
    moments are rounded to the precision in which they are stored.
    """

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
        """Returns one training batch by its number, as token ids [BATCH_SIZE, sequence
        length + 1].
        """
        return torch.from_numpy(self.samples.batch(number * BATCH_SIZE, BATCH_SIZE))

    @torch.no_grad()
    def round(self) -> None:
        """Rounds weights and AdamW moments in place to the precision in which they are stored."""
        if self.rounding is None:
            return
        for tensor in self.engine.state_dict().values():
            stored = local(tensor)
            stored.copy_(self.rounding(stored, self.generator))


def train_in(data: Dataset, recipe: Recipe, precision: str) -> Steps:
    """Trains the small model in the precision with this name in PRECISIONS. Returns one row per
    training step.

    Columns: step, loss, grad_norm, learning_rate and validation_loss. Losses are in nats per token.
    validation_loss is None except every VALIDATE_EVERY steps.
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


def train_and_average(data: Dataset, recipe: Recipe) -> Steps:
    """Trains the small model in fp32, and computes the validation loss of its weights and of means
    of weights. Returns one row for every WEIGHTS_EVERY steps.

    Columns: step, and validation losses in nats per token: `1` of the weights at this step, and `N`
    of the mean of the last N copies of the weights, for each N in NUM_AVERAGED. The loss is None if
    there are fewer than N copies.
    """
    rows, copies = [], []
    with small_training(data, recipe) as training:
        weights = [local(parameter) for parameter in training.engine.parameters()]
        for step in range(1, recipe.num_steps + 1):
            training.engine.train_step(training.batch(step), recipe.learning_rate_at(step))
            if step % WEIGHTS_EVERY:
                continue
            copies.append([weight.detach().clone() for weight in weights])
            row: dict[str, Any] = {"step": step}
            for count in NUM_AVERAGED:
                row[str(count)] = None
                if count <= len(copies):
                    _set_weights(weights, _means(copies[-count:]))
                    row[str(count)] = training.engine.validation_loss(training.validation_batch)
            _set_weights(weights, copies[-1])
            rows.append(row)
    return rows


def _means(copies: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.stack(same).mean(0) for same in zip(*copies, strict=True)]


@torch.no_grad()
def _set_weights(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)
