"""The thread that trains never opens, replaces or locks a file that is used for monitoring.
Otherwise a hanging file system could stop training.
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.state import read_state, read_taken_request, write_request
from kit.run import Run
from kit.trainer import heartbeat
from kit.trainer.loop import Trainer
from tests.support.attempts import Attempt
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(300)
EVENTS = (
    "open",
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.listdir",
    "os.scandir",
    "fcntl.flock",
)
"""Names of Python's audit events for operations on files, from
https://docs.python.org/3/library/audit_events.
"""


def recorded(run: Run, out: Path) -> Callable[[int], None]:
    """Returns a fault injector that records, while a rank trains, each operation on a file in the
    run directory, with the name of its thread."""

    def sabotage(rank: int) -> None:
        events: set[tuple[str, str, str]] = set()
        is_training = [False]

        def listen(event: str, arguments: tuple[Any, ...]) -> None:
            if not is_training[0] or event not in EVENTS:
                return
            for argument in arguments[:2] if event == "os.rename" else arguments[:1]:
                if isinstance(argument, int):
                    path = os.readlink(f"/proc/self/fd/{argument}")
                else:
                    path = os.fsdecode(argument)
                if path.startswith(f"{run.directory}/"):
                    name = path.removeprefix(f"{run.directory}/")
                    events.add((threading.current_thread().name, event, name))

        train = Trainer.train

        def recording(self: Trainer) -> str:
            threading.current_thread().name = "training"
            is_training[0] = True
            try:
                return train(self)
            finally:
                is_training[0] = False
                (out / f"rank_{rank}.json").write_text(json.dumps(sorted(events)))

        Trainer.train = recording
        heartbeat.BEAT_EVERY_S = 0.1
        sys.addaudithook(listen)

    return sabotage


def test_training_thread_touches_no_monitoring_file(prepare, tmp_path):
    """A real run of two ranks with validations, regular checkpoints, a requested checkpoint and a
    stop request.
    """
    run = prepare("audited", num_steps=100_000, checkpoint_every=10, validation_every=7)
    attempt = Attempt(run, 1, recorded(run, tmp_path))
    attempt.until_step(15)
    for request in ("checkpoint", "stop"):
        write_request(run.directory, request)

        def is_taken(request=request) -> bool:
            taken = read_taken_request(run.directory, request)
            return taken is not None and taken.step is not None

        assert eventually(is_taken, 60) or attempt.is_over()
    assert attempt.wait() == [0, 0], attempt.log()
    state = read_state(run.directory)
    assert state is not None and state.step == run.checkpoints.steps()[-1]
    for rank in (0, 1):
        events = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        of_training = {
            (event, name)
            for thread, event, name in events
            if thread == "training" and not name.startswith("checkpoints")
        }
        assert not of_training
        in_background = {name for thread, _, name in events if thread == "monitoring"}
        expected = {f"ranks/rank_{rank:05d}.json"}
        if rank == 0:
            expected |= {"state.json", ".state.lock", "metrics.jsonl", "control/taken_stop"}
        assert expected <= in_background, "the events are seen"
