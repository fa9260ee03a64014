"""Is a run as fast as it should be? What the estimate says of its plan on its site, beside what
its steps took, and what views say of both.

An `Outlook` is worked out in a thread of its own and seldom, so no view waits for it: the estimate
imports much, which is why that happens where it is used, and the ledger reads the whole history.
What cannot be told says why.
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

EVERY_S, SHARE = 20.0, 0.02
"""Least seconds between two answers, and the most of its time that a view spends on them."""
BAND = "expected (modelled, 90 %)"
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
"""(column of the metrics, terms of the estimate whose time it should take) of each part of a step.
The part that explains most comes first. WAITS is measured within the other parts, so it is not
added to them."""

Band = dict[str, Any]
"""The 90 % interval of the estimate for an `attempt`: `step_time_s`, and the speeds that follow,
`tokens_per_s` and `mfu` (None for an unknown peak), low and high."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pace:
    """What a step of an attempt should take, and what it takes."""

    expected_s: float
    low_s: float
    high_s: float
    """The 90 % interval."""
    terms_s: dict[str, float]
    """Of the estimate, the largest first."""
    calibration: str
    """What the estimate rests on."""
    warnings: tuple[str, ...]
    took_s: float
    """Median of the newest steps; NaN for too few of them."""
    took_steps: int
    """Number of steps whose median `took_s` is."""
    parts_s: dict[str, float]
    """Median seconds of each recorded part of a step on rank 0, by its name in MEASURED. The parts
    do not overlap."""
    waiting_s: float | None
    """Median seconds, within these parts, in which rank 0 waited for other ranks or the network;
    None where that was not recorded."""
    band: Band

    @property
    def slow_part(self) -> str | None:
        """The part of a step slower than its interval that makes up more than half of what is
        too much.
        """
        if not self.took_s > self.high_s:
            return None
        own_s = dict(self.parts_s)
        if PASSES in own_s and self.waiting_s is not None:
            own_s |= {WAITS: self.waiting_s, PASSES: own_s[PASSES] - self.waiting_s}
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
            return (
                f"expected: {self.low_s:.3g} to {self.high_s:.3g} s a step ({self.calibration});"
                " too few steps to compare"
            )
        text = sentence(
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
        """Returns plain values, for JSON."""
        return {**dataclasses.asdict(self), "verdict": self.verdict}


def sentence(
    took_s: float, expected_s: float, low_s: float, high_s: float, label: str, steps: str = ""
) -> str:
    """Returns how a step time compares with its 90 % interval.

    `label` says which runs the estimate is fitted to. `steps` says over which steps the step time
    is taken: a view may show it beside a step time over fewer steps.
    """
    took = f"{took_s:.3g} s ({steps})" if steps else f"{took_s:.3g} s"
    band = f"{low_s:.3g} to {high_s:.3g} s a step"
    if low_s <= took_s <= high_s:
        return f"as expected: {took}, 90 % interval {band} ({label})"
    ratio = took_s / expected_s - 1
    how = "slower" if ratio > 0 else "faster"
    return f"{how} than expected by {abs(ratio):.0%}: {took}, not {band} ({label})"


def expectation(run: Run, attempt: int | None = None, metrics: Metrics | None = None) -> Pace:
    """Returns how the newest steps of an attempt compare with what the estimate says of them, by
    its plan and its site; by default of the newest attempt. `metrics` are its steps, if they are
    read already.

    Raises:
        ConfigError: the site lacks a number that the estimate needs.
    """
    from kit.estimate.fit.calibrate import calibrate, published_calibration
    from kit.estimate.fit.measured_rows import hardware_on
    from kit.estimate.theory.layouts import Layouts

    if attempt is None:
        attempt = max(*run.plans(), last_attempt(run.directory), 1)
    plan, site = run.plans().get(attempt, run.plan), run.other_sites().get(attempt, run.site)
    layouts = Layouts.of(run.spec, [plan])
    hardware = hardware_on(site, layouts, plan.precision)
    calibration = (
        calibrate([], site, hardware=hardware)
        if site.scheduler == "local"
        else published_calibration(site)
    )
    prediction = calibration.predict(layouts, hardware)
    terms_s = {
        name: np.asarray(value).item() for name, value in prediction.step_time.terms_s.items()
    }
    took_s, took_steps, parts_s = _took(metrics or run.metrics(), attempt)
    waiting_s = parts_s.pop(WAITS, None)
    tokens = plan.global_batch_size * run.spec.sequence_length
    rates = utilisation_rates(run.spec, plan, site, is_imported=run.is_imported)
    at_peak_s = tokens * rates[0] if rates else 0.0  # nothing is faster, however wide the interval
    low_s, high_s = (
        max(at_peak_s, np.asarray(end).item()) for end in (prediction.low_s, prediction.high_s)
    )
    slow, fast = tokens / high_s, tokens / low_s
    return Pace(
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
            "mfu": None if rates is None else (rates[0] * slow, rates[0] * fast),
        },
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


def _took(metrics: Metrics, attempt: int) -> tuple[float, int, dict[str, float]]:
    """Returns (median seconds of an attempt's newest steps, number of these steps, median seconds
    of their recorded parts by name in MEASURED). The median is NaN for too few steps.
    """
    known = (metrics["attempt"] == attempt) & np.isfinite(metrics["step_time_s"])
    rows = np.flatnonzero(known)[WARM:][-RECENT:]
    if len(rows) < WARM:
        return math.nan, len(rows), {}
    told = {name: column for name, (column, _) in MEASURED.items() if column in metrics.columns}
    parts = {name: float(np.median(metrics[column][rows])) for name, column in told.items()}
    parts = {name: seconds for name, seconds in parts.items() if np.isfinite(seconds)}
    took_s = float(np.median(metrics["step_time_s"][rows]))
    phases = [seconds for name, seconds in parts.items() if name not in (DATA, WAITS)]
    if phases and DATA in parts:  # beside a GPU's work it costs nothing
        parts[DATA] = min(parts[DATA], max(0.0, took_s - sum(phases)))
    return took_s, len(rows), parts


class Outlook:
    """What was worked out last, for views.

    `facts` are plain values, for JSON: the `band` of the newest attempt and its `label`, the
    `verdict` in one sentence, of what a step is made, and the goodput; empty until `refresh` has
    had its first answer. `earlier` was of the same run before it changed: its facts, without the
    verdict, are shown until then.
    """

    def __init__(
        self, run: Run, steps: Callable[[], Metrics], *, earlier: "Outlook | None" = None
    ) -> None:
        self.run = run
        self.steps = steps
        self.facts: dict[str, Any] = {
            "label": BAND,
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
        """Sees to it that the answers are not much older than EVERY_S; with `wait` there is one
        afterwards.
        """
        if time.monotonic() >= self._due:
            self._due = float("inf")
            self._thread = threading.Thread(target=self._work_out, name="kit_outlook", daemon=True)
            self._thread.start()
        if wait and self._thread is not None:
            self._thread.join()

    def _work_out(self) -> None:
        start = time.thread_time()
        try:
            spent = ledger(self.run)
            goodput = {
                "share": spent.goodput if math.isfinite(spent.goodput) else None,
                "usd": spent.usd,
                "parts": [row for row in spent.rows() if row["seconds"] > 0],
            }
        except Exception:  # no attempt yet, or a directory that is gone: the bar is left out
            goodput = None
        self.facts = {"label": BAND, **compare(self.run, self.steps()), "goodput": goodput}
        self._due = time.monotonic() + max(EVERY_S, (time.thread_time() - start) / SHARE)


def compare(run: Run, metrics: Metrics) -> dict[str, Any]:
    """Returns the expected `band` of the newest attempt of a run with these steps if there is one,
    the `verdict`, one sentence, and `parts_s`, what a step is made of.

    Raises nothing.
    """
    try:
        found = expectation(run, metrics=metrics)
        parts_s = dict(found.parts_s)
        if found.waiting_s is not None:
            parts_s[f"of these, {WAITS}"] = found.waiting_s
        return {"band": found.band, "verdict": found.verdict, "parts_s": parts_s}
    except Exception as error:  # whatever a site file or a directory lacks: a view goes on without
        why = _first_line(error) or type(error).__name__
        return {"band": None, "verdict": f"no estimate: {why}", "parts_s": {}}


def _first_line(error: Exception) -> str:
    """Returns the first line of an error, without a sentence that introduces the next line, such as
    "For example:", and without its full stop.
    """
    line, *_ = str(error).splitlines() or [""]
    return re.sub(r"[^.]*:$", "", line).rstrip(". ")
