"""A dashboard that stays open for an hour while new steps arrive. The cost of its last minute is
compared with the cost of its first minute.
"""

import contextlib
import dataclasses
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from cluster.state import JobState
from kit.show.results import Row, row
from tests.bench.monitor import (
    KERNEL_MEMORY,
    KIT,
    NEW_STEP_DELAY,
    NOTE_DRAWS,
    kernel_process,
    latencies,
    lines,
    steps_coming,
)
from tests.support import lab
from tests.support.environments import ROOT
from tests.support.lab import Lab, Notebook
from tests.support.recorded_runs import recorded_run, say

STEPS = 100_000
"""Steps of the run before the dashboard is opened. The hour adds a seventh of them."""
HOUR_S, MINUTE_S, SETTLED_S = 3600.0, 60.0, 30.0
NOTE_NO_DRAWS = "() => { window.seen = { push() {} }; }"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Minute:
    """Cost of the dashboard during one minute, in the kernel and in the browser page."""

    cpu_ms: float  # CPU time of the kernel per step
    late_ms: float  # median time from a step's line in the file to its drawing
    kernel_mb: float
    page_mb: float  # JavaScript heap after garbage collection


def measure(workplace: Path, seconds: float = HOUR_S, minute_s: float = MINUTE_S) -> list[Row]:
    """Returns rows with the cost of the last minute divided by the cost of the first minute. If
    there is no browser, returns one row with the reason.
    """
    if missing := lab.why_not():
        return [row("a widget open for an hour", 0, note=f"not measured: {missing}")]
    run = recorded_run(workplace / "run", steps=0, planned=2 * STEPS)
    (run.directory / "metrics.jsonl").write_text(lines(1, STEPS))
    say(run, JobState.RUNNING, step=STEPS)
    (files := workplace / "files").mkdir()
    server = Lab(Path(sys.executable), workplace, files, PYTHONPATH=str(ROOT))
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        browser = stack.enter_context(lab.headless())
        opened = f"import kit\n{KIT.imports}\nrun = kit.Run.open({str(run.directory)!r})"
        notebook: Any = Notebook(browser, server, [opened, KIT.cell])
        notebook.open()
        notebook.attach()
        kernel = kernel_process(server)
        stamps = stack.enter_context(steps_coming(run, STEPS))
        notebook.page.wait_for_timeout(1000 * min(SETTLED_S, seconds / 4))
        first = _minute(notebook, kernel, stamps, minute_s)
        while len(stamps) < 4 * (seconds - minute_s):
            notebook.page.wait_for_timeout(1000)
        last = _minute(notebook, kernel, stamps, minute_s)
    told = f"after {len(stamps):,} new steps"
    limits: dict[str, tuple[str, str, float]] = {
        "cpu_ms": ("CPU time of the Jupyter kernel per new step", "ms", 1.25),
        "late_ms": (NEW_STEP_DELAY, "ms", 1.25),
        "kernel_mb": (KERNEL_MEMORY, "MB", 1.1),
        "page_mb": ("memory of the browser page", "MB", 1.1),
    }
    return [
        row(
            f"{name}, last minute / first minute",
            getattr(last, field) / getattr(first, field),
            "x",
            at_most=most,
            note=(
                f"{getattr(first, field):.3g} {unit} in the first minute,"
                f" {getattr(last, field):.3g} {unit} in the last minute, {told}"
            ),
        )
        for field, (name, unit, most) in limits.items()
    ]


def _minute(
    notebook: Any, kernel: psutil.Process, stamps: dict[int, float], minute_s: float
) -> Minute:
    page, begun = notebook.page, time.time()
    notebook.evaluate(NOTE_DRAWS, KIT.last)
    used, before = sum(kernel.cpu_times()[:2]), len(stamps)
    page.wait_for_timeout(1000 * minute_s)
    used, steps, ended = sum(kernel.cpu_times()[:2]) - used, len(stamps) - before, time.time()
    page.wait_for_timeout(1500)
    shown = {step: when for step, when in dict(stamps).items() if begun < when < ended}
    late = statistics.median(latencies(shown, notebook.evaluate("() => window.seen")))
    notebook.evaluate(NOTE_NO_DRAWS)
    session = notebook.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    heap = session.send("Runtime.getHeapUsage")["usedSize"]
    session.detach()
    return Minute(
        cpu_ms=1000 * used / steps,
        late_ms=1000 * late,
        kernel_mb=kernel.memory_info().rss / 1e6,
        page_mb=heap / 1e6,
    )
