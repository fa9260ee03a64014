"""Evaluation on several ranks: replicas share out the items, tensor parallel ranks share each matrix."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from kit.model import Decoder
from kit.parallel.apply import build_decoders
from kit.parallel.mesh import build_mesh, data_axis
from kit.plan import Plan
from kit.run import Run
from kit.run.checkpoint_ranks import describe_together


def load_on_ranks(
    run: Run, step: int | None = None, *, tensor_parallel: int = 1, device: str = "cpu"
) -> tuple[Decoder, dist.ProcessGroup]:
    """Returns this rank's part of a checkpoint's model, and the ranks that share out the items with it.

    Both go into `DecoderLM`. The checkpoint, by default the newest, may be of any layout. All ranks of the default
    process group must call this; those that `tensor_parallel` does not take are replicas.

    Raises:
        ConfigError: the model, or the number of ranks, cannot be divided so.
        CheckpointError: there is no complete checkpoint, or none at that step.
    """
    step = run.checkpoints.newest() if step is None else step
    replicas = max(1, dist.get_world_size() // tensor_parallel)
    plan = Plan(tensor_parallel=tensor_parallel, data_parallel=replicas, global_batch_size=replicas)
    plan.check(run.spec, dist.get_world_size())
    where = torch.device(device)
    mesh = build_mesh(plan, where.type)
    # Replicas do not train, so nothing has to keep them equal: each is built as if it were alone.
    alone = Plan(tensor_parallel=tensor_parallel)
    (decoder,) = build_decoders(run.spec, alone, mesh, device=where, seed=None)
    if tensor_parallel > 1:
        _gather_logits(decoder, mesh["tensor"])
    state = {f"model.{name}": parameter.detach() for name, parameter in decoder.named_parameters()}
    described = describe_together(run.checkpoints, step)
    run.checkpoints.load(step, state, spec=run.spec, described=described)
    return decoder.eval(), data_axis(mesh, plan).get_group()


def _gather_logits(decoder: Decoder, mesh: DeviceMesh) -> None:
    """Makes the output projection return logits of the whole vocabulary on every rank, in place."""

    def gather(module: Any, inputs: Any, logits_NV: Tensor) -> Tensor:
        parts = [torch.empty_like(logits_NV) for _ in range(mesh.size())]
        dist.all_gather(parts, logits_NV.contiguous(), group=mesh.get_group())
        return torch.cat(parts, dim=-1)

    assert decoder.output is not None
    decoder.output.register_forward_hook(gather)
