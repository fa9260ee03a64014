"""Detection of the format and compression of a corpus file by its first bytes.

The extension decides in few cases only. A `.jsonl` file is read as JSON and a `.txt` file as text,
whatever the content is. A `.parquet` or `.arrow` file is read as a table.
"""

import bz2
import dataclasses
import io
import json
import lzma
import re
from pathlib import Path
from typing import Any, Literal

READ_BYTES = 1 << 20
"""Bytes per read of a file: 1 MiB. The first JSON object of a file is searched in its first 1 MiB,
too."""
HEAD_BYTES = 4096
"""Number of bytes at the beginning of a file that decide its format."""
POINTER_BYTES = 1024
"""Upper bound for the size of a Git LFS pointer file in bytes. Larger files cannot be pointers."""
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2", ".xz": "xz"}
"""Name of the compression format, by file extension."""
TEXT_ENDS = frozenset((".txt", ".md", ".rst", ".py"))
"""Extensions of the plain text files that are read in a folder."""
LINES_ENDS = frozenset((".jsonl", ".ndjson", ".jsonlines"))
"""Extensions of files with one JSON object per line."""
TABLE_ENDS = frozenset((".parquet", ".arrow"))
"""Extensions of files with a table: Parquet and Arrow."""
MAGIC = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh", "bz2"),
    (b"\xfd7zXZ\0", "xz"),
)
"""First bytes of compressed files, each with the name of the compression."""
TABLES = (b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")
"""First bytes of a Parquet file, an Arrow file and an Arrow stream."""
OTHERS = (
    (b"PK\x03\x04", "a zip archive. Unpack it"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive. Unpack it"),
    (b"Rar!", "a rar archive. Unpack it"),
    (b"\x04\x22\x4d\x18", "compressed by lz4. Unpack it"),
    (b"MMIDIDX", "an index of token files, which need no build: give their prefix as --data"),
    (b"%PDF", "a PDF. Extract its text first"),
    (b"\x93NUMPY", "an array of NumPy, not text"),
    (b"\x89HDF", "an HDF5 file. Write its text as .jsonl or .parquet"),
    (b"SQLite format 3", "a SQLite database. Write its text as .jsonl or .parquet"),
)
"""First bytes of file formats that are not read. The text with them names the format and what the
user can do."""
DELIMITERS = {".csv": "", ".tsv": ', delimiter="\\t"'}
"""Argument of Python's `csv.DictReader` for the delimiter of a table in plain text, by the
extension of the file."""
LARGEST_RATIO = 1000
"""Largest accepted ratio of unpacked to packed size of a compressed file. Text has a ratio below
20. A limit is needed, since a few kilobytes of zstd can unpack to gigabytes."""
RATIO_FREE_BYTES = 64 << 20
"""Unpacked bytes of a file (64 MiB) up to which its compression ratio is not checked."""
POINTER = re.compile(rb"version https://git-lfs\.github\.com/spec/v1\n(?:.*\n)*?size (\d+)")
"""Pattern of a Git LFS pointer file. Its group 1 is the size in bytes of the file that the pointer
replaces."""
SPREAD = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:\[\s*\{|\{[ \t\r]*\n)")
"""Pattern of the start of a file that holds a JSON array of objects, or a JSON object that spans
several lines. Other JSON files are read line by line."""
TAR_MAGIC = slice(257, 262)
"""Position of the bytes `ustar` in a tar archive."""

Kind = Literal["text", "lines", "json", "table", "pointer", "other"]


@dataclasses.dataclass(frozen=True, slots=True)
class DetectedFormat:
    """Format and compression of a file.

    The kind `lines` means one JSON object per line. The kind `json` means an array, or objects that
    span several lines. `reason` says why a file of the kind `other` or `pointer` is not read.
    `size_bytes` is the size of the file that a pointer replaces, else 0. `row` is the first JSON
    object, or None if it is unknown.
    """

    kind: Kind
    compression: str | None = None
    reason: str = ""
    size_bytes: int = 0
    row: dict[str, Any] | None = None


class DecompressedStream(io.RawIOBase):
    """Stream of the unpacked bytes of a file.

    If the compressed data is truncated, the stream returns all bytes before the truncation, and
    then raises OSError. pyarrow's own stream loses the bytes of a read that reaches the truncation,
    so this class repeats that read in smaller pieces.
    """

    def __init__(self, file: Path, compression: str | None) -> None:
        self.file = file
        self.compression = compression
        self.place = 0
        """Number of unpacked bytes that were returned so far."""
        self.packed_bytes = file.stat().st_size
        """Size of the compressed file in bytes."""
        self.size = READ_BYTES
        """Largest number of bytes of the next read. Damaged data makes it smaller."""
        self.stream = self._opened()

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self.stream.close()
        super().close()

    def readinto(self, buffer) -> int:
        """Fills the beginning of a buffer and returns the number of bytes."""
        while True:
            try:
                count = self.stream.readinto(memoryview(buffer)[: self.size])
            except (OSError, EOFError, lzma.LZMAError) as error:
                if self.size == 1:
                    raise OSError(str(error)) from error
                self.size = max(1, self.size // 1024)
                self.stream = self._opened()
            else:
                self.place += count
                if self.place > LARGEST_RATIO * self.packed_bytes + RATIO_FREE_BYTES:
                    raise OSError(
                        f"it unpacks to more than {LARGEST_RATIO:,} times its size, as no text does"
                    )
                return count

    def _opened(self) -> Any:
        """Returns a new stream of the unpacked bytes, without the first `self.place` bytes, which
        were returned already.
        """
        if self.compression == "xz":
            stream = lzma.LZMAFile(self.file)
        elif self.compression == "bz2":
            stream = bz2.BZ2File(self.file)
        else:
            import pyarrow

            stream = pyarrow.input_stream(self.file, self.compression)
        left = self.place
        while left:
            left -= len(stream.read(min(left, READ_BYTES)))
        return stream


def file_extensions(file: Path) -> tuple[str, str]:
    """Returns (extension of the format, extension of the compression). A missing extension is "".

    A number, as in `part.00000`, is not an extension.
    """
    suffixes = [suffix.lower() for suffix in file.suffixes]
    packed = ""
    if suffixes and suffixes[-1] in COMPRESSIONS:
        packed = suffixes.pop()
    own = suffixes[-1] if suffixes else ""
    if own[1:].isdigit():
        own = ""
    return own, packed


def compression_of(file: Path) -> str | None:
    """Returns the compression of a file by its first bytes, or None if it is not compressed.

    If the name has the extension of a compression but the content is neither compressed nor JSON,
    the file is damaged. Then the compression of the name is returned, so that the reader of the
    file reports the damage.
    """
    with file.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    found = next((name for magic, name in MAGIC if head.startswith(magic)), None)
    named = COMPRESSIONS.get(file_extensions(file)[1])
    if found is None and named and head and head.lstrip()[:1] not in (b"{", b"["):
        return named
    return found


def detect(file: Path) -> DetectedFormat:
    """Returns the format and compression of a file. Reads its first bytes or its first JSON object.

    Raises:
        OSError: The file cannot be opened.
    """
    end, packed = file_extensions(file)
    with file.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    if (pointer := POINTER.match(head[:POINTER_BYTES])) is not None:
        reason = "a pointer of Git LFS, not the file itself. Fetch it with `git lfs pull`"
        return DetectedFormat("pointer", reason=reason, size_bytes=int(pointer[1]))
    if end in TABLE_ENDS and not packed:
        return DetectedFormat("table")
    compression = compression_of(file)
    if compression is not None:
        try:
            with DecompressedStream(file, compression) as unpacked:
                head = io.BufferedReader(unpacked, HEAD_BYTES).read(HEAD_BYTES)
        except OSError as error:
            if end in TEXT_ENDS:
                return DetectedFormat("text", compression)
            if end in LINES_ENDS:
                return DetectedFormat("lines", compression)
            return DetectedFormat("other", compression, f"damaged {compression} data ({error})")
    if end in LINES_ENDS:
        kind = "json" if SPREAD.match(head) else "lines"
        return DetectedFormat(kind, compression)
    return _by_head(file, head, compression)


def _by_head(file: Path, head: bytes, compression: str | None) -> DetectedFormat:
    """Returns the format of a file, detected by `head`, its first unpacked bytes."""
    if head[TAR_MAGIC] == b"ustar":
        return DetectedFormat("other", compression, "a tar archive. Unpack it")
    if file_extensions(file)[0] in TEXT_ENDS:
        return DetectedFormat("text", compression)
    if compression is None and head.startswith(TABLES):
        return DetectedFormat("table")
    for magic, reason in OTHERS:
        if head.startswith(magic):
            return DetectedFormat("other", compression, reason)
    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"["):
        return _json(file, compression)
    if _is_text(head):
        end = file_extensions(file)[0]
        if end in DELIMITERS:
            reason = f"a table, not one text. Convert it to JSON lines: {to_lines(end)}"
            return DetectedFormat("other", compression, reason)
        return DetectedFormat("text", compression)
    return DetectedFormat("other", compression, "not text in UTF-8")


def to_lines(end: str) -> str:
    """Returns a command that writes a table with the extension `end` as JSON lines, with the names
    of its columns as keys. The command needs only Python's standard library.
    """
    rows = f"csv.DictReader(sys.stdin{DELIMITERS[end]})"
    program = (
        "import csv, json, sys; csv.field_size_limit(2**31 - 1);"
        f" [print(json.dumps(row)) for row in {rows}]"
    )
    return f"`python -c '{program}' < FILE > FILE.jsonl`, and name the column with --text-key"


def _is_text(head: bytes) -> bool:
    try:
        head.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # `head` may end within a character.
        if len(head) < HEAD_BYTES or error.start < len(head) - 3:
            return False
    return b"\0" not in head


def _json(file: Path, compression: str | None) -> DetectedFormat:
    """Returns the format of a file that begins with a brace or a bracket: one JSON object per line,
    an array or objects over several lines, or plain text.
    """
    with io.BufferedReader(DecompressedStream(file, compression), READ_BYTES) as stream:
        try:
            head = stream.read(READ_BYTES)
        except OSError as error:
            return DetectedFormat("other", compression, f"damaged {compression} data ({error})")
    text = head.decode("utf-8-sig", errors="replace").lstrip()
    first, newline, rest = text.partition("\n")
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        row = None
    if isinstance(row, dict):
        return DetectedFormat("lines", compression, row=row)
    if not newline and len(head) == READ_BYTES and text.startswith("{"):
        return DetectedFormat("lines", compression)  # The first line is longer than 1 MiB.
    # The first line is no JSON object. The file may hold an array, or objects over several lines.
    begin = re.match(r"\[?\s*", text)
    assert begin is not None  # The pattern matches an empty text, too.
    try:
        row, _ = json.JSONDecoder().raw_decode(text, begin.end())
    except (ValueError, RecursionError):
        # The first object is longer than 1 MiB, or the file is plain text with a bracket in front.
        if len(head) == READ_BYTES and re.match(r'\[?\s*\{\s*"', text):
            return DetectedFormat("json", compression)
        if file_extensions(file)[0] == ".json":
            return DetectedFormat("other", compression, "damaged JSON")
        return DetectedFormat("text", compression)
    if isinstance(row, dict):
        return DetectedFormat("json", compression, row=row)
    if file_extensions(file)[0] == ".json":
        return DetectedFormat("other", compression, "JSON without objects that hold a text")
    return DetectedFormat("text", compression)
