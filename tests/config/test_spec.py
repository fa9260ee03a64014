import re

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cluster.site import Site
from kit.config.plan import Plan
from kit.config.spec import PRESETS, FlopBasis, ModelSpec, RopeScaling
from kit.engines.neuron.model import NxdCoreAttention
from kit.errors import ConfigError
from kit.model import Decoder, build_decoder
from kit.run.metrics import utilisation_rates

# Numbers of parameters. Sources: published configurations (HLAT, Llama 3), a checkpoint (GPT-2 XL),
# model names (GPTs), and the sizes of the weight files on the Hugging Face hub (all others).
PARAMS = {
    "hlat-7b": 6_738_415_616,
    "hlat-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "gpt2-xl": 1_557_611_200,
    "gpt-1.4b": pytest.approx(1.4e9, rel=0.01),
    "gpt-22b": pytest.approx(22e9, rel=0.01),
    "gpt-175b": pytest.approx(175e9, rel=0.01),
    "gpt-1t": pytest.approx(1008e9, rel=0.01),
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.3-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "smollm3-3b": 3_075_098_624,
}
SHAPES = {"num_layers": 3, "hidden_size": 64, "num_heads": 4, "vocab_size": 96}
GPT = ModelSpec.gpt(name="g", **SHAPES, sequence_length=40)
LLAMA = ModelSpec.llama(name="l", **SHAPES, sequence_length=40, ffn_hidden_size=176)
OLMO2 = LLAMA.replace(norm_placement="after", qk_norm="all_heads", head_dim=24)
GEMMA2 = LLAMA.replace(
    norm_placement="both", sliding_window=8, sliding_window_pattern=2, attn_logit_softcapping=5.0
)
NEOX = GPT.replace(positions="rotary", parallel_residual=True, partial_rotary_factor=0.5)
ONE_SEQUENCE = torch.zeros(1, 40, dtype=torch.int64)


@pytest.mark.parametrize("name", PARAMS)
def test_presets_have_published_parameter_counts(name):
    assert ModelSpec.preset(name).num_params == PARAMS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_counts_equal_torch(name):
    spec = ModelSpec.preset(name)
    with torch.device("meta"):
        decoder = Decoder(spec)
    assert sum(parameter.numel() for parameter in decoder.parameters()) == spec.num_params


