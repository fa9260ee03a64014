"""ModelSpec: the sizes of a decoder-only transformer, its number of parameters and its FLOPs per
token. Imports no torch.

Notation in formulas: L is the number of layers (transformer blocks), h the hidden size, a the
number of heads. k is the number of key/value heads, d the head size, f the feed-forward size. A = a
d is the width of all query heads together, which is h in most models. V is the vocabulary size, s
the sequence length.
"""

import dataclasses
import enum
import math
import re
import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from cluster.record import ConfigError, Record, counted, field_doc, html_table, must, suggestion
from kit.config.other_names import field_advice

above_0 = must(lambda number: number > 0, "Give a number above 0.")
MAX_LAYERS = 100_000
"""Largest number of layers. It is far above that of any model, and limits the time and memory that
a wrong file can take, because some functions loop over the layers."""


class FlopBasis(enum.Enum):
    """Definitions of the FLOPs per token from which published FLOP/s are computed.

    MODEL is the kit's definition. The other definitions are from papers and from other code. The
    formulas use the letters that this module defines.
    """

    MODEL = "model"
    """6 x matmul parameters + 12 L A s. The output projection is included, the embedding look-up is
    not. Attention is counted without the causal mask, for all pairs of tokens. A layer with an
    attention window has min(window, s) in place of s."""
    MEGATRON = "megatron"
    """72 L h^2 (1 + s/6h + V/12Lh). Equation 3 of Narayanan et al. 2021 (arXiv 2104.04473) also
    counts a recomputed forward pass (see MEGATRON_RECOMPUTE). This definition leaves it out."""
    MEGATRON_RECOMPUTE = "megatron_recompute"
    """96 L h^2 (1 + s/6h + V/16Lh): equation 3 of Narayanan et al. 2021. It contains one more
    forward pass than MEGATRON, for recomputation, so it counts hardware FLOPs. The Frontier paper's
    code prints this number (`throughput_calculator` of Megatron-DeepSpeed with activation
    checkpointing)."""
    NXDT = "nxdt"
    """3 x the FLOPs of the forward pass, as AWS Neuron's training library counts them. The
    embedding counts as a second matrix product of size h x V. The softmax is included."""
    SIX_N = "six_n"
    """6 x all parameters. The often quoted number of 120 million exaFLOP for 1T parameters on 20T
    tokens uses this definition."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling(Record):
    """Scaling of rotary frequencies for longer sequences. The fields have Hugging Face's names.

    The types are `llama3`, the scaling of Llama 3.1 (arXiv 2407.21783), `linear` (position
    interpolation, arXiv 2306.15595), and `longrope` (arXiv 2402.13753), the scaling of Phi-3.
    """

    rope_type: Literal["llama3", "linear", "longrope"] = field_doc(
        "kind of scaling", default="llama3"
    )
    factor: float = field_doc(
        "llama3: factor by which low frequencies are divided. linear: factor by which all"
        " frequencies are divided. longrope: largest length divided by"
        " original_max_position_embeddings",
        default=8.0,
    )
    low_freq_factor: float = field_doc(
        "llama3: a frequency with at most this number of turns over"
        " original_max_position_embeddings tokens is low, and is divided by `factor`",
        default=1.0,
    )
    high_freq_factor: float = field_doc(
        "llama3: a frequency with at least this number of turns over"
        " original_max_position_embeddings tokens is not changed",
        default=4.0,
    )
    original_max_position_embeddings: int = field_doc(
        "sequence length, in tokens, for which the model was trained before the scaling",
        default=8192,
    )
    short_factor: tuple[float, ...] = field_doc(
        "longrope: divisor of each frequency in sequences of up to"
        " original_max_position_embeddings tokens",
        default=(),
    )
    long_factor: tuple[float, ...] = field_doc(
        "longrope: divisor of each frequency in longer sequences", default=()
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers = [
            self.factor,
            self.low_freq_factor,
            self.high_freq_factor,
            self.original_max_position_embeddings,
            *self.short_factor,
            *self.long_factor,
        ]
        if min(numbers) <= 0 or self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                f"spec.rope_scaling: {self.to_dict()} is not allowed. Give numbers above 0,"
                " low_freq_factor below high_freq_factor."
            )

    @property
    def attention_factor(self) -> float:
        """Factor of rotated queries and keys: sqrt(1 + ln(factor) / ln(original length)) with
        longrope, otherwise 1. Source: arXiv 2402.13753, and `_compute_longrope_parameters` of the
        library transformers.
        """
        if self.rope_type != "longrope" or self.factor <= 1:
            return 1.0
        original = self.original_max_position_embeddings
        return math.sqrt(1 + math.log(self.factor) / math.log(original))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec(Record):
    """All sizes and variants of one decoder-only transformer.

    The families are GPT-2, Llama, and the dense models whose differences from both are a field
    here. `kit.interop.weights.hugging_face_config.MODEL_TYPES` lists them.
    """

    name: str = field_doc("name of the model")
    num_layers: int = field_doc(
        "number of transformer blocks",
        must(lambda count: 0 < count <= MAX_LAYERS, f"Give a number from 1 to {MAX_LAYERS:,}."),
    )
    hidden_size: int = field_doc("width of the residual stream", above_0)
    num_heads: int = field_doc("number of query heads", above_0)
    num_kv_heads: int = field_doc(
        "number of key/value heads; if fewer than num_heads, attention is grouped-query attention",
        above_0,
    )
    head_dim: int | None = field_doc(
        "size of an attention head; default: hidden_size / num_heads", above_0, default=None
    )
    ffn_hidden_size: int = field_doc("width inside the feed-forward block", above_0)
    vocab_size: int = field_doc("number of tokens in the vocabulary, including padding", above_0)
    sequence_length: int = field_doc("length of the longest sequence, in tokens", above_0)
    norm: Literal["layernorm", "rmsnorm"] = field_doc(
        "type of the normalisation layers, which come before attention, before feed-forward and"
        " after the last block, unless norm_placement says otherwise"
    )
    norm_placement: Literal["before", "after", "both"] = field_doc(
        "place of the norms of attention and of feed-forward: before the layer, after the layer and"
        " before the residual sum (OLMo 2), or both (Gemma 2)",
        default="before",
    )
    zero_centered_norm: bool = field_doc(
        "whether the weights of normalisation layers are stored as offsets from 1", default=False
    )
    qk_norm: Literal["none", "per_head", "all_heads"] = field_doc(
        "normalisation of queries and keys before rotary positions: over each head (Qwen3), or over"
        " all heads together (OLMo 2)",
        default="none",
    )
    positions: Literal["learned", "rotary"] = field_doc(
        "encoding of positions: a learned embedding, or rotary embeddings (RoPE)"
    )
    activation: Literal["gelu", "gelu_tanh", "relu_squared", "swiglu", "geglu_tanh"] = field_doc(
        "feed-forward non-linearity. swiglu and geglu_tanh are gated by SiLU, and by GELU with its"
        " tanh approximation"
    )
    parallel_residual: bool = field_doc(
        "whether attention and feed-forward read the same residual stream, and both results are"
        " added to it (GPT-NeoX), instead of one after the other",
        default=False,
    )
    bias: bool = field_doc("whether linear layers have biases")
    qkv_bias: bool | None = field_doc(
        "whether the projections to queries, keys and values have biases; default: as `bias`",
        default=None,
    )
    ffn_bias: bool | None = field_doc(
        "whether the linear layers of feed-forward have biases; default: as `bias`", default=None
    )
    tied_embeddings: bool = field_doc(
        "whether the output projection shares the weight of the embedding"
    )
    norm_eps: float = field_doc(
        "number added to the variance in normalisation layers", above_0, default=1e-5
    )
    rope_theta: float = field_doc("base of the rotary frequencies", above_0, default=10_000.0)
    rope_scaling: RopeScaling | None = field_doc(
        "scaling of rotary frequencies for longer sequences; default: no scaling", default=None
    )
    partial_rotary_factor: float = field_doc(
        "share of each head, from its start, that is rotated",
        must(lambda share: 0 < share <= 1, "Give a number above 0 and at most 1."),
        default=1.0,
    )
    no_rope_layer_interval: int | None = field_doc(
        "every n-th layer has no rotary positions (SmolLM3); default: all layers have them",
        above_0,
        default=None,
    )
    sliding_window: int | None = field_doc(
        "number of tokens, its own included, to which a token attends in layers with an attention"
        " window; default: no layer has a window",
        above_0,
        default=None,
    )
    sliding_window_pattern: int | None = field_doc(
        "every n-th layer has no attention window (2 in Gemma 2, 6 in Gemma 3); default: all layers"
        " have the window",
        above_0,
        default=None,
    )
    local_rope_theta: float | None = field_doc(
        "base of the rotary frequencies in layers with an attention window, which then have no"
        " rope_scaling (Gemma 3); default: as in all other layers",
        above_0,
        default=None,
    )
    attention_multiplier: float | None = field_doc(
        "factor of the attention scores before the softmax; default: 1 / sqrt(head size)",
        above_0,
        default=None,
    )
    attn_logit_softcapping: float | None = field_doc(
        "soft cap c of the attention scores x: c tanh(x / c); default: no cap",
        above_0,
        default=None,
    )
    final_logit_softcapping: float | None = field_doc(
        "soft cap c of the logits x: c tanh(x / c); default: no cap", above_0, default=None
    )
    embedding_multiplier: float = field_doc("factor of the token embeddings", above_0, default=1.0)
    residual_multiplier: float = field_doc(
        "factor of the results of attention and feed-forward that are added to the residual stream",
        above_0,
        default=1.0,
    )
    logits_scaling: float = field_doc(
        "number by which the logits are divided", above_0, default=1.0
    )
    init_std: float = field_doc("standard deviation of the initial weights", above_0, default=0.02)
    scaled_init: bool = field_doc(
        "whether the initial weights of the output projections of attention and feed-forward"
        " are divided by sqrt(2 L), with L transformer blocks",
        default=True,
    )

    @classmethod
    def unknown_key_advice(cls, key: str, value: Any) -> str:
        return field_advice(cls, key)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ConfigError(
                f"spec.num_heads: {self.num_heads} heads do not divide hidden_size"
                f" {self.hidden_size}. Allowed here: {_divisors(self.hidden_size)}. Or give"
                " head_dim."
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"spec.num_kv_heads: {self.num_kv_heads} does not divide num_heads"
                f" {self.num_heads}. Allowed here: {_divisors(self.num_heads)}."
            )
        if self.positions == "rotary" and (self.rotary_size < 2 or self.rotary_size % 2):
            field = "hidden_size" if self.head_dim is None else "head_dim"
            raise ConfigError(
                f"spec.{field}: rotary positions need an even head size, got {self.rotary_size}."
            )
        if self.parallel_residual and self.norm_placement != "before":
            raise ConfigError(
                f"spec.norm_placement: {self.norm_placement!r} is not allowed with"
                " parallel_residual. Use 'before'."
            )
        if self.qk_norm == "all_heads" and (self.has_layernorm or self.zero_centered_norm):
            raise ConfigError(
                "spec.qk_norm: 'all_heads' is not allowed with norm 'layernorm' or with"
                " zero_centered_norm. Use 'per_head'."
            )
        self._check_dependent_fields()
        scaling = self.rope_scaling
        if scaling is not None and scaling.rope_type == "longrope":
            for field in ("short_factor", "long_factor"):
                count = len(getattr(scaling, field))
                if count != self.rotary_size // 2:
                    raise ConfigError(
                        f"spec.rope_scaling.{field}: {counted(count, 'number')}, but a head has"
                        f" {self.rotary_size // 2} rotary frequencies. Give a number for each."
                    )

    def _check_dependent_fields(self) -> None:
        """Raises ConfigError if a field is set that has no effect without another field."""
        is_rotary = self.positions == "rotary"
        has_window = self.sliding_window is not None
        needed = {
            "rope_scaling": (is_rotary, "positions 'rotary'"),
            "no_rope_layer_interval": (is_rotary, "positions 'rotary'"),
            "local_rope_theta": (is_rotary and has_window, "positions 'rotary' and sliding_window"),
            "sliding_window_pattern": (has_window, "sliding_window"),
        }
        for name, (is_met, other) in needed.items():
            if getattr(self, name) is not None and not is_met:
                raise ConfigError(
                    f"spec.{name}: has no effect without {other}. Give that too, or leave it out."
                )

    @classmethod
    def gpt(cls, **shapes) -> Self:
        """Returns a spec of the GPT family: LayerNorm, learned positions, GELU, biases, tied
        embeddings. `shapes` are fields of ModelSpec and may replace these defaults.

        Raises:
            ConfigError: A field is missing, unknown, or inconsistent with another field.
        """
        defaults: dict[str, Any] = dict(
            norm="layernorm",
            positions="learned",
            activation="gelu",
            bias=True,
            tied_embeddings=True,
            num_kv_heads=shapes.get("num_heads"),
            ffn_hidden_size=4 * shapes.get("hidden_size", 0),
        )
        return cls(**defaults | shapes)

    @classmethod
    def llama(cls, **shapes) -> Self:
        """Returns a spec of the Llama family: RMSNorm, rotary positions, SwiGLU, no biases, untied
        embeddings. `shapes` are fields of ModelSpec and may replace these defaults.

        Raises:
            ConfigError: A field is missing, unknown, or inconsistent with another field.
        """
        defaults: dict[str, Any] = dict(
            norm="rmsnorm",
            positions="rotary",
            activation="swiglu",
            bias=False,
            tied_embeddings=False,
            num_kv_heads=shapes.get("num_heads"),
        )
        return cls(**defaults | shapes)

    @classmethod
    def preset(cls, name: str) -> Self:
        """Returns the spec of a named model. PRESETS has `demo`, the GPTs of the Frontier paper,
        HLAT's Llamas, and public models.

        Raises:
            ConfigError: No preset has this name.
        """
        if name not in PRESETS:
            raise ConfigError(f"spec.preset: {name!r} is unknown. {_suggestion(name)}")
        shapes = dict(PRESETS[name], name=name)
        return getattr(cls, shapes.pop("family"))(**shapes)

    @property
    def family(self) -> Literal["gpt", "llama"]:
        """Family of the model: `llama` if its positions are rotary, otherwise `gpt`."""
        return "llama" if self.positions == "rotary" else "gpt"

    @property
    def head_size(self) -> int:
        """Size of an attention head: `head_dim`, or hidden size divided by the number of query
        heads.
        """
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def attention_size(self) -> int:
        """Width of all query heads together, which is also the input width of the attention output
        projection.
        """
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads together."""
        return self.num_kv_heads * self.head_size

    @property
    def rotary_size(self) -> int:
        """Number of elements at the start of each head that are rotated."""
        return int(self.head_size * self.partial_rotary_factor)

    @property
    def gated(self) -> bool:
        """Whether the feed-forward block has a gate projection in addition to its up projection."""
        return self.activation in ("swiglu", "geglu_tanh")

    @property
    def has_layernorm(self) -> bool:
        """Whether the norms are LayerNorms. Otherwise they are RMSNorms."""
        return self.norm == "layernorm"

    @property
    def has_learned_positions(self) -> bool:
        """Whether positions have a learned embedding."""
        return self.positions == "learned"

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normalised."""
        return self.qk_norm != "none"

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the projections to queries, keys and values have biases."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def has_ffn_bias(self) -> bool:
        """Whether the linear layers of feed-forward have biases."""
        return self.bias if self.ffn_bias is None else self.ffn_bias

    def is_local(self, layer: int) -> bool:
        """Returns whether a layer, counted from 0, has an attention window."""
        if self.sliding_window is None:
            return False
        return self.sliding_window_pattern is None or (layer + 1) % self.sliding_window_pattern != 0

    def is_rotary(self, layer: int) -> bool:
        """Returns whether a layer, counted from 0, has rotary positions."""
        if self.positions != "rotary":
            return False
        return self.no_rope_layer_interval is None or (layer + 1) % self.no_rope_layer_interval != 0

    @property
    def num_local_layers(self) -> int:
        """Number of layers with an attention window that is shorter than the sequence."""
        if self.sliding_window is None or self.sliding_window >= self.sequence_length:
            return 0
        return sum(map(self.is_local, range(self.num_layers)))

    @property
    def local_share(self) -> float:
        """Share of the layers, 0 to 1, with an attention window that is shorter than the
        sequence.
        """
        return self.num_local_layers / self.num_layers

    @property
    def attended_tokens(self) -> int:
        """Number of tokens to which a token attends without the causal mask, summed over all
        layers: min(window, sequence length) in a layer with an attention window, otherwise the
        sequence length.
        """
        window = self.sliding_window or 0
        num_local = self.num_local_layers
        return (self.num_layers - num_local) * self.sequence_length + num_local * window

    @property
    def switches(self) -> dict[str, Any]:
        """Fields of SWITCHES by which the model differs from GPT-2 and Llama, with their values."""
        found = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            usual = USUAL_ACTIVATIONS if field.name == "activation" else (field.default,)
            if field.name in SWITCHES and value not in usual:
                found[field.name] = value
        return found

    @property
    def has_plain_attention(self) -> bool:
        """Whether attention has the usual scale, no soft cap, and no window that is shorter than
        the sequence.
        """
        has_factors = self.attention_multiplier or self.attn_logit_softcapping
        return not has_factors and self.num_local_layers == 0

    # Parameters -----------------------------------------------------------------------------------

    @property
    def matmul_params_per_layer(self) -> int:
        """Number of weights of one block that are multiplied with activations. Attention has 2 h A
        + 2 h k d of them, and the feed-forward block 2 h f, or 3 h f with a gate. The letters are:
        hidden size h, width A of all query heads, key/value heads k, head size d, feed-forward size
        f.
        """
        attention = 2 * self.hidden_size * (self.attention_size + self.kv_size)
        num_projections = 3 if self.gated else 2
        return attention + num_projections * self.hidden_size * self.ffn_hidden_size

    @property
    def params_per_layer(self) -> int:
        """Number of weights of one block, including norms and biases."""
        return self.matmul_params_per_layer + self.split_vectors + self.unsplit_vectors

    @property
    def num_block_norms(self) -> int:
        """Number of norms of one block, without those of queries and keys."""
        return 4 if self.norm_placement == "both" else 2

    @property
    def split_vectors(self) -> int:
        """Number of weights of one block that are vectors and are split over tensor parallel ranks:
        biases of queries, keys and values, biases of the up and gate projections, and weights of a
        norm over all heads.
        """
        found = 0
        if self.has_qkv_bias:
            found += self.attention_size + 2 * self.kv_size
        if self.has_ffn_bias:
            found += (1 + self.gated) * self.ffn_hidden_size
        if self.qk_norm == "all_heads":
            found += self._norm_params(self.attention_size) + self._norm_params(self.kv_size)
        return found

    @property
    def unsplit_vectors(self) -> int:
        """Number of weights of one block that are vectors of which each tensor parallel rank has a
        copy: norms, and biases of the attention output and of the down projection.
        """
        found = self.num_block_norms * self._norm_params(self.hidden_size)
        if self.qk_norm == "per_head":
            found += 2 * self._norm_params(self.head_size)
        return found + (int(self.bias) + int(self.has_ffn_bias)) * self.hidden_size

    def _norm_params(self, size: int) -> int:
        """Returns the number of weights of a norm over `size` elements. LayerNorm has biases in
        addition.
        """
        return 2 * size if self.has_layernorm else size

    @property
    def embedding_params(self) -> int:
        """Number of weights of the token embedding and, if positions are learned, of the position
        embedding. The output projection is not counted.
        """
        learned = self.sequence_length * self.hidden_size if self.has_learned_positions else 0
        return self.vocab_size * self.hidden_size + learned

    @property
    def output_params(self) -> int:
        """Number of weights of the final norm and of the output projection. A projection that is
        tied to the embedding is not counted.
        """
        norm = self._norm_params(self.hidden_size)
        if self.tied_embeddings:
            return norm
        return norm + self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """Exact number of trainable weights. A tied matrix counts once."""
        return self.num_layers * self.params_per_layer + self.embedding_params + self.output_params

    @property
    def num_active_params(self) -> int:
        """Number of weights that a token uses. In a dense model these are all weights."""
        return self.num_params

    # FLOPs ----------------------------------------------------------------------------------------

    def flops_per_token(self, basis: FlopBasis = FlopBasis.MODEL) -> float:
        """Returns the training FLOPs per token, forward and backward, at the full sequence length.
        `basis` selects the definition of FLOPs.

        The kit's MFU uses `FlopBasis.MODEL`: 6 x matmul parameters + 12 L A s, with L layers, width
        A of all query heads and sequence length s. The factor 6 is 2 FLOPs per weight in the
        forward pass, and 4 in the backward pass for the gradients of input and weight. The term 12
        L A s is 6 x 2 A s per layer: per token, each of the two s x s products of attention has A s
        multiplications. Attention is counted
        without the causal mask, for all pairs of tokens. Source: PaLM (arXiv 2204.02311), appendix
        B. A layer with an attention window counts min(window, s) tokens in place of s, whatever its
        kernel computes.
        """
        L = self.num_layers  # noqa: N806
        h = self.hidden_size
        s = self.sequence_length
        V = self.vocab_size  # noqa: N806
        if basis is FlopBasis.MODEL:
            matmul_params = L * self.matmul_params_per_layer + V * h
            return 6 * matmul_params + 12 * self.attention_size * self.attended_tokens
        if basis is FlopBasis.MEGATRON:
            return 72 * L * h**2 * (1 + s / (6 * h) + V / (12 * L * h))
        if basis is FlopBasis.MEGATRON_RECOMPUTE:
            return 96 * L * h**2 * (1 + s / (6 * h) + V / (16 * L * h))
        if basis is FlopBasis.SIX_N:
            return 6.0 * self.num_params
        A = self.attention_size  # noqa: N806
        f = self.ffn_hidden_size
        feed_forward = 6 * h * f if self.gated else 4 * h * f
        attention = 4 * h * (A + self.kv_size) + 4 * s * A + 6 * self.num_heads * s
        layer = attention + feed_forward
        return 3.0 * (L * layer + 4 * V * h)

    def hardware_flops_per_token(
        self,
        recompute: Literal["none", "selective", "full"],
        *,
        whole: bool,
        layers: int | None = None,
        attention: bool = False,
    ) -> float:
        """Returns the FLOPs per token that the devices execute, for HFU: the model FLOPs, the FLOPs
        of masked pairs of tokens outside attention windows, and the FLOPs of recomputation.

        The kit's attention with a window computes all pairs of tokens and masks those outside the
        window. A layer with a window therefore counts as a layer without one.

        `recompute` 'full' repeats the forward pass of all blocks, or of `layers` blocks
        (`Plan.recomputed_layers`). To repeat a block takes 2 x its matmul weights + 4 A s FLOPs,
        with width A of all query heads and sequence length s.

        If `whole` is True, blocks are repeated to their end. Megatron's reentrant checkpoint does
        this, and so does the kit if `Plan.recomputes_whole` is True. Otherwise the last matrix
        product of a block is not repeated, which saves 2 h f FLOPs per block, with feed-forward
        size f. Torch's non-reentrant checkpoint stops as soon as it has the last tensor that the
        backward pass needs (`torch.utils.checkpoint.set_checkpoint_early_stop`). A norm after
        feed-forward needs the result of that product, so such blocks are repeated to their end.

        `recompute` 'selective' repeats element-wise operations (norms, rotary positions,
        activation). No definition of FLOPs counts these operations. If `attention` is True, it also
        repeats the core of attention, as in NxD and Megatron-LM (`Plan.recomputes_attention`). This
        takes 4 A s FLOPs per block.
        """
        masked_tokens = self.num_layers * self.sequence_length - self.attended_tokens
        executed = self.flops_per_token() + 12 * self.attention_size * masked_tokens
        if recompute == "selective" and attention:
            repeated_tokens = self.num_layers * self.sequence_length
            return executed + 4 * self.attention_size * repeated_tokens
        if recompute != "full":
            return executed
        params = self.matmul_params_per_layer
        if not whole and self.norm_placement == "before":
            params -= self.hidden_size * self.ffn_hidden_size
        if layers is None:
            layers = self.num_layers
        recomputed = layers * (2 * params + 4 * self.attention_size * self.sequence_length)
        return executed + recomputed

    def _repr_html_(self) -> str:
        vocabulary = f"{self.vocab_size:,}"
        if self.tied_embeddings:
            vocabulary += " (tied)"
        shape = (
            f"{self.num_layers} x {self.hidden_size}, {counted(self.num_heads, 'head')}"
            f" ({self.num_kv_heads} kv)"
        )
        rows = [
            ("family", f"{self.family}: {self.norm}, {self.positions}, {self.activation}"),
            ("layers x hidden, heads", shape),
            ("feed-forward", f"{self.ffn_hidden_size:,}"),
            ("vocabulary", vocabulary),
            ("sequence length", f"{self.sequence_length:,}"),
            ("parameters", f"{self.num_params:,}"),
            ("model FLOPs per token", f"{self.flops_per_token():.4g}"),
        ]
        rows += [(name, value) for name, value in self.switches.items() if name != "activation"]
        return html_table(f"ModelSpec {self.name}", rows, ModelSpec)


USUAL_ACTIVATIONS = ("gelu", "gelu_tanh", "swiglu")
"""Activation functions of GPT-2 and Llama."""
SWITCHES = frozenset(
    (
        "activation",
        "head_dim",
        "norm_placement",
        "zero_centered_norm",
        "qk_norm",
        "parallel_residual",
        "qkv_bias",
        "ffn_bias",
        "partial_rotary_factor",
        "no_rope_layer_interval",
        "sliding_window",
        "sliding_window_pattern",
        "local_rope_theta",
        "attention_multiplier",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "embedding_multiplier",
        "residual_multiplier",
        "logits_scaling",
    )
)
"""Fields of ModelSpec that change the computation of a block or of the logits compared with GPT-2
and Llama. `Capabilities.untrained_switches` names the fields that an engine does not train."""


def _divisors(number: int) -> str:
    """Returns the divisors of a number, separated by commas. Divisors above 4,096 are left out, so
    that a wrong file with a huge number takes no time.
    """
    most = min(number, 4096)
    found = [str(i) for i in range(1, most + 1) if number % i == 0]
    return ", ".join([*found, "..."] if number > most else found)


PRESETS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("presets.toml").read_text(encoding="utf-8")
)
"""Family and sizes of each named model, by name of the model. Sources are given in the file
presets.toml."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([mbt])\b")


def _suggestion(name: str) -> str:
    """Returns the end of an error message about an unknown preset. If the name contains a size such
    as 7b, it suggests the presets of this size. Otherwise it suggests the preset with the closest
    name.
    """
    size = _SIZE.search(name.lower())
    if size is None:
        return suggestion(name, PRESETS)
    alike = []
    for preset in PRESETS:
        preset_size = _SIZE.search(preset)
        if preset_size and preset_size.groups() == size.groups():
            alike.append(preset)
    if alike:
        return (
            f"Did you mean {' or '.join(map(repr, alike))}? Allowed: {', '.join(sorted(PRESETS))}."
        )
    # A preset of another size is not suggested, even if its name is similar.
    return (
        f"None has {size[0].upper()} parameters. Give a spec.json of your own."
        f" {suggestion('', PRESETS)}"
    )
