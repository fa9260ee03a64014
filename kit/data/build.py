"""build_dataset: text in, a dataset folder out, in three stages: survey, encode, put in order.

What is done lies in `.NAME.building` beside the dataset, so a build that was killed goes on where it was.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cluster.files import write_atomic
from cluster.record import ConfigError
from kit.data.corpus import Corpus, SourcePaths
from kit.data.dataset import DESCRIPTION, FORMAT, Dataset, DatasetInfo, Settings
from kit.data.lead import lead
from kit.data.pieces import ASKED, Work
from kit.data.readers import TEXT_KEY
from kit.data.team import Progress, follow, helpers
from kit.data.tokenizer import DEFAULT_VOCAB_SIZE, load_tokenizer
from kit.errors import DataError

PART_BYTES = 256 * 1024 * 1024
"""Of files in a part, which is done again where it was killed. A file is in one part, however large it is."""
LOCK = ".lock"


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
    workers: int | None = None,
) -> Dataset:
    """Returns the dataset in `out_dir`, built from `sources` unless it is there already.

    The folder appears whole or not at all; a build that was killed goes on where it was when it is asked for again.
    Whole documents are held out for validation, chosen by the hash of their text, so a document stays on its side when
    others come or go (only if that chooses none is the largest one taken). Of one that is larger than the share to hold
    out, such as a corpus that is one .txt, only the end is. The others are written in a random order, by the same kind
    of hash, since training reads the file in windows.

    Args:
        out_dir: the folder to make.
        sources: files or folders of text (see `Corpus`); None is what this Python installation has.
        tokenizer: tokenizer.json, sentencepiece .model, Hugging Face folder or hub name; None trains a byte-level BPE
            on the training part of the text.
        vocab_size: entries of the trained tokenizer (default 4,096); with a given tokenizer, what it must have.
        max_bytes: bytes of text to stop at (default: 24 MB of the installation's text, all of local sources).
        validation_fraction: share of the documents to hold out; one at least is, or its end.
        seed: changes which documents are held out, and the order of the others.
        progress: show a progress bar with the time left, and say when a dataset is reused.
        skip_corrupt: leave out what cannot be read, naming it in dataset.json, rather than stop.
        text_key: of a .jsonl object, or column of a table: what holds the document.
        overwrite: replace a dataset that was built with other settings, or is damaged.
        workers: processes that share the text out by its files (default: one for each core, if there is so much text).

    Raises:
        DataError: a source or the tokenizer cannot be used, less than 1 % of the text would be left to train on, or
            `out_dir` holds something else.
    """
    progress_bars = Progress(shown=progress)
    with prepared(
        out_dir, progress_bars, sources, tokenizer, vocab_size, max_bytes, validation_fraction, seed,
        skip_corrupt=skip_corrupt, text_key=text_key, overwrite=overwrite, workers=workers,
    ) as folder:  # fmt: skip
        if folder is None:
            progress_bars.say(f"Reusing {out_dir}: built with the same settings from the same text.")
        else:
            work = Work(folder)
            _build(work, min(work.asked["workers"], len(work.parts)), progress_bars)
    return Dataset.open(out_dir)


@contextlib.contextmanager
def prepared(
    out_dir: str | Path, progress: Progress, sources: SourcePaths | None, tokenizer: str | Path | None,
    vocab_size: int | None, max_bytes: int | None, validation_fraction: float, seed: int,
    *, skip_corrupt: bool, text_key: str, overwrite: bool, workers: int | None,
) -> Iterator[Path | None]:  # fmt: skip
    """Yields the folder of a build that is asked for, nobody else being at it; None if the dataset is there already.

    Arguments and errors as of `build_dataset`.
    """
    if not 0 < validation_fraction < 1:
        raise DataError(f"validation_fraction: {validation_fraction} is not allowed. Give a share between 0 and 1.")
    if workers is not None and workers < 1:
        raise DataError(f"workers: {workers} is not allowed. Give 1 or more, or leave it out: one for each core.")
    directory = Path(os.path.abspath(out_dir))
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    if given is not None and vocab_size not in (None, given.vocab_size):
        raise DataError(
            f"vocab_size: {vocab_size} asked, but {tokenizer} has {given.vocab_size}. Leave vocab_size out."
        )
    corpus = Corpus(sources, max_bytes, skip_corrupt, text_key)
    settings = Settings(
        sources=(),
        tokenizer_sha256=given.sha256 if given else None,
        vocab_size=vocab_size if vocab_size is not None else given.vocab_size if given else DEFAULT_VOCAB_SIZE,
        max_bytes=corpus.max_bytes,
        validation_fraction=validation_fraction,
        seed=seed,
        text_key=text_key,
        order="windows",
    )

    def is_there() -> bool:
        return _existing(directory, lambda: settings.replace(sources=corpus.sources), overwrite) is not None

    if is_there():
        yield None
        return
    asked = {
        "out": str(directory), "settings": settings.to_dict(), "skip_corrupt": corpus.skip_corrupt,
        "groups": [[name, len(files)] for name, files in corpus.groups], "parts": _parts(corpus),
        "tokenizer": {"tokenizer_file": given and given.file_name, "eos_id": given and given.eos_id},
        "overwrite": overwrite, "workers": workers or len(os.sched_getaffinity(0)), "format": FORMAT,
        "pieces": 2,  # version of what they leave in the folder, where a build of an older one began
    }  # fmt: skip
    with _alone(directory.with_name(f".{directory.name}.building"), progress) as folder:
        if is_there():  # since the other process has ended
            yield None
            return
        _begin(folder, asked, progress)
        if given is not None:
            write_atomic(folder / given.file_name, given.data)
        try:
            yield folder
        except Exception:  # nothing can come of it, or no job was started
            if not any(folder.glob("survey-*.json")):
                shutil.rmtree(folder, ignore_errors=True)
            raise


def build_in_job(folder: Path, rank: int, ranks: int) -> None:
    """Does the share of one rank of a job in a build that was prepared; rank 0 leads. Raises as `build_dataset`."""
    if not folder.exists():  # in the attempt before this the dataset was whole
        return
    work, progress = Work(folder), Progress(shown=rank == 0)
    each = work.asked["workers"]
    if rank == 0:
        with _alone(folder, progress):
            _build(work, each, progress, ranks * each)
    else:
        with helpers(folder, rank * each + 1, (rank + 1) * each, ranks * each):
            follow(work, rank * each, ranks * each)


def _build(work: Work, workers: int, progress: Progress, size: int | None = None) -> None:
    """Builds what was prepared and puts it in its place; work of hours is kept where an error ends it."""
    directory, overwrite = Path(work.asked["out"]), work.asked["overwrite"]
    try:
        whole = lead(work, workers, size or workers, progress)
        if _existing(directory, lambda: DatasetInfo.read(whole / DESCRIPTION).settings, overwrite) is None:
            _move_into_place(whole, directory, overwrite)
    except DataError:
        if not any(work.folder.glob("encode-*.json")):
            shutil.rmtree(work.folder)
        raise
    shutil.rmtree(work.folder)


def _parts(corpus: Corpus) -> list[list[list[Any]]]:
    """Returns the files by parts, each with path, name, size and time of change; one part if reading has a limit."""
    parts, room = [], 0
    for path, name in corpus.files:
        file = path.stat()
        if not parts or (room <= 0 and corpus.max_bytes is None):
            parts.append([])
            room = PART_BYTES
        parts[-1].append([os.path.abspath(path), name, file.st_size, file.st_mtime_ns])
        room -= file.st_size
    return parts


def _begin(folder: Path, asked: dict[str, Any], progress: Progress) -> None:
    """Writes what is asked; what was done for the same is kept, what was done for something else removed."""
    how = {"overwrite": None, "workers": None}
    with contextlib.suppress(FileNotFoundError, ValueError):
        if json.loads((folder / ASKED).read_text(encoding="utf-8")) | how == json.loads(json.dumps(asked | how)):
            progress.say("Going on where an earlier build of the same ended.")
            write_atomic(folder / ASKED, json.dumps(asked))
            return
    for file in folder.iterdir():
        if file.name != LOCK:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    write_atomic(folder / ASKED, json.dumps(asked))


@contextlib.contextmanager
def _alone(folder: Path, progress: Progress) -> Iterator[Path]:
    """Holds the lock of a folder that may have to be made first; where another process does, waits for it."""
    with contextlib.ExitStack() as stack:
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # where it was removed by who was at it
                lock = stack.enter_context((folder / LOCK).open("a"))
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    progress.say(f"Another process is at {folder}: waiting for it.")
                    fcntl.flock(lock, fcntl.LOCK_EX)
                except OSError:  # a file system without locks
                    pass
                if os.path.samestat(os.fstat(lock.fileno()), (folder / LOCK).stat()):
                    break
        try:
            yield folder
        finally:
            if folder.exists() and [file.name for file in folder.iterdir()] == [LOCK]:
                shutil.rmtree(folder)


def _existing(directory: Path, settings: Callable[[], Settings], overwrite: bool) -> Dataset | None:
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
        differences = there.info.settings.differences(settings())
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
    replaced = building.with_name("replaced")
    if overwrite and directory.exists():
        directory.rename(replaced)
    building.rename(directory)
