"""Steps of a dataset build after the text was read and counted once (`survey.py`): train the
tokenizer, encode the text, and write the dataset.

Processes share the pieces of the text, which are groups of corpus files. The pieces depend only on
the files. Documents are sorted by places that depend only on their text and the seed. So the number
of processes does not change the dataset.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kit.data.corpus import Corpus, Document
from kit.data.dataset import (
    DESCRIPTION,
    FORMAT,
    VALIDATION_TEXT,
    BuildSettings,
    DatasetInfo,
    Split,
    StoredFile,
    ValidationDocument,
)
from kit.data.external_sort import EncodedDocument, RunWriter, merge_runs
from kit.data.survey import Survey, ValidationRule
from kit.data.token_file import TokenFileWriter, token_dtype
from kit.data.tokenizer import Tokenizer, read_tokenizer, train_tokenizer
from kit.data.workers import Advance, BuildProgress, Workers
from kit.errors import DataError

TOKENIZER_BYTES = 32_000_000
"""Bytes of text on which a tokenizer is trained. A larger corpus is sampled down to about this
size."""
CHUNK_BYTES = 2 * 1024 * 1024
"""Bytes of text that are encoded per call. A chunk has enough documents for all cores, and few
enough to hold their lists of tokens in memory."""


class EncodedCorpusPiece(NamedTuple):
    """Result of encoding one piece of the text, a group of corpus files."""

    counts: Counter[str]
    """Numbers of documents, bytes of text, duplicates and so on in the piece, by the names that the
    class `Corpus` explains."""
    runs: list[Path]
    """Files with the encoded training documents of the piece. Each file is sorted by place in the
    training file."""
    validation: Path
    """File with the validation documents of the piece in the order of reading. Each line is the
    JSON list of the fields of a `_ValidationRow`."""


class _ValidationRow(NamedTuple):
    """A validation document: its tokens, and its name, text, size in bytes and hash."""

    digest: str
    is_end: bool
    name: str
    text: str
    num_bytes: int
    tokens: list[int]


def train_on_text(survey: Survey, vocab_size: int, progress: BuildProgress) -> Tokenizer:
    """Returns a tokenizer trained on the text without the validation text. A large text is sampled.

    Raises:
        DataError: The text does not yield a vocabulary of `vocab_size` entries.
    """
    with progress.stage("Training the tokenizer", survey.counts["text_bytes"]) as advance:
        return train_tokenizer(_sample(survey, advance), vocab_size)


def _sample(survey: Survey, advance: Advance) -> Iterator[str]:
    """Yields texts to train a tokenizer on, about TOKENIZER_BYTES in all. Equal texts are yielded
    once.
    """
    share = min(1.0, TOKENIZER_BYTES / survey.counts["text_bytes"])
    seen = set[bytes]()
    for piece in survey.pieces:
        for document in piece:
            advance(document.num_bytes)
            text, _ = survey.rule.split(document)
            if text is None or text.draw("tokenizer") >= share or text.digest in seen:
                continue
            seen.add(text.digest)
            yield text.text


def encode_text(
    survey: Survey, seed: int, tokenizer: Tokenizer, folder: Path, workers: Workers
) -> list[EncodedCorpusPiece]:
    """Encodes all pieces of the text (groups of corpus files), and writes their tokens to files in
    `folder`.

    Raises:
        DataError: The text has changed since it was read for the first time.
    """
    file = folder / tokenizer.file_name
    file.write_bytes(tokenizer.data)
    order = f"order {seed}"
    arguments = [
        (piece, survey.rule, order, file, tokenizer.eos_id, folder / f"piece-{number}")
        for number, piece in enumerate(survey.pieces)
    ]
    sizes = [counts["text_bytes"] for counts in survey.piece_counts]
    encoded: list[EncodedCorpusPiece] = workers.map(
        "Encoding", encode_corpus_piece, arguments, sizes
    )
    if [piece.counts for piece in encoded] != survey.piece_counts:
        raise DataError("the text changed while it was read. Build again when nobody writes to it.")
    return encoded


def encode_corpus_piece(
    piece: Corpus,
    rule: ValidationRule,
    order: str,
    tokenizer_file: Path,
    eos_id: int,
    prefix: Path,
    advance: Advance,
) -> EncodedCorpusPiece:
    """Encodes the documents of a piece, and writes their tokens to files with names PREFIX-...

    The position of a document in the training file is a pseudo-random number, which depends on the
    document's text and on the label `order`.
    """
    tokenizer = read_tokenizer(tokenizer_file, eos_id)
    runs = RunWriter(prefix)
    validation_file = prefix.with_name(f"{prefix.name}-validation.jsonl")
    with validation_file.open("w", encoding="utf-8") as stream:
        for chunk in _chunks(piece):
            parts = [rule.split(document) for document in chunk]
            training = [begin for begin, _ in parts if begin is not None]
            validation = [end for _, end in parts if end is not None]
            for document, tokens in _encoded(training, tokenizer):
                data = np.array(tokens, np.int32).tobytes()
                place = document.draw(order)
                runs.add(EncodedDocument(place, document.digest, document.num_bytes, data))
            for document, tokens in _encoded(validation, tokenizer):
                row = _ValidationRow(
                    digest=document.digest.hex(),
                    is_end=document.is_end,
                    name=document.name,
                    text=document.text,
                    num_bytes=document.num_bytes,
                    tokens=tokens,
                )
                stream.write(json.dumps(row) + "\n")
            advance(sum(document.num_bytes for document in chunk))
    return EncodedCorpusPiece(piece.counts, runs.finish(), validation_file)


def _encoded(
    documents: list[Document], tokenizer: Tokenizer
) -> Iterator[tuple[Document, list[int]]]:
    """Yields (document, its token ids). The last id of each document is the end-of-text token."""
    encoded = tokenizer.encode_batch([document.text for document in documents])
    for document, ids in zip(documents, encoded, strict=True):
        yield document, [*ids, tokenizer.eos_id]


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yields lists of documents. Each list has CHUNK_BYTES bytes of text or more, except for the
    last.
    """
    chunk = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += document.num_bytes
        if size >= CHUNK_BYTES:
            yield chunk
            chunk = []
            size = 0
    if chunk:
        yield chunk


