"""The pipeline simulator: closed forms, invariants for any times, torch's own orders, the
engine's, and the picture.
"""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from kit.plan import Plan
from kit.recipe import Recipe
from tests.pictures import check_figure
from tests.workers import run_ranks

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")


def even(
    schedule: str, p: int, m: int, v: int = 1, *, f: float, b: float, w: float, send_s: float = 0
) -> Simulation:
    """Equal devices with times f, b, w for one micro-batch through all of a device's v stages."""
    order = Order.of(schedule, pipeline_parallel=p, num_microbatches=m, virtual_stages=v)
    return simulate(
        order, forward_s=f / v, backward_input_s=b / v, backward_weight_s=w / v, send_s=send_s
    )


@pytest.mark.parametrize(
    ("p", "m"), [(1, 5), (2, 1), (4, 8), (8, 32), (7, 21), (16, 64), (64, 512)]
)
def test_makespan_equals_the_closed_forms(p, m):
    f, b, w = 0.7, 0.9, 0.6
    for schedule in ("gpipe", "1f1b"):
        assert even(schedule, p, m, f=f, b=b, w=w).makespan_s == pytest.approx(
            (m + p - 1) * (f + b + w), rel=1e-9
        )
        assert even(schedule, p, m, f=f, b=b, w=w).bubble_fraction == pytest.approx(
            (p - 1) / (m + p - 1), abs=1e-9
        )
    if m >= p:
        for v in (1, 2, 4):
            whole = m * (f + b + w)
            interleaved, split = (
                even(name, p, m, v, f=f, b=b, w=w) for name in ("interleaved", "zero_bubble")
            )
            assert interleaved.makespan_s == pytest.approx(
                whole + (p - 1) * (f + b + w) / v, rel=1e-9
            )
            assert split.makespan_s == pytest.approx(whole + (p - 1) * (f + b - w) / v, rel=1e-9)
    if m >= 2 * p - 1:
        assert even("zbv", p, m, 2, f=1, b=1, w=1).makespan_s == pytest.approx(
            3 * m + (p - 1) / 2, rel=1e-9
        )


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 32), (16, 64)])
def test_memory_of_the_schedules(p, m):
    held = {
        name: even(name, p, m, v, f=1, b=1, w=1).order.peak_in_flight
        for name, v in (
            ("gpipe", 1),
            ("1f1b", 1),
            ("interleaved", 2),
            ("zero_bubble", 1),
            ("zbv", 2),
        )
    }
    assert (held["gpipe"] == m).all()
    assert held["1f1b"].tolist() == list(range(p, 0, -1))
    assert held["interleaved"][0] == p + (p - 1) / 2
    assert (held["zero_bubble"] == p).all() and (held["zbv"] == p).all()
    assert (
        even("zbv", p, m, 2, f=1, b=1, w=1).bubble_fraction
        < even("zero_bubble", p, m, f=1, b=1, w=1).bubble_fraction
    )


def test_one_slow_stage_sets_the_pace():
    p, m, send_s = 8, 64, 0.05
    forward, backward = np.ones(p), np.full(p, 2.0)
    forward[-1], backward[-1] = 1.3, 2.6
    order = Order.of("gpipe", pipeline_parallel=p, num_microbatches=m)
    simulation = simulate(
        order,
        forward_s=forward,
        backward_input_s=backward / 2,
        backward_weight_s=backward / 2,
        send_s=send_s,
    )
    assert simulation.makespan_s == pytest.approx(m * 3.9 + (p - 1) * (3 + 2 * send_s), rel=1e-9)
    assert simulation.idle_fraction.argmin() == p - 1


@st.composite
def cases(draw):
    schedule = draw(st.sampled_from(SCHEDULES))
    p = draw(st.integers(1, 9))
    v = {
        "zbv": 2,
        "interleaved": draw(st.integers(1, 4)),
        "zero_bubble": draw(st.integers(1, 4)),
    }.get(schedule, 1)
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
def test_any_pipeline_respects_devices_dependencies_and_bounds(case):
    order, times, send = case
    simulation = simulate(order, **times, send_s=send)  # not a deadlock
    work, eps = order.kind != PADDING, 1e-9
    assert (np.isfinite(simulation.end_s) == work).all()
    assert (simulation.start_s[:, 1:] >= simulation.end_s[:, :-1] - eps)[work[:, 1:]].all()

    done = {
        (k, s, b): (start, end)
        for k, s, b, start, end in zip(
            *(
                a[work]
                for a in (
                    order.kind,
                    order.stage,
                    order.micro_batch,
                    simulation.start_s,
                    simulation.end_s,
                )
            ),
            strict=True,
        )
    }
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
    busiest = np.bincount(order.device_of_stage, weights=m * whole).max()
    one_micro_batch = times["forward_s"].sum() + times["backward_input_s"].sum() + 2 * hop.sum()
    assert simulation.makespan_s >= max(busiest, one_micro_batch) - eps
    # No worse than one after the other.
    assert simulation.makespan_s <= m * (whole.sum() + 2 * hop.sum()) + eps
    np.testing.assert_allclose(
        simulation.busy_s, np.bincount(order.device_of_stage, weights=m * whole)
    )


