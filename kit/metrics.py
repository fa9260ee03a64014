"""Metrics: what `metrics.jsonl` says, with tokens/s, MFU and HFU derived from spec, plan and site. No torch."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from cluster.record import ConfigError
from cluster.site import Site
from kit.plan import Plan
from kit.spec import ModelSpec

COLUMNS = ("step", "attempt", "time", "step_time_s", "tokens", "loss", "grad_norm", "learning_rate", "memory_bytes")

OPTIONAL_COLUMNS = ("validation_loss", "loss_scale", "skipped_steps")


class MetricsWriter:
    """Appends one line per optimizer step to `metrics.jsonl`."""

    def __init__(self, file: Path) -> None:
        torn = file.exists() and file.stat().st_size > 0 and not file.read_bytes().endswith(b"\n")
        self.stream = file.open("a")
        if torn:  # a killed attempt's half line must not swallow our first one
            self.stream.write("\n")

    def append(self, row: dict[str, Any]) -> None:
        """Writes one step, visible to readers at once."""
        self.stream.write(json.dumps(row) + "\n")
        self.stream.flush()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metrics:
    """The steps of a run, oldest first, each once: a newer attempt's steps replace what an older one did after it."""

    columns: dict[str, np.ndarray]
    spec: ModelSpec
    plans: dict[int, Plan]
    site: Site
    skipped_lines: int

    @classmethod
    def read(cls, file: Path, *, spec: ModelSpec, plans: dict[int, Plan], site: Site) -> "Metrics":
        """Returns the metrics in a `metrics.jsonl`; torn or foreign lines are skipped and counted.

        Args:
            file: may be absent (no steps yet).
            spec: the model.
            plans: the plan of each attempt.
            site: where it runs; its peak makes MFU.
        """
        rows, skipped = [], 0
        for line in file.read_bytes().splitlines() if file.exists() else []:
            try:
                row = json.loads(line)
                rows.append((int(row["step"]), int(row["attempt"]), row))
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                skipped += 1
        kept = _supersede(rows)
        names = [*COLUMNS, *(name for name in OPTIONAL_COLUMNS if any(name in row for row in kept))]
        columns = {name: np.array([_number(row.get(name)) for row in kept], dtype=float) for name in names}
        for name in ("step", "attempt", "tokens"):
            columns[name] = columns[name].astype(np.int64)
        return cls(columns=columns, spec=spec, plans=plans, site=site, skipped_lines=skipped)

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    @property
    def tokens_per_s(self) -> np.ndarray:
        """Tokens per second of each step, over all devices."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return self["tokens"] / self["step_time_s"]

    @property
    def total_tokens(self) -> np.ndarray:
        """Tokens seen at the end of each step."""
        return np.cumsum(self["tokens"])

    def mfu(self) -> np.ndarray | None:
        """Returns model FLOP/s over peak dense FLOP/s of the plan's dtype, 0-1, per step; None for an unknown peak.

        Raises:
            ConfigError: a value above 1, so that FLOPs, batch, device count or peak must be wrong.
        """
        return self._utilisation(lambda plan: self.spec.flops_per_token())

    def hfu(self) -> np.ndarray | None:
        """Returns the same with recomputed FLOPs counted; None for an unknown peak. Errors as `mfu`."""
        return self._utilisation(lambda plan: self.spec.hardware_flops_per_token(plan.recompute))

    def _utilisation(self, flops_per_token) -> np.ndarray | None:
        values = np.full(len(self), np.nan)
        for attempt, plan in self.plans.items():
            here = self["attempt"] == attempt
            peak = self.site.peak_flops_per_s(plan.precision)
            if peak is None:
                return None
            devices = plan.num_devices
            if self.site.scheduler == "local":  # more processes than cores share the cores
                devices = min(devices, self.site.devices_per_node)
            values[here] = self.tokens_per_s[here] * flops_per_token(plan) / (peak * devices)
        if np.nanmax(values, initial=0) > 1:
            raise ConfigError(
                f"metrics: a utilisation of {np.nanmax(values):.0%} is above the peak. One of these is wrong: tokens "
                f"per step ({self['tokens'].max():,}), the step time, the number of devices, or the peak of site "
                f"{self.site.name!r}."
            )
        return values

    def summary(self) -> dict[str, Any]:
        """Returns the last step in plain numbers, speeds as the median of the last 20 steps.

        A loss or gradient norm that was not finite stays what it was; None is what was never recorded, or is not known.
        """
        if not len(self):
            return {"step": 0}
        mfu, recent = self.mfu(), slice(-20, None)
        return {
            "step": int(self["step"][-1]),
            "tokens": int(self.total_tokens[-1]),
            "loss": float(self["loss"][-1]),
            "grad_norm": None if np.isnan(self["grad_norm"]).all() else float(self["grad_norm"][-1]),
            "step_time_s": median(self["step_time_s"][recent]),
            "tokens_per_s": median(self.tokens_per_s[recent]),
            "mfu": None if mfu is None else median(mfu[recent]),
            "attempt": int(self["attempt"][-1]),
        }


def median(values: np.ndarray) -> float | None:
    """Returns the median of the finite values, None where there is none."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else None


def _supersede(rows: list[tuple[int, int, dict]]) -> list[dict]:
    """Returns rows by step; an attempt's rows from the first step of any newer attempt on are dropped."""
    first: dict[int, int] = {}
    for step, attempt, _ in rows:
        first[attempt] = min(step, first.get(attempt, step))
    kept = {}
    for step, attempt, row in rows:
        if not any(newer > attempt and start <= step for newer, start in first.items()):
            kept[step] = row
    return [kept[step] for step in sorted(kept)]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")
