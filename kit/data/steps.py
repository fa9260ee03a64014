"""The steps of a build: read says what the text holds, tokenize encodes it, write puts the dataset together."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kit.data.corpus import Corpus, Documents
from kit.data.dataset import (
    DESCRIPTION,
    FORMAT,
    MOST_NAMED,
    VALIDATION_TEXT,
    DatasetInfo,
    Settings,
    Split,
    StoredFile,
    ValidationDocument,
)
from kit.data.pieces import Advance, HeldOut, Survey, encode, survey, write_block
from kit.data.token_file import TokenFile, TokenFileWriter, token_dtype
from kit.data.tokenizer import Tokenizer, train_tokenizer
from kit.errors import DataError

PACKED = (".gz", ".zst", ".parquet")
"""Of which about three times as many bytes of text are expected, for the time left."""
LEAST_SHARE = 0.01
"""Of the text that must be left to train on."""
TOKENIZER_BYTES = 32_000_000
"""Text that a tokenizer is trained on; of a larger corpus, a sample of about this size."""
BLOCK_BYTES = 256 * 1024 * 1024
"""Of text in a block, whose tokens are sorted at once."""

ShareOut = Callable[..., list[Any]]
"""`team.share_out` for some processes: title, function, pieces and their sizes in bytes."""


class Text(NamedTuple):
    """What the text of a build holds."""

    name: str
    pieces: list[Documents]
    surveys: list[Survey]
    counts: Counter[str]
    skipped: list[str]
    held_out: HeldOut


def read(corpus: Corpus, settings: Settings, share_out: ShareOut) -> Text:
    """Returns what the text holds.

    Raises:
        DataError: too little of it can be read, or none would be left to train on.
    """
    pieces, purpose, share = corpus.pieces(), f"validation {settings.seed}", settings.validation_fraction
    sizes = [
        sum(path.stat().st_size * (1 + 2 * name.endswith(PACKED)) for path, name in piece.files) for piece in pieces
    ]
    surveys = share_out("Reading", survey, [(piece, purpose, share) for piece in pieces], sizes)
    counts = sum((each.counts for each in surveys), Counter[str]())
    drawn, (size, longest) = sum(each.drawn for each in surveys), max(each.longest for each in surveys)
    most = max(1, int(share * counts["text_bytes"]))
    name, skipped = ", ".join(name for name, _ in corpus.groups), [line for each in surveys for line in each.skipped]
    text = Text(name, pieces, surveys, counts, skipped, HeldOut(purpose, share, None if drawn else longest, most))
    _check_share(text, counts["text_bytes"], counts["text_bytes"])
    if size <= most and drawn == counts["documents"]:
        raise DataError(f"{name}: all {drawn} documents would be held out. Lower validation_fraction, or add text.")
    return text


def _check_share(text: Text, to_train: int, text_bytes: int) -> None:
    """Raises DataError if the bytes of text to train on are under 1 % of the text, with what of it cannot be read."""
    lost = text.counts["skipped_bytes"]
    if to_train < max(1, LEAST_SHARE * (text_bytes + lost)):
        what = f"{to_train:,} of {text_bytes + lost:,} bytes of text would be trained on, less than 1 %"
        left = f"{text_bytes - to_train:,} bytes are held out (--validation-fraction), {lost:,} cannot be read"
        raise DataError(f"{text.name}: {what}: {left}{''.join(f'; {line}' for line in text.skipped[:MOST_NAMED])}.")


def tokenize(
    text: Text, settings: Settings, given: Tokenizer | None, folder: Path, share_out: ShareOut
) -> tuple[Tokenizer, list[Path]]:
    """Returns the tokenizer, one trained on the text if none is given, and the prefixes of the runs of tokens.

    Raises:
        DataError: the text does not yield such a vocabulary, or has changed since it was read.
    """
    size = text.counts["text_bytes"]
    tokenizer = given or share_out("Training the tokenizer", _train, [(text, settings.vocab_size)], [size])[0]
    file, order = folder / tokenizer.file_name, f"order {settings.seed}"
    file.write_bytes(tokenizer.data)
    work = [
        (piece, text.held_out, order, (file, tokenizer.eos_id), folder / f"piece-{number}")
        for number, piece in enumerate(text.pieces)
    ]
    encoded = share_out("Encoding", encode, work, [each.counts["text_bytes"] for each in text.surveys])
    if any(counts != before.counts for (_, counts), before in zip(encoded, text.surveys, strict=True)):
        raise DataError("the text changed while it was read. Build again when nobody writes to the sources.")
    return tokenizer, [run for runs, _ in encoded for run in runs]


def _train(text: Text, vocab_size: int, advance: Advance) -> Tokenizer:
    """Returns a tokenizer that has seen no held-out document, and a sample of a large corpus."""
    share, seen = min(1.0, TOKENIZER_BYTES / text.counts["text_bytes"]), set[bytes]()

    def texts() -> Iterator[str]:
        for piece in text.pieces:
            for document, is_held_out, _ in text.held_out.sides(piece):
                advance(document.num_bytes)
                if not is_held_out and document.draw("tokenizer") < share and document.digest not in seen:
                    seen.add(document.digest)
                    yield document.text

    return train_tokenizer(texts(), vocab_size)


def write(
    text: Text, settings: Settings, tokenizer: Tokenizer, runs: list[Path], folder: Path, share_out: ShareOut
) -> Path:
    """Returns the folder of the dataset: the runs merged into one token file, the held-out documents into another."""
    whole = folder / "dataset"
    whole.mkdir()
    (folder / tokenizer.file_name).rename(whole / tokenizer.file_name)
    size, vocab_size = text.counts["text_bytes"], tokenizer.vocab_size
    count = 1 + size // BLOCK_BYTES
    work = [(runs, (i / count, (i + 1) / count), folder / f"block-{i}", vocab_size) for i in range(count)]
    blocks = share_out("Ordering", write_block, work, [size // count] * count)
    with TokenFileWriter(whole / "train", vocab_size) as train:
        for (_, _, prefix, _), counts in zip(work, blocks, strict=True):
            if counts["documents"]:
                train.append(TokenFile(prefix))
    validation, repeated, cut = _held_out(text, tokenizer, folder, whole)
    counts = sum(blocks, Counter[str]())
    _check_share(text, counts["text_bytes"], counts["text_bytes"] + validation.text_bytes)
    info = DatasetInfo(
        format=FORMAT,
        settings=settings,
        tokenizer_file=tokenizer.file_name,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=vocab_size,
        eos_id=tokenizer.eos_id,
        dtype=token_dtype(vocab_size).name,
        train=Split(documents=counts["documents"], tokens=train.num_tokens, text_bytes=counts["text_bytes"]),
        validation=validation,
        cut=cut,
        duplicates=text.counts["duplicates"] + counts["duplicates"] + repeated,
        empty=text.counts["empty"],
        skipped=tuple(text.skipped),
        skipped_bytes=text.counts["skipped_bytes"],
        files=tuple(StoredFile.of(file) for file in sorted(whole.iterdir())),
    )
    info.write(whole / DESCRIPTION)
    return whole


def _held_out(text: Text, tokenizer: Tokenizer, folder: Path, whole: Path) -> tuple[Split, int, int]:
    """Writes the held-out documents of all pieces, each once; returns their sizes, how many came again and were cut."""
    text_bytes, repeated, cut, seen = 0, 0, 0, set[str]()
    with (
        TokenFileWriter(whole / "validation", tokenizer.vocab_size) as writer,
        (whole / VALIDATION_TEXT).open("w", encoding="utf-8") as lines,
    ):
        for number in range(len(text.pieces)):
            with (folder / f"piece-{number}.held").open(encoding="utf-8") as rows:
                for digest, name, document, num_bytes, is_cut, tokens in map(json.loads, rows):
                    if digest in seen:
                        repeated += not is_cut  # else its beginning has been counted
                        continue
                    seen.add(digest)
                    cut += is_cut
                    writer.add(tokens)
                    row = ValidationDocument(name, document, len(tokens), num_bytes)
                    lines.write(json.dumps(row._asdict(), ensure_ascii=False) + "\n")
                    text_bytes += num_bytes
    return Split(documents=len(seen), tokens=writer.num_tokens, text_bytes=text_bytes), repeated, cut
