"""build_dataset: text in, a dataset folder out: a whole corpus, or one part of several.

What is done lies in `.NAME.building-...` beside the dataset until it is whole.
"""

import contextlib
import functools
import os
import pickle
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cluster.interpreter import source_command
from cluster.logs import last_words
from cluster.record import ConfigError
from kit.data.corpus import Corpus, SourcePaths
from kit.data.dataset import DESCRIPTION, BuildSettings, Dataset
from kit.data.readers import TEXT_KEY
from kit.data.steps import Advance, read, tokenize, write
from kit.data.tokenizer import DEFAULT_VOCAB_SIZE, Tokenizer, load_tokenizer
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
    corpus, settings, given = _asked(
        sources,
        tokenizer,
        vocab_size,
        max_bytes,
        validation_fraction,
        seed,
        skip_corrupt,
        text_key,
        separator,
        allow_unread,
    )
    if part is not None:
        corpus = corpus.part(*part)
        directory = _part_folder(out_dir, settings, *part)
    settings = settings.replace(sources=corpus.sources())
    if there := _existing(directory, settings, overwrite):
        log.say(f"Reusing {directory}: built with the same settings from the same text.")
        return there
    directory.parent.mkdir(parents=True, exist_ok=True)
    building = f".{directory.name}.building-"
    for left in directory.parent.glob(f"{building}*"):
        log.say(f"{left}: of a build that runs now, or of one that was killed: then remove it.")
    with tempfile.TemporaryDirectory(prefix=building, dir=directory.parent) as name:
        cores = len(os.sched_getaffinity(0))
        folder = Path(name)
        by_piece = functools.partial(share_out, workers or cores, log)
        text = read(corpus, settings, by_piece)
        vocabulary, runs = tokenize(text, settings, given, folder, by_piece)
        whole = write(text, settings, vocabulary, runs, folder, by_piece)
        _move_into_place(whole, directory, settings, overwrite)
    return Dataset.open(directory)


def unbuilt_parts(out_dir: str | Path, count: int, overwrite: bool, **asked: Any) -> list[int]:
    """Returns the numbers of the parts that are not there; `asked` is that of `build_dataset`.

    A part is there if it was built with these settings from files of these names and sizes, which
    are not read. Raises as `build_dataset`.
    """
    corpus, settings, _ = _asked(**asked)

    def is_lacking(number: int) -> bool:
        own = settings.replace(sources=corpus.part(number, count).sources(hashed=False))
        folder = _part_folder(out_dir, settings, number, count)
        return _existing(folder, own, overwrite, hashed=False) is None

    return [number for number in range(1, count + 1) if is_lacking(number)]


def _asked(
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
    """Returns the text, the settings but for what the text is, and the tokenizer, if given."""
    if not 0 < validation_fraction < 1:
        raise DataError(f"validation_fraction: {validation_fraction} is not allowed. Give 0 to 1.")
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    own = given.vocab_size if given else DEFAULT_VOCAB_SIZE
    if given is not None and vocab_size not in (None, own):
        raise DataError(
            f"vocab_size: {vocab_size} asked, but {tokenizer} has {own}. Leave vocab_size out, or "
            f"give another tokenizer."
        )
    corpus = Corpus(sources, max_bytes, skip_corrupt, text_key, separator, allow_unread)
    settings = BuildSettings(
        sources=(),
        tokenizer_sha256=given.sha256 if given else None,
        vocab_size=own if vocab_size is None else vocab_size,
        max_bytes=corpus.max_bytes,
        validation_fraction=validation_fraction,
        seed=seed,
        text_key=text_key,
        separator=separator,
        order="windows",
    )
    return corpus, settings, given


def _part_folder(out_dir: str | Path, settings: BuildSettings, number: int, count: int) -> Path:
    """Returns where a part of a dataset lies.

    Raises:
        DataError: its tokenizer would be its own, or the text is in other parts already.
    """
    if settings.tokenizer_sha256 is None:
        raise DataError("part: give one --tokenizer to all, such as that of a build of a sample.")
    directory = Path(os.path.abspath(out_dir))
    if others := {*directory.glob("part_*_of_*")} - {*directory.glob(f"part_*_of_{count}")}:
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
    """Returns the dataset in `directory` if it is the one asked for, None if it may be built.

    Raises:
        DataError: something else is there: no dataset, or another and no leave to overwrite it.
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
    whole: Path, directory: Path, settings: BuildSettings, overwrite: bool
) -> None:
    if overwrite and directory.exists():
        directory.rename(whole.with_name("replaced"))
    try:
        whole.rename(directory)
    except OSError:  # another build of the same was quicker
        if _existing(directory, settings, overwrite=False) is None:
            raise


TELL_EVERY_S = 30.0


class BuildProgress:
    """A progress bar in bytes of text, lines in the log of a job, or silence."""

    def __init__(self, shown: bool) -> None:
        from kit.show.terminal import PlainConsole

        self._console = PlainConsole(quiet=not shown)
        self._told_at = time.monotonic()

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    @contextlib.contextmanager
    def stage(self, title: str, total: int) -> Iterator[Advance]:
        """Shows a stage of so many bytes; what it yields is told of those that are done."""
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        console = self._console
        is_log = not (console.is_terminal or console.is_jupyter)
        with Bars(
            TextColumn("{task.description:<22}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=console.quiet,
        ) as bars:
            task = bars.add_task(title, total=total)

            def advance(num_bytes: int) -> None:
                bars.advance(task, num_bytes)
                if is_log and time.monotonic() - self._told_at > TELL_EVERY_S:
                    self._told_at = time.monotonic()
                    now = bars.tasks[task]
                    done = f"{now.completed / 1e9:,.2f}"
                    left = now.time_remaining
                    ending = "" if left is None else f", {left / 60:.0f} min left"
                    self.say(f"{title}: {done} of {total / 1e9:,.2f} GB{ending}")

            yield advance
            bars.update(task, completed=total)


def share_out(
    workers: int,
    progress: BuildProgress,
    title: str,
    function: Callable[..., Any],
    pieces: Sequence[tuple[Any, ...]],
    sizes: Sequence[int],
) -> list[Any]:
    """Returns what a function makes of each piece, `sizes` being their bytes of text.

    One worker, or one piece, needs no process but this, which encodes on all cores. Otherwise each
    piece has a process, of which so many run at a time; none outlives this call, or this process.

    Raises:
        DataError: a piece cannot be done, or a process has gone.
    """
    children: list[subprocess.Popen[bytes]] = []
    command = source_command("kit.data")
    pipe = subprocess.PIPE
    alone = os.environ | {"TOKENIZERS_PARALLELISM": "false"}  # there is a process for each core
    with progress.stage(title, sum(sizes)) as advance:

        def elsewhere(piece: tuple[Any, ...], size: int) -> Any:
            child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=alone)
            children.append(child)
            output, errors = child.communicate(pickle.dumps((function, piece)))
            if child.returncode:
                said = last_words(errors.decode(errors="replace"))
                raise DataError(
                    f"A process of the build has ended with code {child.returncode}, which is -9 "
                    f"where memory ran out{f': {said}' if said else ''}. Build again on fewer"
                    f" cores, with `taskset`, or in Python with fewer workers."
                )
            if isinstance(answer := pickle.loads(output), Exception):
                raise answer
            advance(size)
            return answer

        if min(workers, len(pieces)) == 1:
            return [function(*piece, advance) for piece in pieces]
        with ThreadPoolExecutor(workers) as threads:
            try:
                return list(threads.map(elsewhere, pieces, sizes))  # an error ends all
            finally:
                for child in children:
                    child.kill()
