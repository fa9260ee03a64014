"""Is a run as fast as it should be? What the estimate says of its plan on its site, beside what
its steps took.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from cluster.record import ConfigError
from cluster.site import Site
from cluster.state import last_attempt
from kit.errors import RunError
from kit.estimate.choose.nearest import Nearest, nearest_run
from kit.estimate.fit.calibrate import calibrate, published_calibration
from kit.estimate.fit.measured_rows import hardware_on
from kit.estimate.theory.layouts import Layouts
from kit.plan import Plan
from kit.run import Run
from kit.run.metrics import Metrics

WARM, RECENT = 5, 200
"""Steps of an attempt that do not count, and how many of the newest do."""
DATA = "waiting for data"
WAITS, PASSES = "waiting for other ranks or the network", "forward and backward pass"
LINKS = ("tensor_parallel", "context_parallel", "pipeline_send", "bubble", "data_parallel")
PRODUCTS = ("gemm", "attention", "elementwise", "host_launch", "recompute", "overhead")
MEASURED: dict[str, tuple[str, tuple[str, ...]]] = {
    DATA: ("data_s", ()),
    "the optimizer": ("optimizer_s", ("optimizer",)),
    WAITS: ("waiting_s", LINKS),
    "reduction, norm and clipping of gradients": ("reduction_s", ("data_parallel",)),
    PASSES: ("forward_backward_s", PRODUCTS),
}
"""Parts of a step in words, what tells most first: their column of the metrics, and the terms of
the estimate that they should take. A wait for others lies within the other parts."""

TOLD = (
    "took_s",
    "expected_s",
    "low_s",
    "high_s",
    "verdict",
    "terms_s",
    "parts_s",
    "node_check",
    "warnings",
)
"""What of a Pace goes into JSON under its own name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pace:
    """What a step of an attempt should take, and what it takes."""

    attempt: int
    plan: Plan
    site: Site
    expected_s: float
    low_s: float
    high_s: float
    """The 90 % interval."""
    terms_s: dict[str, float]
    """Of the estimate, the largest first."""
    label: str
    """What the estimate rests on."""
    warnings: tuple[str, ...]
    nearest: Nearest | None
    """Published run; None for a plan of this machine."""
    took_s: float
    """Median of the newest steps; NaN for too few of them."""
    parts_s: dict[str, float]
    """What they were made of, on rank 0, as far as it was recorded: names of MEASURED."""
    node_check: dict[str, float]
    """What the start of the job measured, as a share of what the site file says."""

    @property
    def slow_part(self) -> str | None:
        """The part of a step slower than its interval that makes up more than half of what is
        too much.
        """
        if not self.took_s > self.high_s:
            return None
        own_s = dict(self.parts_s)
        if {PASSES, WAITS} <= own_s.keys():
            own_s[PASSES] -= own_s[WAITS]
        half_s = (self.took_s - self.expected_s) / 2
        for name, (_, terms) in MEASURED.items():
            if own_s.get(name, 0.0) - sum(self.terms_s[term] for term in terms) > half_s:
                return name
        return None

    @property
    def verdict(self) -> str:
        """One sentence, and for a slow run the part of a step that is slow, where it was
        measured.
        """
        if math.isnan(self.took_s):
            band = f"{self.low_s:.3g} to {self.high_s:.3g} s a step"
            return f"expected: {band} ({self.label}); too few steps to compare"
        text = sentence(self.took_s, self.expected_s, self.low_s, self.high_s, self.label)
        part = self.slow_part
        return f"{text}. Most of it: {part}, {self.parts_s[part]:.3g} s a step" if part else text

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return {name: getattr(self, name) for name in TOLD} | {
            "calibration": self.label,
            "nearest": str(self.nearest) if self.nearest else None,
        }


def sentence(took_s: float, expected_s: float, low_s: float, high_s: float, label: str) -> str:
    """Returns how a step compares with its 90 % interval; `label` says what the estimate rests
    on.
    """
    band = f"{low_s:.3g} to {high_s:.3g} s a step"
    if low_s <= took_s <= high_s:
        return f"as expected: {took_s:.3g} s, 90 % interval {band} ({label})"
    ratio = took_s / expected_s - 1
    how = "slower" if ratio > 0 else "faster"
    return f"{how} than expected by {abs(ratio):.0%}: {took_s:.3g} s, not {band} ({label})"


