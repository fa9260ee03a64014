"""The pipeline simulator: closed formulas, bounds, operation orders of torch and of the kit's
engine, and the drawn timeline.
"""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.engines.native import NativeEngine
from kit.errors import ConfigError
from kit.estimate.theory.orders import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    KINDS,
    PADDING,
    Order,
)
from kit.estimate.theory.schedule import Simulation, simulate, simulate_plan
from kit.estimate.theory.timeline import timeline_figure
from tests.support.pictures import check_figure
from tests.support.workers import run_ranks

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")


def even(
    schedule: str, p: int, m: int, v: int = 1, *, f: float, b: float, w: float, send_s: float = 0
) -> Simulation:
    """Simulates devices with equal speeds. `f`, `b` and `w` are the seconds that one micro-batch
    takes in all `v` stages of a device: forward pass, backward pass for inputs, and backward pass
    for weights.
    """
    order = Order.of(schedule, pipeline_parallel=p, num_microbatches=m, virtual_stages=v)
    return simulate(
        order, forward_s=f / v, backward_input_s=b / v, backward_weight_s=w / v, send_s=send_s
    )


@pytest.mark.parametrize(
    ("p", "m"), [(1, 5), (2, 1), (4, 8), (8, 32), (7, 21), (16, 64), (64, 512)]
)
def test_makespan_equals_closed_forms(p, m):
    times: dict[str, Any] = {"f": 0.7, "b": 0.9, "w": 0.6}
    whole = sum(times.values())
    for schedule in ("gpipe", "1f1b"):
        plain = even(schedule, p, m, **times)
        assert plain.makespan_s == pytest.approx((m + p - 1) * whole, rel=1e-9)
        assert plain.bubble_fraction == pytest.approx((p - 1) / (m + p - 1), abs=1e-9)
    for v in (1, 2, 4) if m >= p else ():
        for schedule, exposed in (("interleaved", whole), ("zero_bubble", 0.7 + 0.9 - 0.6)):
            seconds = m * whole + (p - 1) * exposed / v
            assert even(schedule, p, m, v, **times).makespan_s == pytest.approx(seconds, rel=1e-9)
    if m >= 2 * p - 1:
        folded = even("zbv", p, m, 2, f=1, b=1, w=1)
        assert folded.makespan_s == pytest.approx(3 * m + (p - 1) / 2, rel=1e-9)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 32), (16, 64)])
def test_peak_micro_batches_in_flight_by_schedule(p, m):
    stages = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1, "zbv": 2}
    runs = {name: even(name, p, m, v, f=1, b=1, w=1) for name, v in stages.items()}
    held = {name: run.order.peak_in_flight for name, run in runs.items()}
    assert (held["gpipe"] == m).all()
    assert held["1f1b"].tolist() == list(range(p, 0, -1))
    assert held["interleaved"][0] == p + (p - 1) / 2
    assert (held["zero_bubble"] == p).all() and (held["zbv"] == p).all()
    assert runs["zbv"].bubble_fraction < runs["zero_bubble"].bubble_fraction


def test_slowest_stage_sets_makespan():
    p, m, send_s = 8, 64, 0.05
    forward, backward = np.ones(p), np.full(p, 2.0)
    forward[-1], backward[-1] = 1.3, 2.6
    order = Order.of("gpipe", pipeline_parallel=p, num_microbatches=m)
    half = {"backward_input_s": backward / 2, "backward_weight_s": backward / 2}
    simulation = simulate(order, forward_s=forward, **half, send_s=send_s)
    assert simulation.makespan_s == pytest.approx(m * 3.9 + (p - 1) * (3 + 2 * send_s), rel=1e-9)
    assert simulation.idle_fraction.argmin() == p - 1


@st.composite
def cases(draw):
    schedule = draw(st.sampled_from(SCHEDULES))
    p = draw(st.integers(1, 9))
    v = {"gpipe": 1, "1f1b": 1, "zbv": 2}.get(schedule) or draw(st.integers(1, 4))
    rounds, few = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    m = rounds * p if v > 1 and schedule != "zbv" and few > p else few
    order = Order.of(schedule, pipeline_parallel=p, num_microbatches=m, virtual_stages=v)
    seconds = st.floats(0.01, 10)
    times = {
        name: np.array(draw(st.lists(seconds, min_size=p * v, max_size=p * v)))
        for name in ("forward_s", "backward_input_s", "backward_weight_s")
    }
    send = np.array(draw(st.lists(st.floats(0, 3), min_size=p * v - 1, max_size=p * v - 1)))
    return order, times, send


