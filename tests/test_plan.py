import importlib.metadata

import pytest

from kit.engines import check_engine
from kit.errors import ConfigError
from kit.plan import Plan
from kit.spec import ModelSpec

DEMO = ModelSpec.preset("demo")
NEURON, DEEPSPEED = {"engine": "neuron"}, {"engine": "deepspeed"}
ZBV = {"pipeline_parallel": 2, "schedule": "zbv", "virtual_stages": 2}


def test_the_papers_recipes_are_valid():
    """Frontier's 175B and 1T layouts and HLAT's 7B, as their launch scripts have them."""
    frontier_175b = Plan(
        tensor_parallel=4,
        pipeline_parallel=16,
        data_parallel=2,
        zero_stage=1,
        global_batch_size=640,
        recompute="full",
    )
    frontier_175b.check(ModelSpec.preset("gpt-175b"), 128)
    assert frontier_175b.num_microbatches == 320
    frontier_1t = frontier_175b.replace(
        tensor_parallel=8, pipeline_parallel=64, data_parallel=6, global_batch_size=9600
    )
    frontier_1t.check(ModelSpec.preset("gpt-1t"), 3072)
    hlat_7b = Plan(
        tensor_parallel=8, data_parallel=256, sequence_parallel=True, global_batch_size=1024
    )
    hlat_7b.check(ModelSpec.preset("hlat-7b"), 2048)
    assert hlat_7b.num_microbatches == 4


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"tensor_parallel": 0}, "plan.tensor_parallel: 0 is not allowed"),
        ({"zero_stage": 4}, "plan.zero_stage: 4 is not allowed. Allowed: 0, 1, 2, 3"),
        (
            {"shard_size": 2, "data_parallel": 4},
            "plan.shard_size: 2 is not allowed with zero_stage 0",
        ),
        (
            {"shard_size": 0, "data_parallel": 4, "zero_stage": 1},
            "plan.shard_size: 0 is not allowed",
        ),
        (
            {"shard_size": 3, "data_parallel": 4, "zero_stage": 1},
            "with data_parallel 4, which it must divide",
        ),
        (
            {"shard_size": 2, "data_parallel": 4, "zero_stage": 1, "engine": "deepspeed"},
            "with engine 'deepspeed'",
        ),
        (
            {"shard_size": 2, "data_parallel": 4, "zero_stage": 1, "engine": "neuron"},
            "with engine 'neuron'",
        ),
        ({"schedule": "1f2b"}, "plan.schedule: '1f2b' is not allowed"),
        (
            {"tensor_paralel": 2},
            "plan.tensor_paralel: unknown key. Did you mean 'tensor_parallel'?",
        ),
        (
            {"data_parallel": 2, "micro_batch_size": 4, "global_batch_size": 12},
            "12 sequences cannot be cut into micro-batches of 4 on 2 replicas. Use a multiple of 8",
        ),
        (
            {"sequence_parallel": True},
            "plan.sequence_parallel: needs tensor_parallel of at least 2",
        ),
        ({"virtual_stages": 2}, "plan.virtual_stages: 2 needs pipeline_parallel of at least 2"),
        (
            {"pipeline_parallel": 2, "schedule": "interleaved"},
            "needs at least 2 stages a device, got 1",
        ),
        (
            {"pipeline_parallel": 2, "virtual_stages": 2},
            "schedule '1f1b' has 1 stage a device, got 2",
        ),
        (
            {**ZBV, "global_batch_size": 2},
            "schedule 'zbv' needs at least 3 micro-batches, got 2",
        ),
        (
            {
                "pipeline_parallel": 2,
                "schedule": "interleaved",
                "virtual_stages": 2,
                "global_batch_size": 3,
            },
            "needs the 3 micro-batches to be a multiple of pipeline_parallel 2",
        ),
        (
            {**ZBV, "global_batch_size": 4, "recompute": "full"},
            "plan.recompute: 'full' with schedule 'zbv' is not allowed",
        ),
        (
            {**ZBV, "global_batch_size": 4, "zero_stage": 3},
            "plan.zero_stage: 3 with schedule 'zbv' is not allowed",
        ),
        ({"precision": "fp16"}, "'fp16' is not allowed with engine 'native': only DeepSpeed"),
        ({**NEURON, "precision": "fp16"}, "'fp16' is not allowed with engine 'neuron': only"),
        ({**NEURON, "zero_stage": 2}, "plan.zero_stage: 2 is not allowed with engine 'neuron'"),
        ({**NEURON, "compile": True}, "plan.compile: True is not allowed"),
        (
            {**NEURON, **ZBV, "schedule": "interleaved", "global_batch_size": 2},
            "plan.schedule: 'interleaved'",
        ),
        (
            {**DEEPSPEED, "pipeline_parallel": 2, "zero_stage": 2},
            "plan.zero_stage: 2 is not allowed with engine 'deepspeed'",
        ),
        (
            {**DEEPSPEED, "pipeline_parallel": 2, "schedule": "gpipe"},
            "its pipeline runs 1F1B only",
        ),
        (
            {**DEEPSPEED, "tensor_parallel": 2, "sequence_parallel": True},
            "plan.sequence_parallel: True is not allowed with engine",
        ),
        ({**DEEPSPEED, "precision": "bf16"}, "use zero_stage 1, also with one replica"),
        (
            {**DEEPSPEED, "zero_stage": 3, "recompute": "selective"},
            "not with zero_stage 3; use 'full'",
        ),
    ],
)
def test_impossible_plans_are_refused(plan, message):
    with pytest.raises(ConfigError) as error:
        Plan.from_dict(plan)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"tensor_parallel": 4}, "spec.num_kv_heads: 2 is not divisible by tensor_parallel = 4"),
        ({"tensor_parallel": 3}, "spec.num_heads: 4 is not divisible by tensor_parallel = 3"),
        (
            {"pipeline_parallel": 5},
            "spec.num_layers: 4 is not divisible by the number of pipeline stages, nor with"
            " embedding and loss as a layer each, = 5. Allowed for this model: 1, 2, 3, 4, 6.",
        ),
        (
            {"pipeline_parallel": 3, "engine": "deepspeed"},
            "4 is not divisible by the number of pipeline stages, equal ones with engine"
            " 'deepspeed', = 3",
        ),
        ({"pipeline_parallel": 8}, "Allowed for this model: 1, 2, 3, 4, 6."),
    ],
)
def test_plans_that_do_not_fit_the_model_are_refused(plan, message):
    with pytest.raises(ConfigError) as error:
        Plan.from_dict(plan).check(DEMO)
    assert message in str(error.value)


def test_wrong_process_count_is_refused():
    with pytest.raises(
        ConfigError,
        match="tensor 2 x pipeline 2 x data 1 = 4 processes, but 3 were started. Start 4",
    ):
        Plan(tensor_parallel=2, pipeline_parallel=2).check(DEMO, 3)


def test_json_round_trip():
    plan = Plan(tensor_parallel=2, sequence_parallel=True, global_batch_size=8)
    assert Plan.from_json(plan.to_json()) == plan
    assert "tensor parallel" in plan._repr_html_()


def test_zbv_is_refused_on_a_torch_that_cannot_run_it(monkeypatch):
    plan = Plan(
        pipeline_parallel=2,
        schedule="zbv",
        virtual_stages=2,
        data_parallel=1,
        micro_batch_size=1,
        global_batch_size=4,
    )
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.12.1+cpu")
    with pytest.raises(ConfigError, match="zbv.*torch 2.12.1"):
        check_engine(plan)
    check_engine(plan.replace(schedule="interleaved"))
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.13.0+cpu")
    check_engine(plan)
