"""How a log is read: the patterns of a format, applied line by line, give steps, and these the rows
of `metrics.jsonl`.

Speeds are taken from clocks alone: a log's own TFLOP/s and samples/s rest on a batch size that the
engine may not have run, so they are only kept to be compared.
"""

import collections
import contextlib
import datetime
import math
import os
import re
import signal
import threading
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from cluster.files import opened
from cluster.record import ConfigError
from kit.interop.logs.formats import (
    BOUNDED,
    COUNTS,
    OF_STEPS,
    UNITS,
    WHOLE,
    Format,
    Texts,
    UnsureStepError,
    lacks_digits,
    number,
)
from kit.run.tail import Tail

LONGEST_LINE = 8 << 10
"""No line about a step is longer, and a pattern on a longer one could take for ever."""
PATTERN_S = 1.0
"""Longest processor time of a user's pattern on one line, in seconds. Such a pattern takes
microseconds, unless its repetitions are tried in all combinations."""
DISORDER_S = 60.0
"""Lines of several ranks may come in another order than they were written."""
COLOUR = re.compile(r"\x1b\[[\d;]*m")
RANK = re.compile(r"\[rank(\d+)\]")
GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![,.]?\d)")
"""A whole number with commas between thousands. A list such as `12,345,0.5` is none."""
EXPERTS = re.compile(
    r"(?i)(?:load|expert)[_ ]balancing[_ ]loss|router[_ /]z[_ ]?loss|\baux[_ ]loss"
)
"""Names of losses that trainers print only for mixtures of experts."""