@settings(max_examples=60, deadline=None)
@given(cases())
def test_simulation_respects_dependencies_and_bounds(case):
    order, times, send = case
    simulation = simulate(order, **times, send_s=send)  # this call raises an error on a deadlock
    work, eps = order.kind != PADDING, 1e-9
    assert (np.isfinite(simulation.end_s) == work).all()
    assert (simulation.start_s[:, 1:] >= simulation.end_s[:, :-1] - eps)[work[:, 1:]].all()

    columns = (order.kind, order.stage, order.micro_batch, simulation.start_s, simulation.end_s)
    rows = zip(*(column[work] for column in columns), strict=True)
    done = {(kind, stage, batch): (start, end) for kind, stage, batch, start, end in rows}
    hop = np.where(np.diff(order.device_of_stage) != 0, send, 0)
    back = BACKWARD_INPUT if (order.kind == BACKWARD_INPUT).any() else BACKWARD
    last = order.num_stages - 1
    for (kind, stage, micro_batch), (start, _) in done.items():
        if kind == FORWARD and stage > 0:
            assert start >= done[FORWARD, stage - 1, micro_batch][1] + hop[stage - 1] - eps
        elif kind == back:
            assert start >= done[FORWARD, stage, micro_batch][1] - eps
            if stage < last:
                assert start >= done[back, stage + 1, micro_batch][1] + hop[stage] - eps
        elif kind == BACKWARD_WEIGHT:
            assert start >= done[BACKWARD_INPUT, stage, micro_batch][1] - eps

    m, whole = order.num_microbatches, sum(times.values())
    busy = np.bincount(order.device_of_stage, weights=m * whole)
    one_micro_batch = times["forward_s"].sum() + times["backward_input_s"].sum() + 2 * hop.sum()
    assert simulation.makespan_s >= max(busy.max(), one_micro_batch) - eps
    # The step must not take longer than the sum of all work without any overlap.
    assert simulation.makespan_s <= m * (whole.sum() + 2 * hop.sum()) + eps
    np.testing.assert_allclose(simulation.busy_s, busy)


TORCH_SCHEDULES = {
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
}


