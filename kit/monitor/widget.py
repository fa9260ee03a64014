"""Monitor: the live dashboard in a notebook. A cell whose last line is `Monitor(run)` shows it.

The dashboard only reads the run directory, so the job does not depend on the browser or the
notebook kernel. A new view shows the whole history, in any kernel and at any time. The kernel
stores the data. At each update it sends the numbers of the shown range to the browser. The browser
draws these numbers and sends the user's requests. anywidget must be installed for the kernel and
for JupyterLab.
"""

import contextvars
import math
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import anywidget
import traitlets

from kit.monitor.curves import PlotRange
from kit.monitor.dashboard import Dashboard
from kit.monitor.figure import snapshot
from kit.monitor.front_end import CHARTS, DASHBOARD_SCRIPT, DASHBOARD_STYLE
from kit.run import Run
from kit.run.columns import FAST_FROM_BYTES
from kit.show.theme import MUTED

POLL_S = 0.05
"""Seconds between two reads of new rows from metrics.jsonl."""
TICK_S = 0.2
"""Least time between two frames that are sent to the browser, in seconds. A frame has the numbers
of all charts."""
LOOK_S = 1.0
"""Seconds between two reads of the job's state, the heartbeats of ranks and the alerts."""
PICTURE_S = 60.0
"""Least time between two updates of the static picture for saved notebooks, in seconds."""
BEAT_S = 2.0
"""Seconds between two heartbeats that the kernel sends to the browser for a view. The front end
reports a silent kernel after several missing heartbeats."""
READING_LIMIT_S = 10.0
"""Longest time for which a thread waits until the whole history is read, in seconds."""
NO_MODEL = """<style>
.jp-OutputArea-child:has(> .jupyter-widgets):not(:has(> .jupyter-widgets *)):has(+ * .{name})
{{ display: none; }}
</style>"""
"""Style sheet that is saved with the static picture. Without a kernel, JupyterLab shows "Error
displaying widget: model not found" instead of the view, in the output just above the picture. The
style sheet hides an output there that contains no HTML elements, which is the case for this error.
A live view, or another error of a widget, contains elements and stays visible."""
_SHOWN = weakref.WeakSet["Monitor"]()
"""All views that notebook cells of this kernel have displayed."""


