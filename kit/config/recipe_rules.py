"""Rules for a recipe together with the engine and layout of a plan. Imports no torch."""

from collections.abc import Callable

from cluster.record import Record
from kit.config.plan import Plan, check_rules
from kit.config.recipe import LearningRateFactors, Recipe
from kit.config.rules import Rule
from kit.config.spec import ModelSpec
from kit.config.weight_groups import check_width_rule
from kit.engines.capabilities import Capabilities


def _only_native_takes_back(name: str, allowed: str) -> Rule:
    """Returns the rule that field `name` of the recipe must not be `skip` or `roll_back` with an
    engine that cannot drop the update of a step. Only engine native can.
    """
    return Rule(
        applies_to=lambda engine: not engine.can_drop_update,
        breaks=lambda recipe, _: getattr(recipe, name) in ("skip", "roll_back"),
        sentence=lambda recipe, plan: (
            f"recipe.{name}: {getattr(recipe, name)!r} is not allowed with plan.engine"
            f" {plan.engine!r}, whose step cannot be taken back. Give {allowed}, or plan.engine"
            " 'native'."
        ),
    )


def _needs(can: Callable[[Capabilities], bool], name: str, default: object, reason: str) -> Rule:
    """Returns the rule that field `name` of the recipe must have its default with an engine for
    which `can` is false. `reason` says what such an engine does instead.
    """
    return Rule(
        applies_to=lambda engine: not can(engine),
        breaks=lambda recipe, _: getattr(recipe, name) != default,
        sentence=lambda recipe, plan: (
            f"recipe.{name}: {_shown(getattr(recipe, name))} is not allowed with plan.engine"
            f" {plan.engine!r}, {reason}. Give {_shown(default)}, or plan.engine 'native'."
        ),
    )


def _shown(value: object) -> str:
    """Returns a value of a recipe as text for an error message."""
    return str(value.to_dict()) if isinstance(value, Record) else repr(value)


_NO_GROUPS = "which trains all weights with one learning rate and one weight decay"

RECIPE_RULES = (
    Rule(
        applies_to=lambda engine: not engine.starts_from_weights,
        breaks=lambda recipe, _: recipe.init_from is not None,
        sentence=lambda recipe, _: (
            f"recipe.init_from: {recipe.init_from!r} is not allowed with plan.engine 'neuron',"
            " whose weights are NxD's own. Give null, or another engine."
        ),
    ),
    Rule(
        applies_to=lambda engine: not engine.torch_profiler,
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
            recipe.mask_documents
            and (not plan.capabilities.masks_documents or plan.pipeline_parallel > 1)
        ),
        sentence=lambda _, plan: (
            f"recipe.mask_documents: true is not allowed with plan.engine {plan.engine!r} and"
            f" plan.pipeline_parallel {plan.pipeline_parallel}. Give false, or engine 'native'"
            " without a pipeline."
        ),
    ),
    _needs(lambda engine: engine.groups_weights, "weight_decay_on", "all", _NO_GROUPS),
    _needs(
        lambda engine: engine.groups_weights,
        "learning_rate_factors",
        LearningRateFactors(),
        _NO_GROUPS,
    ),
    _needs(lambda engine: engine.groups_weights, "mup_base_width", None, _NO_GROUPS),
    _needs(
        lambda engine: engine.gathers_matrices,
        "optimizer",
        "adamw",
        "which updates each shard by itself, and Muon must orthogonalise whole matrices",
    ),
    _needs(
        lambda engine: engine.adds_z_loss, "z_loss", 0.0, "which minimises the cross-entropy alone"
    ),
    _only_native_takes_back("on_nan", "'stop'"),
    _only_native_takes_back("on_spike", "'ignore' or 'stop'"),
)
"""Conditions that a recipe must meet together with a plan. The functions of a rule take (recipe,
plan). `mask_documents` is not allowed with a pipeline, because only the first stage reads the
tokens that end documents. `on_nan` and `on_spike` are limited for DeepSpeed and NxD: these engines
apply an update before its loss can be judged, or cannot load a checkpoint twice."""


def check_recipe(recipe: Recipe, plan: Plan, spec: ModelSpec) -> None:
    """Raises ConfigError if the model, or the engine or the layout of the plan, does not support a
    setting of the recipe.
    """
    check_width_rule(recipe, spec)
    check_rules(RECIPE_RULES, plan.capabilities, recipe, plan)
