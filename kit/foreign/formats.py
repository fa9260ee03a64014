"""The trainers whose logs can be imported, an entry each: what finds in a line what it tells.

Another trainer needs an entry of FORMATS, or of its user a pattern only (`kit import --pattern`).
`logs.py` applies them. Tried on public lines, which the tests cite; torchtitan's held-out loss,
settings and start were only read in its source.
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
SECONDS = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
Texts = dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """How a trainer tells of its steps: regular expressions of Python.

    Their groups name what they find: values of a step, or settings by Megatron's names for them.
    """

    name: str
    sign: str
    """Is in each line about a step, torn ones too."""
    line: str
    """Finds a step; what its group `fields` holds is for `fields`."""
    fields: str = "(?!)"
    """Finds values one by one; the name of the only group that took part is the value's."""
    first_step: int = 1
    repeats: tuple[str, ...] = ("loss", "grad_norm")
    """Groups that are the same in a line that was printed again."""
    held_out: str = "(?!)"
    """Finds a step and its held-out loss."""
    settings: tuple[str, ...] = ()
    """Of any line. A `name` with a `value` is a setting; those in OF_STEPS are of the next step or
    of all to come; `start` is told by every start of the trainer, `end` when training is done."""
    closes: str = ""
    """Begins the last line of what is written on several, and is read as one."""
    values: str = "the last step's values"
    """What a line for many steps has of them."""
    counts_before: bool = False
    """Whether consumed samples are those before a line's step, without its own."""
    times_held_out: bool = False
    """Whether a step's time holds that of the evaluation before it, so that it is none."""
    amend: Callable[[Texts, Texts], None] = lambda texts, before: None
    """Puts right what a line tells, given that and what the line of the step before told."""


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


def step_of_bar(texts: Texts, before: Texts) -> None:
    """Undoes what tqdm rounds to three digits where that is shorter: 1000 and 1004 are both 1e+3.

    The step is then the bar's own count, without the other batches that are in it: held-out ones.
    A bar that was drawn again is as old as the first.
    """
    clock = reversed(texts["clock"].split(":"))
    texts["clock_s"] = str(sum(60**i * int(part or 0) for i, part in enumerate(clock)))
    texts["others"] = before.get("others", "0")
    if "n" in texts:
        drawn = int(texts["epoch"]) * int(texts["total_steps"]) + int(texts["n"]) - 1
        if "e" in texts["step"]:
            texts["step"] = str(drawn - int(texts["others"]))
        texts["others"] = str(drawn - int(float(texts["step"])))
    if all(texts.get(name) == before.get(name) for name in ("step", "loss", "grad_norm")):
        texts["clock_s"] = before["clock_s"]
    for name in ("step", "consumed_samples"):
        if "e" in texts.get(name, ""):
            del texts[name]


