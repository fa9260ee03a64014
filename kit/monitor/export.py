"""Copies the training steps of a run into a table file, or into an experiment tracker.

`export` writes a CSV or Parquet file. `copy_metrics` copies steps and scores to a sink: the tracker
Weights & Biases or TensorBoard. TARGETS lists all formats and sinks.

A sink runs in a separate process and only reads the run's records, so its failure does not affect
the training job. Each attempt becomes a separate run in the tracker, since a resumed run repeats
steps. If attempts shared a curve, wandb would drop the repeated steps, and TensorBoard would draw a
zigzag. The progress of a sink is stored beside its files, so a sink may be stopped and started
again.
"""

import contextlib
import dataclasses
import json
import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from cluster.files import other_owner, replace_atomically
from cluster.record import ConfigError, Record, field_doc, suggestion
from cluster.state import JobError, refuse_planted_links
from kit.errors import RunError, needed
from kit.monitor.scores import ScoreFollower
from kit.run import Run
from kit.run.columns import COLUMNS, float_or_nan, is_number, parse_rows, valid_rows
from kit.run.tail import Tail
from kit.show.style import plain_cell
from kit.show.terminal import plain

WANDB_MODES = ("offline", "online")
NOT_SCALARS = ("step", "attempt", "time")
"""Columns that identify a row of metrics.jsonl. They are not copied to a sink as numbers of the
step."""
LONGEST_ADDRESS = 300
"""Largest number of characters of a web address that the dashboard shows."""
FIRST_EXTRA_COLUMN = "consumed_tokens"
"""Name of the column that comes first, in an exported table, among the columns that not every run
records. The other ones follow in alphabetical order."""


def export_table(run: Run) -> Any:
    """Returns the training steps of a run as a pyarrow table in ascending order, each step once. If
    several attempts have done a step, the newest attempt counts.

    The table has the columns of `metrics.jsonl` and derived columns. Derived are tokens_per_s,
    total_tokens at the end of the step and, if the run has them, mfu and hfu as fractions. A value
    is null only if it was not recorded. NaN and infinity are kept.
    """
    import pyarrow

    tail = Tail(run.directory / "metrics.jsonl")
    recorded: list[dict[str, Any]] = []
    for text in iter(tail.new_lines, b""):
        rows, _ = parse_rows(text)
        recorded += rows
    steps = [row["step"] for row in recorded]
    attempts = [row["attempt"] for row in recorded]
    kept = [recorded[index] for index in valid_rows(steps, attempts)]
    metrics = run.metrics(kept)
    extra = set().union(*kept) - {*COLUMNS}
    names = [*COLUMNS, *sorted(extra, key=lambda name: (name != FIRST_EXTRA_COLUMN, name))]
    columns = {}
    for name in names:
        columns[name] = _column([row.get(name) for row in kept])
    for name, column in (metrics.speeds() | {"total_tokens": metrics.total_tokens}).items():
        columns[name] = pyarrow.array(column)
    facts = {
        "run": run.name,
        "model": run.spec.name,
        "model_flops_per_token": run.spec.flops_per_token(),
        "site": run.site.name,
        "why_no_mfu": metrics.why_no_mfu,
        "peak_flops_per_s_per_device": run.site.peak_flops_per_s(run.plan.precision),
        "devices_by_attempt": {
            str(attempt): plan.num_devices for attempt, plan in metrics.plans.items()
        },
    }
    return pyarrow.table(columns).replace_schema_metadata({"kit": json.dumps(facts)})


def export(run: Run, file: Path, *, format: str, overwrite: bool = False) -> int:
    """Writes the result of `export_table` to `file` in the format `csv` or `parquet`, by atomic
    rename. Returns the number of rows.

    Raises:
        ConfigError: The format is unknown.
        RunError: The file exists and `overwrite` is False, or its folder does not exist.
    """
    target = TARGETS.get(format)
    if not isinstance(target, FileTarget):
        formats = [name for name, known in TARGETS.items() if isinstance(known, FileTarget)]
        raise ConfigError(f"format: {format!r} is unknown. {suggestion(format, formats)}")
    if file.is_dir() or not file.parent.is_dir():
        raise RunError(f"{file} cannot be written: give a file in a folder that exists.")
    if file.exists() and not overwrite:
        raise RunError(f"{file} exists. Give another --out, or --overwrite.")
    table = export_table(run)
    with replace_atomically(file) as stream:
        target.write(table, stream)
    return table.num_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinkReport(Record):
    """Result of one copy of training steps to a sink (Weights & Biases or TensorBoard)."""

    to: str = field_doc("name of the sink to which steps are copied: wandb or tensorboard")
    folder: str = field_doc("folder into which the sink writes its files")
    rows: int = field_doc("number of training steps that were copied")
    attempts: tuple[int, ...] = field_doc("numbers of the attempts whose steps were copied")
    skipped_lines: int = field_doc(
        "number of lines of metrics.jsonl that were skipped, since they are torn or not"
        " written by the kit"
    )
    end: str = field_doc("reason why the copying has ended")


