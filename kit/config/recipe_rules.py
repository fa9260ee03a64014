"""Rules for a recipe together with the engine and layout of a plan. Imports no torch."""

from kit.config.plan import Plan, refuse
from kit.config.recipe import Recipe
from kit.config.rules import Rule


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
    _only_native_takes_back("on_nan", "'stop'"),
    _only_native_takes_back("on_spike", "'ignore' or 'stop'"),
)
"""Rules whose functions take (recipe, plan). The reasons of the last three rules: DeepSpeed and NxD
apply an update before its loss can be judged, or cannot load a checkpoint twice. To mask documents,
a stage needs the tokens that end documents, which only the first pipeline stage reads."""


def check_recipe(recipe: Recipe, plan: Plan) -> None:
    """Raises ConfigError if the engine or the layout of the plan does not support a setting of the
    recipe.
    """
    refuse(RECIPE_RULES, plan.capabilities, recipe, plan)
