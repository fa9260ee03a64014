"""The trainers whose logs can be imported, an entry each: what finds in a line what it tells.

Another trainer needs an entry of FORMATS, or of its user a pattern only (`kit import --pattern`).
`logs.py` applies them. The tests try the entries on published log lines and cite them. A few
patterns follow the trainer's source only: torchtitan's validation loss, settings and start, and the
lines of OLMo-core, nanochat and DeepSpeed's pipelines.
"""

import dataclasses
import datetime
import re
from collections.abc import Callable

from cluster.record import ConfigError, suggestion

UNITS = {
    "step_time_ms": ("step_time_s", 1000.0),
    "memory_gib": ("memory_bytes", 2.0**-30),
    "memory_mib": ("memory_bytes", 2.0**-20),
    "tflops": ("flops_per_s", 1e-12),
}
"""By the name of a group: of which value it is, and how many of its units are one of that."""
WHOLE = frozenset(
    "step total_steps samples consumed_samples consumed_tokens sequence_length memory_bytes "
    "skipped_steps nan_steps".split()
)
"""Values that are counts."""
BOUNDED = WHOLE | {"step_time_s"}
"""Values that are not believed below 0 or beyond 2**63."""
OF_STEPS = ("time", "memory_mib", "sequence_length")
"""Groups of `Format.settings` that are a step's."""
GROUPS = tuple(
    "step loss total_steps samples consumed_samples step_time_s step_time_ms grad_norm "
    "learning_rate validation_loss memory_gib tflops time".split()
)
"""Of a user's pattern. Samples are sequences, of the step and since the start; TFLOP/s those of a
device; a time is as `2025-11-25 19:45:01,441`."""
NUMBER = r"[^\s,|]+"
BETWEEN = r".{0,300}?"
"""Pattern of what stands between two values of a line, where `.*` would be searched from each place
of a line to its end: time that grows with the square of the line's length."""
SECONDS = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
Texts = dict[str, str]
COUNTS = frozenset(
    "step total_steps samples consumed_samples consumed_tokens sequence_length".split()
)
"""Whole-number values that are used only if the log prints all their digits."""
SUFFIXED = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s?([^\d\s]*)")
"""A number, and the suffix or unit behind it."""
FACTORS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "%": 0.01}
"""Factor by which a suffix multiplies the number before it."""
SECONDS_OF = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
"""Length of a unit of time in seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """Regular expressions for the log lines of one trainer.

    The name of a group is the name of the value that it matches: a value of a step, or a setting
    under its name in Megatron.
    """

    name: str
    sign: str
    """Pattern that matches in every line about a step, also in a torn line."""
    line: str
    """Pattern of a step and its values. The text of its group `fields` is searched by the pattern
    `fields`."""
    fields: str = "(?!)"
    """Pattern of a single value. The only group that takes part in a match names the value."""
    first_step: int = 1
    """Number that the trainer gives to its first step."""
    repeats: tuple[str, ...] = ("loss", "grad_norm")
    """Groups by which a line that was printed twice is recognised: they are equal in both."""
    held_out: str = "(?!)"
    """Pattern of a step and its validation loss."""
    settings: tuple[str, ...] = ()
    """Patterns that are searched in every line. A group `name` beside a group `value` is a setting.
    The groups in OF_STEPS are values of the next step or of all later steps. A match of `start`
    means that the trainer was started, a match of `end` that training is done."""
    closes: str = ""
    """Pattern of the last line of a text that spans several lines. The lines are read as one."""
    values: str = "the last step's values"
    """Meaning of the values in a line that stands for several steps, in words."""
    counts_before: bool = False
    """Whether consumed samples leave out the samples of the line's own step."""
    times_held_out: bool = False
    """Whether a step's time includes the evaluation before the step. Such a time is not used."""
    amend: Callable[[Texts, Texts], None] = lambda texts, before: None
    """Function that corrects the texts of a line, given the texts of the line before. The function
    sets `step` to "" if the line does not end an optimizer step."""
    gathers: bool = False
    """Whether the values of a step are printed on several lines, from a line with `step` to the
    next line with `step`. The pattern `fields` is searched in each of these lines."""
    counts_lines: bool = False
    """Whether the lines have no step, so that the user gives the number of steps per line."""
    is_fallback: bool = False
    """Whether other trainers print such lines beside lines in a format of their own. The other
    format is preferred."""


