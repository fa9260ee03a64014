"""Readers of corpus files: they yield the documents of one file of any supported format.

A reader yields `(place, text)`. For text that it cannot read, it calls `report(place, reason,
num_bytes)`, with the number of bytes if it is known. So no damaged text is skipped silently.
`report` either stops the build or records the text as skipped.
"""

import ast
import contextlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster.files import read_small
from kit.data.detect import (
    HEAD_BYTES,
    LARGEST_RATIO,
    RATIO_FREE_BYTES,
    READ_BYTES,
    DecompressedStream,
    detect,
)
from kit.errors import DataError

Report = Callable[..., None]
"""Function that is called as report(place, reason, num_bytes) for text that cannot be read."""
Texts = Iterator[tuple[str, str]]
"""Iterator over documents as (place, text). The place is the file name, with line, row or
number."""

LARGEST_DOCUMENT_BYTES = 16 * 1024 * 1024
"""Largest size of a document in bytes. A document is encoded in one call, which takes about a
hundred bytes of memory per byte of text."""
LARGEST_LINE_BYTES = 8 * LARGEST_DOCUMENT_BYTES
"""Largest length of a line of JSON in bytes. A byte of text can take up to six bytes of JSON, and
an object can have other keys. A limit is needed, since a small compressed file can hold a line of
any length."""
PIECE_BYTES = 1024 * 1024
"""Size in bytes of the documents into which a large text file is split: a file above
LARGEST_DOCUMENT_BYTES without a separator. Each document adds one end-of-text token to some 250,000
tokens."""
PART = ":part "
"""Text between file name and number in the names of documents into which a large text file was
split."""
END_MARKS = ("<|endoftext|>", "<|end_of_text|>")
"""Texts that end each document in plain text files of public data sets, such as TinyStories."""
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""First bytes (byte order marks) of a text in UTF-16, which is not read."""
NOT_UTF_16 = "not UTF-8 text but UTF-16. Convert it: iconv -f UTF-16 -t UTF-8"
MOST_KEYS = 12
"""Largest number of keys of a JSON object that an error message lists."""
MOST_LEVELS = 8
"""Largest number of objects around a value of which an error message names the keys."""
MOST_SHOWN = 40
"""Largest number of characters of a JSON value that an error message shows."""
BETWEEN = re.compile(r"[\s,\[\]]*")
"""Pattern of the characters between two objects of a JSON array: spaces, commas and brackets."""
BATCH_ROWS = 64
"""Rows of a Parquet file that are read at once."""
TOPICS_BYTES = 4 << 20
"""Largest size in bytes of the file with the chapters of Python's language reference. Parsing takes
a hundred times as much memory. The file of Python 3.14 has 0.8 MB."""
TEXT_KEY = "text"
"""Default key of a JSON object, or column of a table, that holds the document."""
OTHER_KEY = ". Name the one that holds the text: --text-key (text_key=)"


def read_texts(
    file: Path,
    name: str,
    report: Report,
    text_key: str = TEXT_KEY,
    separator: str | None = None,
) -> Texts:
    """Yields (place, text) for each document of a file.

    `place` is `name`. If the file has several documents, the line, row or number of the document
    follows.

    Args:
        file: file of any supported format.
        name: name of the file, as it is written in `place`.
        report: function that is called with (place, reason, bytes) for text that cannot be read.
        text_key: key of a JSON object, or column of a table, that holds the document. A dot leads
            into an object: `meta.text`.
        separator: text between the documents of a text file.

    Raises:
        DataError: A text file above 16 MiB without `separator` has an end text such as
            `<|endoftext|>` after each document, or holds JSON lines.
    """
    try:
        if file.parts[-2:] == ("pydoc_data", "topics.py"):
            yield from _topics(file, name, report)
            return
        found = detect(file)
        if found.kind == "table":
            yield from _table(file, name, report, text_key)
        elif found.kind == "lines":
            yield from _json_lines(file, name, report, text_key, found.compression)
        elif found.kind == "json":
            yield from _json_values(file, name, report, text_key, found.compression)
        elif found.kind == "text":
            yield from _text(file, name, report, found.compression, separator)
        else:
            report(name, f"cannot be read: {found.reason}", file.stat().st_size)
    except OSError as error:
        report(name, f"cannot be read ({error.strerror or error})")


def too_large(size: int) -> str:
    """Returns the reason why a document of `size` bytes is not read."""
    return (
        f"one document of {size:,} bytes; at most {LARGEST_DOCUMENT_BYTES:,} are allowed. Split it"
    )


def text_under(row: Any, text_key: str) -> Any:
    """Returns the value of a key in a JSON object, or None if the key is missing.

    A key such as `meta.text` is looked up as it is. If the object has no such key, the key `text`
    of the inner object `meta` is used.
    """
    if isinstance(row, dict) and text_key in row:
        return row[text_key]
    for part in text_key.split("."):
        if not isinstance(row, dict):
            return None
        row = row.get(part)
    return row


def keys_of(row: Any) -> str:
    """Returns the keys of a JSON object as text for an error message.

    Keys of inner objects are written as `meta.text`. For any other value, returns the name of its
    type.
    """
    if not isinstance(row, dict):
        return type(row).__name__
    return listed_names(_paths(row, ""))


def _paths(row: dict[Any, Any], prefix: str) -> list[str]:
    """Returns the keys of all values in a JSON object that are no objects themselves, each with
    `prefix` and the keys of the objects around the value: `meta.text`.
    """
    names = []
    for key, value in row.items():
        is_deep = prefix.count(".") >= MOST_LEVELS
        inner = _paths(value, f"{prefix}{key}.") if isinstance(value, dict) and not is_deep else []
        names += inner or [f"{prefix}{key}"]
    return names


def listed_names(names: Sequence[str]) -> str:
    """Returns names for an error message: the first MOST_KEYS, and how many others there are."""
    more = [f"and {len(names) - MOST_KEYS} others"] if len(names) > MOST_KEYS else []
    return ", ".join([*names[:MOST_KEYS], *more])


def holds_json_lines(text: str) -> bool:
    """Returns whether the first two lines of a text are JSON objects."""
    if not text.startswith("{"):
        return False
    lines = text.split("\n", 2)
    try:
        return len(lines) > 1 and all(isinstance(json.loads(line), dict) for line in lines[:2])
    except (ValueError, RecursionError):
        return False


# Plain text ---------------------------------------------------------------------------------------


def _text(
    file: Path, name: str, report: Report, compression: str | None, separator: str | None
) -> Texts:
    """Yields the documents of a text file. With a separator, these are the texts between
    separators. Without one, they are the whole file or, if it is large, pieces of it.
    """
    if separator is None and compression is None and file.stat().st_size <= LARGEST_DOCUMENT_BYTES:
        yield from _decoded(file.read_bytes(), name, report)
        return
    with io.BufferedReader(DecompressedStream(file, compression), READ_BYTES) as stream:
        try:
            if separator is not None:
                yield from _separated(stream, name, report, separator)
            else:
                yield from _in_pieces(stream, name, report)
        except OSError as error:
            report(name, f"cannot be read ({error}): what followed is lost")


def _decoded(data: bytes, name: str, report: Report, first_line: int = 1) -> Texts:
    """Yields (name, text) for bytes in UTF-8. Bytes that are not UTF-8 are reported.

    NUL bytes at the end, which a crash can leave, are reported and removed.
    """
    if data[:2] in UTF_16:
        report(f"{name}:{first_line}", NOT_UTF_16, len(data))
        return
    zero = data.find(b"\0")
    if zero >= 0:
        count = len(data) - zero
        if data.count(b"\0", zero) < count:
            line = first_line + data.count(b"\n", 0, zero)
            report(f"{name}:{line}", f"not text: a NUL byte at byte {zero:,}", len(data))
            return
        report(name, f"{count:,} NUL bytes at its end, as a crash leaves them", count)
        data = data[:zero]
    try:
        yield name, data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        report(f"{name}:{line}", f"not UTF-8 text (byte {data[error.start]:#04x})", len(data))


def _separated(stream: io.BufferedIOBase, name: str, report: Report, separator: str) -> Texts:
    """Yields (place, text) for each document between separators, without line ends around it."""
    pattern, longest = _pattern(separator)
    rest = b""
    number = 0
    line = 1
    is_last = False
    while not is_last:
        block = stream.read1(READ_BYTES)
        is_last = not block
        rest += block
        begin = 0
        for match in pattern.finditer(rest):
            # The separator may continue in the next block, as blank lines do.
            if match.end() > len(rest) - longest and not is_last:
                break
            number += 1
            yield from _piece(rest[begin : match.start()], f"{name}:{number}", report, line)
            line += rest.count(b"\n", begin, match.end())
            begin = match.end()
        rest = rest[begin:]
        if len(rest) > LARGEST_DOCUMENT_BYTES + READ_BYTES:
            number += 1
            size, rest, lines, is_last = _skip_document(stream, rest, pattern, longest)
            line += lines
            report(f"{name}:{number}", f"{too_large(size)}, or give another --separator", size)
    if rest:
        yield from _piece(rest, f"{name}:{number + 1}", report, line)


def _pattern(separator: str) -> tuple[re.Pattern[bytes], int]:
    """Returns (pattern of a separator, assumed largest length of a match in bytes).

    The separator "\\n\\n" matches any number of blank lines.
    """
    if separator == "\n\n":
        return re.compile(rb"\r?\n(?:[ \t]{0,99}\r?\n)+"), HEAD_BYTES
    data = separator.encode()
    return re.compile(re.escape(data)), len(data)


def _skip_document(
    stream: io.BufferedIOBase, rest: bytes, pattern: re.Pattern[bytes], longest: int
) -> tuple[int, bytes, int, bool]:
    """Skips the rest of a document that is too large, without reading all of it into memory.

    Returns (size of the document in bytes, bytes read after its separator, number of its lines,
    whether the stream has ended).
    """
    size = 0
    lines = 0
    while True:
        match = pattern.search(rest)
        block = stream.read(READ_BYTES)
        if match is not None:
            size += match.start()
            lines += rest.count(b"\n", 0, match.end())
            return size, rest[match.end() :] + block, lines, not block
        if not block:
            return size + len(rest), b"", lines, True
        kept = rest[-longest:]
        size += len(rest) - len(kept)
        lines += rest.count(b"\n", 0, len(rest) - len(kept))
        rest = kept + block


def _piece(data: bytes, name: str, report: Report, line: int) -> Texts:
    """Yields (name, text) for one document between separators, unless it is blank or too large."""
    if not data.strip():
        return
    if len(data) > LARGEST_DOCUMENT_BYTES:
        report(name, f"{too_large(len(data))}, or give another --separator", len(data))
        return
    for place, text in _decoded(data, name, report, line):
        yield place, text.strip("\r\n")


def _in_pieces(stream: io.BufferedIOBase, name: str, report: Report) -> Texts:
    """Yields a text as one document or, if it is too large, as pieces of about PIECE_BYTES that end
    at a line end.

    A text without separators between documents, such as text8, cannot be split where documents end.

    Raises:
        DataError: The text is too large for one document, and its documents end with a text such as
            `<|endoftext|>`, or it holds JSON lines.
    """
    rest = stream.read(LARGEST_DOCUMENT_BYTES + 1)
    if len(rest) <= LARGEST_DOCUMENT_BYTES:
        yield from _decoded(rest, name, report)
        return
    head = rest[:READ_BYTES]
    for mark in END_MARKS:
        if head.count(mark.encode()) > 1:
            raise DataError(
                f"{name}: a text of more than {LARGEST_DOCUMENT_BYTES:,} bytes whose documents end"
                f" with {mark!r}. Split it there: --separator '{mark}' (separator={mark!r})."
            )
    if holds_json_lines(head.decode("utf-8-sig", errors="replace")):
        raise DataError(f"{name}: holds JSON lines. Name it .jsonl, so that they are read as such.")
    number = 0
    line = 1
    while rest:
        if len(rest) < PIECE_BYTES:
            rest += stream.read(PIECE_BYTES)
        piece = rest[:PIECE_BYTES]
        if not piece.strip(b"\0"):
            report(f"{name}:{line}", "not text: NUL bytes. What followed is lost")
            return
        if len(rest) >= PIECE_BYTES:
            piece = piece[: _end_of_piece(piece)]
        number += 1
        yield from _decoded(piece, f"{name}{PART}{number}", report, line)
        line += piece.count(b"\n")
        rest = rest[len(piece) :]


def _end_of_piece(piece: bytes) -> int:
    """Returns the number of bytes after which a piece of text ends.

    A piece ends after its last line end. Without a line end, it ends after its last space. Without
    a space, it ends before the last character if that character's UTF-8 bytes are incomplete.
    """
    if end := piece.rfind(b"\n") + 1 or piece.rfind(b" ") + 1:
        return end
    last = len(piece) - 1
    while last > len(piece) - 4 and piece[last] & 0xC0 == 0x80:
        last -= 1
    return last if piece[last] >= 0xC0 else len(piece)


def _topics(file: Path, name: str, report: Report) -> Texts:
    """Yields the chapters of Python's language reference behind `help("topic")`."""
    try:
        text = read_small(file, limit_bytes=TOPICS_BYTES, follows=True)
        value = next(
            node.value
            for node in ast.parse(text).body
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value
        )
        # The file may come from an untrusted source, so it is parsed and never executed.
        topics = ast.literal_eval(value)
        chapters = sorted((topic, text) for topic, text in topics.items() if isinstance(text, str))
    except (
        OSError,
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


# JSON ---------------------------------------------------------------------------------------------


def _json_lines(
    file: Path, name: str, report: Report, text_key: str, compression: str | None
) -> Texts:
    number = 0
    with io.BufferedReader(DecompressedStream(file, compression), READ_BYTES) as stream:
        try:
            for number, line in _lines(stream, name, report):
                yield from _line(line, f"{name}:{number}", report, text_key)
        except OSError as error:
            report(name, f"cannot be read ({error}) beyond line {number:,}: what followed is lost")


def _line(line: bytes, place: str, report: Report, text_key: str) -> Texts:
    if not line.strip():
        return
    if line[:2] in UTF_16:
        report(place, NOT_UTF_16, len(line))
        return
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        report(place, f"not UTF-8 text (byte 0x{line[error.start]:02x})", len(line))
        return
    except (ValueError, RecursionError) as error:
        report(place, f"not valid JSON ({error})", len(line))
        return
    yield from _row(row, place, report, text_key, len(line))


def _row(row: Any, place: str, report: Report, text_key: str, size: int) -> Texts:
    """Yields (place, text) for a JSON object of `size` bytes, or reports that it has no text."""
    text = text_under(row, text_key)
    if isinstance(text, str):
        yield place, text
    elif isinstance(row, dict) and text_key in row:
        value = _shown(row[text_key], text_key)
        report(place, f"no string under the key {text_key!r}, but {value}", size)
    else:
        reason = f"no string under the key {text_key!r} (found: {keys_of(row)}){OTHER_KEY}"
        report(place, reason, size)


def _shown(value: Any, text_key: str) -> str:
    """Returns a value that is no text for an error message, and for an object or a list what the
    user can do. `text_key` is the key of the value.
    """
    if isinstance(value, dict) and value:
        return f"an object (found: {listed_names(_paths(value, f'{text_key}.'))}){OTHER_KEY}"
    if isinstance(value, list):
        return "a list. Write its text as one string under a key of its own"
    return json.dumps(value, default=repr)[:MOST_SHOWN]


def _json_values(
    file: Path, name: str, report: Report, text_key: str, compression: str | None
) -> Texts:
    """Yields (place, text) for each object of a JSON array, or of a sequence of objects over
    several lines.
    """
    number = 0
    decoder = json.JSONDecoder()
    with io.TextIOWrapper(
        io.BufferedReader(DecompressedStream(file, compression), READ_BYTES), encoding="utf-8-sig"
    ) as stream:
        rest = ""
        place = 0
        wanted = READ_BYTES
        try:
            while True:
                between = BETWEEN.match(rest, place)
                begin = between.end() if between else place
                try:
                    row, place = decoder.raw_decode(rest, begin)
                except (ValueError, RecursionError) as error:
                    # The object may continue in the next block.
                    rest = rest[begin:]
                    place = 0
                    block = stream.read(wanted) if len(rest) < LARGEST_LINE_BYTES else ""
                    if block:
                        rest += block
                        wanted = max(READ_BYTES, len(rest))
                        continue
                    if rest:
                        report(
                            f"{name}:{number + 1}",
                            f"not valid JSON ({error}): what followed is lost",
                            len(rest),
                        )
                    return
                wanted = READ_BYTES
                number += 1
                yield from _row(row, f"{name}:{number}", report, text_key, place - begin)
        except (OSError, UnicodeDecodeError) as error:
            report(
                name, f"cannot be read ({error}) beyond object {number:,}: what followed is lost"
            )


def _lines(stream: io.BufferedIOBase, name: str, report: Report) -> Iterator[tuple[int, bytes]]:
    """Yields (number, bytes) of each line of a stream.

    A line longer than any allowed document is reported, and an empty line is yielded instead.
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


# Tables -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(file: Path, column: str) -> Iterator[tuple[Any, Iterable[Any]]]:
    """Opens a Parquet file, an Arrow file, or an Arrow stream as the library `datasets` writes it.

    Yields (schema, batches of rows). In a Parquet file, only `column` is read.

    Raises:
        pyarrow.ArrowInvalid: A column of a Parquet file unpacks to more than LARGEST_RATIO times
            its size.
    """
    import pyarrow.ipc
    import pyarrow.parquet

    with file.open("rb") as stream:
        magic = stream.read(6)
    if magic.startswith(b"PAR1") or file.suffix == ".parquet":
        with pyarrow.parquet.ParquetFile(file) as table:
            schema = table.schema_arrow
            wanted = column if column in schema.names else column.partition(".")[0]
            if (ratio := _largest_ratio(table.metadata)) > LARGEST_RATIO:
                raise pyarrow.ArrowInvalid(
                    f"a column unpacks to {ratio:,.0f} times its size; at most"
                    f" {LARGEST_RATIO:,} times are read"
                )
            yield schema, table.iter_batches(BATCH_ROWS, columns=[wanted])
    elif magic == b"ARROW1":
        with pyarrow.memory_map(str(file)) as stream, pyarrow.ipc.open_file(stream) as table:
            numbers = range(table.num_record_batches)
            yield table.schema, (table.get_batch(number) for number in numbers)
    else:
        with pyarrow.memory_map(str(file)) as stream, pyarrow.ipc.open_stream(stream) as batches:
            yield batches.schema, batches


def _largest_ratio(metadata: Any) -> float:
    """Returns the largest ratio of unpacked size to packed size over the columns of a Parquet file.

    Columns that unpack to at most RATIO_FREE_BYTES are left out. Returns 0 if no column is left.
    """
    ratios = [0.0]
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for number in range(row_group.num_columns):
            column = row_group.column(number)
            if column.total_uncompressed_size > RATIO_FREE_BYTES:
                packed = max(1, column.total_compressed_size)
                ratios.append(column.total_uncompressed_size / packed)
    return max(ratios)


def _table(file: Path, name: str, report: Report, text_key: str) -> Texts:
    import pyarrow

    number = 0
    try:
        with _opened(file, text_key) as (schema, batches):
            column, _, inner = text_key.partition(".")
            if text_key in schema.names:
                column = text_key
                inner = ""
            if column not in schema.names:
                found = listed_names([name for field in schema for name in _columns(field)])
                return report(name, f"no column {text_key!r} (found: {found}){OTHER_KEY}")
            cells = (cell for batch in batches for cell in batch.column(column))
            for number, cell in enumerate(cells, start=1):
                yield from _cell(cell, f"{name}:row {number}", report, text_key, inner)
    except pyarrow.ArrowException as error:
        kind = file.suffix[1:].title()
        reason = str(error).splitlines()[0]
        report(f"{name}:row {number + 1}", f"damaged {kind} file ({reason})")


def _columns(field: Any, prefix: str = "") -> list[str]:
    """Returns the name of a column of a table. For a column of objects, returns the names of their
    fields as `meta.text`.
    """
    import pyarrow.types

    name = f"{prefix}{field.name}"
    if not pyarrow.types.is_struct(field.type):
        return [name]
    return [inner for each in field.type for inner in _columns(each, f"{name}.")]


def _cell(cell, place: str, report: Report, text_key: str, inner: str) -> Texts:
    try:
        text = cell.as_py()
    except UnicodeDecodeError:
        report(place, "not UTF-8 text")
        return
    if inner:
        text = text_under(text, inner)
    if isinstance(text, str):
        yield place, text
    else:
        report(place, f"{text_key!r} holds no string, but {_shown(text, text_key)}")
