"""Is a run as fast as it should be? What the estimate says of its plan on its site, beside what
its steps took.
"""

import dataclasses
from typing import Any

import numpy as np

from cluster.record import ConfigError
from cluster.site import Site
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
WAITS, PASSES = "waiting for other ranks or the network", "forward and backward pass"
LINKS = ("tensor_parallel", "context_parallel", "pipeline_send", "bubble", "data_parallel")
PRODUCTS = ("gemm", "attention", "elementwise", "host_launch", "recompute", "overhead")
MEASURED: dict[str, tuple[str, tuple[str, ...]]] = {
    "waiting for data": ("data_s", ()),
    "the optimizer": ("optimizer_s", ("optimizer",)),
    WAITS: ("waiting_s", LINKS),
    "reduction, norm and clipping of gradients": ("reduction_s", ("data_parallel",)),
    PASSES: ("forward_backward_s", PRODUCTS),
}
"""Parts of a step in words, what tells most first: their column of the metrics, and the terms of
the estimate that they should take. A wait for others lies within the other parts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expectation:
    """What a step of an attempt should take."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pace(Expectation):
    """What a step should take, and what it takes."""

    took_s: float
    """Median of the newest steps."""
    parts_s: dict[str, float]
    """What they were made of, on rank 0, as far as it was recorded: names of MEASURED."""
    node_check: dict[str, float]
    """What the start of the job measured, as a share of what the site file says."""

    @property
    def slow_part(self) -> str | None:
        """The part of a step slower than its interval that makes up more than half of what is
        too much.
        """
        own_s = dict(self.parts_s)
        if {PASSES, WAITS} <= own_s.keys():
            own_s[PASSES] -= own_s[WAITS]
        half_s = (self.took_s - self.expected_s) / 2
        for name, (_, terms) in MEASURED.items() if self.took_s > self.high_s else ():
            if own_s.get(name, 0.0) - sum(self.terms_s[term] for term in terms) > half_s:
                return name
        return None

    @property
    def verdict(self) -> str:
        """One sentence, and for a slow run the part of a step that is slow, where it was
        measured.
        """
        text = sentence(self.took_s, self.expected_s, self.low_s, self.high_s, self.label)
        part = self.slow_part
        return f"{text}. Most of it: {part}, {self.parts_s[part]:.3g} s a step" if part else text

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        names = (
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
        nearest = str(self.nearest) if self.nearest else None
        return {name: getattr(self, name) for name in names} | {
            "calibration": self.label,
            "nearest": nearest,
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


def expectation(run: Run, attempt: int) -> Expectation:
    """Returns what the estimate says of the steps of an attempt, by its plan and its site.

    Raises:
        ConfigError: the site lacks a number that the estimate needs.
    """
    plan, site = run.plans().get(attempt, run.plan), run.other_sites().get(attempt, run.site)
    layouts = Layouts.of(run.spec, [plan])
    hardware = hardware_on(site, layouts, plan.precision)
    is_local = site.scheduler == "local"
    calibration = (
        calibrate([], site, hardware=hardware) if is_local else published_calibration(site)
    )
    prediction = calibration.predict(layouts, hardware)
    terms = {name: _one(value) for name, value in prediction.step_time.terms_s.items()}
    return Expectation(
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
    )


def pace(run: Run) -> Pace:
    """Returns how the newest attempt of a run compares with the estimate.

    Raises:
        RunError: too few steps.
        ConfigError: as `expectation`.
    """
    took_s, attempt, parts_s = _took(run, run.metrics())
    expected = expectation(run, attempt)
    checked = _node_check(run, expected.site)
    return Pace(**vars(expected), took_s=took_s, parts_s=parts_s, node_check=checked)


def _took(run: Run, metrics: Metrics) -> tuple[float, int, dict[str, float]]:
    """Returns the median time of the newest attempt's newest steps, in seconds, its number, and
    parts of that time.
    """
    if len(metrics):
        attempt, seconds = int(metrics["attempt"][-1]), metrics["step_time_s"]
        rows = np.flatnonzero((metrics["attempt"] == attempt) & np.isfinite(seconds))[WARM:][
            -RECENT:
        ]
        if len(rows) >= WARM:
            took_s = float(np.median(seconds[rows]))
            return took_s, attempt, _parts(metrics, rows, took_s)
    raise RunError(
        f"{run.directory}: the newest attempt has fewer than {2 * WARM} steps. Ask again when it"
        " has more."
    )


def _parts(metrics: Metrics, rows: np.ndarray, took_s: float) -> dict[str, float]:
    """Returns the median seconds of the parts of a step that were recorded, by their names in
    MEASURED.
    """
    told = {name: column for name, (column, _) in MEASURED.items() if column in metrics.columns}
    parts = {name: float(np.median(metrics[column][rows])) for name, column in told.items()}
    parts = {name: seconds for name, seconds in parts.items() if np.isfinite(seconds)}
    phases = [seconds for name, seconds in parts.items() if name not in ("waiting for data", WAITS)]
    if phases and "waiting for data" in parts:  # beside a GPU's work it costs nothing
        parts["waiting for data"] = min(parts["waiting for data"], max(0.0, took_s - sum(phases)))
    return parts


def _node_check(run: Run, site: Site) -> dict[str, float]:
    """Returns what the start of the job measured otherwise than the site file says, as shares of
    its numbers.
    """
    try:
        seen = Site.read(run.directory / "measured_site.json")
    except (OSError, ConfigError):
        return {}
    stated, facts = site.device.matmul_flops_per_s, seen.device.matmul_flops_per_s
    measured, promised = seen.links.inter_node_bytes_per_s, site.links.inter_node_bytes_per_s
    pairs = [(f"{dtype} matrix products", fact, stated.get(dtype)) for dtype, fact in facts.items()]
    return {
        part: ours.value / theirs.value
        for part, ours, theirs in [*pairs, ("the network between nodes", measured, promised)]
        if ours and theirs and ours.value != theirs.value
    }


def _one(values: Any) -> float:
    return float(np.ravel(values)[0])