def copy_metrics(
    run: Run,
    to: str,
    *,
    follow: bool = True,
    poll_s: float = 2.0,
    idle: Callable[[float], None] = time.sleep,
) -> SinkReport:
    """Copies those steps and scores of a run that a sink does not have yet. Continues until the job
    of the run has ended.

    Args:
        run: run before, during or after training. The function writes only to the sink's folder,
            `RUN/wandb` or `RUN/tensorboard`.
        to: `wandb` or `tensorboard`.
        follow: whether to wait for new steps until the job ends. If False, copies the present steps
            and returns.
        poll_s: seconds between two reads of the run.
        idle: function that waits for a number of seconds. A KeyboardInterrupt from it ends the copy
            normally.

    Raises:
        ConfigError: The sink is unknown, or WANDB_MODE is neither `offline` nor `online`.
        MissingPackageError: The package of the sink is not installed.
        JobError: The run belongs to another user, or one of its folders is a symbolic link of
            another user.
    """
    target = TARGETS.get(to)
    if not isinstance(target, SinkTarget):
        sinks = [name for name, known in TARGETS.items() if isinstance(known, SinkTarget)]
        raise ConfigError(f"sink: {to!r} is unknown. {suggestion(to, sinks)}")
    run.check_writable(f"write {to}'s files into it")
    refuse_planted_links(run.directory)
    folder = run.directory / to
    state = _next_start(folder)
    sink = target.open(run, folder, state)
    state.write(folder / "sink.json")
    tail = Tail(run.directory / "metrics.jsonl", state.offset)
    scores = ScoreFollower(run, state.scores)
    copied = Counter[int]()
    skipped = 0
    end = "everything is copied"
    try:
        while True:
            # Whether the job has ended is checked before the rows are read. In the other order,
            # rows that are written in between would be missed.
            is_last = not follow or _is_over(run)
            for text in iter(tail.new_lines, b""):
                rows, torn = parse_rows(text)
                for row, values in zip(rows, scalars(run, rows), strict=True):
                    sink.write(row["attempt"], row["step"], _time(row), values)
                copied.update(row["attempt"] for row in rows)
                skipped += torn
                if sink.address != state.address:
                    # The dashboard shows the address while the copying goes on.
                    state = state.replace(address=sink.address)
                    state.write(folder / "sink.json")
            for attempt, step, values in scores.read():
                sink.write(attempt, step, None, values)
            if is_last or not run.directory.is_dir():
                break
            idle(poll_s)
    except KeyboardInterrupt:
        end = "interrupted; start it again to go on"
    finally:
        sink.close()
    if run.directory.is_dir():  # The progress is stored last, after all copied data are in files.
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


