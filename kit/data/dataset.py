"""Defines `Dataset`: a folder with token files, validation text, and the tokenizer that made the
tokens. Training and scoring need no other files.

Files: dataset.json, train.bin, train.idx, validation.bin, validation.idx, validation.jsonl, and
tokenizer.json or tokenizer.model.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, Self

import numpy as np

from cluster.files import file_size, open_for_reading
from cluster.record import Record, check_file_name, counted, field_doc, html_table
from kit.data.corpus import Source
from kit.data.folder import UnreadFiles
from kit.data.readers import LARGEST_LINE_BYTES, TEXT_KEY
from kit.data.samples import Samples, SourceSequences
from kit.data.token_file import TokenFile, rebuild_hint
from kit.data.tokenizer import Tokenizer, read_tokenizer
from kit.data.wheels import file_sha256
from kit.errors import DataError, kit_command

FORMAT = 1
"""Version number of the fields of dataset.json. Datasets with another version are refused."""
DESCRIPTION = "dataset.json"
VALIDATION_TEXT = "validation.jsonl"
MOST_NAMED = 5
"""Largest number of unreadable documents that a table or a message lists."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildSettings(Record):
    """Settings of a dataset build. Two builds with equal settings write equal files, since the
    settings include the hashes of the source files.
    """

    sources: tuple[Source, ...] = field_doc("sources of the text, with their sizes and hashes")
    tokenizer_sha256: str | None = field_doc(
        "SHA-256 of the tokenizer's file; null: the tokenizer is trained on the text"
    )
    vocab_size: int = field_doc("number of entries of the vocabulary")
    max_bytes: int | None = field_doc("limit on the bytes of text that are read; null: no limit")
    validation_fraction: float = field_doc("share of the documents that go to the validation set")
    seed: int = field_doc(
        "seed that selects the validation documents and the order of the training documents in"
        " the file"
    )
    text_key: str = field_doc(
        "key of a .jsonl object, or column of a .parquet file, that contains the text",
        default=TEXT_KEY,
    )
    separator: str | None = field_doc(
        "text between the documents of a text file; null: a text file is one document, or is"
        " split into documents of about 1 MiB if it is above 16 MiB",
        default=None,
    )
    order: Literal["windows"] = field_doc(
        "unit that is shuffled in each epoch; windows: pieces of the training tokens, each as long"
        " as one sequence"
    )

    def differences(self, other: Self, hashed: bool = True) -> list[str]:
        """Returns one line for each setting that differs between this record and `other`, with both
        values.

        Sources are compared by their hashes, or by their sizes if `hashed` is false.
        """
        names = [field.name for field in dataclasses.fields(self) if field.name != "sources"]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        pairs.append(("sources", _summary(self.sources, hashed), _summary(other.sources, hashed)))
        return [
            f"{name}: {mine} there, {theirs} asked"
            for name, mine, theirs in pairs
            if mine != theirs
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split(Record):
    """Size of one split of a dataset (training or validation) in documents, tokens and bytes of
    text.
    """

    documents: int = field_doc(
        "number of documents; a document that is divided between training and validation counts in"
        " both splits"
    )
    tokens: int = field_doc("number of tokens, with one end-of-text token per document")
    text_bytes: int = field_doc("size of the documents as UTF-8 text, in bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredFile(Record):
    """Name, size and hash of one file of the dataset folder, taken when the dataset was built."""

    name: str = field_doc("name of the file", check_file_name)
    size_bytes: int = field_doc("size of the file, in bytes")
    sha256: str = field_doc("SHA-256 of the file")

    @classmethod
    def of(cls, file: Path) -> Self:
        """Returns the record of a file with its present size and hash."""
        return cls(name=file.name, size_bytes=file.stat().st_size, sha256=file_sha256(file))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetInfo(Record):
    """Content of dataset.json: settings of the build, tokenizer, sizes of both splits, and the
    texts that were left out.
    """

    format: int = field_doc("version number of the fields of dataset.json")
    settings: BuildSettings = field_doc("settings with which the dataset was built")
    tokenizer_file: str = field_doc("name of the tokenizer's file", check_file_name)
    tokenizer_sha256: str = field_doc("SHA-256 of the tokenizer's file")
    vocab_size: int = field_doc("size of the vocabulary: all token ids are below this number")
    eos_id: int = field_doc("id of the token that ends every document")
    dtype: str = field_doc("NumPy dtype of a stored token")
    train: Split = field_doc("size of the training split")
    validation: Split = field_doc("size of the validation split")
    duplicates: int = field_doc("number of exact duplicates that were left out")
    empty: int = field_doc("number of documents without text that were left out")
    skipped: tuple[str, ...] = field_doc(
        "texts that could not be read: file name with line, row or number of the document, and the"
        " reason"
    )
    skipped_bytes: int = field_doc(
        "bytes of text that could not be read, as far as they are known", default=0
    )
    cut: int = field_doc(
        "number of documents that are larger than the whole validation share; their ends are in"
        " the validation split, the rest in the training split",
        default=0,
    )
    parts: int = field_doc(
        "number of documents of about 1 MiB into which text files above 16 MiB were split",
        default=0,
    )
    marked: int = field_doc(
        "number of text files that were read as one document although they contain <|endoftext|>"
        " or <|end_of_text|>",
        default=0,
    )
    json_texts: int = field_doc(
        "number of text files that were read as one document although their lines are JSON objects",
        default=0,
    )
    unread: tuple[UnreadFiles, ...] = field_doc(
        "files in folders of the sources that were not read, counted by kind", default=()
    )
    files: tuple[StoredFile, ...] = field_doc("all files of the dataset folder but dataset.json")


class ValidationDocument(NamedTuple):
    """A document of the validation split.

    `tokens` is its number of tokens, end-of-text token included. `num_bytes` is the length of its
    text in UTF-8, in bytes.
    """

    name: str
    text: str
    tokens: int
    num_bytes: int


class Baseline(NamedTuple):
    """Cross-entropy of a reference model on the validation split, in nats per token and in bits per
    byte of text.
    """

    nats_per_token: float
    bits_per_byte: float


class Dataset:
    """A dataset folder, opened for reading."""

    def __init__(self, directory: Path, info: DatasetInfo) -> None:
        self.directory = directory
        self.info = info
        self.train = TokenFile(directory / "train")
        self.validation = TokenFile(directory / "validation")

    @classmethod
    def open(cls, directory: str | Path) -> Self:
        """Returns the dataset in a folder. Checks that its files exist in full length, but not
        their content.

        Raises:
            DataError: The folder is not a dataset, or a file is missing or has the wrong size.
            ConfigError: dataset.json is damaged.
        """
        directory = Path(directory)
        if not (directory / DESCRIPTION).is_file():
            is_empty = directory.is_dir() and not any(directory.iterdir())
            if directory.exists() and not is_empty:
                raise DataError(
                    f"{directory}: not a dataset ({DESCRIPTION} is missing). Give a folder made by"
                    " `kit data build`."
                )
            raise DataError(
                f"{directory}: not a dataset, but empty or absent. Build it:"
                f" {kit_command('data', 'build', directory)}"
            )
        info = DatasetInfo.read(directory / DESCRIPTION)
        if info.format != FORMAT:
            raise DataError(
                f"{directory}: format {info.format}, this version reads {FORMAT}."
                f" {rebuild_hint(directory)}"
            )
        for stored in info.files:
            file = directory / stored.name
            try:
                size = f"{file_size(file, follows=True):,}"
            except FileNotFoundError:
                size = "no file"
            except OSError as error:
                raise DataError(f"{file}: {error.strerror}. {rebuild_hint(directory)}") from error
            if size != f"{stored.size_bytes:,}":
                raise DataError(
                    f"{file}: expected {stored.size_bytes:,} bytes, found {size}."
                    f" {rebuild_hint(directory)}"
                )
        return cls(directory, info)

    def verify(self) -> None:
        """Reads every file and compares its hash with the hash that was stored by the build.

        Raises:
            DataError: A file has changed since the build.
        """
        for stored in self.info.files:
            found = StoredFile.of(self.directory / stored.name)
            if found != stored:
                raise DataError(
                    f"{self.directory / stored.name}: changed: expected sha256"
                    f" {stored.sha256[:12]}..., found {found.sha256[:12]}...."
                    f" {rebuild_hint(self.directory)}"
                )

    @property
    def vocab_size(self) -> int:
        return self.info.vocab_size

    @property
    def eos_id(self) -> int:
        return self.info.eos_id

    def samples(
        self, part: Literal["train", "validation"], sequence_length: int, seed: int
    ) -> Samples:
        """Returns the training sequences of one split, which never end: each epoch reads all
        sequences in a new order.

        Raises:
            DataError: The split has too few tokens for one sequence, or the seed is not in 0 ..
                2^32 - 1.
        """
        file = self.train if part == "train" else self.validation
        return Samples([SourceSequences([file], sequence_length, seed)], sequence_length)

    def num_validation_sequences(self, sequence_length: int) -> int:
        """Returns the number of different sequences of `sequence_length` tokens in the validation
        split.
        """
        return (self.validation.num_tokens - 1) // sequence_length

    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer that the dataset stores."""
        return read_tokenizer(self.directory / self.info.tokenizer_file, self.eos_id)

    def validation_documents(self) -> Iterator[ValidationDocument]:
        """Yields the documents of the validation split, in the order of the validation token
        file.
        """
        file = self.directory / VALIDATION_TEXT
        with open_for_reading(file, follows=True) as stream:
            lines = iter(lambda: stream.readline(LARGEST_LINE_BYTES), b"")
            for number, line in enumerate(lines, start=1):
                try:
                    yield ValidationDocument(**json.loads(line))
                except (ValueError, TypeError, RecursionError) as error:
                    raise DataError(
                        f"{file}:{number}: damaged ({error}). {rebuild_hint(self.directory)}"
                    ) from error

    def bits_per_byte(self, nats_per_token: float) -> float:
        """Returns a loss on the validation split in bits per byte of text, from nats per token.

        Bits per byte can be compared between tokenizers. A loss per token cannot.
        """
        validation = self.info.validation
        return nats_per_token * validation.tokens / validation.text_bytes / math.log(2)

    def unigram_baseline(self) -> Baseline:
        """Returns the validation loss of a model that knows only the frequency of each token.
        Training must reach a lower loss.

        The frequencies are counts of the training tokens, each increased by one.
        """
        counts = self.train.counts(self.vocab_size) + 1
        log_probability = np.log(counts / counts.sum())
        validation = self.validation.counts(self.vocab_size)
        nats_per_token = float(-(validation @ log_probability) / validation.sum())
        return Baseline(nats_per_token, self.bits_per_byte(nats_per_token))

    def __repr__(self) -> str:
        return (
            f"Dataset({str(self.directory)!r}, {self.info.train.tokens:,} tokens, vocabulary"
            f" {self.vocab_size:,})"
        )

    def facts(self) -> list[tuple[str, str]]:
        """Returns (label, text) pairs that describe the dataset: the sources that were read, the
        size of both splits, and the texts that were left out.
        """

        def size(split: Split) -> str:
            documents = counted(split.documents, "document")
            return f"{split.tokens:,} tokens, {documents}, {split.text_bytes / 1e6:.2f} MB"

        info = self.info
        sources = self.info.settings.sources
        # A document that was divided between the splits is in both of them, but was read once.
        used = info.train.documents + info.validation.documents - info.cut
        read = used + info.duplicates + info.empty + len(info.skipped)
        files = counted(sum(source.files for source in sources), "file")
        on_disk = f"{sum(source.size_bytes for source in sources) / 1e6:.2f} MB"
        validation = size(info.validation)
        if info.cut:
            documents = counted(info.cut, "document")
            validation += f", of {documents} the end, since the whole is too large"
        duplicates = counted(info.duplicates, "duplicate")
        left_out = f"{duplicates}, {info.empty} empty, {len(info.skipped)} unreadable"
        if info.skipped_bytes:
            left_out += f", {info.skipped_bytes / 1e6:.2f} MB"
        facts = [
            ("read", f"{counted(read, 'document')} in {files}, {on_disk}"),
            ("training", size(info.train)),
            ("held out", validation),
            ("left out", left_out),
        ]
        facts += [("unreadable", line) for line in info.skipped[:MOST_NAMED]]
        if len(info.skipped) > MOST_NAMED:
            facts.append(("unreadable", "and others, named in dataset.json"))
        facts += [("not read", str(unread)) for unread in info.unread]
        facts += _hints(info)
        tokenizer = f"{info.tokenizer_file} {info.tokenizer_sha256[:12]}"
        facts.append(("tokenizer", f"{info.vocab_size:,} entries, {tokenizer}"))
        facts.append(("sources", _summary(sources)))
        return facts

    def _repr_html_(self) -> str:
        return html_table(f"Dataset {self.directory.name}", self.facts())


def _hints(info: DatasetInfo) -> list[tuple[str, str]]:
    """Returns (label, advice) for each kind of text file whose documents were not separated."""
    hints = []
    if info.parts:
        text = (
            f"text files above 16 MiB have no separator, and were split into"
            f" {counted(info.parts, 'document')} of about 1 MiB; --separator splits them where"
            " their documents end"
        )
        hints.append(("split", text))
    if info.marked:
        text = (
            f"{counted(info.marked, 'text file')} read as one document each, with the marks between"
            " documents in the text; split there: --separator '<|endoftext|>'"
        )
        hints.append(("one document", text))
    if info.json_texts:
        text = (
            f"{counted(info.json_texts, 'text file')} read as one document each, though the lines"
            " are JSON objects; name such files .jsonl"
        )
        hints.append(("one document", text))
    return hints


def _summary(sources: tuple[Source, ...], hashed: bool = True) -> str:
    """Returns the name, the number of files and the hash of each source. If `hashed` is false, the
    size replaces the hash.
    """
    words = []
    for source in sources:
        content = source.sha256[:12] if hashed else f"{source.size_bytes:,} bytes"
        words.append(f"{source.name} ({counted(source.files, 'file')}, {content})")
    return "; ".join(words)
