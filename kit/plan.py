"""Plan: how a ModelSpec is split over devices and how its batch is cut. No torch."""

import dataclasses
import math
from typing import Any, Literal

from cluster.record import ConfigError, Record, counted, field_doc, html_table
from kit.spec import ModelSpec

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]
Recompute = Literal["none", "selective", "full"]
Precision = Literal["fp32", "bf16", "fp16", "fp8", "mxfp8"]
ContextExchange = Literal["ring", "all_to_all"]
EngineName = Literal["native", "deepspeed", "neuron"]

MOST_DEVICES = 2**22  # more than any machine has; a view of a run takes memory in proportion
PLANNED_ONLY = ("fp8", "mxfp8")
"""Precisions that the kit estimates and no engine of it trains."""
MULTI_STAGE_SCHEDULES = ("interleaved", "zero_bubble", "zbv")
TRN1_CORES = 32
"""NeuronCores, and so ranks of engine neuron, on a node: a trn1.32xlarge."""


def logits_at_once(gpu_bytes: float | None) -> int:
    """Returns of how many logits the loss is computed at a time on a GPU of so much memory, or on a
    CPU (none).

    Each chunk reads the whole output projection and adds to its gradient. 8,192 tokens over a
    vocabulary of 128,000 are 31 chunks of 2^25 logits, which costs an H100 some 65 ms (modelled
    from its bandwidth), but 4 of 2^28. All copies of a chunk (10 bytes a logit) take at most a
    sixteenth of the memory. A CPU gains nothing by larger ones (measured).
    """
    if gpu_bytes is None:
        return 2**25
    return min(2**28, max(2**25, 2 ** int(math.log2(gpu_bytes / 160))))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """Parallel degrees, batch and memory options of one training job."""

    tensor_parallel: int = field_doc("devices that share each weight matrix", default=1)
    pipeline_parallel: int = field_doc("devices that share the stack of layers", default=1)
    data_parallel: int = field_doc("replicas, each with its own part of the batch", default=1)
    context_parallel: int = field_doc(
        "devices that share each sequence; planned, not trained", default=1
    )
    context_exchange: ContextExchange = field_doc(
        "what these pass for attention: keys and values round a ring, or parts of the sequence for"
        " heads (Ulysses)",
        default="ring",
    )
    virtual_stages: int = field_doc("pipeline stages held by each pipeline device", default=1)
    zero_stage: int = field_doc(
        "0 replicate; shard over data_parallel 1 optimizer, 2 + gradients, 3 + weights", default=0
    )
    shard_size: int | None = field_doc(
        "replicas, neighbours in rank order, that ZeRO shards over, with copies across"
        " data_parallel / shard_size groups (HSDP; engine native); None: all of data_parallel",
        default=None,
    )
    sequence_parallel: bool = field_doc(
        "shard norms and residuals along the sequence over tensor_parallel", default=False
    )
    schedule: Schedule = field_doc("order of pipeline work", default="1f1b")
    recompute: Recompute = field_doc(
        "activations computed again in the backward pass", default="none"
    )
    micro_batch_size: int = field_doc("sequences in one forward pass of one replica", default=1)
    global_batch_size: int = field_doc(
        "sequences in one optimizer step, over all replicas", default=1
    )
    precision: Precision = field_doc(
        "bf16 keeps fp32 master weights, optimizer and gradient reduction (engine neuron with"
        " zero_stage 0: none of them, but stochastic rounding); fp16 scales the loss too (engine"
        " deepspeed); fp8, mxfp8: of linear layers' products, planned and not trained",
        default="fp32",
    )
    compile: bool = field_doc("torch.compile each block", default=False)
    engine: EngineName = field_doc(
        "what runs the steps: torch itself, DeepSpeed, or NeuronX Distributed", default="native"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if (
                isinstance(value, int)
                and not isinstance(value, bool)
                and field.name != "zero_stage"
                and value < 1
            ):
                raise ConfigError(
                    f"plan.{field.name}: {value} is not allowed. Give a whole number from 1."
                )
        if self.num_devices > MOST_DEVICES:
            raise ConfigError(
                f"plan: {self.num_devices:,} devices are too many. Allowed: up to {MOST_DEVICES:,}."
            )
        if self.zero_stage not in (0, 1, 2, 3):
            raise ConfigError(
                f"plan.zero_stage: {self.zero_stage} is not allowed. Allowed: 0, 1, 2, 3."
            )
        self._check_shards()
        self._check_batch()
        self._check_schedule()
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ConfigError(
                "plan.sequence_parallel: needs tensor_parallel of at least 2, got 1. Turn it off."
            )
        if self.context_exchange != "ring" and self.context_parallel == 1:
            raise ConfigError(
                f"plan.context_exchange: {self.context_exchange!r} needs context_parallel of at"
                " least 2, got 1."
            )
        if self.precision == "fp16" and self.engine != "deepspeed":
            self._refuse(
                {
                    "precision": (
                        "only DeepSpeed scales the loss, without which small gradients are lost;"
                        " use 'bf16', or engine 'deepspeed'"
                    )
                }
            )
        if self.engine == "deepspeed":
            self._check_deepspeed()
        if self.engine == "neuron":
            self._check_neuron()

    def _check_shards(self) -> None:
        if self.shard_size is None:
            return
        refused = {
            "with zero_stage 0, which shards nothing; use zero_stage 1, 2 or 3": (
                self.zero_stage == 0
            ),
            f"with engine {self.engine!r}, which shards over all of data_parallel; use None": (
                self.engine != "native"
            ),
            "with context_parallel, which nobody tried": self.context_parallel > 1,
            f"with data_parallel {self.data_parallel}, which it must divide": (
                self.data_parallel % self.shard_size
            ),
        }
        for reason in (reason for reason, holds in refused.items() if holds):
            raise ConfigError(f"plan.shard_size: {self.shard_size} is not allowed {reason}.")

    def _check_batch(self) -> None:
        sequences = self.micro_batch_size * self.data_parallel
        if self.global_batch_size % sequences:
            raise ConfigError(
                f"plan.global_batch_size: {counted(self.global_batch_size, 'sequence')} cannot be"
                f" cut into micro-batches of {self.micro_batch_size} on"
                f" {counted(self.data_parallel, 'replica')}. Use a multiple of {sequences}, for"
                f" example {max(1, round(self.global_batch_size / sequences)) * sequences}."
            )

    def _check_schedule(self) -> None:
        stages = "plan.virtual_stages"
        if self.virtual_stages > 1 and self.pipeline_parallel == 1:
            raise ConfigError(
                f"{stages}: {self.virtual_stages} needs pipeline_parallel of at least 2, got 1."
            )
        if self.pipeline_parallel == 1:
            return
        if self.schedule in MULTI_STAGE_SCHEDULES and self.virtual_stages == 1:
            raise ConfigError(
                f"{stages}: schedule {self.schedule!r} needs at least 2 stages a device, got 1."
            )
        if self.schedule not in MULTI_STAGE_SCHEDULES and self.virtual_stages > 1:
            raise ConfigError(
                f"{stages}: schedule {self.schedule!r} has 1 stage a device, got"
                f" {self.virtual_stages}. Use schedule"
                f" {', '.join(map(repr, MULTI_STAGE_SCHEDULES))}."
            )
        if self.schedule == "zbv" and self.virtual_stages != 2:
            raise ConfigError(
                f"{stages}: schedule 'zbv' has exactly 2 stages a device, got"
                f" {self.virtual_stages}."
            )
        if self.schedule == "zbv" and self.num_microbatches < 2 * self.pipeline_parallel - 1:
            raise ConfigError(
                "plan.global_batch_size: schedule 'zbv' needs at least"
                f" {2 * self.pipeline_parallel - 1} micro-batches, got {self.num_microbatches}."
                " Raise global_batch_size or lower micro_batch_size."
            )
        if self.schedule in ("zero_bubble", "zbv"):
            self._check_zero_bubble()
        rounds = self.schedule in ("interleaved", "zero_bubble")
        if rounds and self.num_microbatches % self.pipeline_parallel:
            raise ConfigError(
                f"plan.global_batch_size: schedule {self.schedule!r} needs the"
                f" {self.num_microbatches} micro-batches to be a multiple of pipeline_parallel"
                f" {self.pipeline_parallel}. Change the global or micro batch."
            )

    def _check_zero_bubble(self) -> None:
        # Both measured on torch 2.13: recomputation runs once for each half of the backward pass
        # (selective fails), and with ZeRO 3 the second half reads weights that are already dropped:
        # gradients are silently wrong.
        if self.recompute != "none":
            raise ConfigError(
                f"plan.recompute: {self.recompute!r} with schedule {self.schedule!r} is not"
                " allowed, since its split backward pass would recompute twice. Use recompute"
                " 'none' or schedule '1f1b' or 'interleaved'."
            )
        if self.zero_stage == 3:
            raise ConfigError(
                f"plan.zero_stage: 3 with schedule {self.schedule!r} is not allowed, since its"
                " split backward pass needs weights that ZeRO 3 has dropped. Use zero_stage 2 or"
                " schedule '1f1b' or 'interleaved'."
            )

    def _check_deepspeed(self) -> None:
        pipeline = self.pipeline_parallel > 1
        refused = {
            "zero_stage": (
                pipeline and self.zero_stage > 1 and "its pipeline sums gradients whole; use 0 or 1"
            ),
            "schedule": (
                pipeline and self.schedule != "1f1b" and "its pipeline runs 1F1B only; use '1f1b'"
            ),
            "sequence_parallel": (
                self.sequence_parallel and "its Frontier recipe has none; turn it off"
            ),
            # torch keeps and recomputes operations by their order, which gathering and dropping
            # weights upsets.
            "recompute": (
                self.zero_stage == 3
                and self.recompute == "selective"
                and "not with zero_stage 3; use 'full'"
            ),
            "compile": self.compile and "compiled blocks were not tried under it; turn it off",
            # Measured with DeepSpeed 0.19.8: bf16 at stage 0 keeps no fp32 sum of gradients and
            # strays by 8e-3.
            "precision": (
                self.precision != "fp32"
                and self.zero_stage == 0
                and f"stage 0 keeps {self.precision} sums of gradients; use zero_stage 1, also "
                "with one replica"
            ),
        }
        self._refuse(refused)

    def _check_neuron(self) -> None:
        self._refuse(
            {
                "zero_stage": self.zero_stage > 1 and "NxD shards the optimizer only; use 0 or 1",
                "schedule": (
                    self.pipeline_parallel > 1
                    and self.schedule != "1f1b"
                    and "HLAT ran 1F1B; use '1f1b'"
                ),
                "compile": self.compile and "its graphs are compiled by neuronx-cc; turn it off",
            }
        )

    def _refuse(self, refused: dict[str, str | bool]) -> None:
        for name, reason in refused.items():
            if reason:
                value = getattr(self, name)
                raise ConfigError(
                    f"plan.{name}: {value!r} is not allowed with engine {self.engine!r}: {reason}."
                )

    @property
    def recomputes_whole(self) -> bool:
        """Whether full recomputation runs a block to its end; `ModelSpec.hardware_flops_per_token`
        has the other way.

        A compiled block is one operation, which cannot stop before its end. NxD's blocks, which
        were never counted, are taken to do the same.
        """
        return self.compile or self.engine == "neuron"

    @property
    def gpu_defaults(self) -> dict[str, Any]:
        """Fields that such a plan has on GPUs where nobody has said otherwise: bf16, and compiled
        where that pays.

        Zero-bubble schedules cut each backward pass in two, and compiled blocks then run it twice:
        half as many matrix products again, counted. For other engines than torch itself nothing is
        assumed.
        """
        cut = self.pipeline_parallel > 1 and self.schedule in ("zero_bubble", "zbv")
        return {"precision": "bf16", "compile": not cut} if self.engine == "native" else {}

    @property
    def num_devices(self) -> int:
        """tensor x context x pipeline x data: one process each."""
        return (
            self.tensor_parallel
            * self.context_parallel
            * self.pipeline_parallel
            * self.data_parallel
        )

    @property
    def untrained(self) -> tuple[str, ...]:
        """What the kit plans and no engine of it trains: names of fields."""
        found = {
            "context_parallel": self.context_parallel > 1,
            "precision": self.precision in PLANNED_ONLY,
        }
        return tuple(name for name, is_asked in found.items() if is_asked)

    @property
    def num_shards(self) -> int:
        """Replicas that ZeRO cuts states over: 1 for stage 0."""
        return 1 if self.zero_stage == 0 else self.shard_size or self.data_parallel

    @property
    def num_stages(self) -> int:
        """Pipeline stages in all: pipeline_parallel x virtual_stages."""
        return self.pipeline_parallel * self.virtual_stages

    def kv_replication(self, spec: ModelSpec) -> int:
        """Returns how many tensor parallel ranks hold each key/value head: more than 1 with
        engine neuron only.
        """
        copies = self.engine == "neuron" and self.tensor_parallel % spec.num_kv_heads == 0
        return max(1, self.tensor_parallel // spec.num_kv_heads) if copies else 1

    @property
    def num_microbatches(self) -> int:
        """Micro-batches that each replica runs in one optimizer step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel)

    def check(self, spec: ModelSpec, num_processes: int | None = None) -> None:
        """Returns nothing if this plan can run `spec` (on `num_processes`, if given).

        Raises:
            ConfigError: the process count is not TP x PP x DP, a shape of the model does not
                divide, or the engine does not train such models or plans.
        """
        for name in self.untrained:
            raise ConfigError(
                f"plan.{name}: {getattr(self, name)!r} is not trained by engine {self.engine!r} or"
                " another: the kit plans this, it does not train it. Use"
                f" {'1' if name == 'context_parallel' else 'bf16'}."
            )
        self.check_shapes(spec, num_processes)

    def check_shapes(self, spec: ModelSpec, num_processes: int | None = None) -> None:
        """Returns nothing if `spec` can be cut as this plan says, whether or not the kit trains
        such plans.

        Raises:
            ConfigError: as `check`.
        """
        if self.engine == "neuron" and (
            spec.family != "llama" or spec.bias or spec.tied_embeddings
        ):
            raise ConfigError(
                "plan.engine: 'neuron' trains Llamas without biases and tied embeddings, as HLAT"
                f" did; {spec.name!r} is not one. Use engine 'native', or another model."
            )
        if self.engine == "neuron" and self.tensor_parallel == 4:
            self._check_four_neuron_ranks(spec)
        if num_processes is not None and num_processes != self.num_devices:
            raise ConfigError(
                f"plan: tensor {self.tensor_parallel} x pipeline {self.pipeline_parallel} x data"
                f" {self.data_parallel} = {self.num_devices} processes, but {num_processes} were"
                f" started. Start {self.num_devices}, or change a degree."
            )
        if spec.num_layers < self.num_stages:
            raise ConfigError(
                f"plan.pipeline_parallel: {self.num_stages} stages but the model has "
                f"{counted(spec.num_layers, 'layer')}. Lower pipeline_parallel or virtual_stages."
            )
        stages, tensor = "the number of pipeline stages", "tensor_parallel"
        exchanged = self.context_parallel if self.context_exchange == "all_to_all" else 1
        heads = f"{tensor} x context_parallel" if exchanged > 1 else tensor
        for what, count, degree, name in (
            ("num_layers", spec.num_layers, self.num_stages, stages),
            ("num_heads", spec.num_heads, self.tensor_parallel * exchanged, heads),
            (
                "num_kv_heads",
                spec.num_kv_heads * self.kv_replication(spec),
                self.tensor_parallel * exchanged,
                heads,
            ),
            ("ffn_hidden_size", spec.ffn_hidden_size, self.tensor_parallel, tensor),
            ("vocab_size", spec.vocab_size, self.tensor_parallel, tensor),
        ):
            if count % degree:
                raise ConfigError(
                    f"spec.{what}: {count} is not divisible by {name} = {degree}. Allowed for this"
                    f" model: {', '.join(str(i) for i in range(1, 129) if count % i == 0)}."
                )
        self._check_sequence(spec)

    def _check_sequence(self, spec: ModelSpec) -> None:
        tensor = self.tensor_parallel if self.sequence_parallel else 1
        # Each rank has a part of the head of a sequence and one of its tail: equal work under the
        # causal mask.
        parts = tensor * (2 * self.context_parallel if self.context_parallel > 1 else 1)
        if spec.sequence_length % parts:
            needs = f"tensor_parallel = {tensor}, which sequence_parallel needs"
            if self.context_parallel > 1:
                needs = (
                    f"2 x context_parallel{' x tensor_parallel' if tensor > 1 else ''} = {parts}"
                )
            raise ConfigError(
                f"spec.sequence_length: {spec.sequence_length} is not divisible by {needs}."
            )

    def _check_four_neuron_ranks(self, spec: ModelSpec) -> None:
        # On Trn1 NxD (0.9 to 0.18: parallel_layers/parallel_state.py) spreads each group of four
        # over its node, side by side with others of the same pipeline stage, but adds up copied
        # heads as if the four were neighbours.
        if self.kv_replication(spec) > 1:
            raise ConfigError(
                "plan.tensor_parallel: 4 is not allowed with engine 'neuron' where"
                f" spec.num_kv_heads is {spec.num_kv_heads}: NxD adds up the gradients of copied"
                f" key/value heads over the wrong ranks. Use {spec.num_kv_heads}, or 8 and more."
            )
        groups = min(self.num_devices, TRN1_CORES) // 4
        if self.data_parallel % groups:
            raise ConfigError(
                f"plan.data_parallel: {self.data_parallel} is not allowed with engine 'neuron',"
                f" tensor_parallel 4 and pipeline_parallel {self.pipeline_parallel}: NxD makes the"
                f" {groups} groups of four ranks on a node replicas of each other. Use a multiple"
                f" of {TRN1_CORES // 4}, pipeline_parallel 1, or another tensor_parallel."
            )

    def _repr_html_(self) -> str:
        pipeline = (
            f"{self.pipeline_parallel} ({self.schedule}, {counted(self.virtual_stages, 'stage')} a"
            " device)"
        )
        batch = (
            f"{self.global_batch_size} = {self.data_parallel} x {self.num_microbatches} x"
            f" {self.micro_batch_size}"
        )
        over = f" over {self.shard_size}" if self.shard_size else ""
        rows = [
            ("devices", self.num_devices),
            (
                "tensor parallel",
                f"{self.tensor_parallel}{' + sequence' if self.sequence_parallel else ''}",
            ),
            ("pipeline parallel", pipeline),
            ("data parallel", f"{self.data_parallel} (ZeRO {self.zero_stage}{over})"),
            *[("context parallel", f"{self.context_parallel} ({self.context_exchange})")]
            * (self.context_parallel > 1),
            ("batch (sequences) = replicas x micro-batches x size", batch),
            (
                "recompute, precision",
                f"{self.recompute}, {self.precision}{', compiled' if self.compile else ''}",
            ),
            ("engine", "none: planned, not trained" if self.untrained else self.engine),
        ]
        return html_table("Plan", rows)
