"""The watcher: one process beside a run that looks for alerts where no browser does, and sends the user's alarm.

    python -m kit.monitor.watcher RUN   what `kit launch`, `resume` and `import --follow` start where an alarm is set
    kit alarm RUN                       the same in the foreground, for any run, on any machine that sees it

It runs where the job was submitted, in a session of its own: a job that fails, stalls or is lost with its node is told
of too, compute nodes need no way out, and neither training nor a view waits for it. It ends with the job.
"""

import contextlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.files import append_lines, read_small
from cluster.process import Process
from cluster.record import ConfigError, cut
from cluster.state import JobError, refuse_other_owner
from kit.errors import RunError
from kit.monitor.dashboard import Dashboard
from kit.run import Run
from kit.run.alarm import find_alarm, send
from kit.run.alerts import Alert

POLL_S = 10.0
EVERY_S = 600.0
"""Between two messages of one kind of alert about one run."""
RETRY_S, TRIES = 60.0, 10


class Watcher:
    """Sends the alerts of a run from now on, whoever found them: at most one message of a kind in EVERY_S.

    What was sent, or could not be, is in `alarms.jsonl`; a failure is an alert too (kind alarm), which is never sent.
    """

    def __init__(self, run: Run, alarm: str) -> None:
        self.run, self.alarm, self.since = run, alarm, time.time()
        self.dashboard, self.record = Dashboard(run), run.directory / "alarms.jsonl"
        self.seen: set[Alert] = set()
        self.waiting: dict[str, list[Alert]] = {}
        self.not_before, self.tries = _last_sent(self.record), dict[str, int]()

    def look(self) -> bool:
        """Looks once and sends what is due; returns whether there may be more to come."""
        while self.dashboard.read():
            pass
        self.dashboard.look()
        for alert in self.dashboard.watchman.log.read():
            if alert not in self.seen and alert.time >= self.since and alert.kind != "alarm":
                self.waiting.setdefault(alert.kind, []).append(alert)
            self.seen.add(alert)
        for kind in [kind for kind in self.waiting if self.not_before.get(kind, 0.0) <= time.time()]:
            self._send(kind)
        return self.run.directory.is_dir() and bool(self.waiting or not self.dashboard.status.state.is_final)

    def _send(self, kind: str) -> None:
        alerts = self.waiting[kind]
        why = send(self.alarm, message_of(self.run, alerts))
        self.tries[kind] = self.tries.get(kind, 0) + 1 if why else 0
        self.not_before[kind] = time.time() + (RETRY_S if why else EVERY_S)
        if not why or self.tries[kind] >= TRIES:
            del self.waiting[kind]
        entry = {"time": time.time(), "kind": kind, "alerts": len(alerts), "error": why}
        with contextlib.suppress(OSError):
            append_lines(self.record, f"{json.dumps(entry)}\n".encode())
        if why:
            last, told = alerts[-1], f"the alarm about {kind!r} could not be sent: {why}. Try it: `kit alarm --test`"
            failed = Alert(
                kind="alarm", level="warning", message=told, attempt=last.attempt, step=last.step, time=time.time()
            )
            self.dashboard.watchman.log.add([failed])


def message_of(run: Run, alerts: list[Alert]) -> dict[str, Any]:
    """Returns what is sent: the newest alert's fields, where the run is, and all in one line as `text`."""
    last, more = alerts[-1], f" (and {len(alerts) - 1} more)" if len(alerts) > 1 else ""
    text = cut(" ".join(f"{run.name}, step {last.step:,}: {last.message}{more}".split()), 1000)  # one line: a subject
    where = {"run": run.name, "directory": str(run.directory), "host": socket.gethostname()}
    return {"text": text, **where, **last.to_dict(), "alerts": len(alerts)}


def watch_over(run: Run, alarm: str, *, poll_s: float = POLL_S, idle: Callable[[float], None] = time.sleep) -> None:
    """Sends the alarm until the run's job ends, its directory goes, or another watcher has taken over.

    Raises:
        JobError: the run is somebody else's.
    """
    refuse_other_owner(run.directory, "have a watcher in it")
    note, me = run.directory / "monitor" / "watcher.json", Process.current()
    me.write(note)
    watcher, goes_on, failed = Watcher(run, alarm), True, ""
    while goes_on and _read(note) in (me, None):
        try:
            goes_on = watcher.look()
        except Exception as error:  # of one look: a directory that goes, a disk that does not answer
            if repr(error) != failed:  # said once, or the log of a watcher would grow for days
                traceback.print_exc()
            failed, goes_on = repr(error), run.directory.is_dir()
        if goes_on:
            idle(poll_s)


def _read(note: Path) -> Process | None:
    try:
        return Process.read(note)
    except (ConfigError, OSError):
        return None


def _last_sent(record: Path) -> dict[str, float]:
    """Returns by kind when the next message may be sent, as an earlier watcher has left it."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError):
        for line in read_small(record).decode(errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # torn
                entry = json.loads(line)
                found |= {} if entry["error"] else {entry["kind"]: min(entry["time"], time.time()) + EVERY_S}
    return found


def main() -> int:
    """Watches over the run named on the command line."""
    os.nice(10)
    try:
        alarm = find_alarm()
        if alarm:
            watch_over(Run.open(sys.argv[1]), alarm)
    except (ConfigError, RunError, JobError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
