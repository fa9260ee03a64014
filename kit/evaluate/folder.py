"""Scores of a Hugging Face folder, through the kit's own reader of it and the tokenizer in it."""

import hashlib
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kit.data import load_tokenizer
from kit.data.tokenizer import Tokenizer
from kit.data.wheels import file_sha256
from kit.errors import ConfigError
from kit.evaluate import Options, check_keepable, check_request, keep_scores, score_all
from kit.evaluate.report import EvalReport

DEFAULT_TASKS = ("piqa", "arc_easy")


class FolderTokenizer:
    """The tokenizer of a folder as the harness's `HFLM` uses it: what transformers puts before a
    text is put there.
    """

    def __init__(self, folder: Path, inner: Tokenizer) -> None:
        from transformers import AutoTokenizer

        self._inner = inner
        self.file_name, self.data, self.sha256 = inner.file_name, inner.data, inner.sha256
        self.vocab_size, self.eos_id, self.start_id = inner.vocab_size, inner.eos_id, inner.start_id
        self._before: list[int] = []
        try:
            theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except (OSError, ValueError):  # a lone tokenizer.model says nothing of it
            return
        if theirs.bos_token_id is not None:
            self.start_id = theirs.bos_token_id
            self._before = [self.start_id] if theirs.encode("a")[0] == self.start_id else []
        if self._before:
            self.sha256 = hashlib.sha256(
                f"{inner.sha256} after {self._before}".encode()
            ).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._before + self._inner.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._before + tokens for tokens in self._inner.encode_batch(texts)]

    def decode(self, ids: Iterable[int]) -> str:
        return self._inner.decode(ids)


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
    """Scores the Llama or GPT-2 of a Hugging Face folder; nothing is written into the folder.

    Tasks and options are as in `evaluate`, but `heldout` belongs to a run. The report is kept in
    `out`, by default `report_beside`, with its scores of other tasks.

    Raises:
        ConfigError: as `import_hugging_face`, or the report cannot be written to `out`, which is
            found before the work, or `out` holds scores of other weights or another tokenizer.
        DataError: the folder cannot be read, or has no tokenizer.
    """
    import torch

    from kit.convert.hugging_face import import_hugging_face
    from kit.evaluate.ranks import DTYPES, Share

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
    lone, model = (
        load_tokenizer(folder),
        import_hugging_face(folder).decoder(DTYPES[chosen.precision]),
    )
    tokenizer = FolderTokenizer(folder, lone)
    report = EvalReport(
        name=folder.resolve().name,
        checkpoint=str(folder.resolve()),
        weights_sha256=_weights_sha256(folder),
        tokenizer_sha256=tokenizer.sha256,
    )
    if file.exists():
        _check_same_model(file, report)
    share = Share(model=model, device=torch.device("cpu"))
    found = score_all(
        share,
        tokenizer,
        model.spec.sequence_length,
        requests,
        chosen,
        None,
        skip=isinstance(tasks, str),
    )
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
