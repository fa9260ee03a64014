"""Goodput: where the time of a job's nodes went, from what its run directory has recorded anyway.

Every second from the first submission to the last sign of life belongs to one part, so the parts
add up to the wall time. Events of `history.jsonl` bound the attempts, rows of `metrics.jsonl` the
steps within them. Goodput is the share of the time of the nodes in steps that count, as in "ML
productivity goodput" of Google's and MLPerf's reports.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from cluster.record import Record, field_doc
from cluster.site import Site
from cluster.state import GIVEN_UP, Event, JobState, read_history, read_state
from kit.config.plan import Plan
from kit.errors import RunError
from kit.run import Run
from kit.run.columns import NAMES, parse_lines, that_count
from kit.run.tail import Tail

PARTS = {
    "productive": "steps that count, each once",
    "repeated": "steps that a later attempt did again",
    "first step": (
        "what an attempt's first step took beyond the next ones: compilation, connections, caches"
    ),
    "start-up": "from the start of its processes to an attempt's first step",
    "checkpoints": "what a save held up; it goes on behind the steps that follow",
    "validation": "the loss on the validation set, after a step",
    "between steps": "records, requests, answers to bad steps",
    "ending": (
        "after the last step of an attempt that ended well, without validation: its last checkpoint"
    ),
    "lost": (
        "after the last step of an attempt that did not: until that was noticed and all was ended"
    ),
    "waiting": "in the queue, before the first attempt and for other nodes",
}
"""What the wall time of a job is made of. No nodes are held in the last of them."""
COLUMNS_READ = (
    "step",
    "attempt",
    "time",
    "step_time_s",
    "checkpoint_s",
    "validation_loss",
    "validation_s",
)
"""Columns of the metrics from which the ledger is made."""
USUAL_STEPS = 20
"""Number of steps after the first step of an attempt whose median is the usual step time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttemptLedger(Record):
    """Where the time of one attempt went."""

    attempt: int = field_doc("counts the starts of the run from 1")
    devices: int = field_doc("devices that it held")
    usd_per_hour: float | None = field_doc(
        "of all its nodes: `usd_per_hour`; None: its site tells no price"
    )
    seconds: dict[str, float] = field_doc("seconds by part")
    end: str = field_doc("one line: what was last heard of it")

    @property
    def held_s(self) -> float:
        """Seconds for which it held its devices: all but the waiting."""
        return sum(seconds for part, seconds in self.seconds.items() if part != "waiting")

    @property
    def goodput(self) -> float:
        """Share of its device-hours in steps that count; NaN before it held any."""
        return self.seconds["productive"] / self.held_s if self.held_s else np.nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ledger(Record):
    """Where the time of a run went."""

    run: str = field_doc("name of the run")
    attempts: tuple[AttemptLedger, ...] = field_doc("attempts in their order")
    idle_s: float = field_doc(
        "seconds between attempts, which nobody had asked for; they are in no part"
    )

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by part, of all attempts."""
        return {part: sum(share.seconds[part] for share in self.attempts) for part in PARTS}

    @property
    def wall_s(self) -> float:
        """Seconds from the first submission to the last sign of life, without those in which no
        attempt was wanted.
        """
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Device-seconds in steps that count over all that were held; NaN before any was."""
        held = sum(share.devices * share.held_s for share in self.attempts)
        counts = sum(share.devices * share.seconds["productive"] for share in self.attempts)
        return counts / held if held else np.nan

    @property
    def usd(self) -> float | None:
        """What the nodes have cost so far; None where the site of an attempt tells no price."""
        spent = [row["usd"] for row in self.rows()]
        return None if None in spent else sum(spent)

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each part: seconds, share of the wall time, device-hours, and the
        price where it is known.
        """
        prices = np.array([share.usd_per_hour for share in self.attempts], float)  # None is NaN
        devices = np.array([share.devices for share in self.attempts])
        rows = []
        wall_s = self.wall_s
        for part, seconds in self.seconds.items():
            # While it waits, a job holds no node.
            factor = 0 if part == "waiting" else 1 / 3600
            held = factor * np.array([share.seconds[part] for share in self.attempts])
            hours = float(held @ devices)
            usd = float(held @ prices)
            rows.append(
                {
                    "part": part,
                    "seconds": seconds,
                    "share": seconds / wall_s if wall_s else np.nan,
                    "device_hours": hours,
                    "usd": None if np.isnan(usd) else usd,
                    "meaning": PARTS[part],
                }
            )
        return rows


def usd_per_hour(plan: Plan, site: Site) -> float | None:
    """Returns the price of an hour of the nodes that a plan takes, None where the site tells none.

    A node that is not full costs what a full one does.
    """
    price = site.price_per_node_hour
    return math.ceil(plan.num_devices / site.devices_per_node) * price.value if price else None


def ledger(run: Run) -> Ledger:
    """Returns where the time of a run went, so far; that of an imported run until the last line
    with a clock.

    Raises:
        RunError: no attempt has begun.
    """
    steps = _steps(run)
    # Of an imported run the history and the state tell of the import.
    history = [] if run.is_imported else read_history(run.directory)
    state = None if run.is_imported else read_state(run.directory)
    numbers = {*steps["attempt"].astype(int).tolist(), *(event.attempt for event in history)}
    if not numbers:
        raise RunError(f"{run.directory} has no attempt yet, so no time has been spent.")
    plans = run.plans()
    sites = run.other_sites()
    shares: list[AttemptLedger] = []
    idle_s = 0.0
    before = None
    was_over = False
    for attempt in sorted(numbers):
        events = [event for event in history if event.attempt == attempt]
        own = {name: column[steps["attempt"] == attempt] for name, column in steps.items()}
        heard = state.heartbeat if state and state.attempt == attempt and state.heartbeat else 0.0
        seconds, begin, end = _attempt(events, own, heard, before)
        gap = max(0.0, begin - before) if before is not None else 0.0
        if not events or events[0].state is JobState.QUEUED:
            idle_s += gap  # a person's start; others go on by themselves
        elif was_over:
            seconds["waiting"] += gap
        elif shares:  # killed with its supervisor: nobody was left to say so
            shares[-1].seconds["lost"] += gap
        before = end
        was_over = any(map(_is_over, events))
        plan = plans.get(attempt, run.plan)
        shares.append(
            AttemptLedger(
                attempt=attempt,
                devices=plan.num_devices,
                usd_per_hour=usd_per_hour(plan, sites.get(attempt, run.site)),
                seconds=seconds,
                end=_last_event(events[-1]) if events else "imported",
            )
        )
    return Ledger(run=run.name, attempts=tuple(shares), idle_s=idle_s)


def _last_event(event: Event) -> str:
    """Returns the last state of an attempt, with its reason if it has one."""
    return f"{event.state}: {event.reason}" if event.reason else str(event.state)


def _attempt(
    events: list[Event], steps: dict[str, np.ndarray], heard: float, before: float | None
) -> tuple[dict[str, float], float, float]:
    """Returns the seconds by part of an attempt, and when it began and ended; `before`: when the
    last one had.
    """
    ends = np.maximum.accumulate(steps["time"])
    starts = np.maximum(ends - steps["step_time_s"], np.append(-np.inf, ends[:-1]))
    times = [event.time for event in events]
    # The earliest event may not be the first: the clock of the submitting machine may be ahead.
    begin = max(min([*times, *starts[:1]]), before or -np.inf)
    held = [
        event.time for event in events if event.state not in (JobState.QUEUED, JobState.CONFIGURING)
    ]
    start = max(begin, min([*held[:1], *starts[:1]], default=begin))
    starts = np.maximum(starts, start)
    ends = np.maximum(ends, start)
    over = [event.time for event in events if _is_over(event)]
    last = ends[-1] if len(ends) else start
    end = max(last, over[0] if over else max([heard, *times[-1:]]))
    took = ends - starts
    extra = 0.0
    if len(took) > 2:
        extra = max(0.0, took[0] - float(np.median(took[1 : 1 + USUAL_STEPS])))
    took[:1] -= extra
    gaps = starts[1:] - ends[:-1]
    saves = np.minimum(gaps, np.nan_to_num(steps["checkpoint_s"][1:]))  # of the save before a step
    # If a run has no `validation_s`, all of the gap after a validation that was not a save counts.
    validation_s = np.where(np.isfinite(steps["validation_loss"]), np.inf, 0.0)
    recorded = np.isfinite(steps["validation_s"])
    validation_s[recorded] = steps["validation_s"][recorded]
    validations = np.minimum(gaps - saves, validation_s[:-1])
    well = not over or any(event.state in (JobState.STOPPING, JobState.DONE) for event in events)
    after = end - last if len(ends) else 0.0
    last_validation = min(after, validation_s[-1]) if len(ends) and recorded[-1] else 0.0
    after -= last_validation
    seconds = {
        "productive": took[steps["counts"]].sum(),
        "repeated": took[~steps["counts"]].sum(),
        "first step": extra,
        "start-up": (starts[0] if len(starts) else end) - start,
        "checkpoints": saves.sum(),
        "validation": validations.sum() + last_validation,
        "between steps": (gaps - saves - validations).sum(),
        "ending": after if well else 0.0,
        "lost": 0.0 if well else after,
        "waiting": start - begin,
    }
    return {part: float(value) for part, value in seconds.items()}, float(begin), float(end)


def _steps(run: Run) -> dict[str, np.ndarray]:
    """Returns all rows that were recorded, in the order of the file, and whether each counts."""
    texts = iter(Tail(run.directory / "metrics.jsonl").new_lines, b"")
    places = [NAMES.index(name) for name in COLUMNS_READ]
    values: Any = np.hstack(
        [np.empty((len(COLUMNS_READ), 0)), *(parse_lines(text)[0][places] for text in texts)]
    )
    columns: dict[str, np.ndarray] = dict(zip(COLUMNS_READ, values, strict=True))
    counts = that_count(values[0], values[1])
    columns["counts"] = np.isin(np.arange(values.shape[1]), counts)
    known = np.isfinite(columns["time"]) & np.isfinite(columns["step_time_s"])
    return {name: column[known] for name, column in columns.items()}


def _is_over(event: Event) -> bool:
    return event.state.is_final or event.state in GIVEN_UP
