"""How other trainers' logs are read, and the log of Megatron-LM and Megatron-DeepSpeed.

`nemo.py` has NeMo's, `formats.py` those whose steps are a line each, and the names of all.

A reader takes a log line by line and returns a `LoggedStep` for each line that tells of an optimizer step. Speeds are
taken from clocks alone: a log's own TFLOP/s and samples/s rest on a batch size that the engine may not have run, so
they are only kept to be compared.
"""

import dataclasses
import datetime
import math
import os
import re
from pathlib import Path

CHUNK_BYTES = 4 << 20
LONGEST_LINE = 8 << 10  # no line about a step is longer, and a pattern on a longer one could take for ever
DISORDER_S = 60.0  # lines of several ranks may come in another order than they were written
CLOCK_WINDOW_S = 20.0  # a progress bar's clock has whole seconds: over 20 of them it is off by 5 % at most


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoggedStep:
    """What one line says about the optimizer steps up to `step`; None for what it does not say."""

    step: int
    starts: int = 0
    total_steps: int | None = None
    samples: int | None = None
    consumed_samples: int | None = None
    consumed_tokens: int | None = None
    sequence_length: int | None = None
    step_time_s: float | None = None
    clock_s: float | None = None
    time: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    validation_loss: float | None = None
    memory_bytes: int | None = None
    loss_scale: float | None = None
    skipped_steps: int | None = None
    nan_steps: int | None = None
    printed_flops_per_s: float | None = None
    printed_samples_per_s: float | None = None

    def said(self) -> int:
        """Returns a number that is the same for a line that was printed twice; NaN equals NaN here."""
        return hash(repr((self.step_time_s, self.clock_s, self.consumed_samples, self.loss, self.grad_norm)))


class LogParser:
    """What every reader of a format has: settings that the log told, torn lines, whether it ends, starts, a clock.

    A line for many steps has the `values` of them that the trainer prints.

    Attributes:
        zone: of time stamps that name none; logs hardly ever do.
        has_local_times: whether there were such stamps.
        counts_before: whether consumed samples are those before a line's step, without its own.
    """

    values = "the last step's values"
    counts_before = False

    def __init__(self) -> None:
        self.arguments: dict[str, str] = {}  # in Megatron's words
        self.engine: dict[str, str] = {}
        self.skipped_lines, self.done, self.starts = 0, False, 0
        self.zone: datetime.tzinfo = datetime.UTC
        self.has_local_times, self._last_stamp = False, -math.inf

    def unix_time(self, text: str | None, form: str | None = None) -> float | None:
        """Returns a time of the log, written as in ISO 8601 or in `form`; None where it is written otherwise.

        An hour comes twice where clocks are set back: a stamp well before the last one is of the second.
        """
        try:
            when = datetime.datetime.strptime(text or "", form) if form else datetime.datetime.fromisoformat(text or "")
        except ValueError:
            return None
        if when.tzinfo is None:
            self.has_local_times = True
            when = when.replace(tzinfo=self.zone)
            when = when.replace(fold=int(when.timestamp() < self._last_stamp - DISORDER_S))
        self._last_stamp = when.timestamp()
        return self._last_stamp

    def feed(self, line: str) -> list[LoggedStep]:
        """Returns what a line says about steps, usually nothing."""
        raise NotImplementedError


class LogReader:
    """Reads a growing log, each line once, through the reader of its format."""

    def __init__(self, file: Path, parser: LogParser) -> None:
        self.file, self.parser = file, parser
        self.offset, self.lines = 0, 0

    def read(self) -> list[LoggedStep]:
        """Returns the steps of the lines that have come since the last call; an unfinished line is left for the next.

        Raises:
            OSError: the log cannot be read.
        """
        steps = []
        with self.file.open("rb") as stream:
            if os.fstat(stream.fileno()).st_size < self.offset:  # truncated or replaced
                self.offset = 0
            stream.seek(self.offset)
            kept = b""
            while chunk := stream.read(CHUNK_BYTES):
                *lines, kept = re.split(rb"[\r\n]+", kept + chunk)  # a progress bar redraws its line after \r
                self.lines += len(lines)
                for line in lines:
                    steps += self._feed(line)
                if len(kept) > CHUNK_BYTES:  # not a line of a log
                    kept = b""
            self.offset = stream.tell() - len(kept)
        return steps

    def finish(self) -> list[LoggedStep]:
        """Returns the step of a last line that has no end, if it is whole: a progress bar's often is."""
        with self.file.open("rb") as stream:
            stream.seek(self.offset)
            rest = stream.read(CHUNK_BYTES)
        return self._feed(rest) if rest.rstrip().endswith(b"]") else []

    def _feed(self, line: bytes) -> list[LoggedStep]:
        if len(line) > LONGEST_LINE:
            return []
        try:
            return self.parser.feed(line.decode(errors="replace"))
        except (ValueError, OverflowError):  # a number that no trainer prints
            self.parser.skipped_lines += 1
            return []


