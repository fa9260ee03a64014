"""Pipeline schedules: the order in which each pipeline device runs its forward and backward passes,
for five schedules.
"""

import dataclasses
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from kit.estimate.theory.layouts import Array

FORWARD = 0
BACKWARD = 1
BACKWARD_INPUT = 2
BACKWARD_WEIGHT = 3
PADDING = -1
KINDS = "FBIW"
"""Letters of the four kinds of operations, in the order of their numbers: forward pass, whole
backward pass, gradients of the input only, gradients of the weights only."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """Operations (forward and backward passes of one micro-batch in one stage) of each pipeline
    device, in the order in which they run.

    Arrays have shape (devices, operations). If a device has fewer operations than others, PADDING
    fills the end of its row.
    """

    name: str
    """Name of the pipeline schedule, e.g. `1f1b`."""
    kind: Array
    """Kind of each operation: FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, or PADDING."""
    stage: Array
    """Number of the pipeline stage, from 0, whose layers each operation computes."""
    micro_batch: Array
    """Number of the micro-batch, from 0, that each operation computes."""

    @classmethod
    def of(
        cls,
        schedule: str,
        *,
        pipeline_parallel: int,
        num_microbatches: int,
        virtual_stages: int = 1,
    ) -> Self:
        """Returns the operations of a pipeline schedule. `schedule` is its name in a Plan:

        - `gpipe` (arXiv 1811.06965).
        - `1f1b` (PipeDream-Flush, arXiv 2006.09503).
        - `interleaved` (Megatron, arXiv 2104.04473).
        - `zero_bubble` (ZB-H1 of arXiv 2401.10241, and with several virtual stages torch's ZB1P).
        - `zbv` (arXiv 2401.10241, section 6), which has two stages on each device, in the shape of
          a V.

        The arguments are not checked. The rules of Plan have already checked that the schedule is
        possible for these numbers.
        """
        p = pipeline_parallel
        m = num_microbatches
        v = virtual_stages
        operations = _v_shaped(p, m) if schedule == "zbv" else _one_directional(schedule, p, m, v)
        columns = [operation.broadcast(p) for operation in operations]
        slots = np.concatenate([column.slot for column in columns], axis=1)
        kinds = np.concatenate([np.full(c.slot.shape, c.kind, np.int8) for c in columns], axis=1)
        stages = np.concatenate([column.stage for column in columns], axis=1)
        micro_batches = np.concatenate([column.micro_batch for column in columns], axis=1)
        order = np.argsort(slots, axis=1, kind="stable")
        return cls(
            name=schedule,
            kind=np.take_along_axis(kinds, order, axis=1),
            stage=np.take_along_axis(stages, order, axis=1),
            micro_batch=np.take_along_axis(micro_batches, order, axis=1),
        )

    @property
    def num_devices(self) -> int:
        """Number of pipeline devices in the schedule."""
        return self.kind.shape[0]

    @cached_property
    def num_stages(self) -> int:
        """Number of pipeline stages over all devices. A device may have several virtual stages."""
        return int(self.stage.max()) + 1

    @cached_property
    def num_microbatches(self) -> int:
        """Number of micro-batches of the simulated step."""
        return int(self.micro_batch.max()) + 1

    @cached_property
    def device_of_stage(self) -> Array:
        """Number of the pipeline device on which each stage is, shape (stages,)."""
        device = np.full(self.num_stages, -1)
        work = self.kind != PADDING
        rows = np.broadcast_to(np.arange(self.num_devices)[:, None], self.kind.shape)
        device[self.stage[work]] = rows[work]
        return device

    @cached_property
    def peak_in_flight(self) -> Array:
        """Largest number of micro-batches whose activations a device keeps in memory at once, shape
        (devices,).

        A micro-batch in all stages of a device counts 1. In one of v stages it counts 1/v.
        Activations are kept from the start of the forward pass to the end of the backward pass. If
        the backward pass is split, they are kept until the weight gradients are computed.
        """
        held = np.cumsum(
            (self.kind == FORWARD).astype(int) - np.isin(self.kind, (BACKWARD, BACKWARD_WEIGHT)),
            axis=1,
        )
        return held.max(axis=1) / np.bincount(self.device_of_stage, minlength=self.num_devices)

    def __str__(self) -> str:
        """Returns a text with one line per device in torch's notation. Each operation is written as
        stage, kind and micro-batch, for example `0F3`.
        """
        rows = zip(self.stage, self.kind, self.micro_batch, strict=True)
        return "\n".join(
            " ".join(f"{s}{KINDS[k]}{b}" for s, k, b in zip(*row, strict=True) if k != PADDING)
            for row in rows
        )


class _Operations(NamedTuple):
    """Operations of one kind on all devices. Each device runs its operations in ascending order of
    `slot`. All arrays can be broadcast to the shape (devices, operations).
    """

    kind: int
    slot: Array
    stage: Array
    micro_batch: Array

    def broadcast(self, num_devices: int) -> "_Operations":
        """Returns a copy whose arrays all have the shape (devices, operations)."""
        shape = (num_devices, np.size(self.micro_batch))
        return _Operations(
            self.kind,
            np.broadcast_to(self.slot, shape),
            np.broadcast_to(self.stage, shape),
            np.broadcast_to(self.micro_batch, shape),
        )


def _one_directional(schedule: str, p: int, m: int, v: int) -> list[_Operations]:
    """Returns the operations of a schedule in which each micro-batch goes from device 0 to device p
    - 1, once for each of its v stages per device. There are p devices and m micro-batches.

    Device r (from 0) first runs `warm_up` forward passes, then forward and backward passes in turn.
    A round is a group of about p micro-batches. In each round the device runs stage 0 for all
    micro-batches of the round, then stage 1, and so on. The index k counts its forward passes and
    its backward passes in this order. Each operation has a time slot, and a device runs its
    operations in the order of their slots. Forward pass k has slot k - warm_up, and backward pass k
    has slot k. In the zero-bubble schedule, device r computes weight gradients r slots later. This
    needs no more memory than 1F1B. Three consecutive values of `slot` make one time slot, one value
    for each kind of operation.
    """
    rank = np.arange(p)[:, None]
    k = np.arange(m * v)
    per_round = m // max(1, m // p)
    chunk = k // per_round % v
    micro_batch = k // (per_round * v) * per_round + k % per_round
    hops = p - 1 - rank
    warm_up = {
        "gpipe": m,
        "1f1b": hops,
        "zero_bubble": hops + (v - 1) * per_round,
        "interleaved": 2 * hops + (v - 1) * per_round if v > 1 else hops,
    }[schedule]
    backward_stage = (v - 1 - chunk) * p + rank
    forward_slot = 3 * (k - np.minimum(warm_up, m * v))
    forward = _Operations(FORWARD, forward_slot, chunk * p + rank, micro_batch)
    if schedule != "zero_bubble":
        return [forward, _Operations(BACKWARD, 3 * k + 1, backward_stage, micro_batch)]
    return [
        forward,
        _Operations(BACKWARD_INPUT, 3 * k + 1, backward_stage, micro_batch),
        _Operations(BACKWARD_WEIGHT, 3 * (k + rank) + 2, backward_stage, micro_batch),
    ]


def _v_shaped(p: int, m: int) -> list[_Operations]:
    """Returns the operations of schedule `zbv` for p devices and m micro-batches.

    Each device r has two stages: stage r and stage 2p - 1 - r. A micro-batch passes the devices
    from 0 to p - 1 and then back to 0. Device 0 therefore computes the loss and can start the
    backward pass at once. In the steady state, time slot s of device r has four operations, in this
    order:

    - the forward pass of micro-batch s + 2p - 1 - r in stage r,
    - the backward pass of micro-batch s in stage r,
    - the forward pass of micro-batch s + p in stage 2p - 1 - r,
    - the backward pass of micro-batch s + p - r in stage 2p - 1 - r.

    Each backward pass first computes the gradient of the input, then the weight gradients. Some
    operations have other slots at the start and the end of a step. Forward passes in stage r that
    would be before slot 0 are moved p - r slots earlier, to fill the pipeline. For n micro-batches,
    weight gradients from slot n - p on are delayed until no other device needs a result of this
    device.

    Source: arXiv 2401.10241, section 6, in the hand-written form of torch's ScheduleZBVZeroBubble.
    For fewer than 2p - 1 micro-batches, torch uses the schedule of 2p - 1 micro-batches and leaves
    out the operations of missing micro-batches.
    """
    rank = np.arange(p)[:, None]
    n = max(m, 2 * p - 1)
    k = np.arange(n)
    down = rank
    up = 2 * p - 1 - rank
    steady = n - p
    forward_down = k - (2 * p - 1 - rank)
    forward_down = np.where(
        forward_down < 0, 6 * (forward_down - (p - rank)) + 3.5, 6 * forward_down
    )
    slot = k - (p - rank)
    weight_up = np.where(slot < steady, slot, slot + p)
    weight_down = np.where(k < steady, k, np.where(k < steady + p - rank, k + rank, k + rank + p))
    rows = [
        (FORWARD, forward_down, down),
        (BACKWARD_INPUT, 6 * k + 1, down),
        (BACKWARD_WEIGHT, 6 * weight_down + 2, down),
        (FORWARD, 6 * (k - p) + 3, up),
        (BACKWARD_INPUT, 6 * slot + 4, up),
        (BACKWARD_WEIGHT, 6 * weight_up + 5, up),
    ]
    # The schedule has n micro-batches. Operations of micro-batches from m on are left out.
    return [
        _Operations(kind, np.broadcast_to(slots, (p, n))[:, :m], stage, k[:m])
        for kind, slots, stage in rows
    ]
