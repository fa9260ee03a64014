"""The live dashboard on a run of a million steps in a real JupyterLab, compared with an equal
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
import psutil

from cluster.state import JobState
from kit.monitor.dashboard import Dashboard, PlotRange
from kit.run import Run
from kit.show.results import Row, row
from tests.bench.turns import median_row
from tests.support import lab
from tests.support.environments import ROOT
from tests.support.lab import Lab, Notebook
from tests.support.recorded_runs import recorded_run, say

STEPS = 1_000_000
RATE_HZ, FOLLOWED_S, ZOOMS = 4.0, 15.0, 5
NEW_STEP_DELAY = "median delay from a new step to its drawing"
KERNEL_MEMORY = "resident memory of the Jupyter kernel"
LINE = (
    '{{"step": {0}, "attempt": 1, "time": {1:.3f}, "step_time_s": {2:.4f}, "tokens": 4096, "loss":'
    ' {3:.5f}, "grad_norm": {4:.4f}, "learning_rate": {5:.3e}, "memory_bytes": 6442450944}}\n'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contestant:
    """A dashboard: the notebook cell that shows it, and scripts that read its drawing from the
    page.

    Attributes:
        imports: Imports of the cell, whose time is not measured.
        last: Script that returns the last step drawn, or null before the first drawing.
        detail: Script whose result changes as soon as the detailed data of a zoom are drawn.
        surface: CSS selector of the area over which the mouse is dragged.
        saved: Description of the picture in the saved notebook.
    """

    imports: str
    cell: str
    last: str
    detail: str
    surface: str
    saved: str


KIT = Contestant(
    imports="import matplotlib.figure\nfrom kit.monitor import Monitor",
    cell="view = Monitor(run)\nview",
    last="""() => { const label = document.querySelector('.kit-plot')?.getAttribute('aria-label');
      const m = label?.match(/at step ([\\d,]+)/); return m ? +m[1].replaceAll(',', '') : null; }""",  # noqa: E501
    detail="() => document.querySelector('.kit-monitor').dataset.draws",
    surface=".kit-monitor .u-over",
    saved="contains the last picture of the dashboard",
)
PLOTLY = Contestant(
    imports=(
        "import plotly.graph_objects, plotly.subplots\n"
        "from tests.bench.plotly_dashboard import PlotlyDashboard"
    ),
    cell="view = PlotlyDashboard(run)\nview.widget",
    last="() => document.querySelector('.js-plotly-plot')?._fullData?.[2]?.x?.at?.(-1) ?? null",
    detail="() => document.querySelector('.js-plotly-plot')._fullData[2].x[0]",
    surface=".js-plotly-plot .nsewdrag",
    saved="contains no picture",
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
    """Returns the rows of the kit's dashboard and of the plotly dashboard. If there is no browser,
    returns only the rows measured in the kernel, with the reason. The run takes 300 MB of disk.
    """
    run = recorded_run(workplace / "run", steps=0, planned=2 * steps)
    with (run.directory / "metrics.jsonl").open("w") as stream:
        for first in range(1, steps + 1, 50_000):
            stream.write(lines(first, min(steps, first + 49_999)))
    say(run, JobState.RUNNING, step=steps)
    kernel = _kernel_side(run, steps)
    if missing := lab.why_not():
        return [kernel[0].replace(note=f"the rest was not measured: {missing}"), *kernel[1:]]
    files = workplace / "files"
    files.mkdir()
    # The kernel imports the plotly dashboard from the repository root.
    server = Lab(Path(sys.executable), workplace, files, PYTHONPATH=str(ROOT))
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        browser = stack.enter_context(lab.headless())
        kit = _live(browser, server, run, steps, KIT)
        plotly = _live(browser, server, run, run.metrics().summary()["step"], PLOTLY)
    return [*kernel, *side_by_side(kit, plotly)]


def _live(browser: Any, server: Lab, run: Run, step: int, contestant: Contestant) -> list[Row]:
    """Returns rows with cost and latency of a dashboard while steps after `step` arrive. The
    dashboard has its own page and kernel.
    """
    opened = f"import kit\n{contestant.imports}\nrun = kit.Run.open({str(run.directory)!r})"
    notebook: Any = Notebook(browser, server, [opened, contestant.cell, STATE_SIZE])
    notebook.open()
    notebook.run_cell(0)
    first, whole = notebook.evaluate(FIRST_PAINT, [1, step, contestant.last])
    page = notebook.page
    page.wait_for_timeout(4000)  # work that is done only once at the start is not measured
    notebook.evaluate(NOTE_DRAWS, contestant.last)
    kernel = kernel_process(server)
    with steps_coming(run, step) as stamps:
        page.wait_for_timeout(1000)
        start, used, received = time.monotonic(), sum(kernel.cpu_times()[:2]), notebook.received
        page.wait_for_timeout(1000 * FOLLOWED_S)
        elapsed = time.monotonic() - start
        used, received = sum(kernel.cpu_times()[:2]) - used, notebook.received - received
    resident = kernel.memory_info().rss
    page.wait_for_timeout(1500)
    late = latencies(stamps, notebook.evaluate("() => window.seen"))
    p95 = f"95th percentile {1000 * late[int(0.95 * len(late))]:,.0f} ms, {len(late)} steps"
    zooms = [_zoom(notebook, contestant, 40 + 12 * i) for i in range(ZOOMS)]
    notebook.save()
    saved = notebook.file.stat().st_size
    notebook.run_cell(2)
    state = int(notebook.output(2))
    notebook.context.close()
    waited, fresh = statistics.median(late), "measured from running the cell"
    rate = f"{RATE_HZ:g} steps/s"
    used_share = f"CPU time of the Jupyter kernel at {rate}, as a share of one core"
    return [
        row("time to the first drawing", first, "s", at_most=0.5, note=fresh),
        row("time to the drawing of all steps", whole, "s", at_most=2.5, note=fresh),
        row(f"{NEW_STEP_DELAY} at {rate}", waited, "s", at_most=0.2, note=p95),
        row(used_share, used / elapsed, "fraction", at_most=0.08),
        row(KERNEL_MEMORY, resident / 1e6, "MB", at_most=400),
        median_row("delay from a zoom to its drawing", zooms, "s", at_most=0.1),
        row(f"data sent to the browser at {rate}", received / elapsed / 1e3, "KB/s"),
        row("size of the saved notebook", saved / 1e3, "KB", at_most=200, note=contestant.saved),
        row("size of the widget state, if the notebook saves it", state / 1e3, "KB"),
    ]


def side_by_side(kit: list[Row], plotly: list[Row]) -> list[Row]:
    """Returns the rows of both dashboards. The kit's rows have the target. Plotly's rows have their
    ratio to the kit in the note.
    """
    rows = []
    for ours, theirs in zip(kit, plotly, strict=True):
        times = f"{theirs.value / ours.value:.1f} times the kit's value"
        told = f"{times}; {theirs.note}".removesuffix("; ")
        rows += [ours, row(f"{ours.name}: plotly", theirs.value, ours.unit, note=told)]
    return rows


def kernel_process(server: Lab) -> psutil.Process:
    """Returns the process of the newest kernel of a JupyterLab server."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    kernels = [each for each in children if "ipykernel" in " ".join(each.cmdline())]
    return max(kernels, key=lambda each: each.create_time())


