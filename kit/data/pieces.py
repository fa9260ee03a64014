"""The pieces of work of a build, for any number of processes with its folder in common; done when its .json is there.

survey-I: what part I of the text holds. encode-I: its documents as tokens, in runs sorted by the place drawn for each.
block-I: the training documents of one stretch of places, from all parts. So neither the number of processes nor what
was killed and done again can be seen in the dataset's bytes.
"""

import functools
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cluster.files import replacement, write_atomic
from kit.data.corpus import Document, Documents, file_digest
from kit.data.dataset import Settings
from kit.data.token_file import TokenFileWriter
from kit.data.tokenizer import Tokenizer, read_tokenizer
from kit.errors import DataError

BLOCK_BYTES = 256 * 1024 * 1024
"""Of text in a block, whose tokens are sorted at once."""
RUN_BYTES = 128 * 1024 * 1024
"""Of tokens that a part sorts at once."""
CHUNK_BYTES = 2 * 1024 * 1024
"""Text encoded at a time: enough documents for all cores, few enough for their Python lists of tokens."""
RECORD = struct.Struct("<d16sqq")
"""Of a document in a run, before its tokens as int32: its place, digest, bytes of text and bytes of tokens."""

ASKED, SUMMARY, ENCODED = "asked.json", "summary.json", "encoded.json"
"""What opens each of the three stages: what was asked; what all parts hold, and the tokenizer; that all are encoded."""
OPENS = {"survey": ASKED, "encode": SUMMARY, "block": ENCODED}
Advance = Callable[[int], None]


class Work:
    """The folder of a build, as each of its processes sees it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, json.loads((folder / ASKED).read_text(encoding="utf-8"))
        self.settings = Settings.from_dict(self.asked["settings"])
        self.parts: list[list[tuple[Path, str]]] = [[(Path(p), n) for p, n, *_ in part] for part in self.asked["parts"]]

    @functools.cached_property
    def summary(self) -> dict[str, Any]:
        """What all surveys say together; there once they are done."""
        return json.loads((self.folder / SUMMARY).read_text(encoding="utf-8"))

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return read_tokenizer(self.folder / self.summary["tokenizer_file"], self.summary["eos_id"])

    def documents(self, part: int) -> Documents:
        """Returns the documents of a part, exact duplicates within it dropped."""
        return Documents(self.parts[part], self.settings.max_bytes, self.asked["skip_corrupt"], self.settings.text_key)

    def sides(self, document: Document) -> tuple[Document | None, Document | None]:
        """Returns what of a document is trained on and what is held out: of one larger than that share, its end."""
        is_drawn = document.draw(f"validation {self.settings.seed}") < self.settings.validation_fraction
        if not is_drawn and document.digest.hex() != self.summary["held_out"]:
            return document, None
        if document.num_bytes <= self.summary["held_out_bytes"]:
            return None, document
        return document.cut(self.summary["held_out_bytes"])

    def count(self, stage: str) -> int:
        return self.summary["blocks"] if stage == "block" else len(self.parts)

    def file(self, stage: str, number: int, end: str = ".json") -> Path:
        return self.folder / f"{stage}-{number}{end}"

    def is_done(self, stage: str, number: int) -> bool:
        return self.file(stage, number).exists()

    def result(self, stage: str, number: int) -> dict[str, Any]:
        return json.loads(self.file(stage, number).read_text(encoding="utf-8"))

    def do(self, stage: str, number: int, advance: Advance) -> None:
        """Does a piece; `advance` is told of each so many bytes of text.

        Raises:
            DataError: the text cannot be read, or has changed since it was surveyed.
        """
        done = {"survey": survey, "encode": encode, "block": write_block}[stage](self, number, advance)
        write_atomic(self.file(stage, number), json.dumps(done))


def survey(work: Work, part: int, advance: Advance) -> dict[str, Any]:
    """Returns what a part holds: sizes, the extreme draws of its documents, what is left out, hashes of its files."""
    documents, count, text_bytes, longest, smallest, largest = work.documents(part), 0, 0, (0, ""), 1.0, 0.0
    for document in documents:
        count += 1
        text_bytes += document.num_bytes
        longest = max(longest, (document.num_bytes, document.digest.hex()))
        draw = document.draw(f"validation {work.settings.seed}")
        smallest, largest = min(smallest, draw), max(largest, draw)
        advance(document.num_bytes)
    return {
        "documents": count, "text_bytes": text_bytes, "longest": longest, "smallest": smallest, "largest": largest,
        "duplicates": documents.num_duplicates, "empty": documents.num_empty, "skipped": documents.skipped,
        "skipped_bytes": documents.skipped_bytes,
        "digests": [file_digest(path) for path, _ in work.parts[part]],
    }  # fmt: skip


def encode(work: Work, part: int, advance: Advance) -> dict[str, Any]:
    """Writes a part's training documents as sorted runs and where blocks begin in them, and its held-out documents."""
    documents, text_bytes, size = 0, 0, 0
    run, offsets = [], []
    tokenizer, seed = work.tokenizer, work.settings.seed
    with (  # whole or not at all: a process that was left behind may be at the same part for a moment
        replacement(work.file("encode", part, ".runs")) as runs,
        replacement(work.file("encode", part, ".held")) as held,
        replacement(work.file("encode", part, ".npy")) as begins,
    ):
        for chunk in _chunks(work.documents(part)):
            documents += len(chunk)
            sides = [(document, work.sides(document)) for document in chunk]
            parts = [(part, part is side[1], part is not document) for document, side in sides for part in side if part]
            for (document, is_held_out, is_cut), ids in zip(
                parts, tokenizer.encode_batch([part.text for part, *_ in parts]), strict=True
            ):
                text_bytes += document.num_bytes
                if is_held_out:
                    row = (document.digest.hex(), document.name, document.text, document.num_bytes, is_cut, ids)
                    held.write(json.dumps(row).encode() + b"\n")
                else:
                    tokens = np.asarray([*ids, tokenizer.eos_id], np.int32).tobytes()
                    run.append((document.draw(f"order {seed}"), document.digest, document.num_bytes, tokens))
                    size += len(tokens)
                advance(document.num_bytes)
            if size >= RUN_BYTES:
                offsets.append(_put_down(run, runs, work.summary["blocks"]))
                size = 0
        offsets.append(_put_down(run, runs, work.summary["blocks"]))
        np.save(begins, np.asarray(offsets, np.int64))
    surveyed = work.result("survey", part)
    if (documents, text_bytes) != (surveyed["documents"], surveyed["text_bytes"]):
        raise DataError("the text changed while it was read. Build again when nobody writes to the sources.")
    return {}


