"""Many layouts (models with their plans) as arrays, so that one formula is evaluated for all of
them at once.

Symbols of the formulas in this folder:

- Shapes: L layers, h hidden size, a heads, k key/value heads, d head size, f feed-forward size,
  V vocabulary size, s sequence length. A = a d is the width of all query heads together.
- Degrees of parallelism: t tensor parallelism, p pipeline parallelism, v virtual stages per
  pipeline device, c context parallelism, r data parallelism (replicas).
- Batch: b micro-batch size and B global batch size in sequences, m micro-batches per step.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np

from kit.config.plan import Plan, Precision
from kit.config.spec import ModelSpec
from kit.engines.capabilities import DEFAULT_ENGINE, EngineName

RECOMPUTE = ("none", "selective", "full")
EXCHANGES = ("ring", "all_to_all")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
CODES = {"recompute": RECOMPUTE, "schedule": SCHEDULES, "context_exchange": EXCHANGES}
"""Maps the name of each column of `Layouts` that contains indices to the tuple of names to which
the indices refer."""
Array = np.ndarray


class ArrayColumns:
    """Base class of dataclasses that describe many layouts. Each field is an array with one element
    per layout, or one number for all layouts.
    """

    def map(self, change: Callable[[Any], Any]) -> Self:
        """Returns a copy in which the value of each field is the result of `change` for the old
        value.
        """
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return type(self)(**{field.name: change(getattr(self, field.name)) for field in fields})

    @classmethod
    def joined(cls, parts: Sequence[Self], sizes: Sequence[int] | None = None) -> Self:
        """Returns one object with the layouts of all parts, in order. `sizes` has the number of
        layouts of each part, by default 1. A field with a single number in a part is repeated for
        all layouts of this part.
        """
        columns = {}
        sizes = sizes or [1] * len(parts)
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            values = [getattr(part, field.name) for part in parts]
            columns[field.name] = np.concatenate(list(map(np.broadcast_to, values, sizes)))
        return cls(**columns)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layouts(ArrayColumns):
    """Models, plans and kernels of many layouts. Each field is an array with one element per
    layout, or with one element for all layouts. All arrays can be broadcast to one shape.

    Whole numbers are float64 arrays, since their products exceed 2^63. Boolean fields are bool
    arrays. Indices into a tuple of names (`CODES`) are int8 arrays.
    """

    num_layers: Array
    hidden_size: Array
    num_heads: Array
    num_kv_heads: Array
    head_size: Array
    ffn_hidden_size: Array
    vocab_size: Array
    sequence_length: Array
    gated: Array
    has_layernorm: Array
    """Whether the norms are LayerNorms, which have biases. Otherwise they are RMSNorms."""
    has_learned_positions: Array
    num_block_norms: Array
    """Number of norms of one block, without those of queries and keys."""
    parallel_residual: Array
    """Whether attention and feed-forward read the same residual stream."""
    has_qk_norm: Array
    zero_centered_norm: Array
    """Whether norms store their weights as offsets from 1, and compute in fp32."""
    split_vectors: Array
    """Number of biases and norm weights of one block that tensor parallel ranks split
    (`ModelSpec.split_vectors`)."""
    unsplit_vectors: Array
    """Number of biases and norm weights of one block of which each tensor parallel rank has a
    copy (`ModelSpec.unsplit_vectors`)."""
    local_share: Array
    """Share of the layers, 0 to 1, with an attention window that is shorter than the sequence."""
    window: Array
    """Attention window in tokens. 0 means no window."""
    tied_embeddings: Array
    tensor_parallel: Array
    pipeline_parallel: Array
    virtual_stages: Array
    context_parallel: Array
    context_exchange: Array
    """Kind of exchange between context parallel ranks, ring or all-to-all, as index into
    EXCHANGES."""
    data_parallel: Array
    zero_stage: Array
    shard_size: Array
    """Number of neighbouring replicas over which ZeRO shards weights, gradients and optimizer
    states. Each group of this size holds a full copy. 0 means all replicas."""
    sequence_parallel: Array
    micro_batch_size: Array
    global_batch_size: Array
    recompute: Array
    """Kind of activation recomputation, as index into RECOMPUTE."""
    recompute_layers: Array
    """Number of blocks per pipeline device that full recomputation recomputes. 0 means all
    blocks."""
    schedule: Array
    """Pipeline schedule, as index into SCHEDULES."""
    flash_attention: Array
    """Generation of fused attention: 1 or 2. 0 means that attention scores are written to
    memory."""
    fused_norm: Array
    """Whether norm and rotary embedding are each one fused kernel, which reads its input and writes
    its result once."""
    fused_softmax: Array
    """Whether mask and softmax are one kernel. This has an effect only if attention scores are
    written to memory."""
    data_overlap: Array
    """Whether the reduction of gradients and the gathering of weights overlap with computation."""
    tensor_overlap: Array
    """Whether collectives of tensor parallelism overlap with computation."""
    gradient_bytes: Array
    """Bytes of one accumulated gradient: 2 or 4."""
    gathered_bytes: Array
    """Bytes of one weight that ZeRO gathers: 2, or 1 if the weight is cast to fp8 before the gather
    (torchao's float8 all-gather)."""
    cast_bytes: Array
    """Bytes of memory traffic per element with which a separate kernel casts an operand of a linear
    layer to a format narrower than bf16. In bf16 the value is 0. The output projection, which
    computes the logits, always multiplies in bf16 and casts nothing."""
    input_bytes: Array
    """Bytes per element of a linear layer's input that are saved for backward: 2, or fewer if the
    input is first cast to a narrower format (Transformer Engine)."""
    weight_bytes: Array
    """Bytes of one weight as operand of matrix products: 2, or 1 in fp8 if products need no
    transposed copy of the weight."""
    offloaded_layers: Array
    """Number of layers of the model whose activations are offloaded to host memory. The transfers
    to and from host memory are assumed to need no time."""
    compiled: Array
    """Whether blocks are compiled by torch, so that element-wise operations run in fewer
    kernels."""
    native: Array
    """Whether the layout is trained by plain torch code on a GPU, such as the kit's decoder, and
    not in fp32. Each operation is then a separate kernel unless `compiled` is set, and FSDP2
    implements ZeRO."""
    separate_inputs: Array
    """Whether each column-split matrix of a `native` layout with tensor parallelism reduces the
    gradient of its input by itself (KempnerForge). Otherwise matrices with a common input share
    one gathered copy of it, and its gradient is reduced once (the kit, torchtitan)."""
    gathers_logits: Array
    """Whether each tensor parallel rank of a `native` layout gathers the logits of the whole
    vocabulary and computes the loss of all tokens (KempnerForge)."""
    reduces_once: Array
    """Whether ZeRO 2 and 3 of a `native` layout reduce gradients only after the last micro-batch of
    a step, so that whole gradients are accumulated before. Otherwise they reduce after each
    micro-batch."""
    recomputed_products: Array
    """Share, 0 to 1, of the matrix products of a layer that selective recomputation repeats: 1/2 in
    torchtitan, 0 in other code bases."""
    muon: Array
    """Whether Muon trains the matrices of the layers, and AdamW all other weights. Otherwise AdamW
    trains all weights."""
    precision: ClassVar[Precision] = "bf16"
    """Precision of all layouts. The rules that check a plan read this attribute."""
    compile: ClassVar[bool] = False
    """Value of `Plan.compile` that the rules for plans read. The formulas read the column
    `compiled`."""

    @classmethod
    def of(cls, spec: ModelSpec | Sequence[ModelSpec], plans: Iterable[Plan], **kernels) -> Self:
        """Returns the layouts that `plans` describe, one layout per plan. `spec` is one model for
        all plans, or a sequence with one model per plan.

        The keyword arguments `kernels` set attributes of the layouts whose names are in `KERNELS`,
        as numbers or arrays. If such an attribute is not set, the engine of each plan determines
        it, or it has the default in `KERNELS`.
        """
        plans = list(plans)
        specs = [spec] * len(plans) if isinstance(spec, ModelSpec) else list(spec)
        columns = {name: _column([getattr(each, name) for each in specs]) for name in SHAPES}
        columns["window"] = _column([float(each.sliding_window or 0) for each in specs])
        columns["num_kv_heads"] *= [
            plan.kv_replication(each) for plan, each in zip(plans, specs, strict=True)
        ]
        columns |= {name: _column([getattr(plan, name) for plan in plans]) for name in DEGREES}
        columns |= {
            name: np.array([known.index(getattr(plan, name)) for plan in plans], np.int8)
            for name, known in CODES.items()
        }
        columns |= {
            name: np.array([getattr(plan, name) or 0 for plan in plans], dtype=float)
            for name in OPTIONAL
        }
        # A soft cap of the attention scores needs unfused attention.
        flash_attention = [
            0 if each.attn_logit_softcapping else plan.capabilities.flash_attention
            for each, plan in zip(specs, plans, strict=True)
        ]
        own = {
            "flash_attention": flash_attention,
            "fused_softmax": [each.attn_logit_softcapping is None for each in specs],
            "compiled": [plan.compile for plan in plans],
            "native": [
                plan.capabilities.is_torch_native and plan.precision != "fp32" for plan in plans
            ],
        }
        own["cast_bytes"] = [
            cast_bytes(plan.precision, is_native)
            for plan, is_native in zip(plans, own["native"], strict=True)
        ]
        kernels = {name: np.asarray(each) for name, each in (KERNELS | own | kernels).items()}
        return cls(**columns, **kernels)

    @cached_property
    def num_microbatches(self) -> Array:
        """Number of micro-batches that each replica computes per optimizer step, symbol m."""
        return self.global_batch_size / (self.micro_batch_size * self.data_parallel)

    @cached_property
    def tokens(self) -> Array:
        """Number of tokens of a micro-batch on one device: T = b s / c, with micro-batch size b,
        sequence length s and context parallel degree c.
        """
        return self.micro_batch_size * self.sequence_length / self.context_parallel

    @cached_property
    def kv_size(self) -> Array:
        """Width of all key heads together: K = k d, with k key/value heads and head size d. All
        value heads together have an equal width.
        """
        return self.num_kv_heads * self.head_size

    @cached_property
    def attention_size(self) -> Array:
        """Width of all query heads together: A = a d, with a query heads and head size d. In most
        models it is the hidden size.
        """
        return self.num_heads * self.head_size

    @cached_property
    def residual_shards(self) -> Array:
        """Number of devices over which the residual stream is sharded, symbol q. It is the tensor
        parallel degree with sequence parallelism, otherwise 1.
        """
        return np.where(self.sequence_parallel, self.tensor_parallel, 1.0)

    @cached_property
    def plain(self) -> Array:
        """Number that is 1 for layers without a gate in feed-forward, as in GPT, and 0 for gated
        layers. Formulas multiply a term of layers without a gate by this number.
        """
        return 1 - self.gated.astype(self.hidden_size.dtype)

    @cached_property
    def num_devices(self) -> Array:
        """Number of devices: tensor x pipeline x context x data parallel degree (t p c r)."""
        return (
            self.tensor_parallel
            * self.pipeline_parallel
            * self.context_parallel
            * self.data_parallel
        )

    @property
    def num_stages(self) -> Array:
        """Number of pipeline stages: pipeline devices x virtual stages per device (p v)."""
        return self.pipeline_parallel * self.virtual_stages

    @cached_property
    def max_layers_per_device(self) -> Array:
        """Number of layers on the pipeline device with the most layers: v ceil(L / (p v)), with L
        layers, p pipeline devices and v virtual stages per device.
        """
        return np.ceil(self.num_layers / self.num_stages) * self.virtual_stages

    @cached_property
    def recomputed_share(self) -> Array:
        """Share of the layers of a device, 0 to 1, that full recomputation recomputes. It is 1 if
        `recompute_layers` is 0.
        """
        some = self.recompute_layers / self.max_layers_per_device
        return self.where(self.recompute_layers > 0, np.minimum(some, 1.0), 1.0)

    @property
    def is_hybrid(self) -> Array:
        """Whether ZeRO shards over groups of `shard_size` replicas instead of all replicas."""
        return self.shard_size > 0

    @property
    def shard_group(self) -> Array:
        """Number of replicas over which ZeRO shards: `shard_size`, or all replicas. The number does
        not depend on the ZeRO stage.
        """
        return np.where(self.is_hybrid, self.shard_size, self.data_parallel)

    def kv_replication(self, spec: ModelSpec) -> Array:
        """Returns the number of tensor parallel ranks on which each key/value head of the model is
        replicated.
        """
        return self.num_kv_heads / spec.num_kv_heads

    def is_one_of(self, field: str, *names: str) -> Array | bool:
        """Returns, for each layout, whether the column `field` has one of the values `names`.
        Columns that contain indices are compared with the indices of the names.
        """
        if field not in CODES:
            return getattr(self, field) in names
        return np.isin(getattr(self, field), [CODES[field].index(name) for name in names])

    @cached_property
    def num_shards(self) -> Array:
        """Number of ranks over which ZeRO stage 1 or higher shards the optimizer states. It is the
        context x data parallel degree, or `shard_size` if ZeRO shards over groups of replicas.
        """
        whole = self.context_parallel * self.data_parallel
        return np.where(self.is_hybrid, self.shard_size, whole)

    @property
    def shape(self) -> tuple[int, ...]:
        """Common shape to which the arrays of all columns can be broadcast."""
        return np.broadcast_shapes(
            *(getattr(self, field.name).shape for field in dataclasses.fields(self))
        )

    def __len__(self) -> int:
        return int(np.prod(self.shape))

    def where(self, condition: Array, yes: Any, no: Any) -> Array:
        """Returns `np.where(condition, yes, no)` in the dtype of the layouts, float32 or float64.
        If `yes` and `no` are Python numbers, `np.where` itself would return float64.
        """
        return np.where(condition, yes, no).astype(self.hidden_size.dtype, copy=False)

    def select(self, rows: Array | slice) -> Self:
        """Returns the layouts that `rows` selects, an array of indices, a Boolean mask or a slice.
        All arrays of the result have one dimension. Arrays with one element for all layouts are not
        repeated.
        """
        shape = self.shape
        return self.map(
            lambda column: (
                np.broadcast_to(column, shape)[rows] if column.size > 1 else column.ravel()
            )
        )

    def followed_by(self, others: Self) -> Self:
        """Returns the layouts of this object followed by the layouts of `others`. If a column has
        one element in both objects, the element of this object is used for all layouts.
        """

        def joined(name: str) -> Array:
            ours = getattr(self, name)
            theirs = getattr(others, name)
            if ours.size == theirs.size == 1:
                return ours
            both = np.broadcast_to(ours, self.shape), np.broadcast_to(theirs, others.shape)
            return np.concatenate(both)

        names = [field.name for field in dataclasses.fields(self)]
        return dataclasses.replace(self, **{name: joined(name) for name in names})

    def plan(self, index: int, engine: EngineName = DEFAULT_ENGINE) -> Plan:
        """Returns the layout with this index as a `Plan` in bf16 for an engine.

        Raises:
            ConfigError: The layout has a value that a Plan does not allow, or breaks a rule of Plan
                or of the engine.
        """
        fields: dict[str, Any] = {}
        for name in (*DEGREES, *CODES, *OPTIONAL):
            value = np.broadcast_to(getattr(self, name), self.shape).flat[index]
            fields[name] = CODES[name][value] if name in CODES else int(value)
        fields["sequence_parallel"] = bool(fields["sequence_parallel"])
        fields |= {name: fields[name] or None for name in OPTIONAL}
        return Plan(**fields, precision=self.precision, engine=engine)


SHAPES = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "ffn_hidden_size",
    "vocab_size",
    "sequence_length",
    "gated",
    "has_layernorm",
    "has_learned_positions",
    "num_block_norms",
    "parallel_residual",
    "has_qk_norm",
    "zero_centered_norm",
    "split_vectors",
    "unsplit_vectors",
    "local_share",
    "tied_embeddings",
)
DEGREES = (
    "tensor_parallel",
    "context_parallel",
    "pipeline_parallel",
    "virtual_stages",
    "data_parallel",
    "zero_stage",
    "sequence_parallel",
    "micro_batch_size",
    "global_batch_size",
)
OPTIONAL = ("shard_size", "recompute_layers")
"""Fields of Plan that may be None. The column of such a field in `Layouts` has 0 instead of
None."""
KERNELS: dict[str, Any] = {
    "flash_attention": 2,
    "fused_norm": True,
    "fused_softmax": True,
    "data_overlap": False,
    "tensor_overlap": False,
    "gradient_bytes": 4.0,
    "compiled": False,
    "gathered_bytes": 2.0,
    "cast_bytes": 0.0,
    "input_bytes": 2.0,
    "weight_bytes": 2.0,
    "offloaded_layers": 0.0,
    "native": False,
    "separate_inputs": False,
    "gathers_logits": False,
    "reduces_once": False,
    "recomputed_products": 0.0,
    "muon": False,
}
CAST_BYTES = {"fp8": 6.0, "mxfp8": 12.0, "nvfp4": 12.0}
"""Maps a precision to the bytes of memory traffic with which Transformer Engine casts one element
to this precision. The 6 bytes in fp8 are 2 to find the largest value, 2 to read and 2 to write. The
12 bytes in mxfp8 and nvfp4 agree with published runs on GB200 and GB300."""
INPUT_BYTES = {"fp8": 1.0, "mxfp8": 33 / 32, "nvfp4": 9 / 16}
"""Maps a precision to the bytes per element of a linear layer's input that are saved for backward.
Block scales are included: one byte per 32 elements in mxfp8, and per 16 elements in nvfp4."""


