"""External sort of encoded documents by their place in the training file.

`RunWriter` sorts as many documents as fit in memory and writes them to one file, a run.
`merge_runs` reads all runs of a build simultaneously, a small batch of each, and yields their
documents in order. So memory depends neither on the size of the text nor on the number of
processes.
"""

import heapq
import os
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

RUN_TOKENS = 32 * 1024 * 1024
"""Tokens that are sorted in memory and written as one run, a sorted file: 128 MiB in int32."""
BATCH_TOKENS = 16 * 1024
"""Tokens per read from a run, a sorted file: 64 KiB. The number is small, since a build can have
thousands of runs, and one batch of each run is in memory."""


class EncodedDocument(NamedTuple):
    """Tokens of one document. Documents are sorted by their place in the training file, and then by
    their hash.
    """

    place: float
    """Sort key of the document: its relative position in the training file, a number in [0, 1)."""
    digest: bytes
    """Hash of the text. Documents with equal text have equal places and digests."""
    num_bytes: int
    """Length of the UTF-8 text in bytes."""
    tokens: bytes
    """Token ids of the document in int32, as raw bytes. The last id is the end-of-text token."""


class RunWriter:
    """Writes documents, which are added in any order, to sorted files (runs) PREFIX-0, PREFIX-1,
    ...
    """

    def __init__(self, prefix: Path) -> None:
        self._prefix = prefix
        self._runs: list[Path] = []
        self._documents: list[EncodedDocument] = []
        self._num_bytes = 0

    def add(self, document: EncodedDocument) -> None:
        """Adds a document. If RUN_TOKENS or more tokens are in memory, they are sorted and written
        to a file.
        """
        self._documents.append(document)
        self._num_bytes += len(document.tokens)
        if self._num_bytes >= 4 * RUN_TOKENS:
            self._write_run()

    def finish(self) -> list[Path]:
        """Writes the documents that are still in memory, and returns the paths of all sorted files
        (runs).
        """
        if self._documents:
            self._write_run()
        return self._runs

    def _write_run(self) -> None:
        run = self._prefix.with_name(f"{self._prefix.name}-{len(self._runs)}")
        self._documents.sort()
        with run.open("wb") as stream:
            for batch in _batches(self._documents):
                pickle.dump(batch, stream)
        self._runs.append(run)
        self._documents = []
        self._num_bytes = 0


def merge_runs(runs: Iterable[Path]) -> Iterator[EncodedDocument]:
    """Yields the documents of all sorted runs (files) in one common order. Of documents with equal
    text, only the first is yielded.
    """
    last_digest = b""
    for document in heapq.merge(*(_read(run) for run in runs)):
        if document.digest != last_digest:
            yield document
        last_digest = document.digest


def _batches(documents: list[EncodedDocument]) -> Iterator[list[EncodedDocument]]:
    """Yields lists of documents. Each list has BATCH_TOKENS tokens or more, except for the last
    list.
    """
    batch = []
    num_bytes = 0
    for document in documents:
        batch.append(document)
        num_bytes += len(document.tokens)
        if num_bytes >= 4 * BATCH_TOKENS:
            yield batch
            batch = []
            num_bytes = 0
    if batch:
        yield batch


def _read(run: Path) -> Iterator[EncodedDocument]:
    """Yields the documents of one run, a sorted file."""
    place = 0
    size = os.path.getsize(run)
    while place < size:
        # The file is opened for each batch, since a process cannot have thousands of open files.
        with run.open("rb") as stream:
            stream.seek(place)
            batch = pickle.load(stream)
            place = stream.tell()
        yield from batch
