"""Small models trained in this process for some hundred steps: what a spike does to them, and what rounding does."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from kit.data.dataset import Dataset
from kit.data.samples import Samples
from kit.model import build_decoder
from kit.recipe import Recipe
from kit.spec import ModelSpec
from kit.trainer.spikes import WINDOW, stands_out

SPEC = ModelSpec.llama(
    name="llama-small", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, ffn_hidden_size=176,
    vocab_size=4096, sequence_length=64,
)  # fmt: skip
BATCH, VALIDATION = 8, 32
"""Sequences of a step, and of the held-out loss."""
VALIDATE_EVERY = 10
GARBLED = range(80, 86)
"""Batches whose tokens are replaced by random ones: a damaged shard. They are what makes the spike."""
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
    Precision(name="pure bf16, stochastic", stored=torch.bfloat16, computed=torch.bfloat16, stochastic=True),
)


def round_stochastically(x: Tensor, generator: torch.Generator) -> Tensor:
    """Returns fp32 numbers as bf16, each rounded up or down with the odds that make the mean exact.

    bf16 is fp32 without its lower 16 bits, so 16 random bits are added to them and then cut off. Source: AWS Neuron
    documentation, "Neuron rounding modes"; Gupta et al. 2015 (arXiv 1502.02551), section 3.
    """
    noise = torch.randint(0, 1 << 16, x.shape, generator=generator, dtype=torch.int32)
    return ((x.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32).bfloat16()


class SmallTraining:
    """One small model in training, with AdamW written out so that it says what is stored in which numbers."""

    def __init__(self, data: Dataset, recipe: Recipe, precision: Precision = PRECISIONS[0]) -> None:
        self.recipe, self.precision = recipe, precision
        self.samples = Samples(data.train, SPEC.sequence_length, recipe.seed)
        held_out = Samples(data.validation, SPEC.sequence_length, recipe.seed)
        self.held_out = torch.from_numpy(held_out.batch(0, VALIDATION))
        decoder = build_decoder(SPEC, seed=recipe.seed)
        self.weights = [parameter.detach().to(precision.stored) for parameter in decoder.parameters()]
        self.moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in self.weights]
        self.model, self.updates = decoder.to(precision.computed), 0
        self.generator = torch.Generator().manual_seed(recipe.seed)

    def gradients(self, tokens: Tensor) -> tuple[float, float]:
        """Computes gradients, clipped; returns loss and gradient norm before clipping.

        Args:
            tokens: [BATCH, T + 1].
        """
        with torch.no_grad():
            for parameter, weight in zip(self.model.parameters(), self.weights, strict=True):
                parameter.copy_(weight)
        self.model.zero_grad()
        loss = self._loss(tokens)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.gradient_clip or math.inf)
        return loss.item(), norm.item()

    @torch.no_grad()
    def update(self, learning_rate: float) -> None:
        """Applies the gradients: AdamW in fp32 on what is stored, rounded again where that is bf16."""
        recipe, self.updates = self.recipe, self.updates + 1
        for parameter, weight, (first, second) in zip(self.model.parameters(), self.weights, self.moments, strict=True):
            assert parameter.grad is not None
            gradient = parameter.grad.float()
            mean = torch.lerp(gradient, first.float(), recipe.beta1)
            square = torch.lerp(gradient**2, second.float(), recipe.beta2)
            root = (square / (1 - recipe.beta2**self.updates)).sqrt() + recipe.eps
            step = mean / (1 - recipe.beta1**self.updates) / root
            new = weight.float() * (1 - learning_rate * recipe.weight_decay) - learning_rate * step
            for stored, value in ((first, mean), (second, square), (weight, new)):
                stored.copy_(self._round(value))

    def _round(self, value: Tensor) -> Tensor:
        return round_stochastically(value, self.generator) if self.precision.stochastic else value

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Returns the loss on held-out text with the weights as stored, nats per token."""
        for parameter, weight in zip(self.model.parameters(), self.weights, strict=True):
            parameter.copy_(weight)
        return sum(self._loss(part).item() for part in self.held_out.split(16)) * 16 / VALIDATION

    def _loss(self, tokens: Tensor) -> Tensor:
        return self.model(tokens[:, :-1], tokens[:, 1:])

    def batch(self, number: int) -> Tensor:
        """Returns one batch of text, [BATCH, T + 1]."""
        return torch.from_numpy(self.samples.batch(number * BATCH, BATCH))

    def save(self) -> tuple[int, list[Tensor]]:
        """Returns updates done, and copies of all that is stored."""
        return self.updates, [tensor.clone() for tensor in self._stored()]

    def restore(self, saved: tuple[int, list[Tensor]]) -> None:
        """Takes back what `save` returned."""
        self.updates = saved[0]
        for tensor, old in zip(self._stored(), saved[1], strict=True):
            tensor.copy_(old)

    def _stored(self) -> list[Tensor]:
        return [*self.weights, *(moment for pair in self.moments for moment in pair)]


def train_with_spike(data: Dataset, recipe: Recipe, answers: Sequence[Answer]) -> dict[str, list[dict[str, Any]]]:
    """Returns the steps of runs in which some batches are garbled, one for each answer to that.

    skip: a step whose loss stands out is not applied (a form of PaLM's skipped batches that needs no restart). roll
    back: after PATIENCE such losses the last checkpoint is restored and the data since is left out (PaLM, arXiv
    2204.02311, section 5.1). lower rate: after as many, the learning rate is cut for good (as OPT did, arXiv
    2205.01068, section 2.5). What comes before the spike is the same in all, and is trained once. Each row: step, loss,
    grad_norm, learning_rate, stands_out, applied, validation_loss or None.
    """
    training = SmallTraining(data, recipe)
    common = _answered(training, range(1, GARBLED.start), "no spike", [])
    saved, losses = training.save(), [row["loss"] for row in common]
    arms = {}
    for answer in answers:
        training.restore(saved)
        arms[answer] = common + _answered(training, range(GARBLED.start, recipe.num_steps + 1), answer, losses)
    return arms


def _answered(training: SmallTraining, steps: range, answer: Answer, losses: list[float]) -> list[dict[str, Any]]:
    """Returns the rows of some steps; each takes a batch of its own, so a roll-back never reads one again."""
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
        rows.append({"step": step, "loss": loss, "grad_norm": norm, "learning_rate": rate, "stands_out": out,
                     "applied": applied, "validation_loss": validation})  # fmt: skip
    return rows


def train_in(data: Dataset, recipe: Recipe, precision: Precision) -> list[dict[str, Any]]:
    """Returns the steps of a run in some precision: step, loss, validation_loss or None."""
    training, rows = SmallTraining(data, recipe, precision), []
    for step in range(1, recipe.num_steps + 1):
        loss, _ = training.gradients(training.batch(step))
        training.update(recipe.learning_rate_at(step))
        validation = training.validation_loss() if step % VALIDATE_EVERY == 0 else None
        rows.append({"step": step, "loss": loss, "validation_loss": validation})
    return rows