def expectation(run: Run, attempt: int | None = None) -> Pace:
    """Returns how the newest steps of an attempt compare with what the estimate says of them, by
    its plan and its site; by default of the newest attempt.

    Raises:
        ConfigError: the site lacks a number that the estimate needs.
    """
    if attempt is None:
        attempt = max(*run.plans(), last_attempt(run.directory), 1)
    plan, site = run.plans().get(attempt, run.plan), run.other_sites().get(attempt, run.site)
    layouts = Layouts.of(run.spec, [plan])
    hardware = hardware_on(site, layouts, plan.precision)
    is_local = site.scheduler == "local"
    calibration = (
        calibrate([], site, hardware=hardware) if is_local else published_calibration(site)
    )
    prediction = calibration.predict(layouts, hardware)
    terms = {name: _one(value) for name, value in prediction.step_time.terms_s.items()}
    took_s, parts_s = _took(run.metrics(), attempt)
    return Pace(
        attempt=attempt,
        plan=plan,
        site=site,
        expected_s=_one(prediction.total_s),
        low_s=_one(prediction.low_s),
        high_s=_one(prediction.high_s),
        terms_s=dict(sorted(terms.items(), key=lambda item: -item[1])),
        label=calibration.label,
        warnings=prediction.warnings,
        nearest=(
            None if is_local else nearest_run(run.spec, plan, hardware, calibration.coefficients)
        ),
        took_s=took_s,
        parts_s=parts_s,
        node_check=_node_check(run, site),
    )


def pace(run: Run) -> Pace:
    """Returns how the newest attempt of a run compares with the estimate.

    Raises:
        RunError: too few steps.
        ConfigError: as `expectation`.
    """
    found = expectation(run)
    if math.isnan(found.took_s):
        raise RunError(
            f"{run.directory}: the newest attempt has fewer than {2 * WARM} steps. Ask again when"
            " it has more."
        )
    return found


def _took(metrics: Metrics, attempt: int) -> tuple[float, dict[str, float]]:
    """Returns the median seconds of an attempt's newest steps and of their parts that were
    recorded, by their names in MEASURED; NaN and none where there are too few.
    """
    known = (metrics["attempt"] == attempt) & np.isfinite(metrics["step_time_s"])
    rows = np.flatnonzero(known)[WARM:][-RECENT:]
    if len(rows) < WARM:
        return math.nan, {}
    told = {name: column for name, (column, _) in MEASURED.items() if column in metrics.columns}
    parts = {name: float(np.median(metrics[column][rows])) for name, column in told.items()}
    parts = {name: seconds for name, seconds in parts.items() if np.isfinite(seconds)}
    took_s = float(np.median(metrics["step_time_s"][rows]))
    phases = [seconds for name, seconds in parts.items() if name not in (DATA, WAITS)]
    if phases and DATA in parts:  # beside a GPU's work it costs nothing
        parts[DATA] = min(parts[DATA], max(0.0, took_s - sum(phases)))
    return took_s, parts


def _node_check(run: Run, site: Site) -> dict[str, float]:
    """Returns what the start of the job measured otherwise than the site file says, as shares of
    its numbers.
    """
    try:
        seen = Site.read(run.directory / "measured_site.json")
    except (OSError, ConfigError):
        return {}
    network = "the network between nodes"
    stated = {network: site.links.inter_node_bytes_per_s}
    measured = {network: seen.links.inter_node_bytes_per_s}
    for dtype, fact in seen.device.matmul_flops_per_s.items():
        measured[f"{dtype} matrix products"] = fact
        stated[f"{dtype} matrix products"] = site.device.matmul_flops_per_s.get(dtype)
    return {
        name: ours.value / theirs.value
        for name, ours in measured.items()
        if ours and (theirs := stated[name]) and ours.value != theirs.value
    }


def _one(values: Any) -> float:
    return float(np.ravel(values)[0])
