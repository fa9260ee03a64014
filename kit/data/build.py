"""build_dataset: text in, a dataset folder out, in three passes: survey, train the tokenizer, encode."""

import dataclasses
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from cluster.record import ConfigError
from kit.data.corpus import Corpus, Document, SourcePaths
from kit.data.dataset import (
    DESCRIPTION,
    FORMAT,
    VALIDATION_TEXT,
    Dataset,
    DatasetInfo,
    Settings,
    Split,
    StoredFile,
    ValidationDocument,
)
from kit.data.readers import TEXT_KEY
from kit.data.shuffle import ShuffledWriter
from kit.data.token_file import TokenFileWriter, token_dtype
from kit.data.tokenizer import DEFAULT_VOCAB_SIZE, Tokenizer, load_tokenizer, train_tokenizer
from kit.errors import DataError

TOKENIZER_BYTES = 32_000_000
"""Text that a tokenizer is trained on; of a larger corpus, a sample of about this size."""
CHUNK_BYTES = 2 * 1024 * 1024
"""Text encoded at a time: enough documents for all cores, few enough for their Python lists of tokens."""


def build_dataset(
    out_dir: str | Path,
    sources: SourcePaths | None = None,
    tokenizer: str | Path | None = None,
    vocab_size: int | None = None,
    max_bytes: int | None = None,
    validation_fraction: float = 0.02,
    seed: int = 1234,
    progress: bool = True,
    *,
    skip_corrupt: bool = False,
    text_key: str = TEXT_KEY,
    overwrite: bool = False,
) -> Dataset:
    """Returns the dataset in `out_dir`, built from `sources` unless it is there already.

    The folder appears whole or not at all. Whole documents are held out for validation, chosen by the hash of their
    text, so a document stays on its side when others come or go (only if that chooses none is the nearest one taken).
    The others are written in a random order, by the same kind of hash, since training reads the file in windows.

    Args:
        out_dir: the folder to make.
        sources: files or folders of text (see `Corpus`); None is what this Python installation has.
        tokenizer: tokenizer.json, sentencepiece .model, Hugging Face folder or hub name; None trains a byte-level BPE
            on the training part of the text.
        vocab_size: entries of the trained tokenizer (default 4,096); with a given tokenizer, what it must have.
        max_bytes: bytes of text to stop at (default: 24 MB of the installation's text, all of local sources).
        validation_fraction: share of the documents to hold out; at least one document is.
        seed: changes which documents are held out, and the order of the others.
        progress: show a progress bar, and say when a dataset is reused.
        skip_corrupt: leave out what cannot be read, naming it in dataset.json, rather than stop.
        text_key: of a .jsonl object, or column of a .parquet file: what holds the document.
        overwrite: replace a dataset that was built with other settings, or is damaged.

    Raises:
        DataError: a source or the tokenizer cannot be used, there are fewer than two documents, or `out_dir` holds
            something else.
    """
    if not 0 < validation_fraction < 1:
        raise DataError(f"validation_fraction: {validation_fraction} is not allowed. Give a share between 0 and 1.")
    directory = Path(out_dir)
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    if given is not None and vocab_size not in (None, given.vocab_size):
        raise DataError(
            f"vocab_size: {vocab_size} asked, but {tokenizer} has {given.vocab_size}. Leave vocab_size out."
        )
    if vocab_size is None:
        vocab_size = given.vocab_size if given else DEFAULT_VOCAB_SIZE
    corpus = Corpus(sources, max_bytes, skip_corrupt, text_key)
    settings = Settings(
        sources=corpus.sources,
        tokenizer_sha256=given.sha256 if given else None,
        vocab_size=vocab_size,
        max_bytes=corpus.max_bytes,
        validation_fraction=validation_fraction,
        seed=seed,
        text_key=text_key,
        order="windows",
    )
    bars = _Progress(shown=progress)
    if (existing := _existing(directory, settings, overwrite)) is not None:
        bars.say(f"Reusing {directory}: built with the same settings from the same text.")
        return existing
    directory.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}.building-"))
    try:
        with bars:
            _build(building, corpus, settings, given, bars)
        building.chmod(0o755)
        # Another process may have built it meanwhile; then its files are as good as these.
        if _existing(directory, settings, overwrite) is None:
            _move_into_place(building, directory, overwrite)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return Dataset.open(directory)


def _existing(directory: Path, settings: Settings, overwrite: bool) -> Dataset | None:
    """Returns the dataset in `directory` if it is the one asked for, None if it may be built (again).

    Raises:
        DataError: something else is there: files that are no dataset, or a dataset and no leave to overwrite it.
    """
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return None
    if not (directory / DESCRIPTION).is_file():
        raise DataError(f"{directory}: exists and is not a dataset; nothing was changed. Give another folder.")
    try:
        there = Dataset.open(directory)
        if overwrite:
            there.verify()
        differences = there.info.settings.differences(settings)
    except (DataError, ConfigError) as error:
        if overwrite:
            return None
        raise DataError(f"{directory}: holds a damaged dataset: {error}") from error
    if not differences:
        return there
    if overwrite:
        return None
    raise DataError(
        f"{directory}: holds a dataset with other settings: {'; '.join(differences)}. "
        "Nothing was changed. Give another folder, or replace it: --overwrite (overwrite=True)."
    )


def _move_into_place(building: Path, directory: Path, overwrite: bool) -> None:
    replaced = building.with_name(building.name + "-replaced")
    if overwrite and directory.exists():
        directory.rename(replaced)
    building.rename(directory)
    shutil.rmtree(replaced, ignore_errors=True)