def _put_down(run: list[tuple[float, bytes, int, bytes]], stream: BinaryIO, blocks: int) -> list[int]:
    """Writes a run in the order of its draws, forgets it, and returns where each block begins, and its end."""
    run.sort(key=lambda document: document[0])
    begins = [stream.tell()]
    for draw, digest, num_bytes, tokens in run:
        stream.write(RECORD.pack(draw, digest, num_bytes, len(tokens)) + tokens)
        begins.append(stream.tell())
    firsts = np.searchsorted([int(draw * blocks) for draw, *_ in run], range(blocks + 1))
    run.clear()
    return [begins[first] for first in firsts]


def write_block(work: Work, block: int, advance: Advance) -> dict[str, Any]:
    """Writes the training documents of a block as a token file, in the order of their draws and each once."""
    found = sorted(_records(work, block), key=lambda document: document[0])  # of equals, in the order of reading
    seen: set[bytes] = set()
    duplicates, duplicate_bytes = 0, 0
    mine = work.file("block", block, f".{socket.gethostname()}-{os.getpid()}")
    with TokenFileWriter(mine, work.tokenizer.vocab_size) as writer:
        for _, digest, num_bytes, tokens in found:
            advance(num_bytes)
            if digest in seen:
                duplicates += 1
                duplicate_bytes += num_bytes
            else:
                seen.add(digest)
                writer.add(tokens)
    for end in (".bin", ".idx"):
        mine.with_name(mine.name + end).rename(work.file("block", block, end))
    kept = sum(num_bytes for _, _, num_bytes, _ in found) - duplicate_bytes
    return {"documents": len(seen), "text_bytes": kept, "tokens": writer.num_tokens, "duplicates": duplicates}


def _records(work: Work, block: int) -> Iterator[tuple[float, bytes, int, np.ndarray]]:
    for part in range(len(work.parts)):
        offsets = np.load(work.file("encode", part, ".npy"), mmap_mode="r")[:, block : block + 2].tolist()
        with work.file("encode", part, ".runs").open("rb") as stream:
            for begin, end in offsets:
                data, place = os.pread(stream.fileno(), end - begin, begin), 0
                while place < len(data):
                    draw, digest, num_bytes, size = RECORD.unpack_from(data, place)
                    place += RECORD.size + size
                    yield draw, digest, num_bytes, np.frombuffer(data, np.int32, size // 4, place - size)


def _chunks(documents: Documents) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    room = CHUNK_BYTES
    for document in documents:
        chunk.append(document)
        room -= document.num_bytes
        if room <= 0:
            yield chunk
            chunk, room = [], CHUNK_BYTES
    if chunk:
        yield chunk
