"""Compares the measured step time of a run with the step time that the planner predicts for its
plan and site.

`compare_speed` compares once. Views use a `SpeedMonitor`, which compares at long intervals in a
separate thread, so that a view never waits. A comparison is slow, since the prediction imports many
modules, and the computation of goodput reads the whole history. If no prediction can be made, the
verdict gives the reason.
"""

import dataclasses
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cluster.record import shortened
from cluster.state import last_attempt
from kit.errors import RunError
from kit.monitor.goodput import ledger
from kit.run import Run
from kit.run.metrics import Metrics, utilisation_rates
from kit.show.results import short_number

REFRESH_S = 20.0
"""Least time between two comparisons by one view, in seconds."""
MAX_TIME_SHARE = 0.02
"""Largest fraction of a view's time that is spent on comparisons. After a slow comparison, the next
one is made later."""
LONGEST_REASON = 400
"""Largest number of characters of the reason in a verdict without an estimate. A damaged file can
make an error message of any length."""
BAND_LABEL = "expected (modelled, 90 %)"
WARM_UP_STEPS = 5
"""Number of steps at the beginning of an attempt that are left out of the measured step time. The
step time is compared with the prediction only after this number of further steps."""
COMPARED_STEPS = 200
"""Largest number of newest steps over which the measured step time is the median."""
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
"""Parts of a training step, mapped to (column of metrics.jsonl with the seconds of the part, terms
of the predicted step time for the part). They are examined in this order as the cause of a slow
step. The part WAITS is contained in other parts, so it is not added to their sum."""

Band = dict[str, Any]
"""90 % intervals of the planner's prediction for one attempt. `attempt` is the number of the
attempt. `step_time_s`, `tokens_per_s` and `mfu` are (low, high). `mfu` is None if the peak is
unknown."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedComparison:
    """Predicted and measured step time of one attempt."""

    expected_s: float
    """Predicted step time in seconds."""
    low_s: float
    """Lower end of the 90 % interval of the predicted step time, in seconds."""
    high_s: float
    """Upper end of the 90 % interval of the predicted step time, in seconds."""
    terms_s: dict[str, float]
    """Predicted seconds of each term of the step time (such as gemm or bubble), by name, the
    largest first."""
    calibration: str
    """Description of the runs to which the prediction is fitted. It is part of printed sentences.
    """
    warnings: tuple[str, ...]
    """Warnings of the planner about its prediction."""
    took_s: float
    """Measured step time in seconds: median over the newest steps. NaN if the attempt has too few
    steps."""
    took_steps: int
    """Number of training steps over which the measured step time `took_s` is the median."""
    parts_s: dict[str, float]
    """Median seconds of each recorded part of a step on rank 0. Keys are the names in STEP_PARTS
    except WAITS, so the parts do not overlap."""
    waiting_s: float | None
    """Median seconds per step for which rank 0 waited for other ranks or the network, contained in
    `parts_s`. None if the wait was not recorded."""
    band: Band
    """90 % intervals of step time, tokens per second and MFU, for charts."""

    @property
    def slow_part(self) -> str | None:
        """Name of the part of a step that explains more than half of the excess over the predicted
        step time. None if the step time is not above its interval, or if no part explains half of
        the excess.
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
        slow part of a step, if there is one.
        """
        if math.isnan(self.took_s):
            band = _band_words(self.expected_s, self.low_s, self.high_s, self.calibration)
            return f"expected: {band}; too few steps to compare"
        text = comparison_sentence(
            self.took_s,
            self.expected_s,
            self.low_s,
            self.high_s,
            self.calibration,
            steps=f"median of the last {self.took_steps} steps",
        )
        part = self.slow_part
        if part is None:
            return text
        seconds = {WAITS: self.waiting_s, **self.parts_s}[part]
        return f"{text}. Most of it: {part}, {short_number(seconds)} s a step"

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields and the verdict as a dict of plain values for JSON."""
        return {**dataclasses.asdict(self), "verdict": self.verdict}


def comparison_sentence(
    took_s: float, expected_s: float, low_s: float, high_s: float, label: str, steps: str = ""
) -> str:
    """Returns a sentence that compares a measured step time with its predicted 90 % interval.

    Args:
        took_s: measured step time in seconds.
        expected_s: predicted step time in seconds.
        low_s: lower end of the interval in seconds.
        high_s: upper end of the interval in seconds.
        label: description of the runs to which the prediction is fitted.
        steps: phrase such as `median of the last 200 steps`, which says over which steps `took_s`
            was measured. It is needed if the view also shows a step time over fewer steps.
    """
    took = f"measured {short_number(took_s)} s a step"
    if steps:
        took += f" ({steps})"
    text = f"{took}, predicted {_band_words(expected_s, low_s, high_s, label)}"
    if low_s <= took_s <= high_s:
        return f"as expected: {text}"
    ratio = took_s / expected_s - 1
    how = "slower" if ratio > 0 else "faster"
    return f"{how} than expected by {abs(ratio):.0%}: {text}"


def _band_words(expected_s: float, low_s: float, high_s: float, label: str) -> str:
    """Returns a predicted step time with its 90 % interval in words. `label` describes the runs to
    which the prediction is fitted.
    """
    interval = f"{short_number(low_s)} to {short_number(high_s)} s"
    return f"{short_number(expected_s)} s, 90 % interval {interval} ({label})"


