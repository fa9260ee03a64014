"""Recipe: optimizer, learning-rate schedule, data, length and checkpoints of a training run. No
torch.
"""

import dataclasses
import math
from typing import Literal

from cluster.record import ConfigError, Record, field_doc, must
from kit.config.spec import above_0

PROFILED = 100
"""Largest number of profiled steps. The trace of more steps would have hundreds of megabytes, and a
rank keeps the complete trace in memory before it writes the file."""

above_0_or_null = must(lambda number: number > 0, "Give a number above 0, or null.")
from_0 = must(lambda number: number >= 0, "Give 0 or more.")
below_1 = must(lambda number: 0 <= number < 1, "Give at least 0 and below 1.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSource(Record):
    """One source of a data mix. Its shards are read as a single data set, in a single order."""

    paths: tuple[str, ...] = field_doc(
        "folders made by `kit data build` with the tokenizer of recipe.data, Megatron prefixes"
        " (PREFIX.bin and .idx) of its vocabulary, or patterns of either (web/part_*)"
    )
    weight: float = field_doc(
        "share of the sequences, after the last of recipe.phases; any scale, rounded to 1/65,536 of"
        " the mix",
        default=1.0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataPhase(Record):
    """A part of the run with its own weights of the data sources.

    A new phase does not restart a source: each source is read on from where the phase before ended.
    """

    until_tokens: float = field_doc("tokens of the run after which it ends")
    weights: tuple[float, ...] = field_doc("one for each of recipe.sources; 0: not read")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(Record):
    """Optimizer, learning-rate schedule, data and checkpoint cadence of one run.

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
        "folder made by `kit data build`: tokenizer, held-out text and, without sources, training"
        " text; or a pattern of its parts (web/part_*), which are read as one"
    )
    num_steps: int = field_doc(
        "optimizer steps of the whole run",
        above_0,
        must(lambda steps: steps < 2**53, "Give less than 2**53, which is what metrics can count."),
    )
    learning_rate: float = field_doc("peak learning rate", above_0, default=3e-4)
    min_learning_rate: float = field_doc(
        "learning rate at the end of the schedule", from_0, default=3e-5
    )
    schedule: Literal["cosine", "wsd", "constant"] = field_doc(
        "after warm-up: down to the floor along a cosine, as in both papers; or stable at the peak,"
        " then straight down (arXiv 2404.06395, 2405.18392); or at the peak to the end",
        default="cosine",
    )
    warmup_steps: int = field_doc("steps of linear warm-up", from_0, default=0)
    decay_steps: int | None = field_doc(
        "step at which the schedule ends (default: num_steps; of a resumed run, those of its first"
        " launch)",
        above_0_or_null,
        default=None,
    )
    decay_share: float = field_doc(
        "share of the steps up to decay_steps in which wsd goes down, the last",
        must(lambda share: 0 < share <= 1, "Give a number above 0 up to 1."),
        default=0.1,
    )
    cosine_floor: Literal["rescaled", "clamped"] = field_doc(
        "how the cosine meets its floor", default="rescaled"
    )
    beta1: float = field_doc("AdamW: decay of the first moment", below_1, default=0.9)
    beta2: float = field_doc("AdamW: decay of the second moment", below_1, default=0.95)
    eps: float = field_doc("AdamW: added to the denominator", above_0, default=1e-8)
    weight_decay: float = field_doc(
        "AdamW: weight decay, on every weight, norms included, as in HLAT", from_0, default=0.1
    )
    gradient_clip: float | None = field_doc(
        "largest global gradient norm", above_0_or_null, default=1.0
    )
    seed: int = field_doc("weights and data order", default=1234)
    validation_every: int | None = field_doc(
        "steps between losses on held-out text", above_0_or_null, default=None
    )
    validation_sequences: int = field_doc(
        "held-out sequences per validation, always the same ones; at most as many as there are",
        above_0,
        default=64,
    )
    checkpoint_every: int | None = field_doc(
        "steps between checkpoints (the last step always has one)", above_0_or_null, default=None
    )
    on_nan: Literal["stop", "skip", "roll_back"] = field_doc(
        "answer to a loss or gradient norm that is not finite (skip, roll_back: engine native)",
        default="stop",
    )
    on_spike: Literal["ignore", "stop", "skip", "roll_back"] = field_doc(
        "answer to a loss 12 median deviations above those before", default="ignore"
    )
    hung_after_s: float | None = field_doc(
        "a rank whose step takes this long, and 10 x those before, ends the attempt (null, or"
        " engine neuron: never; not given, above 64 ranks: 600)",
        above_0_or_null,
        default=150.0,
    )
    keep_last: int = field_doc("newest checkpoints kept", above_0, default=2)
    keep_every: int | None = field_doc(
        "checkpoints at multiples of this step are never deleted", above_0_or_null, default=None
    )
    mask_documents: bool = field_doc(
        "attention ends where a document does, as in Llama 3 (arXiv 2407.21783, 3.2); positions go"
        " on through a sequence. Off in both papers. Engine native, without a pipeline",
        default=False,
    )
    init_from: str | None = field_doc(
        "folder of Hugging Face's (config.json, *.safetensors) with the weights that step 1 starts"
        " from (null: random; engines native and deepspeed)",
        default=None,
    )
    hook: str | None = field_doc(
        "Python file with on_step(state) -> dict of numbers for the metrics, see"
        " kit/trainer/hook.py; each launch and resume copies it into the run directory, as hook.py;"
        " it may import modules that lie beside the original, if the job sees that folder",
        default=None,
    )
    profile_steps: tuple[int, int] | None = field_doc(
        "first and last step to record into RUN/profile, for ui.perfetto.dev; at most 100 (engines "
        "native and deepspeed)",
        default=None,
    )
    profile_ranks: tuple[int, ...] = field_doc("ranks whose steps are recorded", default=(0,))
    sources: tuple[DataSource, ...] = field_doc(
        "a mix to train on, in place of the text in data", default=()
    )
    phases: tuple[DataPhase, ...] = field_doc(
        "other weights of the sources at the start, in order", default=()
    )

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

        It rises linearly to the peak during warm-up. Then it depends on `schedule`:

        - `constant`: It stays at the peak.
        - `wsd`: It stays at the peak, and falls linearly to the floor in the last `decay_share` of
          the steps up to `decay_steps`, as in torchtitan.
        - `cosine`: It follows a cosine of height c, from 1 to 0, until `decay_steps`. With
          `cosine_floor` `rescaled` the cosine runs from peak to floor: floor + (peak - floor) c
          (NeMo, Megatron). With `clamped` it runs towards zero and stops at the floor: max(floor,
          peak c), as in HLAT's released scheduler. The clamped cosine reaches the floor earlier.

        After `decay_steps`, `wsd` and `cosine` stay at the floor, `min_learning_rate`.
        """
        if 0 < self.warmup_steps >= step:
            return self.learning_rate * step / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        begin = self.warmup_steps
        end = self.decay_steps or self.num_steps
        if self.schedule == "wsd":
            begin = max(begin, end - round(self.decay_share * end))
            height = min(1.0, max(0.0, (end - step) / max(1, end - begin)))
        else:
            progress = min(1.0, (step - begin) / max(1, end - begin))
            height = 0.5 * (1 + math.cos(math.pi * progress))
            if self.cosine_floor == "clamped":
                return max(self.min_learning_rate, self.learning_rate * height)
        return self.min_learning_rate + (self.learning_rate - self.min_learning_rate) * height


def _require(name: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"recipe.{name}: {value!r} is not allowed. Give {allowed}.")
