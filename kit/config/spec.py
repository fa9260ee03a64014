"""ModelSpec: the sizes of a decoder-only transformer, its number of parameters and its FLOPs per
token. Imports no torch.

Notation in formulas: L is the number of layers (transformer blocks), h the hidden size, a the
number of heads. k is the number of key/value heads, d the head size (h = a d), f the feed-forward
size. V is the vocabulary size, s the sequence length.
"""

import dataclasses
import enum
import re
import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from cluster.record import ConfigError, Record, counted, field_doc, html_table, must, suggestion

above_0 = must(lambda number: number > 0, "Give a number above 0.")


class FlopBasis(enum.Enum):
    """Definitions of the FLOPs per token from which published FLOP/s are computed.

    MODEL is the kit's definition. The other definitions are from papers and from other code. The
    formulas use the letters that this module defines.
    """

    MODEL = "model"
    """6 x matmul parameters + 12 L h s. The output projection is included, the embedding look-up is
    not. Attention is counted without the causal mask, for all pairs of tokens."""
    MEGATRON = "megatron"
    """72 L h^2 (1 + s/6h + V/12Lh): equation 3 of Narayanan et al. 2021 (arXiv 2104.04473), without
    the recomputation that this equation contains."""
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
    """Scaling of rotary frequencies for longer sequences, as in Llama 3.1 (arXiv 2407.21783). The
    fields have Hugging Face's names.
    """

    factor: float = field_doc("factor by which low frequencies are divided", default=8.0)
    low_freq_factor: float = field_doc(
        "a frequency with at most this number of turns over original_max_position_embeddings"
        " tokens is low, and is divided by `factor`",
        default=1.0,
    )
    high_freq_factor: float = field_doc(
        "a frequency with at least this number of turns over original_max_position_embeddings"
        " tokens is not changed",
        default=4.0,
    )
    original_max_position_embeddings: int = field_doc(
        "sequence length, in tokens, for which the model was trained before the scaling",
        default=8192,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(dataclasses.astuple(self)) <= 0 or self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                f"spec.rope_scaling: {self.to_dict()} is not allowed. Give numbers above 0,"
                " low_freq_factor below high_freq_factor."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec(Record):
    """All sizes and variants of one decoder-only transformer (GPT or Llama family)."""

    name: str = field_doc("name of the model")
    num_layers: int = field_doc("number of transformer blocks", above_0)
    hidden_size: int = field_doc("width of the residual stream", above_0)
    num_heads: int = field_doc("number of query heads", above_0)
    num_kv_heads: int = field_doc(
        "number of key/value heads; if fewer than num_heads, attention is grouped-query attention",
        above_0,
    )
    ffn_hidden_size: int = field_doc("width inside the feed-forward block", above_0)
    vocab_size: int = field_doc("number of tokens in the vocabulary, including padding", above_0)
    sequence_length: int = field_doc("length of the longest sequence, in tokens", above_0)
    norm: Literal["layernorm", "rmsnorm"] = field_doc(
        "type of the normalisation layers, which come before attention, before feed-forward and"
        " after the last block"
    )
    positions: Literal["learned", "rotary"] = field_doc(
        "encoding of positions: a learned embedding, or rotary embeddings (RoPE)"
    )
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = field_doc(
        "feed-forward non-linearity (swiglu is gated)"
    )
    bias: bool = field_doc("whether linear layers have biases")
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
    init_std: float = field_doc("standard deviation of the initial weights", above_0, default=0.02)
    scaled_init: bool = field_doc(
        "whether the initial weights of the output projections of attention and feed-forward"
        " are divided by sqrt(2 L), with L transformer blocks",
        default=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"spec.num_heads: {self.num_heads} heads do not divide hidden_size"
                f" {self.hidden_size}. Allowed here: {_divisors(self.hidden_size)}."
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"spec.num_kv_heads: {self.num_kv_heads} does not divide num_heads"
                f" {self.num_heads}. Allowed here: {_divisors(self.num_heads)}."
            )
        if self.positions == "rotary" and self.head_size % 2:
            raise ConfigError(
                f"spec.hidden_size: rotary positions need an even head size, got {self.head_size}."
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
        """Size of an attention head: hidden size divided by the number of query heads."""
        return self.hidden_size // self.num_heads

    @property
    def gated(self) -> bool:
        """Whether the feed-forward block has a gate projection in addition to its up projection."""
        return self.activation == "swiglu"

    # Parameters -----------------------------------------------------------------------------------

    @property
    def matmul_params_per_layer(self) -> int:
        """Number of weights of one block that are multiplied with activations. Attention has 2 h^2
        + 2 h k d of them, and the feed-forward block 2 h f, or 3 h f with a gate. The letters are:
        hidden size h, key/value heads k, head size d, feed-forward size f.
        """
        attention = (
            2 * self.hidden_size**2 + 2 * self.hidden_size * self.num_kv_heads * self.head_size
        )
        num_projections = 3 if self.gated else 2
        return attention + num_projections * self.hidden_size * self.ffn_hidden_size

    @property
    def params_per_layer(self) -> int:
        """Number of weights of one block, including norms and biases."""
        return self.matmul_params_per_layer + 2 * self._norm_params + self._biases_per_layer

    @property
    def _biases_per_layer(self) -> int:
        """Number of biases of one block, without norms: biases of queries, keys and values, of the
        attention output, and of the two or three feed-forward projections.
        """
        if not self.bias:
            return 0
        h = self.hidden_size
        kv = self.num_kv_heads * self.head_size
        ffn_in = 2 * self.ffn_hidden_size if self.gated else self.ffn_hidden_size
        return (h + 2 * kv) + h + ffn_in + h

    @property
    def _norm_params(self) -> int:
        """Number of weights of one norm. LayerNorm has biases in addition."""
        return 2 * self.hidden_size if self.norm == "layernorm" else self.hidden_size

    @property
    def embedding_params(self) -> int:
        """Number of weights of the token embedding and, if positions are learned, of the position
        embedding.
        """
        learned = self.sequence_length * self.hidden_size if self.positions == "learned" else 0
        return self.vocab_size * self.hidden_size + learned

    @property
    def output_params(self) -> int:
        """Number of weights of the final norm and of the output projection. A projection that is
        tied to the embedding is not counted.
        """
        if self.tied_embeddings:
            return self._norm_params
        return self._norm_params + self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """Exact number of trainable weights. A tied matrix counts once."""
        return self.num_layers * self.params_per_layer + self.embedding_params + self.output_params

    # FLOPs ----------------------------------------------------------------------------------------

    def flops_per_token(self, basis: FlopBasis = FlopBasis.MODEL) -> float:
        """Returns the training FLOPs per token, forward and backward, at the full sequence length.
        `basis` selects the definition of FLOPs.

        The kit's MFU uses `FlopBasis.MODEL`: 6 x matmul parameters + 12 L h s, with L layers,
        hidden size h and sequence length s. The factor 6 is 2 FLOPs per weight in the forward pass,
        and 4 in the backward pass for the gradients of input and weight. The term 12 L h s is 6
        times the two s x s products of attention, each of width h. Attention is counted without the
        causal mask, for all pairs of tokens. Source: PaLM (arXiv 2204.02311), appendix B.
        """
        L = self.num_layers  # noqa: N806
        h = self.hidden_size
        s = self.sequence_length
        V = self.vocab_size  # noqa: N806
        if basis is FlopBasis.MODEL:
            return 6 * (L * self.matmul_params_per_layer + V * h) + 12 * L * h * s
        if basis is FlopBasis.MEGATRON:
            return 72 * L * h**2 * (1 + s / (6 * h) + V / (12 * L * h))
        if basis is FlopBasis.MEGATRON_RECOMPUTE:
            return 96 * L * h**2 * (1 + s / (6 * h) + V / (16 * L * h))
        if basis is FlopBasis.SIX_N:
            return 6.0 * self.num_params
        kv = self.num_kv_heads * self.head_size
        f = self.ffn_hidden_size
        a = self.num_heads
        feed_forward = 6 * h * f if self.gated else 4 * h * f
        layer = 4 * h**2 + 4 * h * kv + 4 * s * h + 6 * a * s + feed_forward
        return 3.0 * (L * layer + 4 * V * h)

    def hardware_flops_per_token(
        self,
        recompute: Literal["none", "selective", "full"],
        *,
        whole: bool,
        layers: int | None = None,
    ) -> float:
        """Returns the FLOPs per token that the devices execute, for HFU: the model FLOPs plus the
        FLOPs of recomputation.

        `recompute` 'full' repeats the forward pass of all blocks, or of `layers` blocks
        (`Plan.recomputed_layers`). To repeat a block takes 2 x its matmul weights + 4 h s FLOPs,
        with hidden size h and sequence length s.

        If `whole` is True, blocks are repeated to their end. Megatron's reentrant checkpoint does
        this, and so does the kit if `Plan.recomputes_whole` is True. Otherwise the last matrix
        product of a block is not repeated, which saves 2 h f FLOPs per block, with feed-forward
        size f. Torch's non-reentrant checkpoint stops as soon as it has the last tensor that the
        backward pass needs (`torch.utils.checkpoint.set_checkpoint_early_stop`).

        `recompute` 'selective' repeats only element-wise operations (norms, rotary positions,
        activation). No definition of FLOPs counts these operations, so the result is equal to the
        model FLOPs.
        """
        if recompute != "full":
            return self.flops_per_token()
        params = self.matmul_params_per_layer
        if not whole:
            params -= self.hidden_size * self.ffn_hidden_size
        if layers is None:
            layers = self.num_layers
        recomputed = layers * (2 * params + 4 * self.hidden_size * self.sequence_length)
        return self.flops_per_token() + recomputed

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
        return html_table(f"ModelSpec {self.name}", rows, ModelSpec)


def _divisors(number: int) -> str:
    """Returns the divisors of a number, separated by commas."""
    return ", ".join(str(i) for i in range(1, number + 1) if number % i == 0)


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
