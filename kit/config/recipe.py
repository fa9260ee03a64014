"""Recipe: optimizer, learning-rate schedule, data, length and checkpoints of a training run.
Imports no torch.
"""

import dataclasses
import math
from typing import Any, Literal

from cluster.record import ConfigError, Record, field_doc, must
from kit.config.other_names import field_advice
from kit.config.spec import above_0

PROFILED = 100
"""Largest number of steps that can be profiled. The trace of more steps would have hundreds of
megabytes, and a rank keeps the complete trace in memory until it writes the file."""

Optimizer = Literal["adamw", "muon"]

above_0_or_null = must(lambda number: number > 0, "Give a number above 0, or null.")
from_0 = must(lambda number: number >= 0, "Give 0 or more.")
below_1 = must(lambda number: 0 <= number < 1, "Give at least 0 and below 1.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSource(Record):
    """One source of a data mix. Its files are read as one data set, in one order."""

    paths: tuple[str, ...] = field_doc(
        "token files of the source: folders made by `kit data build` with the tokenizer of"
        " recipe.data, Megatron prefixes (PREFIX.bin and .idx) with its vocabulary, or patterns"
        " of both (web/part_*)"
    )
    weight: float = field_doc(
        "weight of the source in the mix after the last of recipe.phases, in any unit; the"
        " resulting fractions are rounded to 1/65,536 of the sequences",
        default=1.0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataPhase(Record):
    """A part of the run in which the data sources have other weights.

    A new phase does not restart a source: reading continues where the phase before ended.
    """

    until_tokens: float = field_doc("number of tokens of the run after which the phase ends")
    weights: tuple[float, ...] = field_doc(
        "weights of the data sources in this phase, one for each of recipe.sources; 0: the"
        " source is not read"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningRateFactors(Record):
    """Factors on the learning rate of the schedule, one for each group of weights
    (`kit.config.weight_groups`).
    """

    matrices: float = field_doc(
        "factor for the matrices of attention and feed-forward", from_0, default=1.0
    )
    embedding: float = field_doc(
        "factor for the embedding of tokens (also if it is the output projection, too) and of"
        " positions",
        from_0,
        default=1.0,
    )
    output: float = field_doc("factor for an output projection of its own", from_0, default=1.0)
    vectors: float = field_doc("factor for norms and biases", from_0, default=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(Record):
    """Optimizer, learning-rate schedule, data and checkpoints of one training run.

    Example:

        >>> import kit
        >>> recipe = kit.Recipe(data="data/demo", num_steps=100, warmup_steps=10)
        >>> [recipe.learning_rate_at(step) for step in (5, 10, 100)]
        [0.00015, 0.0003, 3e-05]
        >>> longer = recipe.replace(num_steps=200, checkpoint_every=50)

    Next: `kit.launch` trains with a recipe. `kit.papers.recipes.published_recipe("hlat-7b")`
    returns the settings that a paper states.
    """

    data: str = field_doc(
        "folder made by `kit data build`, with tokenizer, validation text and, if"
        " recipe.sources is empty, training text. A pattern (web/part_*) reads several parts of"
        " a dataset as one dataset."
    )
    num_steps: int = field_doc(
        "number of optimizer steps of the whole run",
        above_0,
        must(lambda steps: steps < 2**53, "Give less than 2**53, which is what metrics can count."),
    )
    learning_rate: float = field_doc(
        "highest learning rate, reached at the end of warm-up", above_0, default=3e-4
    )
    min_learning_rate: float = field_doc(
        "learning rate at the end of the schedule and after it", from_0, default=3e-5
    )
    schedule: Literal["cosine", "wsd", "constant"] = field_doc(
        "learning-rate schedule after warm-up. cosine: falls along a cosine to"
        " min_learning_rate, as in the Frontier and HLAT papers. wsd: stays at learning_rate,"
        " then falls along decay_shape (arXiv 2404.06395, 2405.18392). constant: stays at"
        " learning_rate to the end.",
        default="cosine",
    )
    warmup_steps: int = field_doc("number of steps of linear warm-up", from_0, default=0)
    decay_steps: int | None = field_doc(
        "step at which the schedule ends; default: num_steps, or for a resumed run num_steps of"
        " its first launch",
        above_0_or_null,
        default=None,
    )
    decay_share: float = field_doc(
        "fraction of the steps up to decay_steps, at their end, in which the schedule wsd falls",
        must(lambda share: 0 < share <= 1, "Give a number above 0 up to 1."),
        default=0.1,
    )
    decay_shape: Literal["linear", "sqrt", "cosine"] = field_doc(
        "how the schedule wsd falls. linear: along a line. sqrt: along 1 - sqrt(x), steep at"
        " first (arXiv 2405.18392). cosine: along half a cosine.",
        default="linear",
    )
    cosine_floor: Literal["rescaled", "clamped"] = field_doc(
        "how the cosine reaches min_learning_rate. rescaled: it ends there, as in Megatron."
        " clamped: it falls towards zero and stops there, as in HLAT.",
        default="rescaled",
    )
    optimizer: Optimizer = field_doc(
        "optimizer. adamw: AdamW for all weights. muon: Muon for the matrices of attention and"
        " feed-forward, each as a whole on every layout, and AdamW for embeddings, output, norms"
        " and biases. Its updates are scaled so that one learning rate serves both (arXiv"
        " 2502.16982; engine native).",
        default="adamw",
    )
    muon_momentum: float = field_doc("Muon: momentum, which is Nesterov's", below_1, default=0.95)
    beta1: float = field_doc("AdamW: decay of the first moment", below_1, default=0.9)
    beta2: float = field_doc("AdamW: decay of the second moment", below_1, default=0.95)
    eps: float = field_doc("AdamW: number added to the denominator", above_0, default=1e-8)
    mup_base_width: int | None = field_doc(
        "hidden_size at which learning_rate and the initial weights were chosen. The learning rates"
        " and initial weights of a model of another width then follow muP's rule for Adam (Tensor"
        " Programs V, arXiv 2203.03466, table 3; `kit.config.weight_groups`; engine native);"
        " null: they do not depend on the width",
        above_0_or_null,
        default=None,
    )
    weight_decay: float = field_doc(
        "weight decay, which is multiplied by the learning rate (arXiv 1711.05101)",
        from_0,
        default=0.1,
    )
    weight_decay_on: Literal["all", "matrices"] = field_doc(
        "weights that decay. all: all weights, including norms and biases, as in HLAT."
        " matrices: weights with two dimensions, including embeddings, but no norms and biases,"
        " as in GPT-3 and Llama code (engine native).",
        default="all",
    )
    learning_rate_factors: LearningRateFactors = field_doc(
        "factor on the learning rate for each group of weights (engine native); default: 1",
        default_factory=LearningRateFactors,
    )
    gradient_clip: float | None = field_doc(
        "largest norm of all gradients; gradients with a larger norm are scaled down to it;"
        " null: no clipping",
        above_0_or_null,
        default=1.0,
    )
    z_loss: float = field_doc(
        "weight of the z-loss: z_loss x mean over the tokens of log(Z)^2 is added to the loss that"
        " is minimised, where Z is the denominator of the softmax (PaLM, arXiv 2204.02311, section"
        " 5, has 1e-4, OLMo 2 1e-5; engine native); 0: none",
        from_0,
        default=0.0,
    )
    seed: int = field_doc(
        "seed from which the initial weights and the data order are computed", default=1234
    )
    validation_every: int | None = field_doc(
        "number of steps from one computation of the validation loss to the next; default: it"
        " is never computed",
        above_0_or_null,
        default=None,
    )
    validation_sequences: int = field_doc(
        "number of sequences over which the validation loss is computed, at most the size of"
        " the validation set; they are always the same sequences",
        above_0,
        default=64,
    )
    checkpoint_every: int | None = field_doc(
        "number of steps from one checkpoint to the next; the last step always has a"
        " checkpoint; default: only the last step",
        above_0_or_null,
        default=None,
    )
    on_nan: Literal["stop", "skip", "roll_back"] = field_doc(
        "reaction to a loss or gradient norm that is not finite (skip and roll_back"
        " need the engine native)",
        default="stop",
    )
    on_spike: Literal["ignore", "stop", "skip", "roll_back"] = field_doc(
        "reaction to a loss spike: a loss above the median of the 40 losses before it by more"
        " than 12 median absolute deviations (skip and roll_back need engine native)",
        default="ignore",
    )
    hung_after_s: float | None = field_doc(
        "seconds after which a step counts as hung and its rank ends the attempt, if it also"
        " takes 10 times as long as the longest recent step; default above 64 ranks: 600; null"
        " or engine neuron: no limit",
        above_0_or_null,
        default=150.0,
    )
    keep_last: int = field_doc("number of newest checkpoints that are kept", above_0, default=2)
    keep_every: int | None = field_doc(
        "interval in steps: checkpoints at multiples of it are never deleted; default: only the"
        " newest keep_last checkpoints are kept",
        above_0_or_null,
        default=None,
    )
    mask_documents: bool = field_doc(
        "whether tokens attend only to their own document, as in Llama 3 (arXiv 2407.21783,"
        " 3.2). Positions are counted through the whole sequence. The Frontier and HLAT papers"
        " train without it. Needs engine native and no pipeline.",
        default=False,
    )
    init_from: str | None = field_doc(
        "folder in Hugging Face's format (config.json, *.safetensors) whose weights the run"
        " starts from (engines native and deepspeed); null: random initial weights",
        default=None,
    )
    hook: str | None = field_doc(
        "Python file with on_step(state) -> dict of numbers, which are added to the metrics of"
        " each step (kit/trainer/hook.py). Each launch and resume copies it into the run"
        " directory as hook.py. It may import modules from the folder of the original file if"
        " the job can read that folder.",
        default=None,
    )
    profile_steps: tuple[int, int] | None = field_doc(
        "first and last step that the profiler records into RUN/profile, for ui.perfetto.dev:"
        " at most 100 steps (engines native and deepspeed); default: none is recorded",
        default=None,
    )
    profile_ranks: tuple[int, ...] = field_doc(
        "ranks whose steps the profiler records", default=(0,)
    )
    sources: tuple[DataSource, ...] = field_doc(
        "data sources that are mixed for training; default: the training text in recipe.data",
        default=(),
    )
    phases: tuple[DataPhase, ...] = field_doc(
        "phases at the start of the run in which the sources have other weights, in order",
        default=(),
    )

    @classmethod
    def unknown_key_advice(cls, key: str, value: Any) -> str:
        return field_advice(cls, key)

    def __post_init__(self) -> None:
        super().__post_init__()
        first, last = self.profile_steps or (1, 1)
        end = self.decay_steps or self.num_steps
        for name, holds, allowed in (
            (
                "profile_steps",
                1 <= first <= last < first + PROFILED,
                f"first and last of up to {PROFILED} steps",
            ),
            (
                "min_learning_rate",
                self.min_learning_rate <= self.learning_rate,
                f"at most learning_rate {self.learning_rate}",
            ),
            ("warmup_steps", self.warmup_steps <= end, f"at most the decay end {end}"),
        ):
            _require(name, getattr(self, name), holds, allowed)
        self._check_mix()

    def _check_mix(self) -> None:
        for i, source in enumerate(self.sources):
            _require(f"sources[{i}].paths", source.paths, len(source.paths) > 0, "one path or more")
        own = tuple(source.weight for source in self.sources)
        begin = 0.0
        _require(
            "phases",
            len(self.phases),
            bool(own) or not self.phases,
            "recipe.sources too, whose weights they are",
        )
        for i, phase in enumerate(self.phases):
            _require(
                f"phases[{i}].until_tokens",
                phase.until_tokens,
                begin < phase.until_tokens < math.inf,
                f"a number above {begin:g}",
            )
            begin = phase.until_tokens
        allowed = f"{len(own)} numbers of 0 or more, one for each of recipe.sources, not all 0"
        mixes = {"sources: weights": own}
        for i, phase in enumerate(self.phases):
            mixes[f"phases[{i}].weights"] = phase.weights
        if not own:
            mixes = {}
        for name, weights in mixes.items():
            are_finite = all(0 <= weight < math.inf for weight in weights)
            is_sound = are_finite and 0 < sum(weights) < math.inf
            _require(name, weights, is_sound and len(weights) == len(own), allowed)

    def learning_rate_at(self, step: int) -> float:
        """Returns the learning rate of optimizer step `step`. The first step is 1.

        During warm-up it rises linearly to the peak, `learning_rate`. The floor is
        `min_learning_rate`. After warm-up the result depends on `schedule`:

        - `constant`: It stays at the peak.
        - `wsd`: It stays at the peak, and falls to the floor in the last `decay_share` of the steps
          up to `decay_steps`: floor + (peak - floor) c. With the fraction x of these steps, c is
          1 - x for `decay_shape` `linear`, 1 - sqrt(x) for `sqrt`, and a cosine from 1 to 0 for
          `cosine`, as in torchtitan.
        - `cosine`: It follows a cosine of height c, from 1 to 0, until `decay_steps`. With
          `cosine_floor` `rescaled` the cosine runs from peak to floor: floor + (peak - floor) c
          (NeMo, Megatron). With `clamped` it runs towards zero and stops at the floor: max(floor,
          peak c), as in HLAT's released scheduler. The clamped cosine reaches the floor earlier.

        After `decay_steps`, `wsd` and `cosine` stay at the floor.
        """
        if 0 < self.warmup_steps >= step:
            return self.learning_rate * step / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        begin = self.warmup_steps
        end = self.decay_steps or self.num_steps
        if self.schedule == "wsd":
            begin = max(begin, end - round(self.decay_share * end))
            left = min(1.0, max(0.0, (end - step) / max(1, end - begin)))
            height = left
            if self.decay_shape == "sqrt":
                height = 1 - math.sqrt(1 - left)
            elif self.decay_shape == "cosine":
                height = 0.5 * (1 - math.cos(math.pi * left))
        else:
            progress = min(1.0, (step - begin) / max(1, end - begin))
            height = 0.5 * (1 + math.cos(math.pi * progress))
            if self.cosine_floor == "clamped":
                return max(self.min_learning_rate, self.learning_rate * height)
        return self.min_learning_rate + (self.learning_rate - self.min_learning_rate) * height


def _require(name: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"recipe.{name}: {value!r} is not allowed. Give {allowed}.")
