"""Rows of `metrics.jsonl` as they were recorded: followed while the file grows, and taken as metrics."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from cluster.site import Site
from kit.plan import Plan
from kit.run.columns import COLUMNS
from kit.run.metrics import Metrics
from kit.spec import ModelSpec

CHUNK_BYTES = 4 << 20


class MetricsFollower:
    """Reads the lines that are appended to a `metrics.jsonl`, each once, in the order of the file."""

    def __init__(self, file: Path, offset: int = 0) -> None:
        self.file, self.offset = file, offset
        self.skipped_lines = 0

    def read(self) -> list[dict[str, Any]]:
        """Returns the next complete rows, at most a few MB of them; `offset` stands still where nothing is new.

        A line without its end is left for the next call, foreign lines are counted and skipped, and a file that has
        become shorter was replaced, so it is read again from its start.
        """
        try:
            with self.file.open("rb") as stream:
                if os.fstat(stream.fileno()).st_size < self.offset:
                    self.offset = 0
                stream.seek(self.offset)
                data = stream.read(CHUNK_BYTES)
                if len(data) == CHUNK_BYTES and b"\n" not in data:  # no line of ours is as long
                    self.skipped_lines, self.offset = self.skipped_lines + 1, self.offset + len(data)
                    return []
        except OSError:  # not yet there, or deleted
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        rows = [parse_row(line) for line in complete.splitlines()]
        self.skipped_lines += sum(row is None for row in rows)
        return [row for row in rows if row is not None]

    def parts(self) -> Iterator[list[dict[str, Any]]]:
        """Yields what `read` returns until nothing is new."""
        while True:
            before = self.offset
            yield self.read()
            if self.offset == before:
                return


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Returns the row in a line of `metrics.jsonl`, with whole numbers as step and attempt; None if it is not one."""
    try:
        row = json.loads(line)
        return {**row, "step": int(row["step"]), "attempt": int(row["attempt"])}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def rows_to_metrics(
    rows: list[dict[str, Any]], *, spec: ModelSpec, plans: dict[int, Plan], site: Site, **other: Any
) -> Metrics:
    """Returns rows as they are, in their order and with repeated steps, as metrics with their derived speeds."""
    columns = {name: np.array([number(row.get(name)) for row in rows], dtype=float) for name in COLUMNS}
    return Metrics(columns=columns, spec=spec, plans=plans, site=site, skipped_lines=0, **other)


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a recorded value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(value: Any) -> float:
    """Returns a recorded value as a float, NaN if it is none."""
    try:
        return float(value) if is_number(value) else float("nan")
    except OverflowError:  # a whole number of hundreds of digits
        return float("nan")
