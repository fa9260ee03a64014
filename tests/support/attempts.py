"""Attempts of a run whose ranks are forked from the test process. The ranks run the real trainer.
Forking saves the import of torch in each rank.
"""

import contextlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.process import become_rank
from cluster.state import JobState, log_path, update_state
from kit.run import Run
from kit.train import main
from kit.trainer.loop import Trainer
from tests.support import workers
from tests.support.workers import free_port

PATIENCE_S = 600.0


class Attempt:
    """One attempt of a run, with one forked process for each device of the run's plan.

    `sabotage` is a function that injects a fault. Each rank calls `sabotage` with its rank number
    before the trainer starts.
    """

    def __init__(
        self,
        run: Run,
        number: int = 1,
        sabotage: Callable[[int], None] | None = None,
        **environment: str,
    ) -> None:
        self.run, self.number, self.started = run, number, time.monotonic()
        self.environment = environment
        log_path(run.directory, number, 0).parent.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.codes: dict[int, int] = {}
        # In a real job the supervisor writes this state.
        update_state(run.directory, attempt=number, state=JobState.STARTING)
        self.pids = [self._fork(rank, port, sabotage) for rank in range(run.plan.num_devices)]

    def _fork(self, rank: int, port: int, sabotage: Callable[[int], None] | None) -> int:
        keeper = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            become_rank(keeper)  # The kernel kills the rank when the test process ends.
            file = log_path(self.run.directory, self.number, rank)
            log = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            for number in (1, 2):
                os.dup2(log, number)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            size = self.run.plan.num_devices
            workers.become_rank(rank, size, port)
            own = {"LOCAL_WORLD_SIZE": str(size), "KIT_ATTEMPT": str(self.number)}
            os.environ.update({**own, **self.environment})
            if sabotage:
                sabotage(rank)
            code = main(["--run", str(self.run.directory)])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def is_over(self) -> bool:
        """Returns whether all ranks have ended, without waiting for them."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        return len(self.codes) == len(self.pids)

    def wait(self) -> list[int]:
        """Waits until all ranks have ended, and returns their exit codes in rank order."""
        while not self.is_over():
            if time.monotonic() - self.started > PATIENCE_S:
                self.kill()
                raise AssertionError(f"attempt {self.number} did not end:\n{self.log()}")
            time.sleep(0.002)
        return [self.codes[rank] for rank in range(len(self.pids))]

    def until_step(self, step: int) -> None:
        """Waits until the run's metrics contain a step. The file is read only every 20 ms, so that
        the ranks have the cores.
        """
        while self.run.metrics().summary()["step"] < step:
            assert not self.is_over(), self.log()
            time.sleep(0.02)

    def kill(self) -> None:
        """Sends SIGKILL to all ranks, and waits until they have ended."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        while not self.is_over():
            time.sleep(0.001)

    def log(self, rank: int = 0) -> str:
        """Returns the log of one rank. Returns an empty string if the log file is missing."""
        file = log_path(self.run.directory, self.number, rank)
        return file.read_text() if file.exists() else ""

    def resumed_from(self) -> int | None:
        """Returns the step of the checkpoint from which the attempt resumed, or None if the log of
        rank 0 names no such step.
        """
        match = re.search(r"resumed from step (\d+)", self.log())
        return int(match[1]) if match else None


def finished(
    run: Run, number: int = 1, sabotage: Callable[[int], None] | None = None, **environment: str
) -> Attempt:
    """Runs an attempt to its end and returns it. Fails if a rank ends with another exit code than
    0.
    """
    attempt = Attempt(run, number, sabotage, **environment)
    assert not any(attempt.wait()), attempt.log()
    return attempt


def before_each_launch(act: Callable[[Trainer], None]) -> None:
    """Makes the trainer of this rank call `act` before it launches each step."""
    launch = Trainer._launch_step

    def launched(trainer: Trainer) -> None:
        act(trainer)
        launch(trainer)

    Trainer._launch_step = launched


def lines_of(run: Run) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl in file order, including rows of repeated steps."""
    return [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]


def size_of(file: Path) -> int:
    """Returns the size of a file in bytes, or 0 if the file is missing."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
