"""The formats of logs that can be imported: those of `logs.py` and `nemo.py`, and of trainers that tell of a step in
one line.

A line's format is a pattern with named groups (GROUPS), so another trainer needs a pattern only (`kit import
--pattern`). Tried on public lines, which the tests cite; torchtitan's held-out loss, settings and start were only read
in its source.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from cluster.record import ConfigError, suggestion
from kit.foreign.logs import LoggedStep, LogParser, MegatronLog, number, whole
from kit.foreign.nemo import NemoLog, NxdtLog

GROUPS = (
    "step", "loss", "total_steps", "samples", "consumed_samples", "step_time_s", "step_time_ms", "grad_norm",
    "learning_rate", "validation_loss", "memory_gib", "tflops", "time",
)  # fmt: skip
"""Of a step's pattern: sequences of the step and since the start, TFLOP/s a device, `2025-11-25 19:45:01,441`."""
NUMBER = r"[^\s,|]+"
STAMP = r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d+)"
COLOUR = re.compile(r"\x1b\[[\d;]*m")
RANK = re.compile(r"\[rank(\d+)\]")


class LineFormat(NamedTuple):
    """How a trainer tells of steps. `sign` is in each such line, torn ones too; `start` is told by every start."""

    pattern: re.Pattern[str]
    sign: str = ""
    first_step: int = 1
    held_out: re.Pattern[str] | None = None
    settings: re.Pattern[str] | None = None
    start: str | None = None
    times_held_out: bool = False
    """Whether a step's time holds that of the evaluation before it, so that it is none."""


TORCHTITAN = LineFormat(  # `MetricsProcessor.log` in torchtitan/components/metrics.py of pytorch/torchtitan
    re.compile(
        rf"(?:{STAMP}.*?)?\bstep: +(?P<step>\d+) +loss: +(?P<loss>\S+)(?: +grad_norm: +(?P<grad_norm>\S+))?"
        r" +memory: +(?P<memory_gib>[\d.]+)GiB.* tps:(?:.* tflops: +(?P<tflops>[\d.,]+))?"
    ),
    sign=" tps: ",
    held_out=re.compile(r"validate step: +(?P<step>\d+) +loss: +(?P<loss>\S+)"),
    settings=re.compile(
        r"global batch size (?P<global_batch_size>\d+),.*?sequence length (?P<seq_length>\d+)"
        r"(?:, total steps (?P<train_iters>\d+))?"
    ),
    start="Training starts at step",
)
NANOGPT = LineFormat(  # train.py of karpathy/nanoGPT, which counts from 0 and evaluates within the time of a step
    re.compile(rf"\biter (?P<step>\d+): loss (?P<loss>{NUMBER}), time (?P<step_time_ms>[\d.]+)ms"
               rf"(?:.*?, lr (?P<learning_rate>{NUMBER}))?"),
    sign="iter ",
    first_step=0,
    held_out=re.compile(rf"\bstep (?P<step>\d+): train loss {NUMBER}, val loss (?P<loss>{NUMBER})"),
    times_held_out=True,
)  # fmt: skip
MAXTEXT = LineFormat(  # metric_logger.py of AI-Hypercomputer/maxtext, which counts from 0
    re.compile(
        r"completed step: (?P<step>\d+), seconds: +(?P<step_time_s>[\d.]+), TFLOP/s(?:/device)?: +(?P<tflops>[\d.]+),"
        rf".*?\b(?:main_model_)?loss: (?P<loss>{NUMBER})"
    ),
    sign="completed step:",
    first_step=0,
    held_out=re.compile(rf"eval metrics after step: (?P<step>\d+), loss=(?P<loss>{NUMBER})"),
)


class StepLog(LogParser):
    """A reader that keeps a held-out loss until the line of its step, or of those around it, has come."""

    def __init__(self) -> None:
        super().__init__()
        self._last, self._held_out = 0, dict[int, float]()

    def _held(self, step: int, loss: float | None) -> list[LoggedStep]:
        if loss is None:
            return []
        self._held_out[step] = loss
        return self._due() if step == self._last else []

    def _due(self) -> list[LoggedStep]:
        due = [step for step in self._held_out if step <= self._last]
        return [LoggedStep(step=step, validation_loss=self._held_out.pop(step)) for step in due]


