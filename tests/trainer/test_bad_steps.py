"""Decisions about bad steps (non-finite values and loss spikes), and recipe settings that an engine
or a layout does not support.
"""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.recipe_rules import check_recipe
from kit.config.spec import ModelSpec
from kit.errors import ConfigError, RunError
from kit.trainer.bad_steps import MAX_BAD_STEPS, StepJudge
from kit.trainer.spikes import WINDOW
from tests.support.parity import batches, build, make_plan
from tests.support.workers import run_ranks

RECIPE = Recipe(data="data", num_steps=100)


def test_judge_skips_non_finite_loss_and_gradient():
    judge = StepJudge(RECIPE.replace(on_nan="skip"), Plan())
    assert judge.judge(2.0, 1.0) == ("go on", "")
    assert judge.judge(math.nan, 1.0) == ("skip", "the loss is nan")
    assert judge.judge(2.0, math.inf) == ("skip", "the gradient norm is inf")


def test_judge_ignores_fp16_gradient_overflow():
    """DeepSpeed itself skips steps with overflowing fp16 gradients. A NaN loss still stops
    the run.
    """
    judge = StepJudge(RECIPE, Plan(engine="deepspeed", precision="fp16", zero_stage=1))
    assert judge.judge(2.0, math.inf)[0] == "go on"
    assert judge.judge(math.nan, 1.0)[0] == "stop"


def test_judge_finds_spikes_after_a_full_window():
    """A spike is found only after a full window of losses. MAX_BAD_STEPS bad steps in a row stop
    the run.
    """
    judge = StepJudge(RECIPE.replace(on_spike="skip"), Plan())
    for i in range(WINDOW):
        assert judge.judge(100.0, 1.0)[0] == "go on", "too few losses to judge by"
        judge.record("go on", "", 2.0 + 0.01 * (i % 5))
    answer, what = judge.judge(3.0, 1.0)
    assert answer == "skip" and "spike" in what and judge.judge(2.04, 1.0)[0] == "go on"
    for _ in range(MAX_BAD_STEPS - 1):
        judge.record(answer, what, 3.0)
    with pytest.raises(RunError, match="skip does not help"):
        judge.record(answer, what, 3.0)


PROFILED = {"profile_steps": (1, 2)}
LACKING: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({**PROFILED, "profile_ranks": (2,)}, {}, r"recipe.profile_ranks: \(2,\) .* 0 to 1"),
    ({**PROFILED, "profile_ranks": (-1,)}, {}, "0 to 1"),
    ({**PROFILED, "profile_ranks": ()}, {}, "0 to 1"),
    (PROFILED, {"engine": "neuron"}, "neuron-profile"),
    ({"init_from": "theirs"}, {"engine": "neuron"}, "recipe.init_from: .*engine 'neuron'"),
    ({"mask_documents": True}, {"engine": "deepspeed"}, "recipe.mask_documents: true is not"),
    ({"mask_documents": True}, {"pipeline_parallel": 2}, "recipe.mask_documents: true is not"),
    ({"on_nan": "skip"}, {"engine": "neuron"}, "recipe.on_nan: 'skip' .*engine 'neuron'"),
    ({"on_spike": "roll_back"}, {"engine": "deepspeed"}, "recipe.on_spike: 'roll_back' .* 'deep"),
]


@pytest.mark.parametrize(("asked", "plan", "message"), LACKING)
def test_check_recipe_refuses_unsupported_settings(asked, plan, message, llama_spec):
    plan = make_plan({"data_parallel": 2, **plan})
    check_recipe(RECIPE, plan, llama_spec)
    with pytest.raises(ConfigError, match=message):
        check_recipe(RECIPE.replace(**asked), plan, llama_spec)


def test_judging_a_step_adds_no_all_reduce(llama_spec):
    """The judge decides whether an update is applied, without a further all-reduce. A step that the
    judge refuses leaves the weights unchanged.
    """
    free, kept, dropped = run_ranks(1, collectives_of_a_step, llama_spec)[0]
    assert kept[0] == dropped[0] == free[0] > 0, "being asked costs no collective of the engine's"
    assert free[1] and kept[1] and not dropped[1], "whether the weights have moved"


def collectives_of_a_step(spec: ModelSpec) -> list[tuple[int, bool]]:
    """Runs three steps: one without a judge, one that the judge accepts, and one that it refuses.
    Returns (number of all-reduces, whether weights changed) of each step.
    """
    found = []
    for answer in (None, True, False):
        engine = build(spec, make_plan({}))
        accepts = None if answer is None else lambda loss, norm, answer=answer: answer
        before = [weight.detach().clone() for weight in engine.parameters()]
        with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as summed:
            engine.begin_step(batches(spec, make_plan({}), 0)[0], 1e-3, accepts).read()
        pairs = zip(before, engine.parameters(), strict=True)
        found.append((summed.call_count, any(not torch.equal(old, new) for old, new in pairs)))
    return found
