"""Converts a log to steps: `Parser` applies the patterns of a format to each line of a growing
file.

Speeds are computed from clocks only. A log's own TFLOP/s and samples/s depend on a batch size that
the engine may not have run, so they are used only for comparison.
"""

import contextlib
import datetime
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from cluster.files import open_for_reading
from cluster.record import ConfigError
from kit.interop.logs.formats import SETTINGS_OF_STEPS, Format, Texts
from kit.interop.logs.numbers import UnsureStepError, parse_value
from kit.run.tail import Tail

LONGEST_LINE = 8 << 10
"""Largest length of a line in bytes. Longer lines are left out: they are not about a step, and a
pattern could take very long on them."""
DISORDER_S = 60.0
"""Largest time in seconds by which lines of several ranks are assumed to be out of order. A time
stamp that goes back further means that the clock was set back."""
COLOUR = re.compile(r"\x1b\[[\d;]*m")
RANK = re.compile(r"\[rank(\d+)\]")
EXPERTS = re.compile(
    r"(?i)(?:load|expert)[_ ]balancing[_ ]loss|router[_ /]z[_ ]?loss|\baux[_ ]loss"
)
"""Pattern of the names of losses that trainers print only for mixtures of experts."""

Step = dict[str, float]
"""Numbers that one line of a log states, by name. The line is about the optimizer steps up to the
value `step`. If the value `attempt` is missing, the line states only a validation loss."""


def is_training(step: Step) -> bool:
    """Returns whether the line with these values is about a training step, not only about a
    validation loss.
    """
    return "attempt" in step


class LogLines(Tail):
    """Reads the lines of a growing log, each line once.

    Attributes:
        lines: Number of lines that were read, without blank lines.
        changed: Unix time of the log's last change.
    """

    ENDS = b"\r\n"  # A progress bar redraws its line after a carriage return.

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self.lines = 0
        self.changed = 0.0

    def new(self) -> Iterator[str]:
        """Yields the new lines. The last line may lack its line end if it is a complete progress
        bar.
        """
        while text := self.new_lines():
            for line in text.splitlines():
                self.lines += bool(line)
                if len(line) <= LONGEST_LINE:
                    yield COLOUR.sub("", line.decode(errors="replace"))
        with contextlib.suppress(OSError), open_for_reading(self.file) as stream:
            self.changed = os.fstat(stream.fileno()).st_mtime
            stream.seek(self.position)
            rest = stream.read(LONGEST_LINE)
            if rest.rstrip().endswith(b"]"):
                yield rest.decode(errors="replace")


