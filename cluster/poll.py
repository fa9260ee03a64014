"""One polite question to a scheduler for all jobs that this process looks at.

However many runs a notebook shows and however often, a scheduler is asked at most once in
`interval_s`, for all of them together, in the background; in between everyone gets the last answer.
One that does not answer keeps nobody waiting for another. What it is asked, and told, goes by its
own commands. Standard library only.
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
    """What a scheduler says about a job."""

    state: JobState | None = field_doc(
        "state in the words of JobState; none: the scheduler could not be asked"
    )
    reason: str = field_doc("one line for people")
    exit_code: int | None = field_doc(
        "exit code of a job that has ended; 128 + n for signal n", default=None
    )
    time: float = field_doc(
        "time of the question in seconds, by this process's monotonic clock",
        default_factory=time.monotonic,
    )


class Poller:
    """Asks schedulers about many jobs, seldom."""

    def __init__(
        self, ask: Callable[[list[SchedulerJob]], dict[str, SchedulerAnswer]] | None = None
    ) -> None:
        """`ask` replaces the schedulers' own `query`; it takes jobs of one scheduler."""
        self.interval_s = INTERVAL_S
        self._ask = ask
        self._jobs: dict[tuple, tuple[SchedulerJob, float]] = {}
        self._answers: dict[tuple, SchedulerAnswer] = {}
        self._asking: dict[tuple, threading.Thread] = {}
        self._lock = threading.Lock()

    def answer(self, job: SchedulerJob) -> SchedulerAnswer:
        """Returns the last answer about a job; waits only for the first one, or for one that is
        long out of date.
        """
        key = _key(job)
        with self._lock:
            self._jobs[key] = (job, time.monotonic())
            last = self._answers.get(key)
            age_s = time.monotonic() - last.time if last else float("inf")
            ended = last is not None and last.state is not None and last.state.is_final
            if last and (age_s < self.interval_s or (ended and age_s < 10 * self.interval_s)):
                return last
            asking = self._asking.get(key[:2])
            if asking is None or not asking.is_alive():
                asking = threading.Thread(
                    target=self._refresh, args=key[:2], name="scheduler-poll", daemon=True
                )
                self._asking[key[:2]] = asking
                asking.start()
        if last and age_s < 3 * self.interval_s:
            return last
        asking.join(ANSWER_WAIT_S)
        return self._answers.get(key) or SchedulerAnswer(
            state=None, reason=f"{job.scheduler} has not answered yet"
        )

    def forget(self, job: SchedulerJob) -> None:
        """Drops what is known of a job, because it was just changed: the next look asks again."""
        with self._lock:
            self._answers.pop(_key(job), None)

    def _refresh(self, scheduler: str, config: str | None) -> None:
        """Asks one scheduler about all its jobs of interest."""
        now = time.monotonic()
        with self._lock:
            self._jobs = {
                key: value for key, value in self._jobs.items() if now - value[1] < INTEREST_S
            }
            jobs = [job for key, (job, _) in self._jobs.items() if key[:2] == (scheduler, config)]
        try:
            answers = self._ask(jobs) if self._ask else backend(scheduler).query(jobs)
        except Exception as error:  # whatever went wrong, the run directory still tells most of it
            answers = {
                job.id: SchedulerAnswer(state=None, reason=f"{scheduler} does not answer: {error}")
                for job in jobs
            }
        with self._lock:
            # What is said was true when it was asked; by now the job may have started.
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
    """Returns what a scheduler's command prints when it is given a text on its standard input.

    Raises:
        JobError: it is not installed, with `advice`, is not done in time, or fails, with its words.
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
            start_new_session=True,  # Ctrl-C must not reach a submission that is half done
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
    """Returns a text of at most `length` characters as it is, and the end of a longer text: banners
    come first, the reason last.
    """
    if len(text) <= length:
        return text
    end = text[-length:]
    return f"… {end.partition(' ')[2] or end}"


POLLER = Poller()
"""The poller that all callers in this process share."""


def backend(scheduler: str) -> Any:
    """Returns the package of a scheduler. Each has `check`, `texts`, `start` and `requeue`. All but
    `cluster.local` also have `query`, `output` and `cancel`.
    """
    return import_module(f"cluster.{scheduler}")


def _key(job: SchedulerJob) -> tuple[str, str | None, str]:
    return job.scheduler, job.config, job.id
