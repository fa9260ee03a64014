"""Readers: the documents of one file, whatever its format. Nothing damaged is passed over in
silence.

A reader yields `(place, text)` and calls `report(place, reason, num_bytes)` for what it cannot
read, the bytes where it knows them; `report` decides whether that stops the build or is written
down and skipped.
"""

import ast
import contextlib
import io
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Report = Callable[..., None]
Texts = Iterator[tuple[str, str]]

LARGEST_DOCUMENT_BYTES = 16 * 1024 * 1024
"""A document is encoded in one piece, which takes about a hundred bytes of memory per byte of
text."""
LARGEST_LINE_BYTES = 8 * LARGEST_DOCUMENT_BYTES
"""With up to six bytes of JSON for a byte of text, and more keys. A small packed file may hold a
line of any size."""
TEXT_KEY = "text"
OTHER_KEY = ". Name the one that holds the text: --text-key (text_key=)"


def read_texts(file: Path, name: str, report: Report, text_key: str = TEXT_KEY) -> Texts:
    """Yields `(place, text)` for each document of a file; `place` is the name, with line or row if
    there are several.

    `text_key` is that of a .jsonl object, or the column of a .parquet or .arrow file, which holds
    the document. Only METADATA of an installed package has no format of `FORMATS`.
    """
    reader = FORMATS.get(file_format(file), _readme)
    if file.parts[-2:] == ("pydoc_data", "topics.py"):
        reader = _topics
    try:
        if (
            file_format(file) not in {**LINES, **TABLES}
            and (size := file.stat().st_size) > LARGEST_DOCUMENT_BYTES
        ):
            return report(name, too_large(size), size)
        yield from reader(file, name, report, text_key)
    except OSError as error:
        report(name, f"cannot be read ({error.strerror or error})")


def too_large(size: int) -> str:
    """Returns why a document of so many bytes is not read."""
    return (
        f"one document of {size:,} bytes; at most {LARGEST_DOCUMENT_BYTES:,} are allowed. Split it"
    )


def file_format(file: Path) -> str:
    """Returns the end of a file's name that tells its format: `.parquet`, `.jsonl.zst`."""
    return "".join(file.suffixes[-2:]) if file.suffix in COMPRESSIONS else file.suffix


def _whole(file: Path, name: str, report: Report, _: str) -> Texts:
    data = file.read_bytes()
    try:
        yield name, data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        report(f"{name}:{line}", f"not UTF-8 text (byte {data[error.start]:#04x})", len(data))


def _readme(file: Path, name: str, report: Report, text_key: str) -> Texts:
    """Yields the long description of an installed package: what follows the header of its
    METADATA file.
    """
    for place, text in _whole(file, name, report, text_key):
        yield place, text.partition("\n\n")[2]


def _topics(file: Path, name: str, report: Report, _: str) -> Texts:
    """Yields the chapters of Python's language reference behind `help("topic")`."""
    try:
        value = next(
            node.value
            for node in ast.parse(file.read_bytes()).body
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value
        )
        # The file is of whoever the text is of, so it is read and never run.
        topics = ast.literal_eval(value)
        chapters = sorted((topic, text) for topic, text in topics.items() if isinstance(text, str))
    except (
        SyntaxError,
        ValueError,
        TypeError,
        AttributeError,
        StopIteration,
        RecursionError,
        MemoryError,
    ) as error:
        return report(name, f"no table of chapters ({error})")
    for topic, text in chapters:
        yield f"{name}:{topic}", text


def _jsonl(file: Path, name: str, report: Report, text_key: str) -> Texts:
    number = 0
    with io.BufferedReader(_Unpacked(file), READ_BYTES) as stream:
        try:
            for number, line in _lines(stream, name, report):
                yield from _line(line, f"{name}:{number}", report, text_key)
        except OSError as error:
            report(name, f"cannot be read ({error}) beyond line {number:,}: what followed is lost")


