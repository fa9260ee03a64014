"""Monitor: the live dashboard in a notebook, shown by `Monitor(run)` as the last line of a cell.

The dashboard only reads the run directory, so the job does not depend on browser and kernel. A new
view, in any kernel and at any time, shows the whole history. The kernel keeps the data and sends
one window of numbers per tick. The browser draws the window and sends requests. anywidget must be
installed where the kernel runs and where JupyterLab runs.
"""

import contextvars
import math
import re
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from kit.monitor.curves import SERIES, UNSMOOTHED, PlotRange
from kit.monitor.dashboard import Dashboard
from kit.monitor.figure import snapshot
from kit.monitor.quantities import QUANTITIES
from kit.run import Run
from kit.run.columns import FAST_FROM_BYTES
from kit.show.theme import MUTED

POLL_S = 0.05
"""Seconds between two reads of the metrics."""
TICK_S = 0.2
"""Least seconds between two frames that are sent to the browser."""
LOOK_S = 1.0
"""Seconds between two looks at state, ranks and alerts."""
PICTURE_S = 60.0
"""Least seconds between two saved pictures."""
BEAT_S = 2.0
"""Seconds between two heartbeats of a view. The front end reports a silent kernel after several
that are missing."""
READING_LIMIT_S = 10.0
"""Longest time in seconds to wait for the whole history to be read."""
STATIC = Path(__file__).parent / "static"
# uPlot, the chart library (MIT), comes first: the others use it.
SCRIPTS = ("vendor/uPlot.iife.min.js", "numbers.js", "dashboard.js")
ROOT = ".kit-monitor"
"""Selector of the dashboard's root element. The dashboard's style sheet applies inside it only."""
NO_MODEL = """<style>
.jp-OutputArea-child:has(> .jupyter-widgets):not(:has(> .jupyter-widgets *)):has(+ * .{name})
{{ display: none; }}
</style>"""
"""Style sheet of a saved picture. Without a kernel, JupyterLab shows "Error displaying widget:
model not found" instead of the view, in the output just above the picture. The style hides that
output. A view, and any other error of a widget, contains elements and stays."""
CHARTS = [
    {"key": name, "title": QUANTITIES[name].title, "smoothed": name not in UNSMOOTHED}
    for name in SERIES
]
"""Charts of the dashboard in their order, for its front end."""
_SHOWN = weakref.WeakSet["Monitor"]()
"""Views that cells have shown."""


def scoped(css: str, root: str) -> str:
    """Returns a style sheet with each rule limited to elements inside `root`. The given style sheet
    must have no nested rules.
    """

    def in_root(rule: re.Match[str]) -> str:
        selectors = rule["selectors"].split(",")
        return ", ".join(f"{root} {selector.strip()}" for selector in selectors) + rule["body"]

    return re.sub(r"(?P<selectors>[^{}]+)(?P<body>\{[^{}]*\})", in_root, css)


class CellActivity:
    """Whether the kernel runs a cell: messages of the front end wait until that cell ends.

    The kernel status that a front end shows does not tell: with subshells (ipykernel 7) it turns
    idle after each message that is answered beside the cell.
    """

    def __init__(self) -> None:
        self.is_running = False
        self._shell: Any = None

    def follow(self, shell: Any) -> None:
        """Follows the cells of an IPython shell, if there is one. It is called by a cell."""
        if shell is None or shell is self._shell:
            return
        self._shell = shell
        self.is_running = True
        shell.events.register("pre_execute", self._begin)
        shell.events.register("post_execute", self._end)

    def _begin(self) -> None:
        self.is_running = True

    def _end(self) -> None:
        self.is_running = False


CELLS = CellActivity()


