"""alerts.jsonl: what deserved a look, said once, whoever saw it."""

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
SAME_WITHIN_STEPS = {
    "guard": 0,
    "nan": 50,
    "spike": 50,
    "start": 50,
    "rise": 5000,
    "loss_scale": 5000,
}
ONCE = ("job", "peak", "record")
"""An attempt fails once, however often and late it is looked at; a file is damaged once."""

Level = Literal["warning", "error"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alert(Record):
    """One line for people, with where to look."""

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
        """What it tells of: of two alerts of the same event in the same place, one is enough."""
        once = self.message.partition(":")[0] if self.kind in ONCE else ""
        return self.kind, self.attempt, self.level, once

    @property
    def place(self) -> tuple[float, float]:
        """Where it happened, in steps or in seconds, and how far from there the place is the
        same.
        """
        if self.kind in ONCE:
            return 0.0, 0.0
        if self.kind in SAME_WITHIN_STEPS:
            return self.step, SAME_WITHIN_STEPS[self.kind]
        return self.time, SAME_WITHIN_S


class AlertLog(Tail, Owned):
    """The alerts of a run, oldest first; several watchers may write, each event is listed once."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self.restart()
        self.read()

    @property
    def owned_folder(self) -> Path:
        return self.file.parent

    def read(self) -> list[Alert]:
        """Takes over what others have written since the last time, and returns all alerts."""
        while lines := self.new_lines():
            for line in lines.splitlines():
                try:
                    self._take(Alert.from_json(line.decode()))
                # torn, or of another version.
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
        place, within = alert.place
        known = self._places[alert.event]
        first = bisect_left(known, place - within)
        if first < len(known) and known[first] <= place + within:
            return False
        insort(known, place)
        self.alerts.append(alert)
        return True
