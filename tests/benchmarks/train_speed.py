"""Training speed of the demo model on this machine: the kit, transformers' Trainer and a plain
loop, taking turns.

Turns of a few steps alternate between processes (A B C A B C ...), so that other work on the
machine meets all alike; ratios are taken within a round, and the median round counts.
"""

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from kit.model import build_decoder
from kit.show.results import Row, row
from kit.spec import ModelSpec
from tests.benchmarks.contestants import DEMO, RECIPE, SETUP, WEIGHTS, Setup

STEPS_PER_TURN = 3
EARLY_STEPS = 5
SAME_LOSS = {"fp32": 2e-5, "bf16": 1e-3}
"""Relative difference of losses of the first `EARLY_STEPS` up to which two loops train the same
model.

Other seeds differ by 1e-4 to 4e-3, the contestants in bf16 by 2e-5 (all measured with models below
2M parameters)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entrant:
    """A contestant and how its process is set up."""

    name: str
    keep_freed_memory: bool


LARGER = Setup(
    spec=ModelSpec.llama(
        name="llama-100m",
        num_layers=12,
        hidden_size=768,
        num_heads=12,
        ffn_hidden_size=2048,
        vocab_size=16_384,
        sequence_length=256,
    ),
    batch_size=2,
)
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


ENGINES = {
    "native engine": Entrant(name="kit", keep_freed_memory=True),
    "DeepSpeed, ZeRO 0": Entrant(name="deepspeed_zero0", keep_freed_memory=True),
    "DeepSpeed, ZeRO 1": Entrant(name="deepspeed_zero1", keep_freed_memory=True),
    "plain torch loop": Entrant(name="plain", keep_freed_memory=True),
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
    turns = take_turns(
        entrants, workplace, threads=threads, rounds=rounds, steps=steps, setup=setup
    )
    subject, *rivals = turns
    where = (
        f"{threads}"
        f" thread{'s' if threads > 1 else ''}{'' if setup is DEMO else ', ' + setup.spec.name}"
    )
    tokens = setup.batch_size * setup.spec.sequence_length
    rows = [
        row(
            f"{name}, {where}",
            tokens / statistics.median(times),
            "tokens/s",
            note=f"{tokens / max(times):,.0f} to {tokens / min(times):,.0f}",
        )
        for name, times in turns.items()
    ]
    for rival in rivals:
        name = f"{subject} / {rival}, {where}"
        rows.append(ratio_row(name, turns[rival], turns[subject], at_least=1.0))
    return rows


def ratio_row(
    name: str, longer: Sequence[float], shorter: Sequence[float], *, at_least: float | None = None
) -> Row:
    """Returns the median ratio of two's times within a round."""
    ratios = [one / other for one, other in zip(longer, shorter, strict=True)]
    note = f"median of {len(ratios)} rounds, {min(ratios):.2f} to {max(ratios):.2f}"
    return row(name, statistics.median(ratios), "x", at_least=at_least, note=note)


def measure_engines(workplace: Path, *, rounds: int = 6) -> list[Row]:
    """Returns each engine's step time on one GPU or CPU process, and how much longer than the
    native engine's it is, turn by turn.

    Args:
        workplace: an empty folder.
        rounds: in which each engine has its turn.

    Raises:
        RuntimeError: a process failed, or the engines do not train the same model.
    """
    setup = DEMO.replace(device="cuda" if torch.cuda.is_available() else "cpu")
    turns = take_turns(ENGINES, workplace, threads=1, rounds=rounds, setup=setup)
    rows = []
    for name, times in turns.items():
        note = f"median of {rounds} rounds, {1000 * min(times):.0f} to {1000 * max(times):.0f}"
        rows.append(row(f"{name}, 1 thread", 1000 * statistics.median(times), "ms", note=note))
    native, *others = turns
    return rows + [
        ratio_row(f"{name} / {native}, step time", turns[name], turns[native]) for name in others
    ]