def scalars(run: Run, rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Returns one dictionary for each row of metrics.jsonl, from name to number. It includes
    tokens_per_s and, if the peak is known and believable, mfu and hfu.
    """
    speeds = run.metrics(rows).speeds()
    scalars_of_rows: list[dict[str, float]] = []
    for i, row in enumerate(rows):
        numbers = {name: value for name, value in row.items() if is_number(value)}
        for name, column in speeds.items():
            if not math.isnan(column[i]):
                numbers[name] = column[i]
        scalars_of_rows.append(
            {
                plain(name): float(value)
                for name, value in numbers.items()
                if name not in NOT_SCALARS
            }
        )
    return scalars_of_rows


def _column(values: list[Any]) -> Any:
    """Returns one column of recorded values as an Arrow array. The elements are numbers if all
    values are numbers. Otherwise they are JSON texts.
    """
    import pyarrow

    known = [value for value in values if value is not None]
    # An integer may need more than 64 bits. The values then become JSON texts.
    with contextlib.suppress(OverflowError, pyarrow.ArrowInvalid):
        if all(isinstance(value, int) and is_number(value) for value in known):
            return pyarrow.array(values, pyarrow.int64())
        if all(map(is_number, known)):
            return pyarrow.array(_converted(values, float), pyarrow.float64())
    return pyarrow.array(_converted(values, json.dumps), pyarrow.string())


def _converted(values: list[Any], convert: Callable[[Any], Any]) -> list[Any]:
    """Returns a list with `convert(value)` for each value that is not None, and None for
    each None.
    """
    converted = []
    for value in values:
        converted.append(None if value is None else convert(value))
    return converted


def _write_csv(table: Any, stream: BinaryIO) -> None:
    from pyarrow import csv

    # Text cells are quoted JSON, so no spreadsheet takes a cell for a formula. The names of columns
    # are made safe by `plain_cell`.
    names = [plain_cell(name) for name in table.column_names]
    csv.write_csv(table.rename_columns(names), stream)


def _write_parquet(table: Any, stream: BinaryIO) -> None:
    from pyarrow import parquet

    parquet.write_table(table, stream, compression="zstd")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinkState(Record):
    """Content of sink.json: how far a sink had copied the run when it last ended normally."""

    offset: int = field_doc(
        "number of bytes at the beginning of metrics.jsonl whose rows have been copied", default=0
    )
    scores: dict[str, float] = field_doc(
        "scores of checkpoints that have been copied already, by `STEP NAME`", default_factory=dict
    )
    starts: int = field_doc("number of times that the copying was started", default=0)
    identity: str = field_doc(
        "random text that distinguishes this run, in the tracker, from other runs with an"
        " equal name",
        default="",
    )
    address: str = field_doc(
        "web address of the newest attempt in the tracker; empty for a tracker without a web page",
        default="",
    )


def tracker_address(directory: Path) -> str:
    """Returns the web address of a run in wandb. Returns "" if the run was not copied to a server
    of wandb, or if the stored text is no web address in printable characters.
    """
    try:
        address = SinkState.read(directory / "wandb" / "sink.json").address
    except ConfigError:
        return ""
    is_web = address.startswith(("https://", "http://")) and len(address) <= LONGEST_ADDRESS
    return address if is_web and address.isprintable() and " " not in address else ""


def _next_start(folder: Path) -> SinkState:
    """Returns the stored progress of a sink with the number of this start. Starts that were killed
    have stored no progress.
    """
    try:
        last = SinkState.read(folder / "sink.json")
    # This is the first start, or the file is damaged. All steps are copied, again if necessary.
    except ConfigError:
        last = SinkState(identity=secrets.token_hex(4))
    return last.replace(starts=last.starts + 1)


def _is_over(run: Run) -> bool:
    """Returns whether the job of a run has ended, or the run directory was deleted."""
    try:
        return run.job.status().state.is_final
    # The run directory was deleted, or no job was ever submitted for the run.
    except (JobError, ConfigError):
        return not run.directory.is_dir()


def _time(row: dict[str, Any]) -> float | None:
    """Returns the unix time of the end of a step, or None if its row has no valid time."""
    value = float_or_nan(row.get("time"))
    return value if math.isfinite(value) else None


class Sink(Protocol):
    """Interface of a writer that copies the steps of a run to an experiment tracker."""

    address: str
    """Web address of the attempt that was opened last. Empty if it has no web page."""

    def write(
        self, attempt: int, step: int, time_s: float | None, values: dict[str, float]
    ) -> None:
        """Writes the numbers of one training step of one attempt. `time_s` is the unix time of the
        step, or None if it is unknown.
        """
        ...

    def close(self) -> None:
        """Closes the sink. Returns after all numbers are in files."""
        ...


class TensorBoardSink:
    """Sink that writes TensorBoard event files in `RUN/tensorboard/attempt_NN/`. `tensorboard
    --logdir RUN/tensorboard` shows them.
    """

    def __init__(self, run: Run, folder: Path, state: SinkState) -> None:
        with needed("tensorboard", "tensorboard", "The TensorBoard sink"):
            # The modules are imported by name, since a type checker cannot read code that protobuf
            # generates.
            self.event = import_module("tensorboard.compat.proto.event_pb2").Event
            self.summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
            writers = import_module("tensorboard.summary.writer.event_file_writer")
        self.address = ""
        self.folder = folder
        self.open_writer = writers.EventFileWriter
        self.writers: dict[int, Any] = {}

    def write(
        self, attempt: int, step: int, time_s: float | None, values: dict[str, float]
    ) -> None:
        if attempt not in self.writers:
            self.writers[attempt] = self.open_writer(str(self.folder / f"attempt_{attempt:02d}"))
        tags = [self.summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        event = self.event(
            summary=self.summary(value=tags), wall_time=time_s or time.time(), step=step
        )
        self.writers[attempt].add_event(event)

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()


class WandbSink:
    """Sink that opens one wandb run per attempt, in a wandb group for the kit's run. wandb is
    offline unless WANDB_MODE is `online`.

    Each logged line contains the number `step`, which is used as the x axis. wandb's internal step
    only counts lines, so wandb drops no repeated step. A sink that is started again opens new wandb
    runs in the same group (`attempt 1, part 2`), since wandb cannot continue an offline run.
    """

    def __init__(self, run: Run, folder: Path, state: SinkState) -> None:
        self.mode = os.environ.get("WANDB_MODE") or "offline"
        if self.mode not in WANDB_MODES:
            raise ConfigError(
                f"WANDB_MODE: {self.mode!r} is not allowed. {suggestion(self.mode, WANDB_MODES)}"
            )
        _refuse_planted_settings()
        if self.mode == "offline":
            # wandb reads this variable at its import. In offline mode, no error report may be sent.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        with needed("wandb", "wandb", "The wandb sink"):
            import wandb
        self.wandb: Any = wandb
        self.run = run
        self.folder = folder
        self.state = state
        self.address = state.address
        self.attempts: dict[int, Any] = {}

    def write(
        self, attempt: int, step: int, time_s: float | None, values: dict[str, float]
    ) -> None:
        if attempt not in self.attempts:
            opened = self._open(attempt)
            # wandb has no address for a run that it stores offline, and warns who asks for it.
            self.address = "" if opened.offline else opened.url or ""
            self.attempts[attempt] = opened
        wall_time = {} if time_s is None else {"time": time_s}
        self.attempts[attempt].log({"step": step, "attempt": attempt, **wall_time, **values})

    def close(self) -> None:
        for attempt in self.attempts.values():
            attempt.finish()

    def _open(self, attempt: int) -> Any:
        """Opens a new wandb run for an attempt and returns it."""
        run = self.run
        part = self.state.starts
        plan = run.plans().get(attempt, run.plan)
        records = {"spec": run.spec, "plan": plan, "recipe": run.recipe}
        settings = self.wandb.Settings(
            console="off",
            silent=True,
            save_code=False,
            disable_git=True,
            x_disable_stats=True,
            x_disable_meta=True,
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        name = plain(f"{run.name}, attempt {attempt}")
        if part > 1:
            name += f", part {part}"
        opened = self.wandb.init(
            mode=self.mode,
            project=os.environ.get("WANDB_PROJECT") or "pretraining",
            group=plain(f"{run.name}-{self.state.identity}"),
            name=name,
            id=f"{self.state.identity}-{attempt:02d}-{part:02d}",
            dir=str(self.folder),
            config={
                **{name: record.to_dict() for name, record in records.items()},
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
    """Raises ConfigError if the working directory contains wandb settings that belong to another
    user.

    wandb reads these settings at its import. They may name a server to which wandb then sends the
    user's key.
    """
    for name in ("wandb/settings", ".wandb/settings"):
        file = Path.cwd() / name
        if owner := other_owner(file):
            raise ConfigError(
                f"{file}: belongs to {owner}, and wandb would use it, for example as the address of"
                " its server. Run this in another directory."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTarget:
    """File format in which the table of training steps can be exported."""

    write: Callable[[Any, BinaryIO], None]
    """Function `write(table, stream)` that writes a pyarrow table to an open file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinkTarget:
    """Experiment tracker to which the training steps of a run can be copied."""

    open: Callable[[Run, Path, SinkState], Sink]
    """Function `open(run, folder, state)` that opens a sink. `folder` is the folder of the sink's
    files, and `state` its stored progress."""


TARGETS: dict[str, FileTarget | SinkTarget] = {
    "csv": FileTarget(write=_write_csv),
    "parquet": FileTarget(write=_write_parquet),
    "wandb": SinkTarget(open=WandbSink),
    "tensorboard": SinkTarget(open=TensorBoardSink),
}
"""File formats and sinks for the training steps of a run, by the name that a user gives. `kit
export` also has the format `hf`, which exports a checkpoint and is not listed."""
