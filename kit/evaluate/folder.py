"""Scores of a Hugging Face folder, with the tokenizer in it."""

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kit.convert.hugging_face_config import load_spec
from kit.data import load_tokenizer
from kit.data.wheels import file_sha256
from kit.errors import ConfigError
from kit.evaluate import Options, check_keepable, check_request, keep_scores, score_all
from kit.evaluate.jobs import Layout
from kit.evaluate.report import EvalReport

DEFAULT_TASKS = ("piqa", "arc_easy")


def is_hugging_face_folder(path: Path) -> bool:
    """Returns whether a path is a folder with a `config.json`, and no run directory."""
    return (path / "config.json").is_file() and not (path / "spec.json").exists()


def report_beside(folder: Path) -> Path:
    """Returns where the scores of a folder are kept unless its user says otherwise:
    `FOLDER.eval.json` beside it.
    """
    folder = folder.resolve()
    return folder.with_name(f"{folder.name}.eval.json")


def evaluate_folder(
    folder: str | Path,
    tasks: Sequence[str] | str = DEFAULT_TASKS,
    *,
    out: Path | None = None,
    **options: Any,
) -> EvalReport:
    """Scores the Llama, Mistral or GPT-2 of a Hugging Face folder, into which nothing is written.

    Tasks and options are as in `evaluate`, but `heldout` belongs to a run. The report is kept in
    `out`, by default `report_beside`, with its scores of other tasks.

    Raises:
        ConfigError: it is another model (`load_spec`), or the report cannot be written to `out`,
            which is found before the work, or `out` holds scores of other weights or another
            tokenizer.
        DataError: the folder cannot be read, or has no tokenizer.
    """
    from kit.evaluate.loading import joined, load_lm

    folder, chosen, requests = Path(folder), Options.of(options), check_request(tasks)
    if chosen.devices not in (None, 1):
        raise ConfigError(
            f"devices: {chosen.devices} score a run only, in a job of its site. Leave it out for a"
            " folder."
        )
    file, start = out or report_beside(folder), time.perf_counter()
    try:
        check_keepable(file)
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror}. Give its scores another place: `--set out=FILE`."
        ) from error
    tokenizer, spec = load_tokenizer(folder), load_spec(str(folder))
    with joined(Layout()) as device:
        lm = load_lm(folder, spec.sequence_length, chosen, Layout(), device)
    begin = lm.tokenizer.encode("")  # which its scores depend on
    digest = hashlib.sha256(f"{tokenizer.sha256} after {begin}".encode()).hexdigest()
    report = EvalReport(
        name=folder.resolve().name,
        checkpoint=str(folder.resolve()),
        weights_sha256=_weights_sha256(folder),
        tokenizer_sha256=digest if begin else tokenizer.sha256,
    )
    if file.exists():
        _check_same_model(file, report)
    found = score_all(lm, requests, chosen, None, skip=isinstance(tasks, str))
    return keep_scores(file, report, found, start)


def _weights_sha256(folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors"))
    return hashlib.sha256("".join(file_sha256(file) for file in files).encode()).hexdigest()


def _check_same_model(file: Path, report: EvalReport) -> None:
    before = EvalReport.read(file)
    for what, key in (
        ("other weights", "weights_sha256"),
        ("another tokenizer", "tokenizer_sha256"),
    ):
        if getattr(before, key) != getattr(report, key):
            raise ConfigError(
                f"{file}: its scores are of {what} than {report.checkpoint} has now. Give another"
                " file (`--set out=FILE`), or move it away."
            )
