"""Rows of `metrics.jsonl` as they were recorded: followed while the file grows, and taken as
metrics.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cluster.site import Site
from kit.plan import Plan
from kit.run.columns import COLUMNS, number, parse_row
from kit.run.metrics import Metrics
from kit.run.tail import Tail
from kit.spec import ModelSpec


class MetricsFollower(Tail):
    """Reads the lines that are appended to a `metrics.jsonl`, each once, in the order of the
    file.
    """

    def __init__(self, file: Path, position: int = 0) -> None:
        super().__init__(file, position)
        self.skipped_lines = 0

    def parts(self) -> Iterator[list[dict[str, Any]]]:
        """Yields the new rows, a few MB of lines at a time, until nothing is new; foreign lines
        are counted.
        """
        while text := self.new_lines():
            rows = [parse_row(line) for line in text.splitlines()]
            self.skipped_lines += sum(row is None for row in rows)
            yield [row for row in rows if row is not None]


def rows_to_metrics(
    rows: list[dict[str, Any]], *, spec: ModelSpec, plans: dict[int, Plan], site: Site, **other: Any
) -> Metrics:
    """Returns rows as they are, in their order and with repeated steps, as metrics with their
    derived speeds.
    """
    names = [
        *COLUMNS,
        *(["consumed_tokens"] if any("consumed_tokens" in row for row in rows) else []),
    ]
    columns = {
        name: np.array([number(row.get(name)) for row in rows], dtype=float) for name in names
    }
    return Metrics(columns=columns, spec=spec, plans=plans, site=site, skipped_lines=0, **other)