def number(text: str | None, unit: str = "") -> float | None:
    """Returns the number that a word of a log stands for, or None if it stands for none: `1,234`,
    `2.1e+4`, `3.4M`, `12.3%`.

    With `unit`, "s" or "ms", the word is a time in this or another unit, or a rate: `850ms`,
    `1.2s/it`, `3.1it/s`. The result is a time in `unit`.
    """
    word = (text or "").replace(",", "")
    try:
        return float(word)
    except ValueError:
        pass
    found = SUFFIXED.fullmatch(word.strip())
    if found is None:
        return None
    value = float(found[1])
    suffix = found[2]
    if suffix in FACTORS:
        return value * FACTORS[suffix]
    if not unit:
        return None
    if suffix in ("it/s", "steps/s", "step/s"):
        seconds = 1 / value if value else None
    else:
        per_step = suffix.removesuffix("/it").removesuffix("/iter").removesuffix("/step")
        seconds = value * SECONDS_OF[per_step] if per_step in SECONDS_OF else None
    return None if seconds is None else seconds / SECONDS_OF[unit]


def lacks_digits(text: str) -> bool:
    """Returns whether the last digits of a whole number are not printed, as in `3.1e+4` or `85.8G`,
    so that several numbers are possible.
    """
    found = SUFFIXED.fullmatch(text.replace(",", "").strip())
    if found is None:
        return False
    digits, _, power = found[1].lower().partition("e")
    decimals = len(digits.partition(".")[2])
    unit = FACTORS.get(found[2], 1.0) * 10.0 ** (int(power or 0) - decimals)
    return unit > 1.0


class UnsureStepError(ValueError):
    """The step of a line is unknown: too few digits are printed, or another number contradicts."""


def by_name(before: str, shape: str, names: str) -> str:
    """Returns a pattern that finds each of the values `ours=theirs`; `shape` takes both names."""
    pairs = [pair.partition("=") for pair in names.split(", ")]
    return f"{before}(?:{'|'.join(shape % (theirs or ours, ours) for ours, _, theirs in pairs)})"


def total_of_iteration(texts: Texts, _: Texts) -> None:
    """Makes NeMo's iteration a number of steps: older releases count it, and the last, from 0."""
    ahead = int(texts["step"]) + 1 - int(texts["n"])
    if texts["epoch"] == "0" and ahead in (0, 1):
        texts["total_steps"] = str(int(texts["total"]) + ahead)


def iso_time(texts: Texts, _: Texts) -> None:
    """Rewrites a time that Python's `ctime` wrote."""
    texts["time"] = datetime.datetime.strptime(texts["time"], "%a %b %d %H:%M:%S %Y").isoformat()


def from_rate(texts: Texts, _: Texts) -> None:
    """Derives the time of a step from the steps per second, unless the line has a clock."""
    rate = number(texts.pop("steps_per_s", ""))
    if rate and "time" not in texts and "clock_s" not in texts:
        texts.setdefault("step_time_s", str(1 / rate))


def composer_step(texts: Texts, before: Texts) -> None:
    """Converts the batch number within an epoch to a step of the training, and derives the step's
    time.
    """
    if "epoch" in texts and "total_steps" in texts:
        total = int(texts.pop("total_steps"))
        texts["step"] = str((int(texts["epoch"]) - 1) * total + int(texts["step"]))
    from_rate(texts, before)


def micro_steps(texts: Texts, before: Texts) -> None:
    """Adds the times of the micro-steps of an optimizer step, of which each has a line.

    The time of the optimizer step is unknown if the line of a micro-step is missing.
    """
    total_ms = float(texts["iter_ms"])
    is_first = bool(before.get("is_step"))
    is_known = is_first or "micro_ms" in before
    if is_known and int(texts["iter"]) == int(before["iter"]) + 1:
        if not is_first:
            total_ms += float(before["micro_ms"])
        texts["micro_ms"] = str(total_ms)
        if texts.get("is_step"):
            texts["step_time_ms"] = texts["micro_ms"]
    if not texts.get("is_step"):
        texts["step"] = ""


