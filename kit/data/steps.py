"""The steps of a build: `read` looks what the text holds, `tokenize` and `write` make a dataset.

The files are shared out by the piece, each done by one process. Tokens of a piece are put down in
runs, each sorted by the places that were drawn for its documents, and all runs are merged: an
external sort. So neither the number of pieces nor that of processes can be seen in the dataset.
"""

import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kit.data.corpus import Corpus, Document
from kit.data.dataset import (
    DESCRIPTION,
    FORMAT,
    MOST_NAMED,
    VALIDATION_TEXT,
    BuildSettings,
    DatasetInfo,
    Split,
    StoredFile,
    ValidationDocument,
)
from kit.data.token_file import TokenFileWriter, token_dtype
from kit.data.tokenizer import Tokenizer, read_tokenizer, train_tokenizer
from kit.errors import DataError

UNPACKED = {".gz": 3, ".zst": 3, ".zstd": 3, ".bz2": 4, ".xz": 4, ".parquet": 3}
"""Assumed bytes of text per byte of a compressed file, by extension, for the estimate of the time
left."""
LEAST_SHARE = 0.01
"""Of the text that must be left to train on."""
TOKENIZER_BYTES = 32_000_000
"""Text that a tokenizer is trained on; of a larger corpus, a sample of about this size."""
RUN_TOKENS = 32 * 1024 * 1024
"""That a piece sorts at once."""
CHUNK_BYTES = 2 * 1024 * 1024
"""Text encoded at a time: enough documents for all cores, few enough for their lists of tokens."""
AT_ONCE = 64
"""Documents that are read of a run at a time."""
ROW = np.dtype([("draw", "<f8"), ("digest", "V16"), ("bytes", "<i8"), ("tokens", "<i8")])
"""Of a document in a run: its place, digest, bytes of text and number of tokens."""

ShareOut = Callable[..., list[Any]]
"""`build.share_out` of a build: title, function, pieces and their sizes in bytes."""
Advance = Callable[[int], None]
"""Is told of so many bytes of text that are done."""
Side = tuple[Document, bool, bool]
"""A document or a part of one, whether it is held out, and whether it is a part."""


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


class Survey(NamedTuple):
    """What the text of a build holds: by the piece, and in all."""

    name: str
    pieces: list[Corpus]
    of_each: tuple[Counter[str], ...]
    counts: Counter[str]
    skipped: list[str]
    held_out: HeldOut


def read(corpus: Corpus, settings: BuildSettings, share_out: ShareOut) -> Survey:
    """Returns what the text holds.

    Raises:
        DataError: too little of it can be read, or none would be left to train on.
    """
    purpose = f"validation {settings.seed}"
    share = settings.validation_fraction
    pieces = corpus.pieces()
    name = ", ".join(name for name, _ in corpus.groups)
    work = [(piece, purpose, share) for piece in pieces]
    found = share_out("Reading", survey, work, [_expected_bytes(piece) for piece in pieces])
    of_each, skipped, drawn, longest = zip(*found, strict=True)
    counts = sum(of_each, Counter[str]())
    size, digest = max(longest)
    most = max(1, int(share * counts["text_bytes"]))
    held_out = HeldOut(purpose, share, None if any(drawn) else digest, most)
    lost = [line for lines in skipped for line in lines]
    text = Survey(name, pieces, of_each, counts, lost, held_out)
    _check_share(text, counts["text_bytes"], counts["text_bytes"])
    if size <= most and sum(drawn) == counts["documents"]:
        raise DataError(
            f"{name}: all {sum(drawn)} documents would be held out. Lower validation_fraction "
            f"(--validation-fraction), or add text."
        )
    return text


def _expected_bytes(piece: Corpus) -> int:
    return sum(UNPACKED.get(file.suffix, 1) * file.stat().st_size for file, _ in piece.files)


def survey(
    piece: Corpus, purpose: str, share: float, advance: Advance
) -> tuple[Counter[str], list[str], int, tuple[int, str]]:
    """Returns what a piece holds and what of it cannot be read; how many documents draw less than
    `share`, which are held out; and size and digest of the largest.
    """
    drawn = 0
    longest = (0, "")
    for document in piece:
        drawn += document.draw(purpose) < share
        longest = max(longest, (document.num_bytes, document.digest.hex()))
        advance(document.num_bytes)
    return piece.counts, piece.skipped, drawn, longest


