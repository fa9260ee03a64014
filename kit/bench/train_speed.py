"""Training speed of the demo model on this machine: the kit, transformers' Trainer and a plain loop, taking turns.

Turns of a few steps alternate between processes (A B C A B C ...), so that other work on the machine meets all alike;
ratios are taken within a round, and the median round counts.
"""

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kit.bench.contestants import BATCH_SIZE, SPEC
from kit.bench.results import Row, row

TOKENS_PER_STEP = BATCH_SIZE * SPEC.sequence_length
STEPS_PER_TURN = 3
SAME_LOSS = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entrant:
    """A contestant and how its process is set up."""

    name: str
    keep_freed_memory: bool


AS_USED = {
    "kit": Entrant(name="kit", keep_freed_memory=True),
    "Trainer": Entrant(name="transformers", keep_freed_memory=False),
    "plain loop": Entrant(name="plain", keep_freed_memory=False),
}
"""Each as it runs when a user starts it: the kit's ranks change one setting of the allocator."""

SAME_ALLOCATOR = {
    "Trainer, kit's allocator setting": Entrant(name="transformers", keep_freed_memory=True),
    "plain loop, kit's allocator setting": Entrant(name="plain", keep_freed_memory=True),
}


def measure(workplace: Path) -> list[Row]:
    """Returns tokens/s of each loop and the kit's ratio to each, on one thread and on two.

    Args:
        workplace: an empty folder.
    """
    return [
        *compare({**AS_USED, **SAME_ALLOCATOR}, workplace, threads=1, rounds=6),
        *compare(AS_USED, workplace, threads=2, rounds=4),
    ]


def compare(entrants: dict[str, Entrant], workplace: Path, *, threads: int, rounds: int) -> list[Row]:
    """Returns the rows of one comparison; the first of `entrants` is compared with the others.

    Raises:
        RuntimeError: a process failed, or the loops do not train the same model.
    """
    turns = take_turns(entrants, workplace, threads=threads, rounds=rounds)
    subject, *rivals = turns
    where = f"{threads} thread{'s' if threads > 1 else ''}"
    rows = [
        row(f"{name}, {where}", TOKENS_PER_STEP / statistics.median(times), "tokens/s", note=_spread(times))
        for name, times in turns.items()
    ]
    for rival in rivals:
        ratios = [theirs / ours for ours, theirs in zip(turns[subject], turns[rival], strict=True)]
        note = f"median of {rounds} rounds, {min(ratios):.2f} to {max(ratios):.2f}"
        name = f"{subject} / {rival}, {where}"
        rows.append(row(name, statistics.median(ratios), "x", at_least=1.0, note=note))
    return rows


def take_turns(
    entrants: dict[str, Entrant], workplace: Path, *, threads: int, rounds: int, steps: int = STEPS_PER_TURN
) -> dict[str, list[float]]:
    """Returns the seconds per step of each entrant in each round; a first round to warm up is left out.

    Raises:
        RuntimeError: a process failed, or the loops do not train the same model.
    """
    times: dict[str, list[float]] = {name: [] for name in entrants}
    with contextlib.ExitStack() as stack:
        processes = {
            name: stack.enter_context(_process(entrant, workplace, threads)) for name, entrant in entrants.items()
        }
        for _ in range(rounds + 1):
            answers = {name: _one_turn(name, process, steps) for name, process in processes.items()}
            losses = {name: answer["loss"] for name, answer in answers.items()}
            if max(losses.values()) - min(losses.values()) > SAME_LOSS * min(losses.values()):
                raise RuntimeError(f"The loops do not train the same model, so their speeds do not compare: {losses}.")
            for name, answer in answers.items():
                times[name].append(answer["step_s"])
    return {name: seconds[1:] for name, seconds in times.items()}


@contextlib.contextmanager
def _process(entrant: Entrant, workplace: Path, threads: int) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-W", "ignore", "-m", "kit.bench.contestants", entrant.name, f"--threads={threads}"]
    if entrant.keep_freed_memory:
        command.append("--keep-freed-memory")
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with (workplace / f"{entrant.name}.log").open("w") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=workplace,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def _one_turn(name: str, process: subprocess.Popen, steps: int) -> dict[str, float]:
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(f"{steps}\n")
        process.stdin.flush()
    for line in process.stdout:
        if line.startswith('{"step_s"'):
            return json.loads(line)
    raise RuntimeError(f"{name} ended with code {process.wait()}; its last words are in the log of the workplace.")


def _spread(times: list[float]) -> str:
    best, worst = TOKENS_PER_STEP / min(times), TOKENS_PER_STEP / max(times)
    return f"{worst:,.0f} to {best:,.0f}"
