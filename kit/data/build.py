"""Builds a dataset folder from text: of a whole corpus, or of one part of several.

Until the dataset is complete, its files are in the folder `.NAME.building-...` beside it.
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
    """Returns the dataset in `out_dir`, built from `sources` unless it is there already.

    The folder appears whole or not at all; a build that was killed begins anew. Whole documents are
    held out for validation, chosen by the hash of their text, so a document stays on its side when
    others come or go (only if that chooses none is the largest one taken). Of one that is larger
    than the share to hold out, such as a corpus that is one .txt, only the end is. The others are
    written in a random order, by the same kind of hash, since training reads the file in windows.

    A part is a dataset of its own in the folder `part_I_of_N` of `out_dir`, from every N-th file.
    All parts have one tokenizer, which must be given, and hold out what the whole would, but for
    documents that are larger than the share of a part. A document that is in two parts stays there.

    Args:
        out_dir: the folder to make.
        sources: files or folders of text (see `Corpus`); None is what this Python installation has.
        tokenizer: tokenizer.json, sentencepiece .model, Hugging Face folder or hub name; None
            trains a byte-level BPE on the training part of the text.
        vocab_size: entries of the trained tokenizer (default 4,096), or those of the given one.
        max_bytes: bytes of text to stop at, in each part (default: 24 MB of the installation's
            text, all of local sources).
        validation_fraction: share of the documents to hold out; one at least is, or its end.
        seed: changes which documents are held out, and the order of the others.
        progress: show a progress bar with the time left, and say when a dataset is reused.
        skip_corrupt: leave out what cannot be read, naming it in dataset.json, rather than stop.
        text_key: key of a JSON object, or column of a table, that holds the document. A dot leads
            into an object: `meta.text`.
        separator: text between the documents of a text file, such as `<|endoftext|>`. The
            separator "\\n\\n" matches any number of blank lines. If None, a text file of up to
            16 MiB is one document, and a larger one is split into documents of about 1 MiB.
        allow_unread: accept folders whose unread files hold more bytes than the files that are
            read. `DatasetInfo.unread` counts the unread files.
        overwrite: replace a dataset that was built with other settings, or is damaged.
        workers: processes that share the files out (default: one for each core, if there is so much
            text).
        part: (I, N) builds the I-th of N parts.

    Raises:
        DataError: a source or the tokenizer cannot be used, less than 1 % of the text would be left
            to train on, or `out_dir` holds something else.
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
        log.say(f"Reusing {directory}: built with the same settings from the same text.")
        return existing
    directory.parent.mkdir(parents=True, exist_ok=True)
    building = f".{directory.name}.building-"
    for left in directory.parent.glob(f"{building}*"):
        log.say(f"{left}: of a build that runs now, or of one that was killed: then remove it.")
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
    """Returns the numbers of the parts that are not built yet.

    A part is built if it has the settings that the options of `build_dataset` give, from files of
    these names and sizes. The files are not read. Raises as `build_dataset`.
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
    """Checks the options of a build.

    Returns (text, settings without the sources, tokenizer if one is given).
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
    """Returns the folder of a part of a dataset.

    Raises:
        DataError: Each part would train a tokenizer of its own, or `out_dir` holds a dataset in
            another number of parts.
    """
    if settings.tokenizer_sha256 is None:
        raise DataError("part: give one --tokenizer to all, such as that of a build of a sample.")
    directory = Path(os.path.abspath(out_dir))
    others = set(directory.glob("part_*_of_*")) - set(directory.glob(f"part_*_of_{count}"))
    if others:
        raise DataError(
            f"{min(others)}: of another number of parts than {count}, so text would stand there "
            f"twice. Remove it, or give another folder."
        )
    return directory / f"part_{number:0{len(str(count))}}_of_{count}"


def _existing(
    directory: Path,
    settings: BuildSettings,
    overwrite: bool,
    hashed: bool = True,
) -> Dataset | None:
    """Returns the dataset in `directory` if it has these settings, or None if it may be built.

    Raises:
        DataError: The folder holds something else than a dataset. Or it holds a dataset with other
            settings, which is not to be overwritten.
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
        # Another build with these settings was quicker.
        if _existing(directory, settings, overwrite=False) is None:
            raise
