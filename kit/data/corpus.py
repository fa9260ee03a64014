"""Defines `Corpus`: the documents of given files and folders, in a fixed order and without exact
duplicates.
"""

import copy
import dataclasses
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from cluster.record import Record, counted, field_doc
from kit.data.detect import TEXT_ENDS, detect, file_extensions
from kit.data.folder import FORMATS, UnreadFiles, files_to_read
from kit.data.installed import DEFAULT_BYTES, installed_files
from kit.data.readers import (
    END_MARKS,
    LARGEST_DOCUMENT_BYTES,
    PART,
    TEXT_KEY,
    holds_json_lines,
    read_texts,
    too_large,
)
from kit.data.wheels import file_sha256
from kit.errors import DataError

PIECE_BYTES = 256 * 1024 * 1024
"""Minimum size of a piece of a corpus in bytes, 256 MiB. A piece is a group of files that one
process reads. Files are added until this size is reached. A file is never divided between pieces,
however large it is. The last piece may be smaller."""
SourcePaths = str | Path | Sequence[str | Path]
Files = list[tuple[Path, str]]
"""Files of a corpus, each as (path on disk, name in messages and in names of documents)."""
SourceFiles = list[tuple[str, Files]]
"""Sources of a corpus, each as (name of the source, list of its files)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source(Record):
    """One source of text: a file, a folder, or a group of the default corpus. Size and hash were
    taken when the dataset was built.
    """

    name: str = field_doc("name of the file, of the folder, or of a group of the default corpus")
    files: int = field_doc("number of files of the source")
    size_bytes: int = field_doc("size of the files on disk, in bytes")
    sha256: str = field_doc("SHA-256 over the names and the hashes of the files")


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """Text of one document. `digest` is the hash of the text in UTF-8, and `num_bytes` its length
    in bytes. `name` is the file name, with the line, row or number of the document if a file has
    several.
    """

    name: str
    text: str
    num_bytes: int
    digest: bytes
    is_end: bool = False
    """Whether the text is the end of a larger document, which was divided between training and
    validation."""

    @classmethod
    def of(cls, name: str, text: str) -> Self:
        """Returns a document with the given name and text. Computes size and hash of the text.

        Raises:
            UnicodeEncodeError: The text holds half a surrogate pair.
        """
        data = text.encode()
        return cls(name, text, len(data), hashlib.blake2b(data, digest_size=16).digest())

    def cut(self, end_bytes: int) -> tuple[Self, Self]:
        """Divides the document in two, and returns (beginning, end). The end has about `end_bytes`
        bytes.
        """
        at = len(self.text) - max(1, len(self.text) * end_bytes // self.num_bytes)
        begin = self.of(self.name, self.text[:at])
        end = self.of(f"{self.name}, its end", self.text[at:])
        return begin, dataclasses.replace(end, is_end=True)

    def draw(self, purpose: str) -> float:
        """Returns a pseudo-random number in [0, 1) that depends only on the document's text and on
        `purpose`.

        `purpose` is a label of the decision for which the number is used, such as the order of
        documents.
        """
        value = hashlib.blake2b(purpose.encode() + self.digest, digest_size=7).digest()
        return int.from_bytes(value, "big") / 2.0**56


class Corpus:
    """The documents of some sources. Every iteration reads them again, in a fixed order.

    After an iteration, the counter `counts` has these keys. `documents`, `text_bytes`: documents
    and bytes of text that were yielded. `duplicates`, `empty`: documents that were left out.
    `skipped_bytes`: bytes that could not be read, as far as they are known. `parts`: documents into
    which large text files were split. `marked`: text files read as one document although they
    contain `<|endoftext|>` or `<|end_of_text|>` several times. `json_texts`: text files read as one
    document although their lines are JSON objects.

    `skipped` lists the places that could not be read, with the reason. `unread` lists the files in
    folders that are not read, counted by kind.
    """

    def __init__(
        self,
        sources: SourcePaths | None = None,
        max_bytes: int | None = None,
        skip_corrupt: bool = False,
        text_key: str = TEXT_KEY,
        separator: str | None = None,
        allow_unread: bool = False,
    ) -> None:
        """Finds the files of the sources.

        Args:
            sources: a file or folder, or a list of them. Text (.txt, .md, .rst, .py) is one
                document per file, JSON lines, JSON arrays, .parquet and .arrow are one document per
                row. JSON and compression (gzip, zstd, bz2, xz) are recognised by content. If a
                folder holds splits, only the split `train` is read. None: the default corpus of
                this Python installation.
            max_bytes: limit on the bytes of text. None: no limit, or `DEFAULT_BYTES` for the
                default corpus.
            skip_corrupt: whether to leave out text that cannot be read, and list it in `skipped`,
                instead of raising. Always true for the default corpus, since users cannot repair
                its files.
            text_key: key of a JSON object, or column of a table, that holds the document. A dot
                leads into an object: `meta.text`.
            separator: text between the documents of a text file. If None, a text file of up to 16
                MiB is one document, and a larger one is split into documents of about 1 MiB.
            allow_unread: whether to accept folders whose unread files hold more bytes than the
                files that are read.

        Raises:
            DataError: A source does not exist, has an unknown format, or holds no files. Or most
                bytes of a folder would not be read, or `separator` is given without text files.
        """
        if separator == "":
            raise DataError("separator: is empty. Give the text between documents, or leave it out")
        if max_bytes is not None and max_bytes <= 0:
            raise DataError(
                f"max_bytes: {max_bytes} is not allowed. Give a number above 0, or None for no"
                " limit."
            )
        self.max_bytes = max_bytes
        self.skip_corrupt = skip_corrupt
        self.text_key = text_key
        self.unread: tuple[UnreadFiles, ...] = ()
        if sources is None:
            self.max_bytes = max_bytes or DEFAULT_BYTES
            self.skip_corrupt = True
            self.groups = installed_files(self.max_bytes)
        else:
            self.groups, self.unread = _local_files(sources, text_key, allow_unread)
            if separator and not any(_may_be_text(path) for path, _ in self.files):
                raise DataError("separator: there is no text file to split. Leave it out.")
        self.separator = separator
        self.counts = Counter[str]()
        self.skipped = list[str]()

    @property
    def files(self) -> Files:
        """All files of the corpus as (path, name), in the order of reading."""
        return [file for _, files in self.groups for file in files]

    def __iter__(self) -> Iterator[Document]:
        """Yields the documents.

        Raises:
            DataError: A file, line or row cannot be read, and `skip_corrupt` is false. The message
                names the file, line or row.
        """
        self.counts = Counter[str]()
        self.skipped = []
        seen = set[bytes]()
        for path, file_name in self.files:
            texts = read_texts(path, file_name, self._report, self.text_key, self.separator)
            for name, text in texts:
                document = self._document(name, text)
                if document is None:
                    continue
                if document.digest in seen:
                    self.counts["duplicates"] += 1
                    continue
                text_bytes = self.counts["text_bytes"] + document.num_bytes
                if self.max_bytes is not None and text_bytes > self.max_bytes:
                    return
                self.counts.update(documents=1, text_bytes=document.num_bytes)
                if name.startswith(f"{file_name}{PART}"):
                    self.counts["parts"] += 1
                elif name == file_name and any(text.count(mark) > 1 for mark in END_MARKS):
                    self.counts["marked"] += 1
                elif name == file_name and holds_json_lines(text):
                    self.counts["json_texts"] += 1
                seen.add(document.digest)
                yield document

    def _document(self, name: str, text: str) -> Document | None:
        if not text.strip():
            self.counts["empty"] += 1
            return None
        try:
            document = Document.of(name, text)
        except UnicodeEncodeError as error:
            return self._report(
                name, f"not text: half a surrogate pair at character {error.start}", len(text)
            )
        if (size := document.num_bytes) > LARGEST_DOCUMENT_BYTES:
            return self._report(name, too_large(size), size)
        return document

    def _report(self, place: str, reason: str, num_bytes: int = 0) -> None:
        if not self.skip_corrupt:
            raise DataError(
                f"{place}: {reason}. Repair or remove it, or leave such documents out:"
                " --skip-corrupt (skip_corrupt=True)."
            )
        self.skipped.append(f"{place}: {reason}")
        self.counts["skipped_bytes"] += num_bytes

    def sources(self, hashed: bool = True) -> tuple[Source, ...]:
        """Returns the sources with their present sizes and hashes.

        If `hashed` is false, no file is read, and the hashes depend only on the names of the files.
        """
        digests: dict[tuple[Path, str], str] = {}
        if hashed:
            with ThreadPoolExecutor() as threads:
                found = threads.map(file_digest, [path for path, _ in self.files])
                digests = dict(zip(self.files, found, strict=True))
        sources = []
        for name, files in self.groups:
            size_bytes = 0
            lines = ""
            for file in files:
                path, file_name = file
                if os.path.exists(path):
                    size_bytes += os.path.getsize(path)
                lines += f"{file_name} {digests.get(file)}\n"
            source = Source(
                name=name,
                files=len(files),
                size_bytes=size_bytes,
                sha256=hashlib.sha256(lines.encode()).hexdigest(),
            )
            sources.append(source)
        return tuple(sources)

    def part(self, number: int, count: int) -> Self:
        """Returns a corpus of a part of the files: every `count`-th file, from the `number`-th file
        on.

        Raises:
            DataError: `number` is not in 1 .. `count`, or the corpus has fewer files than parts.
        """
        if not 1 <= number <= count <= len(self.files):
            raise DataError(
                f"part: {number}/{count} of {counted(len(self.files), 'file')} is not allowed. Give"
                " I/N: the I-th of N parts, of which each has a file or more."
            )
        groups: SourceFiles = []
        position = 0
        for name, files in self.groups:
            chosen = []
            for file in files:
                position += 1
                if position % count == number % count:
                    chosen.append(file)
            if chosen:
                groups.append((name, chosen))
        return self._of(groups)

    def pieces(self) -> list[Self]:
        """Divides the files into groups of about 256 MiB (`PIECE_BYTES`), and returns a corpus for
        each group. Different processes can read different groups.

        If the bytes of text are limited, all files are in one group, since the limit counts text of
        all files.
        """
        pieces = list[Files]()
        room = 0
        for file in self.files:
            if not pieces or (room <= 0 and self.max_bytes is None):
                pieces.append([])
                room = PIECE_BYTES
            pieces[-1].append(file)
            room -= file[0].stat().st_size
        return [self._of([("", files)]) for files in pieces]

    def _of(self, groups: SourceFiles) -> Self:
        """Returns a copy of this corpus, with the same options, that reads only the files in
        `groups`.
        """
        chosen = copy.copy(self)
        chosen.groups = groups
        return chosen


def _local_files(
    sources: SourcePaths, text_key: str, allow_unread: bool
) -> tuple[SourceFiles, tuple[UnreadFiles, ...]]:
    """Returns (files of each source, counts of the files in folders that are not read).

    If a source is a folder, all files below it that hold text are read.

    Raises:
        DataError: `sources` is empty. Or a source is missing, has an unknown format, or is a folder
            of which too few files can be read.
    """
    if isinstance(sources, str | Path):
        sources = [sources]
    paths = [Path(source) for source in sources]
    if not paths:
        raise DataError(
            "sources: the list is empty. Give files or folders, or None for the default corpus."
        )
    groups: SourceFiles = []
    unread = list[UnreadFiles]()
    for path in paths:
        if path.is_dir():
            found, others = files_to_read(path, text_key, allow_unread)
            files = [(file, file.relative_to(path.parent).as_posix()) for file in found]
            unread += others
        else:
            _check_file(path)
            files = [(path, path.name)]
        groups.append((path.name, files))
    return groups, tuple(unread)


def _check_file(file: Path) -> None:
    """Raises DataError if a file given as a source is missing or has an unknown format."""
    if not file.exists():
        raise DataError(
            f"{file}: no such file or folder. Give text, .jsonl or .parquet files, or folders"
            " of them."
        )
    if not file.is_file():
        raise DataError(f"{file}: neither a file nor a folder. Give {FORMATS}.")
    try:
        found = detect(file)
    except OSError:
        return  # The reader of the file reports why it cannot be opened.
    reason = found.reason
    if found.kind == "text" and file_extensions(file)[0] not in TEXT_ENDS | {""}:
        reason = "not one of these formats. If it is text to train on, name it .txt"
    if found.kind in ("other", "pointer") or reason:
        raise DataError(f"{file}: cannot read this format: {reason}. Allowed: {FORMATS}.")


def _may_be_text(file: Path) -> bool:
    """Returns whether a file may be plain text, judged by the extension in its name."""
    return file_extensions(file)[0] in TEXT_ENDS | {""}


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file. If the file cannot be opened, returns the reason as text
    instead. No error is raised here, since the reader of the file reports that reason later.
    """
    try:
        return file_sha256(path)
    except OSError as error:
        return str(error.strerror)
