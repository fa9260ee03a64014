"""What the kit's own engines keep in a whole step, as modelled and as counted."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from kit.engines.native import NativeEngine
from kit.estimate.theory.activations import DEEPSPEED
from kit.estimate.theory.layouts import Layouts
from kit.estimate.theory.memory import memory
from kit.plan import Plan
from kit.recipe import Recipe
from kit.spec import ModelSpec
from tests.estimate.live_bytes import LiveBytes

SHAPES = dict(
    name="tiny", num_layers=6, hidden_size=128, num_heads=4, vocab_size=512, sequence_length=64
)


@pytest.fixture
def fake_ranks():
    """Rank 0 of four, whose collectives move nothing but take their memory."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("zero, micro_batches", [(0, 1), (1, 1), (1, 2), (2, 2), (3, 1), (3, 2)])
def test_whole_steps_of_the_native_engine(zero, micro_batches, fake_ranks):
    spec = ModelSpec.llama(**SHAPES, ffn_hidden_size=352)
    batch = 4 * micro_batches
    plan = Plan(data_parallel=4, zero_stage=zero, global_batch_size=batch, precision="bf16")
    samples = torch.randint(0, spec.vocab_size, (micro_batches, spec.sequence_length + 1))
    with LiveBytes() as live:
        engine = NativeEngine(spec, plan, Recipe(data="none", num_steps=2), torch.device("cpu"))
        for _ in range(2):
            live.peak = 0
            engine.train_step(samples, 1e-3)
    found = memory(Layouts.of(spec, [plan], fused_norm=False)).stages[0]
    assert found.total.item() == pytest.approx(live.peak, rel=0.05)


def test_what_deepspeed_keeps_of_gradients():
    """As counted in DeepSpeed 0.19.8 on two processes; ZeRO 2 keeps a bucket beside 14.1 bytes."""
    larger = SHAPES | dict(num_layers=8, hidden_size=512, vocab_size=1024)
    spec = ModelSpec.llama(**larger, ffn_hidden_size=1408)
    plan = Plan(data_parallel=2, global_batch_size=2, engine="deepspeed")
    plans = [plan.replace(zero_stage=zero) for zero in (1, 2)]
    found = memory(Layouts.of(spec, plans, fused_norm=False), kernels=DEEPSPEED).stages[0]
    assert found.term("gradients") / spec.num_params == pytest.approx([6, 4])
    one, two = found.total / spec.num_params
    assert one == pytest.approx(16.0, rel=0.01) and two == pytest.approx(51.5, rel=0.03)
