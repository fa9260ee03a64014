"""Builds a dataset folder from the text of a whole corpus, or from one of several parts of its
files.

Until the dataset is complete, its files are in the temporary folder `.NAME.building-...` in the
same parent folder.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from cluster.record import ConfigError
from kit.data.corpus import Corpus, SourcePaths
from kit.data.dataset import DESCRIPTION, BuildSettings, Dataset
from kit.data.readers import TEXT_KEY
from kit.data.steps import encode_text, train_on_text, write_dataset
from kit.data.survey import survey_text
from kit.data.tokenizer import DEFAULT_VOCAB_SIZE, Tokenizer, load_tokenizer
from kit.data.workers import BuildProgress, Workers
from kit.errors import DataError


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
    separator: str | None = None,
    allow_unread: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    part: tuple[int, int] | None = None,
) -> Dataset:
    """Builds a dataset in `out_dir` from `sources`, and returns it. An existing dataset with equal
    settings is returned instead.

    The folder appears by a rename when the dataset is complete. A build that was killed starts from
    the beginning.

    Whole documents are chosen for validation by the hash of their text. So a document stays in its
    split when other documents are added or removed. If the hash chooses no document, the largest
    document is chosen. If a chosen document is larger than the validation share, such as a corpus
    of one .txt file, only its end is for validation. Training documents are written in a random
    order, which also depends on the hash of their text. A random order is needed, since training
    reads the file in windows of consecutive tokens.

    A part is a separate dataset in the folder `part_I_of_N` of `out_dir`, built from every N-th
    file. All parts have one tokenizer, which must be given. In every part, the documents chosen for
    validation are those that a build of the whole corpus would choose. Exceptions are documents
    larger than `validation_fraction` of a part's text, and parts in which the hash chooses no
    document. Duplicates in different parts are not removed.

    Args:
        out_dir: folder of the dataset.
        sources: files or folders of text (see `Corpus`). None: the default corpus, which is text of
            this Python installation.
        tokenizer: tokenizer.json, sentencepiece .model, Hugging Face folder or hub name. None:
            train a byte-level BPE on the training part of the text.
        vocab_size: entries of the tokenizer to train (default 4,096). If a tokenizer is given, only
            its own number of entries is allowed.
        max_bytes: limit on the bytes of text, for each part. None: 24 MB for the default corpus, no
            limit for `sources`.
        validation_fraction: fraction of the documents for validation. At least one document, or its
            end, is for validation.
        seed: changes the choice of the documents for validation, and the order of the training
            documents.
        progress: whether to show a progress bar with the time left, and to report that a dataset is
            reused.
        skip_corrupt: whether to leave out text that cannot be read, and list it in dataset.json,
            instead of stopping.
        text_key: key of a JSON object, or column of a table, that holds the document. A dot leads
            into an object: `meta.text`.
        separator: text between the documents of a text file, such as `<|endoftext|>`. The separator
            "\\n\\n" matches any number of blank lines. If None, a text file of up to 16 MiB is one
            document, and a larger one is split into documents of about 1 MiB.
        allow_unread: whether to accept folders whose unread files hold more bytes than the files
            that are read. `DatasetInfo.unread` counts the unread files.
        overwrite: whether to replace a dataset that was built with other settings or is damaged.
        workers: largest number of processes that share the files. None: one per core. A small text
            needs fewer, since one process reads at least 256 MiB of files.
        part: (I, N): build the I-th of N parts of the files. None: build one dataset from all
            files.

    Raises:
        DataError: A source or the tokenizer cannot be used, less than 1 % of the text would be left
            to train on, or `out_dir` holds other files or a dataset with other settings.
    """
    if workers is not None and workers < 1:
        raise DataError(f"workers: {workers} is not allowed. Give 1 or more, or leave it out.")
    log = BuildProgress(shown=progress)
    directory = Path(os.path.abspath(out_dir))
    corpus, settings, given_tokenizer = _prepare(
        sources=sources,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        max_bytes=max_bytes,
        validation_fraction=validation_fraction,
        seed=seed,
        skip_corrupt=skip_corrupt,
        text_key=text_key,
        separator=separator,
        allow_unread=allow_unread,
    )
    if part is not None:
        corpus = corpus.part(*part)
        directory = _part_folder(out_dir, settings, *part)
    settings = settings.replace(sources=corpus.sources())
    existing = _existing(directory, settings, overwrite)
    if existing is not None:
        log.log_line(f"Reusing {directory}: built with the same settings from the same text.")
        return existing
    directory.parent.mkdir(parents=True, exist_ok=True)
    building = f".{directory.name}.building-"
    for left in directory.parent.glob(f"{building}*"):
        log.log_line(
            f"{left}: of a build that runs now, or of one that was killed: then remove it."
        )
    processes = Workers(workers or len(os.sched_getaffinity(0)), log)
    with tempfile.TemporaryDirectory(prefix=building, dir=directory.parent) as name:
        folder = Path(name)
        survey = survey_text(corpus, settings, processes)
        used_tokenizer = given_tokenizer or train_on_text(survey, settings.vocab_size, log)
        encoded = encode_text(survey, seed, used_tokenizer, folder, processes)
        built = write_dataset(survey, settings, used_tokenizer, encoded, folder, log)
        _move_into_place(built, directory, settings, overwrite)
    return Dataset.open(directory)


def unbuilt_parts(out_dir: str | Path, count: int, overwrite: bool, **options: Any) -> list[int]:
    """Returns the numbers, from 1 to `count`, of the parts of a dataset that are not built yet.

    `options` are those of `build_dataset`. A part counts as built if its dataset was built with
    these options, from source files with the present names and sizes. The contents of the source
    files are not read. Raises the errors of `build_dataset`.
    """
    corpus, settings, _ = _prepare(**options)
    numbers = []
    for number in range(1, count + 1):
        sources = corpus.part(number, count).sources(hashed=False)
        own = settings.replace(sources=sources)
        folder = _part_folder(out_dir, settings, number, count)
        if _existing(folder, own, overwrite, hashed=False) is None:
            numbers.append(number)
    return numbers


def _prepare(
    *,
    sources: SourcePaths | None,
    tokenizer: str | Path | None,
    vocab_size: int | None,
    max_bytes: int | None,
    validation_fraction: float,
    seed: int,
    skip_corrupt: bool,
    text_key: str,
    separator: str | None = None,
    allow_unread: bool = False,
) -> tuple[Corpus, BuildSettings, Tokenizer | None]:
    """Checks the options of a dataset build, which `build_dataset` explains.

    Returns (corpus, settings without the sources, tokenizer or None if no tokenizer is given).
    """
    if not 0 < validation_fraction < 1:
        raise DataError(f"validation_fraction: {validation_fraction} is not allowed. Give 0 to 1.")
    given = None
    sha256 = None
    vocabulary = DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
    if tokenizer is not None:
        given = load_tokenizer(tokenizer)
        sha256 = given.sha256
        if vocab_size not in (None, given.vocab_size):
            raise DataError(
                f"vocab_size: {vocab_size} asked, but {tokenizer} has {given.vocab_size}. Leave"
                " vocab_size out, or give another tokenizer."
            )
        vocabulary = given.vocab_size
    corpus = Corpus(sources, max_bytes, skip_corrupt, text_key, separator, allow_unread)
    settings = BuildSettings(
        sources=(),
        tokenizer_sha256=sha256,
        vocab_size=vocabulary,
        max_bytes=corpus.max_bytes,
        validation_fraction=validation_fraction,
        seed=seed,
        text_key=text_key,
        separator=separator,
        order="windows",
    )
    return corpus, settings, given


def _part_folder(out_dir: str | Path, settings: BuildSettings, number: int, count: int) -> Path:
    """Returns the folder of part number `number` of a dataset that is built in `count` parts.

    Raises:
        DataError: No common tokenizer is given, so each part would train a tokenizer. Or `out_dir`
            holds parts of a build with another number of parts, so text would occur twice.
    """
    if settings.tokenizer_sha256 is None:
        raise DataError("part: give one --tokenizer to all, such as that of a build of a sample.")
    directory = Path(os.path.abspath(out_dir))
    others = set(directory.glob("part_*_of_*")) - set(directory.glob(f"part_*_of_{count}"))
    if others:
        raise DataError(
            f"{min(others)}: belongs to a build with another number of parts. In a build with"
            f" {count} parts, its text would occur twice. Remove it, or give another folder."
        )
    return directory / f"part_{number:0{len(str(count))}}_of_{count}"


def _existing(
    directory: Path,
    settings: BuildSettings,
    overwrite: bool,
    hashed: bool = True,
) -> Dataset | None:
    """Returns the dataset in `directory` if it was built with these settings. Returns None if the
    directory is missing or empty, or if its dataset may be replaced.

    `hashed` is whether the contents of the sources are compared, not only their sizes.

    Raises:
        DataError: The folder holds files but no dataset. Or it holds a damaged dataset or one with
            other settings, and `overwrite` is false.
    """
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return None
    if not (directory / DESCRIPTION).is_file():
        raise DataError(
            f"{directory}: exists and is not a dataset; nothing was changed. Give another folder, "
            f"or remove what is in it."
        )
    try:
        there = Dataset.open(directory)
        if overwrite:
            there.verify()
        differences = there.info.settings.differences(settings, hashed)
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


def _move_into_place(
    built: Path, directory: Path, settings: BuildSettings, overwrite: bool
) -> None:
    if overwrite and directory.exists():
        directory.rename(built.with_name("replaced"))
    try:
        built.rename(directory)
    except OSError:
        # Another build with these settings may have finished first.
        if _existing(directory, settings, overwrite=False) is None:
            raise
