"""Layouts: many models and plans as arrays, so that one formula answers for all of them at once.

Notation of the formulas in this folder: L layers, h hidden size, a heads, k key/value heads, d head
size, f feed-forward size, V vocabulary, s sequence length; t, p, v, c, r degrees of tensor,
pipeline (and virtual stages), context and data parallelism (replicas); b micro-batch size and B
global batch size in sequences; m micro-batches.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np

from kit.plan import PLANNED_ONLY, EngineName, Plan
from kit.spec import ModelSpec

RECOMPUTE = ("none", "selective", "full")
EXCHANGES = ("ring", "all_to_all")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
Array = np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layouts:
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
    schedule: Array
    """Index into SCHEDULES."""
    flash_attention: Array
    """0: scores are written to memory; 1, 2: first and second generation of fused attention."""
    fused_norm: Array
    """Norm and rotary kernels are fused, so that each reads and writes once."""
    fused_softmax: Array
    """Where scores are written out, mask and softmax are one kernel."""
    overlap: Array
    """Collectives of gradients, weights and tensor parallelism run beside computation."""
    gradient_bytes: Array
    """Bytes of one accumulated gradient: 2 or 4."""
    gathered_bytes: Array
    """Bytes of one weight that ZeRO gathers: 2, or 1 where it is cast to fp8 before (torchao's
    float8 all-gather)."""
    narrow: Array
    """Linear layers multiply in a format below bf16: their operands are cast, and logits stay in
    bf16."""
    compiled: Array
    """Blocks are compiled, so that element-wise work runs in fewer kernels."""
    native: Array
    """The kit's decoder in torch itself on a GPU (not fp32): an operation a kernel unless
    `compiled`; ZeRO is FSDP2."""

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
        columns["recompute"] = np.array(
            [RECOMPUTE.index(plan.recompute) for plan in plans], dtype=np.int8
        )
        columns["schedule"] = np.array(
            [SCHEDULES.index(plan.schedule) for plan in plans], dtype=np.int8
        )
        columns["context_exchange"] = np.array(
            [EXCHANGES.index(plan.context_exchange) for plan in plans], np.int8
        )
        columns["shard_size"] = np.array([plan.shard_size or 0 for plan in plans], dtype=float)
        own = {"flash_attention": [FLASH_ATTENTION[plan.engine] for plan in plans]}
        own |= {
            "compiled": [p.compile for p in plans],
            "narrow": [p.precision in PLANNED_ONLY for p in plans],
        }
        own["native"] = [p.engine == "native" and p.precision != "fp32" for p in plans]
        kernels = KERNELS | own | kernels
        return cls(**columns, **{name: np.asarray(value) for name, value in kernels.items()})

    @property
    def num_microbatches(self) -> Array:
        """m, per replica and step."""
        return self.global_batch_size / (self.micro_batch_size * self.data_parallel)

    @property
    def num_devices(self) -> Array:
        """t x p x c x r."""
        return (
            self.tensor_parallel
            * self.pipeline_parallel
            * self.context_parallel
            * self.data_parallel
        )

    @property
    def num_shards(self) -> Array:
        """Ranks that ZeRO, where it is on, cuts states over."""
        whole = self.context_parallel * self.data_parallel
        return (
            np.where(self.shard_size > 0, self.shard_size, whole)
            if np.any(self.shard_size)
            else whole
        )

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
        return np.where(condition, yes, no).astype(self.hidden_size.dtype)

    def select(self, rows: Array | slice) -> Self:
        """Returns some of the layouts, by index, mask or slice; columns of size 1 stay as they
        are.
        """
        columns = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return type(self)(
            **{
                name: column[rows] if column.size > 1 else column
                for name, column in columns.items()
            }
        )

    def plan(self, index: int, engine: EngineName = "native") -> Plan:
        """Returns one layout as a Plan (bf16) for an engine.

        Raises:
            ConfigError: the layout uses what a Plan does not have, or breaks one of its rules or of
                the engine's.
        """
        degrees: dict[str, Any] = {}
        for name in DEGREES:
            value = np.broadcast_to(getattr(self, name), self.shape).flat[index]
            degrees[name] = bool(value) if name == "sequence_parallel" else int(value)
        recompute = RECOMPUTE[np.broadcast_to(self.recompute, self.shape).flat[index]]
        schedule = SCHEDULES[np.broadcast_to(self.schedule, self.shape).flat[index]]
        degrees["context_exchange"] = EXCHANGES[
            np.broadcast_to(self.context_exchange, self.shape).flat[index]
        ]
        degrees["shard_size"] = (
            int(np.broadcast_to(self.shard_size, self.shape).flat[index]) or None
        )
        return Plan(
            **degrees, recompute=recompute, schedule=schedule, precision="bf16", engine=engine
        )


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
FLASH_ATTENTION: dict[EngineName, int] = {"native": 2, "deepspeed": 2, "neuron": 0}
"""Which generation of fused attention an engine runs: NxD writes scores out, as HLAT did."""
KERNELS: dict[str, Any] = {
    "flash_attention": 2,
    "fused_norm": True,
    "fused_softmax": True,
    "overlap": False,
    "gradient_bytes": 4.0,
    "compiled": False,
    "gathered_bytes": 2.0,
    "narrow": False,
    "native": False,
}


def _column(values: list) -> Array:
    return np.array(values, dtype=bool if isinstance(values[0], bool) else float)
