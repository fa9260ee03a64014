"""What a view says of a run's speed beyond its numbers: what its plan should reach on its site, and
its goodput.

Worked out in a thread of its own and seldom, so no view waits for it: the estimate imports much,
and the ledger reads the whole history. What cannot be told says why.
"""

import math
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kit.run import Run
from kit.run.metrics import utilisation_rates
from kit.show.theme import GREY

if TYPE_CHECKING:
    from kit.monitor.expected import Pace

EVERY_S, SHARE = 20.0, 0.02
"""Least seconds between two answers, and the most of its time that a view spends on them."""
FAR = 4
"""Times the speeds that a chart shows anyway, up to which it is made higher for the band: the
curve must stay one."""
BAND = "expected (modelled, 90 %)"


Band = dict[str, Any]
"""The 90 % interval of the estimate for an `attempt`: `step_time_s`, and the speeds that follow,
`tokens_per_s` and `mfu` (None for an unknown peak), low and high."""


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
        from kit.monitor.expected import expectation

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


def _band(run: Run, expected: "Pace") -> Band:
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
    from kit.monitor.goodput import ledger

    found = ledger(run)
    return {
        "share": found.goodput if math.isfinite(found.goodput) else None,
        "usd": found.usd,
        "parts": [row for row in found.rows() if row["seconds"] > 0],
    }