@contextlib.contextmanager
def steps_coming(run: Run, step: int) -> Iterator[dict[int, float]]:
    """Within the context, appends steps to a run at RATE_HZ steps per second, as its job would.
    Yields a dict from each step to its Unix time.
    """
    stamps: dict[int, float] = {}
    ended = threading.Event()

    def append() -> None:
        with (run.directory / "metrics.jsonl").open("a") as stream:
            while not ended.wait(1 / RATE_HZ):
                number = step + 1 + len(stamps)
                stream.write(lines(number, number))
                stream.flush()
                stamps[number] = time.time()
                say(run, JobState.RUNNING, step=number)

    thread = threading.Thread(target=append, daemon=True)
    thread.start()
    try:
        yield stamps
    finally:
        ended.set()
        thread.join()


def _kernel_side(run: Run, steps: int) -> list[Row]:
    """Returns rows with the time of reading and drawing the run in the kernel, measured without a
    browser.
    """
    start = time.perf_counter()
    dashboard = Dashboard(run)
    dashboard.read_all()
    description, window = dashboard.frame(PlotRange(width=900))
    seconds = time.perf_counter() - start
    assert description["rows"] == steps, f"{description['rows']:,} of {steps:,} steps were read"
    size = f"{(run.directory / 'metrics.jsonl').stat().st_size / 1e6:,.0f} MB of JSON"
    pixels = f"curves of {description['n']:,} pixels, for any number of steps"
    numbers = "size of the numbers that the browser gets for one view"
    return [
        row(f"time to read {steps:,} steps and compute their curves", seconds, "s", note=size),
        row(numbers, len(window) / 1e3, "KB", note=pixels),
    ]


def lines(first: int, last: int) -> str:
    """Returns lines of `metrics.jsonl` for the steps `first` to `last`: a falling, noisy loss with
    rare spikes.
    """
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


def latencies(stamps: dict[int, float], seen: list[list[float]]) -> list[float]:
    """Returns for each step the seconds from its line in the metrics file to the first drawing that
    includes it. `stamps` maps steps to write times.
    """
    found = []
    for step, written in stamps.items():
        drawn = [when / 1000 - written for last, when in seen if last >= step]
        if not drawn:
            raise RuntimeError(f"Step {step} was never drawn, so there is no latency to tell.")
        found.append(min(drawn))
    return sorted(found)


def _zoom(notebook: Any, contestant: Contestant, left: float) -> float:
    """Drags the mouse over a curve to zoom. Returns the seconds until the detailed data from the
    kernel are drawn.
    """
    notebook.evaluate(NOTE_ZOOM, contestant.detail)
    page = notebook.page
    box = page.locator(contestant.surface).first.bounding_box()
    page.mouse.move(box["x"] + left, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 40, box["y"] + 44, steps=4)
    page.mouse.up()
    page.wait_for_function("() => window.took !== null")
    page.wait_for_timeout(500)
    return notebook.evaluate("() => window.took")