@pytest.mark.parametrize("p, m", [(1, 4), (2, 2), (2, 6), (3, 2), (4, 4), (4, 16), (8, 24)])
@pytest.mark.parametrize(
    "name, stages",
    [("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1), ("zero_bubble", 2), ("zbv", 2)],
)
def test_orders_match_torch_schedules(name, stages, p, m):
    assert_order_is_torchs(name, stages, p, m)


def test_zbv_order_matches_torch_for_partial_rounds():
    assert_order_is_torchs("zbv", 2, p=4, m=7)


def assert_order_is_torchs(name, stages, p, m):
    rounds = max(1, m // p)
    schedule = SimpleNamespace(
        pp_group_size=p,
        n_local_stages=stages,
        num_stages=p * stages,
        _n_microbatches=m,
        number_of_rounds=rounds,
        microbatches_per_round=m // rounds,
    )
    operations = TORCH_SCHEDULES[name]._calculate_single_rank_operations
    ours = Order.of(name, pipeline_parallel=p, num_microbatches=m, virtual_stages=stages)
    theirs = order_of_actions([operations(schedule, rank) for rank in range(p)])
    assert str(ours) == str(theirs)
    times = {"forward_s": 1.0, "backward_input_s": 1.5, "backward_weight_s": 0.5}
    assert simulate(ours, **times).makespan_s == simulate(theirs, **times).makespan_s


def order_of_actions(actions) -> Order:
    """Returns the operation order of torch's `pipeline_order`. Idle slots and actions that compute
    nothing are left out.
    """
    rows = [
        [
            (KINDS.index(done.computation_type.value), done.stage_index, done.microbatch_index)
            for done in row
            if done is not None and done.computation_type.value in KINDS
        ]
        for row in actions
    ]
    table = np.full((3, len(rows), max(map(len, rows))), PADDING)
    for device, row in enumerate(rows):
        table[:, device, : len(row)] = np.array(row).T
    return Order(name="torch", kind=table[0].astype(np.int8), stage=table[1], micro_batch=table[2])


def _engine_order(spec, plan):
    """Trains one step with the native engine. Returns the operations that this rank executed, in
    torch's notation.
    """
    recipe, done = Recipe(data="none", num_steps=1), []
    engine = NativeEngine(spec, plan, recipe, torch.device("cpu"))
    for stage in getattr(engine.schedule, "_stages", None) or [engine.schedule._stage]:
        _record(stage, done)
    shape = plan.global_batch_size, spec.sequence_length + 1
    engine.train_step(torch.zeros(shape, dtype=torch.int64), 1e-3)
    return " ".join(done)


def _record(stage, done):
    """Patches a pipeline stage so that it appends the name of each operation to the list `done`
    before it runs the operation.
    """
    backward = stage.backward_one_chunk

    def recorded(letter, operation):
        def one_chunk(index, *args, **kwargs):
            done.append(f"{stage.stage_index}{letter}{index}")
            return operation(index, *args, **kwargs)

        return one_chunk

    def backward_one_chunk(index, *args, full_backward=True, **kwargs):
        operation = recorded("B" if full_backward else "I", backward)
        return operation(index, *args, full_backward=full_backward, **kwargs)

    stage.forward_one_chunk = recorded("F", stage.forward_one_chunk)
    stage.backward_one_chunk = backward_one_chunk
    stage.backward_weight_one_chunk = recorded("W", stage.backward_weight_one_chunk)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_simulated_order_matches_engine(schedule, llama_spec):
    stages = 1 if schedule in ("gpipe", "1f1b") else 2
    shape: dict[str, Any] = {"pipeline_parallel": 2, "virtual_stages": stages}
    plan = Plan(**shape, schedule=schedule, global_batch_size=4)
    simulation = simulate_plan(plan, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    assert "\n".join(run_ranks(2, _engine_order, llama_spec, plan)) == str(simulation.order)


@pytest.mark.parametrize(
    ("schedule", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 4), ("zbv", 2)]
)
def test_large_pipeline_simulation_is_fast_and_bounded(schedule, v):
    start = time.process_time()
    simulation = even(schedule, 64, 512, v, f=1, b=1, w=1)
    assert time.process_time() - start < 2  # takes 0.1 s on an idle machine
    assert 512 * 3 <= simulation.makespan_s <= (512 + 63) * 3


@pytest.mark.parametrize(
    "bad",
    [{"forward_s": -1.0}, {"send_s": np.ones(3)}, {"backward_input_s": float("nan")}],
    ids=str,
)
def test_simulation_refuses_impossible_times(bad):
    order = Order.of("1f1b", pipeline_parallel=2, num_microbatches=2)
    times = {"forward_s": 1.0, "backward_input_s": 1.0, "backward_weight_s": 1.0}
    with pytest.raises(ConfigError, match=next(iter(bad))):
        simulate(order, **{**times, **bad})


def test_timeline_shows_every_operation_and_table():
    kinds = (("1f1b", 1), ("zbv", 2))
    panels = [even(name, 4, 8, v, f=1, b=1, w=1, send_s=0.1) for name, v in kinds]
    figure, rows = timeline_figure(*panels)
    check_figure(figure)
    for axis, simulation in zip(figure.axes, panels, strict=True):
        boxes = [path for collection in axis.collections[1:] for path in collection.get_paths()]
        assert len(boxes) == (simulation.order.kind != PADDING).sum()
        right = max(path.vertices[:, 0].max() for path in boxes)
        assert right == pytest.approx(simulation.makespan_s)
        assert f"{100 * simulation.bubble_fraction:.1f} % idle" in axis.get_title(loc="left")
    assert [row["schedule"] for row in rows] == ["1f1b"] * 4 + ["zbv"] * 4
    assert rows[0]["busy_s"] == pytest.approx(24) and rows[0]["peak_in_flight"] == 4
