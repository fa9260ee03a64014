"""What each engine can do. Rules, planner, launcher and trainer query these records, and compare no
names of engines.
"""

import dataclasses
from typing import Literal, get_args

EngineName = Literal["native", "deepspeed", "neuron"]
DEFAULT_ENGINE: EngineName = "native"
"""Engine of a plan that names none. It has the fewest restrictions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What one engine can do. A default describes the engine without restrictions."""

    # Plans that it trains
    scales_loss: bool = False
    """Whether it scales the loss, without which fp16 loses small gradients."""
    max_zero_stage: int = 3
    """Highest ZeRO stage."""
    max_zero_stage_with_pipeline: int = 3
    """Highest ZeRO stage beside a pipeline."""
    shards_within_groups: bool = True
    """Whether ZeRO may shard over fewer than all replicas (`Plan.shard_size`)."""
    schedules_other_than_1f1b: bool = True
    """Whether its pipeline runs schedules other than 1F1B."""
    splits_ends_of_model: bool = True
    """Whether embedding and loss may count as a layer each when stages are formed."""
    sequence_parallel: bool = True
    """Whether it splits activations between matrix products along the sequence."""
    copies_kv_heads: bool = False
    """Whether several tensor parallel ranks may hold a copy of one key/value head."""
    bf16_without_zero: bool = True
    """Whether it trains in bf16 at ZeRO stage 0. DeepSpeed would sum gradients in bf16 there."""
    pure_bf16_without_zero: bool = False
    """Whether ZeRO stage 0 in bf16 keeps no fp32 copies and rounds stochastically."""
    selective_recompute_with_zero_3: bool = True
    """Whether selective recomputation works beside weights that ZeRO 3 gathers and drops."""
    recomputes_some_blocks: bool = True
    """Whether it can recompute a part of the blocks (`Plan.recompute_layers`)."""
    compiles_blocks: bool = True
    """Whether it runs blocks compiled by torch.compile."""
    only_plain_llama: bool = False
    """Whether it trains only Llama models without biases and without tied embeddings."""

    # Recipes that it trains
    can_drop_update: bool = True
    """Whether the loss of a step can be judged before its update, and a checkpoint loaded again."""
    starts_from_weights: bool = True
    """Whether a run may start from the weights of a Hugging Face folder."""
    torch_profiler: bool = True
    """Whether torch's profiler sees the device."""
    masks_documents: bool = True
    """Whether tokens may be restricted to attend to their own document."""

    # How it runs
    works_ahead: bool = False
    """Whether a GPU may work on a step while the host launches the next one."""
    portable_checkpoints: bool = True
    """Whether engines and layouts other than the writer's read its checkpoints."""
    runs_on_trainium: bool = False
    """Whether it trains on Trainium, through graphs that neuronx-cc compiles at any step. Other
    engines train on GPUs and CPUs."""
    validates_whole_batches: bool = False
    """Whether the validation loss needs whole global batches."""

    # What the planner assumes
    is_torch_native: bool = False
    """Whether the kit's own decoder runs under torch's FSDP2, DTensor and pipelining."""
    flash_attention: int = 2
    """Generation of fused attention. 0 writes the scores out."""
    memory_model: Literal["torch", "deepspeed", "megatron"] = "torch"
    """Code base whose activations and buffers are counted (`kit.estimate.theory.activations`)."""
    searched_zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages among which the planner searches unless the user names others."""


CAPABILITIES: dict[EngineName, Capabilities] = {
    "native": Capabilities(works_ahead=True, is_torch_native=True),
    # Its restrictions are those of the Frontier recipe, or were measured with DeepSpeed 0.19.8.
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
        can_drop_update=False,
        masks_documents=False,
        memory_model="deepspeed",
    ),
    # NxD's attention writes scores out, as HLAT did, and its layers are made after Megatron-LM's.
    # At ZeRO stage 0 it has no fp32 master weights: that is another precision, which the user
    # chooses and the planner does not search for.
    "neuron": Capabilities(
        max_zero_stage=1,
        shards_within_groups=False,
        schedules_other_than_1f1b=False,
        splits_ends_of_model=False,
        copies_kv_heads=True,
        pure_bf16_without_zero=True,
        recomputes_some_blocks=False,
        compiles_blocks=False,
        only_plain_llama=True,
        can_drop_update=False,
        starts_from_weights=False,
        torch_profiler=False,
        masks_documents=False,
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
