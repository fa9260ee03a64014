"""Layouts: many models and plans as arrays, so that one formula answers for all of them at once.

Notation of the formulas in this folder: L layers, h hidden size, a heads, k key/value heads, d head
size, f feed-forward size, V vocabulary, s sequence length; t, p, v, c, r degrees of tensor,
pipeline (and virtual stages), context and data parallelism (replicas); b micro-batch size and B
global batch size in sequences; m micro-batches.
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
"""Names of the columns that hold a place among them."""
Array = np.ndarray


class ArrayColumns:
    """A dataclass whose fields are numbers of many layouts: arrays, or one number for all."""

    def map(self, change: Callable[[Any], Any]) -> Self:
        """Returns the same with each field changed."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return type(self)(**{field.name: change(getattr(self, field.name)) for field in fields})

    @classmethod
    def joined(cls, parts: Sequence[Self], sizes: Sequence[int] | None = None) -> Self:
        """Returns the fields of all parts end to end, each as long as its part says, or of one."""
        columns = {}
        sizes = sizes or [1] * len(parts)
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            values = [getattr(part, field.name) for part in parts]
            columns[field.name] = np.concatenate(list(map(np.broadcast_to, values, sizes)))
        return cls(**columns)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layouts(ArrayColumns):
    """Shapes and plans of many training steps, as arrays that broadcast against each other.

    Whole numbers are float64 arrays, since products of them pass 2^63; flags are bool; codes are
    int8.
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
    """Neighbours that ZeRO shards over, with copies across such groups; 0: all of a stage's
    replicas."""
    sequence_parallel: Array
    micro_batch_size: Array
    global_batch_size: Array
    recompute: Array
    """Index into RECOMPUTE."""
    recompute_layers: Array
    """Of each stage, the blocks that full recomputation is for; 0: all."""
    schedule: Array
    """Index into SCHEDULES."""
    flash_attention: Array
    """0: scores are written to memory; 1, 2: first and second generation of fused attention."""
    fused_norm: Array
    """Norm and rotary kernels are fused, so that each reads and writes once."""
    fused_softmax: Array
    """Where scores are written out, mask and softmax are one kernel."""
    data_overlap: Array
    """Gradients are reduced, and weights gathered, beside computation."""
    tensor_overlap: Array
    """Collectives of tensor parallelism run beside computation."""
    gradient_bytes: Array
    """Bytes of one accumulated gradient: 2 or 4."""
    gathered_bytes: Array
    """Bytes of one weight that ZeRO gathers: 2, or 1 where it is cast to fp8 before (torchao's
    float8 all-gather)."""
    cast_bytes: Array
    """Moved to make one operand of a linear layer narrower in a kernel of its own (`cast_bytes`);
    logits stay in bf16."""
    input_bytes: Array
    """Kept of one number that a linear layer reads: 2, or fewer where it was made narrower before
    (Transformer Engine)."""
    weight_bytes: Array
    """Of one weight in products: 2, or 1 in fp8 where products need no transposed copy."""
    offloaded_layers: Array
    """Of all, whose activations wait in the host's memory, copied in no time here."""
    compiled: Array
    """Blocks are compiled, so that element-wise work runs in fewer kernels."""
    native: Array
    """The kit's decoder in torch itself on a GPU (not fp32): an operation a kernel unless
    `compiled`; ZeRO is FSDP2."""
    precision: ClassVar[Precision] = "bf16"
    """Of the plans that layouts are; with `compile`, what the rules of a plan ask about."""
    compile: ClassVar[bool] = False

    @classmethod
    def of(cls, spec: ModelSpec | Sequence[ModelSpec], plans: Iterable[Plan], **kernels) -> Self:
        """Returns plans of one model, or of as many models as plans.

        Their kernels are the engine's, but for those given by the names of `KERNELS`, as numbers or
        arrays.
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
        """m, per replica and step."""
        return self.global_batch_size / (self.micro_batch_size * self.data_parallel)

    @cached_property
    def tokens(self) -> Array:
        """T = b s / c, of a micro-batch on one device."""
        return self.micro_batch_size * self.sequence_length / self.context_parallel

    @cached_property
    def kv_size(self) -> Array:
        """K = h k / a, the width of keys, and of values."""
        return self.hidden_size * self.num_kv_heads / self.num_heads

    @cached_property
    def sequence_shards(self) -> Array:
        """q: over how many devices sequence parallelism cuts what lies between blocks; t or 1."""
        return np.where(self.sequence_parallel, self.tensor_parallel, 1.0)

    @cached_property
    def plain(self) -> Array:
        """1 for GPT-style layers (LayerNorm, biases, learned positions), 0 for gated ones."""
        return 1 - self.gated.astype(self.hidden_size.dtype)

    @cached_property
    def num_devices(self) -> Array:
        """t x p x c x r."""
        return (
            self.tensor_parallel
            * self.pipeline_parallel
            * self.context_parallel
            * self.data_parallel
        )

    @property
    def num_stages(self) -> Array:
        """p x v."""
        return self.pipeline_parallel * self.virtual_stages

    @cached_property
    def most_layers(self) -> Array:
        """On a pipeline device with most of them: L / p, its v stages rounded up."""
        return np.ceil(self.num_layers / self.num_stages) * self.virtual_stages

    @cached_property
    def recomputed_share(self) -> Array:
        """Of a device's layers, those that full recomputation is for."""
        some = self.recompute_layers / self.most_layers
        return self.where(self.recompute_layers > 0, np.minimum(some, 1.0), 1.0)

    @property
    def is_hybrid(self) -> Array:
        """As `Plan.is_hybrid`."""
        return self.shard_size > 0

    @property
    def shard_group(self) -> Array:
        """As `Plan.shard_group`."""
        return np.where(self.is_hybrid, self.shard_size, self.data_parallel)

    def kv_replication(self, spec: ModelSpec) -> Array:
        """As `Plan.kv_replication`."""
        return self.num_kv_heads / spec.num_kv_heads

    def is_one_of(self, field: str, *names: str) -> Array | bool:
        """As `Plan.is_one_of`."""
        if field not in CODES:
            return getattr(self, field) in names
        return np.isin(getattr(self, field), [CODES[field].index(name) for name in names])

    @cached_property
    def num_shards(self) -> Array:
        """Ranks that ZeRO, where it is on, cuts states over."""
        whole = self.context_parallel * self.data_parallel
        return np.where(self.is_hybrid, self.shard_size, whole)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that all columns broadcast to."""
        return np.broadcast_shapes(
            *(getattr(self, field.name).shape for field in dataclasses.fields(self))
        )

    def __len__(self) -> int:
        return int(np.prod(self.shape))

    def where(self, condition: Array, yes: Any, no: Any) -> Array:
        """Returns np.where in the precision of the layouts, which two plain numbers would raise
        to float64.
        """
        return np.where(condition, yes, no).astype(self.hidden_size.dtype, copy=False)

    def select(self, rows: Array | slice) -> Self:
        """Returns some of the layouts, flat, by index, mask or slice; columns of size 1 stay so."""
        shape = self.shape
        return self.map(
            lambda column: (
                np.broadcast_to(column, shape)[rows] if column.size > 1 else column.ravel()
            )
        )

    def followed_by(self, others: Self) -> Self:
        """Returns these layouts and others; columns of size 1, which both share, stay so."""

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
        """Returns one layout as a Plan (bf16) for an engine.

        Raises:
            ConfigError: the layout uses what a Plan does not have, or breaks one of its rules or of
                the engine's.
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
"""Fields that may be None, which 0 stands for."""
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
INPUT_BYTES = {"fp8": 1.0, "mxfp8": 33 / 32, "nvfp4": 9 / 16}
"""With the scales of blocks of 32, and of 16."""


def cast_bytes(precision: str, is_native: bool) -> float:
    """Returns what is moved to make one operand of a linear layer narrower in a kernel of its own.

    In fp8 2 bytes to read a number and 2 to write it, as it is and transposed, since the products
    of the backward pass read along the other side (torchao's `Float8Linear`); 2 more where the
    largest number, which sets the scale, is sought first (Transformer Engine's current scaling).
    Blocks that share a scale lie along the inner side, so both ways are quantised apart, and far
    below the memory's rate: 12, as GB200 and GB300 have it in `published_runs.csv`.
    """
    return 4.0 if precision == "fp8" and is_native else CAST_BYTES.get(precision, 0.0)


def transformer_engine(precision: str, has_blocks: bool) -> dict[str, float]:
    """Returns what a precision means under Transformer Engine in Megatron-Core, as columns of
    Layouts.

    Weights in fp8 are kept and gathered in it (`fp8_param_gather`, which recipes in fp8 set), with
    a transposed copy where products of fp8 read along one side only (Hopper; a device with formats
    of blocks, `has_blocks`, reads along both). Those in blocks are gathered in bf16, and quantised
    both ways on arrival.
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
