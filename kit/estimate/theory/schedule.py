"""Event-accurate simulation of one training step of a pipeline: unequal stages, and time on the
links.
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
    """When each operation of an order runs.

    Arrays have the order's shape, (devices, operations), NaN in padding.
    """

    order: Order
    start_s: Array
    end_s: Array

    @cached_property
    def makespan_s(self) -> float:
        """From the first start to the last end."""
        return float(np.nanmax(self.end_s))

    @cached_property
    def busy_s(self) -> Array:
        """Time that each device computes, shape (devices,)."""
        return np.nansum(self.end_s - self.start_s, axis=1)

    @property
    def idle_fraction(self) -> Array:
        """Share of the step in which each device waits, shape (devices,)."""
        return 1 - self.busy_s / self.makespan_s

    @property
    def bubble_fraction(self) -> float:
        """Share of the time of all devices in which they wait: bubble, links and unequal stages
        together.
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
    """Returns when each operation runs if every device starts it as soon as it is free and its
    input is there.

    Args:
        order: what each device does, in order.
        forward_s, backward_input_s, backward_weight_s: times of one micro-batch in each stage,
            shape (stages,), or one number for all; a whole backward takes both of its parts
            together.
        send_s: from the end of a stage to its neighbour's start where both are on different
            devices, shape (stages - 1,) or one number; the links carry any number of messages at
            once, beside computation.

    Raises:
        ConfigError: a time is negative or has another shape.
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
    """Returns the simulation of a plan's schedule, of all its micro-batches or of so many;
    `times` as in `simulate`.
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
    """Returns, of each operation, the flat index of the one whose result it needs, and the time
    from there to here.

    Index -1 is an operation that ended at 0 (nothing needed), -2 one that never ends (padding).
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
    """Returns the flat index of each operation, shape (kinds, stages, micro-batches), -1 where
    there is none.

    The whole backward and the backward for the input share a place, since what waits for either may
    go on.
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

    Each sweep starts the next operation of every device that can go on.
    """
    devices, width = order.kind.shape
    end = np.full(devices * width + 2, np.inf)
    end[-1] = 0.0
    start = np.full(devices * width, np.nan)
    # A device that has finished waits for ever in one more column of padding.
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