class CellActivity:
    """Tracks whether the kernel is running a cell. While a cell runs, messages of the front end to
    the kernel wait.

    The kernel status that the front end knows is not reliable. With subshells (ipykernel 7), this
    status becomes idle after each message that a subshell answers, even while a cell runs.
    """

    def __init__(self) -> None:
        self.is_running = False
        self._shell: Any = None

    def follow(self, shell: Any) -> None:
        """Registers for the begin and end of cells in an IPython shell. Does nothing if `shell` is
        None. The caller must be running in a cell.
        """
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
    """A live view of a run in a notebook: charts of loss, MFU and other quantities, state, alerts,
    ranks, log, and buttons that act on the job.

    The arguments are the arguments of `Dashboard`. In the browser, a slider changes the smoothing.
    """

    _esm = DASHBOARD_SCRIPT
    _css = DASHBOARD_STYLE

    charts = traitlets.List(CHARTS).tag(sync=True)
    metrics = traitlets.List().tag(sync=True)
    frame = traitlets.Dict().tag(sync=True)
    window = traitlets.Bytes(b"").tag(sync=True)
    facts = traitlets.Dict().tag(sync=True)
    alerts = traitlets.List().tag(sync=True)
    heat = traitlets.Bytes(b"").tag(sync=True)
    log = traitlets.Unicode("").tag(sync=True)
    settings = traitlets.Dict().tag(sync=True)
    notes = traitlets.Dict().tag(sync=True)

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
        """Number of the newest message that the front end has sent. The front end counts its
        messages."""
        self._shown_by: tuple[str | None, str | None] = (None, None)
        """(id of the notebook cell that has displayed this view, id of the request that executed
        the cell)."""
        self._picture: Any = None
        """IPython display handle of the static picture. None until the picture is displayed."""
        self._pictured = (0.0, self.dashboard.status.state)
        """(monotonic time in seconds, state of the job) when the static picture was last
        updated."""
        self._closed = threading.Event()
        self._caught_up = threading.Event()
        """Event that is set when the whole history of the run has been read."""
        self._lock = threading.RLock()
        self._looked_at = time.monotonic()
        """Monotonic time at which the state of the job was last read, in seconds."""
        self._sent_at = -math.inf
        """Monotonic time at which the last frame was sent to the browser, in seconds."""
        # Only the beginning of the history is parsed now. A thread reads the rest while the browser
        # builds the view.
        self._more = self.dashboard.read(FAST_FROM_BYTES)
        self.on_msg(self._on_message)
        self._send_frame()
        self._send_facts()
        CELLS.follow(_ipython_shell())
        for follow in (self._follow_metrics, self._follow_job, self._keep_beating):
            # With a copy of the context, messages of the thread seem to come from this cell.
            # ipykernel 7.4 handles the next message of the page in the shell from which the
            # kernel's last message seems to come. Without the copy, this could be a subshell that
            # JupyterLab has closed.
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(follow,),
                name=f"kit{follow.__name__}",
                daemon=True,
            ).start()

    def close(self) -> None:
        """Closes the view and ends its threads. The job continues."""
        self._closed.set()
        super().close()

    def figure(self) -> Any:
        """Returns a matplotlib figure with the loss and speed that the dashboard shows now, for
        saved and exported notebooks.
        """
        return snapshot(self.dashboard)

    def _follow_metrics(self) -> None:
        """Sends the numbers of new training steps to the browser until the view is closed."""
        # The file is read more often than frames are sent, so that the first step after a pause is
        # shown at once.
        while True:
            pause_s = 0 if self._more else POLL_S
            if self._closed.wait(pause_s):
                return
            if self._more or time.monotonic() - self._sent_at >= TICK_S:
                self._guarded(self._tick)

    def _tick(self) -> None:
        """Reads new training steps for at most LOOK_S seconds, and sends a frame if there
        are any.
        """
        start = time.monotonic()
        columns = self.dashboard.columns
        before = len(columns), columns.revision
        # This value stays if the read below raises an exception. The next read then comes after a
        # pause.
        self._more = False
        while (more := self.dashboard.read()) and time.monotonic() - start < LOOK_S:
            pass
        self._more = more
        if (len(columns), columns.revision) != before:
            self._send_frame()
        if not more:
            self._caught_up.set()

    def _follow_job(self) -> None:
        """Reads the state of the job and sends it to the browser, again and again until the view is
        closed.
        """
        # The curves are sent first. The state of the job was already read when the dashboard was
        # created.
        self._caught_up.wait(READING_LIMIT_S)
        while True:
            for work in (
                self.dashboard.update_status,
                self.dashboard.update_speed,
                self._send_facts,
                self._refresh_picture,
            ):
                self._guarded(work)
            self._looked_at = time.monotonic()
            if self._closed.wait(LOOK_S):
                return

    def _keep_beating(self) -> None:
        """Sends heartbeats to the browser until the view is closed.

        This thread reads no file and waits for no lock. So a file server or scheduler that hangs
        does not look like a dead kernel. After the end of the run no heartbeat is sent, so that a
        Jupyter server can shut down the idle kernel.
        """
        while not self._closed.wait(BEAT_S):
            if not self.dashboard.status.state.is_final:
                self._guarded(self._beat)

    def _beat(self) -> None:
        looked_s_ago = time.monotonic() - self._looked_at
        self.send({"type": "beat", "busy": CELLS.is_running, "looked_s_ago": looked_s_ago})

    @property
    def failure(self) -> str:
        """Traceback of the last exception in the view's own threads, if it still occurs. Empty if
        there is none.
        """
        return next(iter(self._failures.copy().values()), "")

    def _guarded(self, work: Callable[[], Any]) -> None:
        """Calls `work`. An exception is stored for the property `failure`, which the view shows.
        The threads of the view must survive all errors in a run directory.
        """
        try:
            work()
            self._failures.pop(work.__name__, None)
        except Exception:
            self._failures[work.__name__] = traceback.format_exc()

    def _send_frame(self) -> None:
        """Sends the numbers that the charts need for the shown range to the browser."""
        with self._lock:
            self._sent_at = time.monotonic()
            frame, window = self.dashboard.frame(self.view)
            with self.hold_sync():  # Both attributes are sent in one message.
                self.frame = {**frame, "heard": self._heard}
                self.window = window

    def _send_facts(self) -> None:
        """Sends the state of the job, the alerts, the step times of ranks and the log to the
        browser.
        """
        with self._lock, self.hold_sync():
            self.facts = {
                **self.dashboard.facts(),
                "failure": self.failure.strip().rsplit("\n", 1)[-1],
                "picture": self.model_id,
                "heard": self._heard,
            }
            self.metrics = self.dashboard.further_metrics()
            self.alerts = self.dashboard.alerts()
            self.heat = self.dashboard.step_time_heat_map()
            self.log = self.dashboard.log()
            self.settings = self.dashboard.settings
            self.notes = self.dashboard.notes()

    def _on_message(self, _: Any, message: Any, buffers: Any) -> None:
        """Handles a message from the browser. ipykernel chooses the thread in which it runs, so it
        must not take long.
        """
        kind = message["type"]
        dashboard = self.dashboard
        self._heard = message["number"]
        if kind == "view":
            self.view = PlotRange.from_message(message)
        elif kind == "charts":
            dashboard.show_charts(message["keys"])
        elif kind == "smoothing":
            dashboard.set_smoothing(message["value"])
        elif kind == "log":
            dashboard.select_log(int(message["rank"]), message["search"])
        elif kind == "notes":
            dashboard.write_notes(message["text"])
        elif kind == "action":
            dashboard.start_action(message["name"])
        if kind in ("view", "charts", "smoothing"):
            self._guarded(self._send_frame)
        else:
            self._guarded(self._send_facts)

    def _ipython_display_(self) -> None:
        """Displays the view and, below it, a static picture for readers without a kernel. A live
        view hides the picture.

        View and picture are two outputs of the cell. If they were one output, a trusted notebook
        without a kernel would show "model not found" instead of the picture.
        """
        from IPython.display import DisplayHandle, display

        self._replace_earlier()
        text = _status_text(self.facts)
        bundle = self._repr_mimebundle_()
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle or {}, {})
        display({**data, "text/plain": text}, metadata=metadata, raw=True)
        self._picture = DisplayHandle()
        # Only the picture needs the whole history. The view is displayed already.
        self._caught_up.wait(READING_LIMIT_S)
        self._picture.display(self._still(), raw=True)
        self._pictured = (time.monotonic(), self.dashboard.status.state)

    def _replace_earlier(self) -> None:
        """Closes the views that earlier executions of the present notebook cell have displayed."""
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
        """Replaces the static picture if it is older than PICTURE_S, so that a saved notebook has a
        recent picture. After the end of the run, the picture is replaced once.
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
        """Returns the static picture for readers without a kernel, by MIME type. A live view finds
        and hides it by the class of its HTML element.
        """
        facts = self.dashboard.facts()
        alt = "{name}: {state_word}, step {step} of {num_steps}, loss and speed".format(**facts)
        bundle = self.figure().to_bundle(alt=alt)
        # `make demo` runs notebooks and prints this text meanwhile.
        bundle["text/plain"] = _status_text(facts)
        name = f"kit-still-{self.model_id}"
        bundle["text/html"] = (
            f"<div class='{name}'>{NO_MODEL.format(name=name)}{bundle['text/html']}"
            f"<div style='{MUTED}'>Saved picture. Run this cell to see the live dashboard.</div>"
            "</div>"
        )
        return bundle


def _status_text(facts: Mapping[str, Any]) -> str:
    """Returns one line with the name, state and step of a run, for viewers that do not
    render HTML.
    """
    return "{name}: {state_word}, step {step} of {num_steps}".format(**facts)


def _ipython_shell() -> Any:
    """Returns the IPython shell of this process, or None outside IPython."""
    from IPython.core.getipython import get_ipython

    return get_ipython()
