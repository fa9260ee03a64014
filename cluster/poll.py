"""Queries schedulers about jobs. One query covers all jobs that this process watches, to keep the
number of queries low.

A scheduler receives at most one query in `Poller.interval_s` seconds, however many runs a notebook
shows and however often. The query runs in a background thread. Between two queries all callers
receive the last answer of the scheduler. A scheduler that does not answer does not delay the
answers of other schedulers.

All communication with a scheduler uses the commands of the scheduler. Standard library only.
"""

import dataclasses
import shlex
import subprocess
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from cluster.record import Record, field_doc
from cluster.state import JobError, JobState, SchedulerJob

INTERVAL_S = 10.0
INTEREST_S = 600.0
ANSWER_WAIT_S = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerAnswer(Record):
    """State of one job, as its scheduler reported it in answer to a query."""

    state: JobState | None = field_doc(
        "state of the job, one of the values of JobState; None: the scheduler could not be queried"
    )
    reason: str = field_doc("reason for the state, in one line for people")
    exit_code: int | None = field_doc(
        "exit code of a job that has ended; 128 + n if signal n ended it", default=None
    )
    time: float = field_doc(
        "time of the query in seconds, by the monotonic clock of this process",
        default_factory=time.monotonic,
    )


class Poller:
    """Queries schedulers about many jobs and stores their answers. Queries each scheduler at most
    once in `interval_s` seconds.
    """

    def __init__(
        self, query: Callable[[list[SchedulerJob]], dict[str, SchedulerAnswer]] | None = None
    ) -> None:
        """`query` replaces the function `query` of the schedulers' packages. It takes jobs of one
        scheduler and returns a dict from job id to SchedulerAnswer.
        """
        self.interval_s = INTERVAL_S
        self._query = query
        self._jobs: dict[tuple, tuple[SchedulerJob, float]] = {}
        self._answers: dict[tuple, SchedulerAnswer] = {}
        self._querying: dict[tuple, threading.Thread] = {}
        self._lock = threading.Lock()

    def answer(self, job: SchedulerJob) -> SchedulerAnswer:
        """Returns the last answer of the scheduler about a job. Waits for a new answer, at most
        ANSWER_WAIT_S seconds, only if there is no answer or if the last answer is older than `3 *
        interval_s` seconds.
        """
        key = _key(job)
        with self._lock:
            self._jobs[key] = (job, time.monotonic())
            last = self._answers.get(key)
            age_s = time.monotonic() - last.time if last else float("inf")
            ended = last is not None and last.state is not None and last.state.is_final
            if last and (age_s < self.interval_s or (ended and age_s < 10 * self.interval_s)):
                return last
            asking = self._querying.get(key[:2])
            if asking is None or not asking.is_alive():
                asking = threading.Thread(
                    target=self._refresh, args=key[:2], name="scheduler-poll", daemon=True
                )
                self._querying[key[:2]] = asking
                asking.start()
        if last and age_s < 3 * self.interval_s:
            return last
        asking.join(ANSWER_WAIT_S)
        return self._answers.get(key) or SchedulerAnswer(
            state=None, reason=f"{job.scheduler} has not answered yet"
        )

    def forget(self, job: SchedulerJob) -> None:
        """Deletes the stored answer about a job. A caller that has changed the job uses this, so
        that the next call of `answer` queries the scheduler.
        """
        with self._lock:
            self._answers.pop(_key(job), None)

    def _refresh(self, scheduler: str, config: str | None) -> None:
        """Queries one scheduler about all of its jobs for which `answer` was called in the last
        INTEREST_S seconds.
        """
        now = time.monotonic()
        with self._lock:
            self._jobs = {
                key: value for key, value in self._jobs.items() if now - value[1] < INTEREST_S
            }
            jobs = [job for key, (job, _) in self._jobs.items() if key[:2] == (scheduler, config)]
        try:
            answers = self._query(jobs) if self._query else backend(scheduler).query(jobs)
        # No error is raised: the run directory contains most of the status.
        except Exception as error:
            answers = {
                job.id: SchedulerAnswer(state=None, reason=f"{scheduler} does not answer: {error}")
                for job in jobs
            }
        with self._lock:
            # The time of an answer is the time of the query, since the job may have started after
            # the query.
            for job in jobs:
                if answer := answers.get(job.id):
                    self._answers[_key(job)] = answer.replace(time=min(answer.time, now))


def run_command(
    words: list[str],
    advice: str,
    timeout_s: float,
    *,
    text: str = "",
    environment: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Runs a command of a scheduler with `text` on its standard input. Returns its standard output.

    Raises:
        JobError: The command is not installed, runs longer than `timeout_s` seconds, or fails. The
            message contains `advice` for a missing command, and the output of a failed command.
    """
    what = shlex.join(words[:2])
    try:
        done = subprocess.run(
            words,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            env=environment,
            cwd=cwd,
            start_new_session=True,  # Ctrl-C must not interrupt a submission.
        )
    except FileNotFoundError as error:
        raise JobError(f"{words[0]} is not installed here. {advice}") from error
    except subprocess.TimeoutExpired as error:
        raise JobError(f"{what} timed out: no answer within {timeout_s:g} s") from error
    if done.returncode:
        said = " ".join(done.stderr.split()) or " ".join(done.stdout.split())
        raise JobError(f"{what}: {_end_of(said, 500) or f'exit code {done.returncode}'}")
    return done.stdout


def _end_of(text: str, length: int) -> str:
    """Returns the last `length` characters of an error message, from the beginning of a word.
    Returns a shorter message unchanged. The end is kept because banners come first and the reason
    comes last.
    """
    if len(text) <= length:
        return text
    end = text[-length:]
    return f"… {end.partition(' ')[2] or end}"


POLLER = Poller()
"""The Poller of this process, which all callers share, so that a scheduler is not queried more
often than necessary."""


def backend(scheduler: str) -> Any:
    """Returns the package of a scheduler, such as `cluster.slurm` for "slurm". Each package has the
    functions `check`, `texts`, `start` and `requeue`. All packages but `cluster.local` also have
    `query`, `output` and `cancel`.
    """
    return import_module(f"cluster.{scheduler}")


def _key(job: SchedulerJob) -> tuple[str, str | None, str]:
    return job.scheduler, job.config, job.id
