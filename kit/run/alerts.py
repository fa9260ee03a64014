"""alerts.jsonl: the alerts of a run. Each event is written once, even if several views or the
trainer find it.
"""

import dataclasses
import json
from bisect import bisect_left, insort
from collections import defaultdict
from pathlib import Path
from typing import Literal

from cluster.files import append_lines
from cluster.ownership import Owned
from cluster.record import ConfigError, Record, field_doc
from kit.run.tail import Tail

SAME_WITHIN_S = 600.0
"""Seconds within which two alerts of one event are duplicates, for kinds that belong to no step."""
SAME_WITHIN_STEPS = {
    "guard": 0,
    "nan": 50,
    "spike": 50,
    "start": 50,
    "rise": 5000,
    "loss_scale": 5000,
}
"""Number of steps within which two alerts of one event are duplicates, by kind of alert."""
ONCE = ("job", "peak", "record")
"""Kinds of alerts of which an attempt gets only one for each cause, at any step and time. An
attempt fails once and a file is damaged once, however often and late somebody looks at the run."""

Level = Literal["warning", "error"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alert(Record):
    """One alert: a message for the user, with the attempt and step at which it happened."""

    kind: str = field_doc(
        "kind of the event: nan, spike, start, rise, loss_scale, peak, record, stall, mfu,"
        " straggler, memory, disk, checkpoint, job, guard (the trainer has reacted to a step),"
        " hook (the user's hook failed) or on_alert (the user's command failed)"
    )
    level: Level = field_doc("severity of the alert")
    message: str = field_doc("description of the event, with numbers")
    attempt: int = field_doc("number of the attempt of the run")
    step: int = field_doc("number of the optimizer step to look at")
    time: float = field_doc(
        "Unix time in seconds: the time of the step that caused the alert, or else the time at"
        " which the event was found"
    )

    @property
    def event(self) -> tuple[str, int, str, str]:
        """Key of the event: (kind, attempt, level, beginning of the message for kinds in ONCE).
        Two alerts with one event and nearby places are duplicates.
        """
        once = self.message.partition(":")[0] if self.kind in ONCE else ""
        return self.kind, self.attempt, self.level, once

    @property
    def place(self) -> tuple[float, float]:
        """(position of the alert, distance up to which another alert of the event is a duplicate).
        Both are steps for kinds in SAME_WITHIN_STEPS, and zero for kinds in ONCE. For other kinds
        they are seconds.
        """
        if self.kind in ONCE:
            return 0.0, 0.0
        if self.kind in SAME_WITHIN_STEPS:
            return self.step, SAME_WITHIN_STEPS[self.kind]
        return self.time, SAME_WITHIN_S


class AlertLog(Tail, Owned):
    """The alerts of a run in the order in which they were recorded.

    Several processes may write to the file. Duplicates of an alert are left out.

    Attributes:
        alerts: alerts that were read or added so far.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self.restart()
        self.read()

    @property
    def owned_folder(self) -> Path:
        return self.file.parent

    def read(self) -> list[Alert]:
        """Reads the alerts that were written since the last call, and returns all alerts."""
        while lines := self.new_lines():
            for line in lines.splitlines():
                try:
                    self._take(Alert.from_json(line.decode()))
                # The line is torn, or another version of the kit has written it.
                except (
                    ConfigError,
                    UnicodeDecodeError,
                    RecursionError,
                ):
                    continue
        return self.alerts

    def restart(self) -> None:
        super().restart()
        self.alerts: list[Alert] = []
        self._places: dict[tuple, list[float]] = defaultdict(list)

    def add(self, alerts: list[Alert], *, raises: bool = False) -> list[Alert]:
        """Writes the alerts that are new, and returns them. Alerts of another user's run are only
        kept in memory.

        An alert that cannot be written is kept in memory too. With `raises`, its OSError is raised.
        """
        self.read()
        new = [alert for alert in alerts if self._take(alert)]
        lines = "".join(json.dumps(alert.to_dict()) + "\n" for alert in new).encode()
        if new and self.is_writable:
            try:
                append_lines(self.file, lines)
            except OSError:
                if raises:
                    raise
        return new

    def _take(self, alert: Alert) -> bool:
        """Adds an alert to `alerts` unless it is a duplicate. Returns whether it was added."""
        place, within = alert.place
        known = self._places[alert.event]
        first = bisect_left(known, place - within)
        if first < len(known) and known[first] <= place + within:
            return False
        insort(known, place)
        self.alerts.append(alert)
        return True
