"""Orders of pipeline work: what each device of a pipeline does, one operation after the other,
in five schedules.
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
"""Letters of the kinds: forward, whole backward, backward for the input alone, backward for the
weights alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """What each device does, in order: arrays of shape (devices, operations), rows filled up
    with PADDING.
    """

    name: str
    kind: Array
    """FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, or PADDING behind a shorter row."""
    stage: Array
    micro_batch: Array

    @classmethod
    def of(
        cls,
        schedule: str,
        *,
        pipeline_parallel: int,
        num_microbatches: int,
        virtual_stages: int = 1,
    ) -> Self:
        """Returns the order of a schedule, by the names that a Plan uses.

        `gpipe` (arXiv 1811.06965), `1f1b` (PipeDream-Flush, arXiv 2006.09503), `interleaved`
        (Megatron, arXiv 2104.04473), `zero_bubble` (ZB-H1 of arXiv 2401.10241; with several virtual
        stages torch's ZB1P) or `zbv` (section 6 there: stages in the shape of a V, two on each
        device); a Plan has checked that it exists.
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
        """p."""
        return self.kind.shape[0]

    @cached_property
    def num_stages(self) -> int:
        """All stages, over all devices."""
        return int(self.stage.max()) + 1

    @cached_property
    def num_microbatches(self) -> int:
        """m."""
        return int(self.micro_batch.max()) + 1

    @cached_property
    def device_of_stage(self) -> Array:
        """The device that holds each stage, shape (stages,)."""
        device = np.full(self.num_stages, -1)
        work = self.kind != PADDING
        rows = np.broadcast_to(np.arange(self.num_devices)[:, None], self.kind.shape)
        device[self.stage[work]] = rows[work]
        return device

    @cached_property
    def peak_in_flight(self) -> Array:
        """The most micro-batches whose activations a device holds at once, shape (devices,).

        In micro-batches of a whole device: a stage of a device with v stages counts 1/v. Held from
        the start of the forward to the end of the whole backward, or of the backward for the
        weights where that is apart.
        """
        held = np.cumsum(
            (self.kind == FORWARD).astype(int) - np.isin(self.kind, (BACKWARD, BACKWARD_WEIGHT)),
            axis=1,
        )
        return held.max(axis=1) / np.bincount(self.device_of_stage, minlength=self.num_devices)

    def __str__(self) -> str:
        """One line for each device, torch's notation: stage, kind, micro-batch."""
        rows = zip(self.stage, self.kind, self.micro_batch, strict=True)
        return "\n".join(
            " ".join(f"{s}{KINDS[k]}{b}" for s, k, b in zip(*row, strict=True) if k != PADDING)
            for row in rows
        )


class _Operations(NamedTuple):
    """Operations of one kind on all devices, with the time slots that order them on a device.

    Arrays broadcast to (devices, operations).
    """

    kind: int
    slot: Array
    stage: Array
    micro_batch: Array

    def broadcast(self, num_devices: int) -> "_Operations":
        """Returns the operations with arrays of the full shape."""
        shape = (num_devices, np.size(self.micro_batch))
        return _Operations(
            self.kind,
            np.broadcast_to(self.slot, shape),
            np.broadcast_to(self.stage, shape),
            np.broadcast_to(self.micro_batch, shape),
        )


def _one_directional(schedule: str, p: int, m: int, v: int) -> list[_Operations]:
    """Returns the operations of a schedule that sends a micro-batch round the devices in one
    direction.

    Device r runs `warm_up` forwards, then forward and backward in turn; the k-th forward and the
    k-th backward go through its v stages in rounds of micro-batches. Each operation gets the
    slot in which its device would run it, and the order of a device is the order of its slots:
    forward k in slot k - warm_up, backward k in slot k, the backward for the weights (zero bubble
    only) r slots later, which holds memory at 1F1B's level.
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
    """Returns the operations of the V-shaped order: device r holds stages r and 2p - 1 - r, so
    that loss and backward start at once.

    Slot s of the steady state runs, in this order: the forward of the down-going stage (micro-batch
    s + 2p - 1 - r), its backward (s), the forward of the up-going stage (s + p) and its backward (s
    + p - r), each backward followed by its part for the weights. Before slot 0 and behind slot n -
    p, at the ends, some are put off: forwards fill the way down p - r slots ahead; backwards for
    the weights wait until no other device needs this one.

    Source: arXiv 2401.10241, section 6, in the hand-written form of torch's ScheduleZBVZeroBubble,
    which also says what is done below 2p - 1 micro-batches: the order of 2p - 1 with what is not
    there left out.
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
    # Operations of micro-batches beyond m are left out.
    return [
        _Operations(kind, np.broadcast_to(slots, (p, n))[:, :m], stage, k[:m])
        for kind, slots, stage in rows
    ]