class MegatronLog(LogParser):
    """Lines of Megatron-LM, Megatron-DeepSpeed and GPT-NeoX, with or without srun's or torchrun's labels, and stamps.

    Source: `training_log` in megatron/training.py of NVIDIA/Megatron-LM and microsoft/Megatron-DeepSpeed, in
    megatron/logging.py of EleutherAI/gpt-neox; logs of spyysalo/lumi-llm-scaling and sajal-vt/Megatron-DeepSpeed-ORNL.
    """

    values = "the line's means"
    HEAD = re.compile(r"iteration\s+(\d+)/\s*(\d+|infinity)\s*\|(.*)\|\s*$")
    STARTED = re.compile(r"iteration\s+\d+/\s*(?:\d+|infinity)\s*\|")
    ARGUMENT = re.compile(r"^(?:\s*\d+:|\[\w+\]:)?\s+(\w+) \.{2,} (.*?)\s*$")
    ENGINE = re.compile(r"\[config\.py:\d+:print\w*\]\s+(\w+)[ .]+\s(\S+)\s*$")
    VALIDATION = re.compile(
        r"validation (?:loss|results) at iteration (\d+)(?! on test set)\b.*?\blm[ _]loss value: (\S+) \|"
    )
    NEOX_ARGUMENT = re.compile(r"\.{2,}(default|updated)$")
    MEMORY = re.compile(r"memory \(MB\) \|.*?max allocated: ([\d.]+)")
    STAMP = re.compile(r"\[?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
    VOCABULARY = re.compile(r"padded vocab \(size: \d+\) with \d+ dummy tokens \(new size: (\d+)\)")

    def __init__(self) -> None:
        super().__init__()
        self._time: float | None = None
        self._memory_bytes: int | None = None

    def feed(self, line: str) -> list[LoggedStep]:
        if stamp := self.STAMP.search(line[:80]) or (" datetime: " in line and self.STAMP.search(line)) or None:
            self._time = self.unix_time(stamp[1]) or self._time
        if "iteration" in line and self.STARTED.search(line):
            return self._step(line)
        if "validation " in line and (found := self.VALIDATION.search(line)):
            loss = number(found[2])
            return [] if loss is None else [LoggedStep(step=int(found[1]), validation_loss=loss)]
        if "memory (MB)" in line and (found := self.MEMORY.search(line)):
            allocated = number(found[1]) or 0.0
            self._memory_bytes = max(self._memory_bytes or 0, int(allocated * 2**20))
        elif "- arguments -" in line:  # the block that every start of the trainer prints
            self.starts += 1
        elif "[after training is done]" in line:
            self.done = True
        elif " .." in line or "train_micro_batch_size_per_gpu" in line:  # so long that its dots do not fit
            self._setting(line)
        elif found := self.VOCABULARY.search(line):
            self.arguments["padded_vocab_size"] = found[1]
        return []

    def _setting(self, line: str) -> None:
        if found := self.ENGINE.search(line):
            self.engine[found[1]] = found[2]
        elif (found := self.ARGUMENT.match(line)) and not self.NEOX_ARGUMENT.search(found[2]):  # with other names there
            self.arguments[found[1]] = found[2]

    def _step(self, line: str) -> list[LoggedStep]:
        head = self.HEAD.search(line)
        fields = _fields(head[3]) if head else None
        step_time_s = _step_time(fields or {})
        if head is None or fields is None or step_time_s is None:
            self.skipped_lines += 1  # torn, or two ranks wrote at once
            return []
        loss = next((value for name, value in fields.items() if name.endswith("loss") and name != "loss scale"), None)
        flops = next((value for name, value in fields.items() if "TFLOP" in name), None)
        total = None if head[2] == "infinity" else int(head[2])
        step = LoggedStep(
            step=int(head[1]),
            starts=self.starts,
            total_steps=total,
            samples=whole(fields.get("global batch size")),
            consumed_samples=whole(fields.get("consumed samples")),
            consumed_tokens=whole(fields.get("consumed tokens")),  # of Megatron-DeepSpeed
            sequence_length=whole(fields.get("actual seqlen")),
            step_time_s=step_time_s,
            time=self._time,
            loss=loss,
            grad_norm=fields.get("grad norm"),
            learning_rate=fields.get("learning rate"),
            memory_bytes=self._memory_bytes,
            loss_scale=fields.get("loss scale"),
            skipped_steps=_count(fields.get("number of skipped iterations")),
            nan_steps=_count(fields.get("number of nan iterations")),
            printed_flops_per_s=None if flops is None else flops * 1e12,
            printed_samples_per_s=fields.get("samples per second"),
        )
        self._time = None  # said of this step; the next one ends later
        self.done = self.done or (total is not None and step.step >= total)
        return [step]


def _fields(body: str) -> dict[str, float] | None:
    """Returns the numbers between the bars of a line; None where a name stands twice, since two lines were mixed."""
    fields = {}
    for part in body.split("|"):
        name, colon, text = part.rpartition(":")
        if name.strip() in fields:
            return None
        if colon and (value := number(text)) is not None:
            fields[name.strip()] = value
    return fields


def _count(value: float | None) -> int | None:
    return 0 if value == 0 else whole(value)


def _step_time(fields: dict[str, float]) -> float | None:
    for unit, seconds in (("ms", 1e-3), ("s", 1.0)):
        value = fields.get(f"elapsed time per iteration ({unit})")
        if value is not None and 0 < value < float("inf"):
            return value * seconds
    return None


def number(text: str | None) -> float | None:
    """Returns a word of a log as a number, None where it is none."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def whole(value: float | None) -> int | None:
    """Returns a count, None where there is none or it could be none."""
    return int(value) if value is not None and 0 < value < 2**63 else None