def test_same_orders_as_torch():
    from torch.distributed.pipelining import schedules as torch_schedules

    kinds = {
        "interleaved": torch_schedules.ScheduleInterleaved1F1B,
        "zbv": torch_schedules.ScheduleZBVZeroBubble,
        "zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    }
    for name, stages in (
        ("interleaved", 2),
        ("interleaved", 3),
        ("zero_bubble", 1),
        ("zero_bubble", 2),
        ("zbv", 2),
    ):
        for p, m in ((1, 4), (2, 2), (2, 6), (3, 2), (4, 4), (4, 7), (4, 16), (8, 24)):
            rounds = max(1, m // p)
            if name != "zbv" and m % rounds:
                continue
            schedule = SimpleNamespace(
                pp_group_size=p,
                n_local_stages=stages,
                num_stages=p * stages,
                _n_microbatches=m,
                number_of_rounds=rounds,
                microbatches_per_round=m // rounds,
            )
            actions = {
                rank: kinds[name]._calculate_single_rank_operations(schedule, rank)
                for rank in range(p)
            }
            ours = Order.of(name, pipeline_parallel=p, num_microbatches=m, virtual_stages=stages)
            theirs = order_of_actions(actions)
            assert str(ours) == str(theirs), (name, p, m)
            times = {"forward_s": 1.0, "backward_input_s": 1.5, "backward_weight_s": 0.5}
            assert simulate(ours, **times).makespan_s == simulate(theirs, **times).makespan_s


def order_of_actions(actions) -> Order:
    """The order in torch's `pipeline_order`, without idle slots and what is not computation."""
    rows = [
        [
            (
                KINDS.index(action.computation_type.value),
                action.stage_index,
                action.microbatch_index,
            )
            for action in actions[rank]
            if action is not None and action.computation_type.value in KINDS
        ]
        for rank in sorted(actions)
    ]
    table = np.full((3, len(rows), max(map(len, rows))), PADDING)
    for device, row in enumerate(rows):
        table[:, device, : len(row)] = np.array(row).T
    return Order(name="torch", kind=table[0].astype(np.int8), stage=table[1], micro_batch=table[2])


def _engine_order(spec, plan):
    """Trains one step with the kit's engine and returns what this rank did, in torch's notation."""
    import torch

    from kit.engines.native import NativeEngine

    recipe, done = Recipe(data="none", num_steps=1), []
    engine = NativeEngine(spec, plan, recipe, torch.device("cpu"))
    for stage in getattr(engine.schedule, "_stages", None) or [engine.schedule._stage]:
        _record(stage, done)
    engine.train_step(
        torch.zeros(plan.global_batch_size, spec.sequence_length + 1, dtype=torch.int64), 1e-3
    )
    return " ".join(done)


def _record(stage, done):
    forward, backward, weight = (
        stage.forward_one_chunk,
        stage.backward_one_chunk,
        stage.backward_weight_one_chunk,
    )

    def forward_one_chunk(index, *args, **kwargs):
        done.append(f"{stage.stage_index}F{index}")
        return forward(index, *args, **kwargs)

    def backward_one_chunk(index, *args, full_backward=True, **kwargs):
        done.append(f"{stage.stage_index}{'B' if full_backward else 'I'}{index}")
        return backward(index, *args, full_backward=full_backward, **kwargs)

    def backward_weight_one_chunk(index, *args, **kwargs):
        done.append(f"{stage.stage_index}W{index}")
        return weight(index, *args, **kwargs)

    stage.forward_one_chunk, stage.backward_one_chunk = forward_one_chunk, backward_one_chunk
    stage.backward_weight_one_chunk = backward_weight_one_chunk


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_same_order_as_the_engine_runs(schedule, llama_spec):
    plan = Plan(
        pipeline_parallel=2,
        schedule=schedule,
        global_batch_size=4,
        virtual_stages=1 if schedule in ("gpipe", "1f1b") else 2,
    )
    simulation = simulate_plan(plan, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    assert "\n".join(run_ranks(2, _engine_order, llama_spec, plan)) == str(simulation.order)


@pytest.mark.parametrize(
    ("schedule", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 4), ("zbv", 2)]
)
def test_large_pipeline_in_a_fifth_of_a_second(schedule, v):
    seconds = []
    for _ in range(3):
        start = time.process_time()
        even(schedule, 64, 512, v, f=1, b=1, w=1)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.2


def test_refuses_impossible_times():
    order = Order.of("1f1b", pipeline_parallel=2, num_microbatches=2)
    times = {"forward_s": 1.0, "backward_input_s": 1.0, "backward_weight_s": 1.0}
    for bad, says in (
        ({"forward_s": -1.0}, "forward_s"),
        ({"send_s": np.ones(3)}, "send_s"),
        ({"backward_input_s": float("nan")}, "backward_input_s"),
    ):
        with pytest.raises(ConfigError, match=says):
            simulate(order, **{**times, **bad})


def test_timeline_shows_every_operation_and_its_table():
    panels = [
        even(name, 4, 8, v, f=1, b=1, w=1, send_s=0.1) for name, v in (("1f1b", 1), ("zbv", 2))
    ]
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
