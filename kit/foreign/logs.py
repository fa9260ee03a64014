"""Readers of other trainers' logs: Megatron-LM and Megatron-DeepSpeed; NeMo on Neuron (NxDT) and HLAT's own script.

`formats.py` has those whose steps are a line each, and the names of all.

A reader takes a log line by line and returns a `LoggedStep` for each line that tells of an optimizer step. Speeds are
taken from clocks alone: a log's own TFLOP/s and samples/s rest on a batch size that the engine may not have run, so
they are only kept to be compared.
"""

import dataclasses
import datetime
import os
import re
from pathlib import Path

CHUNK_BYTES = 4 << 20
LONGEST_LINE = 8 << 10  # no line about a step is longer, and a pattern on a longer one could take for ever
CLOCK_WINDOW_S = 20.0  # a progress bar's clock has whole seconds: over 20 of them it is off by 5 % at most
EXACT_BELOW = 100_000  # a progress bar writes larger numbers with three digits


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoggedStep:
    """What one line says about the optimizer steps up to `step`; None for what it does not say."""

    step: int
    starts: int = 0
    total_steps: int | None = None
    samples: int | None = None
    consumed_samples: int | None = None
    sequence_length: int | None = None
    step_time_s: float | None = None
    clock_s: float | None = None
    time: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    validation_loss: float | None = None
    memory_bytes: int | None = None
    printed_flops_per_s: float | None = None
    printed_samples_per_s: float | None = None

    def said(self) -> int:
        """Returns a number that is the same for a line that was printed twice; NaN equals NaN here."""
        return hash(repr((self.step_time_s, self.clock_s, self.consumed_samples, self.loss, self.grad_norm)))


class LogParser:
    """What every reader of a format has: settings that the log told, torn lines, whether it ends, starts."""

    def __init__(self) -> None:
        self.arguments: dict[str, str] = {}  # in Megatron's words
        self.engine: dict[str, str] = {}
        self.skipped_lines, self.done, self.starts = 0, False, 0

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
    """Lines of Megatron-LM and Megatron-DeepSpeed, with or without srun's rank labels and time stamps.

    Source: `training_log` in megatron/training.py of NVIDIA/Megatron-LM and microsoft/Megatron-DeepSpeed; logs of
    spyysalo/lumi-llm-scaling and sajal-vt/Megatron-DeepSpeed-ORNL.
    """

    HEAD = re.compile(r"iteration\s+(\d+)/\s*(\d+|infinity)\s*\|(.*)\|\s*$")
    STARTED = re.compile(r"iteration\s+\d+/\s*(?:\d+|infinity)\s*\|")
    ARGUMENT = re.compile(r"^(?:\s*\d+:)?\s+(\w+) \.{2,} (.*?)\s*$")
    ENGINE = re.compile(r"\[config\.py:\d+:print\w*\]\s+(\w+)[ .]+\s(\S+)\s*$")
    VALIDATION = re.compile(r"validation loss at iteration (\d+)\b.*?\blm loss value: (\S+) \|")
    MEMORY = re.compile(r"memory \(MB\) \|.*?max allocated: ([\d.]+)")
    STAMP = re.compile(r"\[?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
    VOCABULARY = re.compile(r"padded vocab \(size: \d+\) with \d+ dummy tokens \(new size: (\d+)\)")

    def __init__(self) -> None:
        super().__init__()
        self._time: float | None = None
        self._memory_bytes: int | None = None

    def feed(self, line: str) -> list[LoggedStep]:
        if stamp := self.STAMP.search(line[:80]) or (" datetime: " in line and self.STAMP.search(line)) or None:
            self._time = unix_time(stamp[1], "%Y-%m-%d %H:%M:%S") or self._time
        if "iteration" in line and self.STARTED.search(line):
            return self._step(line)
        if "validation loss" in line and (found := self.VALIDATION.search(line)):
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
        elif found := self.ARGUMENT.match(line):
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
            samples=_whole(fields.get("global batch size")),
            consumed_samples=_whole(fields.get("consumed samples")),
            sequence_length=_whole(fields.get("actual seqlen")),
            step_time_s=step_time_s,
            time=self._time,
            loss=loss,
            grad_norm=fields.get("grad norm"),
            learning_rate=fields.get("learning rate"),
            memory_bytes=self._memory_bytes,
            printed_flops_per_s=None if flops is None else flops * 1e12,
            printed_samples_per_s=fields.get("samples per second"),
        )
        self._time = None  # said of this step; the next one ends later
        self.done = self.done or (total is not None and step.step >= total)
        return [step]


