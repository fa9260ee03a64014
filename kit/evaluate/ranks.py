"""Evaluation on several ranks: replicas share out the items, tensor ranks each matrix, pipeline
stages the layers.

Shape letters as in `kit.model`.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from kit.convert import run_weights
from kit.convert.weights import Weights
from kit.engines.process_group import start_process_group
from kit.model import Decoder, Past
from kit.parallel.apply import build_decoders
from kit.parallel.groups import part
from kit.parallel.mesh import build_mesh, data_axis
from kit.plan import Plan
from kit.run import Run
from kit.run.checkpoint_reader import alike, describe_together

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """What one process holds of a model that is to be scored, and who shares the work with it."""

    model: "Decoder | Stage"
    device: torch.device
    replicas: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process is the first, or the only one, of those that score."""
        return self.replicas is None or dist.get_rank() == 0

    @contextlib.contextmanager
    def first_alone(self) -> Iterator[None]:
        """Lets the first process go through the block before all others."""
        if not self.is_first:
            dist.barrier()
        yield
        if self.replicas is not None and self.is_first:
            dist.barrier()


@contextlib.contextmanager
def opened(run: Run, step: int, plan: Plan) -> Iterator[Share]:
    """Within the context, this process holds its share of a checkpoint's model; of several
    processes, all must enter.

    Raises:
        ConfigError: the plan does not fit the model, or the number of processes.
        CheckpointError: there is no complete checkpoint at that step, or a weight of some rank is
            damaged.
    """
    if plan.num_devices == 1:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        yield Share(
            model=run_weights(run, step).decoder(DTYPES[plan.precision]).to(device), device=device
        )
        return
    inside = dist.is_initialized()
    device = torch.device("cpu") if inside else start_process_group()
    yield load_on_ranks(
        run_weights(run, described=describe_together(run.checkpoints, step)), plan, device
    )
    part()
    if not inside:
        dist.destroy_process_group()


def load_on_ranks(weights: Weights, plan: Plan, device: torch.device) -> Share:
    """Returns this rank's share, for `DecoderLM`; raises as `opened`.

    Each rank reads and checks what it holds.
    """
    plan.check(weights.spec, dist.get_world_size())
    mesh = build_mesh(plan, device.type)
    # Replicas do not train, so nothing has to keep them equal: each is built as if it were alone.
    alone = Plan(tensor_parallel=plan.tensor_parallel, pipeline_parallel=plan.pipeline_parallel)
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[plan.precision])
    try:
        (decoder,) = build_decoders(weights.spec, alone, mesh, device=device, seed=None)
    finally:
        torch.set_default_dtype(before)
    if plan.tensor_parallel > 1 and decoder.output is not None:
        _gather_logits(decoder, mesh["tensor"])
    with alike():
        held = {name: parameter.detach() for name, parameter in decoder.eval().named_parameters()}
        if (
            weights.spec.tied_embeddings and "output.weight" in held
        ):  # on a last stage, which has no embedding
            held["embedding.tokens.weight"] = held.pop("output.weight")
        weights.fill(held)
    model = decoder if plan.pipeline_parallel == 1 else Stage(decoder, mesh["pipeline"].get_group())
    return Share(model=model, device=device, replicas=data_axis(mesh, plan).get_group())


def _gather_logits(decoder: Decoder, mesh: DeviceMesh) -> None:
    """Makes the output projection return logits of the whole vocabulary on every rank, in place."""

    def gather(module: Any, inputs: Any, logits_NV: Tensor) -> Tensor:
        parts = [torch.empty_like(logits_NV) for _ in range(mesh.size())]
        dist.all_gather(parts, logits_NV.contiguous(), group=mesh.get_group())
        return torch.cat(parts, dim=-1)

    assert decoder.output is not None
    decoder.output.register_forward_hook(gather)


class Stage:
    """Consecutive layers of a decoder, with its interface; all stages must make the same calls.

    A stage may run ahead of those behind it, as far as they take over what it hands on.
    """

    def __init__(self, decoder: Decoder, group: dist.ProcessGroup) -> None:
        self.spec, self.parameters = decoder.spec, decoder.parameters
        self.part, self._group, self._last = decoder, group, group.size() - 1

    @property
    def is_last(self) -> bool:
        """Whether the output projection is here."""
        return self._group.rank() == self._last

    def hidden(self, tokens_BT: Tensor, past: Past | None = None) -> Tensor:
        """Returns hidden states of these tokens, as `Decoder.hidden` does: on the last stage
        those of the model.
        """
        rank, weight = self._group.rank(), next(self.part.parameters())
        if past is None:  # the length of what a stage is handed is known from positions alone
            nodes_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
            mask_BTT = (nodes_T <= nodes_T[:, None]).expand(len(tokens_BT), -1, -1)
            past = Past(positions_BT=nodes_T.expand(tokens_BT.shape), mask_BTS=mask_BTT)
        x = tokens_BT
        if rank > 0:
            x = torch.empty(
                *tokens_BT.shape, self.spec.hidden_size, dtype=weight.dtype, device=weight.device
            )
            dist.recv(x, group=self._group, group_src=rank - 1)
        x = self.part.hidden(x, past)
        if not self.is_last:
            dist.send(x.contiguous(), group=self._group, group_dst=rank + 1)
        return x

    def output(self, x: Tensor) -> Tensor:
        """Returns the logits of the last stage's hidden states, on every stage."""
        if self.part.output is not None:
            logits = self.part.output(x).contiguous()
        else:
            logits = x.new_empty(*x.shape[:-1], self.spec.vocab_size)
        self.tell(logits)
        return logits

    def tell(self, found: Tensor) -> None:
        """Overwrites a tensor on all stages with that of the last."""
        dist.broadcast(found, group=self._group, group_src=self._last)