@pytest.mark.parametrize("name", ["demo", "gpt2-xl", "llama3-8b", "qwen3-0.6b", "gemma3-1b"])
def test_model_flops_equal_torch_counter(name):
    """Torch counts the FLOPs of a forward pass on the meta device, including the full attention
    matrix. The executed FLOPs are three times this number, and so are the model FLOPs without
    attention windows.
    """
    spec = ModelSpec.preset(name).replace(num_layers=2)
    with torch.device("meta"):
        decoder = Decoder(spec)
        tokens = torch.zeros(1, spec.sequence_length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        decoder(tokens)
    counted = 3 * counter.get_total_flops() / spec.sequence_length
    assert counted == pytest.approx(spec.hardware_flops_per_token("none", whole=True), rel=1e-6)
    masked = 12 * spec.attention_size * (2 * spec.sequence_length - spec.attended_tokens)
    assert counted == pytest.approx(spec.flops_per_token() + masked, rel=1e-6)


def test_windows_count_their_tokens():
    """Gemma 3 1B has 26 layers. Every sixth layer attends to all 32,768 tokens, the others to
    512.
    """
    spec = ModelSpec.preset("gemma3-1b")
    tokens = 4 * 32_768 + 22 * 512
    assert (spec.num_local_layers, spec.attended_tokens) == (22, tokens)
    products = 26 * spec.matmul_params_per_layer + 262_144 * 1152
    assert spec.flops_per_token() == 6 * products + 12 * 4 * 256 * tokens
    assert spec.replace(sequence_length=512).num_local_layers == 0


def test_hlat_flops_equal_the_published_formula():
    """The expected values are TFLOP per sequence of 4,096 tokens, from the formula of Neuron's
    training library, for HLAT's 7B and 70B models.
    """
    for name, tera in (("hlat-7b", 192.29), ("hlat-70b", 1828.63)):
        spec = ModelSpec.preset(name)
        found = spec.flops_per_token(FlopBasis.NXDT) * spec.sequence_length
        assert found / 1e12 == pytest.approx(tera, abs=0.01)


def test_megatron_flop_counts_agree_for_gpt_175b():
    """Megatron-LM's formula equals our model FLOPs. Megatron-LM's formula with recomputation equals
    our hardware FLOPs with full recomputation.
    """
    spec = ModelSpec.preset("gpt-175b")
    ours = spec.flops_per_token()
    assert spec.flops_per_token(FlopBasis.MEGATRON) == pytest.approx(ours, rel=1e-3)
    # Recomputation adds one forward pass of the blocks (1/3). Both formulas leave out recomputation
    # of the output projection.
    again = spec.flops_per_token(FlopBasis.MEGATRON_RECOMPUTE)
    assert again == pytest.approx(spec.hardware_flops_per_token("full", whole=True), rel=1e-3)


def test_six_n_gives_frontiers_cost_of_gpt_1t():
    """The paper gives 120 million exaFLOP for 20 trillion tokens. This equals 6 N D, with N
    parameters and D tokens.
    """
    spec = ModelSpec.preset("gpt-1t")
    assert spec.flops_per_token(FlopBasis.SIX_N) * 20e12 / 1e18 == pytest.approx(120e6, rel=0.01)


@pytest.mark.parametrize(
    ("recompute", "layers"), [("none", None), ("selective", None), ("full", None), ("full", 1)]
)
@pytest.mark.parametrize(
    "spec", [GPT, LLAMA, OLMO2, GEMMA2, NEOX], ids=["gpt", "llama", "olmo2", "gemma2", "neox"]
)
def test_hardware_flops_equal_torch_counter(spec, recompute, layers):
    """Attention uses torch's math kernel, whose operators torch counts in both passes. Blocks are
    not compiled.
    """
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        decoder = Decoder(spec, recompute=recompute, recompute_layers=layers)
        decoder(ONE_SEQUENCE).sum().backward()
    plan = Plan(recompute=recompute, recompute_layers=layers)
    expected = spec.hardware_flops_per_token(
        recompute, whole=plan.recomputes_whole, layers=plan.recomputed_layers(spec)
    )
    assert counter.get_total_flops() / spec.sequence_length == pytest.approx(expected, rel=1e-6)


def test_selective_recompute_of_nxd_repeats_attention():
    """Torch counts the FLOPs of the module that NxD computes again in the backward pass."""
    spec = ModelSpec.preset("hlat-7b").replace(num_layers=2, sequence_length=64)
    plan = Plan(engine="neuron", recompute="selective")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        heads = torch.zeros(1, spec.num_heads, spec.sequence_length, spec.head_size)
        NxdCoreAttention(plan)(heads, heads, heads)
    repeated = spec.num_layers * counter.get_total_flops() / spec.sequence_length
    own = utilisation_rates(spec, plan, Site.load("trn1.32xlarge"), is_imported=False)
    assert own and repeated > 0
    assert own[1] / own[0] == pytest.approx(1 + repeated / spec.flops_per_token(), rel=1e-6)
    native = plan.replace(engine="native")
    rates = utilisation_rates(spec, native, Site.load("dgx-h100"), is_imported=False)
    assert rates and rates[0] == rates[1], "element-wise operations only"


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_blocks_are_recomputed_whole():
    """The graphs of a block run 6 matrix products in the forward pass, 6 again for recomputation,
    and 12 in the backward pass.
    """
    ran, products = [], ("aten.mm.default", "aten.addmm.default")

    def counted(graph, _):
        def run(inputs):
            found = graph.forward(*inputs)
            ran.extend(node for node in graph.graph.nodes if str(node.target) in products)
            return found

        run._boxed_call = True  # The compiled function takes its inputs as one list.
        return run

    spec = GPT.replace(num_layers=2)
    decoder = build_decoder(spec, recompute="full")
    for block in decoder.layers.values():
        block.compile(backend=aot_autograd(fw_compiler=counted, bw_compiler=counted))
    decoder(ONE_SEQUENCE).sum().backward()
    assert len(ran) == spec.num_layers * (6 + 6 + 12)
    assert Plan(recompute="full", compile=True).recomputes_whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layer": 3}, "spec.num_layer: unknown key. Did you mean 'num_layers'?"),
        ({"num_layers": "four"}, "spec.num_layers: expected int, got str 'four'"),
        ({"num_layers": 0}, "spec.num_layers: 0 is not allowed"),
        ({"num_heads": 3}, "spec.num_heads: 3 heads do not divide hidden_size 128"),
        ({"num_kv_heads": 3}, "spec.num_kv_heads: 3 does not divide num_heads 4"),
        ({"norm": "batchnorm"}, "'batchnorm' is not allowed. Allowed: 'layernorm', 'rmsnorm'"),
        ({"bias": 1}, "spec.bias: expected bool, got int 1"),
        ({"head_dim": 31}, "spec.head_dim: rotary positions need an even head size, got 31"),
        ({"partial_rotary_factor": 1.5}, "spec.partial_rotary_factor: 1.5 is not allowed"),
        ({"local_rope_theta": 1e4}, "spec.local_rope_theta: has no effect without"),
        ({"sliding_window_pattern": 6}, "sliding_window_pattern: has no effect without sliding_w"),
        (
            {"norm_placement": "after", "parallel_residual": True},
            "spec.norm_placement: 'after' is not allowed with parallel_residual",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}},
            "spec.rope_scaling.short_factor: 1 number, but a head has 16 rotary frequencies",
        ),
    ],
)
def test_invalid_spec_values_are_named_by_path(change, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        ModelSpec.preset("demo").replace(**change)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("gpt-175", "'gpt-175' is unknown. Did you mean 'gpt-175b'?"),
        ("llama-405b", "Did you mean 'llama3.1-405b'?"),
        ("qwen2-32b", "Did you mean 'qwen3-32b' or 'olmo2-32b'?"),
        ("gpt3-175B", "Did you mean 'gpt-175b'?"),
        ("dmeo", "Did you mean 'demo'?"),
        ("llama-33b", "None has 33B"),
    ],
)
def test_unknown_preset_suggests_preset_of_its_size(name, advice):
    """The suggested preset has the size in the unknown name. If no preset has this size, the error
    says so.
    """
    with pytest.raises(ConfigError, match=re.escape(advice)):
        ModelSpec.preset(name)


@pytest.mark.parametrize("name", PRESETS)
def test_spec_json_round_trip(name):
    spec = ModelSpec.preset(name)
    assert ModelSpec.from_json(spec.to_json()) == spec
    assert f"{spec.num_params:,}" in spec._repr_html_()


@pytest.mark.parametrize(
    "wrong", [{"factor": 0.0}, {"low_freq_factor": 4.0}, {"original_max_position_embeddings": -1}]
)
def test_invalid_rope_scaling_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"spec\.rope_scaling: .* is not allowed"):
        RopeScaling(**wrong)