def compare_speed_with_prediction(
    run: Run, attempt: int | None = None, metrics: Metrics | None = None
) -> SpeedComparison:
    """Returns the comparison of the step time of an attempt's newest steps with the prediction for
    its plan and site.

    Args:
        run: the run.
        attempt: number of the attempt. The default is the newest attempt.
        metrics: training steps of the run. None: they are read from the files.

    Raises:
        ConfigError: The site file lacks a number that the prediction needs.
    """
    from kit.estimate.fit.calibrate import calibrate, own_calibration
    from kit.estimate.fit.measured_rows import hardware_on
    from kit.estimate.theory.layouts import Layouts

    if attempt is None:
        attempt = max(*run.plans(), last_attempt(run.directory), 1)
    plan = run.plans().get(attempt, run.plan)
    site = run.other_sites().get(attempt, run.site)
    layouts = Layouts.of(run.spec, [plan], muon=run.recipe.optimizer == "muon")
    hardware = hardware_on(site, layouts, plan.precision)
    if site.scheduler == "local":
        calibration = calibrate([], site, hardware=hardware)
    else:
        calibration = own_calibration([], site)
    prediction = calibration.predict(layouts, hardware)
    terms_s = {
        name: np.asarray(value).item() for name, value in prediction.step_time.terms_s.items()
    }
    took_s, took_steps, parts_s = _measured_step(metrics or run.metrics(), attempt)
    waiting_s = parts_s.pop(WAITS, None)
    tokens = plan.global_batch_size * run.spec.sequence_length
    rates = utilisation_rates(run.spec, plan, site, is_imported=run.is_imported)
    # At the peak FLOP/s a step takes `at_peak_s`. No step can be faster, so the interval is cut off
    # there.
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
    """Returns the comparison of the measured and the predicted step time of a run's newest attempt.

    Raises:
        RunError: The newest attempt has too few steps.
        ConfigError: The site file lacks a number that the prediction needs.
    """
    comparison = compare_speed_with_prediction(run)
    if math.isnan(comparison.took_s):
        raise RunError(
            f"{run.directory}: the newest attempt has fewer than {2 * WARM_UP_STEPS} steps. Ask"
            " again when it has more."
        )
    return comparison


def _measured_step(metrics: Metrics, attempt: int) -> tuple[float, int, dict[str, float]]:
    """Returns (median step time in seconds, number of steps, median seconds of each recorded part
    by its name in STEP_PARTS), over an attempt's newest steps. For too few steps, the median is NaN
    and no part is returned.
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
    # Data loading delays a step only by the time that the other parts leave, since loading overlaps
    # them.
    if phases and DATA in parts:
        parts[DATA] = min(parts[DATA], max(0.0, took_s - sum(phases)))
    return took_s, len(rows), parts


class SpeedMonitor:
    """Compares the step time of a run with the planner's prediction at intervals, in a thread.

    Attributes:
        facts: result of the last comparison as plain values for JSON. `band` has the intervals of
            the newest attempt, `label` is the name of these intervals in charts, and `verdict` is a
            sentence. `parts_s` has the seconds of each part of a step, and `goodput` the result of
            `kit.monitor.goodput.ledger`. Before the first comparison, the values except `label` are
            empty or None.

    Args:
        run: the run.
        read_metrics: function that returns the training steps that were read so far.
        earlier: monitor of this run before its plan or site changed. Its facts, without the
            verdict, are shown until the first comparison.
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

    def update_comparison(self, *, wait: bool = False) -> None:
        """Starts a comparison in a thread if the last one is too old. The limit is REFRESH_S, or
        longer after a slow comparison, as MAX_TIME_SHARE requires. With `wait`, waits for the
        result.
        """
        if time.monotonic() >= self._due:
            self._due = float("inf")
            self._thread = threading.Thread(target=self._compare, name="kit_speed", daemon=True)
            self._thread.start()
        if wait and self._thread is not None:
            self._thread.join()

    def _compare(self) -> None:
        """Compares the measured and the predicted step time, stores the result in `facts`, and sets
        the time of the next comparison.
        """
        start = time.thread_time()
        try:
            spent = ledger(self.run)
            share = spent.goodput if math.isfinite(spent.goodput) else None
            goodput = {
                "share": share,
                "usd": spent.usd,
                "parts": [row for row in spent.rows() if row["seconds"] > 0],
            }
        # The run has no attempt yet, or its directory was removed. The view then shows no goodput.
        except Exception:
            goodput = None
        self.facts = {
            "label": BAND_LABEL,
            **speed_facts(self.run, self.read_metrics()),
            "goodput": goodput,
        }
        self._due = time.monotonic() + max(REFRESH_S, (time.thread_time() - start) / MAX_TIME_SHARE)


def speed_facts(run: Run, metrics: Metrics) -> dict[str, Any]:
    """Returns `band` (intervals), `verdict` (a sentence) and `parts_s` (seconds of each part of a
    step) of a run's newest attempt, as plain values. If no prediction can be made, `band` is None
    and `verdict` gives the reason.

    The function never raises an exception, since a view must continue.
    """
    try:
        comparison = compare_speed_with_prediction(run, metrics=metrics)
        parts_s = dict(comparison.parts_s)
        if comparison.waiting_s is not None:
            parts_s[f"of these, {WAITS}"] = comparison.waiting_s
        return {"band": comparison.band, "verdict": comparison.verdict, "parts_s": parts_s}
    # Files of the run may be missing or damaged. The view must continue.
    except Exception as error:
        why = shortened(_first_line(error), LONGEST_REASON) or type(error).__name__
        return {"band": None, "verdict": f"no estimate: {why}", "parts_s": {}}


def _first_line(error: Exception) -> str:
    """Returns the first line of an error message without the full stop at its end. If the line ends
    with a sentence that introduces an example ("For example:"), this sentence is removed.
    """
    line, *_ = str(error).splitlines() or [""]
    if line.endswith(":"):
        line, *_ = line.rpartition(".")
    return line.rstrip(". ")