def clock_of_elapsed(texts: Texts, _: Texts) -> None:
    """Converts the elapsed time, as in `1 day, 2:03:04`, to a clock in seconds."""
    days, clock = texts.pop("elapsed", "").rpartition(" day")[::2]
    parts = clock.lstrip("s, ").split(":")
    if all(part.isdigit() for part in parts):
        seconds = sum(60**i * int(part) for i, part in enumerate(reversed(parts)))
        texts["clock_s"] = str(seconds + 86_400 * int(days or 0))


def step_of_bar(texts: Texts, before: Texts) -> None:
    """Restores the digits of a step that tqdm has rounded to three: 1000 and 1004 are both 1e+3.

    The step is then the bar's own count minus the validation batches that the bar counts too. A bar
    that was drawn again gets the time of the first drawing.

    Raises:
        UnsureStepError: The count, rounded, is not the printed step. This happens in an excerpt
            that begins after batches of another kind.
    """
    clock = reversed(texts["clock"].split(":"))
    texts["clock_s"] = str(sum(60**i * int(part or 0) for i, part in enumerate(clock)))
    texts["others"] = before.get("others", "0")
    if "n" in texts:
        drawn = int(texts["epoch"]) * int(texts["total_steps"]) + int(texts["n"]) - 1
        if "e" in texts["step"]:
            step = drawn - int(texts["others"])
            printed = float(texts["step"])
            half = 0.5 * 10 ** (int(texts["step"].partition("e")[2]) - 2)
            if abs(step - printed) > half + 1:
                raise UnsureStepError(
                    f"global_step={texts['step']} stands for {printed - half:,.0f} to"
                    f" {printed + half:,.0f}, but the bar's own count is {step:,}, which includes"
                    " other batches. Give the whole log from its first step on, where all digits"
                    " are printed"
                )
            texts["step"] = str(step)
        texts["others"] = str(drawn - int(float(texts["step"])))
    if all(texts.get(name) == before.get(name) for name in ("step", "loss", "grad_norm")):
        texts["clock_s"] = before["clock_s"]
    for name in ("step", "consumed_samples"):
        if "e" in texts.get(name, ""):
            del texts[name]


