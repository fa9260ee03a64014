"""What follows the end of an attempt: the end of the job, another start here, or one elsewhere.

Standard library only.
"""

import dataclasses
import signal
from pathlib import Path

from cluster.attempts import USELESS_TO_RETRY, AttemptOutcome
from cluster.files import say
from cluster.logs import log_tail
from cluster.ports import says_port_taken
from cluster.record import counted
from cluster.run_directory import RunDirectory, retry_disk
from cluster.state import (
    history_to_judge,
    is_stop_requested,
    last_attempt,
    log_path,
    state_to_change,
)

CRASHES = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


def cause_order(code: int) -> tuple[bool, bool]:
    """Sorts the codes of ranks that failed at once by what explains the others.

    What cannot pass comes first, then a crash; an error for a lost peer is a consequence.
    """
    return code != USELESS_TO_RETRY, -code not in CRASHES


def failed(home: RunDirectory, rank: int, code: int, who: str) -> AttemptOutcome:
    """Returns the outcome of an attempt in which a rank has failed.

    The ranks are started again if the rank was killed, if the job has already taken a step, or if
    another program used the port at which the ranks meet: the next start uses another port.
    """
    words, rc = end_of(code)
    may_pass = rc > 128 or (
        code != USELESS_TO_RETRY and (has_taken_steps(home) or _port_was_taken(home, rank))
    )
    return AttemptOutcome(rc, f"{who} {words}", rank, "restart" if may_pass else "end")


def has_taken_steps(home: RunDirectory) -> bool:
    """Returns whether any attempt of a run has taken a step, as far as its files can be read."""
    try:
        return any(retry_disk(lambda: furthest_steps(home.run_dir), home).values())
    except OSError as error:
        say(f"how far the run got cannot be read: {error}")
        return False


def _port_was_taken(home: RunDirectory, rank: int) -> bool:
    """Returns whether the log of a rank says that another program used its port."""
    try:
        attempt = retry_disk(lambda: last_attempt(home.run_dir), home)
    except OSError:
        return False
    return says_port_taken(log_tail(log_path(home.run_dir, attempt, rank)))


def limit_retries(outcome: AttemptOutcome, home: RunDirectory, max_restarts: int) -> AttemptOutcome:
    """Returns an outcome, with an end instead of a start that would lead nowhere."""
    run_dir = home.run_dir
    reason = outcome.reason
    if lost := home.why_lost():
        reason = lost
    elif outcome.fate in ("end", "taken"):
        return outcome
    elif is_stop_requested(run_dir):
        reason = f"{reason}, after a request to stop"
    elif outcome.lost_node is not None:
        return outcome
    elif max_restarts and (fruitless := _fruitless_starts(home)) > max_restarts:
        reason = f"{reason}; given up after {counted(fruitless, 'start')} without a new step"
    elif max_restarts or outcome.fate == "requeue":
        return outcome
    return dataclasses.replace(outcome, fate="end", reason=reason, rc=outcome.rc or 1)


def furthest_steps(run_dir: Path) -> dict[int, int]:
    """Returns the last step of each attempt of a run, 0 for an attempt that took no step.

    Raises:
        OSError: the file system is in trouble.
    """
    furthest: dict[int, int] = {}
    state = state_to_change(run_dir)
    for told in [*history_to_judge(run_dir), *([state] if state else [])]:
        furthest[told.attempt] = max(furthest.get(told.attempt, 0), told.step or 0)
    return furthest


def fruitless_starts(run_dir: Path) -> int:
    """Returns how many of the newest attempts took no step that none had taken before. Attempts
    that a lost node ended are not counted, since no program of the job is at fault.
    """
    lost = {event.attempt for event in history_to_judge(run_dir) if event.lost_node}
    fruitless = best = 0
    for attempt, step in sorted(furthest_steps(run_dir).items()):
        if step > best:
            fruitless = 0
        elif attempt not in lost:
            fruitless += 1
        best = max(best, step)
    return fruitless


def _fruitless_starts(home: RunDirectory) -> int:
    """Returns `fruitless_starts`, or 0 if the files cannot be read."""
    try:
        return retry_disk(lambda: fruitless_starts(home.run_dir), home)
    except OSError as error:
        say(f"how far the run got cannot be read: {error}")
        return 0


def ended_well(num_ranks: int) -> str:
    """Returns the reason of a job that is done."""
    return (
        "the one rank ended with code 0"
        if num_ranks == 1
        else f"all {num_ranks} ranks ended with code 0"
    )


def end_of(code: int) -> tuple[str, int]:
    """Returns how a process of this return code ended, in words, and its code as of a shell: 128
    + n for signal n.
    """
    if code >= 0:
        return f"ended with code {code}", code
    hint = " (often: out of memory)" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}", 128 - code
