"""Layouts: many models and plans as arrays, so that one formula computes all of them at once.

Notation of the formulas in this folder:

- Shapes: L layers, h hidden size, a heads, k key/value heads, d head size, f feed-forward size,
  V vocabulary size, s sequence length.
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
"""Columns of `Layouts` that hold an index instead of a name, each with the names in order."""
Array = np.ndarray


class ArrayColumns:
    """Base of dataclasses whose fields hold numbers of many layouts. A field is an array, or one
    number for all layouts.
    """

    def map(self, change: Callable[[Any], Any]) -> Self:
        """Returns a copy with `change` applied to each field."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return type(self)(**{field.name: change(getattr(self, field.name)) for field in fields})

    @classmethod
    def joined(cls, parts: Sequence[Self], sizes: Sequence[int] | None = None) -> Self:
        """Returns one object whose fields are the concatenated fields of all parts. `sizes` has the
        number of layouts of each part, by default 1.
        """
        columns = {}
        sizes = sizes or [1] * len(parts)
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            values = [getattr(part, field.name) for part in parts]
            columns[field.name] = np.concatenate(list(map(np.broadcast_to, values, sizes)))
        return cls(**columns)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layouts(ArrayColumns):
    """Shapes and plans of many training steps, as arrays that broadcast against each other.

    Whole numbers are float64 arrays, since their products exceed 2^63. Flags are bool arrays.
    Indices into names (`CODES`) are int8 arrays.
    """

    num_layers: Array
    hidden_size: Array
    num_heads: Array
    num_kv_heads: Array
    ffn_hidden_size: Array
    vocab_size: Array
    sequence_length: Array
    gated: Array
    tied_embeddings: Array
    tensor_parallel: Array
    pipeline_parallel: Array
    virtual_stages: Array
    context_parallel: Array
    context_exchange: Array
    """Index into EXCHANGES."""
    data_parallel: Array
    zero_stage: Array
    shard_size: Array
    """Number of neighbouring replicas among which ZeRO shards. Each group of this size holds a full
    copy of the states. 0 means all replicas."""
    sequence_parallel: Array
    micro_batch_size: Array
    global_batch_size: Array
    recompute: Array
    """Index into RECOMPUTE."""
    recompute_layers: Array
    """Number of blocks per pipeline device that are recomputed in full. 0 means all blocks."""
    schedule: Array
    """Index into SCHEDULES."""
    flash_attention: Array
    """Generation of fused attention: 1 or 2. 0 means that attention scores are written to
    memory."""
    fused_norm: Array
    """Whether norm and rotary embedding are fused kernels, each of which reads and writes once."""
    fused_softmax: Array
    """Whether mask and softmax are one kernel. Matters only if attention scores are written to
    memory."""
    data_overlap: Array
    """Whether reduction of gradients and gathering of weights overlap with computation."""
    tensor_overlap: Array
    """Whether collectives of tensor parallelism overlap with computation."""
    gradient_bytes: Array
    """Bytes of one accumulated gradient: 2 or 4."""
    gathered_bytes: Array
    """Bytes of one weight that ZeRO gathers: 2, or 1 where the weight is cast to fp8 before
    (torchao's float8 all-gather)."""
    cast_bytes: Array
    """Bytes of memory traffic per element to cast one operand of a linear layer to a narrower
    format in a separate kernel (function `cast_bytes`). Logits stay in bf16."""
    input_bytes: Array
    """Bytes saved for backward per element that a linear layer reads: 2, or fewer if the input was
    cast to a narrower format before (Transformer Engine)."""
    weight_bytes: Array
    """Bytes of one weight for matrix products: 2, or 1 in fp8 where products need no transposed
    copy."""
    offloaded_layers: Array
    """Number of layers of the model whose activations are offloaded to host memory. The copies are
    assumed to take no time."""
    compiled: Array
    """Whether blocks are compiled, so that element-wise work runs in fewer kernels."""
    native: Array
    """Whether the code is plain torch on a GPU, as the kit's decoder, and not in fp32. Each
    operation is a kernel unless `compiled` is set. ZeRO is FSDP2."""
    precision: ClassVar[Precision] = "bf16"
    """Precision of all layouts. The rules of a plan read this attribute."""
    compile: ClassVar[bool] = False
    """Value of `Plan.compile` for the rules of a plan. The formulas read the column `compiled`."""

    @classmethod
    def of(cls, spec: ModelSpec | Sequence[ModelSpec], plans: Iterable[Plan], **kernels) -> Self:
        """Returns the layouts of `plans`, one element per plan. `spec` is one model for all plans,
        or a sequence with one model per plan.

        `kernels` sets columns by the names of `KERNELS`, as numbers or arrays. The other columns
        follow from the engine of each plan.
        """
        plans = list(plans)
        specs = [spec] * len(plans) if isinstance(spec, ModelSpec) else list(spec)
        columns = {name: _column([getattr(each, name) for each in specs]) for name in SHAPES}
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
        own = {
            "flash_attention": [plan.capabilities.flash_attention for plan in plans],
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
        """Number of micro-batches per replica and step, m."""
        return self.global_batch_size / (self.micro_batch_size * self.data_parallel)

    @cached_property
    def tokens(self) -> Array:
        """Number of tokens of a micro-batch on one device: T = b s / c."""
        return self.micro_batch_size * self.sequence_length / self.context_parallel

    @cached_property
    def kv_size(self) -> Array:
        """Width of all key heads together, which is also the width of all value heads: K = h k /
        a.
        """
        return self.hidden_size * self.num_kv_heads / self.num_heads

    @cached_property
    def sequence_shards(self) -> Array:
        """Number of devices over which the residual stream is sharded: q = t with sequence
        parallelism, otherwise 1.
        """
        return np.where(self.sequence_parallel, self.tensor_parallel, 1.0)

    @cached_property
    def plain(self) -> Array:
        """1 for GPT-style layers (LayerNorm, biases, learned positions), 0 for gated layers."""
        return 1 - self.gated.astype(self.hidden_size.dtype)

    @cached_property
    def num_devices(self) -> Array:
        """Number of devices: tensor x pipeline x context x data parallelism, t p c r."""
        return (
            self.tensor_parallel
            * self.pipeline_parallel
            * self.context_parallel
            * self.data_parallel
        )

    @property
    def num_stages(self) -> Array:
        """Number of pipeline stages: pipeline devices x virtual stages, p v."""
        return self.pipeline_parallel * self.virtual_stages

    @cached_property
    def most_layers(self) -> Array:
        """Number of layers on the pipeline device with the most layers: v ceil(L / (p v))."""
        return np.ceil(self.num_layers / self.num_stages) * self.virtual_stages

    @cached_property
    def recomputed_share(self) -> Array:
        """Share of a device's layers that are recomputed under full recomputation, 0 to 1."""
        some = self.recompute_layers / self.most_layers
        return self.where(self.recompute_layers > 0, np.minimum(some, 1.0), 1.0)

    @property
    def is_hybrid(self) -> Array:
        """Whether ZeRO shards over groups of `shard_size` replicas, as `Plan.is_hybrid`."""
        return self.shard_size > 0

    @property
    def shard_group(self) -> Array:
        """Number of replicas in a group of ZeRO, for any ZeRO stage, as `Plan.shard_group`."""
        return np.where(self.is_hybrid, self.shard_size, self.data_parallel)

    def kv_replication(self, spec: ModelSpec) -> Array:
        """Returns the number of tensor parallel ranks that hold each key/value head, as
        `Plan.kv_replication`.
        """
        return self.num_kv_heads / spec.num_kv_heads

    def is_one_of(self, field: str, *names: str) -> Array | bool:
        """Returns whether a field has one of the values `names`, as `Plan.is_one_of`."""
        if field not in CODES:
            return getattr(self, field) in names
        return np.isin(getattr(self, field), [CODES[field].index(name) for name in names])

    @cached_property
    def num_shards(self) -> Array:
        """Number of ranks among which ZeRO stage 1 or higher shards states: c r, or `shard_size` if
        hybrid.
        """
        whole = self.context_parallel * self.data_parallel
        return np.where(self.is_hybrid, self.shard_size, whole)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape to which all columns broadcast."""
        return np.broadcast_shapes(
            *(getattr(self, field.name).shape for field in dataclasses.fields(self))
        )

    def __len__(self) -> int:
        return int(np.prod(self.shape))

    def where(self, condition: Array, yes: Any, no: Any) -> Array:
        """Returns `np.where(condition, yes, no)` in the dtype of the layouts. With two plain
        numbers `np.where` alone would return float64.
        """
        return np.where(condition, yes, no).astype(self.hidden_size.dtype, copy=False)

    def select(self, rows: Array | slice) -> Self:
        """Returns some of the layouts by index, mask or slice, with columns of one dimension.
        Columns of size 1 keep their size.
        """
        shape = self.shape
        return self.map(
            lambda column: (
                np.broadcast_to(column, shape)[rows] if column.size > 1 else column.ravel()
            )
        )

    def followed_by(self, others: Self) -> Self:
        """Returns these layouts followed by `others`. Columns that have size 1 in both keep the
        value of these layouts.
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
        """Returns one layout as a Plan in bf16 for an engine.

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
    "ffn_hidden_size",
    "vocab_size",
    "sequence_length",
    "gated",
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
"""Columns whose field of Plan may be None. Layouts have 0 for None."""
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
}
CAST_BYTES = {"fp8": 6.0, "mxfp8": 12.0, "nvfp4": 12.0}
"""Bytes of memory traffic per cast element under Transformer Engine, by precision. The
function `cast_bytes` has the reasons."""
INPUT_BYTES = {"fp8": 1.0, "mxfp8": 33 / 32, "nvfp4": 9 / 16}
"""Bytes per saved input element of a linear layer, by precision. Block scales are included: one
byte per 32 elements in mxfp8, and per 16 elements in nvfp4."""


def cast_bytes(precision: str, is_native: bool) -> float:
    """Returns the bytes of memory traffic per element to cast one operand of a linear layer to a
    narrower format in a separate kernel.

    In fp8 an element costs 2 bytes to read and 2 bytes to write. It is written twice, as it is and
    transposed, since the products of the backward pass read along the other dimension (torchao's
    `Float8Linear`). Transformer Engine's current scaling costs 2 bytes more: it first reads all
    elements for the largest value, which sets the scale.

    In mxfp8 and nvfp4 the value is 12, as runs on GB200 and GB300 in `published_runs.csv` show.
    Blocks that share a scale lie along the inner dimension, so each direction is quantised by
    itself, far below the memory's bandwidth.
    """
    return 4.0 if precision == "fp8" and is_native else CAST_BYTES.get(precision, 0.0)


def transformer_engine(precision: str, has_blocks: bool) -> dict[str, float]:
    """Returns columns of Layouts, by name, for a precision under Transformer Engine in
    Megatron-Core.

    Weights in fp8 are stored and gathered in fp8 (`fp8_param_gather`, which recipes in fp8 set). On
    Hopper fp8 products read along one dimension only, so that a transposed copy of each weight is
    needed. A device with block-scaled formats (`has_blocks`) reads along both dimensions. Weights
    in block-scaled formats are gathered in bf16, and quantised in both directions after the gather.
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
