"""Formats of the logs that can be imported: for each trainer, the patterns that find values in its
lines.

Another trainer needs an entry in FORMATS, or a pattern from the user (`kit import --pattern`).
`logs.py` applies the entries. The tests apply them to published log lines and cite the sources of
these lines. A few patterns follow only the trainer's source code: torchtitan's validation loss,
settings and start, and the lines of OLMo-core, nanochat and DeepSpeed's pipelines.
"""

import dataclasses
import datetime
import re
from collections.abc import Callable

from kit.interop.logs.numbers import UnsureStepError, parse_number

Texts = dict[str, str]
"""Dict from the name of a value to its text, as a line of the log prints it."""
SETTINGS_OF_STEPS = ("time", "memory_mib", "sequence_length")
"""Named groups in the patterns of settings whose matches are values of steps, not settings of the
whole run."""
NOTHING = "(?!)"
"""Pattern that never matches, for values that a trainer does not print."""
NUMBER = r"[^\s,|]+"
BETWEEN = r".{0,300}?"
"""Pattern of the text between two values of a line. Its length is limited: with `.*`, the time of a
search would grow with the square of the line's length."""
SECONDS = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


def keep_texts(texts: Texts, before: Texts) -> None:
    """Changes nothing. This function is the default of `Format.amend`, the function that corrects
    the texts of a line.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """Regular expressions for the log lines of one trainer.

    The name of a group is the name of the value that it matches: a value of a step, or a setting
    under its name in Megatron. `kit.interop.logs.numbers.UNITS` has the names with other units.
    """

    name: str
    sign: str
    """Pattern that is found in every line about a step, also in a torn line (incomplete, or mixed
    with another line)."""
    line: str
    """Pattern of a line with a step and its values. If the pattern has a group `fields`, further
    values are searched in the text of this group."""
    fields: str = NOTHING
    """Pattern of one value in the text that the group `fields` of the pattern `line` matches. Each
    match sets one named group. The name of the group is the name of the value."""
    first_step: int = 1
    """Number that the trainer prints for its first optimizer step. The kit counts from 1."""
    repeats: tuple[str, ...] = ("loss", "grad_norm")
    """Names of values that are compared with an earlier line of the same step. If all are equal,
    the line was printed twice, and the step is not recorded again."""
    validation: str = NOTHING
    """Pattern of a line with a validation loss. Its groups are `step` and `loss`."""
    settings: tuple[str, ...] = ()
    """Patterns that are searched in every line. If a match has the groups `name` and `value`, it is
    a setting of that name. The groups in SETTINGS_OF_STEPS are values of the next step or of all
    later steps. A match of `start` means that the trainer was started, a match of `end` that
    training is done."""
    closes: str = ""
    """Pattern of the last line of a text that spans several lines, such as a JSON object. All lines
    of the text are read as one line."""
    values: str = "the last step's values"
    """Phrase for the note on a log with one line for several steps. It says whether the line prints
    means over its steps or values of its last step."""
    counts_before: bool = False
    """Whether the consumed samples that a line prints do not include the samples of the line's own
    step."""
    times_validation: bool = False
    """Whether the printed time of a step includes an evaluation, if there was one before the step.
    Such times are not used."""
    amend: Callable[[Texts, Texts], None] = keep_texts
    """Function (texts of a line, texts of the line before) that corrects the texts of a line in
    place. The function sets `step` to "" if the line does not end an optimizer step."""
    gathers: bool = False
    """Whether the values of a step are printed on several lines, from a line with `step` to the
    next line with `step`. The pattern `fields` is searched in each of these lines."""
    counts_lines: bool = False
    """Whether the lines have no step, so that the user gives the number of steps per line."""
    is_fallback: bool = False
    """Whether other trainers print lines of this format beside lines of their own format. Their own
    format is preferred."""

    def is_about_step(self, line: str) -> bool:
        """Returns whether a line of a log is about a step, even if the line is torn (incomplete or
        mixed).
        """
        return re.search(self.sign, line) is not None

    def matches(self, line: str) -> list[re.Match[str]]:
        """Returns the matches of the pattern `line` in a line of a log."""
        return list(re.finditer(self.line, line))


def any_value(before: str, shape: str, labels: dict[str, str]) -> str:
    """Returns a pattern that finds each of several values.

    Args:
        before: pattern of the text before a value.
        shape: pattern of a value, with `%(label)s` for its label and `%(name)s` for its name.
        labels: dict from the name of a value to the pattern of the label that the trainer prints.
    """
    values = [shape % {"label": label, "name": name} for name, label in labels.items()]
    return f"{before}(?:{'|'.join(values)})"


# Corrections --------------------------------------------------------------------------------------


def total_of_iteration(texts: Texts, before: Texts) -> None:
    """Converts the total number of iterations that NeMo prints to a number of steps. Older releases
    count iterations from 0, so their total is the number of the last iteration.
    """
    ahead = int(texts["step"]) + 1 - int(texts["n"])
    if texts["epoch"] == "0" and ahead in (0, 1):
        texts["total_steps"] = str(int(texts["total"]) + ahead)


def iso_time(texts: Texts, before: Texts) -> None:
    """Converts the time of a line from the format of Python's `ctime` to ISO 8601."""
    texts["time"] = datetime.datetime.strptime(texts["time"], "%a %b %d %H:%M:%S %Y").isoformat()


