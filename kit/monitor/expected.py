"""Is a run as fast as it should be? What the estimate says of its plan on its site, beside what
its steps took, and what views say of both.

An `Outlook` is worked out in a thread of its own and seldom, so no view waits for it: the estimate
imports much, which is why that happens where it is used, and the ledger reads the whole history.
What cannot be told says why.
"""

import dataclasses
import math
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from cluster.record import ConfigError
from cluster.site import Site
from cluster.state import last_attempt
from kit.errors import RunError
from kit.monitor.goodput import ledger
from kit.plan import Plan
from kit.run import Run
from kit.run.metrics import Metrics, utilisation_rates
from kit.show.theme import GREY

EVERY_S, SHARE = 20.0, 0.02
"""Least seconds between two answers, and the most of its time that a view spends on them."""
FAR = 4
"""Times the speeds that a chart shows anyway, up to which it is made higher for the band: the
curve must stay one."""
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
Band = dict[str, Any]
"""The 90 % interval of the estimate for an `attempt`: `step_time_s`, and the speeds that follow,
`tokens_per_s` and `mfu` (None for an unknown peak), low and high."""


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
    nearest: str
    """Published run; none for a plan of this machine."""
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
            "nearest": self.nearest or None,
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
    from kit.estimate.choose.nearest import nearest_run
    from kit.estimate.fit.calibrate import calibrate, published_calibration
    from kit.estimate.fit.measured_rows import hardware_on
    from kit.estimate.theory.layouts import Layouts

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
    found = None if is_local else nearest_run(run.spec, plan, hardware, calibration.coefficients)
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
        nearest=str(found or ""),
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


class Outlook:
    """What was worked out last; empty until `refresh` has had its first answer."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.band: Band | None = None
        self.verdict, self.parts_s = "", dict[str, float]()
        self.goodput: dict[str, Any] | None = None
        self._due, self._thread = 0.0, None

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

    def again(self, run: Run) -> None:
        """Forgets when it last looked: the run has another attempt or another site."""
        self.run, self._due, self.verdict = run, 0.0, ""

    def facts(self) -> dict[str, Any]:
        """Returns the answers as plain values, for JSON."""
        names = ("band", "verdict", "parts_s", "goodput")
        return {"label": BAND} | {name: getattr(self, name) for name in names}

    def _work_out(self) -> None:
        start = time.thread_time()
        self.band, self.verdict, self.parts_s = compare(self.run)
        try:
            self.goodput = _goodput(self.run)
        except Exception:  # no attempt yet, or a directory that is gone: the bar is left out
            self.goodput = None
        self._due = time.monotonic() + max(EVERY_S, (time.thread_time() - start) / SHARE)


def compare(run: Run) -> tuple[Band | None, str, dict[str, float]]:
    """Returns the expected band of the newest attempt if there is one, one sentence, and what a
    step is made of.

    Raises nothing.
    """
    try:
        found = expectation(run)
        return _band(run, found), found.verdict, found.parts_s
    except Exception as error:  # whatever a site file or a directory lacks: a view goes on without
        why = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        return None, f"no estimate: {why}", {}


def draw_band(
    axis: Any, band: Band | None, first_steps: Mapping[int, float], last: float, name: str
) -> None:
    """Draws the band into a chart of `mfu` (in per cent) or `tokens_per_s` over steps, from its
    attempt's first on.
    """
    speeds = band[name] if band else None
    if band is None or speeds is None:
        return
    low, high = (100 * speed if name == "mfu" else speed for speed in speeds)
    start = first_steps.get(band["attempt"], 0)
    bottom, top = axis.get_ylim()
    axis.fill_between(
        (start, max(last, start)), low, high, color=GREY, alpha=0.16, linewidth=0, zorder=0
    )
    axis.set_ylim(min(bottom, low), max(top, min(high, FAR * top)))
    axis.set_xlabel(f"{axis.get_xlabel()}\ngrey: {BAND}", loc="right")


def _band(run: Run, expected: Pace) -> Band:
    tokens = expected.plan.global_batch_size * run.spec.sequence_length
    slow, fast = tokens / expected.high_s, tokens / expected.low_s
    rates = utilisation_rates(run.spec, expected.plan, expected.site, is_imported=run.is_imported)
    return {
        "attempt": expected.attempt,
        "step_time_s": (expected.low_s, expected.high_s),
        "tokens_per_s": (slow, fast),
        "mfu": None if rates is None else (rates[0] * slow, rates[0] * fast),
    }


def _goodput(run: Run) -> dict[str, Any]:
    found = ledger(run)
    return {
        "share": found.goodput if math.isfinite(found.goodput) else None,
        "usd": found.usd,
        "parts": [row for row in found.rows() if row["seconds"] > 0],
    }