def _line(line: bytes, place: str, report: Report, text_key: str) -> Texts:
    if not line.strip():
        return
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        report(place, f"not valid JSON ({error})", len(line))
        return
    text = row.get(text_key) if isinstance(row, dict) else None
    if isinstance(text, str):
        yield place, text
    else:
        keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        report(place, f"no string under the key {text_key!r} (found: {keys}){OTHER_KEY}", len(line))


class _Unpacked(io.RawIOBase):
    """The unpacked bytes of a file, all of them up to where it is cut short; there it raises
    OSError.

    pyarrow's own stream gives nothing of a read that meets the cut; so that is done again in
    smaller pieces.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.place, self.size = file, 0, READ_BYTES
        self.stream = self._opened()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        """Fills the beginning of a buffer and returns how many bytes that are."""
        while True:
            try:
                count = self.stream.readinto(memoryview(buffer)[: self.size])
            except OSError:
                if self.size == 1:
                    raise
                self.size //= 1024
                self.stream = self._opened()
            else:
                self.place += count
                return count

    def _opened(self):
        import pyarrow

        stream, left = (
            pyarrow.input_stream(self.file, COMPRESSIONS.get(self.file.suffix)),
            self.place,
        )
        while left:
            left -= len(stream.read(min(left, READ_BYTES)))
        return stream


def _lines(stream: io.BufferedIOBase, name: str, report: Report) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a stream with their numbers; one that is longer than any document can be
    is reported, and empty here.
    """
    lines = iter(lambda: stream.readline(LARGEST_LINE_BYTES), b"")
    for number, line in enumerate(lines, start=1):
        if len(line) == LARGEST_LINE_BYTES:
            report(
                f"{name}:{number}",
                f"a line of {LARGEST_LINE_BYTES:,} bytes or more, longer than any document."
                " Split it",
            )
            while line and not line.endswith(b"\n"):
                line = stream.readline(READ_BYTES)
            line = b"\n"
        yield number, line


@contextlib.contextmanager
def _opened(file: Path, text_key: str) -> Iterator[tuple[Any, Iterable[Any]]]:
    """Opens a .parquet file, or what `datasets` keeps on a disk: a stream of Arrow's record
    batches. Yields its schema and batches of rows.
    """
    import pyarrow.ipc
    import pyarrow.parquet

    if file.suffix == ".parquet":
        with pyarrow.parquet.ParquetFile(file) as table:
            yield table.schema_arrow, table.iter_batches(1024, columns=[text_key])
    else:
        with pyarrow.memory_map(str(file)) as stream, pyarrow.ipc.open_stream(stream) as batches:
            yield batches.schema, batches


def _table(file: Path, name: str, report: Report, text_key: str) -> Texts:
    import pyarrow

    number = 0
    try:
        with _opened(file, text_key) as (schema, batches):
            if text_key not in schema.names:
                found = ", ".join(schema.names)
                return report(name, f"no column {text_key!r} (found: {found}){OTHER_KEY}")
            cells = (cell for batch in batches for cell in batch.column(text_key))
            for number, cell in enumerate(cells, start=1):
                yield from _cell(cell, f"{name}:row {number}", report, text_key)
    except pyarrow.ArrowException as error:
        kind, reason = file.suffix[1:].title(), str(error).splitlines()[0]
        report(f"{name}:row {number + 1}", f"damaged {kind} file ({reason})")


def _cell(cell, place: str, report: Report, text_key: str) -> Texts:
    try:
        text = cell.as_py()
    except UnicodeDecodeError:
        report(place, "not UTF-8 text")
        return
    if isinstance(text, str):
        yield place, text
    else:
        report(place, f"{text_key!r} holds {type(text).__name__}, not a string")


COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
READ_BYTES = 1 << 20
TABLES = {".parquet": _table, ".arrow": _table}
LINES = {".jsonl": _jsonl, ".jsonl.gz": _jsonl, ".jsonl.zst": _jsonl}
FORMATS = {".txt": _whole, ".md": _whole, ".rst": _whole, ".py": _whole, **LINES, **TABLES}