class LineLog(StepLog):
    """A log of which each step is one line of a format."""

    def __init__(self, form: LineFormat) -> None:
        super().__init__()
        self.form = form
        if not form.sign:  # a user's pattern
            self.values = "the line's values"
        self._rank: str | None = None
        self._said: dict[int, tuple] = {}

    def feed(self, line: str) -> list[LoggedStep]:
        form = self.form
        if "\x1b" in line:
            line = COLOUR.sub("", line)
        if form.held_out and (found := form.held_out.search(line)):
            return self._held(int(found["step"]) + 1 - form.first_step, number(found["loss"]))
        if form.sign in line:
            if found := form.pattern.search(line):
                return self._step(line, found.groupdict())
            self.skipped_lines += bool(form.sign)
        if form.start and form.start in line:
            self.starts += 1
            self._said = {}
        elif form.settings and (found := form.settings.search(line)):
            self.arguments |= {name: text for name, text in found.groupdict().items() if text}
        return []

    def _step(self, line: str, texts: dict[str, str | None]) -> list[LoggedStep]:
        values = {
            name: value for name, text in texts.items() if (value := number((text or "").replace(",", ""))) is not None
        }
        rank = found[1] if (found := RANK.search(line)) else None
        loss = values.get("loss")
        if loss is None or "step" not in values:
            self.skipped_lines += 1
            return []
        step, said = int(values["step"]) + 1 - self.form.first_step, (texts["loss"], texts.get("grad_norm"))
        # A pipeline's other stages print a loss of -1, and several ranks the same line, with other speeds.
        if loss < 0 or rank != (self._rank or rank) or self._said.get(step) == said:
            return []
        self._rank, self._said[step], self._last = rank, said, step
        seconds = values.get("step_time_s", values.get("step_time_ms", float("nan")) / 1000)
        timed = seconds > 0 and not (self.form.times_held_out and step in self._held_out)
        clock = self.unix_time(texts.get("time"))
        logged = LoggedStep(
            step=step,
            starts=self.starts,
            total_steps=whole(values.get("total_steps")),
            samples=whole(values.get("samples")),
            consumed_samples=whole(values.get("consumed_samples")),
            sequence_length=whole(number(self.arguments.get("seq_length"))),
            step_time_s=seconds if timed else None,
            clock_s=clock,
            time=clock,
            loss=loss,
            grad_norm=values.get("grad_norm"),
            learning_rate=values.get("learning_rate"),
            validation_loss=values.get("validation_loss"),
            memory_bytes=whole(values.get("memory_gib", 0.0) * 2**30),
            printed_flops_per_s=values["tflops"] * 1e12 if "tflops" in values else None,
        )
        return [logged, *self._due()]


class TrainerState(StepLog):
    """`trainer_state.json` of Hugging Face's Trainer, which writes each value on a line of its own, and no times.

    Source: `TrainerState.save_to_json` in src/transformers/trainer_callback.py of huggingface/transformers.
    """

    values = "the line's means"
    VALUE = re.compile(r'^\s*"(\w+)": (\S+?),?\s*$')

    def __init__(self) -> None:
        super().__init__()
        self._entry: dict[str, str] | None = None  # None before the history

    def feed(self, line: str) -> list[LoggedStep]:
        found = self.VALUE.match(line)
        if '"log_history": [' in line:
            self._entry = {}
        elif found and found[1] == "max_steps":
            self.arguments["train_iters"] = found[2]
        elif found and self._entry is not None:
            self._entry[found[1]] = found[2]
        elif line.strip().startswith("}") and self._entry:
            entry, self._entry = self._entry, {}
            return self._logged({name: value for name, text in entry.items() if (value := number(text)) is not None})
        return []

    def _logged(self, values: dict[str, float]) -> list[LoggedStep]:
        if "step" not in values or "loss" not in values:
            return self._held(int(values.get("step", 0)), values.get("eval_loss"))
        self._last = int(values["step"])
        rate, norm = values.get("learning_rate"), values.get("grad_norm")
        return [LoggedStep(step=self._last, loss=values["loss"], learning_rate=rate, grad_norm=norm), *self._due()]


FORMATS: dict[str, Callable[[], LogParser]] = {
    "megatron": MegatronLog,
    "nemo": NemoLog,
    "nxdt": NxdtLog,
    "torchtitan": partial(LineLog, TORCHTITAN),
    "nanogpt": partial(LineLog, NANOGPT),
    "maxtext": partial(LineLog, MAXTEXT),
    "hf-trainer": TrainerState,
}


def pattern_format(pattern: str) -> LineFormat:
    """Returns the format of lines in which a user's regular expression finds a step.

    Raises:
        ConfigError: it is none, lacks the groups `step` or `loss`, or has a group that is not in GROUPS.
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"--pattern {pattern!r} is no regular expression of Python: {error}.") from error
    groups = compiled.groupindex
    if unknown := next((name for name in groups if name not in GROUPS), None):
        raise ConfigError(f"--pattern: the group {unknown!r} is unknown. {suggestion(unknown, GROUPS)}")
    if missing := [name for name in ("step", "loss") if name not in groups]:
        example = r"it (?P<step>\d+) .*loss=(?P<loss>\S+)"
        raise ConfigError(f"--pattern: the group {missing[0]!r} is missing. For example: '{example}'.")
    return LineFormat(compiled)