def from_rate(texts: Texts, before: Texts) -> None:
    """Derives the time of a step from the steps per second that a line prints, unless the line has
    a step time, a time stamp or a clock.
    """
    rate = parse_number(texts.pop("steps_per_s", ""))
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
    """Adds up the times of the micro-steps of an optimizer step. Each micro-step has its own line.

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


def clock_seconds(clock: str) -> int:
    """Returns the elapsed seconds that a clock such as `2:03:04` or `03:04` shows."""
    seconds = 0
    for part in clock.split(":"):
        seconds = 60 * seconds + int(part or 0)
    return seconds


def clock_of_elapsed(texts: Texts, before: Texts) -> None:
    """Converts the elapsed time, as in `1 day, 2:03:04`, to a clock in seconds."""
    days, _, rest = texts.pop("elapsed", "").rpartition(" day")
    clock = rest.lstrip("s, ")
    if all(part.isdigit() for part in clock.split(":")):
        texts["clock_s"] = str(clock_seconds(clock) + 86_400 * int(days or 0))


def step_of_bar(texts: Texts, before: Texts) -> None:
    """Restores all digits of a step in a progress bar: tqdm prints three digits, so 1000 and 1004
    are both 1e+3.

    The progress bar also prints its own number of batches, with all digits. The step is this number
    minus the batches that are no training steps, for example validation batches. If tqdm prints a
    bar twice, the time of the first print is used.

    Raises:
        UnsureStepError: The number of batches, rounded, is not the printed step. This happens in an
            excerpt that begins after batches of another kind.
    """
    texts["clock_s"] = str(clock_seconds(texts["clock"]))
    texts["others"] = before.get("others", "0")
    if "n" in texts:
        drawn = int(texts["epoch"]) * int(texts["total_steps"]) + int(texts["n"]) - 1
        if "e" in texts["step"]:
            texts["step"] = _step_of_count(texts["step"], drawn, int(texts["others"]))
        texts["others"] = str(drawn - int(float(texts["step"])))
    if all(texts.get(name) == before.get(name) for name in ("step", "loss", "grad_norm")):
        texts["clock_s"] = before["clock_s"]
    for name in ("step", "consumed_samples"):
        if "e" in texts.get(name, ""):
            del texts[name]


def _step_of_count(printed: str, count: int, others: int) -> str:
    """Returns the exact step that a progress bar has rounded to `printed`. `count` is the number of
    batches that the bar has counted. `others` is the number of these batches that are no training
    steps.

    Raises:
        UnsureStepError: The step does not fit `printed`.
    """
    step = count - others
    middle = float(printed)
    half = 0.5 * 10 ** (int(printed.partition("e")[2]) - 2)
    if abs(step - middle) > half + 1:
        raise UnsureStepError(
            f"global_step={printed} stands for {middle - half:,.0f} to {middle + half:,.0f}, but"
            f" the bar's own count is {step:,}, which includes other batches. Give the whole log"
            " from its first step on, where all digits are printed"
        )
    return str(step)


# Formats ------------------------------------------------------------------------------------------

FIT_ENDED = r"(?P<end>`Trainer\.fit` stopped: `max_\w+=\d+` reached)"
"""Pattern of the line with which Lightning ends training."""
COLUMN = r"%(label)s\s*+:\s*+(?P<%(name)s>[^|\s]++)\s*+(?=\||$)"
"""Template of a pattern for a label and its value between vertical bars, as in `| loss: 2.5 |`."""
FORMATS = (
    # Sources: `training_log` in megatron/training.py of NVIDIA/Megatron-LM and
    # microsoft/Megatron-DeepSpeed, and in megatron/logging.py of EleutherAI/gpt-neox, whose
    # arguments have other names. Logs of spyysalo/lumi-llm-scaling and
    # sajal-vt/Megatron-DeepSpeed-ORNL.
    Format(
        name="megatron",
        sign=r"iteration\s+\d+/\s*(?:\d+|infinity)\s*\|",
        line=r"iteration\s+(?P<step>\d+)/\s*(?P<total_steps>\d+|infinity)\s*"
        r"(?P<fields>\|(?=.*elapsed time per iteration ).*\|)\s*$",
        fields=any_value(
            r"\|\s*+",
            COLUMN,
            {
                "step_time_s": r"elapsed time per iteration \(s\)",
                "samples": "global batch size",
                "step_time_ms": r"elapsed time per iteration \(ms\)",
                "samples_per_s": "samples per second",
                "consumed_samples": "consumed samples",
                "consumed_tokens": "consumed tokens",
                "sequence_length": "actual seqlen",
                "learning_rate": "learning rate",
                "loss_scale": "loss scale",
                "nan_steps": "number of nan iterations",
                "skipped_steps": "number of skipped iterations",
                "grad_norm": "grad norm",
                "loss": "[^|:]*?loss",
                "tflops": "[^|:]*?TFLOP[^|:]{0,20}",
            },
        ),
        repeats=("loss", "grad_norm", "step_time_s", "step_time_ms", "consumed_samples"),
        validation=r"validation (?:loss|results) at iteration (?P<step>\d+)(?! on test set)\b"
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
    # Sources: nemo/lightning/pytorch/callbacks/progress_printer.py of NVIDIA/NeMo, and lines in
    # NVIDIA/dgxc-benchmarking.
    Format(
        name="nemo",
        sign="Training epoch ",
        line=r"Training epoch (?P<epoch>\d+), iteration (?P<n>\d+)/(?P<total>\d+) "
        r"(?P<fields>\|.*)",
        fields=any_value(
            r"\|\s*+",
            COLUMN,
            {
                "step": "global_step",
                "loss": "reduced_train_loss",
                "step_time_s": "train_step_timing in s",
                "samples": "global_batch_size",
                "consumed_samples": "consumed_samples",
                "learning_rate": "lr",
                "grad_norm": "grad(?:ient)?_norm",
                "validation_loss": "val_loss",
                "memory_bytes": "peak_memory_usage",
                "samples_per_s": "throughput",
            },
        ),
        first_step=0,
        repeats=("loss", "grad_norm", "step_time_s"),
        settings=(FIT_ENDED,),
        amend=total_of_iteration,
    ),
    # Progress bars of NeuronX Distributed Training (NxDT), which uses NeMo on Lightning. Sources:
    # NxDT tutorials in the AWS Neuron documentation, and `log_metrics` of
    # aws-neuron/neuronx-distributed-training.
    Format(
        name="nxdt",
        sign="reduced_train_loss=",
        line=r"Epoch (?P<epoch>\d+):(?:(?!Epoch ).)*?"
        r"(?:(?P<n>\d{1,12})/(?P<total_steps>\d{1,12}) )?"
        r"\[(?P<clock>[\d:]++)(?:<[^,\]\[]*+)?(?P<fields>,[^\]]*\])",
        fields=any_value(
            r",\s*",
            r"%(label)s=(?P<%(name)s>[^,\s\]]+)",
            {
                "step": "global_step",
                "loss": "reduced_train_loss",
                "step_time_s": "train_step_timing in s",
                "consumed_samples": "consumed_samples",
                "learning_rate": "lr",
                "grad_norm": "grad(?:ient)?_norm",
                "validation_loss": "val_loss",
                "samples_per_s": "throughput",
            },
        ),
        first_step=0,
        repeats=("loss", "grad_norm", "clock_s"),
        settings=(FIT_ENDED,),
        counts_before=True,
        amend=step_of_bar,
    ),
    # Source: `Logger.log` of awslabs/HLAT, an example of NeuronX Distributed (NxD).
    Format(
        name="nxdt",
        sign="step_loss : ",
        line=r"LOG (?P<time>\w{3} \w{3} +\d+ [\d:]{8} \d{4}) - \(\d+, (?P<step>\d+)\)"
        r"(?P<fields>.* throughput : .*)$",
        fields=any_value(
            " ",
            r"%(label)s : (?P<%(name)s>\S+)",
            {
                "loss": "step_loss",
                "grad_norm": "grad-norm",
                "learning_rate": "learning_rate",
                "samples_per_s": "throughput",
            },
        ),
        amend=iso_time,
    ),
    # Source: `MetricsProcessor.log` in torchtitan/components/metrics.py of pytorch/torchtitan.
    Format(
        name="torchtitan",
        sign=" tps: ",
        line=rf"(?:(?P<time>{SECONDS}[,.]\d{{1,9}}){BETWEEN})?\bstep: +(?P<step>\d+) +"
        r"loss: +(?P<loss>\S+)(?: +grad_norm: +(?P<grad_norm>\S+))? +"
        rf"memory: +(?P<memory_gib>[\d.]+)GiB{BETWEEN} tps:"
        rf"(?:{BETWEEN} tflops: +(?P<tflops>[\d.,]+))?",
        validation=r"validate step: +(?P<step>\d+) +loss: +(?P<loss>\S+)",
        settings=(
            rf"global batch size (?P<global_batch_size>\d+),{BETWEEN}"
            r"sequence length (?P<sequence_length>\d+)(?:, total steps (?P<train_iters>\d+))?",
            "(?P<start>Training starts at step)",
        ),
    ),
    # Source: train.py of karpathy/nanoGPT. The printed time of a step includes an evaluation before
    # it.
    Format(
        name="nanogpt",
        sign="iter ",
        line=rf"\biter (?P<step>\d+): loss (?P<loss>{NUMBER}), time (?P<step_time_ms>[\d.]+)ms"
        rf"(?:{BETWEEN}, lr (?P<learning_rate>{NUMBER}))?",
        first_step=0,
        validation=rf"\bstep (?P<step>\d+): train loss {NUMBER}, val loss (?P<loss>{NUMBER})",
        times_validation=True,
    ),
    # Source: metric_logger.py of AI-Hypercomputer/maxtext.
    Format(
        name="maxtext",
        sign="completed step:",
        line=r"completed step: (?P<step>\d+), seconds: +(?P<step_time_s>[\d.]+), TFLOP/s"
        rf"(?:/device)?: +(?P<tflops>[\d.]+),{BETWEEN}\b(?:main_model_)?loss: (?P<loss>{NUMBER})",
        first_step=0,
        validation=rf"eval metrics after step: (?P<step>\d+), loss=(?P<loss>{NUMBER})",
    ),
    # Source: `TrainerState.save_to_json` in src/transformers/trainer_callback.py of
    # huggingface/transformers. It writes no times.
    Format(
        name="hf-trainer",
        sign=r'(?m)^[ \t]*+"loss": ',
        line="(?s)(?P<fields>.+)",
        fields=any_value(
            '"',
            r'%(label)s": (?P<%(name)s>[^,\s}]+)',
            {
                "step": "step",
                "loss": "loss",
                "learning_rate": "learning_rate",
                "grad_norm": "grad_norm",
            },
        ),
        validation=r'(?s)"eval_loss": (?P<loss>[^,\s]++)'
        r'(?:(?!"eval_loss": ).)*"step": (?P<step>\d+)',
        settings=(r'"max_steps": (?P<train_iters>\d+)',),
        closes=r"\s*+}",
        values="the line's means",
    ),
    # Source: `ProgressCallback.on_log` of transformers. TRL, axolotl and LLaMA-Factory print such
    # lines, too.
    Format(
        name="hf-trainer",
        sign=r"\{'loss': ",
        line=r"(?P<fields>\{'loss': [^{}]*\})",
        fields=any_value(
            "'",
            r"%(label)s': '?(?P<%(name)s>[^,'\s}]+)",
            {
                "loss": "loss",
                "learning_rate": "learning_rate",
                "grad_norm": "grad_norm",
                "epoch": "epoch",
            },
        ),
        counts_lines=True,
        values="the line's means",
    ),
    # File trainer_log.jsonl. Source: `LogCallback.on_log` of hiyouga/LLaMA-Factory.
    Format(
        name="llama-factory",
        sign=r'"current_steps": ',
        line=r'(?P<fields>\{"current_steps": (?=[^{}]*"loss": )[^{}]*+\})',
        fields=any_value(
            '"',
            r'%(label)s": "?(?P<%(name)s>[^"}]+?)"?(?=, "|\})',
            {
                "step": "current_steps",
                "total_steps": "total_steps",
                "loss": "loss",
                "learning_rate": "(?:lr|learning_rate)",
                "elapsed": "elapsed_time",
            },
        ),
        amend=clock_of_elapsed,
        values="the line's means",
    ),
    # Sources: `train_step_logs` in src/nanotron/trainer.py of huggingface/nanotron, and lines in
    # its issues 23 and 390.
    Format(
        name="nanotron",
        sign=r"iteration: \d+ / \d+ \|",
        line=r"iteration: (?P<step>\d+) / (?P<total_steps>\d+) (?P<fields>\|.*)",
        fields=any_value(
            r"\|\s*+",
            COLUMN,
            {
                "step_time_ms": "elapsed_time_per_iteration_ms",
                "samples": "global_batch_size",
                "consumed_samples": "consumed_samples",
                "consumed_tokens": "consumed_tokens",
                "loss": "lm_loss",
                "learning_rate": "lr",
                "grad_norm": "grad_norm",
                "tflops": "hardware_tflops_per_gpu",
            },
        ),
    ),
    # Sources: `ConsoleLoggerCallback` of allenai/OLMo-core, and `Trainer.log_metrics_to_console`
    # of OLMo.
    Format(
        name="olmo",
        sign=r"\[step=\d+/[\d?]+(?:,epoch=|\])",
        line=rf"(?:(?P<time>{SECONDS}(?:[.,]\d{{1,9}})?){BETWEEN})?"
        r"\[step=(?P<step>\d+)/(?P<total_steps>[\d?]+)(?:,epoch=[^\]]{0,99})?\]",
        fields=any_value(
            r"(?:^|\s)",
            r"%(label)s=(?P<%(name)s>\S+)",
            {
                "loss": "train/(?:CE loss|CrossEntropyLoss)",
                "grad_norm": "optim/total[_ ]grad[_ ]norm",
                "learning_rate": "optim/(?:LR|learning_rate)[^=]*",
                "steps_per_s": "throughput/device/(?:BPS|batches_per_second)",
            },
        ),
        gathers=True,
        amend=from_rate,
    ),
    # Sources: `ConsoleLogger` of mosaicml/composer, and its pull request 1884. llm-foundry prints
    # such lines, too.
    Format(
        name="composer",
        sign=r"\[batch=\d+(?:/\d+)?\]:",
        line=r"(?:\[epoch=(?P<epoch>\d+)\])?\[batch=(?P<step>\d+)(?:/(?P<total_steps>\d+))?\]:",
        fields=any_value(
            r"(?:^|\s)Train ",
            r"%(label)s: (?P<%(name)s>\S+)",
            {
                "loss": "loss/train/total",
                "grad_norm": "l2_norm/grad/global",
                "learning_rate": r"lr-\w+/group0",
                "steps_per_s": "throughput/batches_per_sec",
                "clock_s": "wall_clock/train",
            },
        ),
        gathers=True,
        amend=composer_step,
    ),
    # Sources: litgpt/pretrain.py of Lightning-AI/litgpt, and lines in its issues 689, 1042 and
    # 1607. It prints a line for each micro-step.
    Format(
        name="litgpt",
        sign=r"iter \d+ (?:\| )?step \d+(?::| \|) loss",
        line=r"iter (?P<iter>\d+) (?:\| )?step (?P<step>\d+)(?::| \|) loss(?: train)?(?: \(curr\))?"
        rf":? (?P<loss>[^\s,]+),{BETWEEN}(?:iter|train) time: (?P<iter_ms>[\d.]+) ?ms"
        r"(?P<is_step> \((?:step|opt\.step|optimizer\.step)\))?",
        amend=micro_steps,
    ),
    # Source: scripts/base_train.py of karpathy/nanochat.
    Format(
        name="nanochat",
        sign=r"\bstep \d+/\d+ \(",
        line=r"\bstep (?P<step>\d+)/(?P<total_steps>\d+) \([\d.]+%\) \| loss: (?P<loss>\S+) \|"
        rf"{BETWEEN}\bdt: (?P<step_time_ms>[\d.]+)ms",
        first_step=0,
    ),
    # Source: `PipelineEngine.train_batch` in deepspeed/runtime/pipe/engine.py.
    Format(
        name="deepspeed",
        sign=r"\bsteps: \d+ loss: ",
        line=r"\bsteps: (?P<step>\d+) loss: (?P<loss>\S+) iter time \(s\): (?P<step_time_s>[\d.]+)"
        r" samples/sec: (?P<samples_per_s>[\d.]+)",
        is_fallback=True,
    ),
    # Source: `DeepSpeedEngine._report_progress` in deepspeed/runtime/engine.py. It prints no loss.
    Format(
        name="deepspeed",
        sign=r"\[Rank 0\] step=\d+, skipped=",
        line=rf"\[(?P<time>{SECONDS},\d{{1,9}})\]{BETWEEN}\[Rank 0\] step=(?P<step>\d+),"
        r" skipped=\d+, lr=\[(?P<learning_rate>[^,\]]+)",
        repeats=("learning_rate",),
        is_fallback=True,
    ),
)
NAMES = tuple(dict.fromkeys(form.name for form in FORMATS))
