"""Comparison of a run's measured speed with the predicted speed of its plan on its site.

`compare_speed` compares once. Views use a `SpeedMonitor`, which compares at long intervals in a
separate thread, so no view waits. A comparison is slow, since the estimate imports many modules and
the ledger reads the whole history. If there is no estimate, the verdict gives the reason.
"""

import dataclasses
import math
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cluster.state import last_attempt
from kit.errors import RunError
from kit.monitor.goodput import ledger
from kit.run import Run
from kit.run.metrics import Metrics, utilisation_rates

REFRESH_S = 20.0
"""Least time between two comparisons of one view, in seconds."""
MAX_TIME_SHARE = 0.02
"""Largest fraction of its time that a view spends on comparisons."""
BAND_LABEL = "expected (modelled, 90 %)"
WARM_UP_STEPS = 5
"""Number of first steps of an attempt that are left out. It is also the least number of further
steps for a comparison."""
COMPARED_STEPS = 200
"""Largest number of the newest steps whose median is compared."""
DATA = "waiting for data"
WAITS = "waiting for other ranks or the network"
PASSES = "forward and backward pass"
NETWORK_TERMS = ("tensor_parallel", "context_parallel", "pipeline_send", "bubble", "data_parallel")
COMPUTE_TERMS = ("gemm", "attention", "elementwise", "host_launch", "recompute", "overhead")
STEP_PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    DATA: ("data_s", ()),
    "the optimizer": ("optimizer_s", ("optimizer",)),
    WAITS: ("waiting_s", NETWORK_TERMS),
    "reduction, norm and clipping of gradients": ("reduction_s", ("data_parallel",)),
    PASSES: ("forward_backward_s", COMPUTE_TERMS),
}
"""(column of the metrics, terms of the estimate that predict its time), by part of a step. In
this order the parts are tried as the cause of a slow step. WAITS is measured within the other
parts, so it is not added to their sum."""

Band = dict[str, Any]
"""90 % intervals of the estimate for one attempt. The key `attempt` is the number of the
attempt. The keys `step_time_s`, `tokens_per_s` and `mfu` have (low, high). `mfu` is None if the
peak is unknown."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedComparison:
    """Expected and measured step time of an attempt."""

    expected_s: float
    """Predicted step time in seconds."""
    low_s: float
    """Lower end of the 90 % interval of the step time, in seconds."""
    high_s: float
    """Upper end of the 90 % interval of the step time, in seconds."""
    terms_s: dict[str, float]
    """Predicted seconds of each term of the estimate, the largest first."""
    calibration: str
    """Name of the runs to which the estimate is fitted."""
    warnings: tuple[str, ...]
    """Warnings of the estimate."""
    took_s: float
    """Measured step time: median over the newest steps, in seconds. NaN for too few steps."""
    took_steps: int
    """Number of steps over which `took_s` is the median."""
    parts_s: dict[str, float]
    """Median seconds of each recorded part of a step on rank 0, by name in STEP_PARTS. The parts do
    not overlap."""
    waiting_s: float | None
    """Median seconds, within `parts_s`, for which rank 0 waited for other ranks or the network.
    None if the wait was not recorded."""
    band: Band
    """Intervals of step time and speeds, for charts."""

    @property
    def slow_part(self) -> str | None:
        """Part of a step that explains more than half of the excess over the expected time. None
        if the step time is not above its interval, or if no single part explains half of the
        excess.
        """
        if not self.took_s > self.high_s:
            return None
        own_s = dict(self.parts_s)
        if PASSES in own_s and self.waiting_s is not None:
            own_s |= {WAITS: self.waiting_s, PASSES: own_s[PASSES] - self.waiting_s}
        half_s = (self.took_s - self.expected_s) / 2
        for name, (_, terms) in STEP_PARTS.items():
            if own_s.get(name, 0.0) - sum(self.terms_s[term] for term in terms) > half_s:
                return name
        return None

    @property
    def verdict(self) -> str:
        """Sentence with the result of the comparison. For a slow run, a second sentence names the
        slow part of a step, if it was measured.
        """
        if math.isnan(self.took_s):
            return (
                f"expected: {self.low_s:.3g} to {self.high_s:.3g} s a step ({self.calibration});"
                " too few steps to compare"
            )
        text = comparison_sentence(
            self.took_s,
            self.expected_s,
            self.low_s,
            self.high_s,
            self.calibration,
            steps=f"median of {self.took_steps} steps",
        )
        part = self.slow_part
        if part is None:
            return text
        seconds = {WAITS: self.waiting_s, **self.parts_s}[part]
        return f"{text}. Most of it: {part}, {seconds:.3g} s a step"

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields and the verdict as plain values for JSON."""
        return {**dataclasses.asdict(self), "verdict": self.verdict}


