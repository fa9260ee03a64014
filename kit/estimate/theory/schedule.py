"""Event-by-event simulation of one training step of a pipeline. Stages may need different times,
and sends between stages need time.
"""

import dataclasses
from functools import cached_property

import numpy as np

from cluster.record import ConfigError
from kit.config.plan import Plan
from kit.estimate.theory.orders import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    KINDS,
    PADDING,
    Array,
    Order,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
    """Result of a simulation: start and end of each forward and backward pass on each pipeline
    device.

    Arrays have the shape (devices, operations). Devices with fewer operations have NaN at the end
    of their row.
    """

    order: Order
    start_s: Array
    """Start of each operation, in seconds from the start of the step."""
    end_s: Array
    """End of each operation, in seconds from the start of the step."""

    @cached_property
    def makespan_s(self) -> float:
        """Seconds from the start of the step to the end of the last operation."""
        return float(np.nanmax(self.end_s))

    @cached_property
    def busy_s(self) -> Array:
        """Seconds of the step in which each device computes, shape (devices,)."""
        return np.nansum(self.end_s - self.start_s, axis=1)

    @property
    def idle_fraction(self) -> Array:
        """Share of the step in which each device waits, 0 to 1, shape (devices,)."""
        return 1 - self.busy_s / self.makespan_s

    @property
    def bubble_fraction(self) -> float:
        """Share of the step, 0 to 1, in which a device waits, as the mean over all devices. Waiting
        for sends and for slower stages is included.
        """
        return float(self.idle_fraction.mean())


def simulate(
    order: Order,
    *,
    forward_s: Array | float,
    backward_input_s: Array | float,
    backward_weight_s: Array | float,
    send_s: Array | float = 0.0,
) -> Simulation:
    """Returns start and end of each operation of a pipeline schedule. A device starts its next
    operation as soon as the device is free and the operation's input has arrived.

    Args:
        order: Operations of each device, in the order in which they run.
        forward_s, backward_input_s, backward_weight_s: Seconds of one micro-batch in each stage,
            shape (stages,), or one number for all stages. A backward pass that is not split needs
            the sum of backward_input_s and backward_weight_s.
        send_s: Seconds from the end of an operation to the arrival of its result in the
            neighbouring stage, shape (stages - 1,), or one number. If both stages are on one
            device, sends need no time. Links carry any number of messages at once, while devices
            compute.

    Raises:
        ConfigError: A time is negative or has another shape.
    """
    forward = _times("forward_s", forward_s, order.num_stages)
    backward_input = _times("backward_input_s", backward_input_s, order.num_stages)
    backward_weight = _times("backward_weight_s", backward_weight_s, order.num_stages)
    boundary = _times("send_s", send_s, order.num_stages - 1)
    duration_by_kind = np.stack(
        [forward, backward_input + backward_weight, backward_input, backward_weight]
    )
    needs, delay = _dependencies(order, boundary)
    return _run(order, duration_by_kind[order.kind, order.stage], needs, delay)


def simulate_plan(
    plan: Plan, *, num_microbatches: int | None = None, **times: Array | float
) -> Simulation:
    """Returns the simulation of the pipeline schedule of a plan. If `num_microbatches` is None, all
    micro-batches of a step are simulated. `times` are the keyword arguments of `simulate` in
    seconds.
    """
    count = num_microbatches or plan.num_microbatches
    schedule = plan.schedule if plan.pipeline_parallel > 1 else "1f1b"
    p = plan.pipeline_parallel
    v = plan.virtual_stages
    return simulate(
        Order.of(schedule, pipeline_parallel=p, num_microbatches=count, virtual_stages=v), **times
    )


def _times(name: str, value: Array | float, count: int) -> Array:
    array = np.asarray(value, dtype=float)
    if array.ndim and array.shape != (count,):
        raise ConfigError(
            f"{name}: shape {array.shape} is not allowed. Give one number, or {count}."
        )
    if not (np.isfinite(array) & (array >= 0)).all():
        raise ConfigError(f"{name}: {value!r} is not allowed. Give seconds from 0.")
    return np.broadcast_to(array, count)


def _dependencies(order: Order, boundary_s: Array) -> tuple[Array, Array]:
    """Returns (needs, delay), two arrays with one element per operation. `needs` is the flat index
    of the operation whose result the operation needs. `delay` is the seconds until this result
    arrives.

    For an operation that needs no result, the index is -1. It stands for an operation that ended at
    0 s. For padding the index is -2, which stands for an operation that never ends.
    """
    place = _places(order)
    kind = order.kind
    stage = order.stage
    micro_batch = order.micro_batch
    forward = np.concatenate([np.full((1, order.num_microbatches), -1), place[FORWARD]])
    backward = np.concatenate([place[BACKWARD], place[FORWARD][-1:]])
    needs = np.select(
        [kind == PADDING, kind == FORWARD, kind == BACKWARD_WEIGHT],
        [-2, forward[stage, micro_batch], place[BACKWARD][stage, micro_batch]],
        default=backward[stage + 1, micro_batch],
    )
    between = np.where(order.device_of_stage[1:] != order.device_of_stage[:-1], boundary_s, 0.0)
    between = np.concatenate([[0.0], between, [0.0]])
    delay = np.select(
        [kind == FORWARD, (kind == BACKWARD) | (kind == BACKWARD_INPUT)],
        [between[stage], between[stage + 1]],
        0.0,
    )
    return needs, delay


def _places(order: Order) -> Array:
    """Returns the flat index of each operation, shape (kinds, stages, micro-batches). If the
    operation does not exist, the index is -1.

    Operations of kind BACKWARD_INPUT are stored under kind BACKWARD. The previous stage can start
    its backward pass as soon as the gradient of the input is computed, before the gradients of the
    weights.
    """
    place = np.full((len(KINDS), order.num_stages, order.num_microbatches), -1)
    work = np.flatnonzero(order.kind != PADDING)
    kind, stage, micro_batch = (
        column.ravel()[work] for column in (order.kind, order.stage, order.micro_batch)
    )
    place[np.where(kind == BACKWARD_INPUT, BACKWARD, kind), stage, micro_batch] = work
    return place


def _run(order: Order, duration_s: Array, needs: Array, delay: Array) -> Simulation:
    """Returns the simulation with start and end of all operations.

    Each iteration of the loop visits all devices. The next operation of a device is simulated if
    the time at which its input arrives is known already.
    """
    devices, width = order.kind.shape
    end = np.full(devices * width + 2, np.inf)
    end[-1] = 0.0
    start = np.full(devices * width, np.nan)
    # One column of padding is added. A device that has finished all its operations stays at this
    # column, since the input of padding never arrives.
    padded = ((0, 0), (0, 1))
    needs = np.pad(needs, padded, constant_values=-2).ravel()
    delay = np.pad(delay, padded, constant_values=0.0).ravel()
    duration = duration_s.ravel()
    here = np.arange(devices) * (width + 1)
    column = np.arange(devices) * width
    free = np.zeros(devices)
    while True:
        arrival = end[needs[here]] + delay[here]
        ready = np.flatnonzero(arrival < np.inf)
        if not ready.size:
            break
        operation = column[ready]
        begin = np.maximum(free[ready], arrival[ready])
        start[operation] = begin
        free[ready] = end[operation] = begin + duration[operation]
        here[ready] += 1
        column[ready] += 1
    start = start.reshape(order.kind.shape)
    end = end[:-2].reshape(order.kind.shape)
    return Simulation(order=order, start_s=start, end_s=np.where(np.isinf(end), np.nan, end))
