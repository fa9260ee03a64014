"""The memory model compared with torch's allocations, whole steps of the engines, pipeline
schedules, and papers.
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import PRESETS, ModelSpec
from kit.engines.native import NativeEngine
from kit.errors import ConfigError
from kit.estimate.fit.fitting import fit_reserve
from kit.estimate.theory.activations import (
    DEEPSPEED,
    KIT,
    MEGATRON,
    LayerActivations,
    microbatches_in_flight,
)
from kit.estimate.theory.layouts import Layouts
from kit.estimate.theory.memory import CONVENTIONS, STATE, memory, memory_by_stage
from kit.estimate.theory.orders import Order
from kit.estimate.theory.out_of_memory import RESERVE
from kit.model import Block, Decoder
from kit.parallel.simulate import view_rank
from kit.parallel.tensor import apply_tensor_parallel, cross_entropy
from tests.bench.exams.memory import fit_out_of_memory
from tests.estimate.live_bytes import LiveBytes
from tests.support.workers import run_ranks

SHAPES = dict(
    name="tiny", num_layers=4, hidden_size=128, num_heads=4, vocab_size=512, sequence_length=64
)
TINY = {
    "gpt": ModelSpec.gpt(**SHAPES),
    "llama": ModelSpec.llama(**SHAPES, ffn_hidden_size=352),
    "grouped": ModelSpec.llama(**SHAPES, ffn_hidden_size=352, num_kv_heads=2),
}
SWITCHED = {
    "qwen3": TINY["grouped"].replace(head_dim=48, qk_norm="per_head"),
    "olmo2": TINY["grouped"].replace(norm_placement="after", qk_norm="all_heads"),
    "gemma2": TINY["grouped"].replace(
        norm_placement="both",
        zero_centered_norm=True,
        activation="geglu_tanh",
        attn_logit_softcapping=5.0,
        sequence_length=512,
    ),
    "neox": TINY["gpt"].replace(positions="rotary", parallel_residual=True),
}
RECOMPUTE = pytest.mark.parametrize("recompute", ["none", "selective", "full"])
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 2), ("zbv", 2))
FAMILY = pytest.mark.parametrize("family", TINY)


def zero_gradients(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)


@RECOMPUTE
@FAMILY
def test_block_activations_match_live_bytes(family, recompute):
    spec, batch = TINY[family], 2
    block = Block(spec, recompute).to(torch.bfloat16)
    rotary = Decoder(spec).rotary(spec.sequence_length, torch.device("cpu"))
    zero_gradients(block)
    shape = batch, spec.sequence_length, spec.hidden_size
    x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    with LiveBytes() as live:
        y = block(x * 1, rotary)
        kept = live.now - y.nbytes
        live.peak = live.now
        y.backward(torch.ones_like(y))
    # The CPU has no fused RMSNorm. The field `norm_bytes` counts the activations that its norm
    # saves for backward.
    layouts = Layouts.of(spec, [Plan(recompute=recompute)], fused_norm=False)
    layer, tokens = LayerActivations(layouts, KIT), batch * spec.sequence_length
    assert tokens * layer.saved_bytes.item() == pytest.approx(kept, rel=0.01)
    held = kept + 2 * y.nbytes  # kept bytes plus the block's output and its gradient
    assert tokens * layer.workspace_bytes.item() == pytest.approx(live.peak - held, rel=0.15)


@RECOMPUTE
@pytest.mark.parametrize("family", SWITCHED)
def test_activations_of_switches_match_live_bytes(family, recompute):
    """Bytes per token that a block saves for backward. Those of soft-capped attention are modelled
    as those of any attention that writes its scores to memory.
    """
    spec = SWITCHED[family]
    block = Block(spec, recompute).to(torch.bfloat16)
    rotary = Decoder(spec).rotary(spec.sequence_length, torch.device("cpu"))
    x = torch.randn(1, spec.sequence_length, 128, dtype=torch.bfloat16, requires_grad=True)
    with LiveBytes() as live:
        y = block(x * 1, rotary)
        kept = live.now - y.nbytes
    layouts = Layouts.of(spec, [Plan(recompute=recompute)], fused_norm=False)
    found = spec.sequence_length * LayerActivations(layouts, KIT).saved_bytes.item()
    assert found == pytest.approx(kept, rel=0.04)


def test_window_mask_is_shared_by_layers():
    """The bytes that a decoder saves for backward grow by one mask, whatever the number of layers.
    The planner counts the same bytes.
    """
    plain = TINY["grouped"].replace(sequence_length=1024)
    saved, modelled = {}, {}
    for spec in (plain, plain.replace(sliding_window=256)):
        decoder = Decoder(spec).to(torch.bfloat16)
        tokens = torch.randint(0, spec.vocab_size, (1, spec.sequence_length))
        with LiveBytes() as live:
            loss = decoder(tokens, tokens)
            saved[spec.sliding_window] = live.now
        assert loss.requires_grad
        layouts = Layouts.of(spec, [Plan()], native=True)
        modelled[spec.sliding_window] = memory(layouts, kernels=KIT).stages[0].buffers.item()
    mask_bytes = modelled[256] - modelled[None]
    assert mask_bytes == 2 * 1024**2
    assert saved[256] - saved[None] == pytest.approx(mask_bytes, rel=0.01)


@pytest.mark.parametrize("name", PRESETS)
def test_modelled_weights_of_one_device_are_all_weights(name):
    spec = ModelSpec.preset(name)
    stage = memory(Layouts.of(spec, [Plan()]), kernels=KIT).stages[0]
    assert stage.params.item() == spec.num_params


@pytest.fixture
def fake_ranks():
    """Returns a function that makes this process rank 0 of a fake process group of `world` ranks.
    Collectives of the group allocate memory and send nothing.
    """
    yield lambda world: dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    dist.destroy_process_group()


@RECOMPUTE
@pytest.mark.parametrize("sequence_parallel", [False, True])
@FAMILY
def test_tensor_parallel_activations_match_live_bytes(
    family, sequence_parallel, recompute, fake_ranks
):
    fake_ranks(2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    spec, batch = TINY[family], 2
    middle = Decoder(spec, layers=range(1, 2), recompute=recompute).to(torch.bfloat16)
    apply_tensor_parallel(middle, mesh, sequence_parallel=sequence_parallel)
    middle.rotary(spec.sequence_length, torch.device("cpu"))
    length = spec.sequence_length // 2 if sequence_parallel else spec.sequence_length
    x = torch.randn(batch, length, spec.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    with LiveBytes() as live:
        y = middle(x * 1)
        kept = live.now - (y.to_local() if isinstance(y, DTensor) else y).nbytes
    plan = Plan(tensor_parallel=2, sequence_parallel=sequence_parallel, recompute=recompute)
    layer = LayerActivations(Layouts.of(spec, [plan], fused_norm=False), KIT)
    assert batch * spec.sequence_length * layer.saved_bytes.item() == pytest.approx(kept, rel=0.01)


@pytest.mark.parametrize("chunk", [0, 2**18, 2**25])
def test_loss_memory_matches_live_bytes(chunk, monkeypatch):
    monkeypatch.setattr("kit.model.cross_entropy.logits_at_once", lambda _memory: chunk)
    spec = ModelSpec.gpt(**SHAPES | dict(num_layers=1, hidden_size=32, vocab_size=8192))
    decoder, tokens = Decoder(spec).to(torch.bfloat16), torch.randint(0, 8192, (2, 64))
    with LiveBytes() as live:
        if chunk:
            loss = decoder(tokens, tokens)
        else:
            logits = decoder(tokens)  # the logits exist until the end of the backward pass
            loss = cross_entropy(logits, tokens, None)
        loss.backward()
    layouts = Layouts.of(spec, [Plan(micro_batch_size=2, global_batch_size=2)])
    modelled = memory(layouts, kernels=KIT.replace(chunk_logits=chunk)).stages[0]
    held = modelled.embedding_logits + modelled.workspace + modelled.activations
    # The peak is in the backward pass, in which bf16 gradients exist. With a loss in chunks, the
    # peak is in the forward pass.
    gradients = 0 if chunk else 2 * modelled.params.item()
    assert held.item() == pytest.approx(live.peak - gradients, rel=0.05)


@pytest.mark.parametrize("name", PRESETS)
def test_memory_model_counts_every_weight(name):
    spec = ModelSpec.preset(name)
    assert memory(Layouts.of(spec, [Plan()])).stages[0].params.item() == spec.num_params


@pytest.mark.parametrize("schedule, stages", [("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
@pytest.mark.parametrize(
    "family, layers, t, p", [*((family, 4, 2, 2) for family in TINY), ("llama", 6, 1, 4)]
)
def test_pipeline_device_weights_match_engine(family, layers, t, p, schedule, stages):
    """The cases include uneven pipeline stages, such as six layers on four devices."""
    spec = TINY[family].replace(num_layers=layers)
    degrees = {"tensor_parallel": t, "pipeline_parallel": p, "virtual_stages": stages}
    plan = Plan(**degrees, schedule=schedule, global_batch_size=8)
    modelled = memory_by_stage(Layouts.of(spec, [plan])).params
    ranks = range(0, t * p, t)
    assert modelled.tolist() == [view_rank(spec, plan, rank).num_params for rank in ranks]


@pytest.mark.parametrize(
    ("stages", "shard_size", "over", "weights", "gradients", "optimizer"),
    [
        # Under ZeRO 3 the fp32 weights of the optimizer are the only sharded copy, so `weights` is
        # 0.
        ((0, 1, 2, 3), None, 4, [2, 2, 2, 0], [4, 4, 1, 1], [12, 3, 3, 3]),
        ((1, 2, 3), 2, 2, [2, 2, 0], [4, 2, 2], [6, 6, 6]),
    ],
    ids=["all replicas", "a shard size"],
)
def test_zero_stages_divide_training_state(stages, shard_size, over, weights, gradients, optimizer):
    """Compares the modelled bytes per parameter with expected bytes, and the number of sharded
    weights with the engine.
    """
    spec = TINY["llama"]
    plan = Plan(data_parallel=4 if shard_size is None else 8, global_batch_size=16)
    plans = [plan.replace(zero_stage=stage, shard_size=shard_size) for stage in stages]
    layouts = Layouts.of(spec, plans, gradient_bytes=4.0)
    stage = memory(layouts).stages[0]
    for name, bytes_each in zip(STATE, (weights, gradients, optimizer), strict=True):
        assert np.allclose(stage.term(name), np.array(bytes_each) * spec.num_params)
    megatron = memory(layouts, kernels=MEGATRON).stages[0]
    assert megatron.term("weights")[-1] == pytest.approx(2 * spec.num_params / over)
    sharded = view_rank(spec, plans[-1].replace(precision="bf16"), 0).num_params
    assert stage.params[-1] / over == pytest.approx(sharded, rel=0.01)


def test_pipeline_zero_2_does_not_shard_gradients():
    plan = Plan(pipeline_parallel=2, data_parallel=2, global_batch_size=4, zero_stage=2)
    stage = memory(Layouts.of(TINY["gpt"], [plan], gradient_bytes=4.0)).stages[0]
    assert stage.term("gradients").item() == 4 * stage.params.item()


@pytest.mark.parametrize("schedule, stages", [*SCHEDULES, ("gpipe", 1), ("interleaved", 3)])
@pytest.mark.parametrize("devices, micro_batches", [(4, 8), (4, 16), (2, 4), (8, 16)])
def test_micro_batches_in_flight_match_schedule(schedule, stages, devices, micro_batches):
    shape = {"pipeline_parallel": devices, "virtual_stages": stages}
    plan = Plan(**shape, schedule=schedule, global_batch_size=micro_batches)
    order = Order.of(schedule, **shape, num_microbatches=micro_batches)
    modelled = microbatches_in_flight(Layouts.of(TINY["gpt"], [plan]), np.arange(devices))
    assert np.allclose(modelled, order.peak_in_flight)


def test_layer_activations_match_korthikanti_formula():
    shape = {"num_layers": 48, "hidden_size": 6144, "num_heads": 64}
    spec = ModelSpec.gpt(name="22B", **shape, vocab_size=51_200, sequence_length=2048)
    plans = [
        Plan(tensor_parallel=8, sequence_parallel=sequence, recompute=recompute)
        for sequence in (False, True)
        for recompute in ("none", "selective")
    ]
    kept = LayerActivations(Layouts.of(spec, plans, flash_attention=0), MEGATRON).saved_bytes
    scores = 5 * spec.num_heads * spec.sequence_length / spec.hidden_size
    expected = [10 + (24 + scores) / 8, 10 + 24 / 8, (34 + scores) / 8, 34 / 8]
    assert np.allclose(kept / spec.hidden_size, expected)


def test_memory_reports_fullest_pipeline_device():
    rng = np.random.default_rng(5)
    for _ in range(40):
        p, kinds = int(rng.choice([2, 4, 8])), (("1f1b", 1), ("gpipe", 1), ("interleaved", 2))
        schedule, stages = (*kinds, ("zbv", 2))[rng.integers(4)]
        spec = TINY["llama"].replace(num_layers=16, vocab_size=int(rng.choice([512, 65536])))
        shape: dict[str, Any] = {
            "pipeline_parallel": p,
            "virtual_stages": stages,
            "data_parallel": 2,
        }
        zero = int(rng.integers(0, 4)) if schedule != "zbv" else 1
        batch: dict[str, Any] = {"global_batch_size": 16 * p, "micro_batch_size": 2}
        plan = Plan(**shape, **batch, schedule=schedule, zero_stage=zero)
        layouts = Layouts.of(spec, [plan])
        stage = memory_by_stage(layouts)
        everywhere = RESERVE.used_bytes(stage.state_bytes, stage.dynamic_bytes)
        found = memory(layouts)
        assert found.used_bytes.item() == pytest.approx(everywhere.max())
        assert sum(found.terms().values()).item() == pytest.approx(everywhere.max())
        last = RESERVE.used_bytes(found.stages[1].state_bytes, found.stages[1].dynamic_bytes)
        assert last.item() == pytest.approx(everywhere[-1])


def test_memory_of_uneven_pipeline_stages():
    spec = TINY["llama"].replace(num_layers=70)
    run = Layouts.of(spec, [Plan(pipeline_parallel=12, global_batch_size=24)])
    ends, second = memory(run), memory_by_stage(run, layers=[5, *[6] * 10, 5])
    assert ends.stages[2].params.item() == second.params[1]
    assert ends.stages[0].params.item() == second.params[0]
    with pytest.raises(ConfigError, match="Give 12 numbers"):
        memory_by_stage(run, layers=[6] * 11)


def test_bytes_per_parameter_of_each_convention():
    spec = ModelSpec.preset("gpt-1t")
    layouts = Layouts.of(spec, [Plan(global_batch_size=2)])
    states = {
        name: memory(layouts, convention=convention).stages[0].state_bytes.item()
        for name, convention in CONVENTIONS.items()
    }
    assert {name: state / spec.num_params for name, state in states.items()} == {
        "mixed_precision": 18,
        "frontier_14": 14,
        "frontier_24": 24,
        "deepspeed_bf16": 20,
        "deepspeed_fp16_skipped": 16,
        "pure_bf16": 8,
        "fp32": 16,
    }


def test_out_of_memory_risk_is_half_at_capacity():
    layouts = Layouts.of(ModelSpec.preset("gpt-22b"), [Plan(tensor_parallel=8)])
    found = memory(layouts)
    used = found.used_bytes.item()
    twice, exactly, half = (
        found.out_of_memory_probability(used * factor).item() for factor in (2, 1, 0.5)
    )
    assert twice < 1e-4 and exactly == pytest.approx(0.5) and half > 0.99
    with pytest.raises(ConfigError, match="factor 9"):
        RESERVE.replace(factor=9.0)


def test_memory_fits_recover_true_parameters():
    rng = np.random.default_rng(3)
    choices = itertools.product((1, 2, 4, 8, 16, 32, 64), (1, 2, 4), ("none", "full"))
    base = Plan(tensor_parallel=2, global_batch_size=64)
    plans = [
        base.replace(micro_batch_size=b, pipeline_parallel=p, recompute=recompute)
        for b, p, recompute in choices
    ]
    layouts = Layouts.of(ModelSpec.preset("hlat-7b"), plans)
    true = RESERVE.replace(factor=1.4, extra_bytes=4e9, sharpness=30.0)
    found = memory(layouts, reserve=true)
    state, dynamic = found.stages[0].state_bytes, found.stages[0].dynamic_bytes
    fitted = fit_reserve(state, dynamic, true.used_bytes(state, dynamic), start=RESERVE, source="")
    assert fitted.factor == pytest.approx(1.4, rel=0.01)
    assert fitted.extra_bytes == pytest.approx(4e9, rel=0.05)
    size = float(np.median(found.used_bytes))
    labels = rng.random(len(plans)) < found.out_of_memory_probability(size)
    start = {"kernels": KIT, "reserve": RESERVE, "source": "made up"}
    reserve, kernels = fit_out_of_memory(layouts, labels, size, **start)
    again = memory(layouts, kernels=kernels, reserve=reserve).used_bytes > size
    assert (again == labels).mean() > 0.95
    with pytest.raises(ConfigError, match="all labels are alike"):
        fit_out_of_memory(layouts, np.ones(len(plans), bool), size, **start)


@pytest.mark.parametrize(
    ("recompute", "layers"),
    [("none", None), ("selective", None), ("full", None), ("full", 6), ("full", 2)],
)
@FAMILY
def test_forward_backward_peak_matches_live_bytes(family, recompute, layers):
    spec, batch = TINY[family].replace(num_layers=8), 16
    some: dict[str, Any] = {"recompute": recompute, "recompute_layers": layers}
    decoder = Decoder(spec, **some).to(torch.bfloat16)
    tokens = torch.randint(0, spec.vocab_size, (batch, spec.sequence_length))
    decoder.rotary(spec.sequence_length, torch.device("cpu"))
    zero_gradients(decoder)
    with LiveBytes() as live:
        decoder(tokens, tokens).backward()
    plan = Plan(**some, micro_batch_size=batch, global_batch_size=batch)
    modelled = memory(Layouts.of(spec, [plan], fused_norm=False)).stages[0].dynamic_bytes.item()
    assert modelled == pytest.approx(live.peak, rel=0.15)


@pytest.mark.parametrize("zero, micro_batches", [(0, 1), (1, 1), (1, 2), (2, 2), (3, 1), (3, 2)])
def test_native_engine_peak_matches_live_bytes(zero, micro_batches, fake_ranks):
    fake_ranks(4)
    spec, batch = TINY["llama"].replace(num_layers=6), 4 * micro_batches
    plan = Plan(data_parallel=4, zero_stage=zero, global_batch_size=batch, precision="bf16")
    samples = torch.randint(0, spec.vocab_size, (micro_batches, spec.sequence_length + 1))
    with LiveBytes() as live:
        engine = NativeEngine(spec, plan, Recipe(data="none", num_steps=2), torch.device("cpu"))
        for _ in range(2):
            live.peak = 0
            engine.train_step(samples, 1e-3)
    found = memory(Layouts.of(spec, [plan], fused_norm=False)).stages[0]
    assert found.total_bytes.item() == pytest.approx(live.peak, rel=0.05)


@pytest.mark.parametrize(
    ("layers", "device"),
    [(1, "full none none none"), (2, "full none full none"), (3, "full full full none")],
)
def test_engine_recomputes_first_blocks_of_stages(fake_ranks, layers, device):
    fake_ranks(2)
    spec, degrees = TINY["llama"].replace(num_layers=8), {"pipeline_parallel": 2}
    stages: dict[str, Any] = {"schedule": "interleaved", "virtual_stages": 2}
    some: dict[str, Any] = {"recompute": "full", "recompute_layers": layers, "precision": "bf16"}
    plan = Plan(**degrees, **stages, **some, global_batch_size=2)
    engine = NativeEngine(spec, plan, Recipe(data="none", num_steps=2), torch.device("cpu"))
    blocks = [block for decoder in engine.decoders for block in decoder.layers.values()]
    assert [block.recompute for block in blocks] == device.split()
    assert plan.recomputed_layers(spec) == 2 * layers


def test_deepspeed_gradient_memory_by_zero_stage():
    """The expected bytes were counted in DeepSpeed 0.19.8 on two processes. ZeRO 2 needs 14.1 bytes
    per parameter and a gradient bucket.
    """
    larger = SHAPES | dict(num_layers=8, hidden_size=512, vocab_size=1024)
    spec = ModelSpec.llama(**larger, ffn_hidden_size=1408)
    plan = Plan(data_parallel=2, global_batch_size=2, engine="deepspeed")
    plans = [plan.replace(zero_stage=zero) for zero in (1, 2)]
    found = memory(Layouts.of(spec, plans, fused_norm=False), kernels=DEEPSPEED).stages[0]
    assert found.term("gradients") / spec.num_params == pytest.approx([6, 4])
    one, two = found.total_bytes / spec.num_params
    assert one == pytest.approx(16.0, rel=0.01) and two == pytest.approx(51.5, rel=0.03)


@FAMILY
def test_muon_state_matches_bytes_of_engine(family):
    """With Muon, the modelled optimizer state in fp32 equals that of the native engine after a
    step: one number per element of a matrix, and two per element of other weights.
    """
    spec = TINY[family]
    for optimizer in ("adamw", "muon"):
        counted = run_ranks(1, optimizer_bytes, spec, optimizer)[0]
        layouts = Layouts.of(spec, [Plan(precision="fp32")], muon=optimizer == "muon")
        terms = memory(layouts, convention=CONVENTIONS["fp32"]).terms()
        assert float(terms["optimizer"][0]) == counted
    assert counted < 0.7 * 8 * spec.num_params


def optimizer_bytes(spec: ModelSpec, optimizer: Any) -> int:
    recipe = Recipe(data="none", num_steps=1, optimizer=optimizer)
    engine = NativeEngine(spec, Plan(), recipe, torch.device("cpu"))
    engine.train_step(torch.zeros(1, spec.sequence_length + 1, dtype=torch.int64), 1e-3)
    states = [state for each in engine.optimizers for state in each.state.values()]
    tensors = [value for state in states for name, value in state.items() if name != "step"]
    return sum(tensor.nbytes for tensor in tensors)


def test_muon_buffers_count_where_activations_do_not_cover_them():
    """A large model with few tokens needs the buffers of a round of Muon. With many tokens, the
    memory of the freed activations covers the buffers.
    """
    spec = ModelSpec.preset("llama3.1-70b").replace(num_layers=4)
    for length, size, covers in ((64, 1, False), (8192, 8, True)):
        plan = Plan(
            tensor_parallel=8, micro_batch_size=size, global_batch_size=size, precision="bf16"
        )
        short = spec.replace(sequence_length=length)
        with_muon, without = (
            float(memory(Layouts.of(short, [plan], muon=muon)).terms()["workspace"][0])
            for muon in (True, False)
        )
        assert (with_muon == without) == covers
