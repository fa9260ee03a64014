"""Scale on one machine: planner and monitor at 100,000 devices, one rank of 16,384, and ten million
steps.

    python -m tests.benchmarks.scale CASE FOLDER SIZE   one case; prints seconds, and the process's
    memory at its peak

Each case runs in a process of its own, so that its memory is its own. Heartbeats and metrics are
files as a job leaves them; the ranks that would write them are not there.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cluster.heartbeats import RankHeartbeat, write_all_heartbeats
from cluster.job import JobSpec
from cluster.process import Process
from cluster.site import Site
from cluster.state import JobState, RunState
from kit.plan import Plan
from kit.recipe import Recipe
from kit.run import Run
from kit.show.results import Row, row
from kit.spec import ModelSpec
from tests.benchmarks.alone import alone

TAIL = (
    ', "step_time_s": 7.5031, "tokens": 25165824, "loss": 2.3512, "grad_norm": 0.41,'
    ' "learning_rate": 1e-4}\n'
)
SIZES = {
    "search": 98_304,
    "rank": 16_384,
    "heartbeats": 10_000,
    "monitor": 100_000,
    "metrics": 10_000_000,
}
"""Devices, ranks, ranks, ranks and steps."""

Work = Callable[[], object]


def measure(workplace: Path, sizes: dict[str, int] = SIZES) -> list[Row]:
    """Returns seconds and peak memory of each case.

    Args:
        workplace: an empty folder; ten million steps are 1.9 GB.
        sizes: of the cases.
    """
    found = {case: alone("scale", case, workplace / case, size) for case, size in sizes.items()}

    def seconds(case: str, name: str, at_most: float, note: str = "") -> Row:
        peak = f"{found[case]['peak_bytes'] / 1e9:.1f} GB at most in the process"
        return row(
            name, found[case]["seconds"], "s", at_most=at_most, note=f"{peak}{note and '; '}{note}"
        )

    devices, ranks, beats, watched, steps = (f"{sizes[case]:,}" for case in SIZES)
    most = {"monitor": 1.0, "metrics": 3.0}
    return [
        seconds(
            "search",
            f"plans of a trillion parameters on {devices} devices: search, five explained",
            2.0,
        ),
        seconds("rank", f"one rank of {ranks}: check of the plan, mesh, all its shards", 5.0),
        seconds("heartbeats", f"heartbeats of {beats} ranks, read once", 1.0),
        seconds(
            "monitor",
            f"monitor of {watched} ranks: one look, slow ranks, picture",
            10.0,
            "a look rests after it",
        ),
        seconds("metrics", f"metrics of {steps} steps, read with MFU", 60.0),
        *(
            row(f"peak memory, {case}", found[case]["peak_bytes"] / 1e9, "GB", at_most=limit)
            for case, limit in most.items()
        ),
    ]


def search(folder: Path, size: int) -> Work:
    """The planner on so many devices."""
    from kit.estimate.choose.explain import answers
    from kit.estimate.choose.search import search

    spec, site = ModelSpec.preset("gpt-1t"), Site.load("dgx-h100")
    return lambda: answers(search(spec, site, size, 12_288), 5)


def rank(folder: Path, size: int) -> Work:
    """The last of so many ranks: the real cutting code, for that rank alone."""
    from kit.parallel.simulate import view_rank

    spec = ModelSpec.preset("gpt-1t")
    plan = Plan(
        global_batch_size=size,
        tensor_parallel=8,
        pipeline_parallel=64,
        data_parallel=size // 512,
        zero_stage=1,
    )
    return lambda: view_rank(spec, plan, size - 1)


def heartbeats(folder: Path, size: int) -> Work:
    """The heartbeats of a run directory."""
    from cluster.heartbeats import read_rank_heartbeats

    _write_heartbeats(folder, size)
    return lambda: read_rank_heartbeats(folder, 1)


def monitor(folder: Path, size: int) -> Work:
    """What the dashboard does once a second, and its picture of the ranks."""
    from kit.monitor.dashboard import Dashboard, View
    from kit.monitor.ranks import SAMPLES, slowest_rank

    run = _run(folder, size)
    _write_heartbeats(folder, size)
    (folder / "metrics.jsonl").write_text("".join(_lines(1, 200)))
    dashboard = Dashboard(run)

    def look() -> None:
        dashboard.look()
        assert dashboard.ranks.samples, "no heartbeat was read"
        dashboard.ranks.samples = dashboard.ranks.samples[:1] * SAMPLES  # as after some hours
        dashboard.read()
        dashboard.frame(View())
        assert slowest_rank(dashboard.ranks.last(SAMPLES)) is not None
        dashboard.facts()
        dashboard.heat()

    return look


def metrics(folder: Path, size: int) -> Work:
    """The reader that figures, exports and `kit status` share."""
    run = _run(folder, 1024)
    with (folder / "metrics.jsonl").open("w") as stream:
        stream.writelines(_lines(1, size))

    def read() -> None:
        found = run.metrics()
        assert len(found) == size and found.summary()["step"] == size

    return read


CASES = {function.__name__: function for function in (search, rank, heartbeats, monitor, metrics)}


def _run(folder: Path, ranks: int) -> Run:
    """Returns a run of so many ranks whose job is this very process, so that it counts as alive."""
    plan = Plan(global_batch_size=ranks, data_parallel=ranks)
    recipe = Recipe(data="none", num_steps=10**8)
    run = Run.create(
        folder,
        spec=ModelSpec.preset("gpt-1.4b"),
        plan=plan,
        recipe=recipe,
        site=Site.load("dgx-h100"),
    )
    plan.write(folder / "plan.attempt_01.json")
    JobSpec(name="scale", run_dir=str(folder), argv=("none",), num_processes=ranks).write(
        folder / "job.json"
    )
    RunState(
        state=JobState.RUNNING,
        attempt=1,
        step=200,
        heartbeat=time.time(),
        process=Process.current(),
    ).write(folder / "state.json")
    return run


def _write_heartbeats(folder: Path, ranks: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    beats = (
        RankHeartbeat(
            rank=number,
            attempt=1,
            step=200,
            time=time.time(),
            step_time_s=7.5 + (number % 97) / 1000,
            host=f"node{number // 8:05d}",
        )
        for number in range(ranks)
    )
    write_all_heartbeats(folder, (beat.line for beat in beats))


def _lines(first: int, last: int):
    return (
        f'{{"step": {step}, "attempt": 1, "time": {1.7e9 + 7.5 * step:.1f}{TAIL}'
        for step in range(first, last + 1)
    )


if __name__ == "__main__":
    case, folder, size = sys.argv[1:]
    work = CASES[case](Path(folder), int(size))
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes}))
