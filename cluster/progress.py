"""What the record of a run tells of its progress: whether it was told to stop, and is worth another
start.

Standard library only.
"""

from pathlib import Path

from cluster.state import read_asked, read_history, read_state, read_taken


def fruitless_starts(run_dir: Path, attempt: int) -> int:
    """Returns how many of the newest attempts, `attempt` included, took no step that none had
    taken before.
    """
    furthest: dict[int, int] = {}
    for event in read_history(run_dir):
        furthest[event.attempt] = max(furthest.get(event.attempt, 0), event.step or 0)
    state = read_state(run_dir)
    if state and state.attempt == attempt:
        furthest[attempt] = max(furthest.get(attempt, 0), state.step or 0)
    fruitless = best = 0
    for number in sorted(furthest):
        fruitless = 0 if furthest[number] > best else fruitless + 1
        best = max(best, furthest[number])
    return fruitless


def has_ever_stepped(run_dir: Path) -> bool:
    """Returns whether any attempt of a run has taken a step."""
    state = read_state(run_dir)
    return bool((state and state.step) or any(event.step for event in read_history(run_dir)))


def is_told_to_stop(run_dir: Path) -> bool:
    """Returns whether a person asked the newest attempt to stop, whether or not its trainer has
    taken that yet.
    """
    requests = (read_asked(run_dir, "stop"), read_taken(run_dir, "stop"))
    return any(request is not None and request.by_person for request in requests)
