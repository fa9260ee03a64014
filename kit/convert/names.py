"""The one map between the kit's weights and those of Hugging Face's LlamaForCausalLM and
GPT2LMHeadModel.

Names are joined from module and `weight` or `bias`. GPT-2 stores the matrices of its blocks
transposed (input features first), with query, key and value side by side in one.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kit.spec import ModelSpec

OUTSIDE = {
    "llama": {"embedding.tokens": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"},
    "gpt": {
        "embedding.tokens": "transformer.wte",
        "embedding.positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "output": "lm_head",
    },
}
BLOCKS = {"llama": "model.layers", "gpt": "transformer.h"}
IN_BLOCK = {
    "llama": {
        "attention_norm": "input_layernorm",
        "feed_forward_norm": "post_attention_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "feed_forward.gate": "mlp.gate_proj",
        "feed_forward.up": "mlp.up_proj",
        "feed_forward.down": "mlp.down_proj",
    },
    "gpt": {
        "attention_norm": "ln_1",
        "feed_forward_norm": "ln_2",
        "attention.query": "attn.c_attn",
        "attention.key": "attn.c_attn",
        "attention.value": "attn.c_attn",
        "attention.output": "attn.c_proj",
        "feed_forward.up": "mlp.c_fc",
        "feed_forward.down": "mlp.c_proj",
    },
}
FUSED = {"attention.query": 0, "attention.key": 1, "attention.value": 2}
"""Which third of GPT-2's `c_attn`."""


def their_name(spec: ModelSpec, name: str) -> str:
    """Returns Hugging Face's name of one of our weights."""
    module, kind = name.rsplit(".", 1)
    if not module.startswith("layers."):
        return f"{OUTSIDE[spec.family][module]}.{kind}"
    _, number, inner = module.split(".", 2)
    return f"{BLOCKS[spec.family]}.{number}.{IN_BLOCK[spec.family][inner]}.{kind}"


def to_theirs(spec: ModelSpec, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Returns weights as Hugging Face names and stores them; query, key and value must come in
    this order.
    """
    found: dict[str, Tensor] = {}
    for name, weight in weights:
        theirs = their_name(spec, name)
        weight = weight.T if _transposed(spec, name, weight) else weight
        found[theirs] = torch.cat((found[theirs], weight), dim=-1) if theirs in found else weight
    return {name: weight.contiguous() for name, weight in found.items()}


def from_theirs(spec: ModelSpec, name: str, read: Callable[[str], Tensor]) -> Tensor:
    """Returns one of our weights, a view of what `read` gives: one of theirs by its name."""
    weight = read(their_name(spec, name))
    inner = name.split(".", 2)[-1].rsplit(".", 1)[0]
    if spec.family == "gpt" and inner in FUSED:
        weight = weight.chunk(3, dim=-1)[FUSED[inner]]
    return weight.T if _transposed(spec, name, weight) else weight


def _transposed(spec: ModelSpec, name: str, weight: Tensor) -> bool:
    return spec.family == "gpt" and name.startswith("layers.") and weight.ndim == 2
