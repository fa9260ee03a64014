"""Scores of a checkpoint by lm-eval's own tasks: benchmarks from a local mirror, and held-out
text of the corpus.
"""

import errno
import hashlib
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.files import other_owner
from kit.errors import ConfigError, DataError
from kit.evaluate.benchmarks import BENCHMARKS, SUITES, TaskRequest, num_files, suite
from kit.evaluate.jobs import layout, refuse_job, score_in_job
from kit.evaluate.options import Options
from kit.evaluate.report import EvalReport, Metric, TaskScore, Unscored
from kit.evaluate.task_data import build_mirror, default_mirror
from kit.run import Run

if TYPE_CHECKING:
    from kit.data import Tokenizer
    from kit.evaluate.packed import PackedLM
    from kit.model import Decoder

__all__ = [
    "BENCHMARKS",
    "SUITES",
    "EvalReport",
    "Metric",
    "Options",
    "TaskScore",
    "build_mirror",
    "default_mirror",
    "evaluate",
    "evaluate_model",
]


def evaluate(
    run: Run | str | Path,
    step: int | None = None,
    tasks: Sequence[str] | str = "default",
    **options: Any,
) -> EvalReport:
    """Scores a checkpoint of a run and keeps the scores in the run directory, in
    `eval/step_NNNNNNNN.json`.

    Tasks are names of lm-eval's tasks, groups or tags (`BENCHMARKS`: those whose data the kit
    brings), or `heldout`: the held-out text of the run's data set; or, as one word, the name of a
    suite, of which the report names what could not be scored, and why. Returned are their scores.
    The file also keeps those of other tasks of the same step, by default the newest; it grows task
    by task, so that an evaluation that is ended keeps what it has. For `options` see `Options`.

    A model that needs several devices, or is given them, is scored in a job of the run's site, and
    this returns at its end. Each process of that job calls this too, started with torch's
    WORLD_SIZE and RANK.

    Raises:
        CheckpointError: the run has no complete checkpoint of that step, or it is damaged.
        RunError, JobError: the job could not be started, or did not come to its end.
        ConfigError: the file's other scores were made with another tokenizer, or the file is
            damaged.
        RunError: the directory is not a run.
        DataError, MissingPackageError: as `evaluate_model`.
    """
    from kit.data.dataset import VALIDATION_TEXT

    chosen, requests = Options.of(options), check_request(tasks)
    run = Run.open(run) if isinstance(run, str | Path) else run
    checkpoint = run.checkpoints.manifest(run.checkpoints.newest() if step is None else step)
    file, ranks = report_file(run, checkpoint.step), int(os.environ.get("WORLD_SIZE", "1"))
    dataset, is_first = run.dataset(), os.environ.get("RANK", "0") == "0"
    plan = layout(run.spec, run.site, chosen, ranks)
    owner = other_owner(run.directory)
    if not owner:
        # Whatever stands against adding to it is found before the work, not after.
        if is_first and file.exists():
            _prepare(file, dataset.info.tokenizer_sha256, checkpoint.attempt)
        check_keepable(file)
    folder = run.checkpoints.path(checkpoint.step).relative_to(run.directory)
    report = EvalReport(
        name=run.name,
        step=checkpoint.step,
        checkpoint=str(folder),
        tokens_seen=checkpoint.tokens,
        attempt=checkpoint.attempt,
        tokenizer_sha256=dataset.info.tokenizer_sha256,
    )
    if plan.num_devices > ranks:
        if owner:
            refuse_job(run, owner)
        score_in_job(run, checkpoint.step, tasks, chosen)
        asked = [chosen.applied(request) for request in requests]
        return EvalReport.read(file).answering(asked, chosen.seed, chosen.precision)
    from kit.evaluate.loading import checkpoint_folder, joined, load_lm

    start, skip = time.perf_counter(), isinstance(tasks, str)
    with (
        joined(plan) as device,
        checkpoint_folder(run, checkpoint.step, chosen.precision) as folder,
    ):
        lm = load_lm(folder, run.spec.sequence_length, chosen, plan, device)
        found = score_all(lm, requests, chosen, dataset.directory / VALIDATION_TEXT, skip=skip)
        return keep_scores(file if is_first and not owner else None, report, found, start)


def check_keepable(file: Path) -> None:
    """Refuses before the work, which may take hours, a file that no report can be written to.

    Raises:
        ConfigError: it is a folder.
        OSError: its folder cannot be made, or written to, or the file is somebody else's.
    """
    if file.is_dir():
        raise ConfigError(f"{file}: is a folder. Give a file, which is made: `--set out=FILE`.")
    there = next(folder for folder in file.absolute().parents if folder.exists())
    about = there.stat()
    # Where anybody may write, as in /tmp, a file is replaced by its owner or the folder's alone.
    kept = about.st_mode & stat.S_ISVTX and file.exists() and {0, about.st_uid, file.stat().st_uid}
    for wrong, code in (
        (not there.is_dir(), errno.ENOTDIR),
        (not os.access(there, os.W_OK), errno.EACCES),
        (kept and os.geteuid() not in kept, errno.EPERM),
    ):
        if wrong:
            raise OSError(code, os.strerror(code), str(there))


def keep_scores(
    file: Path | None, report: EvalReport, found: Iterable[TaskScore | Unscored], start: float
) -> EvalReport:
    """Returns a report with the scores found, after merging each into its file, if it has one, as
    it comes.

    What the file holds of other tasks stays. The work began at `start`, by `time.perf_counter`.
    """
    for one in found:
        spent, start = time.perf_counter() - start, time.perf_counter()
        if file is not None:
            _with(report.replace(scores=(), unscored=(), seconds=spent), one).write_merged(file)
        report = _with(report, one).replace(seconds=report.seconds + spent)
    return report


