"""on_alert: the user's command that `kit watch RUN` runs for each alert of the run.

The command is one line of sh in `~/.config/kit/config.toml` (or below XDG_CONFIG_HOME):

    on_alert = 'echo "$KIT_ALERT" | mail -s "$KIT_MESSAGE" me@example.com'

The environment variable KIT_MESSAGE contains the alert in one line, and KIT_ALERT contains the
whole alert as JSON. The text of an alert is never part of the command itself, since the run may
belong to another user, whose text could contain shell commands. To be alerted at any time, start
`nohup kit watch RUN >/dev/null &` on a login node.

Alerts are written by the trainer and by all views of a run. Only `kit watch` runs the command, for
the alerts of all these writers. So each alert is reported once, however many views are open.
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
"""Time limit of one call of the command, in seconds. The view waits for the end of the call."""
PERIOD_S = 60.0
"""Length of the period in which at most MAX_CALLS calls of the command are made, in seconds."""
MAX_CALLS = 10
"""Largest number of calls of the command in a period. The last of them reports all further alerts
together. Later alerts wait for the next period. The limit is needed since the alert file of another
user may contain thousands of alerts."""

FOUND_IN_ROWS = frozenset(
    rule.kind for rule in ALERT_RULES if rule.judges in ("new rows", "record")
)
"""Kinds of alerts that a view finds in recorded training steps. The time of such an alert is the
time of its step, which may be long ago."""
TAIL_BYTES = 16 << 10
"""Number of bytes at the end of metrics.jsonl in which the last recorded step is searched."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Record):
    """Content of config.toml, the settings of the user for all runs."""

    on_alert: str | None = field_doc(
        "shell command (one line of sh) that is run for each alert; default: none", default=None
    )


class AlertCommand:
    """Runs the user's command once for each alert of a run that occurs after this object was
    created.

    If the command fails, an alert of the kind `on_alert` is added to the log. The command is not
    run for alerts of this kind, which would repeat the failure.

    Raises:
        ConfigError: The file config.toml cannot be read.
    """

    def __init__(self, run: Run, log: AlertLog) -> None:
        self.run = run
        self.log = log
        self.command = on_alert_command()
        # Alerts and steps that are recorded already are old, so no command is run for them. Times
        # are hardly used to decide this, since the trainer's clock may differ from the clock of
        # this machine. They only exclude very old alerts, which a mirror of a remote run may copy
        # late.
        self.oldest = time.time() - MAX_SKEW_S
        self.known = set(log.read())
        self.newest_row = _newest_row(run)
        self.calls = list[float]()
        """Monotonic times, in seconds, of the calls of the command in the last PERIOD_S."""
        self.waiting = list[Alert]()
        """New alerts for which the command was not run yet, oldest first."""

    def run_for_new_alerts(self) -> None:
        """Runs the command for the new alerts in the log, at most MAX_CALLS times per PERIOD_S."""
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
        # The last call of a period reports all waiting alerts together.
        if len(self.calls) < MAX_CALLS:
            self.run_for_waiting_alerts()

    def run_for_waiting_alerts(self) -> None:
        """Runs the command once for all waiting alerts together. Its message is the message of the
        newest alert, preceded by the number of the other alerts.
        """
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
        """Runs the command for one alert. If the command fails, adds an alert of the kind
        `on_alert` to the log.
        """
        self.calls.append(time.monotonic())
        if why := _run_command(str(self.command), self.run, alert):
            failed = {"kind": "on_alert", "level": "warning", "message": f"on_alert: {why}"}
            self.log.add([Alert.from_dict({**alert.to_dict(), **failed, "time": time.time()})])


def _newest_row(run: Run) -> tuple[int, float]:
    """Returns (attempt, unix time) of the last recorded training step. The time comes from the
    clock of the trainer's machine. It is minus infinity if it is unknown.
    """
    lines = last_lines(run.directory / "metrics.jsonl", TAIL_BYTES)
    rows = [row for row in map(parse_row, lines) if row is not None]
    # Logs of other trainers may have no times.
    times = [(row["attempt"], row.get("time") or -math.inf) for row in rows]
    return max(times, default=(0, -math.inf))


def on_alert_command() -> str | None:
    """Returns the command that the user has set as `on_alert` in config.toml, or None if there is
    none.

    Raises:
        ConfigError: The file config.toml cannot be read.
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
    """Runs the command for one alert. Returns the reason of a failure in one line, or "" if the
    command succeeded.
    """
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
