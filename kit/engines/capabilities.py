"""Capabilities of each engine, as one record per engine. Rules, planner, launcher and trainer read
these records instead of comparing engine names.
"""

import dataclasses
from typing import Literal, get_args

from kit.config.spec import SWITCHES

EngineName = Literal["native", "deepspeed", "neuron"]
DEFAULT_ENGINE: EngineName = "native"
"""Engine of a plan that does not name an engine. It has the fewest restrictions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Capabilities of one engine. The default values describe an engine without restrictions."""

    # The following fields say which plans the engine can train.
    scales_loss: bool = False
    """Whether the engine scales the loss in fp16. Without loss scaling, small gradients are rounded
    to zero in fp16."""
    max_zero_stage: int = 3
    """Highest ZeRO stage that the engine supports."""
    max_zero_stage_with_pipeline: int = 3
    """Highest ZeRO stage that the engine supports with pipeline parallelism."""
    shards_within_groups: bool = True
    """Whether ZeRO may shard over a subset of the replicas (`Plan.shard_size`)."""
    schedules_other_than_1f1b: bool = True
    """Whether the engine's pipeline runs schedules other than 1F1B."""
    splits_ends_of_model: bool = True
    """Whether embedding and loss may count as one layer each when layers are assigned to pipeline
    stages."""
    sequence_parallel: bool = True
    """Whether the engine supports sequence parallelism: activations between matrix products are
    split along the sequence."""
    copies_kv_heads: bool = False
    """Whether a key/value head may be copied to several tensor parallel ranks. This is needed if
    there are more ranks than key/value heads."""
    bf16_without_zero: bool = True
    """Whether the engine trains in bf16 at ZeRO stage 0. DeepSpeed does not, since it would sum
    gradients in bf16 at ZeRO stage 0."""
    pure_bf16_without_zero: bool = False
    """Whether training in bf16 at ZeRO stage 0 uses stochastic rounding and no fp32 copies of the
    weights."""
    selective_recompute_with_zero_3: bool = True
    """Whether selective recomputation works with ZeRO 3, which gathers weights for each use and
    then frees them."""
    selective_recompute_repeats_attention: bool = False
    """Whether selective recomputation repeats the two matrix products of attention scores, beside
    element-wise operations."""
    recomputes_some_blocks: bool = True
    """Whether the engine can recompute only some of the blocks (`Plan.recompute_layers`)."""
    compiles_blocks: bool = True
    """Whether the engine can run blocks compiled by torch.compile."""
    only_plain_llama: bool = False
    """Whether the engine trains only Llama models without biases and without tied embeddings."""
    untrained_switches: frozenset[str] = frozenset()
    """Fields of ModelSpec (`kit.config.spec.SWITCHES`) that must have their default, since the
    engine does not train other values."""

    # The following fields say which recipes the engine can train.
    can_drop_update: bool = True
    """Whether the engine can judge the loss of a step before its update, and load a checkpoint
    again during training. Both are needed to drop the update of a bad step."""
    starts_from_weights: bool = True
    """Whether a run may start from the weights of a Hugging Face folder."""
    torch_profiler: bool = True
    """Whether torch's profiler records operations on the engine's devices."""
    masks_documents: bool = True
    """Whether the engine can restrict each token's attention to the token's own document."""
    gathers_matrices: bool = True
    """Whether the engine can gather a sharded matrix on one rank before its update. Muon needs
    it."""
    adds_z_loss: bool = True
    """Whether the engine can add the z-loss to the loss that it minimises."""
    groups_weights: bool = True
    """Whether groups of weights may have a learning rate and a weight decay of their own."""

    # The following fields say how the engine runs a step and saves checkpoints.
    works_ahead: bool = False
    """Whether a GPU may still compute a step while the host launches the next step."""
    portable_checkpoints: bool = True
    """Whether other engines and other layouts (degrees of parallelism) can read the engine's
    checkpoints."""
    runs_on_trainium: bool = False
    """Whether the engine trains on Trainium. On Trainium, neuronx-cc may compile a new graph at any
    step. Other engines train on GPUs and CPUs."""
    validates_whole_batches: bool = False
    """Whether the engine computes the validation loss only of whole global batches."""

    # The planner reads the following fields.
    is_torch_native: bool = False
    """Whether the engine runs the kit's own decoder with torch's FSDP2, DTensor and pipelining."""
    flash_attention: int = 2
    """Version of FlashAttention, the fused attention, that the engine uses. 0 means unfused
    attention, which writes the attention scores to memory."""
    memory_model: Literal["torch", "deepspeed", "megatron"] = "torch"
    """Code base whose activations and buffers the planner's memory estimate assumes
    (`kit.estimate.theory.activations`)."""
    searched_zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages that the planner searches unless the user names others."""


CAPABILITIES: dict[EngineName, Capabilities] = {
    "native": Capabilities(works_ahead=True, is_torch_native=True),
    # The restrictions come from the Frontier recipe (arXiv 2312.12705), or were measured with
    # DeepSpeed 0.19.8.
    "deepspeed": Capabilities(
        scales_loss=True,
        max_zero_stage_with_pipeline=1,
        shards_within_groups=False,
        schedules_other_than_1f1b=False,
        splits_ends_of_model=False,
        sequence_parallel=False,
        bf16_without_zero=False,
        selective_recompute_with_zero_3=False,
        recomputes_some_blocks=False,
        compiles_blocks=False,
        # Its pipeline makes each layer of its own, so what the decoder does between blocks is
        # missing. Its tensor parallel layers do not sum gradients of norms of queries and keys.
        untrained_switches=frozenset(
            (
                "qk_norm",
                "no_rope_layer_interval",
                "sliding_window",
                "sliding_window_pattern",
                "local_rope_theta",
                "embedding_multiplier",
                "logits_scaling",
                "final_logit_softcapping",
            )
        ),
        can_drop_update=False,
        masks_documents=False,
        gathers_matrices=False,
        adds_z_loss=False,
        groups_weights=False,
        memory_model="deepspeed",
    ),
    # The attention of NxD writes the scores to memory, as the attention of HLAT did. The layers of
    # NxD follow those of Megatron-LM. Training at ZeRO stage 0 has no fp32 master weights. The user
    # may choose this lower precision, but the planner does not search ZeRO stage 0.
    "neuron": Capabilities(
        max_zero_stage=1,
        shards_within_groups=False,
        schedules_other_than_1f1b=False,
        splits_ends_of_model=False,
        copies_kv_heads=True,
        pure_bf16_without_zero=True,
        selective_recompute_repeats_attention=True,
        recomputes_some_blocks=False,
        compiles_blocks=False,
        only_plain_llama=True,
        untrained_switches=SWITCHES,
        can_drop_update=False,
        starts_from_weights=False,
        torch_profiler=False,
        masks_documents=False,
        gathers_matrices=False,
        adds_z_loss=False,
        groups_weights=False,
        portable_checkpoints=False,
        runs_on_trainium=True,
        validates_whole_batches=True,
        flash_attention=0,
        memory_model="megatron",
        searched_zero_stages=(1,),
    ),
}
ENGINES: tuple[EngineName, ...] = get_args(EngineName)


def capabilities_of(engine: str) -> Capabilities:
    """Returns the capabilities of an engine by its name, one of ENGINES."""
    return CAPABILITIES[engine]  # pyright: ignore[reportArgumentType]
