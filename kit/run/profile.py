"""Profiles of a running job: what is asked of it, what it leaves in RUN/profile/step_N/, which operators take the time.

A rank leaves `rank_00000.trace.json.gz` (Chrome's trace format, for ui.perfetto.dev) and, on a GPU,
`rank_00000.memory.pickle` (for pytorch.org/memory_viz). `profile.json` comes last: without it a profile is not whole.
"""

import dataclasses
import gzip
import json
import time
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from cluster.record import Record, field_doc
from cluster.state import refuse_other_owner
from kit.errors import ConfigError, RunError, kit_command
from kit.run import Run

MAX_STEPS = 100
"""A trace of more would be hundreds of megabytes, all of them in a rank's memory first."""
KERNELS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Categories of what a GPU did, which does not nest as operators on a CPU do (`cpu_op`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileRequest(Record):
    """control/request_profile: the next steps are to be recorded on some ranks."""

    asked_at: float = field_doc("unix time of the request")
    num_steps: int = field_doc("optimizer steps to record")
    ranks: tuple[int, ...] = field_doc("of which processes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile(ProfileRequest):
    """profile.json: a request that was answered; `num_steps` are those recorded, fewer where the job ended."""

    first_step: int = field_doc("first recorded optimizer step")


class Operator(NamedTuple):
    """Calls of one operator, or kernel of a GPU, in one trace; seconds without those of operators that it called."""

    name: str
    calls: int
    seconds: float


def request_file(run_dir: Path) -> Path:
    """Returns where a request lies until the trainer takes it."""
    return run_dir / "control" / "request_profile"


def trace_file(folder: Path, rank: int) -> Path:
    """Returns where a rank's trace is, in the folder of a profile."""
    return folder / f"rank_{rank:05d}.trace.json.gz"


def ask_profile(run: Run, num_steps: int, ranks: list[int]) -> ProfileRequest:
    """Leaves a request for the trainer, which begins within about a second; returns it.

    Raises:
        ConfigError: the engine or a number is not allowed.
    """
    if run.is_mirror:
        command = kit_command("profile", run.directory)
        raise ConfigError(f"profile: {run.directory} only mirrors the run. In a terminal, `{command}` asks there.")
    if run.plan.engine == "neuron":
        raise ConfigError("profile: torch's profiler sees nothing of a NeuronCore; use AWS's neuron-profile there.")
    if not 1 <= num_steps <= MAX_STEPS:
        raise ConfigError(f"profile.steps: {num_steps} is not allowed. Give 1 to {MAX_STEPS}.")
    if not ranks or not all(0 <= rank < run.plan.num_devices for rank in ranks):
        raise ConfigError(f"profile.ranks: {ranks} is not allowed. Give some of 0 to {run.plan.num_devices - 1}.")
    refuse_other_owner(run.directory, "have it profiled")
    request = ProfileRequest(asked_at=time.time(), num_steps=num_steps, ranks=tuple(sorted(set(ranks))))
    request.write(request_file(run.directory))
    return request


def profiles(run_dir: Path) -> list[tuple[Path, Profile]]:
    """Returns folders and records of whole profiles, the oldest first."""
    found = [(file.parent, Profile.read(file)) for file in (run_dir / "profile").glob("step_*/profile.json")]
    return sorted(found, key=lambda pair: pair[1].asked_at)


def operators(file: Path) -> list[Operator]:
    """Returns what a trace holds, the longest first: kernels where a GPU was at work, else operators.

    Raises:
        RunError: the file is missing or damaged.
    """
    try:
        with gzip.open(file, "rt", encoding="utf-8") as stream:
            events = [event for event in json.load(stream)["traceEvents"] if event.get("ph") == "X"]
    except (OSError, EOFError, ValueError, KeyError, zlib.error) as error:
        raise RunError(f"{file}: cannot be read as a trace ({error}). Profile again.") from error
    kernels = [event for event in events if event.get("cat") in KERNELS]
    own_us = _own_us(kernels or [event for event in events if event.get("cat") == "cpu_op"], nested=not kernels)
    found = (Operator(name, len(each), sum(each) / 1e6) for name, each in own_us.items())
    return sorted(found, key=lambda operator: -operator.seconds)


def _own_us(events: list[dict[str, Any]], *, nested: bool) -> dict[str, list[float]]:
    """Returns the microseconds of each call by name, without those of nested calls on the same thread."""
    own: list[float] = [event["dur"] for event in events]
    threads: dict[Any, list[int]] = defaultdict(list)
    for i, event in enumerate(events):
        threads[event["pid"], event["tid"]].append(i)
    for calls in threads.values() if nested else ():
        open_calls: list[int] = []
        for i in sorted(calls, key=lambda i: (events[i]["ts"], -events[i]["dur"])):
            while open_calls and events[i]["ts"] >= events[open_calls[-1]]["ts"] + events[open_calls[-1]]["dur"]:
                open_calls.pop()
            if open_calls:
                own[open_calls[-1]] -= events[i]["dur"]
            open_calls.append(i)
    by_name: dict[str, list[float]] = defaultdict(list)
    for event, us in zip(events, own, strict=True):
        by_name[event["name"]].append(us)
    return by_name
