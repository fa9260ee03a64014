"""The leader of a build: says when a stage begins, trains the tokenizer, and puts the dataset together at the end."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.files import write_atomic
from kit.data.corpus import source_record
from kit.data.dataset import (
    DESCRIPTION,
    FORMAT,
    MOST_NAMED,
    VALIDATION_TEXT,
    DatasetInfo,
    Split,
    StoredFile,
    ValidationDocument,
)
from kit.data.pieces import BLOCK_BYTES, SUMMARY, Work
from kit.data.team import ERROR, Progress, Team, helpers
from kit.data.token_file import TokenFile, TokenFileWriter, token_dtype
from kit.data.tokenizer import train_tokenizer
from kit.errors import DataError

PACKED = (".gz", ".zst", ".parquet")
"""Of which about three times as many bytes of text are expected, for the time left."""
LEAST_SHARE = 0.01
"""Of the text that must be left to train on."""
TOKENIZER_BYTES = 32_000_000
"""Text that a tokenizer is trained on; of a larger corpus, a sample of about this size."""


def lead(work: Work, workers: int, size: int, progress: Progress) -> Path:
    """Returns the folder of the whole dataset within that of its build, in which `size` processes share the work.

    `workers` of them, this one among them, are of this machine.

    Raises:
        DataError: the text cannot be read, is too little, or does not yield such a vocabulary; a process has gone.
    """
    (work.folder / ERROR).unlink(missing_ok=True)
    with helpers(work.folder, 1, workers, size) as children, progress:
        team = Team(work, size, children, progress)
        sizes = [
            sum(size * (1 + 2 * name.endswith(PACKED)) for _, name, size, _ in part) for part in work.asked["parts"]
        ]
        team.stage("survey", "Reading", sizes)
        surveys = [work.result("survey", part) for part in range(len(work.parts))]
        if not (work.folder / SUMMARY).exists():
            _summarise(work, surveys, progress)
        sizes = [survey["text_bytes"] for survey in surveys]
        team.stage("encode", "Encoding", sizes)
        blocks = work.count("block")
        team.stage("block", "Ordering", [sum(sizes) // blocks] * blocks)
        return _assemble(work, surveys)


def _summarise(work: Work, surveys: list[dict[str, Any]], progress: Progress) -> None:
    """Writes the sizes, what tells training from held-out documents, and the tokenizer.

    Raises:
        DataError: too little of the text can be read, or none would be left to train on.
    """
    documents, text_bytes = (sum(survey[key] for survey in surveys) for key in ("documents", "text_bytes"))
    _check_share(work, surveys, text_bytes, text_bytes)
    held_out_bytes = max(1, int(work.settings.validation_fraction * text_bytes))
    line, (longest_bytes, longest) = work.settings.validation_fraction, max(survey["longest"] for survey in surveys)
    is_drawn = any(survey["smallest"] < line for survey in surveys)
    if longest_bytes <= held_out_bytes and all(survey["largest"] < line for survey in surveys):
        raise DataError(
            f"{_names(work)}: all {documents} documents would be held out. Lower validation_fraction, or add text."
        )
    told = {
        "held_out": None if is_drawn else longest,
        "held_out_bytes": held_out_bytes,
        "blocks": 1 + text_bytes // BLOCK_BYTES,
        **work.asked["tokenizer"],
    }
    work.summary = told
    if work.asked["tokenizer"]["tokenizer_file"] is None:
        tokenizer = train_tokenizer(_training_texts(work, text_bytes, progress), work.settings.vocab_size)
        write_atomic(work.folder / tokenizer.file_name, tokenizer.data)
        told.update(tokenizer_file=tokenizer.file_name, eos_id=tokenizer.eos_id)
    write_atomic(work.folder / SUMMARY, json.dumps(told))


def _names(work: Work) -> str:
    return ", ".join(name for name, _ in work.asked["groups"])


def _check_share(work: Work, surveys: list[dict[str, Any]], to_train: int, text_bytes: int) -> None:
    """Raises DataError if the bytes of text to train on are under 1 % of the text, with what of it cannot be read."""
    skipped = [line for survey in surveys for line in survey["skipped"]]
    skipped_bytes = sum(survey["skipped_bytes"] for survey in surveys)
    if to_train < max(1, LEAST_SHARE * (text_bytes + skipped_bytes)):
        what = f"{to_train:,} of {text_bytes + skipped_bytes:,} bytes of text would be trained on, less than 1 %"
        left = f"{text_bytes - to_train:,} bytes are held out (--validation-fraction), {skipped_bytes:,} cannot be read"
        raise DataError(f"{_names(work)}: {what}: {left}{''.join(f'; {line}' for line in skipped[:MOST_NAMED])}.")


def _training_texts(work: Work, text_bytes: int, progress: Progress) -> Iterator[str]:
    """Yields the text to train a tokenizer on: no held-out document, and a sample of a large corpus."""
    share, seen = min(1.0, TOKENIZER_BYTES / text_bytes), set[bytes]()
    with progress.stage("Training the tokenizer", text_bytes) as advance:
        for part in range(len(work.parts)):
            for document in work.documents(part):
                advance(document.num_bytes)
                part, _ = work.sides(document)
                if part and part.draw("tokenizer") < share and part.digest not in seen:
                    seen.add(part.digest)
                    yield part.text


def _assemble(work: Work, surveys: list[dict[str, Any]]) -> Path:
    """Merges the blocks into one token file and the held-out documents into another, and describes the whole."""
    folder, tokenizer = work.folder / "dataset", work.tokenizer
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / tokenizer.file_name).write_bytes(tokenizer.data)
    blocks = [work.result("block", block) for block in range(work.count("block"))]
    with TokenFileWriter(folder / "train", tokenizer.vocab_size) as train:
        for block, told in enumerate(blocks):
            if told["documents"]:
                train.append(TokenFile(work.file("block", block, "")))
    validation, repeated, cut = _held_out(work, folder)
    trained = Split(**{key: sum(told[key] for told in blocks) for key in ("documents", "tokens", "text_bytes")})
    _check_share(work, surveys, trained.text_bytes, trained.text_bytes + validation.text_bytes)
    groups, digests = work.asked["groups"], iter([digest for survey in surveys for digest in survey["digests"]])
    files = iter([file for part in work.parts for file in part])
    sources = tuple(source_record(name, [next(files) for _ in range(count)], digests) for name, count in groups)
    info = DatasetInfo(
        format=FORMAT,
        settings=work.settings.replace(sources=sources),
        tokenizer_file=tokenizer.file_name,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        dtype=token_dtype(tokenizer.vocab_size).name,
        train=trained,
        validation=validation,
        cut=cut,
        duplicates=sum(each["duplicates"] for each in (*surveys, *blocks)) + repeated,
        empty=sum(survey["empty"] for survey in surveys),
        skipped=tuple(line for survey in surveys for line in survey["skipped"]),
        skipped_bytes=sum(survey["skipped_bytes"] for survey in surveys),
        files=tuple(StoredFile.of(file) for file in sorted(folder.iterdir())),
    )
    info.write(folder / DESCRIPTION)
    return folder


def _held_out(work: Work, folder: Path) -> tuple[Split, int, int]:
    """Writes the held-out documents of all parts, each once; returns their sizes, how many came again and were cut."""
    tokenizer, text_bytes, repeated, cut = work.tokenizer, 0, 0, 0
    seen: set[str] = set()
    with (
        TokenFileWriter(folder / "validation", tokenizer.vocab_size) as writer,
        (folder / VALIDATION_TEXT).open("w", encoding="utf-8") as lines,
    ):
        for part in range(len(work.parts)):
            with work.file("encode", part, ".held").open(encoding="utf-8") as rows:
                for digest, name, text, num_bytes, is_cut, ids in map(json.loads, rows):
                    if digest in seen:
                        repeated += not is_cut  # else its beginning has been counted
                        continue
                    seen.add(digest)
                    cut += is_cut
                    writer.add([*ids, tokenizer.eos_id])
                    row = ValidationDocument(name, text, len(ids) + 1, num_bytes)
                    lines.write(json.dumps(row._asdict(), ensure_ascii=False) + "\n")
                    text_bytes += num_bytes
    return Split(documents=len(seen), tokens=writer.num_tokens, text_bytes=text_bytes), repeated, cut