FIT_ENDED = r"(?P<end>`Trainer\.fit` stopped: `max_\w+=\d+` reached)"
BARRED = r"%s\s*:\s*(?P<%s>[^|\s]+)\s*(?=\||$)"
FORMATS = (
    # `training_log`: megatron/training.py of NVIDIA/Megatron-LM and microsoft/Megatron-DeepSpeed,
    # megatron/logging.py of EleutherAI/gpt-neox, whose arguments have other names; logs of
    # spyysalo/lumi-llm-scaling and sajal-vt/Megatron-DeepSpeed-ORNL
    Format(
        name="megatron",
        sign=r"iteration\s+\d+/\s*(?:\d+|infinity)\s*\|",
        line=r"iteration\s+(?P<step>\d+)/\s*(?P<total_steps>\d+|infinity)\s*"
        r"(?P<fields>\|.*elapsed time per iteration .*\|)\s*$",
        fields=by_name(
            r"\|\s*",
            BARRED,
            r"step_time_s=elapsed time per iteration \(s\), samples=global batch size, "
            r"step_time_ms=elapsed time per iteration \(ms\), samples_per_s=samples per second, "
            r"consumed_samples=consumed samples, consumed_tokens=consumed tokens, "
            r"sequence_length=actual seqlen, learning_rate=learning rate, loss_scale=loss scale, "
            r"nan_steps=number of nan iterations, skipped_steps=number of skipped iterations, "
            r"grad_norm=grad norm, loss=[^|:]*?loss, tflops=[^|:]*?TFLOP[^|:]{0,20}",
        ),
        repeats=("loss", "grad_norm", "step_time_s", "step_time_ms", "consumed_samples"),
        held_out=r"validation (?:loss|results) at iteration (?P<step>\d+)(?! on test set)\b.*?"
        r"\blm[ _]loss value: (?P<loss>\S+) \|",
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
            r"memory \(MB\) \|.*?max allocated: (?P<memory_mib>\d+(?:\.\d+)?)",
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
            r"\|\s*",
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
        line=r"Epoch (?P<epoch>\d+):(?:(?!Epoch ).)*?(?:(?P<n>\d+)/(?P<total_steps>\d+) )?"
        r"\[(?P<clock>[\d:]+)(?:<[^,\]]*)?(?P<fields>,[^\]]*\])",
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
        line=rf"(?:(?P<time>{SECONDS}[,.]\d+).*?)?\bstep: +(?P<step>\d+) +loss: +(?P<loss>\S+)"
        r"(?: +grad_norm: +(?P<grad_norm>\S+))? +memory: +(?P<memory_gib>[\d.]+)GiB.* tps:"
        r"(?:.* tflops: +(?P<tflops>[\d.,]+))?",
        held_out=r"validate step: +(?P<step>\d+) +loss: +(?P<loss>\S+)",
        settings=(
            r"global batch size (?P<global_batch_size>\d+),.*?"
            r"sequence length (?P<sequence_length>\d+)(?:, total steps (?P<train_iters>\d+))?",
            "(?P<start>Training starts at step)",
        ),
    ),
    Format(  # train.py of karpathy/nanoGPT, which evaluates within the time of a step
        name="nanogpt",
        sign="iter ",
        line=rf"\biter (?P<step>\d+): loss (?P<loss>{NUMBER}), time (?P<step_time_ms>[\d.]+)ms"
        rf"(?:.*?, lr (?P<learning_rate>{NUMBER}))?",
        first_step=0,
        held_out=rf"\bstep (?P<step>\d+): train loss {NUMBER}, val loss (?P<loss>{NUMBER})",
        times_held_out=True,
    ),
    Format(  # metric_logger.py of AI-Hypercomputer/maxtext
        name="maxtext",
        sign="completed step:",
        line=r"completed step: (?P<step>\d+), seconds: +(?P<step_time_s>[\d.]+), TFLOP/s"
        rf"(?:/device)?: +(?P<tflops>[\d.]+),.*?\b(?:main_model_)?loss: (?P<loss>{NUMBER})",
        first_step=0,
        held_out=rf"eval metrics after step: (?P<step>\d+), loss=(?P<loss>{NUMBER})",
    ),
    # `TrainerState.save_to_json`, which has no times, in src/transformers/trainer_callback.py of
    # huggingface/transformers
    Format(
        name="hf-trainer",
        sign=r'(?m)^\s*"loss": ',
        line="(?s)(?P<fields>.+)",
        fields=by_name('"', r'%s": (?P<%s>[^,\s}]+)', "step, loss, learning_rate, grad_norm"),
        held_out=r'(?s)"eval_loss": (?P<loss>[^,\s]+).*"step": (?P<step>\d+)',
        settings=(r'"max_steps": (?P<train_iters>\d+)',),
        closes=r"\s*}",
        values="the line's means",
    ),
)
NAMES = tuple(dict.fromkeys(form.name for form in FORMATS))


def pattern_format(pattern: str) -> Format:
    """Returns the format of lines in which a user's regular expression finds a step.

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
    return Format(name="pattern", sign=pattern, line=pattern, values="the line's values")
