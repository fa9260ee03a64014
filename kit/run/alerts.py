"""alerts.jsonl: what deserved a look, said once, whoever saw it."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Literal

from cluster.files import append_lines, other_owner
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

Level = Literal["warning", "error"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alert(Record):
    """One line for people, with where to look."""

    kind: str = field_doc(
        "nan, spike, start, rise, loss_scale, peak, record, stall, mfu, straggler, memory, disk,"
        " checkpoint, job; guard: what the trainer did; hook: the user's failed; on_alert: the"
        " user's command failed"
    )
    level: Level = field_doc("how bad")
    message: str = field_doc("what happened, in numbers")
    attempt: int = field_doc("of the run")
    step: int = field_doc("where to look")
    time: float = field_doc("unix time: of the step where one is to blame, else of the look")

    def is_same(self, other: "Alert") -> bool:
        """Whether both tell of the same event, so that one of them is enough."""
        if (self.kind, self.attempt, self.level) != (other.kind, other.attempt, other.level):
            return False
        # An attempt fails once, however often and late it is looked at; a file is damaged once.
        if self.kind in ("job", "peak", "record"):
            return self.message.partition(":")[0] == other.message.partition(":")[0]
        if (steps := SAME_WITHIN_STEPS.get(self.kind)) is not None:
            return abs(self.step - other.step) <= steps
        return abs(self.time - other.time) <= SAME_WITHIN_S


class AlertLog(Tail):
    """The alerts of a run, oldest first; several watchers may write, each event is listed once."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self.alerts: list[Alert] = []
        self.read()

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
        self.alerts = []

    def add(self, alerts: list[Alert]) -> list[Alert]:
        """Writes those that are new, and returns them; of somebody else's run they are only kept in
        memory.

        Where they cannot be written, only the record is lost.
        """
        self.read()
        new = [alert for alert in alerts if self._take(alert)]
        lines = "".join(json.dumps(alert.to_dict()) + "\n" for alert in new).encode()
        if new and not other_owner(self.file.parent):
            with contextlib.suppress(OSError):
                append_lines(self.file, lines)
        return new

    def _take(self, alert: Alert) -> bool:
        if any(alert.is_same(known) for known in self.alerts):
            return False
        self.alerts.append(alert)
        return True