def write_dataset(
    survey: Survey,
    settings: BuildSettings,
    tokenizer: Tokenizer,
    encoded: list[EncodedCorpusPiece],
    folder: Path,
    progress: BuildProgress,
) -> Path:
    """Writes the dataset of the tokenized pieces of the corpus to the new folder `dataset` in
    `folder`, and returns its path.

    Raises:
        DataError: Less than 1 % of the text is left to train on.
    """
    dataset = folder / "dataset"
    dataset.mkdir()
    (folder / tokenizer.file_name).rename(dataset / tokenizer.file_name)
    runs = [run for piece in encoded for run in piece.runs]
    with progress.stage("Ordering", survey.counts["text_bytes"]) as advance:
        train = _write_training(runs, dataset / "train", tokenizer.vocab_size, advance)
    validation, cut = _write_validation(encoded, dataset, tokenizer.vocab_size)
    survey.check_training_share(train.text_bytes, train.text_bytes + validation.text_bytes)
    # A document that was divided is in both splits, but was read once.
    repeated = survey.counts["documents"] - (train.documents + validation.documents - cut)
    info = DatasetInfo(
        format=FORMAT,
        settings=settings,
        tokenizer_file=tokenizer.file_name,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        dtype=token_dtype(tokenizer.vocab_size).name,
        train=train,
        validation=validation,
        cut=cut,
        duplicates=survey.counts["duplicates"] + repeated,
        empty=survey.counts["empty"],
        skipped=tuple(survey.skipped),
        skipped_bytes=survey.counts["skipped_bytes"],
        parts=survey.counts["parts"],
        marked=survey.counts["marked"],
        json_texts=survey.counts["json_texts"],
        unread=survey.pieces[0].unread,
        files=tuple(StoredFile.of(file) for file in sorted(dataset.iterdir())),
    )
    info.write(dataset / DESCRIPTION)
    return dataset


def _write_training(runs: list[Path], prefix: Path, vocab_size: int, advance: Advance) -> Split:
    """Writes the token file of the training documents, sorted by place, and returns the size of the
    split.
    """
    documents = 0
    text_bytes = 0
    with TokenFileWriter(prefix, vocab_size) as writer:
        for document in merge_runs(runs):
            writer.add(np.frombuffer(document.tokens, np.int32))
            documents += 1
            text_bytes += document.num_bytes
            advance(document.num_bytes)
    return Split(documents=documents, tokens=writer.num_tokens, text_bytes=text_bytes)


def _write_validation(
    encoded: list[EncodedCorpusPiece], dataset: Path, vocab_size: int
) -> tuple[Split, int]:
    """Writes the token file and the texts of the validation documents. Equal documents are written
    once.

    A large document may be divided: its beginning is in the training split, and its end is a
    validation document. Returns (size of the validation split, number of such ends in it).
    """
    text_bytes = 0
    cut = 0
    seen = set[str]()
    with (
        TokenFileWriter(dataset / "validation", vocab_size) as writer,
        (dataset / VALIDATION_TEXT).open("w", encoding="utf-8") as texts,
    ):
        for row in _validation_rows(encoded):
            if row.digest in seen:
                continue
            seen.add(row.digest)
            writer.add(row.tokens)
            document = ValidationDocument(row.name, row.text, len(row.tokens), row.num_bytes)
            texts.write(json.dumps(document._asdict(), ensure_ascii=False) + "\n")
            text_bytes += row.num_bytes
            cut += row.is_end
    split = Split(documents=len(seen), tokens=writer.num_tokens, text_bytes=text_bytes)
    return split, cut


def _validation_rows(encoded: list[EncodedCorpusPiece]) -> Iterator[_ValidationRow]:
    """Yields the validation documents of all pieces of the text, in the order of reading."""
    for piece in encoded:
        with piece.validation.open(encoding="utf-8") as lines:
            for line in lines:
                yield _ValidationRow(*json.loads(line))
