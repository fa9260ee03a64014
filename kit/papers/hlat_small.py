"""Small models trained in this process for some hundred steps: what a spike does to them, and
what rounding does.
"""

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from kit.data.dataset import Dataset
from kit.model import build_decoder
from kit.recipe import Recipe
from kit.spec import ModelSpec
from kit.trainer.spikes import WINDOW, stands_out

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
BATCH, SPIKE_BATCH, VALIDATION = 8, 12, 32
"""Sequences of a step, of one beside which a spike is to stand out from the noise of text, and
of the held-out loss."""
VALIDATE_EVERY = 10
GARBLED = range(100, 106)
"""Batches whose tokens are replaced by random ones: a damaged shard. They are what makes the
spike."""
SAVE_EVERY, PATIENCE = 20, 2
"""Steps between checkpoints; spikes in a row until somebody acts."""
LOWER = 0.3
"""Factor of the learning rate where that is the answer."""

Answer = Literal["no spike", "nothing", "skip", "roll back", "lower rate"]
ANSWERS: tuple[Answer, ...] = get_args(Answer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """In which numbers a model is kept between steps, and computed."""

    name: str
    stored: torch.dtype
    """Of weights and both moments of AdamW."""
    computed: torch.dtype
    """Of the forward and backward pass."""
    stochastic: bool = False
    """How what is stored is rounded: else to the nearest."""


PRECISIONS = (
    Precision(name="fp32", stored=torch.float32, computed=torch.float32),
    Precision(name="bf16, fp32 master weights", stored=torch.float32, computed=torch.bfloat16),
    Precision(name="pure bf16", stored=torch.bfloat16, computed=torch.bfloat16),
    Precision(
        name="pure bf16, stochastic",
        stored=torch.bfloat16,
        computed=torch.bfloat16,
        stochastic=True,
    ),
)


def round_stochastically(x: Tensor, generator: torch.Generator) -> Tensor:
    """Returns fp32 numbers as bf16, each rounded up or down with the odds that make the mean exact.

    bf16 is fp32 without its lower 16 bits, so 16 random bits are added to them and then cut off.
    Source: AWS Neuron documentation, "Neuron rounding modes"; Gupta et al. 2015 (arXiv 1502.02551),
    section 3.
    """
    noise = torch.randint(0, 1 << 16, x.shape, generator=generator, dtype=torch.int32)
    return ((x.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32).bfloat16()


class SmallTraining:
    """One small model in training by torch's AdamW in fp32; all that is stored is then rounded
    to its numbers.
    """

    def __init__(
        self,
        data: Dataset,
        recipe: Recipe,
        precision: Precision = PRECISIONS[0],
        batch_size: int = BATCH,
    ) -> None:
        self.recipe, self.precision, self.batch_size = recipe, precision, batch_size
        self.samples = data.samples("train", SPEC.sequence_length, recipe.seed)
        held_out = data.samples("validation", SPEC.sequence_length, recipe.seed)
        self.held_out = torch.from_numpy(held_out.batch(0, VALIDATION))
        self.stored = build_decoder(SPEC, seed=recipe.seed).to(precision.stored).float()
        self.model = copy.deepcopy(self.stored).to(precision.computed)
        betas, decay = (recipe.beta1, recipe.beta2), recipe.weight_decay
        self.adamw = torch.optim.AdamW(
            self.stored.parameters(), betas=betas, eps=recipe.eps, weight_decay=decay
        )
        self.generator = torch.Generator().manual_seed(recipe.seed)

    def gradients(self, tokens: Tensor) -> tuple[float, float]:
        """Computes gradients of tokens [B, T + 1], clipped; returns loss and gradient norm
        before clipping.
        """
        self.model.load_state_dict(self.stored.state_dict())
        self.model.zero_grad()
        loss = self._loss(tokens)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.recipe.gradient_clip or math.inf
        )
        return loss.item(), norm.item()

    @torch.no_grad()
    def update(self, learning_rate: float) -> None:
        """Applies the gradients."""
        for parameter, weight in zip(
            self.model.parameters(), self.stored.parameters(), strict=True
        ):
            assert parameter.grad is not None
            weight.grad = parameter.grad.float()
        self.adamw.param_groups[0]["lr"] = learning_rate
        self.adamw.step()
        for weight, moments in self.adamw.state.items():
            for number in (moments["exp_avg"], moments["exp_avg_sq"], weight):
                number.copy_(self._rounded(number))

    def _rounded(self, number: Tensor) -> Tensor:
        stochastic = self.precision.stochastic
        return (
            round_stochastically(number, self.generator)
            if stochastic
            else number.to(self.precision.stored)
        )

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Returns the loss on held-out text with the weights as stored, nats per token."""
        self.model.load_state_dict(self.stored.state_dict())
        return sum(self._loss(part).item() for part in self.held_out.split(16)) * 16 / VALIDATION

    def _loss(self, tokens: Tensor) -> Tensor:
        return self.model(tokens[:, :-1], tokens[:, 1:])

    def batch(self, number: int) -> Tensor:
        """Returns one batch of text, [B, T + 1]."""
        return torch.from_numpy(self.samples.batch(number * self.batch_size, self.batch_size))

    def save(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns copies of all that is stored."""
        return copy.deepcopy((self.stored.state_dict(), self.adamw.state_dict()))

    def restore(self, saved: tuple[dict[str, Any], dict[str, Any]]) -> None:
        """Takes back what `save` returned."""
        self.stored.load_state_dict(saved[0])
        self.adamw.load_state_dict(copy.deepcopy(saved[1]))  # which would be changed with it


def train_with_spike(
    data: Dataset, recipe: Recipe, answers: Sequence[Answer]
) -> dict[str, list[dict[str, Any]]]:
    """Returns the steps of runs in which some batches are garbled, one for each answer to that.

    skip: a step whose loss stands out is not applied (a form of PaLM's skipped batches that needs
    no restart). roll back: after PATIENCE such losses the last checkpoint is restored and the data
    since is left out (PaLM, arXiv 2204.02311, section 5.1). lower rate: after as many, the learning
    rate is cut for good (as OPT did, arXiv 2205.01068, section 2.5). What comes before the spike is
    the same in all, and is trained once. Each row: step, loss, grad_norm, learning_rate,
    stands_out, applied, validation_loss or None.
    """
    training = SmallTraining(data, recipe, batch_size=SPIKE_BATCH)
    common = _answered(training, range(1, GARBLED.start), "no spike", [])
    saved, losses = training.save(), [row["loss"] for row in common]
    arms = {}
    for answer in answers:
        training.restore(saved)
        arms[answer] = common + _answered(
            training, range(GARBLED.start, recipe.num_steps + 1), answer, losses
        )
    return arms


def _answered(
    training: SmallTraining, steps: range, answer: Answer, losses: list[float]
) -> list[dict[str, Any]]:
    """Returns the rows of some steps; each takes a batch of its own, so a roll-back never reads
    one again.
    """
    recipe, before, rows = training.recipe, losses[-WINDOW:], []
    saved, spikes, factor = training.save(), 0, 1.0
    noise = torch.Generator().manual_seed(recipe.seed)
    for step in steps:
        if step % SAVE_EVERY == 0 and spikes == 0:
            saved = training.save()
        tokens = training.batch(step)
        if step in GARBLED and answer != "no spike":
            tokens = torch.randint(0, SPEC.vocab_size, tokens.shape, generator=noise)
        rate = factor * recipe.learning_rate_at(step)
        loss, norm = training.gradients(tokens)
        out = stands_out(loss, before) or not math.isfinite(loss)
        applied = not (out and answer == "skip")
        if applied:
            training.update(rate)
        spikes, before = (spikes + 1 if out else 0), [*before, loss][-WINDOW:]
        if spikes == PATIENCE and answer == "roll back":
            training.restore(saved)
            spikes = 0
        elif spikes == PATIENCE and answer == "lower rate":
            factor = LOWER
        validation = training.validation_loss() if step % VALIDATE_EVERY == 0 else None
        rows.append(
            {
                "step": step,
                "loss": loss,
                "grad_norm": norm,
                "learning_rate": rate,
                "stands_out": out,
                "applied": applied,
                "validation_loss": validation,
            }
        )
    return rows


def train_in(data: Dataset, recipe: Recipe, precision: Precision) -> list[dict[str, Any]]:
    """Returns the steps of a run in some precision, rows as of `train_with_spike`."""
    return _answered(
        SmallTraining(data, recipe, precision), range(1, recipe.num_steps + 1), "no spike", []
    )
