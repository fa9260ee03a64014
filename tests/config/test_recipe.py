import math
import re

import pytest

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.recipe_rules import check_recipe
from kit.config.spec import ModelSpec
from kit.config.weight_groups import initial_factor, learning_rate_factor
from kit.errors import ConfigError

RATES = {"learning_rate": 3e-4, "min_learning_rate": 3e-5, "warmup_steps": 2000}
LLAMA = ModelSpec.preset("hlat-7b")
HLAT_7B = Recipe(data="x", num_steps=500_000, **RATES, cosine_floor="clamped")


def test_warm_up_is_linear_and_ends_at_the_peak():
    assert HLAT_7B.learning_rate_at(1) == pytest.approx(3e-4 / 2000)
    assert HLAT_7B.learning_rate_at(1000) == pytest.approx(1.5e-4)
    assert HLAT_7B.learning_rate_at(2000) == pytest.approx(3e-4)


def test_clamped_cosine_reaches_floor_as_in_hlat():
    """The learning rate is max(floor, cosine), with the cosine over all steps after warm-up. The
    floor is reached at step 397,994.
    """
    first = next(step for step in range(390_000, 410_000) if HLAT_7B.learning_rate_at(step) == 3e-5)
    assert first == math.ceil(2000 + 498_000 * math.acos(-0.8) / math.pi)
    assert HLAT_7B.learning_rate_at(500_000) == 3e-5


def test_rescaled_cosine_ends_at_its_floor():
    """The rescaled cosine reaches its floor only at its end. Before the end, it lies above the
    clamped cosine.
    """
    rescaled = HLAT_7B.replace(cosine_floor="rescaled")
    assert rescaled.learning_rate_at(500_000) == pytest.approx(3e-5)
    # HLAT's 1.8T tokens are 429,153 steps. At this step, a rescaled cosine would still be at
    # 4.3e-5.
    assert rescaled.learning_rate_at(429_153) == pytest.approx(4.33e-5, rel=0.01)
    assert HLAT_7B.learning_rate_at(429_153) == 3e-5


def test_learning_rate_floor_holds_after_decay():
    recipe = HLAT_7B.replace(decay_steps=10_000, cosine_floor="rescaled")
    assert recipe.learning_rate_at(20_000) == pytest.approx(3e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_steps": 0}, "recipe.num_steps: 0 is not allowed"),
        ({"num_steps": 10**17}, "less than 2**53"),
        ({"beta2": 1.0}, "recipe.beta2: 1.0 is not allowed. Give at least 0 and below 1"),
        ({"gradient_clip": 0.0}, "recipe.gradient_clip: 0.0 is not allowed"),
        ({"min_learning_rate": 1.0}, "1.0 is not allowed. Give at most learning_rate"),
        ({"warmup_steps": 600_000}, "recipe.warmup_steps: 600000 is not allowed"),
        ({"cosine_floor": "linear"}, "recipe.cosine_floor: 'linear' is not allowed"),
        ({"profile_steps": (0, 1)}, "Give first and last of up to 100 steps"),
        ({"profile_steps": (5, 4)}, "Give first and last of up to 100 steps"),
        ({"profile_steps": (1, 101)}, "recipe.profile_steps: (1, 101) is not allowed"),
        ({"decay_share": 0}, "recipe.decay_share"),
        ({"decay_share": 1.5}, "recipe.decay_share"),
        ({"decay_share": float("nan")}, "recipe.decay_share"),
    ],
)
def test_invalid_recipe_values_are_refused(change, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        HLAT_7B.replace(**change)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_schedule_without_warm_up_starts_at_the_peak(schedule):
    recipe = Recipe(data="x", num_steps=9, learning_rate=1e-3, schedule=schedule)
    assert recipe.learning_rate_at(0) == 1e-3


def test_wsd_schedule_is_stable_then_linear():
    """The schedule equals `linear_warmup_stable_decay` of torchtitan 0.3, except for the position
    of step 1 in the warm-up. The schedule "constant" has no decay.
    """
    rates = {"learning_rate": 1e-3, "min_learning_rate": 1e-4, "warmup_steps": 100}
    recipe = Recipe(data="x", num_steps=1000, **rates, schedule="wsd", decay_share=0.2)
    at = recipe.learning_rate_at
    assert at(50) == pytest.approx(5e-4) and {at(step) for step in range(100, 801)} == {1e-3}
    assert at(900) == pytest.approx(5.5e-4) and at(1000) == at(2000) == 1e-4
    longer = recipe.replace(num_steps=2000).learning_rate_at
    assert all(longer(step) == at(step) for step in range(1, 801)), "no other beginning"
    constant = recipe.replace(schedule="constant").learning_rate_at
    assert constant(50) == pytest.approx(5e-4) and constant(5000) == 1e-3
    late = recipe.replace(warmup_steps=990).learning_rate_at
    assert late(990) == 1e-3 and late(995) == pytest.approx(5.5e-4), "never down before it is up"


@pytest.mark.parametrize("engine", ["deepspeed", "neuron"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_decay_on": "matrices"}, "recipe.weight_decay_on: 'matrices' is not allowed"),
        ({"learning_rate_factors": {"output": 2.0}}, "recipe.learning_rate_factors: {'matrices'"),
        ({"z_loss": 1e-4}, "recipe.z_loss: 0.0001 is not allowed with"),
        ({"optimizer": "muon"}, "recipe.optimizer: 'muon' is not allowed with"),
        ({"mup_base_width": 256}, "recipe.mup_base_width: 256 is not allowed with"),
    ],
)
def test_recipe_that_other_engines_cannot_train_is_refused(change, message, engine):
    recipe = HLAT_7B.replace(**change)
    check_recipe(recipe, Plan(), LLAMA)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        check_recipe(recipe, Plan(engine=engine), LLAMA)
    assert f"plan.engine '{engine}'" in str(error.value)


def test_unknown_group_of_weights_is_refused():
    with pytest.raises(ConfigError, match=r"recipe.learning_rate_factors.norms: unknown key"):
        HLAT_7B.replace(learning_rate_factors={"norms": 1.0})


def test_width_rule_is_that_of_tensor_programs():
    """Table 3 of Tensor Programs V (arXiv 2203.03466), for a model 16 times as wide as the base."""
    recipe = HLAT_7B.replace(mup_base_width=256)
    groups = ("matrices", "output", "embedding", "vectors")
    rates = [learning_rate_factor(recipe, LLAMA, group) for group in groups]
    assert rates == [1 / 16, 1 / 16, 1, 1]
    assert [initial_factor(recipe, LLAMA, group) for group in groups] == [1 / 4, 1 / 16, 1, 1]
    muon = recipe.replace(optimizer="muon", learning_rate_factors={"matrices": 0.5})
    assert [learning_rate_factor(muon, LLAMA, group) for group in groups] == [0.5, 1 / 16, 1, 1]
    for plain in (HLAT_7B, recipe.replace(mup_base_width=LLAMA.hidden_size)):
        assert {learning_rate_factor(plain, LLAMA, group) for group in groups} == {1}
        assert {initial_factor(plain, LLAMA, group) for group in groups} == {1}


def test_width_rule_refuses_tied_embeddings():
    recipe = HLAT_7B.replace(mup_base_width=256)
    with pytest.raises(ConfigError, match=r"recipe.mup_base_width: 256 .*spec.tied_embeddings"):
        check_recipe(recipe, Plan(), ModelSpec.preset("gpt-22b"))