class Parser(LogLines):
    """Reads the steps of a growing log in one format.

    Attributes:
        settings: Settings of the trainer that the log prints, by their names in Megatron.
        skipped_lines: Number of torn lines about steps.
        attempt: Number of times that the trainer was started.
        done: Whether the log says that training has ended.
        has_local_times: Whether time stamps without a zone were read.
        unsure: Reason for each line that is left out because its step is unknown.
        experts: Name of a loss in a line about a step that only mixtures of experts have, or "".
        epochs: Printed epoch of each line, if the lines of the format have no step.
    """

    def __init__(
        self,
        file: Path,
        form: Format,
        zone: datetime.tzinfo = datetime.UTC,
        steps_per_line: int = 1,
    ) -> None:
        super().__init__(file)
        self.form = form
        self.zone = zone
        self.steps_per_line = steps_per_line
        self.settings = Texts()
        self.skipped_lines = 0
        self.attempt = 1
        self.done = False
        self.has_local_times = False
        self.unsure = list[str]()
        self.experts = ""
        self.epochs = list[str]()
        self._open = ""
        """Lines of a text that spans several lines and is not complete yet."""
        self._block = Texts()
        """Values of the current step so far, if the trainer prints a step on several lines."""
        self._block_line = ""
        """First line of the step whose values are in `_block`."""
        self._before = Texts()
        """Values of the previous line about a step, as text, by name."""
        self._seen = dict[int, int]()
        """Hash of the values that the line of a step has printed, by step of this attempt. A line
        with an equal hash was printed again."""
        self._newest = 0
        self._restarted = False
        """Whether the log says that the trainer was started again since the last step."""
        self._validation_losses = dict[int, float]()
        """Validation losses that were read before the line of their step, by step. They are yielded
        after that line."""
        self._rank: str | None = None
        """Rank whose lines are read, if lines name their rank. Lines of other ranks are ignored."""
        self._last_stamp = -math.inf

    def steps(self) -> Iterator[Step]:
        """Yields the steps of new lines. A line with an impossible number counts as torn
        (incomplete or mixed with another line).

        Raises:
            ConfigError: A user's pattern takes too long, or takes part of a number as the step.
        """
        for line in self.new():
            yield from self._guarded(self._read(line))
        if "loss" in self._block:  # No line of another step follows the last step.
            yield from self._guarded(self._end_block())

    def _guarded(self, steps: Iterator[Step]) -> Iterator[Step]:
        """Yields the steps of a line. If the line cannot be read, the error is not raised, and the
        line is counted in `unsure` or `skipped_lines`.
        """
        try:
            yield from steps
        except UnsureStepError as error:
            self.unsure.append(str(error))
        except ConfigError:  # The user's pattern is wrong for every line, so the import stops.
            raise
        except (ValueError, OverflowError):
            self.skipped_lines += 1

    def _read(self, line: str) -> Iterator[Step]:
        """Yields the steps that a line completes."""
        form = self.form
        self._read_settings(line)
        is_about_step = form.is_about_step(line)
        if not self.experts and (form.gathers or is_about_step):
            named = EXPERTS.search(line)
            self.experts = named[0] if named else ""
        if form.closes:
            self._open = f"{self._open}\n{line}"[-LONGEST_LINE:]
            if not re.match(form.closes, line):
                return
            line = self._open
            self._open = ""
            is_about_step = form.is_about_step(line)
        validation = re.search(form.validation, line)
        if validation is not None:
            step = int(validation["step"]) + 1 - form.first_step
            self._validation_losses[step] = float(validation["loss"])
            if step == self._newest:
                yield from self._due_validation_losses()
        elif form.gathers:
            yield from self._gather(line, is_about_step)
        elif is_about_step:
            matches = form.matches(line)
            if not matches:
                self.skipped_lines += 1
            for found in matches:
                yield from self._step(line, self._texts(found))

    def _read_settings(self, line: str) -> None:
        """Stores the settings of the trainer that a line prints, and values of the next step, such
        as memory.
        """
        for pattern in self.form.settings:
            found = re.search(pattern, line)
            if found is None:
                continue
            texts = {name: text.strip() for name, text in found.groupdict().items() if text}
            # Each line has the memory of one rank. The step's memory is the largest of all ranks.
            if "memory_mib" in texts:
                most = self.settings.get("memory_mib", "0")
                texts["memory_mib"] = max(texts["memory_mib"], most, key=float)
            if "value" in texts:
                texts = {texts["name"]: texts["value"]}
            self.settings |= texts
            self._restarted |= "start" in texts
            self.done |= "end" in texts

    def _settings_of_steps(self) -> Texts:
        """Returns the values of the next step that earlier lines have stated, such as its time
        stamp or memory.
        """
        return {name: self.settings[name] for name in SETTINGS_OF_STEPS if name in self.settings}

    def _texts(self, found: re.Match[str]) -> Texts:
        """Returns the values of a matched line as text, by name, corrected by the format's function
        `amend`.
        """
        texts = self._settings_of_steps() | _groups(found)
        for value in re.finditer(self.form.fields, texts.pop("fields", "")):
            name = str(value.lastgroup)
            if name in texts and name != "loss":
                raise ValueError("two lines were mixed")
            texts.setdefault(name, value[name])
        if self.form.counts_lines:
            self.epochs.append(texts.pop("epoch", ""))
            texts["step"] = str(len(self.epochs) * self.steps_per_line)
        if "step" in texts:
            self.form.amend(texts, self._before)
        return texts

    def _gather(self, line: str, is_about_step: bool) -> Iterator[Step]:
        """Adds the values of a line to the current step. If the line begins another step, yields
        the step before.
        """
        matches = self.form.matches(line) if is_about_step else []
        for found in matches:
            texts = _groups(found)
            if "step" in texts:
                yield from self._end_block()
                self._block = self._settings_of_steps()
                self._block_line = line
            self._block.update(texts)
        if self._block:
            for value in re.finditer(self.form.fields, line):
                name = str(value.lastgroup)
                self._block.setdefault(name, value[name])

    def _end_block(self) -> Iterator[Step]:
        """Yields the step that was printed on several lines, if its values include a loss or a step
        time.
        """
        texts = self._block
        self._block = Texts()
        if "step" in texts and ("loss" in texts or "step_time_s" in texts):
            self.form.amend(texts, self._before)
            yield from self._step(self._block_line, texts)

    def _step(self, line: str, texts: Texts) -> Iterator[Step]:
        """Yields the step of a line, and the validation losses that wait for the step. A line that
        was printed again yields no step, but may yield a new validation loss.

        Raises:
            ValueError: The line is torn, or its step is unknown.
        """
        if (
            texts.get("step") == ""
        ):  # The line is of a micro-step that does not end an optimizer step.
            self._before = texts
            return
        values = self._values(texts)
        # Pipeline stages without a loss print -1. If several ranks print a step, only lines of one
        # rank are read.
        named = RANK.search(line)
        rank = named[1] if named else None
        is_of_other_rank = self._rank is not None and rank != self._rank
        if values.get("loss", 0.0) < 0 or is_of_other_rank:
            return
        # Trainers print the last validation loss again in later lines, until there is another one.
        # Only its first print is used.
        if texts.get("validation_loss") == self._before.get("validation_loss"):
            values.pop("validation_loss", None)
        self._rank = rank
        self._before = texts
        step = int(values["step"])
        printed = hash(tuple(texts.get(name) for name in self.form.repeats))
        if self._seen.get(step) == printed and not self._restarted:
            if "validation_loss" in values:
                yield {"step": values["step"], "validation_loss": values["validation_loss"]}
            return
        if self._seen and (self._restarted or step in self._seen):
            self.attempt += 1
            self._seen.clear()
        self._restarted = False
        self._newest = step
        self._seen[step] = printed
        yield values | self._time(texts) | {"attempt": self.attempt}
        yield from self._due_validation_losses()

    def _values(self, texts: Texts) -> Step:
        """Returns the values of a step as numbers.

        Raises:
            ValueError: The line has no step, or neither loss nor time.
        """
        values: Step = {}
        for group, text in texts.items():
            name, value = parse_value(group, text)
            if value is not None:
                values[name] = value
        required = "loss" if "loss" in texts else "step_time_s"
        if "step" not in values or (required not in values and "loss" in self.form.repeats):
            raise ValueError("the line is torn")
        values["step"] += 1 - self.form.first_step
        if self.form.times_validation and values["step"] in self._validation_losses:
            values.pop("step_time_s", None)
        return values

    def _time(self, texts: Texts) -> Step:
        """Returns a dict with the values `time` and `clock_s`, both the Unix time of a line's time
        stamp. Returns {} if the line has no time stamp in ISO 8601.
        """
        self.settings.pop("time", None)
        try:
            when = datetime.datetime.fromisoformat(texts.get("time", ""))
        except ValueError:
            return {}
        if when.tzinfo is None:
            self.has_local_times = True
            when = when.replace(tzinfo=self.zone)
            # When clocks are set back, one hour occurs twice. A time stamp that goes back is in
            # the second hour.
            goes_back = when.timestamp() < self._last_stamp - DISORDER_S
            when = when.replace(fold=int(goes_back))
        self._last_stamp = when.timestamp()
        return {"time": self._last_stamp, "clock_s": self._last_stamp}

    def _due_validation_losses(self) -> Iterator[Step]:
        """Yields the stored validation losses of all steps up to the newest step that was read, and
        removes them.
        """
        due = [step for step in self._validation_losses if step <= self._newest]
        for step in due:
            yield {"step": step, "validation_loss": self._validation_losses.pop(step)}


def _groups(found: re.Match[str]) -> Texts:
    """Returns the texts of the named groups that have matched, by the names of the groups."""
    return {name: text for name, text in found.groupdict().items() if text is not None}