def comparison_sentence(
    took_s: float, expected_s: float, low_s: float, high_s: float, label: str, steps: str = ""
) -> str:
    """Returns a sentence that compares a step time with its 90 % interval.

    Args:
        took_s: measured step time in seconds.
        expected_s: predicted step time in seconds.
        low_s: lower end of the interval in seconds.
        high_s: upper end of the interval in seconds.
        label: name of the runs to which the estimate is fitted.
        steps: phrase for the steps over which `took_s` is taken. A view may show the sentence
            beside a step time over fewer steps.
    """
    took = f"{took_s:.3g} s ({steps})" if steps else f"{took_s:.3g} s"
    band = f"{low_s:.3g} to {high_s:.3g} s a step"
    if low_s <= took_s <= high_s:
        return f"as expected: {took}, 90 % interval {band} ({label})"
    ratio = took_s / expected_s - 1
    how = "slower" if ratio > 0 else "faster"
    return f"{how} than expected by {abs(ratio):.0%}: {took}, not {band} ({label})"


def compare_attempt(
    run: Run, attempt: int | None = None, metrics: Metrics | None = None
) -> SpeedComparison:
    """Returns the comparison of an attempt's newest steps with the estimate for its plan and site.

    Args:
        run: the run.
        attempt: number of the attempt. The default is the newest attempt.
        metrics: steps of the run, if the caller has read them already.

    Raises:
        ConfigError: The site lacks a number that the estimate needs.
    """
    from kit.estimate.fit.calibrate import calibrate, published_calibration
    from kit.estimate.fit.measured_rows import hardware_on
    from kit.estimate.theory.layouts import Layouts

    if attempt is None:
        attempt = max(*run.plans(), last_attempt(run.directory), 1)
    plan = run.plans().get(attempt, run.plan)
    site = run.other_sites().get(attempt, run.site)
    layouts = Layouts.of(run.spec, [plan])
    hardware = hardware_on(site, layouts, plan.precision)
    if site.scheduler == "local":
        calibration = calibrate([], site, hardware=hardware)
    else:
        calibration = published_calibration(site)
    prediction = calibration.predict(layouts, hardware)
    terms_s = {
        name: np.asarray(value).item() for name, value in prediction.step_time.terms_s.items()
    }
    took_s, took_steps, parts_s = _measured_step(metrics or run.metrics(), attempt)
    waiting_s = parts_s.pop(WAITS, None)
    tokens = plan.global_batch_size * run.spec.sequence_length
    rates = utilisation_rates(run.spec, plan, site, is_imported=run.is_imported)
    # No step can be faster than at the peak, so the interval is limited by the peak.
    at_peak_s = tokens * rates[0] if rates else 0.0
    low_s = max(at_peak_s, np.asarray(prediction.low_s).item())
    high_s = max(at_peak_s, np.asarray(prediction.high_s).item())
    slow = tokens / high_s
    fast = tokens / low_s
    mfu_band = (rates[0] * slow, rates[0] * fast) if rates else None
    return SpeedComparison(
        expected_s=np.asarray(prediction.total_s).item(),
        low_s=low_s,
        high_s=high_s,
        terms_s=dict(sorted(terms_s.items(), key=lambda item: -item[1])),
        calibration=calibration.label,
        warnings=prediction.warnings,
        took_s=took_s,
        took_steps=took_steps,
        parts_s=parts_s,
        waiting_s=waiting_s,
        band={
            "attempt": attempt,
            "step_time_s": (low_s, high_s),
            "tokens_per_s": (slow, fast),
            "mfu": mfu_band,
        },
    )


def compare_speed(run: Run) -> SpeedComparison:
    """Returns the comparison of a run's newest attempt with the estimate.

    Raises:
        RunError: The newest attempt has too few steps.
        ConfigError: The site lacks a number that the estimate needs.
    """
    comparison = compare_attempt(run)
    if math.isnan(comparison.took_s):
        raise RunError(
            f"{run.directory}: the newest attempt has fewer than {2 * WARM_UP_STEPS} steps. Ask"
            " again when it has more."
        )
    return comparison


