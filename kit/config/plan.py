"""Plan: how a model is split over devices, and how its batch is split into micro-batches. Imports
no torch.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Literal

from cluster.record import ConfigError, Record, counted, field_doc, from_one, html_table, must
from kit.config.model_rules import MODEL_RULES
from kit.config.other_names import field_advice
from kit.config.rules import PLAN_RULES, SPLIT_SCHEDULES, Rule
from kit.config.spec import ModelSpec
from kit.engines.capabilities import DEFAULT_ENGINE, Capabilities, EngineName, capabilities_of

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]
Recompute = Literal["none", "selective", "full"]
Precision = Literal["fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
ContextExchange = Literal["ring", "all_to_all"]

MAX_DEVICES = 2**22
"""Largest number of devices of a plan. No existing machine has more. Programs that show a run need
memory in proportion to its number of devices, so the limit also bounds their memory."""
PLANNED_ONLY = ("fp8", "mxfp8", "nvfp4")
"""Precisions for which the kit can plan a training, but in which no engine of the kit can train."""


def logits_at_once(gpu_bytes: float | None) -> int:
    """Returns the number of logits in one chunk of the loss, between 2^25 and 2^28, for a GPU with
    `gpu_bytes` of memory. If `gpu_bytes` is None, the device is a CPU and the result is 2^25.

    The loss is computed in chunks to save memory. Each chunk reads the complete output projection
    and adds to its gradient, so fewer chunks are faster. For example, 8,192 tokens with a
    vocabulary of 128,000 are 31 chunks of 2^25 logits, but only 4 chunks of 2^28. The 31 chunks
    cost an H100 about 65 ms (modelled from its bandwidth). Above the smallest size, a chunk with
    all tensors of its size (10 bytes per logit) takes at most a sixteenth of the memory. Larger
    chunks do not make a CPU faster (measured).
    """
    if gpu_bytes is None:
        return 2**25
    return min(2**28, max(2**25, 2 ** int(math.log2(gpu_bytes / 160))))


def check_rules(rules: Iterable[Rule], capabilities: Capabilities, *records: Any) -> None:
    """Raises ConfigError with the error message of the first broken rule. Rules that do not apply
    to an engine with `capabilities` are skipped. `records` are the arguments of the rules: a plan,
    a plan and a model, or a recipe and a plan.
    """
    for rule in rules:
        if rule.applies_to(capabilities) and rule.breaks(*records):
            raise ConfigError(rule.sentence(*records))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """Degrees of parallelism, batch sizes and memory options of one training job."""

    tensor_parallel: int = field_doc(
        "number of devices over which each weight matrix is split", from_one, default=1
    )
    pipeline_parallel: int = field_doc(
        "number of devices over which the transformer blocks are distributed", from_one, default=1
    )
    data_parallel: int = field_doc(
        "number of replicas, each of which trains on its own part of the batch", from_one, default=1
    )
    context_parallel: int = field_doc(
        "number of devices over which each sequence is split; can be planned but not trained",
        from_one,
        default=1,
    )
    context_exchange: ContextExchange = field_doc(
        "communication of attention when a sequence is split: keys and values around a ring, or"
        " all-to-all exchange of sequence parts for heads (Ulysses)",
        default="ring",
    )
    virtual_stages: int = field_doc(
        "number of pipeline stages that each pipeline device has", from_one, default=1
    )
    zero_stage: int = field_doc(
        "stage of ZeRO, which shards states over data_parallel. 0 shards nothing, 1 the"
        " optimizer states, 2 also the gradients, 3 also the weights.",
        must(lambda stage: 0 <= stage <= 3, "Allowed: 0, 1, 2, 3."),
        default=0,
    )
    shard_size: int | None = field_doc(
        "number of neighbouring replicas over which ZeRO shards. Each of the data_parallel /"
        " shard_size groups of replicas has a complete copy of the states (HSDP; engine native)."
        " Default: data_parallel.",
        from_one,
        default=None,
    )
    sequence_parallel: bool = field_doc(
        "whether activations of norms and residuals are split along the sequence over"
        " tensor_parallel",
        default=False,
    )
    schedule: Schedule = field_doc(
        "pipeline schedule: order of the forward and backward passes of micro-batches",
        default="1f1b",
    )
    recompute: Recompute = field_doc(
        "which activations are computed again in the backward pass instead of being saved",
        default="none",
    )
    recompute_layers: int | None = field_doc(
        "number of blocks per pipeline device that recompute 'full' recomputes: the first"
        " blocks of each of the device's stages (engine native); default: all blocks",
        from_one,
        default=None,
    )
    micro_batch_size: int = field_doc(
        "number of sequences in one forward pass of one replica", from_one, default=1
    )
    global_batch_size: int = field_doc(
        "number of sequences in one optimizer step, over all replicas", from_one, default=1
    )
    precision: Precision = field_doc(
        "number format of training. bf16 has master weights, optimizer states and gradient"
        " reduction in fp32. With engine neuron and zero_stage 0, bf16 has none of them in fp32"
        " and uses stochastic rounding. fp16 also scales the loss (engine deepspeed). fp8, mxfp8"
        " and nvfp4 are formats of the matrix products of linear layers, which can be planned"
        " but not trained.",
        default="fp32",
    )
    compile: bool = field_doc(
        "whether torch.compile compiles each transformer block", default=False
    )
    engine: EngineName = field_doc(
        "implementation of the training step: torch itself, DeepSpeed, or NeuronX Distributed",
        default=DEFAULT_ENGINE,
    )

    @classmethod
    def unknown_key_advice(cls, key: str, value: Any) -> str:
        return field_advice(cls, key)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_devices > MAX_DEVICES:
            raise ConfigError(
                f"plan: {self.num_devices:,} devices are too many. Allowed: up to {MAX_DEVICES:,}."
            )
        check_rules(PLAN_RULES, self.capabilities, self)

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the plan's engine."""
        return capabilities_of(self.engine)

    @property
    def recomputes_whole(self) -> bool:
        """Whether full recomputation repeats each block to its end. Otherwise it stops before the
        last matrix product of the block, as `ModelSpec.hardware_flops_per_token` describes.

        A compiled block is one operation, which cannot stop before its end. For blocks of NxD, the
        property is assumed to be true, since their recomputation has never been measured.
        """
        return self.compile or self.capabilities.runs_on_trainium

    @property
    def recomputes_attention(self) -> bool:
        """Whether selective recomputation repeats the core of attention: the products of queries
        with keys, and of scores with values.
        """
        repeats = self.capabilities.selective_recompute_repeats_attention
        return self.recompute == "selective" and repeats

    @property
    def gpu_defaults(self) -> dict[str, Any]:
        """Defaults of the fields `precision` and `compile` on GPUs: bf16, and compilation unless it
        makes steps slower. Empty for an engine that does not compile blocks.

        Zero-bubble schedules split each backward pass into two halves. A compiled block would run
        the complete backward pass for each half. That increases the number of matrix products by
        half (counted).
        """
        if not self.capabilities.compiles_blocks:
            return {}
        splits_backward = self.pipeline_parallel > 1 and self.schedule in SPLIT_SCHEDULES
        return {"precision": "bf16", "compile": not splits_backward}

    @property
    def num_devices(self) -> int:
        """Number of devices: tensor x context x pipeline x data parallel degree. Each device has
        one process.
        """
        return (
            self.tensor_parallel
            * self.context_parallel
            * self.pipeline_parallel
            * self.data_parallel
        )

    @property
    def untrained(self) -> tuple[str, ...]:
        """Names of the fields whose values the kit can plan, but with which no engine can train."""
        names = []
        if self.context_parallel > 1:
            names.append("context_parallel")
        if self.precision in PLANNED_ONLY:
            names.append("precision")
        return tuple(names)

    @property
    def num_shards(self) -> int:
        """Number of replicas over which the states are sharded at the plan's ZeRO stage. It is 1
        for ZeRO stage 0.
        """
        return 1 if self.zero_stage == 0 else self.shard_group

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages: pipeline_parallel x virtual_stages."""
        return self.pipeline_parallel * self.virtual_stages

    def stage_layers(self, spec: ModelSpec, stage: int) -> range:
        """Returns the numbers of the blocks of one pipeline stage, as a range. If the number of
        stages divides the number of blocks, all stages have equal numbers of consecutive blocks.

        Otherwise the embedding and the loss count as one block each. The first and the last stage
        then have one block less than the other stages, possibly none. Llama 3 has this layout, with
        126 layers in 128 places (arXiv 2407.21783, section 3.3.2).
        """
        share = math.ceil(spec.num_layers / self.num_stages)
        first = stage * share - (share * self.num_stages > spec.num_layers)
        return range(max(0, first), min(spec.num_layers, first + share))

    def stage_recomputed(self, spec: ModelSpec, stage: int) -> int:
        """Returns the number of blocks that full recomputation repeats in one pipeline stage. They
        are the first blocks of the stage.

        `recompute_layers` is divided equally among the stages of a device. The remainder goes to
        the first stages of the device, since their activations are saved for the longest time.
        """
        layers = len(self.stage_layers(spec, stage))
        if self.recompute_layers is None:
            return layers
        each, more = divmod(self.recompute_layers, self.virtual_stages)
        return min(layers, each + (stage // self.pipeline_parallel < more))

    def recomputed_layers(self, spec: ModelSpec) -> int:
        """Returns the number of blocks that full recomputation repeats, over the complete model."""
        return sum(self.stage_recomputed(spec, stage) for stage in range(self.num_stages))

    @property
    def is_hybrid(self) -> bool:
        """Whether ZeRO shards within groups of `shard_size` replicas (HSDP). Each group has a
        complete copy of the states.
        """
        return self.shard_size is not None

    @property
    def shard_group(self) -> int:
        """Number of replicas over which ZeRO stages 1 to 3 shard states. It has this value also at
        stage 0, at which nothing is sharded.
        """
        return self.shard_size or self.data_parallel

    def is_one_of(self, field: str, *names: str) -> bool:
        """Returns whether a field has one of the values `names`. Rules call this method instead of
        comparing. `Layouts` has a method of this name for arrays of layouts, so one rule works on a
        plan and on a search.
        """
        return getattr(self, field) in names

    def kv_replication(self, spec: ModelSpec) -> int:
        """Returns the number of tensor parallel ranks that hold a copy of each key/value head. It
        can be above 1 only with an engine that copies key/value heads.
        """
        is_multiple = self.tensor_parallel % spec.num_kv_heads == 0
        if not self.capabilities.copies_kv_heads or not is_multiple:
            return 1
        return max(1, self.tensor_parallel // spec.num_kv_heads)

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches that each replica computes in one optimizer step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel)

    def check(self, spec: ModelSpec, num_processes: int | None = None) -> None:
        """Checks that an engine can train the model `spec` with this plan. If `num_processes` is
        given, it must be equal to `num_devices`.

        Raises:
            ConfigError: The number of processes is wrong, or a size of the model is not divisible
                by a degree of the plan, or the engine does not support the model or the plan.
        """
        for name in self.untrained:
            trained = {"context_parallel": "1", "precision": "bf16"}[name]
            raise ConfigError(
                f"plan.{name}: {getattr(self, name)!r} is not trained by engine {self.engine!r} or"
                f" another: the kit plans this, it does not train it. Use {trained}."
            )
        self.check_shapes(spec, num_processes)

    def check_shapes(self, spec: ModelSpec, num_processes: int | None = None) -> None:
        """Checks that this plan can split the model `spec`. Unlike `check`, it accepts plans that
        the kit can estimate but not train.

        Raises:
            ConfigError: The number of processes is wrong, or a size of the model is not divisible
                by a degree of the plan, or the engine does not support the model.
        """
        if num_processes is not None and num_processes != self.num_devices:
            raise ConfigError(
                f"plan: tensor {self.tensor_parallel} x pipeline {self.pipeline_parallel} x data"
                f" {self.data_parallel} = {self.num_devices} processes, but {num_processes} were"
                f" started. Start {self.num_devices}, or change a degree."
            )
        check_rules(MODEL_RULES, self.capabilities, self, spec)

    def _repr_html_(self) -> str:
        tensor = str(self.tensor_parallel)
        if self.sequence_parallel:
            tensor += " + sequence"
        pipeline = (
            f"{self.pipeline_parallel} ({self.schedule}, {counted(self.virtual_stages, 'stage')} a"
            " device)"
        )
        batch = (
            f"{self.global_batch_size} = {self.data_parallel} x {self.num_microbatches} x"
            f" {self.micro_batch_size}"
        )
        zero = f"ZeRO {self.zero_stage}"
        if self.shard_size:
            zero += f" over {self.shard_size}"
        recompute: str = self.recompute
        if self.recompute_layers:
            recompute += f" ({counted(self.recompute_layers, 'block')} a device)"
        precision: str = self.precision
        if self.compile:
            precision += ", compiled"
        engine = "none: planned, not trained" if self.untrained else self.engine
        rows = [
            ("devices", self.num_devices),
            ("tensor parallel", tensor),
            ("pipeline parallel", pipeline),
            ("data parallel", f"{self.data_parallel} ({zero})"),
        ]
        if self.context_parallel > 1:
            exchange = f"{self.context_parallel} ({self.context_exchange})"
            rows.append(("context parallel", exchange))
        rows += [
            ("batch (sequences) = replicas x micro-batches x size", batch),
            ("recompute, precision", f"{recompute}, {precision}"),
            ("engine", engine),
        ]
        return html_table("Plan", rows, Plan)
