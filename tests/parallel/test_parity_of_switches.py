"""Models with the switches of today's families train on every layout as on one process. Losses and
gradient norms have a relative difference of at most 1e-5.
"""

import pytest

from kit.config.spec import SWITCHES, ModelSpec, RopeScaling
from tests.support.parity import TOLERANCE, compare, some_thorough

SIZES = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "vocab_size": 128}
SIZES |= {"sequence_length": 16, "num_kv_heads": 2, "ffn_hidden_size": 64}
SPECS = {
    "qwen3": ModelSpec.llama(
        name="qwen3",
        **SIZES,
        head_dim=12,
        qk_norm="per_head",
        tied_embeddings=True,
        rope_scaling=RopeScaling(rope_type="linear", factor=2.0),
    ),
    "gemma": ModelSpec.llama(
        name="gemma",
        **SIZES,
        norm_placement="both",
        zero_centered_norm=True,
        qk_norm="per_head",
        activation="geglu_tanh",
        tied_embeddings=True,
        sliding_window=5,
        sliding_window_pattern=2,
        local_rope_theta=100.0,
        attention_multiplier=0.3,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        embedding_multiplier=32**0.5,
    ),
    "olmo2": ModelSpec.llama(name="olmo2", **SIZES, norm_placement="after", qk_norm="all_heads"),
    "neox": ModelSpec.gpt(
        name="neox",
        **SIZES,
        positions="rotary",
        tied_embeddings=False,
        partial_rotary_factor=0.5,
        parallel_residual=True,
    ),
    "granite": ModelSpec.llama(
        name="granite",
        **SIZES,
        qkv_bias=True,
        ffn_bias=True,
        no_rope_layer_interval=2,
        residual_multiplier=0.4,
        embedding_multiplier=3.0,
        logits_scaling=2.0,
    ),
}
LAYOUTS = {
    "TP2": {"tensor_parallel": 2},
    "TP2 + SP": {"tensor_parallel": 2, "sequence_parallel": True},
    "PP2, 1F1B": {"pipeline_parallel": 2},
    "PP2, interleaved": {"pipeline_parallel": 2, "schedule": "interleaved", "virtual_stages": 2},
    "DP2, ZeRO 3": {"data_parallel": 2, "zero_stage": 3},
    "DP2, ZeRO 3, recompute full": {"data_parallel": 2, "zero_stage": 3, "recompute": "full"},
    "recompute selective": {"recompute": "selective"},
}
THOROUGH = ("TP2", "PP2, interleaved", "DP2, ZeRO 3, recompute full", "recompute selective")


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("layout", some_thorough(LAYOUTS, THOROUGH))
def test_layout_equals_one_process(family, layout, native_run, run_standing):
    found = compare(LAYOUTS[layout], "native", SPECS[family], native_run, run=run_standing)
    assert max(found.values()) <= TOLERANCE, found


def test_every_switch_is_trained():
    trained = {name for spec in SPECS.values() for name in spec.switches}
    assert trained == SWITCHES
