"""What a run does about a loss or gradient that is not finite, and about a loss spike: as its
recipe says.

stop        nothing is written after the bad step; the newest checkpoint is from before it. A GPU
            has been given the step that follows by then, whose result nobody reads
skip        the update is dropped, the next batch follows (native engine)
roll_back   weights and optimizer go back to the newest checkpoint, the data since is left out
            (native engine)

Steps count on in each case: every step reads a batch of its own and has its line in the metrics,
with the number of dropped updates in `skipped`. AdamW counts the updates that it keeps, step -
skipped. Rolling back and leaving out data is what PaLM did (arXiv 2204.02311, section 5.1). For
these two a GPU is waited for at each step. No torch.
"""

import math
import statistics
from typing import Literal

from kit.config.plan import Plan, refuse
from kit.config.recipe import Recipe
from kit.config.rules import Rule
from kit.errors import RunError
from kit.trainer.spikes import WINDOW, stands_out

PATIENCE = 10
"""Bad steps in a row after which skipping and rolling back have led nowhere."""

Answer = Literal["go on", "stop", "skip", "roll_back"]


class Guard:
    """Judges each step of one attempt, the same way on every rank.

    Attributes:
        recent: the finite losses that the next is judged by (`kit.trainer.spikes`), oldest first,
            repeats left out.
        skipped: steps so far whose update was dropped.
        judges_before_update: whether the engine must ask before it applies an update.
        goes_on_after_bad: whether training may go on after a bad step, so that all ranks must agree
            that it was one.
    """

    def __init__(self, recipe: Recipe, plan: Plan) -> None:
        self.recipe = recipe
        # In fp16 a gradient that overflows is the engine's sign to lower the loss scale: it skips
        # that step itself.
        self.judged = ("loss",) if plan.precision == "fp16" else ("loss", "gradient norm")
        self.recent: tuple[float, ...] = ()
        self.skipped, self.bad_in_a_row = 0, 0
        answers = {recipe.on_nan, recipe.on_spike}
        self.judges_before_update = "skip" in answers
        self.goes_on_after_bad = bool(answers & {"skip", "roll_back"})

    def judge(self, loss: float, grad_norm: float) -> tuple[Answer, str]:
        """Returns what to do about a step, and what is wrong with it in words; it changes
        nothing.
        """
        for name, value in zip(("loss", "gradient norm"), (loss, grad_norm), strict=True):
            if name in self.judged and not math.isfinite(value):
                return self.recipe.on_nan, f"the {name} is {value}"
        if self.recipe.on_spike != "ignore" and stands_out(loss, self.recent):
            before = statistics.median(self.recent)
            return (
                self.recipe.on_spike,
                f"the loss of {loss:.4g} is a spike (median before {before:.4g})",
            )
        return "go on", ""

    def note(self, answer: Answer, what: str, loss: float) -> None:
        """Takes a judged step into account.

        Raises:
            RunError: as many steps in a row were bad that more of the same answer leads nowhere.
        """
        if math.isfinite(loss) and loss not in self.recent[-1:]:
            self.recent = (*self.recent, loss)[-WINDOW:]
        if answer == "go on":
            self.bad_in_a_row = 0
            return
        self.bad_in_a_row += 1
        if self.bad_in_a_row >= PATIENCE:
            raise RunError(
                f"{self.bad_in_a_row} bad steps in a row, the last because {what}: {answer} does"
                " not help. The newest checkpoint is from before them or holds none of their"
                " updates. Lower recipe.learning_rate, or look at the data."
            )


def _answer(name: str, allowed: str) -> Rule:
    """Returns the rule that only the native engine can take a step back."""
    return Rule(
        engines=("deepspeed", "neuron"),
        breaks=lambda recipe, _: getattr(recipe, name) in ("skip", "roll_back"),
        sentence=lambda recipe, plan: (
            f"recipe.{name}: {getattr(recipe, name)!r} is not allowed with plan.engine"
            f" {plan.engine!r}, whose step cannot be taken back. Give {allowed}, or plan.engine"
            " 'native'."
        ),
    )


RULES = (
    Rule(
        engines=("neuron",),
        breaks=lambda recipe, _: recipe.init_from is not None,
        sentence=lambda recipe, _: (
            f"recipe.init_from: {recipe.init_from!r} is not allowed with plan.engine 'neuron',"
            " whose weights are NxD's own. Give null, or another engine."
        ),
    ),
    Rule(
        engines=("neuron",),
        breaks=lambda recipe, _: recipe.profile_steps is not None,
        sentence=lambda recipe, _: (
            f"recipe.profile_steps: {recipe.profile_steps} is not allowed with plan.engine"
            " 'neuron': torch's profiler sees nothing of a NeuronCore. Give null, and use AWS's"
            " neuron-profile."
        ),
    ),
    Rule(
        breaks=lambda recipe, plan: (
            recipe.profile_steps is not None
            and (
                not recipe.profile_ranks
                or bool({*recipe.profile_ranks} - {*range(plan.num_devices)})
            )
        ),
        sentence=lambda recipe, plan: (
            f"recipe.profile_ranks: {recipe.profile_ranks} is not allowed on {plan.num_devices}"
            f" devices. Give some of 0 to {plan.num_devices - 1}."
        ),
    ),
    Rule(
        breaks=lambda recipe, plan: (
            recipe.mask_documents and (plan.engine != "native" or plan.pipeline_parallel > 1)
        ),
        sentence=lambda _, plan: (
            f"recipe.mask_documents: true is not allowed with plan.engine {plan.engine!r} and"
            f" plan.pipeline_parallel {plan.pipeline_parallel}. Give false, or engine 'native'"
            " without a pipeline."
        ),
    ),
    _answer("on_nan", "'stop'"),
    _answer("on_spike", "'ignore' or 'stop'"),
)
"""Of (recipe, plan). Others than the native engine apply an update before anyone can look at it, or
cannot load twice. Only the first stage of a pipeline sees tokens, and so the ends of documents."""


def check_recipe(recipe: Recipe, plan: Plan) -> None:
    """Raises ConfigError if the recipe asks for what the plan's engine or layout cannot do."""
    refuse(RULES, plan.engine, recipe, plan)
