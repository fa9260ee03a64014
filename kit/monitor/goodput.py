"""Goodput: how the time of a job's nodes was used, computed from the files of the run directory.

Every second from the first submission to the last event, heartbeat or step is assigned to one
category of TIME_CATEGORIES, so the categories add up to the wall time. Events in `history.jsonl`
give the start and the end of attempts. Rows of `metrics.jsonl` give the start and the end of
training steps. Goodput is the fraction of the nodes' time that was spent in steps that count, as in
"ML productivity goodput" of Google's and MLPerf's reports. Steps that a later attempt repeated do
not count.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from cluster.record import Record, field_doc
from cluster.site import Site
from cluster.state import GIVEN_UP, Event, JobState, read_history, read_state
from kit.config.plan import Plan
from kit.errors import RunError
from kit.run import Run
from kit.run.columns import NAMES, parse_lines, valid_rows
from kit.run.tail import Tail

TIME_CATEGORIES = {
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
"""Categories of the wall time of a job, with the meaning of each. During `waiting` the job holds no
nodes."""
COLUMNS_READ = (
    "step",
    "attempt",
    "time",
    "step_time_s",
    "checkpoint_s",
    "validation_loss",
    "validation_s",
)
"""Columns of metrics.jsonl from which the ledger is computed."""
USUAL_STEPS = 20
"""Number of steps after the first step of an attempt. Their median is the usual step time, with
which the first step is compared."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttemptLedger(Record):
    """Seconds of one attempt, split into the categories of TIME_CATEGORIES."""

    attempt: int = field_doc("number of the attempt, from 1")
    devices: int = field_doc("number of devices that the plan of the attempt uses")
    usd_per_hour: float | None = field_doc(
        "price of all nodes of the attempt for one hour, in USD; None: the site has no price"
    )
    seconds: dict[str, float] = field_doc(
        "seconds of the attempt in each category of TIME_CATEGORIES, by the name of the category"
    )
    end: str = field_doc("last state of the attempt, with its reason, in one line")

    @property
    def held_s(self) -> float:
        """Seconds for which the attempt held its devices: the sum of all categories except
        `waiting`.
        """
        return sum(seconds for part, seconds in self.seconds.items() if part != "waiting")

    @property
    def goodput(self) -> float:
        """Fraction of the attempt's device-hours that was spent in steps that count. NaN if the
        attempt held no device.
        """
        return self.seconds["productive"] / self.held_s if self.held_s else np.nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ledger(Record):
    """Seconds of a run, split into the categories of TIME_CATEGORIES, for each attempt and in
    total."""

    run: str = field_doc("name of the run")
    attempts: tuple[AttemptLedger, ...] = field_doc(
        "time of each attempt by category, in the order of the attempts"
    )
    idle_s: float = field_doc(
        "seconds between attempts in which no attempt was requested; no category contains"
        " these seconds"
    )
    unknown_s: float = field_doc(
        "seconds from the last sign of life of an attempt whose end was not recorded to the next"
        " attempt that a user started; no category contains these seconds, since it is unknown how"
        " long the attempt held its nodes",
        default=0.0,
    )

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds in each category of TIME_CATEGORIES, summed over all attempts."""
        total_s = dict.fromkeys(TIME_CATEGORIES, 0.0)
        for share in self.attempts:
            for part in TIME_CATEGORIES:
                total_s[part] += share.seconds[part]
        return total_s

    @property
    def wall_s(self) -> float:
        """Seconds from the first submission to the last event, heartbeat or step. The seconds
        `idle_s` and `unknown_s` between attempts are not included.
        """
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Fraction of the run's device-hours that was spent in steps that count. NaN if the run
        held no device.
        """
        held = sum(share.devices * share.held_s for share in self.attempts)
        productive = sum(share.devices * share.seconds["productive"] for share in self.attempts)
        return productive / held if held else np.nan

    @property
    def usd(self) -> float | None:
        """Cost of the nodes so far, in US dollars. None if the site of an attempt has no price."""
        spent = [row["usd"] for row in self.rows()]
        return None if None in spent else sum(spent)

    def rows(self) -> list[dict[str, Any]]:
        """Returns one row per category of TIME_CATEGORIES: name, seconds, fraction of the wall
        time, device-hours, cost in US dollars (None if the price is unknown), and meaning.
        """
        # An unknown price, None, becomes NaN.
        prices = np.array([share.usd_per_hour for share in self.attempts], float)
        devices = np.array([share.devices for share in self.attempts])
        rows = []
        wall_s = self.wall_s
        for part, seconds in self.seconds.items():
            held_hours = np.array([share.seconds[part] for share in self.attempts]) / 3600
            if part == "waiting":
                held_hours = np.zeros(len(self.attempts))
            usd: float | None = float(held_hours @ prices)
            if np.isnan(usd):
                usd = None
            share_of_wall = seconds / wall_s if wall_s else np.nan
            rows.append(
                {
                    "part": part,
                    "seconds": seconds,
                    "share": share_of_wall,
                    "device_hours": float(held_hours @ devices),
                    "usd": usd,
                    "meaning": TIME_CATEGORIES[part],
                }
            )
        return rows