class Monitor(anywidget.AnyWidget):
    """A live view of a run: loss, MFU and the rest, state, alerts, ranks, log, and buttons that act
    on the job.

    Run, baselines and smoothing are as in `Dashboard`; the slider changes the smoothing.
    """

    _esm = ";\n".join((STATIC / name).read_text() for name in SCRIPTS)
    _css = (
        scoped((STATIC / "vendor/uPlot.min.css").read_text(), ROOT)
        + (STATIC / "dashboard.css").read_text()
    )

    charts = traitlets.List(CHARTS).tag(sync=True)
    frame = traitlets.Dict().tag(sync=True)
    window = traitlets.Bytes(b"").tag(sync=True)
    facts = traitlets.Dict().tag(sync=True)
    alerts = traitlets.List().tag(sync=True)
    heat = traitlets.Bytes(b"").tag(sync=True)
    log = traitlets.Unicode("").tag(sync=True)

    def __init__(
        self,
        run: Run,
        *,
        baselines: Mapping[str, Run | float] | None = None,
        smoothing: float = 0.9,
    ) -> None:
        self.dashboard = Dashboard(run, baselines=baselines, smoothing=smoothing)
        super().__init__()
        self.view = PlotRange()
        self._failures: dict[str, str] = {}
        self._heard = 0.0
        """Number of the newest message of the front end."""
        self._shown_by: tuple[str | None, str | None] = (None, None)
        """(id of the cell, id of its execution request) that have shown this view."""
        self._picture: Any = None
        """Display handle of the saved picture, None before it is displayed."""
        self._pictured = (0.0, self.dashboard.status.state)
        """(monotonic time, state of the job) of the last picture."""
        self._closed = threading.Event()
        self._caught_up = threading.Event()
        """Set once the whole history has been read."""
        self._lock = threading.RLock()
        self._looked_at = time.monotonic()
        self._sent_at = -math.inf
        """Monotonic time of the last frame, in seconds."""
        # How a history begins is parsed at once; the rest is read behind the view, while the
        # browser builds it.
        self._more = self.dashboard.read(FAST_FROM_BYTES)
        self.on_msg(self._on_message)
        self._send_frame()
        self._send_facts()
        CELLS.follow(_ipython_shell())
        for follow in (self._follow_metrics, self._follow_job, self._keep_beating):
            # On behalf of this cell, not of what the kernel was told last: ipykernel 7.4 has the
            # page's next words handled there, by a subshell that JupyterLab may have closed.
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(follow,),
                name=f"kit{follow.__name__}",
                daemon=True,
            ).start()

    def close(self) -> None:
        """Ends the view and its threads. The job goes on."""
        self._closed.set()
        super().close()

    def figure(self) -> Any:
        """Returns what the dashboard shows now as a matplotlib figure, for saved and exported
        notebooks.
        """
        return snapshot(self.dashboard)

    def _follow_metrics(self) -> None:
        """Sends new steps to the browser until the view is closed."""
        # The file is read more often than frames are sent, so that a step after a pause is shown
        # at once.
        while True:
            pause_s = 0 if self._more else POLL_S
            if self._closed.wait(pause_s):
                return
            if self._more or time.monotonic() - self._sent_at >= TICK_S:
                self._guarded(self._tick)

    def _tick(self) -> None:
        """Reads new steps for LOOK_S at most, and sends a frame if there are any."""
        start = time.monotonic()
        columns = self.dashboard.columns
        before = len(columns), columns.revision
        self._more = False  # also after a failure, which must not be repeated without a pause
        while (more := self.dashboard.read()) and time.monotonic() - start < LOOK_S:
            pass
        self._more = more
        if (len(columns), columns.revision) != before:
            self._send_frame()
        if not more:
            self._caught_up.set()

    def _follow_job(self) -> None:
        """Looks at the job and sends its facts until the view is closed."""
        self._caught_up.wait(READING_LIMIT_S)  # the curves come first; the state is known by then
        while True:
            for work in (
                self.dashboard.look,
                self.dashboard.refresh_speed,
                self._send_facts,
                self._refresh_picture,
            ):
                self._guarded(work)
            self._looked_at = time.monotonic()
            if self._closed.wait(LOOK_S):
                return

    def _keep_beating(self) -> None:
        """Sends a heartbeat until the view is closed.

        The thread reads no file and waits for no lock: a file server or scheduler that hangs does
        not look like a dead kernel. The view of a run that has ended needs no heartbeat, and
        without one a server can still cull an idle kernel.
        """
        while not self._closed.wait(BEAT_S):
            if not self.dashboard.status.state.is_final:
                self._guarded(self._beat)

    def _beat(self) -> None:
        looked_s_ago = time.monotonic() - self._looked_at
        self.send({"type": "beat", "busy": CELLS.is_running, "looked_s_ago": looked_s_ago})

    @property
    def failure(self) -> str:
        """Traceback of the present failure of the view itself. Empty if there is none."""
        return next(iter(self._failures.copy().values()), "")

    def _guarded(self, work: Callable[[], Any]) -> None:
        """Does some work. An exception is kept for `failure`, which the view shows, since the
        threads of the view must survive all errors of a run directory.
        """
        try:
            work()
            self._failures.pop(work.__name__, None)
        except Exception:
            self._failures[work.__name__] = traceback.format_exc()

    def _send_frame(self) -> None:
        """Sends the numbers of the charts to the browser."""
        with self._lock:
            self._sent_at = time.monotonic()
            frame, window = self.dashboard.frame(self.view)
            with self.hold_sync():  # one message
                self.frame = {**frame, "heard": self._heard}
                self.window = window

    def _send_facts(self) -> None:
        """Sends state, alerts, step times of ranks and the log to the browser."""
        with self._lock, self.hold_sync():
            self.facts = {
                **self.dashboard.facts(),
                "failure": self.failure.strip().rsplit("\n", 1)[-1],
                "picture": self.model_id,
                "heard": self._heard,
            }
            self.alerts = self.dashboard.alerts()
            self.heat = self.dashboard.heat()
            self.log = self.dashboard.log()

    def _on_message(self, _: Any, message: Any, buffers: Any) -> None:
        """Answers a message of the browser. The thread is chosen by the kernel, so this must not
        take long.
        """
        kind = message["type"]
        dashboard = self.dashboard
        self._heard = message["number"]
        if kind == "view":
            self.view = PlotRange.from_message(message)
        elif kind == "smoothing":
            dashboard.set_smoothing(message["value"])
        elif kind == "log":
            dashboard.select_log(int(message["rank"]), message["search"])
        elif kind == "action":
            dashboard.start_action(message["name"])
        if kind in ("view", "smoothing"):
            self._guarded(self._send_frame)
        else:
            self._guarded(self._send_facts)

    def _ipython_display_(self) -> None:
        """Shows the view, and below it a picture for readers without a kernel. A live view hides
        the picture.

        View and picture are two outputs. In one output, a trusted notebook would show "model not
        found" instead of the picture.
        """
        from IPython.display import DisplayHandle, display

        self._replace_earlier()
        text = _status_text(self.facts)
        bundle = self._repr_mimebundle_()
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle or {}, {})
        display({**data, "text/plain": text}, metadata=metadata, raw=True)
        self._picture = DisplayHandle()
        # The view is displayed by now. Only the picture needs the whole history.
        self._caught_up.wait(READING_LIMIT_S)
        self._picture.display(self._still(), raw=True)
        self._pictured = (time.monotonic(), self.dashboard.status.state)

    def _replace_earlier(self) -> None:
        """Ends the views that earlier runs of this cell have shown, and their threads."""
        parent = getattr(_ipython_shell(), "get_parent", dict)()
        cell = parent.get("metadata", {}).get("cellId")
        self._shown_by = cell, parent.get("header", {}).get("msg_id")
        _SHOWN.add(self)
        if not cell:
            return
        for earlier in list(_SHOWN):
            if earlier._shown_by[0] == cell and earlier._shown_by != self._shown_by:
                earlier.close()

    def _refresh_picture(self) -> None:
        """Replaces a picture that is older than PICTURE_S, so that a notebook that is saved later
        shows the present. After the end of the run, replaces it once.
        """
        if self._picture is None:
            return
        when, state = self._pictured
        now = self.dashboard.status.state
        is_old = time.monotonic() - when > PICTURE_S
        if now.is_final:
            is_old = now is not state
        if is_old:
            self._pictured = (time.monotonic(), now)
            self._picture.update(self._still(), raw=True)

    def _still(self) -> dict[str, str]:
        """Returns the picture for readers without a kernel. A live view hides it by the class of
        its element.
        """
        facts = self.dashboard.facts()
        alt = "{name}: {state}, step {step}, loss and speed".format(**facts)
        bundle = self.figure().to_bundle(alt=alt)
        # `make demo` prints this text while the notebook runs.
        bundle["text/plain"] = _status_text(facts)
        name = f"kit-still-{self.model_id}"
        bundle["text/html"] = (
            f"<div class='{name}'>{NO_MODEL.format(name=name)}{bundle['text/html']}"
            f"<div style='{MUTED}'>Saved picture. Run this cell to see the live dashboard.</div>"
            "</div>"
        )
        return bundle


def _status_text(facts: Mapping[str, Any]) -> str:
    """Returns the state and the step of a run in one line, for pages that show no HTML."""
    return "{name}: {state}, step {step} of {num_steps}".format(**facts)


def _ipython_shell() -> Any:
    """Returns the IPython shell of this process, None where there is none."""
    from IPython.core.getipython import get_ipython

    return get_ipython()
