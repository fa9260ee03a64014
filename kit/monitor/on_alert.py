"""on_alert: the user's own command, which `kit watch RUN` runs for each alert of the run.

One line in `~/.config/kit/config.toml` (or below XDG_CONFIG_HOME):

    on_alert = 'echo "$KIT_ALERT" | mail -s "$KIT_MESSAGE" me@example.com'

The command is a line of sh. KIT_MESSAGE holds the alert in one line, KIT_ALERT the whole alert as
JSON. No word of an alert is ever part of the command, since the run may belong to another user. To
be called at night, start on a login node `nohup kit watch RUN >/dev/null &`. The trainer and every
view of a run raise alerts. Only `kit watch` runs the command, for alerts of all of them, so that
each alert is reported once, however many views are open.
"""

import dataclasses
import json
import math
import os
import socket
import subprocess
import time
import tomllib

from cluster.heartbeats import MAX_SKEW_S
from cluster.record import ConfigError, Record, config_folder, counted, field_doc, shortened
from kit.monitor.alerts import ALERT_RULES
from kit.run import Run
from kit.run.alerts import Alert, AlertLog
from kit.run.columns import parse_row
from kit.run.tail import last_lines
from kit.show.terminal import plain

LIMIT_S = 10.0
"""Longest time of a call in seconds. The view waits for it."""
PERIOD_S = 60.0
"""Length in seconds of the period in which calls are counted."""
MAX_CALLS = 10
"""Largest number of calls in a period. Further alerts get one call together, at once or in the next
period: a file of another user may hold thousands."""

FOUND_IN_ROWS = frozenset(
    rule.kind for rule in ALERT_RULES if rule.judges in ("new rows", "record")
)
"""Kinds of alerts that a view finds in recorded steps, which may be old. Their time is that of the
step."""
TAIL_BYTES = 16 << 10
"""Bytes at the end of metrics.jsonl in which the last recorded step is looked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Record):
    """config.toml: what a user wants of every run."""

    on_alert: str | None = field_doc(
        "shell command (one line of sh) that is run for each alert; default: none", default=None
    )


class AlertCommand:
    """Runs the user's command for each alert of a run that comes from now on, once.

    A failure of the command is an alert too, for which the command is not run.

    Raises:
        ConfigError: config.toml cannot be read.
    """

    def __init__(self, run: Run, log: AlertLog) -> None:
        self.run = run
        self.log = log
        self.command = on_alert_command()
        # Alerts and steps that are recorded already are old. Times decide little, since the
        # trainer's clock may differ from the clock of this machine. They only exclude very old
        # alerts, which a mirror may copy late.
        self.oldest = time.time() - MAX_SKEW_S
        self.known = set(log.read())
        self.newest_row = _newest_row(run)
        self.calls = list[float]()
        """Monotonic times of the calls of the last period, in seconds."""
        self.waiting = list[Alert]()
        """New alerts that got no call of their own."""

    def run_for_new_alerts(self) -> None:
        """Runs the command for the alerts that are new in the log."""
        if self.command is None:
            return
        for alert in list(self.log.read()):
            if alert in self.known or alert.kind == "on_alert" or alert.time < self.oldest:
                continue
            if alert.kind in FOUND_IN_ROWS and (alert.attempt, alert.time) <= self.newest_row:
                continue
            self.known.add(alert)
            self.waiting.append(alert)
        if not self.waiting:
            return
        now = time.monotonic()
        self.calls = [call for call in self.calls if now - call < PERIOD_S]
        while self.waiting and len(self.calls) < MAX_CALLS - 1:
            self._run_for(self.waiting.pop(0))
        if len(self.calls) < MAX_CALLS:  # The last call of the period is for all others.
            self.run_for_waiting_alerts()

    def run_for_waiting_alerts(self) -> None:
        """Runs the command once for all alerts that still wait, with the message of the last."""
        if not self.waiting:
            return
        others = len(self.waiting) - 1
        last = self.waiting[-1]
        self.waiting.clear()
        message = last.message
        if others:
            message = f"{counted(others, 'more alert')}; the last one: {message}"
        self._run_for(last.replace(message=message))

    def _run_for(self, alert: Alert) -> None:
        """Runs the command for an alert. A failure of the command is an alert too."""
        self.calls.append(time.monotonic())
        if why := _run_command(str(self.command), self.run, alert):
            failed = {"kind": "on_alert", "level": "warning", "message": f"on_alert: {why}"}
            self.log.add([Alert.from_dict({**alert.to_dict(), **failed, "time": time.time()})])


def _newest_row(run: Run) -> tuple[int, float]:
    """Returns attempt and unix time, by the trainer's clock, of the last recorded step."""
    lines = last_lines(run.directory / "metrics.jsonl", TAIL_BYTES)
    rows = [row for row in map(parse_row, lines) if row is not None]
    # Logs of other trainers may have no times.
    times = [(row["attempt"], row.get("time") or -math.inf) for row in rows]
    return max(times, default=(0, -math.inf))


def on_alert_command() -> str | None:
    """Returns the user's command, None if there is none.

    Raises:
        ConfigError: config.toml cannot be read.
    """
    file = config_folder() / "config.toml"
    try:
        return Settings.from_dict(tomllib.loads(file.read_text()), path=str(file)).on_alert
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        message = f"{file}: cannot be read ({error}). Write one line: on_alert = 'COMMAND'"
        raise ConfigError(message) from error


def _run_command(command: str, run: Run, alert: Alert) -> str:
    """Runs the command for an alert. Returns how it failed in one line, empty if it succeeded."""
    text = " ".join(f"{run.name}, step {alert.step:,}: {alert.message}".split())
    where = {"run": run.name, "directory": str(run.directory), "host": socket.gethostname()}
    words = {
        "KIT_MESSAGE": plain(shortened(text, 1000)),
        "KIT_ALERT": json.dumps({**where, **alert.to_dict()}),
    }
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            env={**os.environ, **words},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"it had not ended after {LIMIT_S:g} s"
    except (OSError, ValueError) as error:
        return f"it could not be run ({error})"
    if done.returncode == 0:
        return ""
    output = " ".join((done.stderr or done.stdout).decode(errors="replace").split())
    return f"it ended with {done.returncode}: {shortened(output, 120)}"
