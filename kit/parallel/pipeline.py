"""Pipeline parallelism: which stages each pipeline rank has, and torch's schedules that run the
stages.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.model import Decoder

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

SCHEDULES = {
    "gpipe": "ScheduleGPipe",  # GPipe, arXiv 1811.06965
    "1f1b": "Schedule1F1B",  # PipeDream-Flush, arXiv 2006.09503
    "interleaved": "ScheduleInterleaved1F1B",  # interleaved 1F1B of Megatron-LM, arXiv 2104.04473
    "zero_bubble": "ScheduleInterleavedZeroBubble",  # zero bubble pipeline, arXiv 2401.10241
    "zbv": "ScheduleZBVZeroBubble",  # V-shaped zero bubble pipeline, arXiv 2401.10241
}
"""Maps each value of `Plan.schedule` to the name of the schedule class in
torch.distributed.pipelining. The classes themselves would need an import that takes a second, also
in runs without a pipeline."""


def stage_indices(plan: Plan, pipeline_rank: int) -> list[int]:
    """Returns the indices of the stages that a pipeline rank has, counted from 0 over the complete
    model.

    With p pipeline ranks, rank r has the stages r, r + p, r + 2 p, and so on. In the V-shaped
    schedule `zbv`, the first half of the stages runs from rank 0 to the last rank, and the second
    half runs back. Rank 0 therefore has the first and the last stage.
    """
    if plan.schedule == "zbv" and plan.pipeline_parallel > 1:
        return [pipeline_rank, plan.num_stages - 1 - pipeline_rank]
    return list(range(pipeline_rank, plan.num_stages, plan.pipeline_parallel))


def build_schedule(
    decoders: list[Decoder],
    *,
    plan: Plan,
    pipeline_rank: int,
    group: ProcessGroup,
    device: torch.device,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> "PipelineScheduleSingle | PipelineScheduleMulti":
    """Returns torch's schedule object for this rank's stages. The gradients that it computes are
    the mean over the micro-batches.

    `loss` is a function of (logits, targets) of one micro-batch.
    """
    from torch.distributed import pipelining
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    spec = decoders[0].spec
    stages = [
        pipelining.PipelineStage(
            decoder,
            index,
            plan.num_stages,
            device,
            input_args=_handed_to(index, spec, plan),
            output_args=_handed_to(index + 1, spec, plan),
            group=group,
        )
        for decoder, index in zip(decoders, stage_indices(plan, pipeline_rank), strict=True)
    ]
    kind: Any = getattr(pipelining, SCHEDULES[plan.schedule])
    if plan.schedule == "1f1b" and plan.num_microbatches < plan.num_stages:
        # Torch's 1F1B needs at least as many micro-batches as stages. With fewer micro-batches,
        # GPipe takes the same time per step as 1F1B. GPipe also uses as much memory in the first
        # stage, since both schedules save the activations of all micro-batches in this stage.
        kind = pipelining.ScheduleGPipe
    held: Any = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
    return kind(held, n_microbatches=plan.num_microbatches, loss_fn=loss)


@torch.no_grad()
def forward_only(
    decoders: list[Decoder],
    tokens_BT: Tensor,
    *,
    plan: Plan,
    pipeline_rank: int,
    group: ProcessGroup,
) -> Tensor | None:
    """Returns the logits of one micro-batch if this rank has the last stage, otherwise None.

    The stages run one after the other with plain sends and receives, since torch's schedule for
    `zbv` cannot run a forward pass alone. All ranks of the pipeline must call this function.
    """
    owner = {
        index: rank for rank in range(plan.pipeline_parallel) for index in stage_indices(plan, rank)
    }
    spec = decoders[0].spec
    x = tokens_BT
    for decoder, index in zip(decoders, stage_indices(plan, pipeline_rank), strict=True):
        if index > 0 and owner[index - 1] != pipeline_rank:
            x = torch.empty_like(
                _handed_to(index, spec, plan), device=tokens_BT.device, requires_grad=False
            )
            dist.recv(x, group=group, group_src=owner[index - 1])
        x = decoder(x)
        if index + 1 < plan.num_stages and owner[index + 1] != pipeline_rank:
            dist.send(x.contiguous(), group=group, group_dst=owner[index + 1])
    return x if decoders[-1].output is not None else None


def _handed_to(stage: int, spec: ModelSpec, plan: Plan) -> Tensor:
    """Returns a meta tensor with shape and dtype of the input of `stage`: tokens for the first
    stage, hidden states for the other stages. If `stage` is `num_stages`, the tensor describes the
    logits.
    """
    dtype = torch.bfloat16 if plan.precision == "bf16" else torch.float32
    batch = plan.micro_batch_size
    length = spec.sequence_length
    width = spec.hidden_size
    if stage == 0:
        return torch.empty(batch, length, dtype=torch.int64, device="meta")
    if stage == plan.num_stages:
        width = spec.vocab_size // plan.tensor_parallel
    elif plan.sequence_parallel:
        length = length // plan.tensor_parallel
    return torch.empty(batch, length, width, dtype=dtype, device="meta", requires_grad=True)
