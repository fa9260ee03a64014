"""Training speed on this machine: the kit, its engines, transformers' Trainer and a plain loop.
They train alternately, one turn each.

Turns alternate between processes (A B C A B C ...), so that the load of other programs affects all
equally. Ratios are computed within a round, and the median over rounds is the result. The speed of
a shared machine changes by a fifth within a second. Therefore a turn is one step and there are many
rounds: six rounds of three steps gave 0.96x where sixty rounds of one step gave 1.00x.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from kit.show.results import Row, row
from tests.bench.contestants import DEMO, LARGER, SETUP, Setup
from tests.bench.turns import median_row, ratio_row

ROUNDS = 40  # halved for the larger model, whose steps take six seconds
EARLY_STEPS = 5
SAME_LOSS = {"fp32": 2e-5, "bf16": 1e-3}
"""Largest relative difference of losses, by precision. Two loops train the same model if the losses
of their first `EARLY_STEPS` steps differ by no more than this.

Measured with models below 2M parameters: losses of two seeds differ by 1e-4 to 4e-3, losses of two
contestants in bf16 by 2e-5."""


@dataclasses.dataclass(frozen=True)
class Entrant:
    """A contestant and the settings of its process."""

    name: str
    keep_freed_memory: bool = True
    packages: tuple[str, ...] = ()
    """Packages that the contestant imports and that may be missing."""


TRAINER = "transformers", "accelerate"
AS_USED = {
    "kit": Entrant("kit"),
    "Trainer": Entrant("transformers", keep_freed_memory=False, packages=TRAINER),
    "plain loop": Entrant("plain", keep_freed_memory=False),
}
"""Contestants with the memory allocator settings that they have in normal use. Only the kit changes
a setting of the allocator."""

SAME_ALLOCATOR = {
    "Trainer with the kit's allocator setting": Entrant("transformers", packages=TRAINER),
    "plain loop with the kit's allocator setting": Entrant("plain"),
}
ENGINES = {
    "native engine": Entrant("kit"),
    "DeepSpeed, ZeRO 0": Entrant("deepspeed_zero0", packages=("deepspeed",)),
    "DeepSpeed, ZeRO 1": Entrant("deepspeed_zero1", packages=("deepspeed",)),
    "plain torch loop": Entrant("plain"),
}


OPTIMIZERS = {"AdamW": Entrant("kit"), "Muon": Entrant("kit_muon")}

UNITS = {"step_s": "tokens/s", "step_cpu_s": "tokens/CPU-s"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers:
    """Measurements of the contestants by round. The first round is the warm-up. The other
    contestants are compared with the first contestant.
    """

    setup: Setup
    given: dict[str, list[dict]]
    absent: dict[str, str]
    """Maps each contestant without measurements to the reason."""

    def times(self, clock: str = "step_s") -> dict[str, list[float]]:
        """Returns the seconds per step of each contestant in each round after the warm-up."""
        return {name: [answer[clock] for answer in given[1:]] for name, given in self.given.items()}

    def unlike(self, where: str) -> dict[str, Row]:
        """Returns a row for each contestant whose first losses differ from the losses of the first
        contestant. Such a contestant trains another model. `where` is the end of the row's name.
        """
        losses = {
            name: [loss for answer in given for loss in answer["losses"]][:EARLY_STEPS]
            for name, given in self.given.items()
        }
        subject, limit, rows = next(iter(losses)), SAME_LOSS[self.setup.precision], {}
        for name, found in losses.items():
            # The numbers of losses may differ, because the time limit may have ended a contestant
            # early.
            pairs = zip(losses[subject], found, strict=False)
            by = max(abs(theirs / ours - 1) for ours, theirs in pairs)
            if by > limit:
                told = f"{name}, {where}: losses differ from the {subject}'s"
                note = "so its speed is compared with nothing"
                rows[name] = row(told, by, "fraction", at_most=limit, note=note)
        return rows

    def missing(self, where: str) -> list[Row]:
        """Returns a list with one row that names the contestants without measurements. The list is
        empty if there are none.
        """
        if not self.absent:
            return []
        note = "; ".join(f"{name}: {reason}" for name, reason in self.absent.items())
        return [row(f"programs that were not measured, {where}", len(self.absent), note=note)]


def measure(workplace: Path) -> list[Row]:
    """Returns rows with tokens per second of each loop and the kit's ratio to each loop, on one and
    on two threads.
    """
    both = {**AS_USED, **SAME_ALLOCATOR}
    wanted = dict.fromkeys([*both][1:], 1.0)
    one = take_answers(both, workplace, rounds=ROUNDS)
    two = take_answers(AS_USED, workplace, rounds=ROUNDS, threads=2)
    larger = take_answers(AS_USED, workplace, rounds=ROUNDS // 2, setup=LARGER)
    return [
        *speeds(one, "1 thread", wanted),
        *speeds(two, "2 threads", wanted),
        *speeds(larger, "1 thread, llama-100m", wanted),
    ]


def speeds(
    answers: Answers, where: str, wanted: Mapping[str, float | None], *, clock: str = "step_s"
) -> list[Row]:
    """Returns rows with tokens per second of each contestant by wall or processor time. Adds the
    ratio of the first contestant to each contestant that is in `wanted` and has equal losses.

    Args:
        answers: Measurements of the contestants.
        where: End of the names of the rows.
        wanted: Smallest accepted ratio by contestant. None means no limit.
        clock: Key of `UNITS`: wall time or processor time.
    """
    setup, times, unlike = answers.setup, answers.times(clock), answers.unlike(where)
    tokens, subject, rows = setup.batch_size * setup.spec.sequence_length, next(iter(times)), []
    for name, seconds in times.items():
        rates = [tokens / each for each in seconds]
        rows.append(median_row(f"{name}, {where}", rates, UNITS[clock]))
        if name in unlike:
            rows.append(unlike[name])
        elif name in wanted:
            ratio = f"{subject} / {name}, {where}"
            own = times[subject]
            rounds = min(len(seconds), len(own))
            rows.append(ratio_row(ratio, seconds[:rounds], own[:rounds], at_least=wanted[name]))
    return rows + answers.missing(where)


def measure_engines(workplace: Path) -> list[Row]:
    """Returns rows with each engine's step time on one GPU or CPU process, and its ratio to the
    native engine's step time of the same round.
    """
    setup = DEMO.replace(device="cuda" if torch.cuda.is_available() else "cpu")
    answers = take_answers(ENGINES, workplace, rounds=ROUNDS, setup=setup)
    times, unlike, rows, ratios = answers.times(), answers.unlike("1 thread"), [], []
    native, *others = times
    for name, seconds in times.items():
        rows.append(median_row(f"{name}, 1 thread", [1000 * each for each in seconds], "ms"))
        if name in others and name not in unlike:
            ratio = f"step time of {name} / step time of {native}"
            ratios.append(ratio_row(ratio, seconds, times[native]))
    return [*rows, *ratios, *unlike.values(), *answers.missing("1 thread")]


def measure_optimizers(workplace: Path) -> list[Row]:
    """Returns rows with the processor time of a step of the native engine with AdamW and with Muon,
    and their ratio. Losses are not compared, since the optimizers differ.
    """
    times = take_answers(OPTIMIZERS, workplace, rounds=ROUNDS // 2).times("step_cpu_s")
    rows = [
        median_row(
            f"CPU time of a step with {name}, 1 thread", [1000 * each for each in seconds], "ms"
        )
        for name, seconds in times.items()
    ]
    return [
        *rows,
        ratio_row(
            "CPU time of a step with Muon / CPU time of a step with AdamW",
            times["Muon"],
            times["AdamW"],
        ),
    ]


def take_answers(
    entrants: dict[str, Entrant],
    workplace: Path,
    *,
    rounds: int,
    threads: int = 1,
    steps: int = 1,
    setup: Setup = DEMO,
    limit_s: float = 3600.0,
) -> Answers:
    """Trains all contestants in alternating turns. Returns their measurements by round, after one
    warm-up round, and the reason for each contestant without measurements.

    All contestants start from the kit's initial weights. They alternate, so that the load of other
    programs slows all equally. All processes are ended after `limit_s` seconds. The measurements of
    a contestant until then count if it has finished a round after the warm-up.

    Raises:
        RuntimeError: The first contestant, with which all are compared, has no measurements.
    """
    setup.write(workplace / SETUP)
    absent = {name: reason for name in entrants if (reason := not_installed(entrants[name]))}
    present = [name for name in entrants if name not in absent]
    taken: dict[str, list[dict]] = {name: [] for name in entrants}
    end = time.monotonic() + limit_s
    with contextlib.ExitStack() as stack:
        processes = {
            name: stack.enter_context(
                _process(entrants[name], workplace, threads, setup.device, end)
            )
            for name in present
        }
        for _ in range(rounds + 1):
            for name in list(processes):
                try:
                    taken[name].append(_one_turn(processes[name], steps))
                except EOFError:
                    del processes[name]
                    is_late = time.monotonic() > end
                    if is_late and len(taken[name]) < 2:
                        absent[name] = f"not measured within {limit_s:.0f} s"
                    elif not is_late:
                        absent[name] = _last_words(workplace / f"{entrants[name].name}.log")
    if (subject := next(iter(entrants))) in absent:
        raise RuntimeError(f"{subject} did not train {setup.spec.name}: {absent[subject]}")
    given = {name: answers for name, answers in taken.items() if name not in absent}
    return Answers(setup=setup, given=given, absent=absent)


def not_installed(entrant: Entrant) -> str:
    """Returns a text that names the missing packages of a contestant. The text is empty if all
    packages are installed.
    """
    missing = [name for name in entrant.packages if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


@contextlib.contextmanager
def _process(
    entrant: Entrant, workplace: Path, threads: int, device: str, end: float
) -> Iterator[subprocess.Popen]:
    """Within the context, the process of a contestant waits for requests. The process is killed at
    the time `end` of the monotonic clock, or when the context ends.
    """
    command = [sys.executable, "-W", "ignore", "-m", "tests.bench.contestants", entrant.name]
    command += [str(threads), *["--keep-freed-memory"] * entrant.keep_freed_memory]
    root = Path(__file__).parents[2]  # the process runs in `workplace`, not in the repository
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
    """Requests `steps` steps from a contestant and returns its measurements. Raises EOFError if its
    process has ended.
    """
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(f"{steps}\n")
        process.stdin.flush()
    for line in process.stdout:
        if line.startswith('{"step_s"'):
            return json.loads(line)
    raise EOFError


def _last_words(log: Path) -> str:
    words = log.read_text(errors="replace").strip().splitlines()
    return words[-1][:200] if words else "it ended without a word"
