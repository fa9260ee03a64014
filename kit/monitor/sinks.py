"""Sinks: followers that copy steps and scores to Weights & Biases or TensorBoard, each attempt as a
run of its own.

A sink only reads the run directory, from a process of its own, so its failure never reaches the
training job. Every attempt has its own curve: a resumed run repeats steps, which wandb drops and
TensorBoard draws as a zigzag when they share one. How far a sink has come is kept beside its files,
so it may be ended and started again.
"""

import dataclasses
import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from cluster.files import other_owner
from cluster.record import ConfigError, Record, field_doc, suggestion
from cluster.state import JobError, refuse_planted_links
from kit.errors import needed
from kit.monitor.scores import ScoreFollower
from kit.run import Run
from kit.run.columns import is_number, number, parse_rows
from kit.run.tail import Tail
from kit.show.terminal import plain

WANDB_MODES = ("offline", "online")
NOT_SCALARS = ("step", "attempt", "time")


def scalars(run: Run, rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Returns each row's numbers by name, with tokens_per_s and, where the peak is known and
    holds, mfu and hfu.
    """
    speeds, found = run.metrics(rows).speeds(), []
    for i, row in enumerate(rows):
        numbers = {name: value for name, value in row.items() if is_number(value)}
        numbers |= {name: column[i] for name, column in speeds.items() if column[i] == column[i]}
        kept = {name: value for name, value in numbers.items() if name not in NOT_SCALARS}
        found.append({plain(name): float(value) for name, value in kept.items()})
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinkState(Record):
    """sink.json: what a sink has copied for good."""

    offset: int = field_doc("bytes of metrics.jsonl that have been copied", default=0)
    scores: dict[str, float] = field_doc(
        "scores of checkpoints that have been copied", default_factory=dict
    )
    starts: int = field_doc("times that the sink was started", default=0)
    identity: str = field_doc("distinguishes this run from others of the same name", default="")


class TensorBoardSink:
    """Event files in `RUN/tensorboard/attempt_NN/`, for `tensorboard --logdir RUN/tensorboard`."""

    def __init__(self, run: Run, folder: Path, state: SinkState) -> None:
        with needed("tensorboard", "tensorboard", "The TensorBoard sink"):
            # by name, since what protobuf generates cannot be seen by a type checker
            self.event = import_module("tensorboard.compat.proto.event_pb2").Event
            self.summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
            writers = import_module("tensorboard.summary.writer.event_file_writer")
        self.folder, self.open_writer = folder, writers.EventFileWriter
        self.writers: dict[int, Any] = {}

    def write(
        self, attempt: int, step: int, time_s: float | None, values: dict[str, float]
    ) -> None:
        """Takes one step of one attempt."""
        if attempt not in self.writers:
            self.writers[attempt] = self.open_writer(str(self.folder / f"attempt_{attempt:02d}"))
        tags = [self.summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        told = {"wall_time": time_s or time.time(), "step": step}
        self.writers[attempt].add_event(self.event(summary=self.summary(value=tags), **told))

    def close(self) -> None:
        """Returns once everything is in files."""
        for writer in self.writers.values():
            writer.close()


class WandbSink:
    """One wandb run per attempt, in a group with the run's name; offline, unless WANDB_MODE says
    `online`.

    The numbers carry their own `step`, which is the x axis: wandb's inner step only counts lines,
    so that it never drops one. A sink that is started again opens new wandb runs in the same group
    (`attempt 1, part 2`), since wandb cannot go on with an offline run.
    """

    def __init__(self, run: Run, folder: Path, state: SinkState) -> None:
        self.mode = os.environ.get("WANDB_MODE") or "offline"
        if self.mode not in WANDB_MODES:
            raise ConfigError(
                f"WANDB_MODE: {self.mode!r} is not allowed. {suggestion(self.mode, WANDB_MODES)}"
            )
        _refuse_planted_settings()
        if self.mode == "offline":
            # Read at import; offline, nothing may be sent.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        with needed("wandb", "wandb", "The wandb sink"):
            import wandb
        self.wandb, self.run, self.folder, self.state = wandb, run, folder, state
        self.attempts: dict[int, Any] = {}

    def write(
        self, attempt: int, step: int, time_s: float | None, values: dict[str, float]
    ) -> None:
        if attempt not in self.attempts:
            self.attempts[attempt] = self._open(attempt)
        wall_time = {} if time_s is None else {"time": time_s}
        self.attempts[attempt].log({"step": step, "attempt": attempt, **wall_time, **values})

    def close(self) -> None:
        for attempt in self.attempts.values():
            attempt.finish()

    def _open(self, attempt: int) -> Any:
        run, part = self.run, self.state.starts
        plan = run.plans().get(attempt, run.plan)
        asked = {"spec": run.spec, "plan": plan, "recipe": run.recipe}
        settings = self.wandb.Settings(
            console="off",
            silent=True,
            save_code=False,
            disable_git=True,
            x_disable_stats=True,
            x_disable_meta=True,
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        opened = self.wandb.init(
            mode=self.mode,
            project=os.environ.get("WANDB_PROJECT") or "pretraining",
            group=plain(f"{run.name}-{self.state.identity}"),
            name=plain(f"{run.name}, attempt {attempt}") + (f", part {part}" if part > 1 else ""),
            id=f"{self.state.identity}-{attempt:02d}-{part:02d}",
            dir=str(self.folder),
            config={
                **{name: record.to_dict() for name, record in asked.items()},
                "site": run.site.name,
                "attempt": attempt,
            },
            reinit="create_new",
            settings=settings,
        )
        opened.define_metric("step", hidden=True)
        opened.define_metric("*", step_metric="step")
        return opened


def _refuse_planted_settings() -> None:
    """Raises ConfigError if the working directory holds settings for wandb of another user.

    wandb reads them when it is imported. They may name the server to which the user's key is sent.
    """
    for name in ("wandb/settings", ".wandb/settings"):
        file = Path.cwd() / name
        if owner := other_owner(file):
            raise ConfigError(
                f"{file}: belongs to {owner}, and wandb would use it, for example as the address of"
                " its server. Run this in another directory."
            )


SINKS = {"wandb": WandbSink, "tensorboard": TensorBoardSink}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinkReport(Record):
    """What a sink has done."""

    to: str = field_doc("where steps are copied to: wandb or tensorboard")
    folder: str = field_doc("folder of its files")
    rows: int = field_doc("steps copied by this start of the sink")
    attempts: tuple[int, ...] = field_doc("attempts they belong to")
    skipped_lines: int = field_doc("torn or foreign lines")
    end: str = field_doc("why it ended")


def copy_metrics(
    run: Run,
    to: str,
    *,
    follow: bool = True,
    poll_s: float = 2.0,
    idle: Callable[[float], None] = time.sleep,
) -> SinkReport:
    """Copies the steps of a run to a sink that has not got them yet, and goes on until its job
    ends.

    Args:
        run: at any time of its life. It is only read, apart from the sink's own folder `RUN/wandb`
            or `RUN/tensorboard`.
        to: `wandb` or `tensorboard`.
        follow: False copies what is there and returns.
        poll_s: time between two looks.
        idle: waits between two looks; a KeyboardInterrupt raised by it ends the copying in good
            order.

    Raises:
        ConfigError: no such sink, or WANDB_MODE is neither `offline` nor `online`.
        MissingPackageError: its package is not installed.
        JobError: the run, or a link in the place of one of its folders, is another user's.
    """
    if to not in SINKS:
        raise ConfigError(f"sink: {to!r} is unknown. {suggestion(to, SINKS)}")
    run.check_writable(f"write {to}'s files into it")
    refuse_planted_links(run.directory)
    folder = run.directory / to
    state = _start(folder)
    sink = SINKS[to](run, folder, state)
    state.write(folder / "sink.json")
    tail = Tail(run.directory / "metrics.jsonl", state.offset)
    scores = ScoreFollower(run, state.scores)
    copied, skipped, end = Counter[int](), 0, "everything is copied"
    try:
        while True:
            # Before reading, so that what was written before the end is not missed.
            final = not follow or _is_over(run)
            for text in iter(tail.new_lines, b""):
                rows, torn = parse_rows(text)
                for row, values in zip(rows, scalars(run, rows), strict=True):
                    sink.write(row["attempt"], row["step"], _time(row), values)
                copied.update(row["attempt"] for row in rows)
                skipped += torn
            for attempt, step, values in scores.read():
                sink.write(attempt, step, None, values)
            if final or not run.directory.is_dir():
                break
            idle(poll_s)
    except KeyboardInterrupt:
        end = "interrupted; start it again to go on"
    finally:
        sink.close()
    if run.directory.is_dir():  # only now is everything in its files
        state.replace(offset=tail.position, scores=scores.seen).write(folder / "sink.json")
    else:
        end = f"{run.directory} was deleted"
    return SinkReport(
        to=to,
        folder=str(folder),
        rows=copied.total(),
        attempts=tuple(sorted(copied)),
        end=end,
        skipped_lines=skipped,
    )


def _start(folder: Path) -> SinkState:
    """Returns the state of this start: where the last one that ended in order had come to."""
    try:
        last = SinkState.read(folder / "sink.json")
    except ConfigError:  # the first start, or damaged: everything is copied again, nothing is lost
        last = SinkState(identity=secrets.token_hex(4))
    return last.replace(starts=last.starts + 1)


def _is_over(run: Run) -> bool:
    try:
        return run.job.status().state.is_final
    except (JobError, ConfigError):  # deleted, or never submitted
        return not run.directory.is_dir()


def _time(row: dict[str, Any]) -> float | None:
    value = number(row.get("time"))
    return value if math.isfinite(value) else None