def evaluate_model(
    model: "Decoder",
    tokenizer: "Tokenizer",
    sequence_length: int,
    tasks: Sequence[str] | str,
    *,
    name: str = "model",
    heldout_file: Path | None = None,
    device: str = "cpu",
    **options: Any,
) -> EvalReport:
    """Returns the scores of a whole decoder on `device`, and which tasks of a suite could not be
    scored, and why.

    `sequence_length` is the longest input of the model, in tokens; `heldout_file` the
    `validation.jsonl` of the corpus, for the task `heldout`. Tasks and options are as in
    `evaluate`.

    Raises:
        ConfigError: a task is unknown, or tokenizer or sequence length do not fit the model.
        DataError: data is missing or damaged, or there are fewer solved examples than shots. In a
            suite such a task is listed in the report instead.
        MissingPackageError: lm-eval is not installed.
    """
    from kit.evaluate.loading import decoder_lm

    for key in {"devices", "precision"} & options.keys():
        raise ConfigError(
            f"{key}: `evaluate_model` scores the decoder as it is. Leave it out, or use `evaluate`."
        )
    chosen, requests = Options.of(options), check_request(tasks)
    report = EvalReport(name=name, tokenizer_sha256=hashlib.sha256(tokenizer.data).hexdigest())
    lm = decoder_lm(model, tokenizer, sequence_length, chosen, device)
    for found in score_all(lm, requests, chosen, heldout_file, skip=isinstance(tasks, str)):
        report = _with(report, found)
    return report


def check_request(tasks: Sequence[str] | str) -> tuple[TaskRequest, ...]:
    """Returns what to score, without repeats: the tasks of a suite, or the named ones.

    Raises:
        ConfigError: no task, an unknown task, or an unknown suite.
        MissingPackageError: lm-eval is not installed.
    """
    from kit.evaluate.task_index import require_harness, tasks_of

    if not tasks:
        raise ConfigError(
            f"tasks: {tasks!r} is not allowed. Give a list of names, for example ['heldout',"
            " 'piqa']."
        )
    if isinstance(tasks, str):
        requests = suite(tasks).tasks
        require_harness()
        return requests
    require_harness()
    names = dict.fromkeys(name for task in tasks for name in tasks_of(task))
    return tuple(TaskRequest(task=name) for name in names)


def report_file(run: Run, step: int) -> Path:
    """Returns where the scores of a checkpoint are kept."""
    return run.directory / "eval" / f"step_{step:08d}.json"


def score_all(
    lm: "PackedLM",
    requests: Sequence[TaskRequest],
    options: Options,
    heldout_file: Path | None,
    *,
    skip: bool,
) -> Iterator[TaskScore | Unscored]:
    """Yields the score of each task; with `skip` also what could not be scored, instead of
    failing.
    """
    from kit.evaluate.code import CodeScorer
    from kit.evaluate.harness import load_task, score_task
    from kit.evaluate.loading import first_alone, is_first

    mirror, scorer, loaded = options.mirror_folder, None, []
    if options.untrusted_code != "refuse":
        scorer = CodeScorer(options.untrusted_code, idle=not is_first())
    with first_alone():  # the others find what it fetches
        if options.download:
            build_mirror(
                mirror, tasks=[request.task for request in requests if request.task in BENCHMARKS]
            )
        for request in map(options.applied, requests):
            try:
                loaded.append(
                    load_task(
                        request,
                        mirror=mirror,
                        task_data=options.task_data,
                        heldout_file=heldout_file,
                        download=options.download,
                    )
                )
            except (ConfigError, DataError) as error:
                if not skip:
                    raise
                yield _unscored(request, error, mirror)
    for task in loaded:
        try:
            yield score_task(lm, task, limit=task.request.limit, seed=options.seed, scorer=scorer)
        except (ConfigError, DataError) as error:
            if not skip:
                raise
            yield _unscored(task.request, error, mirror)


def _unscored(request: TaskRequest, error: Exception, mirror: Path) -> Unscored:
    reason = str(error).removeprefix(f"{request.task}: ")
    return Unscored(
        task=request.task,
        num_fewshot=request.shots,
        num_samples=request.samples,
        temperature=request.temperature,
        top_p=request.top_p,
        reason=reason,
        num_files=num_files(request.task, mirror),
    )


def _with(report: EvalReport, found: TaskScore | Unscored) -> EvalReport:
    if isinstance(found, Unscored):
        return report.replace(unscored=(*report.unscored, found))
    return report.replace(scores=(*report.scores, found))


def _prepare(file: Path, tokenizer_sha256: str, attempt: int) -> None:
    """Refuses to add to scores of another tokenizer, and renames those of a checkpoint of
    another attempt.
    """
    before = EvalReport.read(file)
    if before.tokenizer_sha256 != tokenizer_sha256:
        raise ConfigError(
            f"{file}: its scores were made with tokenizer {before.tokenizer_sha256[:12]}, but the"
            f" data set of the run now has {tokenizer_sha256[:12]}. Restore the data set that the"
            " run was trained on, or move the file away."
        )
    # Another attempt has replaced the checkpoint since: these scores are of other weights.
    if before.attempt not in (None, attempt):
        file.rename(file.with_name(f"attempt_{before.attempt:02d}.{file.name}"))