def _check_share(text: Survey, to_train: int, text_bytes: int) -> None:
    """Raises DataError for less than 1 % of the text to train on, with what cannot be read."""
    lost = text.counts["skipped_bytes"]
    if to_train < max(1, LEAST_SHARE * (text_bytes + lost)):
        raise DataError(
            f"{text.name}: {to_train:,} of {text_bytes + lost:,} bytes of text would be trained "
            f"on, less than 1 %: {text_bytes - to_train:,} bytes are held out "
            f"(--validation-fraction), {lost:,} cannot be read"
            f"{''.join(f'; {it}' for it in text.skipped[:MOST_NAMED])}."
        )


def tokenize(
    text: Survey,
    settings: BuildSettings,
    given: Tokenizer | None,
    folder: Path,
    share_out: ShareOut,
) -> tuple[Tokenizer, list[Path]]:
    """Returns the tokenizer, trained on the text if none is given, and the prefixes of the runs.

    Raises:
        DataError: the text does not yield such a vocabulary, or has changed since it was read.
    """
    sizes = [counts["text_bytes"] for counts in text.of_each]
    work = [(text, settings.vocab_size)]
    tokenizer = given or share_out("Training the tokenizer", _train, work, [sum(sizes)])[0]
    file = folder / tokenizer.file_name
    order = f"order {settings.seed}"
    file.write_bytes(tokenizer.data)
    work = [
        (piece, text.held_out, order, (file, tokenizer.eos_id), folder / f"piece-{number}")
        for number, piece in enumerate(text.pieces)
    ]
    runs, counts = zip(*share_out("Encoding", encode, work, sizes), strict=True)
    if counts != text.of_each:
        raise DataError("the text changed while it was read. Build again when nobody writes to it.")
    return tokenizer, [run for each in runs for run in each]


def _train(text: Survey, vocab_size: int, advance: Advance) -> Tokenizer:
    """Returns a tokenizer that has seen no held-out document, and a sample of a large corpus."""
    share = min(1.0, TOKENIZER_BYTES / text.counts["text_bytes"])
    seen = set[bytes]()

    def texts() -> Iterator[str]:
        for piece in text.pieces:
            for document, is_held_out, _ in text.held_out.sides(piece):
                advance(document.num_bytes)
                is_drawn = not is_held_out and document.draw("tokenizer") < share
                if is_drawn and document.digest not in seen:
                    seen.add(document.digest)
                    yield document.text

    return train_tokenizer(texts(), vocab_size)


def encode(
    piece: Corpus,
    held_out: HeldOut,
    order: str,
    tokenizer: tuple[Path, int],
    prefix: Path,
    advance: Advance,
) -> tuple[list[Path], Counter[str]]:
    """Writes the runs of a piece, and PREFIX.held: its held-out documents in the order of reading.

    Returns the prefixes of the runs, and what was counted, as for the survey.
    """
    runs = []
    run = []
    size = 0
    reader = read_tokenizer(*tokenizer)
    with open(f"{prefix}.held", "w", encoding="utf-8") as held:
        for chunk in _chunks(held_out.sides(piece)):
            encoded = reader.encode_batch([document.text for document, *_ in chunk])
            for (document, is_held_out, is_cut), ids in zip(chunk, encoded, strict=True):
                tokens = [*ids, reader.eos_id]
                num_bytes = document.num_bytes
                digest = document.digest
                if is_held_out:
                    row = digest.hex(), document.name, document.text, num_bytes, is_cut, tokens
                    held.write(json.dumps(row) + "\n")
                else:
                    place = document.draw(order)
                    found = np.array(tokens, np.int32)
                    run.append((place, digest, num_bytes, found))
                    size += len(tokens)
                advance(num_bytes)
            if size >= RUN_TOKENS or (run and not chunk):
                runs.append(prefix.with_name(f"{prefix.name}-{len(runs)}"))
                _put_down(run, runs[-1])
                run = []
                size = 0
    return runs, piece.counts


def _chunks(sides: Iterator[Side]) -> Iterator[list[Side]]:
    """Yields documents by the chunk; the last is empty."""
    chunk = []
    size = 0
    for side in sides:
        chunk.append(side)
        size += side[0].num_bytes
        if size >= CHUNK_BYTES:
            yield chunk
            chunk = []
            size = 0
    yield from (chunk, [])