@dataclasses.dataclass(frozen=True)
class _Survey:
    """What the corpus holds, and how it is divided."""

    documents: int
    text_bytes: int
    held_out_below: float
    seed: int

    def held_out(self, document: Document) -> bool:
        return document.draw(f"validation {self.seed}") < self.held_out_below


def _survey(corpus: Corpus, settings: Settings, bars: "_Progress") -> _Survey:
    """Returns the size of the corpus and the dividing line between training and held-out documents.

    Raises:
        DataError: there are not two documents, or none would be left to train on.
    """
    documents, text_bytes, smallest, largest = 0, 0, 1.0, 0.0
    for document in bars.track("Reading", corpus, sum(source.size_bytes for source in corpus.sources)):
        documents += 1
        text_bytes += document.num_bytes
        draw = document.draw(f"validation {settings.seed}")
        smallest, largest = min(smallest, draw), max(largest, draw)
    names = ", ".join(source.name for source in corpus.sources)
    if documents < 2:
        raise DataError(
            f"{names}: {documents} different documents with text; at least 2 are needed, one of them to hold out. "
            "Add text, allow more with --max-megabytes, or split the text into documents (.jsonl, one per line)."
        )
    line = max(settings.validation_fraction, math.nextafter(smallest, 1.0))
    if largest < line:
        raise DataError(
            f"{names}: all {documents} documents would be held out. Lower validation_fraction, or add text."
        )
    return _Survey(documents, text_bytes, line, settings.seed)


def _build(folder: Path, corpus: Corpus, settings: Settings, given: Tokenizer | None, bars: "_Progress") -> None:
    survey = _survey(corpus, settings, bars)
    tokenizer = given or train_tokenizer(_training_texts(corpus, survey, bars), settings.vocab_size)
    (folder / tokenizer.file_name).write_bytes(tokenizer.data)
    train, validation = _encode(folder, corpus, survey, tokenizer, bars)
    info = DatasetInfo(
        format=FORMAT,
        settings=settings,
        tokenizer_file=tokenizer.file_name,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        dtype=token_dtype(tokenizer.vocab_size).name,
        train=train,
        validation=validation,
        duplicates=corpus.num_duplicates,
        empty=corpus.num_empty,
        skipped=tuple(corpus.skipped),
        files=tuple(StoredFile.of(file) for file in sorted(folder.iterdir())),
    )
    info.write(folder / DESCRIPTION)


def _training_texts(corpus: Corpus, survey: _Survey, bars: "_Progress") -> Iterator[str]:
    """Yields the text to train a tokenizer on: no held-out document, and a sample of a large corpus."""
    share = min(1.0, TOKENIZER_BYTES / survey.text_bytes)
    for document in bars.track("Training the tokenizer", corpus, survey.text_bytes):
        if not survey.held_out(document) and document.draw("tokenizer") < share:
            yield document.text


def _encode(
    folder: Path, corpus: Corpus, survey: _Survey, tokenizer: Tokenizer, bars: "_Progress"
) -> tuple[Split, Split]:
    """Writes the token files and the held-out text; returns the sizes of both parts."""
    documents, text_bytes = [0, 0], [0, 0]
    with ExitStack() as stack:
        names = ("train", "validation")
        writers = [stack.enter_context(TokenFileWriter(folder / name, tokenizer.vocab_size)) for name in names]
        blocks = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
        shuffled = ShuffledWriter(writers[0], Path(blocks), survey.text_bytes)
        lines = stack.enter_context((folder / VALIDATION_TEXT).open("w", encoding="utf-8"))
        for chunk in _chunks(bars.track("Encoding", corpus, survey.text_bytes)):
            for document, ids in zip(chunk, tokenizer.encode_batch([d.text for d in chunk]), strict=True):
                part = int(survey.held_out(document))
                if part == 0:
                    shuffled.add([*ids, tokenizer.eos_id], document.draw(f"order {survey.seed}"))
                documents[part] += 1
                text_bytes[part] += document.num_bytes
                if part == 1:
                    writers[1].add([*ids, tokenizer.eos_id])
                    row = ValidationDocument(document.name, document.text, len(ids) + 1, document.num_bytes)
                    lines.write(json.dumps(row._asdict(), ensure_ascii=False) + "\n")
        shuffled.finish()
    if (sum(documents), sum(text_bytes)) != (survey.documents, survey.text_bytes):
        raise DataError("the text changed while it was read. Build again when nobody writes to the sources.")
    train, validation = (
        Split(documents=documents[part], tokens=writers[part].num_tokens, text_bytes=text_bytes[part])
        for part in (0, 1)
    )
    return train, validation


def _chunks(documents: Iterator[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    room = CHUNK_BYTES
    for document in documents:
        chunk.append(document)
        room -= document.num_bytes
        if room <= 0:
            yield chunk
            chunk, room = [], CHUNK_BYTES
    if chunk:
        yield chunk


class _Progress:
    """A rich progress bar in bytes of text, or silence."""

    def __init__(self, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description:<22}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns, console=Console(quiet=not shown), disable=not shown)

    def say(self, text: str) -> None:
        self._bars.console.print(text)

    def track(self, description: str, corpus: Corpus, total: int) -> Iterator[Document]:
        task = self._bars.add_task(description, total=total)
        for document in corpus:
            yield document
            self._bars.advance(task, document.num_bytes)
        self._bars.update(task, completed=total)

    def __enter__(self) -> None:
        self._bars.start()

    def __exit__(self, *_: object) -> None:
        self._bars.stop()
