"""Readers: the documents of one file, whatever its format. Nothing damaged is passed over in silence.

A reader yields `(place, text)` and calls `report(place, reason)` for what it cannot read; `report` decides whether
that stops the build or is written down and skipped.
"""

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from cluster.record import suggestion
from kit.errors import DataError

Report = Callable[[str, str], None]
Texts = Iterator[tuple[str, str]]

TEXT_KEY = "text"
OTHER_KEY = ". Name the one that holds the text: --text-key (text_key=)"


def read_texts(file: Path, name: str, report: Report, text_key: str = TEXT_KEY) -> Texts:
    """Yields `(place, text)` for each document of a file; `place` is the name, with line or row if there are several.

    `text_key` is that of a .jsonl object, or the column of a .parquet file, which holds the document.

    Raises:
        DataError: the file's format is not known.
    """
    reader = FORMATS.get(file.suffix)
    if file.parts[-2:] == ("pydoc_data", "topics.py"):
        reader = _topics
    elif file.name == "METADATA":
        reader = _readme
    if reader is None:
        raise DataError(f"{name}: cannot read this format. {suggestion(file.suffix, FORMATS)}")
    try:
        yield from reader(file, name, report, text_key)
    except OSError as error:
        report(name, f"cannot be read ({error.strerror or error})")


def _whole(file: Path, name: str, report: Report, _: str) -> Texts:
    data = file.read_bytes()
    try:
        yield name, data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        report(f"{name}:{line}", f"not UTF-8 text (byte {data[error.start]:#04x})")


def _readme(file: Path, name: str, report: Report, text_key: str) -> Texts:
    """Yields the long description of an installed package: what follows the header of its METADATA file."""
    for place, text in _whole(file, name, report, text_key):
        yield place, text.partition("\n\n")[2]


def _topics(file: Path, name: str, report: Report, _: str) -> Texts:
    """Yields the chapters of Python's language reference behind `help("topic")`."""
    try:
        tree = ast.parse(file.read_bytes())
        value = next(node.value for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value)
        topics = ast.literal_eval(value)  # the file is of whoever the text is of, so it is read and never run
        chapters = sorted((topic, text) for topic, text in topics.items() if isinstance(text, str))
    except (SyntaxError, ValueError, TypeError, AttributeError, StopIteration, RecursionError, MemoryError) as error:
        return report(name, f"no table of chapters ({error})")
    for topic, text in chapters:
        yield f"{name}:{topic}", text


def _jsonl(file: Path, name: str, report: Report, text_key: str) -> Texts:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            place = f"{name}:{number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                report(place, f"not valid JSON ({error})")
                continue
            text = row.get(text_key) if isinstance(row, dict) else None
            if isinstance(text, str):
                yield place, text
            else:
                keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                report(place, f"no string under the key {text_key!r} (found: {keys}){OTHER_KEY}")


def _parquet(file: Path, name: str, report: Report, text_key: str) -> Texts:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            if text_key not in table.schema_arrow.names:
                report(name, f"no column {text_key!r} (found: {', '.join(table.schema_arrow.names)}){OTHER_KEY}")
                return
            for batch in table.iter_batches(batch_size=1024, columns=[text_key]):
                for cell in batch.column(0):
                    number += 1
                    yield from _cell(cell, f"{name}:row {number}", report, text_key)
    except pyarrow.ArrowException as error:
        report(f"{name}:row {number + 1}", f"damaged Parquet file ({str(error).splitlines()[0]})")


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


FORMATS = {".txt": _whole, ".md": _whole, ".rst": _whole, ".py": _whole, ".jsonl": _jsonl, ".parquet": _parquet}