FIT_ENDED = r"(?P<end>`Trainer\.fit` stopped: `max_\w+=\d+` reached)"
BARRED = r"%s\s*+:\s*+(?P<%s>[^|\s]++)\s*+(?=\||$)"
FORMATS = (
    # `training_log`: megatron/training.py of NVIDIA/Megatron-LM and microsoft/Megatron-DeepSpeed,
    # megatron/logging.py of EleutherAI/gpt-neox, whose arguments have other names; logs of
    # spyysalo/lumi-llm-scaling and sajal-vt/Megatron-DeepSpeed-ORNL
    Format(
        name="megatron",
        sign=r"iteration\s+\d+/\s*(?:\d+|infinity)\s*\|",
        line=r"iteration\s+(?P<step>\d+)/\s*(?P<total_steps>\d+|infinity)\s*"
        r"(?P<fields>\|(?=.*elapsed time per iteration ).*\|)\s*$",
        fields=by_name(
            r"\|\s*+",
            BARRED,
            r"step_time_s=elapsed time per iteration \(s\), samples=global batch size, "
            r"step_time_ms=elapsed time per iteration \(ms\), samples_per_s=samples per second, "
            r"consumed_samples=consumed samples, consumed_tokens=consumed tokens, "
            r"sequence_length=actual seqlen, learning_rate=learning rate, loss_scale=loss scale, "
            r"nan_steps=number of nan iterations, skipped_steps=number of skipped iterations, "
            r"grad_norm=grad norm, loss=[^|:]*?loss, tflops=[^|:]*?TFLOP[^|:]{0,20}",
        ),
        repeats=("loss", "grad_norm", "step_time_s", "step_time_ms", "consumed_samples"),
        held_out=r"validation (?:loss|results) at iteration (?P<step>\d+)(?! on test set)\b"
        rf"{BETWEEN}\blm[ _]loss value: (?P<loss>\S+) \|",
        settings=(
            "(?P<start>- arguments -)",
            r"(?P<end>\[after training is done\])",
            r"(?P<end>iteration\s+(\d+)/\s*\2\s*\|)",
            r"^(?:\s*\d+:|\[\w+\]:)?\s+(?P<name>\w+) \.{2,} "
            r"(?!.*\.\.(?:default|updated)\s*$)(?P<value>.*)",
            r"\[config\.py:\d+:print\w*\]\s+train_micro_batch_size_per_gpu[ .]+\s"
            r"(?P<engine_micro_batch_size>\S+)\s*$",
            r"padded vocab \(size: \d+\) with \d+ dummy tokens "
            r"\(new size: (?P<padded_vocab_size>\d+)\)",
            rf"memory \(MB\) \|{BETWEEN}max allocated: (?P<memory_mib>\d+(?:\.\d+)?)",
            rf"^(?:.{{0,61}}?|.*? datetime: )(?P<time>{SECONDS})",
        ),
        values="the line's means",
    ),
    # nemo/lightning/pytorch/callbacks/progress_printer.py of NVIDIA/NeMo; lines in
    # NVIDIA/dgxc-benchmarking
    Format(
        name="nemo",
        sign="Training epoch ",
        line=r"Training epoch (?P<epoch>\d+), iteration (?P<n>\d+)/(?P<total>\d+) "
        r"(?P<fields>\|.*)",
        fields=by_name(
            r"\|\s*+",
            BARRED,
            "step=global_step, loss=reduced_train_loss, step_time_s=train_step_timing in s, "
            "samples=global_batch_size, consumed_samples, learning_rate=lr, "
            "grad_norm=grad(?:ient)?_norm, validation_loss=val_loss, "
            "memory_bytes=peak_memory_usage, samples_per_s=throughput",
        ),
        first_step=0,
        repeats=("loss", "grad_norm", "step_time_s"),
        settings=(FIT_ENDED,),
        amend=total_of_iteration,
    ),
    # Progress bars of NeuronX Distributed Training, NeMo on Lightning: AWS Neuron documentation,
    # NxDT tutorials; `log_metrics` of aws-neuron/neuronx-distributed-training
    Format(
        name="nxdt",
        sign="reduced_train_loss=",
        line=r"Epoch (?P<epoch>\d+):(?:(?!Epoch ).)*?"
        r"(?:(?P<n>\d{1,12})/(?P<total_steps>\d{1,12}) )?"
        r"\[(?P<clock>[\d:]++)(?:<[^,\]\[]*+)?(?P<fields>,[^\]]*\])",
        fields=by_name(
            r",\s*",
            r"%s=(?P<%s>[^,\s\]]+)",
            "step=global_step, loss=reduced_train_loss, step_time_s=train_step_timing in s, "
            "consumed_samples, learning_rate=lr, grad_norm=grad(?:ient)?_norm, "
            "validation_loss=val_loss, samples_per_s=throughput",
        ),
        first_step=0,
        repeats=("loss", "grad_norm", "clock_s"),
        settings=(FIT_ENDED,),
        counts_before=True,
        amend=step_of_bar,
    ),
    Format(  # `Logger.log` of awslabs/HLAT, an example of NxD
        name="nxdt",
        sign="step_loss : ",
        line=r"LOG (?P<time>\w{3} \w{3} +\d+ [\d:]{8} \d{4}) - \(\d+, (?P<step>\d+)\)"
        r"(?P<fields>.* throughput : .*)$",
        fields=by_name(
            " ",
            r"%s : (?P<%s>\S+)",
            "loss=step_loss, grad_norm=grad-norm, learning_rate, samples_per_s=throughput",
        ),
        amend=iso_time,
    ),
    Format(  # `MetricsProcessor.log` in torchtitan/components/metrics.py of pytorch/torchtitan
        name="torchtitan",
        sign=" tps: ",
        line=rf"(?:(?P<time>{SECONDS}[,.]\d{{1,9}}){BETWEEN})?\bstep: +(?P<step>\d+) +"
        r"loss: +(?P<loss>\S+)(?: +grad_norm: +(?P<grad_norm>\S+))? +"
        rf"memory: +(?P<memory_gib>[\d.]+)GiB{BETWEEN} tps:"
        rf"(?:{BETWEEN} tflops: +(?P<tflops>[\d.,]+))?",
        held_out=r"validate step: +(?P<step>\d+) +loss: +(?P<loss>\S+)",
        settings=(
            rf"global batch size (?P<global_batch_size>\d+),{BETWEEN}"
            r"sequence length (?P<sequence_length>\d+)(?:, total steps (?P<train_iters>\d+))?",
            "(?P<start>Training starts at step)",
        ),
    ),
    Format(  # train.py of karpathy/nanoGPT, which evaluates within the time of a step
        name="nanogpt",
        sign="iter ",
        line=rf"\biter (?P<step>\d+): loss (?P<loss>{NUMBER}), time (?P<step_time_ms>[\d.]+)ms"
        rf"(?:{BETWEEN}, lr (?P<learning_rate>{NUMBER}))?",
        first_step=0,
        held_out=rf"\bstep (?P<step>\d+): train loss {NUMBER}, val loss (?P<loss>{NUMBER})",
        times_held_out=True,
    ),
    Format(  # metric_logger.py of AI-Hypercomputer/maxtext
        name="maxtext",
        sign="completed step:",
        line=r"completed step: (?P<step>\d+), seconds: +(?P<step_time_s>[\d.]+), TFLOP/s"
        rf"(?:/device)?: +(?P<tflops>[\d.]+),{BETWEEN}\b(?:main_model_)?loss: (?P<loss>{NUMBER})",
        first_step=0,
        held_out=rf"eval metrics after step: (?P<step>\d+), loss=(?P<loss>{NUMBER})",
    ),
    # `TrainerState.save_to_json`, which has no times, in src/transformers/trainer_callback.py of
    # huggingface/transformers
    Format(
        name="hf-trainer",
        sign=r'(?m)^[ \t]*+"loss": ',
        line="(?s)(?P<fields>.+)",
        fields=by_name('"', r'%s": (?P<%s>[^,\s}]+)', "step, loss, learning_rate, grad_norm"),
        held_out=r'(?s)"eval_loss": (?P<loss>[^,\s]++)(?:(?!"eval_loss": ).)*"step": (?P<step>\d+)',
        settings=(r'"max_steps": (?P<train_iters>\d+)',),
        closes=r"\s*+}",
        values="the line's means",
    ),
    Format(  # `ProgressCallback.on_log` of transformers; also TRL, axolotl and LLaMA-Factory
        name="hf-trainer",
        sign=r"\{'loss': ",
        line=r"(?P<fields>\{'loss': [^{}]*\})",
        fields=by_name("'", r"%s': '?(?P<%s>[^,'\s}]+)", "loss, learning_rate, grad_norm, epoch"),
        counts_lines=True,
        values="the line's means",
    ),
    Format(  # trainer_log.jsonl of hiyouga/LLaMA-Factory: `LogCallback.on_log`
        name="llama-factory",
        sign=r'"current_steps": ',
        line=r'(?P<fields>\{"current_steps": (?=[^{}]*"loss": )[^{}]*+\})',
        fields=by_name(
            '"',
            r'%s": "?(?P<%s>[^"}]+?)"?(?=, "|\})',
            "step=current_steps, total_steps, loss, learning_rate=(?:lr|learning_rate),"
            " elapsed=elapsed_time",
        ),
        amend=clock_of_elapsed,
        values="the line's means",
    ),
    Format(  # `train_step_logs` in src/nanotron/trainer.py of huggingface/nanotron, issues 23, 390
        name="nanotron",
        sign=r"iteration: \d+ / \d+ \|",
        line=r"iteration: (?P<step>\d+) / (?P<total_steps>\d+) (?P<fields>\|.*)",
        fields=by_name(
            r"\|\s*+",
            BARRED,
            "step_time_ms=elapsed_time_per_iteration_ms, samples=global_batch_size,"
            " consumed_samples, consumed_tokens, loss=lm_loss, learning_rate=lr, grad_norm,"
            " tflops=hardware_tflops_per_gpu",
        ),
    ),
    # `ConsoleLoggerCallback` of allenai/OLMo-core and `Trainer.log_metrics_to_console` of OLMo
    Format(
        name="olmo",
        sign=r"\[step=\d+/[\d?]+(?:,epoch=|\])",
        line=rf"(?:(?P<time>{SECONDS}(?:[.,]\d{{1,9}})?){BETWEEN})?"
        r"\[step=(?P<step>\d+)/(?P<total_steps>[\d?]+)(?:,epoch=[^\]]{0,99})?\]",
        fields=by_name(
            r"(?:^|\s)",
            r"%s=(?P<%s>\S+)",
            r"loss=train/(?:CE loss|CrossEntropyLoss), grad_norm=optim/total[_ ]grad[_ ]norm,"
            r" learning_rate=optim/(?:LR|learning_rate)[^=]*,"
            r" steps_per_s=throughput/device/(?:BPS|batches_per_second)",
        ),
        gathers=True,
        amend=from_rate,
    ),
    Format(  # `ConsoleLogger` of mosaicml/composer, pull request 1884; also llm-foundry
        name="composer",
        sign=r"\[batch=\d+(?:/\d+)?\]:",
        line=r"(?:\[epoch=(?P<epoch>\d+)\])?\[batch=(?P<step>\d+)(?:/(?P<total_steps>\d+))?\]:",
        fields=by_name(
            r"(?:^|\s)Train ",
            r"%s: (?P<%s>\S+)",
            r"loss=loss/train/total, grad_norm=l2_norm/grad/global, learning_rate=lr-\w+/group0,"
            r" steps_per_s=throughput/batches_per_sec, clock_s=wall_clock/train",
        ),
        gathers=True,
        amend=composer_step,
    ),
    # litgpt/pretrain.py of Lightning-AI/litgpt, issues 689, 1042 and 1607. A micro-step has a line.
    Format(
        name="litgpt",
        sign=r"iter \d+ (?:\| )?step \d+(?::| \|) loss",
        line=r"iter (?P<iter>\d+) (?:\| )?step (?P<step>\d+)(?::| \|) loss(?: train)?(?: \(curr\))?"
        rf":? (?P<loss>[^\s,]+),{BETWEEN}(?:iter|train) time: (?P<iter_ms>[\d.]+) ?ms"
        r"(?P<is_step> \((?:step|opt\.step|optimizer\.step)\))?",
        amend=micro_steps,
    ),
    Format(  # scripts/base_train.py of karpathy/nanochat
        name="nanochat",
        sign=r"\bstep \d+/\d+ \(",
        line=r"\bstep (?P<step>\d+)/(?P<total_steps>\d+) \([\d.]+%\) \| loss: (?P<loss>\S+) \|"
        rf"{BETWEEN}\bdt: (?P<step_time_ms>[\d.]+)ms",
        first_step=0,
    ),
    Format(  # `PipelineEngine.train_batch` in deepspeed/runtime/pipe/engine.py
        name="deepspeed",
        sign=r"\bsteps: \d+ loss: ",
        line=r"\bsteps: (?P<step>\d+) loss: (?P<loss>\S+) iter time \(s\): (?P<step_time_s>[\d.]+)"
        r" samples/sec: (?P<samples_per_s>[\d.]+)",
        is_fallback=True,
    ),
    Format(  # `DeepSpeedEngine._report_progress` in deepspeed/runtime/engine.py: no loss
        name="deepspeed",
        sign=r"\[Rank 0\] step=\d+, skipped=",
        line=rf"\[(?P<time>{SECONDS},\d{{1,9}})\]{BETWEEN}\[Rank 0\] step=(?P<step>\d+),"
        r" skipped=\d+, lr=\[(?P<learning_rate>[^,\]]+)",
        repeats=("learning_rate",),
        is_fallback=True,
    ),
)
NAMES = tuple(dict.fromkeys(form.name for form in FORMATS))


def pattern_format(pattern: str, gathers: bool = False) -> Format:
    """Returns the format of lines in which a user's regular expression finds a step. With `gathers`
    the values of a step are on several lines.

    Raises:
        ConfigError: it is none, lacks the groups `step` or `loss`, or has a group that is not in
            GROUPS.
    """
    try:
        groups = re.compile(pattern).groupindex
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"--pattern {pattern!r} is no regular expression of Python: {error}."
        ) from error
    if unknown := next((name for name in groups if name not in GROUPS), ""):
        raise ConfigError(
            f"--pattern: the group {unknown!r} is unknown. {suggestion(unknown, GROUPS)}"
        )
    if missing := next((name for name in ("step", "loss") if name not in groups), ""):
        example = r"For example: 'it (?P<step>\d+) .*loss=(?P<loss>\S+)'."
        raise ConfigError(f"--pattern: the group {missing!r} is missing. {example}")
    return Format(
        name="pattern", sign=pattern, line=pattern, values="the line's values", gathers=gathers
    )