def _put_down(run: list[tuple[float, bytes, int, np.ndarray]], prefix: Path) -> None:
    """Writes a run in the order of its draws: its tokens, PREFIX.bin, and rows, PREFIX.rows."""
    run.sort(key=itemgetter(0, 1))
    rows = [(draw, digest, size, tokens.size) for draw, digest, size, tokens in run]
    np.array(rows, ROW).tofile(f"{prefix}.rows")
    with open(f"{prefix}.bin", "wb") as stream:
        stream.writelines(tokens.data for *_, tokens in run)


def write(
    text: Survey,
    settings: BuildSettings,
    tokenizer: Tokenizer,
    runs: list[Path],
    folder: Path,
    share_out: ShareOut,
) -> Path:
    """Returns the folder of the dataset: the runs in a token file, what is held out in another."""
    whole = folder / "dataset"
    whole.mkdir()
    (folder / tokenizer.file_name).rename(whole / tokenizer.file_name)
    work = [(runs, whole / "train", tokenizer.vocab_size)]
    (counts,) = share_out("Ordering", merge, work, [text.counts["text_bytes"]])
    size = counts["text_bytes"]
    validation, repeated, cut = _held_out(text, tokenizer, folder, whole)
    _check_share(text, size, size + validation.text_bytes)
    info = DatasetInfo(
        format=FORMAT,
        settings=settings,
        tokenizer_file=tokenizer.file_name,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        dtype=token_dtype(tokenizer.vocab_size).name,
        train=Split(documents=counts["documents"], tokens=counts["tokens"], text_bytes=size),
        validation=validation,
        cut=cut,
        duplicates=text.counts["duplicates"] + counts["duplicates"] + repeated,
        empty=text.counts["empty"],
        skipped=tuple(text.skipped),
        skipped_bytes=text.counts["skipped_bytes"],
        parts=text.counts["parts"],
        marked=text.counts["marked"],
        json_texts=text.counts["json_texts"],
        unread=text.pieces[0].unread,
        files=tuple(StoredFile.of(file) for file in sorted(whole.iterdir())),
    )
    info.write(whole / DESCRIPTION)
    return whole


def merge(runs: list[Path], prefix: Path, vocab_size: int, advance: Advance) -> Counter[str]:
    """Writes the documents of all runs as a token file, in the order of their draws and each once.

    Returns how many documents, tokens and bytes of text it holds, and how many duplicates it does
    not.
    """
    counts = Counter[str]()
    last = b""
    order = itemgetter(0, 1)
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
    first = 0
    begin = 0
    while (rows := np.fromfile(f"{run}.rows", ROW, AT_ONCE, offset=first * ROW.itemsize)).size:
        ends = np.cumsum(rows["tokens"])
        tokens = np.fromfile(f"{run}.bin", np.int32, ends[-1], offset=4 * begin)
        known = (rows[name].tolist() for name in ("draw", "digest", "bytes"))
        yield from zip(*known, np.split(tokens, ends[:-1]), strict=True)
        first += rows.size
        begin += tokens.size


def _held_out(
    text: Survey,
    tokenizer: Tokenizer,
    folder: Path,
    whole: Path,
) -> tuple[Split, int, int]:
    """Writes the held-out documents of all pieces, each once.

    Returns their sizes, and how many came again and were cut.
    """
    text_bytes = 0
    repeated = 0
    cut = 0
    seen = set[str]()
    with (
        TokenFileWriter(whole / "validation", tokenizer.vocab_size) as writer,
        (whole / VALIDATION_TEXT).open("w", encoding="utf-8") as lines,
    ):
        for number in range(len(text.pieces)):
            with (folder / f"piece-{number}.held").open(encoding="utf-8") as rows:
                for digest, name, document, size, is_cut, tokens in map(json.loads, rows):
                    if digest in seen:
                        repeated += not is_cut  # else its beginning has been counted
                        continue
                    seen.add(digest)
                    cut += is_cut
                    writer.add(tokens)
                    row = ValidationDocument(name, document, len(tokens), size)
                    lines.write(json.dumps(row._asdict(), ensure_ascii=False) + "\n")
                    text_bytes += size
    held_out = Split(documents=len(seen), tokens=writer.num_tokens, text_bytes=text_bytes)
    return held_out, repeated, cut
