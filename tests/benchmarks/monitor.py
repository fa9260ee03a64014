"""The live dashboard on a run of a million steps, in a real JupyterLab, beside the same
dashboard made with plotly.
"""

import contextlib
import dataclasses
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cluster.job import JobSpec
from cluster.process import Process
from cluster.site import Site
from cluster.state import JobState, RunState
from kit.monitor.dashboard import Dashboard, View
from kit.plan import Plan
from kit.recipe import Recipe
from kit.run import Run
from kit.show.results import Row, row
from kit.spec import ModelSpec
from tests.browser import lab
from tests.browser.lab import Lab, Notebook

STEPS = 1_000_000
RATE_HZ, FOLLOWED_S, ZOOMS = 4.0, 15.0, 5
MEASURED: dict[str, tuple[str, float | None]] = {
    "first picture, a kernel that runs": ("s", None),
    "a new step on the screen, p50 at 4 Hz": ("s", 0.2),
    "kernel CPU at 4 Hz, of one core": ("fraction", 0.1),
    "zoom answered": ("s", 0.1),
    "sent to the browser": ("KB/s", None),
    "saved notebook": ("KB", 200),
    "its widget state, where that is saved too": ("KB", None),
}
"""Of each dashboard while the run goes on: the unit, and at most how much ours may be."""
Live = dict[str, tuple[float, str]]
"""The numbers of MEASURED, each with a note."""
LINE = (
    '{{"step": {0}, "attempt": 1, "time": {1:.3f}, "step_time_s": {2:.4f}, "tokens": 4096, "loss":'
    ' {3:.5f}, "grad_norm": {4:.4f}, "learning_rate": {5:.3e}, "memory_bytes": 6442450944}}\n'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contestant:
    """A dashboard: the cell that shows it, and how the page tells what it has drawn.

    Attributes:
        imports: what the cell needs; not timed.
        last: script that returns the last step drawn, null before there is any.
        detail: script that returns something which changes when the kernel's answer to a zoom is
            drawn.
        surface: selector of the area to drag over.
    """

    name: str
    imports: str
    cell: str
    last: str
    detail: str
    surface: str
    saved: str
    """What its notebook is saved with."""


KIT = Contestant(
    name="kit",
    imports="import matplotlib.figure\nfrom kit.monitor import Monitor",
    cell="view = Monitor(run)\nview",
    last="""() => { const label = document.querySelector('.kit-plot')?.getAttribute('aria-label');
      const m = label?.match(/at step ([\\d,]+)/); return m ? +m[1].replaceAll(',', '') : null; }""",  # noqa: E501
    detail="() => document.querySelector('.kit-monitor').dataset.draws",
    surface=".kit-monitor .u-over",
    saved="with its last picture",
)
PLOTLY = Contestant(
    name="plotly",
    imports=(
        "import plotly.graph_objects, plotly.subplots\n"
        "from tests.benchmarks.plotly_dashboard import PlotlyDashboard"
    ),
    cell="view = PlotlyDashboard(run)\nview.widget",
    last="() => document.querySelector('.js-plotly-plot')?._fullData?.[2]?.x?.at?.(-1) ?? null",
    detail="() => document.querySelector('.js-plotly-plot')._fullData[2].x[0]",
    surface=".js-plotly-plot .nsewdrag",
    saved="without a picture",
)
FIRST_PAINT = """async ([cell, steps, last]) => {
  const app = window.jupyterapp, notebook = app.shell.currentWidget.content;
  const drawn = eval(last), frame = () => new Promise(r => requestAnimationFrame(r)), start = performance.now();
  notebook.activeCellIndex = cell; notebook.deselectAll(); app.commands.execute('notebook:run-cell');
  while (drawn() == null) await frame(); await frame(); const first = performance.now();
  while (drawn() < steps) await frame(); await frame();
  return [(first - start) / 1000, (performance.now() - start) / 1000]; }"""  # noqa: E501
NOTE_DRAWS = """(last) => { const drawn = eval(last); window.seen = []; let before = drawn();
  const look = () => { const now = drawn(); if (now !== before) { before = now; window.seen.push([now, Date.now()]); }
    requestAnimationFrame(look); }; look(); }"""  # noqa: E501
NOTE_ZOOM = """(detail) => { const shown = eval(detail), before = shown(); let start = null; window.took = null;
  addEventListener('mouseup', () => { start = performance.now(); }, {capture: true, once: true});
  const look = () => { if (start !== null && shown() !== before) window.took = (performance.now() - start) / 1000;
    else requestAnimationFrame(look); }; look(); }"""  # noqa: E501
STATE_SIZE = (
    "import ipywidgets,"
    " json\nprint(len(json.dumps(ipywidgets.Widget.get_manager_state()['state'])))"
)


def measure(workplace: Path, steps: int = STEPS) -> list[Row]:
    """Returns the rows of both dashboards; without a browser those of the kernel's side, which then
    say so.

    Args:
        workplace: an empty folder with room for 300 MB.
        steps: length of the run.
    """
    run = _recorded_run(workplace / "run", steps)
    kernel = _kernel_side(run, steps)
    if missing := lab.why_not():
        return [kernel[0].replace(note=f"the rest was not measured: {missing}"), *kernel[1:]]
    from playwright.sync_api import sync_playwright

    files = workplace / "files"
    files.mkdir()
    root = str(Path(__file__).parents[2])  # where a kernel finds the other dashboard
    server = Lab(Path(sys.executable), workplace, files, PYTHONPATH=root)
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        driver = stack.enter_context(sync_playwright())
        browser = driver.chromium.launch(
            executable_path=lab.chromium(), args=["--no-sandbox", "--disable-gpu"]
        )
        stack.callback(browser.close)
        window = _Window(browser, server, run)
        page, first, whole = window.show(KIT)
        page.context.close()
        told = "from running the cell until it is drawn"
        rows = [
            *kernel,
            row("first picture", first, "s", note=told),
            row("whole history", whole, "s", at_most=3.0),
        ]
        found = {contestant.name: window.live(contestant) for contestant in (KIT, PLOTLY)}
    return [*rows, *_side_by_side(found["kit"], found["plotly"])]


class _Window:
    """Where both dashboards are shown, one after the other, each with a kernel of its own."""

    def __init__(self, browser: Any, server: Lab, run: Run) -> None:
        self.browser, self.server, self.run = browser, server, run
        self.step = int((run.directory / "steps").read_text())

    def show(self, contestant: Contestant) -> tuple[Any, float, float]:
        """Returns the page, and the seconds until something and until everything was drawn."""
        opened = (
            f"import kit\n{contestant.imports}\nrun = kit.Run.open({str(self.run.directory)!r})"
        )
        page: Any = Notebook(self.browser, self.server, [opened, contestant.cell, STATE_SIZE])
        page.open()
        page.run_cell(0)
        first, whole = page.evaluate(FIRST_PAINT, [1, self.step, contestant.last])
        return page, first, whole

    def live(self, contestant: Contestant) -> Live:
        """Returns what a dashboard costs and how quick it is while steps come in."""
        page, _, paint = self.show(contestant)
        page.page.wait_for_timeout(4000)  # what is done once
        page.evaluate(NOTE_DRAWS, contestant.last)
        kernel = _kernel_process(self.server)
        with _steps_coming(self.run, self.step) as stamps:
            page.page.wait_for_timeout(1000)
            start, used, received = time.monotonic(), sum(kernel.cpu_times()[:2]), page.received
            page.page.wait_for_timeout(1000 * FOLLOWED_S)
            elapsed = time.monotonic() - start
            used, received = sum(kernel.cpu_times()[:2]) - used, page.received - received
        self.step = max(stamps)
        page.page.wait_for_timeout(1500)
        latencies = _latencies(stamps, page.evaluate("() => window.seen"))
        zooms = [_zoom(page, contestant, 40 + 12 * i) for i in range(ZOOMS)]
        page.save()
        size = page.file.stat().st_size
        page.run_cell(2)
        state = int(page.output(2))
        page.context.close()
        return _live(
            contestant, paint, latencies, used / elapsed, zooms, received / elapsed, size, state
        )


def _kernel_process(server: Lab) -> Any:
    """Returns the newest kernel of a server, as a psutil process."""
    import psutil

    children = psutil.Process(server.process.pid).children(recursive=True)
    kernels = [each for each in children if "ipykernel" in " ".join(each.cmdline())]
    return max(kernels, key=lambda each: each.create_time())


def _live(
    contestant: Contestant,
    paint_s: float,
    latencies_s: list[float],
    kernel_cpu: float,
    zooms_s: list[float],
    bytes_per_s: float,
    notebook_bytes: int,
    state_bytes: int,
) -> Live:
    late = 1000 * latencies_s[int(0.95 * len(latencies_s))]
    ends = f"{1000 * min(zooms_s):,.0f} to {1000 * max(zooms_s):,.0f} ms"
    numbers = (
        (paint_s, ""),
        (statistics.median(latencies_s), f"p95 {late:,.0f} ms, {len(latencies_s)} steps"),
        (kernel_cpu, ""),
        (statistics.median(zooms_s), f"{ends}, {len(zooms_s)} zooms"),
        (bytes_per_s / 1e3, ""),
        (notebook_bytes / 1e3, contestant.saved),
        (state_bytes / 1e3, ""),
    )
    return dict(zip(MEASURED, numbers, strict=True))


@contextlib.contextmanager
def _steps_coming(run: Run, step: int) -> Iterator[dict[int, float]]:
    """Adds a step to a run now and then, as its job would; gives the time of each."""
    stamps: dict[int, float] = {}
    ended = threading.Event()

    def append() -> None:
        with (run.directory / "metrics.jsonl").open("a") as stream:
            while not ended.wait(1 / RATE_HZ):
                number = step + 1 + len(stamps)
                stream.write(_lines(number, number))
                stream.flush()
                stamps[number] = time.time()
                _say(run, number)

    thread = threading.Thread(target=append, daemon=True)
    thread.start()
    try:
        yield stamps
    finally:
        ended.set()
        thread.join()


def _side_by_side(kit: Live, plotly: Live) -> list[Row]:
    """Returns the rows of the live dashboards: ours with its target, the other, and their ratio."""
    rows = []
    for name, (unit, limit) in MEASURED.items():
        (ours, note), (theirs, other) = kit[name], plotly[name]
        rows.append(row(name, ours, unit, at_most=limit, note=note))
        told = f"{theirs / ours:.1f} x; {other}".strip("; ")
        rows.append(row(f"{name}: plotly", theirs, unit, note=told))
    return rows


def _kernel_side(run: Run, steps: int) -> list[Row]:
    """Returns what reading and picturing the run takes without any browser."""
    start = time.perf_counter()
    dashboard = Dashboard(run)
    while dashboard.read():
        pass
    description, window = dashboard.frame(View(width=900))
    seconds = time.perf_counter() - start
    assert description["rows"] == steps, f"{description['rows']:,} of {steps:,} steps were read"
    size = (run.directory / "metrics.jsonl").stat().st_size
    return [
        row(
            f"{steps:,} steps read and pictured",
            seconds,
            "s",
            note=f"{size / 1e6:,.0f} MB of JSON",
        ),
        row(
            "one window of numbers",
            len(window) / 1e3,
            "KB",
            note=f"{description['n']:,} pixels, whatever the length",
        ),
    ]


def _recorded_run(directory: Path, steps: int) -> Run:
    """Returns a run of that many recorded steps, whose job is this process, so that it counts as
    alive.
    """
    plan = Plan(global_batch_size=16)
    site = Site.load("laptop").with_measured_peak("fp32", 2e11, "assumed for this benchmark")
    recipe = Recipe(data="none", num_steps=2 * steps)
    run = Run.create(directory, spec=ModelSpec.preset("demo"), plan=plan, recipe=recipe, site=site)
    plan.write(run.directory / "plan.attempt_01.json")
    JobSpec(name="bench", run_dir=str(run.directory), argv=("true",), num_processes=1).write(
        directory / "job.json"
    )
    with (run.directory / "metrics.jsonl").open("w") as stream:
        for first in range(1, steps + 1, 50_000):
            stream.write(_lines(first, min(steps, first + 49_999)))
    (run.directory / "steps").write_text(str(steps))
    _say(run, steps)
    return run


def _lines(first: int, last: int) -> str:
    """Returns lines of `metrics.jsonl`: a falling, noisy loss with a spike now and then."""
    step = np.arange(first, last + 1)
    noise = np.random.default_rng(first).normal(size=(4, len(step)))
    seconds = 1 + 0.02 * abs(noise[0])
    loss = 1.9 + 9 * (1 + step / 200) ** -0.45 + 0.04 * noise[1] + 2 * (noise[2] > 3)
    columns = (
        step,
        1.7e9 + 1.02 * step,
        seconds,
        loss,
        0.35 + 0.1 * abs(noise[3]),
        1.5e-4 / (1 + step / 1e5),
    )
    return "".join(map(LINE.format, *(column.tolist() for column in columns)))


def _say(run: Run, step: int) -> None:
    RunState(
        state=JobState.RUNNING,
        attempt=1,
        step=step,
        heartbeat=time.time(),
        step_time_s=1.0,
        process=Process.current(),
    ).write(run.directory / "state.json")


def _latencies(stamps: dict[int, float], seen: list[list[float]]) -> list[float]:
    """Returns for each step the seconds from its line in the file to the first picture that
    holds it.
    """
    found = []
    for step, written in stamps.items():
        drawn = [when / 1000 - written for last, when in seen if last >= step]
        found += [min(drawn)] if drawn else []
    if missed := len(stamps) - len(found):
        raise RuntimeError(
            f"{missed} of {len(stamps)} steps were never drawn, so there is no latency to tell."
        )
    return sorted(found)


def _zoom(page: Any, contestant: Contestant, left: float) -> float:
    """Drags over a curve; returns the seconds until the kernel's detail is drawn."""
    page.evaluate(NOTE_ZOOM, contestant.detail)
    box = page.page.locator(contestant.surface).first.bounding_box()
    page.page.mouse.move(box["x"] + left, box["y"] + 40)
    page.page.mouse.down()
    page.page.mouse.move(box["x"] + box["width"] - 40, box["y"] + 44, steps=4)
    page.page.mouse.up()
    page.page.wait_for_function("() => window.took !== null")
    page.page.wait_for_timeout(500)
    return page.evaluate("() => window.took")