def usd_per_hour(plan: Plan, site: Site) -> float | None:
    """Returns the price of all nodes of a plan, in US dollars per hour. Returns None if the site
    has no price.

    A node costs the full price even if only some of its devices are used.
    """
    price = site.price_per_node_hour
    if price is None:
        return None
    return math.ceil(plan.num_devices / site.devices_per_node) * price.value


def ledger(run: Run) -> Ledger:
    """Returns the time of a run so far, split into the categories of TIME_CATEGORIES. An imported
    run ends at the last line of its log that has a time.

    Raises:
        RunError: The run has no attempt yet.
    """
    steps = _steps(run)
    history: list[Event] = []
    state = None
    # The state files of an imported run describe the import, not the training.
    if not run.is_imported:
        history = read_history(run.directory)
        state = read_state(run.directory)
    numbers = {*steps["attempt"].astype(int).tolist(), *(event.attempt for event in history)}
    if not numbers:
        raise RunError(f"{run.directory} has no attempt yet, so no time has been spent.")
    plans = run.plans()
    sites = run.other_sites()
    shares: list[AttemptLedger] = []
    idle_s = 0.0
    unknown_s = 0.0
    end_before: float | None = None
    was_over = False
    for attempt in sorted(numbers):
        events = [event for event in history if event.attempt == attempt]
        own_steps = {name: column[steps["attempt"] == attempt] for name, column in steps.items()}
        heartbeat = 0.0
        if state and state.attempt == attempt and state.heartbeat:
            heartbeat = state.heartbeat
        is_newest = attempt == max(numbers)
        spent = _attempt_times(events, own_steps, heartbeat, end_before, is_newest)
        gap_s = 0.0
        if end_before is not None:
            gap_s = max(0.0, spent.begin - end_before)
        if not events or events[0].state is JobState.QUEUED:
            # A user has started this attempt, so the time before it is idle time, unless the end of
            # the previous attempt is unknown. All other attempts are started by the job itself.
            if events and not was_over:
                unknown_s += gap_s
            else:
                idle_s += gap_s
        elif was_over:
            spent.seconds["waiting"] += gap_s
        elif shares:
            # The previous attempt has no event that ends it, since it was killed together with its
            # supervisor.
            shares[-1].seconds["lost"] += gap_s
        end_before = spent.end
        was_over = any(map(_is_over, events))
        plan = plans.get(attempt, run.plan)
        last_event = _event_text(events[-1]) if events else "imported"
        shares.append(
            AttemptLedger(
                attempt=attempt,
                devices=plan.num_devices,
                usd_per_hour=usd_per_hour(plan, sites.get(attempt, run.site)),
                seconds=spent.seconds,
                end=last_event,
            )
        )
    return Ledger(run=run.name, attempts=tuple(shares), idle_s=idle_s, unknown_s=unknown_s)


def _event_text(event: Event) -> str:
    """Returns the state that an event reports, followed by its reason if there is one."""
    if not event.reason:
        return str(event.state)
    return f"{event.state}: {event.reason}"


class _AttemptTimes(NamedTuple):
    """Seconds of one attempt, split into the categories of TIME_CATEGORIES."""

    seconds: dict[str, float]
    """Seconds in each category of TIME_CATEGORIES."""
    begin: float
    """Unix time at which the attempt began."""
    end: float
    """Unix time at which the attempt ended. For an attempt without a final event, the time of its
    last event, heartbeat or step."""


