import importlib.metadata
import re
from typing import Any

import pytest

from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.engines.build import check_engine
from kit.errors import ConfigError

DEMO = ModelSpec.preset("demo")
REFUSED = """
tensor_parallel=0 | plan.tensor_parallel: 0 is not allowed
zero_stage=4 | plan.zero_stage: 4 is not allowed. Allowed: 0, 1, 2, 3
data_parallel=4 shard_size=2 | plan.shard_size: 2 is not allowed with zero_stage 0
data_parallel=4 zero_stage=1 shard_size=0 | plan.shard_size: 0 is not allowed
data_parallel=4 zero_stage=1 shard_size=3 | with data_parallel 4, which it must divide
data_parallel=4 zero_stage=1 shard_size=2 engine=deepspeed | with engine 'deepspeed'
data_parallel=4 zero_stage=1 shard_size=2 engine=neuron | with engine 'neuron'
recompute=full recompute_layers=0 | plan.recompute_layers: 0 is not allowed
recompute_layers=2 | plan.recompute_layers: 2 is not allowed with engine 'native': it needs recompute 'full'
recompute=full recompute_layers=2 engine=neuron | it recomputes all blocks or none
schedule=1f2b | plan.schedule: '1f2b' is not allowed
tensor_paralel=2 | plan.tensor_paralel: unknown key. Did you mean 'tensor_parallel'?
tp=2 | plan.tp: unknown key. Plan's field is tensor_parallel.
lr=2 | plan.lr: unknown key. Recipe has this setting: recipe.learning_rate.
data_parallel=2 micro_batch_size=4 global_batch_size=12 | 12 sequences cannot be cut into micro-batches of 4 on 2 replicas. Use a multiple of 8, for example 16. Or set plan.micro_batch_size to 2.
data_parallel=16 micro_batch_size=4 global_batch_size=8 | Use a multiple of 64, for example 64. With plan.micro_batch_size 1, a multiple of 16 is enough.
data_parallel=16 global_batch_size=8 | 8 sequences cannot be divided among 16 replicas. Use a multiple of 16, for example 16.
sequence_parallel=true | plan.sequence_parallel: needs tensor_parallel of at least 2
virtual_stages=2 | plan.virtual_stages: 2 needs pipeline_parallel of at least 2
pipeline_parallel=2 schedule=interleaved | needs at least 2 stages a device, got 1
pipeline_parallel=2 virtual_stages=2 | schedule '1f1b' has 1 stage a device, got 2
ZBV global_batch_size=2 | schedule 'zbv' needs at least 3 micro-batches, got 2
INTERLEAVED global_batch_size=3 | needs the 3 micro-batches to be a multiple of pipeline_parallel 2
ZBV recompute=full | plan.recompute: 'full' with schedule 'zbv' is not allowed
ZBV zero_stage=3 | plan.zero_stage: 3 with schedule 'zbv' is not allowed
precision=fp16 | 'fp16' is not allowed with engine 'native': only DeepSpeed
engine=neuron precision=fp16 | 'fp16' is not allowed with engine 'neuron': only
engine=neuron zero_stage=2 | plan.zero_stage: 2 is not allowed with engine 'neuron'
engine=neuron compile=true | plan.compile: True is not allowed
engine=neuron INTERLEAVED global_batch_size=2 | plan.schedule: 'interleaved'
engine=deepspeed pipeline_parallel=2 zero_stage=2 | plan.zero_stage: 2 is not allowed with engine 'deepspeed'
engine=deepspeed pipeline_parallel=2 schedule=gpipe | its pipeline runs 1F1B only
engine=deepspeed tensor_parallel=2 sequence_parallel=true | plan.sequence_parallel: True is not allowed with engine
engine=deepspeed precision=bf16 | use zero_stage 1, also with one replica
engine=deepspeed zero_stage=3 recompute=selective | not with zero_stage 3; use 'full'
"""  # noqa: E501
"""Table of invalid plans: fields of a plan, and a part of the error message."""
TWO_STAGES = "pipeline_parallel=2 virtual_stages=2 global_batch_size=4 schedule="


def fields(words: str) -> dict[str, Any]:
    words = words.replace("ZBV", TWO_STAGES + "zbv").replace(
        "INTERLEAVED", TWO_STAGES + "interleaved"
    )
    given = dict(word.split("=") for word in words.split())
    return {name: {"true": True}.get(x, int(x) if x.isdigit() else x) for name, x in given.items()}


def rows(table: str) -> list[list[str]]:
    return [row.split(" | ") for row in table.strip().splitlines()]


@pytest.mark.parametrize(("words", "message"), rows(REFUSED))
def test_impossible_plans_are_refused(words, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Plan.from_dict(fields(words))


UNFIT = """
tensor_parallel=4 | spec.num_kv_heads: 2 is not divisible by tensor_parallel = 4
tensor_parallel=3 | spec.num_heads: 4 is not divisible by tensor_parallel = 3
pipeline_parallel=5 | spec.num_layers: 4 is not divisible by the number of pipeline stages, nor with embedding and loss as a layer each, = 5. Allowed for this model: 1, 2, 3, 4, 6.
pipeline_parallel=3 engine=deepspeed | 4 is not divisible by the number of pipeline stages, equal ones with engine 'deepspeed', = 3
pipeline_parallel=8 | Allowed for this model: 1, 2, 3, 4, 6.
"""  # noqa: E501


@pytest.mark.parametrize(("words", "message"), rows(UNFIT))
def test_plans_that_do_not_fit_the_model_are_refused(words, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Plan.from_dict(fields(words)).check(DEMO)


def test_wrong_process_count_is_refused():
    with pytest.raises(ConfigError, match="2 x data 1 = 4 processes, but 3 were started. Start 4"):
        Plan(tensor_parallel=2, pipeline_parallel=2).check(DEMO, 3)


def test_plan_json_round_trip():
    plan = Plan(tensor_parallel=2, sequence_parallel=True, global_batch_size=8)
    assert Plan.from_json(plan.to_json()) == plan
    assert "tensor parallel" in plan._repr_html_()


def test_zbv_needs_torch_2_13(monkeypatch):
    plan = Plan.from_dict(fields("ZBV"))
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.12.1+cpu")
    with pytest.raises(ConfigError, match="zbv.*torch 2.12.1"):
        check_engine(plan)
    check_engine(plan.replace(schedule="interleaved"))
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.13.0+cpu")
    check_engine(plan)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_few_micro_batches_need_torch_2_11(schedule, monkeypatch):
    plan = Plan(pipeline_parallel=4, global_batch_size=2, schedule=schedule)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.10.0+rocm7.1")
    with pytest.raises(ConfigError, match="num_microbatches: 2 .* 4 stages .* torch 2.10.0"):
        check_engine(plan)
    check_engine(plan.replace(global_batch_size=4))
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.11.0+cpu")
    check_engine(plan)
