"""HLAT at demo scale: one real run whose checkpoints are scored; and small models trained in this
process for some hundred steps of the kit's native engine: what a spike does to them, and what
rounding does. All is made once, kept and used again.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
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
from kit.papers.hlat_training import PRECISION, SPIKES, Steps
from kit.papers.layers import kept, note_load
from kit.parallel.gradients import local
from kit.run import Run
from kit.trainer.spikes import WINDOW, stands_out

RUN = "llama-demo"
"""Where the run is, below the folder of the studies."""
STEPS = 60
CHECKPOINT_EVERY = 20
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
BATCH, SPIKE_BATCH, VALIDATION, MICRO_BATCH = 8, 12, 32, 4
"""Sequences of a step, of one beside which a spike is to stand out from the noise of text, of
the held-out loss, and of what is computed at once."""
VALIDATE_EVERY = 10
GARBLED = range(100, 106)
"""Batches whose tokens are replaced by random ones: a damaged shard. They are what makes the
spike."""
SAVE_EVERY, PATIENCE = 20, 2
"""Steps between checkpoints; spikes in a row until somebody acts."""
LOWER = 0.3
"""Factor of the learning rate where that is the answer."""
ANSWERS = ("no spike", "nothing", "skip", "roll back", "lower rate")
"""What is done about a spike."""


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


def demo_spikes(directory: str | Path, data: str | Path) -> dict[str, Steps]:
    """Returns the steps of a small model without a spike, and with one that is answered in four
    ways.
    """
    return kept(
        Path(directory) / SPIKES, lambda: train_with_spike(Dataset.open(data), SPIKE_RECIPE)
    )


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
    data: Dataset, recipe: Recipe, precision: str = "fp32", batch_size: int = BATCH
) -> Iterator["SmallTraining"]:
    """Gives a small model in training, alone in a process group that lives as long."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield SmallTraining(data, recipe, precision, batch_size)
    finally:
        dist.destroy_process_group()


class SmallTraining:
    """The kit's native engine with one small model, whose numbers are rounded after each step."""

    def __init__(self, data: Dataset, recipe: Recipe, precision: str, batch_size: int) -> None:
        computed, self.rounded = PRECISIONS[precision]
        self.recipe = recipe
        self.batch_size = batch_size
        self.samples = data.samples("train", SPEC.sequence_length, recipe.seed)
        held_out = data.samples("validation", SPEC.sequence_length, recipe.seed)
        self.held_out = torch.from_numpy(held_out.batch(0, VALIDATION))
        plan = Plan(micro_batch_size=MICRO_BATCH, global_batch_size=batch_size, precision=computed)
        self.engine = NativeEngine(SPEC, plan, recipe, torch.device("cpu"))
        self.generator = torch.Generator().manual_seed(recipe.seed)
        self.round()

    def batch(self, number: int) -> Tensor:
        """Returns one batch of text, [B, T + 1]."""
        return torch.from_numpy(self.samples.batch(number * self.batch_size, self.batch_size))

    @torch.no_grad()
    def round(self) -> None:
        """Rounds weights and moments to the numbers that they are kept in."""
        if self.rounded is not None:
            for number in map(local, self.engine.state_dict().values()):
                number.copy_(self.rounded(number, self.generator))

    def save(self) -> Any:
        """Returns a copy of weights and optimizer."""
        weights = self.engine.decoders[0].state_dict()
        return copy.deepcopy((weights, self.engine.optimizer.state_dict()))

    def restore(self, saved: Any) -> None:
        """Takes back what `save` returned."""
        weights, moments = copy.deepcopy(saved)  # which training would change
        self.engine.decoders[0].load_state_dict(weights)
        self.engine.optimizer.load_state_dict(moments)


def train_with_spike(data: Dataset, recipe: Recipe) -> dict[str, Steps]:
    """Returns the steps of runs in which some batches are garbled, one for each of ANSWERS.

    skip: a step whose loss stands out is not applied (a form of PaLM's skipped batches that needs
    no restart). roll back: after PATIENCE such losses the last checkpoint is restored and the data
    since is left out (PaLM, arXiv 2204.02311, section 5.1). lower rate: after as many, the learning
    rate is cut for good (as OPT did, arXiv 2205.01068, section 2.5). What comes before the spike is
    the same in all, and is trained once. Each row: step, loss, grad_norm, learning_rate,
    stands_out, applied, validation_loss or None.
    """
    with small_training(data, recipe, batch_size=SPIKE_BATCH) as training:
        common = _answered(training, range(1, GARBLED.start), "no spike", [])
        saved = training.save()
        losses = [row["loss"] for row in common]
        arms = {}
        for answer in ANSWERS:
            training.restore(saved)
            steps = range(GARBLED.start, recipe.num_steps + 1)
            arms[answer] = common + _answered(training, steps, answer, losses)
    return arms


def train_in(data: Dataset, recipe: Recipe, precision: str) -> Steps:
    """Returns the steps of a run in one of PRECISIONS, rows as of `train_with_spike`."""
    with small_training(data, recipe, precision) as training:
        return _answered(training, range(1, recipe.num_steps + 1), "no spike", [])


def _answered(training: SmallTraining, steps: range, answer: str, losses: list[float]) -> Steps:
    """Returns the rows of some steps; each takes a batch of its own, so a roll-back never reads
    one again.
    """
    recipe = training.recipe
    engine = training.engine
    before = losses[-WINDOW:]
    rows = []
    saved = training.save()
    spikes = 0
    factor = 1.0
    noise = torch.Generator().manual_seed(recipe.seed)

    def is_bad(loss: float) -> bool:
        return stands_out(loss, before) or not math.isfinite(loss)

    for step in steps:
        if step % SAVE_EVERY == 0 and spikes == 0:
            saved = training.save()
        tokens = training.batch(step)
        if step in GARBLED and answer != "no spike":
            tokens = torch.randint(0, SPEC.vocab_size, tokens.shape, generator=noise)
        rate = factor * recipe.learning_rate_at(step)
        result = engine.begin_step(
            tokens, rate, lambda loss, _: not (answer == "skip" and is_bad(loss))
        )
        loss, norm = result.read()
        training.round()
        bad = is_bad(loss)
        spikes = spikes + 1 if bad else 0
        before = [*before, loss][-WINDOW:]
        if spikes == PATIENCE and answer == "roll back":
            training.restore(saved)
            spikes = 0
        elif spikes == PATIENCE and answer == "lower rate":
            factor = LOWER
        validate = step % VALIDATE_EVERY == 0
        rows.append(
            {
                "step": step,
                "loss": loss,
                "grad_norm": norm,
                "learning_rate": rate,
                "stands_out": bad,
                "applied": not (bad and answer == "skip"),
                "validation_loss": engine.validation_loss(training.held_out) if validate else None,
            }
        )
    return rows