def cast_bytes(precision: str, is_native: bool) -> float:
    """Returns the bytes of memory traffic per element for casting an operand of a linear layer to a
    narrower number format in a separate kernel. For bf16 the result is 0. `is_native` is whether
    the code is plain torch (torchao) instead of Transformer Engine.

    In fp8 each element needs 2 bytes to read and 2 bytes to write. It is written in two copies, one
    of them transposed, since products of the backward pass read along the other dimension
    (torchao's `Float8Linear`). Transformer Engine's current scaling needs 2 bytes more. It first
    reads all elements to find the largest value, which sets the scale.

    In mxfp8 and nvfp4 the value is 12, as runs on GB200 and GB300 in `published_runs.csv` show.
    Blocks of elements that share a scale lie along the inner dimension of the product. Both
    directions are therefore quantised separately, by kernels that reach only a small part of the
    memory bandwidth.
    """
    return 4.0 if precision == "fp8" and is_native else CAST_BYTES.get(precision, 0.0)


def transformer_engine(precision: str, has_blocks: bool) -> dict[str, float]:
    """Returns the columns of `Layouts` that depend on the precision, as a dict from column to
    value, for Transformer Engine in Megatron-Core.

    In fp8, weights are stored and gathered in fp8 (`fp8_param_gather`, which recipes in fp8 set).
    On Hopper, fp8 products read along one dimension only, so each weight needs a transposed copy.
    Devices with block-scaled formats (`has_blocks`) read along both dimensions. In block-scaled
    formats, weights are gathered in bf16, and quantised in both directions after the gather.
    """
    is_fp8 = precision == "fp8"
    return {
        "cast_bytes": cast_bytes(precision, is_native=False),
        "input_bytes": INPUT_BYTES.get(precision, 2.0),
        "gathered_bytes": 1.0 if is_fp8 else 2.0,
        "weight_bytes": 1.0 if is_fp8 and has_blocks else 2.0,
    }


def _column(values: list) -> Array:
    return np.array(values, dtype=bool if isinstance(values[0], bool) else float)