def take_turns(
    entrants: dict[str, Entrant],
    workplace: Path,
    *,
    threads: int,
    rounds: int,
    steps: int = STEPS_PER_TURN,
    setup: Setup = DEMO,
) -> dict[str, list[float]]:
    """Returns the seconds per step of each entrant in each round.

    Raises:
        RuntimeError: a process failed, or the loops do not train the same model.
    """
    answers, absent = take_answers(
        entrants, workplace, threads=threads, rounds=rounds, steps=steps, setup=setup
    )
    differing = differences(answers)
    wrong = {
        name: f"losses differ by {by:.1g}"
        for name, by in differing.items()
        if by > SAME_LOSS[setup.precision]
    }
    if absent or wrong:
        raise RuntimeError(
            "Not all loops train, and the same model, so their speeds do not compare:"
            f" {absent | wrong}."
        )
    return {name: [answer["step_s"] for answer in given[1:]] for name, given in answers.items()}


def differences(answers: dict[str, list[dict]]) -> dict[str, float]:
    """Returns by how much the losses of the first steps differ from those of the first entrant,
    at most, relative.
    """
    losses = {
        name: [loss for answer in given for loss in answer["losses"]]
        for name, given in answers.items()
    }
    first, count = next(iter(losses.values())), min(EARLY_STEPS, min(map(len, losses.values())))
    return {
        name: max(
            abs(theirs / ours - 1)
            for ours, theirs in zip(first[:count], given[:count], strict=True)
        )
        for name, given in losses.items()
    }


def take_answers(
    entrants: dict[str, Entrant],
    workplace: Path,
    *,
    threads: int,
    rounds: int,
    steps: int,
    setup: Setup,
    together: bool = True,
    limit_s: float = 3600.0,
) -> tuple[dict[str, list[dict]], dict[str, str]]:
    """Returns what each entrant answers in each round, after one to warm up, and why any has no
    answers.

    All start from one copy of the kit's initial weights. Those that run together take turns, so
    that other work on the machine meets all alike; one at a time, each has the device and its
    memory to itself. Whoever still runs after `limit_s` seconds in all is ended.
    """
    torch.save(build_decoder(setup.spec, seed=RECIPE.seed).state_dict(), workplace / WEIGHTS)
    setup.write(workplace / SETUP)
    taken: dict[str, list[dict]] = {name: [] for name in entrants}
    absent: dict[str, str] = {}
    end = time.monotonic() + limit_s
    for group in [list(entrants)] if together else [[name] for name in entrants]:
        with contextlib.ExitStack() as stack:
            processes = {
                name: stack.enter_context(
                    _process(entrants[name], workplace, threads, setup.device, end)
                )
                for name in group
            }
            for _ in range(rounds + 1):
                for name in processes.keys() - absent.keys():
                    try:
                        taken[name].append(_one_turn(processes[name], steps))
                    except EOFError:
                        absent[name] = _last_words(workplace / f"{entrants[name].name}.log", end)
    return {name: answers for name, answers in taken.items() if name not in absent}, absent


@contextlib.contextmanager
def _process(
    entrant: Entrant, workplace: Path, threads: int, device: str, end: float
) -> Iterator[subprocess.Popen]:
    """A contestant that waits for its first turn, and is killed at `end` on the monotonic clock,
    or when left.
    """
    command = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.contestants", entrant.name]
    command += [str(threads), *["--keep-freed-memory"] * entrant.keep_freed_memory]
    root = Path(__file__).parents[2]  # it works in a folder of its own
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": device,
    }
    with (workplace / f"{entrant.name}.log").open("w") as log:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        process = subprocess.Popen(command, env=environment, cwd=workplace, text=True, **pipes)
        timer = threading.Timer(max(0.0, end - time.monotonic()), process.kill)
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            process.kill()
            process.communicate()


def _one_turn(process: subprocess.Popen, steps: int) -> dict:
    """Returns the answer of one turn, or raises EOFError where the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(f"{steps}\n")
        process.stdin.flush()
    for line in process.stdout:
        if line.startswith('{"step_s"'):
            return json.loads(line)
    raise EOFError


def _last_words(log: Path, end: float) -> str:
    if time.monotonic() > end:
        return "no time was left"
    return (log.read_text(errors="replace").strip().splitlines() or ["it ended without a word"])[
        -1
    ][:200]
