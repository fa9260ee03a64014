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
"""Seconds within which a second alert of the same event is a duplicate. Used for kinds of alerts
that do not refer to a step."""
SAME_WITHIN_STEPS = {
    "guard": 0,
    "nan": 50,
    "spike": 50,
    "start": 50,
    "rise": 5000,
    "loss_scale": 5000,
}
"""Number of steps within which a second alert of the same event is a duplicate, by kind of
alert."""
ONCE = ("job", "peak", "record")
"""Kinds of alerts that are recorded once per attempt and cause, at any step and time. An attempt
fails once and a file is damaged once, but these events are found again each time a user looks at
the run."""

Level = Literal["warning", "error"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alert(Record):
    """One alert: a message for the user, with the attempt and the step at which the event
    happened.
    """

    kind: str = field_doc(
        "kind of the event: nan, spike, start, rise, loss_scale, peak, record, stall, mfu,"
        " straggler, memory, disk, checkpoint, job, guard (the trainer has reacted to a step),"
        " hook (the user's hook failed) or on_alert (the user's command failed)"
    )
    level: Level = field_doc("severity of the alert")
    message: str = field_doc("description of the event for the user, with numbers")
    attempt: int = field_doc("number of the attempt of the run in which the event happened")
    step: int = field_doc("number of the optimizer step to which the alert refers")
    time: float = field_doc(
        "Unix time in seconds: the time of the step that caused the alert, or of the end of the"
        " job that failed, or else the time at which the event was found"
    )

    @property
    def event(self) -> tuple[str, int, str, str]:
        """Key of the event, by which duplicates are found: (kind, attempt, level, start of the
        message). The start of the message is empty for kinds that are not in ONCE. Two alerts are
        duplicates if their keys are equal and their places are near.
        """
        once = self.message.partition(":")[0] if self.kind in ONCE else ""
        return self.kind, self.attempt, self.level, once

    @property
    def place(self) -> tuple[float, float]:
        """Returns (position of the alert, largest distance from the position of a duplicate). The
        unit is steps for kinds in SAME_WITHIN_STEPS and otherwise seconds. For kinds in ONCE both
        are zero, so that every alert of the event is a duplicate.
        """
        if self.kind in ONCE:
            return 0.0, 0.0
        if self.kind in SAME_WITHIN_STEPS:
            return self.step, SAME_WITHIN_STEPS[self.kind]
        return self.time, SAME_WITHIN_S


class AlertLog(Tail, Owned):
    """The alerts of a run (alerts.jsonl), in the order in which they were recorded.

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
        """Reads the alerts that were written to the file since the last call. Returns all alerts
        read so far.
        """
        while lines := self.new_lines():
            for line in lines.splitlines():
                try:
                    self._take(Alert.from_json(line.decode()))
                # The line is torn, or another version of the kit has written it in another format.
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
        """Writes those of the given alerts that are not duplicates, and returns them. If the run
        belongs to another user, the alerts are kept only in memory.

        An alert that cannot be written is also kept in memory. If `raises` is True, the OSError of
        the write is raised.
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