def _attempt_times(
    events: list[Event],
    steps: dict[str, np.ndarray],
    heartbeat: float,
    end_before: float | None,
    is_newest: bool,
) -> _AttemptTimes:
    """Returns the seconds of one attempt in each category of TIME_CATEGORIES, with its begin and
    end.

    Args:
        events: events of the attempt.
        steps: columns of the attempt's steps, as `_steps` returns them.
        heartbeat: unix time of the attempt's last heartbeat, 0 if it is unknown.
        end_before: unix time at which the previous attempt ended, None for the first attempt.
        is_newest: whether this is the newest attempt, which may still run.
    """
    step_ends = np.maximum.accumulate(steps["time"])
    previous_ends = np.append(-np.inf, step_ends[:-1])
    step_starts = np.maximum(step_ends - steps["step_time_s"], previous_ends)
    event_times = [event.time for event in events]
    # The first event may not be the earliest, since the clock of the submitting machine may be
    # ahead.
    begin = max(min([*event_times, *step_starts[:1]]), end_before or -np.inf)
    # The job holds its nodes from the first event that is not about the queue.
    held_times = [
        event.time for event in events if event.state not in (JobState.QUEUED, JobState.CONFIGURING)
    ]
    start = max(begin, min([*held_times[:1], *step_starts[:1]], default=begin))
    step_starts = np.maximum(step_starts, start)
    step_ends = np.maximum(step_ends, start)
    over_times = [event.time for event in events if _is_over(event)]
    last_step_end = step_ends[-1] if len(step_ends) else start
    if over_times:
        last_sign = over_times[0]
    else:
        last_sign = max([heartbeat, *event_times[-1:]])
    end = max(last_step_end, last_sign)

    steps_s = step_ends - step_starts
    first_step_extra_s = 0.0
    if len(steps_s) > 2:
        usual_s = float(np.median(steps_s[1 : 1 + USUAL_STEPS]))
        first_step_extra_s = max(0.0, steps_s[0] - usual_s)
    steps_s[:1] -= first_step_extra_s

    gaps_s = step_starts[1:] - step_ends[:-1]
    # The `checkpoint_s` of a step is the duration of the checkpoint save before that step.
    saves_s = np.minimum(gaps_s, np.nan_to_num(steps["checkpoint_s"][1:]))
    # If `validation_s` was not recorded, the whole gap after a validation counts as validation,
    # except the time of a save.
    validation_s = np.where(np.isfinite(steps["validation_loss"]), np.inf, 0.0)
    is_recorded = np.isfinite(steps["validation_s"])
    validation_s[is_recorded] = steps["validation_s"][is_recorded]
    validations_s = np.minimum(gaps_s - saves_s, validation_s[:-1])

    start_up_s = end - start
    last_validation_s = 0.0
    after_steps_s = 0.0
    if len(step_ends):
        start_up_s = step_starts[0] - start
        after_steps_s = end - last_step_end
        if is_recorded[-1]:
            last_validation_s = min(after_steps_s, validation_s[-1])
            after_steps_s -= last_validation_s
    seconds = {
        "productive": steps_s[steps["counts"]].sum(),
        "repeated": steps_s[~steps["counts"]].sum(),
        "first step": first_step_extra_s,
        "start-up": start_up_s,
        "checkpoints": saves_s.sum(),
        "validation": validations_s.sum() + last_validation_s,
        "between steps": (gaps_s - saves_s - validations_s).sum(),
        "ending": 0.0,
        "lost": 0.0,
        "waiting": start - begin,
    }
    seconds["ending" if _ended_well(events, is_newest) else "lost"] = after_steps_s
    return _AttemptTimes(
        seconds={part: float(value) for part, value in seconds.items()},
        begin=float(begin),
        end=float(end),
    )


def _steps(run: Run) -> dict[str, np.ndarray]:
    """Returns the columns COLUMNS_READ of all recorded rows in the order of the file, and a further
    column `counts`.

    `counts` is False for a row that a newer attempt has replaced (`kit.run.columns.valid_rows`).
    Rows without a time or a step time are left out.
    """
    tail = Tail(run.directory / "metrics.jsonl")
    indices = [NAMES.index(name) for name in COLUMNS_READ]
    blocks = [np.empty((len(COLUMNS_READ), 0))]
    for text in iter(tail.new_lines, b""):
        values, *_ = parse_lines(text)
        blocks.append(values[indices])
    columns: dict[str, np.ndarray] = dict(zip(COLUMNS_READ, np.hstack(blocks), strict=True))
    num_rows = len(columns["step"])
    counted_rows = valid_rows(columns["step"], columns["attempt"])
    columns["counts"] = np.isin(np.arange(num_rows), counted_rows)
    is_timed = np.isfinite(columns["time"]) & np.isfinite(columns["step_time_s"])
    return {name: column[is_timed] for name, column in columns.items()}


def _ended_well(events: list[Event], is_newest: bool) -> bool:
    """Returns whether an attempt ended well: it is done, or it has saved and left the rest to the
    next attempt. The newest attempt also ends well if it has not ended yet.

    The state `stopping` alone does not say so, since a local supervisor also records it before it
    ends the ranks of an attempt that has failed.
    """
    ends = [event.state for event in events if _is_over(event)]
    if not ends:
        return is_newest
    if ends[0] in GIVEN_UP:
        return any(event.state is JobState.STOPPING for event in events)
    return ends[0] is JobState.DONE


def _is_over(event: Event) -> bool:
    """Returns whether an event says that its attempt has ended."""
    return event.state.is_final or event.state in GIVEN_UP
