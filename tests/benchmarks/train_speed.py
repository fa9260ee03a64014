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

from kit.show.results import Row, row
from kit.spec import ModelSpec
from tests.benchmarks.contestants import DEMO, Setup

STEPS_PER_TURN = 3
SAME_LOSS = 1e-4
SAME_LOSS_BF16 = 2e-2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entrant:
    """A contestant and how its process is set up."""

    name: str
    keep_freed_memory: bool


LARGER = Setup(
    spec=ModelSpec.llama(
        name="llama-100m", num_layers=12, hidden_size=768, num_heads=12, ffn_hidden_size=2048, vocab_size=16_384,
        sequence_length=256,
    ),
    batch_size=2,
)  # fmt: skip
"""A model of 110M parameters, whose step is nearly all matrix products."""

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
        *compare(AS_USED, workplace, threads=1, rounds=3, setup=LARGER),
    ]


def compare(
    entrants: dict[str, Entrant], workplace: Path, *, threads: int, rounds: int, setup: Setup = DEMO
) -> list[Row]:
    """Returns the rows of one comparison; the first of `entrants` is compared with the others.

    Raises:
        RuntimeError: a process failed, or the loops do not train the same model.
    """
    steps = STEPS_PER_TURN if setup is DEMO else 1
    turns = take_turns(entrants, workplace, threads=threads, rounds=rounds, steps=steps, setup=setup)
    subject, *rivals = turns
    where = f"{threads} thread{'s' if threads > 1 else ''}{'' if setup is DEMO else ', ' + setup.spec.name}"
    tokens = setup.batch_size * setup.spec.sequence_length
    rows = [
        row(f"{name}, {where}", tokens / statistics.median(times), "tokens/s", note=_spread(times, tokens))
        for name, times in turns.items()
    ]
    for rival in rivals:
        ratios = [theirs / ours for ours, theirs in zip(turns[subject], turns[rival], strict=True)]
        note = f"median of {rounds} rounds, {min(ratios):.2f} to {max(ratios):.2f}"
        name = f"{subject} / {rival}, {where}"
        rows.append(row(name, statistics.median(ratios), "x", at_least=1.0, note=note))
    return rows


def take_turns(
    entrants: dict[str, Entrant],
    workplace: Path,
    *,
    threads: int,
    rounds: int,
    steps: int = STEPS_PER_TURN,
    setup: Setup = DEMO,
) -> dict[str, list[float]]:
    """Returns the seconds per step of each entrant in each round; errors as `take_answers`."""
    answers = take_answers(entrants, workplace, threads=threads, rounds=rounds, steps=steps, setup=setup)
    return {name: [answer["step_s"] for answer in given] for name, given in answers.items()}


def take_answers(
    entrants: dict[str, Entrant], workplace: Path, *, threads: int, rounds: int, steps: int, setup: Setup
) -> dict[str, list[dict[str, float]]]:
    """Returns what each entrant answers in each round; a first round to warm up is left out.

    Raises:
        RuntimeError: a process failed, or the loops do not train the same model.
    """
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in entrants}
    tolerance = SAME_LOSS if setup.precision == "fp32" else SAME_LOSS_BF16
    with contextlib.ExitStack() as stack:
        processes = {
            name: stack.enter_context(_process(entrant, workplace, threads, setup))
            for name, entrant in entrants.items()
        }
        for _ in range(rounds + 1):
            answers = {name: _one_turn(name, process, steps) for name, process in processes.items()}
            losses = {name: answer["loss"] for name, answer in answers.items()}
            if max(losses.values()) - min(losses.values()) > tolerance * min(losses.values()):
                raise RuntimeError(f"The loops do not train the same model, so their speeds do not compare: {losses}.")
            for name, answer in answers.items():
                taken[name].append(answer)
    return {name: answers[1:] for name, answers in taken.items()}


@contextlib.contextmanager
def _process(entrant: Entrant, workplace: Path, threads: int, setup: Setup) -> Iterator[subprocess.Popen]:
    file = (workplace / "setup.json").absolute()
    setup.write(file)
    command = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.contestants", entrant.name]
    command += [f"--threads={threads}", f"--setup={file}"]
    if entrant.keep_freed_memory:
        command.append("--keep-freed-memory")
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),  # it works in a folder of its own
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": setup.device,
    }
    with (workplace / f"{entrant.name}.log").open("w") as log:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        process = subprocess.Popen(command, env=environment, cwd=workplace, text=True, **pipes)
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


def _spread(times: list[float], tokens: int) -> str:
    best, worst = tokens / min(times), tokens / max(times)
    return f"{worst:,.0f} to {best:,.0f}"
