"""Scale on one machine: planner and monitor at 100,000 devices, one rank of 16,384, and ten million
steps.

Each case runs in its own process, which measures only its own peak memory. Heartbeats and metrics
are files with the content that a job would write. The ranks of the job are not running.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from cluster.heartbeats import RankHeartbeat, read_rank_heartbeats, write_all_heartbeats
from cluster.site import Site
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.estimate.choose.explain import answers
from kit.estimate.choose.search import search
from kit.monitor.dashboard import Dashboard, PlotRange
from kit.monitor.detectors import slowest_rank
from kit.monitor.ranks import SAMPLES
from kit.show.results import Row, row
from tests.bench.alone import alone
from tests.support.recorded_runs import recorded_run

TRILLION = ModelSpec.preset("gpt-1t")
LINE = (
    '{{"step": {step}, "attempt": 1, "time": {time:.1f}, "step_time_s": 7.5031, "tokens": 25165824,'
    ' "loss": 2.3512, "grad_norm": 0.41, "learning_rate": 1e-4}}\n'
)

Work = Callable[[], object]


def measure(workplace: Path, sizes: Mapping[str, int] | None = None) -> list[Row]:
    """Returns rows with seconds and peak memory of each case. `sizes` replaces the default sizes.
    Ten million steps take 1.9 GB of disk.
    """
    rows, peaks = [], []
    for name, case in CASES.items():
        size = (sizes or {}).get(name, case.size)
        seconds, peak_bytes, _ = alone(_seconds, case.prepare, workplace / name, size)
        gb = peak_bytes / 1e9
        note = f"peak memory of the process {gb:.1f} GB"
        rows.append(row(case.name.format(size), seconds, "s", at_most=case.most_s, note=note))
        if case.most_gb:
            peak = f"peak memory, {case.name.format(size)}"
            peaks.append(row(peak, gb, "GB", at_most=case.most_gb))
    return rows + peaks


def _seconds(prepare: Callable[[Path, int], Work], folder: Path, size: int) -> float:
    work = prepare(folder, size)
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def planner(folder: Path, size: int) -> Work:
    """Prepares a search of the planner for layouts on `size` devices. Returns the function to
    measure.
    """
    return lambda: answers(search(TRILLION, Site.load("dgx-h100"), size, 12_288), 5)


def rank(folder: Path, size: int) -> Work:
    """Prepares the start of the last of `size` ranks. It runs the real sharding code for this rank
    alone.
    """
    from kit.parallel.simulate import view_rank

    plan = Plan(
        global_batch_size=size,
        tensor_parallel=8,
        pipeline_parallel=64,
        data_parallel=size // 512,
        zero_stage=1,
    )
    return lambda: view_rank(TRILLION, plan, size - 1)


def heartbeats(folder: Path, size: int) -> Work:
    """Prepares reading the heartbeats of `size` ranks from a run directory."""
    write_heartbeats(folder, size)
    return lambda: read_rank_heartbeats(folder, 1)


def monitor(folder: Path, size: int) -> Work:
    """Prepares one update of the dashboard and its drawing of the ranks. An update is due every
    second.
    """
    dashboard = Dashboard(recorded_run(folder, steps=200, ranks=size))
    write_heartbeats(folder, size)

    def look() -> None:
        dashboard.update_status()
        ranks = dashboard.run_view.ranks
        assert ranks.samples, "no heartbeat was read"
        ranks.samples = ranks.samples[:1] * SAMPLES  # as many samples as after some hours
        dashboard.read()
        dashboard.frame(PlotRange())
        assert slowest_rank(ranks.newest_samples(SAMPLES)) is not None
        dashboard.facts()
        dashboard.step_time_heat_map()

    return look


def metrics(folder: Path, size: int) -> Work:
    """Prepares reading metrics of `size` steps with the reader that figures, exports and `kit
    status` share.
    """
    run = recorded_run(folder, steps=0, ranks=1024)
    with (folder / "metrics.jsonl").open("w") as stream:
        stream.writelines(_lines(size))

    def read() -> None:
        found = run.metrics()
        assert len(found) == size and found.summary()["step"] == size

    return read


class Case(NamedTuple):
    """Function that prepares the work, size of the work with its name, and limits in seconds and
    GB.
    """

    prepare: Callable[[Path, int], Work]
    size: int  # number of devices, ranks or steps
    name: str
    most_s: float
    most_gb: float | None = None


CASES = {
    "search": Case(
        planner,
        98_304,
        "search for layouts of a 1T model on {:,} devices, with explanation of the best five",
        2.0,
    ),
    "rank": Case(
        rank,
        16_384,
        "start of one rank of {:,}: check of the plan, device mesh, all shards of the rank",
        5.0,
    ),
    "heartbeats": Case(heartbeats, 10_000, "reading the heartbeats of {:,} ranks once", 1.0),
    "monitor": Case(
        monitor,
        100_000,
        "one update of a dashboard of {:,} ranks, with search for slow ranks and drawing",
        10.0,
        1.0,
    ),
    "metrics": Case(metrics, 10_000_000, "reading the metrics of {:,} steps, with MFU", 60.0, 3.0),
}


def write_heartbeats(folder: Path, ranks: int) -> None:
    """Writes the file with the heartbeats of all ranks at step 200. One rank in 97 is slow."""
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


def _lines(steps: int) -> Iterator[str]:
    for step in range(1, steps + 1):
        yield LINE.format(step=step, time=1.7e9 + 7.5 * step)
