"""How a log is read: the patterns of a format, applied line by line.

Speeds are taken from clocks alone: a log's own TFLOP/s and samples/s rest on a batch size that the
engine may not have run, so they are only kept to be compared.
"""

import contextlib
import datetime
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from cluster.files import opened
from kit.foreign.formats import BOUNDED, OF_STEPS, UNITS, WHOLE, Format, Texts
from kit.run.tail import Tail

LONGEST_LINE = 8 << 10
"""No line about a step is longer, and a pattern on a longer one could take for ever."""
DISORDER_S = 60.0
"""Lines of several ranks may come in another order than they were written."""
COLOUR = re.compile(r"\x1b\[[\d;]*m")
RANK = re.compile(r"\[rank(\d+)\]")

Step = dict[str, float]
"""What one line says about the optimizer steps up to `step`; without an `attempt` it is a held-out
loss alone."""


class Parser(Tail):
    """A growing log of a format, each of its lines once, and what it tells.

    Attributes:
        lines: read so far; blank ones do not count.
        changed: Unix time of the log's last change.
        settings: what it told of the trainer, by Megatron's names.
        skipped_lines: torn lines about steps.
        attempt: how often the trainer was started.
        done: whether the trainer said that training has ended.
        has_local_times: whether there were time stamps that name no zone.
    """

    ENDS = b"\r\n"  # a progress bar redraws its line after a carriage return

    def __init__(self, file: Path, form: Format, zone: datetime.tzinfo = datetime.UTC) -> None:
        super().__init__(file)
        self.form, self.zone, self.settings = form, zone, Texts()
        self.lines, self.changed, self.skipped_lines, self.attempt = 0, 0.0, 0, 1
        self.done, self.has_local_times = False, False
        self._seen, self._restarted = dict[int, int](), False
        self._before, self._held_out = Texts(), dict[int, float]()
        self._newest, self._rank, self._last_stamp, self._open = 0, None, -math.inf, ""

    def new(self) -> Iterator[str]:
        """Yields the lines that have come; the last one without its end, if it is a whole bar."""
        while text := self.new_lines():
            for line in text.splitlines():
                self.lines += bool(line)
                if len(line) <= LONGEST_LINE:
                    yield COLOUR.sub("", line.decode(errors="replace"))
        with contextlib.suppress(OSError), opened(self.file) as stream:
            self.changed = os.fstat(stream.fileno()).st_mtime
            stream.seek(self.position)
            if (rest := stream.read(LONGEST_LINE)).rstrip().endswith(b"]"):
                yield rest.decode(errors="replace")

    def steps(self) -> Iterator[Step]:
        """Yields what new lines say; one with a number that no trainer prints is a torn one."""
        for line in self.new():
            try:
                yield from self._told(line)
            except (ValueError, OverflowError):
                self.skipped_lines += 1

    def _told(self, line: str) -> Iterator[Step]:
        self._set(line)
        form = self.form
        if form.closes:
            self._open = f"{self._open}\n{line}"[-LONGEST_LINE:]
            if not re.match(form.closes, line):
                return
            line, self._open = self._open, ""
        if found := re.search(form.held_out, line):
            step = int(found["step"]) + 1 - form.first_step
            self._held_out[step] = float(found["loss"])
            yield from self._due() if step == self._newest else ()
        elif re.search(form.sign, line):
            matches = list(re.finditer(form.line, line))
            for found in matches:
                yield from self._step(line, found)
            self.skipped_lines += not matches

    def _set(self, line: str) -> None:
        """Keeps what a line tells of the trainer, and of the step that comes."""
        for pattern in self.form.settings:
            if found := re.search(pattern, line):
                told = {name: text.strip() for name, text in found.groupdict().items() if text}
                if "memory_mib" in told:  # of this rank
                    told["memory_mib"] = max(
                        told["memory_mib"], self.settings.get("memory_mib", "0"), key=float
                    )
                self.settings |= {told["name"]: told["value"]} if "value" in told else told
                self._restarted |= "start" in told
                self.done |= "end" in told

    def _step(self, line: str, found: re.Match[str]) -> Iterator[Step]:
        """Yields what a line says, unless it was printed again, and the losses that wait for it.

        Raises:
            ValueError: the line is torn.
        """
        texts = self._texts(found)
        values = self._values(texts)
        rank = named[1] if (named := RANK.search(line)) else None
        # A pipeline's other stages print a loss of -1, several ranks the same line.
        if values.get("loss", 0.0) < 0 or rank != (self._rank or rank):
            return
        if texts.get("validation_loss") == self._before.get("validation_loss"):
            values.pop("validation_loss", None)  # it stays until there is another
        self._rank, self._before, step = rank, texts, int(values["step"])
        said = hash(tuple(map(texts.get, self.form.repeats)))
        if self._seen.get(step) == said and not self._restarted:
            if "validation_loss" in values:
                yield {name: values[name] for name in ("step", "validation_loss")}
            return
        if self._seen and (self._restarted or step in self._seen):
            self.attempt += 1
            self._seen.clear()
        self._restarted, self._newest, self._seen[step] = False, step, said
        yield values | self._clock(texts) | {"attempt": self.attempt}
        yield from self._due()

    def _due(self) -> Iterator[Step]:
        for step in [step for step in self._held_out if step <= self._newest]:
            yield {"step": step, "validation_loss": self._held_out.pop(step)}

    def _texts(self, found: re.Match[str]) -> Texts:
        """Returns the values in a line as they are written, by name."""
        kept = {name: self.settings[name] for name in OF_STEPS if name in self.settings}
        texts = kept | {name: text for name, text in found.groupdict().items() if text is not None}
        for value in re.finditer(self.form.fields, texts.pop("fields", "")):
            name = str(value.lastgroup)
            if name in texts and name != "loss":
                raise ValueError("two lines were mixed")
            texts.setdefault(name, value[name])
        if "step" in texts:
            self.form.amend(texts, self._before)
        return texts

    def _values(self, texts: Texts) -> Step:
        """Returns the values of a step as numbers."""
        values: Step = {}
        for group, text in texts.items():
            name, unit = UNITS.get(group, (group, 1.0))
            value = number(text.replace(",", ""))
            if value is not None and (name not in BOUNDED or 0 <= value < 2**63):
                values[name] = int(value / unit) if name in WHOLE else value / unit
        if not {"step", "loss" if "loss" in texts else "step_time_s"} <= values.keys():
            raise ValueError("the line is torn")
        values["step"] += 1 - self.form.first_step
        if self.form.times_held_out and values["step"] in self._held_out:
            values.pop("step_time_s", None)
        return values

    def _clock(self, texts: Texts) -> Step:
        """Returns the time of a step, if it is told as in ISO 8601."""
        self.settings.pop("time", None)
        try:
            when = datetime.datetime.fromisoformat(texts.get("time", ""))
        except ValueError:
            return {}
        if when.tzinfo is None:
            self.has_local_times, when = True, when.replace(tzinfo=self.zone)
            # An hour comes twice where clocks are set back: of the second is what goes back.
            when = when.replace(fold=int(when.timestamp() < self._last_stamp - DISORDER_S))
        self._last_stamp = when.timestamp()
        return {"time": self._last_stamp, "clock_s": self._last_stamp}


def number(text: str | None) -> float | None:
    """Returns a word of a log as a number, None where it is none."""
    try:
        return float(text or "")
    except ValueError:
        return None
