"""The steps of a build: `read` looks what the text holds, `tokenize` and `write` make a dataset."""

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
from kit.data.pieces import Advance, HeldOut, Survey, encode, merge, survey
from kit.data.token_file import TokenFileWriter, token_dtype
from kit.data.tokenizer import Tokenizer, train_tokenizer
from kit.errors import DataError

UNPACKED = {".gz": 3, ".zst": 3, ".parquet": 3}
"""About so many bytes of text are expected of a byte of a file, for the time left."""
LEAST_SHARE = 0.01
"""Of the text that must be left to train on."""
TOKENIZER_BYTES = 32_000_000
"""Text that a tokenizer is trained on; of a larger corpus, a sample of about this size."""
ShareOut = Callable[..., list[Any]]
"""`team.share_out` of a build: title, function, pieces and their sizes in bytes."""


class Text(NamedTuple):
    """What the text of a build holds, by the piece and in all."""

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
    purpose, share = f"validation {settings.seed}", settings.validation_fraction
    pieces, name = corpus.pieces(), ", ".join(name for name, _ in corpus.groups)
    files = [[path for path, _ in piece.files] for piece in pieces]
    sizes = [sum(UNPACKED.get(file.suffix, 1) * file.stat().st_size for file in of) for of in files]
    surveys = share_out("Reading", survey, [(piece, purpose, share) for piece in pieces], sizes)
    counts = sum((each.counts for each in surveys), Counter[str]())
    skipped = [line for each in surveys for line in each.skipped]
    drawn = sum(each.drawn for each in surveys)
    size, longest = max(each.longest for each in surveys)
    most = max(1, int(share * counts["text_bytes"]))
    held_out = HeldOut(purpose, share, None if drawn else longest, most)
    text = Text(name, pieces, surveys, counts, skipped, held_out)
    _check_share(text, counts["text_bytes"], counts["text_bytes"])
    if size <= most and drawn == counts["documents"]:
        raise DataError(
            f"{name}: all {drawn} documents would be held out. Lower validation_fraction "
            f"(--validation-fraction), or add text."
        )
    return text


def _check_share(text: Text, to_train: int, text_bytes: int) -> None:
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
    text: Text, settings: Settings, given: Tokenizer | None, folder: Path, share_out: ShareOut
) -> tuple[Tokenizer, list[Path]]:
    """Returns the tokenizer, trained on the text if none is given, and the prefixes of the runs.

    Raises:
        DataError: the text does not yield such a vocabulary, or has changed since it was read.
    """
    sizes = [each.counts["text_bytes"] for each in text.surveys]
    how = "Training the tokenizer", _train, [(text, settings.vocab_size)], [sum(sizes)]
    tokenizer = given or share_out(*how)[0]
    file, order = folder / tokenizer.file_name, f"order {settings.seed}"
    file.write_bytes(tokenizer.data)
    work = [
        (piece, text.held_out, order, (file, tokenizer.eos_id), folder / f"piece-{number}")
        for number, piece in enumerate(text.pieces)
    ]
    encoded = share_out("Encoding", encode, work, sizes)
    if [counts for _, counts in encoded] != [before.counts for before in text.surveys]:
        raise DataError("the text changed while it was read. Build again when nobody writes to it.")
    return tokenizer, [run for runs, _ in encoded for run in runs]


def _train(text: Text, vocab_size: int, advance: Advance) -> Tokenizer:
    """Returns a tokenizer that has seen no held-out document, and a sample of a large corpus."""
    share, seen = min(1.0, TOKENIZER_BYTES / text.counts["text_bytes"]), set[bytes]()

    def texts() -> Iterator[str]:
        for piece in text.pieces:
            for document, is_held_out, _ in text.held_out.sides(piece):
                advance(document.num_bytes)
                is_drawn = not is_held_out and document.draw("tokenizer") < share
                if is_drawn and document.digest not in seen:
                    seen.add(document.digest)
                    yield document.text

    return train_tokenizer(texts(), vocab_size)


def write(
    text: Text,
    settings: Settings,
    tokenizer: Tokenizer,
    runs: list[Path],
    folder: Path,
    share_out: ShareOut,
) -> Path:
    """Returns the folder of the dataset: the runs in a token file, what is held out in another."""
    whole = folder / "dataset"
    whole.mkdir()
    (folder / tokenizer.file_name).rename(whole / tokenizer.file_name)
    vocab_size = tokenizer.vocab_size
    work = [(runs, whole / "train", vocab_size)]
    (counts,) = share_out("Ordering", merge, work, [text.counts["text_bytes"]])
    size = counts["text_bytes"]
    validation, repeated, cut = _held_out(text, tokenizer, folder, whole)
    _check_share(text, size, size + validation.text_bytes)
    info = DatasetInfo(
        format=FORMAT,
        settings=settings,
        tokenizer_file=tokenizer.file_name,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=vocab_size,
        eos_id=tokenizer.eos_id,
        dtype=token_dtype(vocab_size).name,
        train=Split(documents=counts["documents"], tokens=counts["tokens"], text_bytes=size),
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


def _held_out(
    text: Text,
    tokenizer: Tokenizer,
    folder: Path,
    whole: Path,
) -> tuple[Split, int, int]:
    """Writes the held-out documents of all pieces, each once.

    Returns their sizes, and how many came again and were cut.
    """
    text_bytes, repeated, cut, seen = 0, 0, 0, set[str]()
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