CLOCK_WINDOW_S = 20.0
"""A progress bar's clock has whole seconds: over 20 of them it is off by 5 % at most."""
ALWAYS = ("loss", "grad_norm", "learning_rate", "memory_bytes")
IF_TOLD = ("validation_loss", "loss_scale", "skipped_steps", "nan_steps")
"""Values of a row: told or None, and those that only some trainers tell."""

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
        unsure: one reason for each line that is left out because its step is unknown.
        experts: name of a loss of mixtures of experts in a line about a step, or "".
        epochs: printed epoch of each line, if the lines of the format have no step.
    """

    ENDS = b"\r\n"  # a progress bar redraws its line after a carriage return

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
        self.settings = Texts()
        self.steps_per_line = steps_per_line
        self.unsure = list[str]()
        self.epochs = list[str]()
        self.experts = ""
        self._block = Texts()
        """Values gathered of a step that is printed on several lines."""
        self._block_line = ""
        """Line with which that step begins."""
        self.lines = 0
        self.changed = 0.0
        self.skipped_lines = 0
        self.attempt = 1
        self.done = False
        self.has_local_times = False
        self._seen = dict[int, int]()
        self._restarted = False
        self._before = Texts()
        self._held_out = dict[int, float]()
        self._newest = 0
        self._rank = None
        self._last_stamp = -math.inf
        self._open = ""

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
        """Yields the steps of new lines. A line with an impossible number counts as torn.

        Raises:
            ConfigError: A user's pattern takes part of a number as the step.
        """
        for line in self.new():
            with (
                limited_time(len(line)) if self.form.name == "pattern" else contextlib.nullcontext()
            ):
                told = list(self._guarded(self._told(line)))
            yield from told
        if "loss" in self._block:  # No line of another step has ended the last step.
            yield from self._guarded(self._gathered_step())

    def _guarded(self, steps: Iterator[Step]) -> Iterator[Step]:
        """Yields the steps of a line. If the line cannot be read, counts it."""
        try:
            yield from steps
        except UnsureStepError as error:
            self.unsure.append(str(error))
        except ConfigError:  # A wrong pattern is wrong for every line.
            raise
        except (ValueError, OverflowError):
            self.skipped_lines += 1

    def _told(self, line: str) -> Iterator[Step]:
        self._set(line)
        form = self.form
        if form.gathers or re.search(form.sign, line):
            expert = None if self.experts else EXPERTS.search(line)
            self.experts = expert[0] if expert is not None else self.experts
        if form.closes:
            self._open = f"{self._open}\n{line}"[-LONGEST_LINE:]
            if not re.match(form.closes, line):
                return
            line = self._open
            self._open = ""
        if found := re.search(form.held_out, line):
            step = int(found["step"]) + 1 - form.first_step
            self._held_out[step] = float(found["loss"])
            yield from self._due() if step == self._newest else ()
        elif form.gathers:
            yield from self._gather(line)
        elif re.search(form.sign, line):
            matches = _matches(form, line)
            for found in matches:
                yield from self._step(line, self._texts(found))
            self.skipped_lines += not matches

    def _gather(self, line: str) -> Iterator[Step]:
        """Adds the values of a line to the step of the lines before. If the line begins another
        step, yields the step before.
        """
        begins = re.search(self.form.sign, line) is not None
        for found in _matches(self.form, line) if begins else ():
            texts = {name: text for name, text in found.groupdict().items() if text is not None}
            if "step" in texts:
                yield from self._gathered_step()
                self._block = self._kept()
                self._block_line = line
            self._block.update(texts)
        for value in re.finditer(self.form.fields, line):
            name = str(value.lastgroup)
            if self._block:
                self._block.setdefault(name, value[name])

    def _gathered_step(self) -> Iterator[Step]:
        """Yields the step whose values were gathered, if they include a loss or a time."""
        texts = self._block
        self._block = Texts()
        if "step" in texts and ("loss" in texts or "step_time_s" in texts):
            self.form.amend(texts, self._before)
            yield from self._step(self._block_line, texts)

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

    def _step(self, line: str, texts: Texts) -> Iterator[Step]:
        """Yields what a line says, unless it was printed again, and the losses that wait for it.

        Raises:
            ValueError: The line is torn, or its step is unknown.
        """
        if texts.get("step") == "":  # The line ends no optimizer step.
            self._before = texts
            return
        values = self._values(texts)
        rank = named[1] if (named := RANK.search(line)) else None
        # A pipeline's other stages print a loss of -1, several ranks the same line.
        if values.get("loss", 0.0) < 0 or rank != (self._rank or rank):
            return
        if texts.get("validation_loss") == self._before.get("validation_loss"):
            values.pop("validation_loss", None)  # it stays until there is another
        self._rank = rank
        self._before = texts
        step = int(values["step"])
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

    def _kept(self) -> Texts:
        """Returns the settings that are values of the next step."""
        return {name: self.settings[name] for name in OF_STEPS if name in self.settings}

    def _texts(self, found: re.Match[str]) -> Texts:
        """Returns the values in a line as they are written, by name."""
        texts = self._kept() | {
            name: text for name, text in found.groupdict().items() if text is not None
        }
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

    def _values(self, texts: Texts) -> Step:
        """Returns the values of a step as numbers."""
        values: Step = {}
        for group, text in texts.items():
            name, unit = UNITS.get(group, (group, 1.0))
            if name in COUNTS and lacks_digits(text):
                if name == "step":
                    raise UnsureStepError(f"the step {text} is rounded, and stands for several")
                continue
            is_time = name == "step_time_s"
            value = number(text, ("ms" if group == "step_time_ms" else "s") if is_time else "")
            if value is not None and (name not in BOUNDED or 0 <= value < 2**63):
                value /= unit
                if name in COUNTS:
                    value = round(value)
                values[name] = int(value) if name in WHOLE else value
        told = "loss" if "loss" in texts else "step_time_s"
        if "step" not in values or (told not in values and "loss" in self.form.repeats):
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
            self.has_local_times = True
            when = when.replace(tzinfo=self.zone)
            # An hour comes twice where clocks are set back: of the second is what goes back.
            when = when.replace(fold=int(when.timestamp() < self._last_stamp - DISORDER_S))
        self._last_stamp = when.timestamp()
        return {"time": self._last_stamp, "clock_s": self._last_stamp}


@contextlib.contextmanager
def limited_time(length: int) -> Iterator[None]:
    """Limits the processor time of a user's pattern on one line, of `length` characters.

    Python looks for signals while it searches. In other threads than the main one, which get none,
    there is no limit.

    Raises:
        ConfigError: the pattern takes longer than PATTERN_S.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def refuse(*_: object) -> None:
        raise ConfigError(
            f"--pattern: takes more than {PATTERN_S:g} s on one line of {length:,} characters."
            " Write [^,]* or .{0,99}? where it has .* more than once."
        )

    before = signal.signal(signal.SIGVTALRM, refuse)
    signal.setitimer(signal.ITIMER_VIRTUAL, PATTERN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _matches(form: Format, line: str) -> list[re.Match[str]]:
    """Returns the matches of a format in a line.

    Raises:
        ConfigError: a match takes only some digits of a number with commas as the step.
    """
    matches = list(re.finditer(form.line, line))
    for found in matches:
        if whole := _whole_step(found):
            raise ConfigError(
                f"--pattern: finds step {found['step']!r} where the log has {whole!r}. If that is"
                r" one number, write (?P<step>[\d,]+). If the comma separates two values, write it"
                r" beside the group, as in (?P<step>\d+),"
            )
    return matches


def _whole_step(found: re.Match[str]) -> str:
    """Returns the number with commas between thousands of which a match takes only some digits as
    the step, or "" if the step is complete or the pattern itself names the comma beside it.
    """
    line = found.string
    step = found.groupdict().get("step")
    if step is None:
        return ""
    begin, end = found.span("step")
    for grouped in GROUPED.finditer(line):
        encloses = grouped.start() <= begin and end <= grouped.end() and grouped[0] != step
        if encloses and not _names_comma(found):
            return grouped[0]
    return ""


def _names_comma(found: re.Match[str]) -> bool:
    """Returns whether a pattern requires the commas beside the step, as for a CSV file: it does not
    match once they are replaced.
    """
    begin, end = found.span("step")
    characters = list(found.string)
    for place in (begin - 1, end):
        if 0 <= place < len(characters) and characters[place] == ",":
            characters[place] = ";"
    changed = found.re.match("".join(characters), found.start())
    return changed is None or changed.span("step") != (begin, end)


class StepRecorder:
    """Turns steps into rows of `metrics.jsonl`: samples, times, tokens.

    `batch` are a step's sequences according to the log, `length` their tokens, `share` what the
    engine really ran of them, `own` those that its line does not count as consumed, and `interval`
    the steps that one line stands for.
    """

    def __init__(
        self, *, batch: int, length: int, share: Fraction | int, own: int, interval: int
    ) -> None:
        self.batch = batch
        self.length = length
        self.own = own
        self.interval = interval
        self.share = share
        self.last_row = dict[str, Any]()
        self.attempt = 1
        self.newest = 0
        self.skipped_steps = 0
        self.clocks = collections.deque[tuple[float, float]]()

    def rows(self, step: Step) -> Iterator[dict[str, Any]]:
        """Yields the rows that a step adds: one for each since the last line that has none."""
        number = int(step["step"])
        last = self.last_row
        if "attempt" not in step:  # a held-out loss, of a step of the last line or of none
            if last and 0 <= (earlier := last["step"] - number) < self.interval:
                untold = "consumed_tokens" if earlier else ""
                yield {name: last[name] for name in last if name != untold} | step
            return
        if step["attempt"] > self.attempt:
            self.attempt = int(step["attempt"])
            self.newest = 0
            self.skipped_steps = 0
            self.clocks.clear()
        row = self.last_row = self._row(step)
        late = number < self.newest  # lines in disorder: those before it have taken their steps
        first = max(self.newest + 1, number - self.interval + 1)
        seconds = row["step_time_s"] or 0.0
        end = row["time"]
        mean = {name: row[name] for name in row if name != "validation_loss"}
        self.newest = max(self.newest, number)
        for other in range(first, 0 if late else number):
            when = None if end is None else end - (number - other) * seconds
            yield mean | {"step": other, "time": when}
        samples = step.get("sequence_length", self.length) == self.length and step.get(
            "consumed_samples"
        )
        if tokens := step.get("consumed_tokens") or (
            samples and (samples + self.own) * self.length
        ):
            row["consumed_tokens"] = round(tokens * self.share)
        yield row

    def _row(self, step: Step) -> dict[str, Any]:
        samples = (step.get("samples") or self.batch) * self.share
        self.skipped_steps += step.get("skipped_steps", 0)
        told = step | ({"skipped_steps": self.skipped_steps} if "skipped_steps" in step else {})
        return {
            "step": step["step"],
            "attempt": self.attempt,
            "time": step.get("time"),
            "step_time_s": step.get("step_time_s") or self._from_clock(step),
            "tokens": round(samples * (step.get("sequence_length") or self.length)),
            **{name: step.get(name) for name in ALWAYS},
            **{name: told[name] for name in IF_TOLD if name in told},
        }

    def _from_clock(self, step: Step) -> float | None:
        """Returns seconds per step since the last line that is CLOCK_WINDOW_S old.

        None for an attempt's first line.
        """
        if "clock_s" not in step:
            return None
        number = step["step"]
        clock = step["clock_s"]
        clocks = self.clocks
        while clocks and (clocks[-1][0] >= number or clocks[-1][1] > clock):
            clocks.pop()  # lines in disorder, or the clock was set
        while len(clocks) > 1 and clock - clocks[1][1] >= CLOCK_WINDOW_S:
            clocks.popleft()
        first, since = clocks[0] if clocks else (number, clock)
        clocks.append((number, clock))
        return (clock - since) / (number - first) if clock > since else None