def _measured_step(metrics: Metrics, attempt: int) -> tuple[float, int, dict[str, float]]:
    """Returns (median seconds of an attempt's newest steps, number of these steps, median seconds
    of each recorded part by name in STEP_PARTS). For too few steps, the median is NaN and there are
    no parts.
    """
    known = (metrics["attempt"] == attempt) & np.isfinite(metrics["step_time_s"])
    rows = np.flatnonzero(known)[WARM_UP_STEPS:][-COMPARED_STEPS:]
    if len(rows) < WARM_UP_STEPS:
        return math.nan, len(rows), {}
    parts: dict[str, float] = {}
    for name, (column, _) in STEP_PARTS.items():
        seconds = float(np.median(metrics[column][rows])) if column in metrics.columns else math.nan
        if math.isfinite(seconds):
            parts[name] = seconds
    took_s = float(np.median(metrics["step_time_s"][rows]))
    phases = [seconds for name, seconds in parts.items() if name not in (DATA, WAITS)]
    if phases and DATA in parts:  # Data loading that overlaps work of the GPU does not count.
        parts[DATA] = min(parts[DATA], max(0.0, took_s - sum(phases)))
    return took_s, len(rows), parts


class SpeedMonitor:
    """Compares the speed of a run with the estimate at intervals, in a thread.

    Attributes:
        facts: result of the last comparison as plain values for JSON: `band` of the newest attempt
            and its `label`, the sentence `verdict`, `parts_s` of a step, and `goodput`. Before the
            first result, the values are empty or None.

    Args:
        run: the run.
        read_metrics: function that returns the steps that were read so far.
        earlier: monitor of the same run before the run changed. Its facts, without the verdict, are
            shown until the first result.
    """

    def __init__(
        self,
        run: Run,
        read_metrics: Callable[[], Metrics],
        *,
        earlier: "SpeedMonitor | None" = None,
    ) -> None:
        self.run = run
        self.read_metrics = read_metrics
        self.facts: dict[str, Any] = {
            "label": BAND_LABEL,
            "band": None,
            "verdict": "",
            "parts_s": {},
            "goodput": None,
        }
        if earlier is not None:
            self.facts = {**earlier.facts, "verdict": ""}
        self._due = 0.0
        self._thread: threading.Thread | None = None

    def refresh(self, *, wait: bool = False) -> None:
        """Starts a comparison in a thread, if the last comparison is older than REFRESH_S or, for a
        slow one, older than MAX_TIME_SHARE requires. With `wait`, waits for the result.
        """
        if time.monotonic() >= self._due:
            self._due = float("inf")
            self._thread = threading.Thread(target=self._compare, name="kit_speed", daemon=True)
            self._thread.start()
        if wait and self._thread is not None:
            self._thread.join()

    def _compare(self) -> None:
        """Computes `facts` and the time at which the next comparison is due."""
        start = time.thread_time()
        try:
            spent = ledger(self.run)
            share = spent.goodput if math.isfinite(spent.goodput) else None
            goodput = {
                "share": share,
                "usd": spent.usd,
                "parts": [row for row in spent.rows() if row["seconds"] > 0],
            }
        except Exception:  # No attempt yet, or a removed directory. The view leaves goodput out.
            goodput = None
        self.facts = {
            "label": BAND_LABEL,
            **speed_facts(self.run, self.read_metrics()),
            "goodput": goodput,
        }
        self._due = time.monotonic() + max(REFRESH_S, (time.thread_time() - start) / MAX_TIME_SHARE)


def speed_facts(run: Run, metrics: Metrics) -> dict[str, Any]:
    """Returns `band`, `verdict` and `parts_s` of the newest attempt as plain values. If there is no
    estimate, `band` is None and `verdict` gives the reason.

    Never raises an exception.
    """
    try:
        comparison = compare_attempt(run, metrics=metrics)
        parts_s = dict(comparison.parts_s)
        if comparison.waiting_s is not None:
            parts_s[f"of these, {WAITS}"] = comparison.waiting_s
        return {"band": comparison.band, "verdict": comparison.verdict, "parts_s": parts_s}
    except Exception as error:  # Files may be missing or damaged. The view continues.
        why = _first_line(error) or type(error).__name__
        return {"band": None, "verdict": f"no estimate: {why}", "parts_s": {}}


def _first_line(error: Exception) -> str:
    """Returns the first line of an error message without its last full stop. A last sentence that
    ends with a colon, such as "For example:", is left out.
    """
    line, *_ = str(error).splitlines() or [""]
    return re.sub(r"[^.]*:$", "", line).rstrip(". ")