class NxdtLog(LogParser):
    """Progress bars of NeuronX Distributed Training (NeMo on Lightning), and the LOG lines of HLAT's training script.

    Source: AWS Neuron documentation, NxDT tutorials; `log_metrics` of aws-neuron/neuronx-distributed-training;
    `Logger.log` of awslabs/HLAT.
    """

    BAR = re.compile(
        r"Epoch (?P<epoch>\d+):(?:(?!Epoch ).)*?(?:(?P<n>\d+)/(?P<total>\d+) )?"
        r"\[(?P<clock>[\d:]+)(?:<[^,\]]*)?,(?P<fields>[^\]]*)\]"
    )
    LOG = re.compile(r"LOG (\w{3} \w{3} +\d+ [\d:]{8} \d{4}) - \((\d+), (\d+)\) (step_loss : .*)$")
    FINISHED = re.compile(r"`Trainer\.fit` stopped: `max_\w+=\d+` reached")

    def __init__(self) -> None:
        super().__init__()
        self._last: tuple = ()
        self._validation = ""

    def feed(self, line: str) -> list[LoggedStep]:
        if "reduced_train_loss=" in line or "global_step=" in line:
            bars = list(self.BAR.finditer(line))
            self.skipped_lines += not bars
            return [step for bar in bars for step in self._bar(bar)]
        if "step_loss : " in line:
            return self._log(line)
        self.done = self.done or bool(self.FINISHED.search(line))
        return []

    def _bar(self, bar: re.Match) -> list[LoggedStep]:
        pairs = [part.partition("=") for part in bar["fields"].split(",") if "=" in part]
        texts = {name.strip(): value.strip() for name, _, value in pairs}
        fields = {name: value for name, text in texts.items() if (value := number(text)) is not None}
        if "reduced_train_loss" not in fields or "global_step" not in fields:
            self.skipped_lines += "global_step" not in fields
            return []
        step = int(fields["global_step"]) + 1
        if step > EXACT_BELOW:  # rounded; the bar's own count is not
            if bar["n"] is None:
                self.skipped_lines += 1
                return []
            step = int(bar["epoch"]) * int(bar["total"]) + int(bar["n"])
        validation = texts.get("val_loss", "")
        new, self._validation = validation != self._validation, validation  # it stays in the bar until the next one
        said = tuple(texts.get(name) for name in ("global_step", "reduced_train_loss", "lr", "gradient_norm"))
        again, self._last = said == self._last, said
        if again:  # the bar was drawn again
            return [LoggedStep(step=step, validation_loss=fields.get("val_loss"))] if new else []
        consumed = _whole(fields.get("consumed_samples"))
        return [
            LoggedStep(
                step=step,
                total_steps=None if bar["total"] is None else int(bar["total"]),
                consumed_samples=consumed if consumed is not None and consumed < EXACT_BELOW else None,
                step_time_s=fields.get("train_step_timing in s"),
                clock_s=_clock(bar["clock"]),
                loss=fields["reduced_train_loss"],
                grad_norm=fields.get("gradient_norm"),
                learning_rate=fields.get("lr"),
                validation_loss=fields.get("val_loss") if new else None,
                printed_samples_per_s=fields.get("throughput"),
            )
        ]

    def _log(self, line: str) -> list[LoggedStep]:
        found = self.LOG.search(line)
        fields = {name: number(text) for name, text in re.findall(r"([\w-]+) : (\S+)", found[4])} if found else {}
        time = unix_time(" ".join(found[1].split()), "%a %b %d %H:%M:%S %Y") if found else None
        if not found or fields.get("step_loss") is None or fields.get("throughput") is None or time is None:
            self.skipped_lines += 1
            return []
        return [
            LoggedStep(
                step=int(found[3]),
                clock_s=time,
                time=time,
                loss=fields["step_loss"],
                grad_norm=fields.get("grad-norm"),
                learning_rate=fields.get("learning_rate"),
                printed_samples_per_s=fields["throughput"],
            )
        ]


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


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None and 0 < value < float("inf") else None


def _clock(text: str) -> float:
    """Returns the seconds of `43:24:54` or `03:24`."""
    return float(sum(60**i * int(part or 0) for i, part in enumerate(reversed(text.split(":")))))


def unix_time(text: str, form: str) -> float | None:
    """Returns a time of a log, None where it has another form."""
    try:
        return datetime.datetime.strptime(text, form).timestamp()  # in the zone of this machine, as logs do not tell
    except ValueError:
        return None
