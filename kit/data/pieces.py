"""The work of a build: a survey of some files, and their tokens, each done by one process; then
all merged.

Tokens of a piece are put down in runs, each sorted by the places that were drawn for its documents,
and all runs are merged: an external sort. So neither the number of pieces nor that of processes can
be seen in the dataset.
"""

import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kit.data.corpus import Document, Documents
from kit.data.token_file import TokenFileWriter
from kit.data.tokenizer import read_tokenizer

RUN_TOKENS = 32 * 1024 * 1024
"""That a piece sorts at once."""
CHUNK_BYTES = 2 * 1024 * 1024
"""Text encoded at a time: enough documents for all cores, few enough for their lists of tokens."""
AT_ONCE = 64
"""Documents that are read of a run at a time."""
ROW = np.dtype([("draw", "<f8"), ("digest", "V16"), ("bytes", "<i8"), ("tokens", "<i8")])
"""Of a document in a run: its place, digest, bytes of text and number of tokens."""

Advance = Callable[[int], None]
"""Is told of so many bytes of text that are done."""
Side = tuple[Document, bool, bool]
"""A document or a part of one, whether it is held out, and whether it is a part."""


class Survey(NamedTuple):
    """What a piece holds: `drawn` of its documents are held out; size and digest of the largest."""

    counts: Counter[str]
    drawn: int
    skipped: list[str]
    longest: tuple[int, str]


class HeldOut(NamedTuple):
    """Which documents are held out: those whose draw is below a share; if none is, one by digest.

    Of one that has more than `most` bytes, only the end is.
    """

    purpose: str
    share: float
    digest: str | None
    most: int

    def sides(self, documents: Iterable[Document]) -> Iterator[Side]:
        """Yields documents, and of one that is cut both parts."""
        for document in documents:
            if document.draw(self.purpose) >= self.share and document.digest.hex() != self.digest:
                yield document, False, False
            elif document.num_bytes <= self.most:
                yield document, True, False
            else:
                begin, end = document.cut(self.most)
                yield from ((begin, False, True), (end, True, True))


def survey(documents: Documents, purpose: str, share: float, advance: Advance) -> Survey:
    """Returns what a piece holds; documents that draw less than `share` are held out."""
    drawn, longest = 0, (0, "")
    for document in documents:
        drawn += document.draw(purpose) < share
        longest = max(longest, (document.num_bytes, document.digest.hex()))
        advance(document.num_bytes)
    return Survey(documents.counts, drawn, documents.skipped, longest)


def encode(
    documents: Documents,
    held_out: HeldOut,
    order: str,
    tokenizer: tuple[Path, int],
    prefix: Path,
    advance: Advance,
) -> tuple[list[Path], Counter[str]]:
    """Writes the runs of a piece, and PREFIX.held: its held-out documents in the order of reading.

    Returns the prefixes of the runs, and what was counted, as for the survey.
    """
    runs, run, size, reader = [], [], 0, read_tokenizer(*tokenizer)
    with open(f"{prefix}.held", "w", encoding="utf-8") as held:
        for chunk in _chunks(held_out.sides(documents)):
            encoded = reader.encode_batch([document.text for document, *_ in chunk])
            for (document, is_held_out, is_cut), ids in zip(chunk, encoded, strict=True):
                tokens, num_bytes = [*ids, reader.eos_id], document.num_bytes
                digest = document.digest
                if is_held_out:
                    row = digest.hex(), document.name, document.text, num_bytes, is_cut, tokens
                    held.write(json.dumps(row) + "\n")
                else:
                    place, found = document.draw(order), np.array(tokens, np.int32)
                    run.append((place, digest, num_bytes, found))
                    size += len(tokens)
                advance(num_bytes)
            if size >= RUN_TOKENS or (run and not chunk):
                runs.append(prefix.with_name(f"{prefix.name}-{len(runs)}"))
                _put_down(run, runs[-1])
                run, size = [], 0
    return runs, documents.counts


def _chunks(sides: Iterator[Side]) -> Iterator[list[Side]]:
    """Yields documents by the chunk; the last is empty."""
    chunk, size = [], 0
    for side in sides:
        chunk.append(side)
        size += side[0].num_bytes
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    yield from (chunk, [])


def _put_down(run: list[tuple[float, bytes, int, np.ndarray]], prefix: Path) -> None:
    """Writes a run in the order of its draws: its tokens, PREFIX.bin, and rows, PREFIX.rows."""
    run.sort(key=itemgetter(0, 1))
    rows = [(draw, digest, size, tokens.size) for draw, digest, size, tokens in run]
    np.array(rows, ROW).tofile(f"{prefix}.rows")
    with open(f"{prefix}.bin", "wb") as stream:
        stream.writelines(tokens.data for *_, tokens in run)


def merge(runs: list[Path], prefix: Path, vocab_size: int, advance: Advance) -> Counter[str]:
    """Writes the documents of all runs as a token file, in the order of their draws and each once.

    Returns how many documents, tokens and bytes of text it holds, and how many duplicates it does
    not.
    """
    counts, last, order = Counter[str](), b"", itemgetter(0, 1)
    with TokenFileWriter(prefix, vocab_size) as writer:
        for _, digest, num_bytes, tokens in heapq.merge(*map(_documents, runs), key=order):
            advance(num_bytes)
            if digest == last:
                counts["duplicates"] += 1
                continue
            writer.add(tokens)
            counts.update(documents=1, tokens=tokens.size, text_bytes=num_bytes)
            last = digest
    return counts


def _documents(run: Path) -> Iterator[tuple[float, bytes, int, np.ndarray]]:
    """Yields draw, digest, bytes and tokens of the documents of a run; no file is held open, since
    there may be thousands.
    """
    first, begin = 0, 0
    while (rows := np.fromfile(f"{run}.rows", ROW, AT_ONCE, offset=first * ROW.itemsize)).size:
        ends = np.cumsum(rows["tokens"])
        tokens = np.fromfile(f"{run}.bin", np.int32, ends[-1], offset=4 * begin)
        known = (rows[name].tolist() for name in ("draw", "digest", "bytes"))
        yield from zip(*known, np.split(tokens, ends[:-1]), strict=True)
        first += rows.size
        begin += tokens.size
