"""`kit status --why` names the slow part when the kernel throttles a network link or a core."""

import json
import time

import pytest

import kit
from cluster.site import Site
from kit.monitor.speed import PASSES, WAITS, SpeedComparison, compare_speed
from kit.run import Run
from tests.cluster.throttle import PLAN, SPEC, as_it_runs, slow_core, slow_links
from tests.support.waiting import eventually, processes

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]
NODES, STEPS = [f"node{number}" for number in range(1, 5)], 24
NORMAL, SLOW = 400, 80
"""Bandwidth of a node's link in megabits per second: in the reference run, and when throttled."""


@pytest.fixture
def train(sandbox, site: Site, tiny_dataset, tmp_path):
    """Returns a function that trains on two nodes with one rank each. The function returns the run,
    reduced to the steps around and after the start of the slowdown.
    """
    recipe = kit.Recipe(data=str(tiny_dataset.directory), num_steps=10_000, learning_rate=1e-3)
    own = site.replace(devices_per_node=1)

    def run(name: str, at: Site | None = None, slowness=None) -> Run:
        launched = kit.launch(tmp_path / name, spec=SPEC, plan=PLAN, recipe=recipe, site=at or own)

        def has(steps: int) -> bool:
            status = launched.job.status()
            assert not status.state.is_final, f"{status}\n{launched.job.logs()}"
            return (status.step or 0) >= steps

        assert eventually(lambda: time.sleep(0.5) or has(3), 180)
        with slowness(launched) if slowness else slow_links(sandbox, [], NORMAL):
            begun = launched.job.status().step or 0
            assert eventually(lambda: time.sleep(0.5) or has(begun + STEPS), 300)
            launched.job.cancel()
            assert eventually(lambda: launched.job.status().state.is_final, 60)
        return newest(launched)

    def newest(run: Run) -> Run:
        """Removes old steps from a run and returns the run. The last STEPS steps, which follow the
        start of the slowdown, and five steps before them are kept. `compare_speed` ignores the
        first five steps.
        """
        file = run.directory / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()][-STEPS - 5 :]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Run.open(run.directory)

    return run


def assert_named(
    found: dict[str, tuple[SpeedComparison, str]], normal: SpeedComparison, capsys
) -> None:
    told = {name: (part, pace.verdict) for name, (pace, part) in found.items()}
    with capsys.disabled():
        told_of = (f"{name}: {words}" for name, (_, words) in told.items())
        print(f"\nnormal: {normal.verdict}", *told_of, sep="\n")
    wrong = {
        name: told[name]
        for name, (part, words) in told.items()
        if part not in words or words[:6] != "slower"
    }
    assert not wrong


def test_throttled_core_is_named_in_the_verdict(train, capsys) -> None:
    """Throttled one after the other: the core of rank 1, for which rank 0 then waits, the core of
    rank 0, and both cores.
    """
    site, found = as_it_runs(train("normal")), {}
    normal = compare_speed(train("again", site))
    for ranks, part in (((1,), WAITS), ((0,), PASSES), ((0, 1), PASSES)):

        def slowness(run: Run, ranks: tuple[int, ...] = ranks):
            each = (processes(str(run.directory), f"RANK={rank}") for rank in ranks)
            return slow_core("core", [pid for pids in each for pid in pids], 0.2)

        name = f"rank {' and '.join(map(str, ranks))}"
        found[name] = compare_speed(train(name.replace(" ", "-"), site, slowness)), part
    assert_named(found, normal, capsys)


def test_throttled_link_is_named_in_the_verdict(train, sandbox, capsys) -> None:
    """In one run the links are slow from the start of the job. In another run the links become slow
    later.
    """
    with slow_links(sandbox, NODES, NORMAL):
        site = as_it_runs(train("normal"))
        normal = compare_speed(train("again", site))
    with slow_links(sandbox, NODES, SLOW):
        from_the_start = compare_speed(train("slow", site))
    later = compare_speed(train("late", site, lambda run: slow_links(sandbox, NODES, SLOW)))
    assert_named(
        {"from the start": (from_the_start, WAITS), "later": (later, WAITS)}, normal, capsys
    )
