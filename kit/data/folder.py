"""Selects the files of a folder that are read as a corpus.

Files that are not read are counted by kind and reason in `UnreadFiles`.
"""

import dataclasses
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from cluster.record import Record, counted, field_doc
from kit.data.detect import (
    LINES_ENDS,
    POINTER_BYTES,
    TABLE_ENDS,
    TEXT_ENDS,
    DetectedFormat,
    detect,
    file_extensions,
)
from kit.data.readers import OTHER_KEY, keys_of, text_under
from kit.errors import DataError

SPLIT = re.compile(r"(?:^|/)(train|test|validation|valid|val|dev|eval)(?=[-_./])")
"""Pattern of the name of a split in a path within a data set's folder, such as
`train/data-00000-of-00001.arrow` or `data/test-00000-of-00002.parquet`."""
OTHER_SPLIT = re.compile(r"(?:^|(?<=[-_.]))(?:test|validation|valid|val|dev|eval)(?=[-_.]|$)")
"""Pattern of a split other than `train` in the name of a file or folder, such as
`TinyStories-valid.txt`."""
CARD = re.compile(
    r"(readme|licen[cs]e|notice|citation|changelog|contributing|datasheet|"
    r".*(md5|sha1|sha256|sha512|checksum)s?(um|sums)?)",
    re.IGNORECASE,
)
"""Pattern of file names, without extension, such as README or LICENSE. Such texts describe the data
and are no documents to train on."""
MOST_KINDS = 6
"""Largest number of kinds of unread files that an error message lists."""
FORMATS = (
    "text (.txt, .md, .rst, .py), JSON lines (.jsonl, .ndjson, .json), .parquet, .arrow; text and"
    " JSON also as .gz, .zst, .bz2, .xz"
)
"""File formats that are read in a folder, as text for error messages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnreadFiles(Record):
    """Number and size of the files of one kind, in a source folder, that were not read for one
    reason.
    """

    kind: str = field_doc(
        "extension of the files, or a name for files of this type, such as `Git LFS` or `hidden`"
    )
    reason: str = field_doc("reason why the files were not read")
    files: int = field_doc("number of files that were not read")
    size_bytes: int = field_doc(
        "total size of the files in bytes; for a pointer of Git LFS, the size of the file that the"
        " pointer replaces"
    )
    example: str = field_doc("path of one of the files")
    expected: bool = field_doc(
        "whether such files are known to hold no training text; these files never cause an error"
    )

    def __str__(self) -> str:
        size = f"{self.size_bytes / 1e6:,.2f} MB"
        files = counted(self.files, "file")
        return f"{files} ({self.kind}), {size}, such as {self.example}: {self.reason}"


@dataclasses.dataclass(frozen=True, slots=True)
class UnreadReason:
    """Reason why a file is not read, with the kind of the file and its size in bytes."""

    kind: str
    text: str
    size_bytes: int
    expected: bool = False
    """Whether the file is known to hold no text to train on."""
    is_data: bool = False
    """Whether the file holds data of a data set. Texts in the same folder may then describe the
    data, and are not read either."""


def files_to_read(
    folder: Path, text_key: str, allow_unread: bool
) -> tuple[list[Path], tuple[UnreadFiles, ...]]:
    """Returns (files of a folder that are read as a corpus, sorted by path; counts of the files
    that are not read).

    Raises:
        DataError: No file can be read, a folder cannot be listed, or a link leads out of the
            folder. Without `allow_unread`, also: The unread files hold more bytes than the files
            that are read. Or an unread file is a pointer of Git LFS or a link whose target is
            missing.
    """
    found: dict[Path, DetectedFormat] = {}
    left: dict[Path, UnreadReason] = {}
    for file in sorted(_walk(folder)):
        reason = _not_opened(file, folder)
        if reason is None:
            found[file] = _detected(file)
            reason = _not_text(file, found[file], text_key)
        if reason is not None:
            left[file] = reason
            found.pop(file, None)
    linked = {file.resolve() for file in found if file.is_symlink()}
    for file in list(found):
        if not file.is_symlink() and not file_extensions(file)[0] and file.resolve() in linked:
            found.pop(file)  # Another file is a link to this file, and is read instead.
    plain = [
        file
        for file, kind in found.items()
        if kind.kind == "text" and file_extensions(file)[0] not in TEXT_ENDS
    ]
    # Text files without an extension are left out, unless all files are such files. Then they are
    # the corpus.
    if len(plain) < len(found):
        for file in plain:
            found.pop(file)
            left[file] = UnreadReason(_kind(file), "text, but not named .txt", _size(file))
    _leave_out_what_is_not_trained(folder, found, left)
    unread = _counted(folder, left)
    _check(folder, list(found), unread, allow_unread)
    return list(found), unread


def _walk(folder: Path) -> Iterator[Path]:
    """Yields the paths of all files below a folder. Links to folders are yielded and not followed.

    Raises:
        DataError: A folder cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be listed ({error.strerror}).") from error

    for place, folders, names in os.walk(folder, onerror=refuse):
        for name in names:
            yield Path(place, name)
        for name in folders:
            if Path(place, name).is_symlink():
                yield Path(place, name)


def _not_opened(file: Path, folder: Path) -> UnreadReason | None:
    """Returns the reason why a file must not be opened, or None if it may be opened.

    Raises:
        DataError: The file is a link out of the folder, perhaps to a file of another user. Links
            into the cache of the Hugging Face hub are allowed.
    """
    inside = file.relative_to(folder)
    if any(part.startswith(".") for part in inside.parts):
        return UnreadReason("hidden", "hidden files are not read", _size(file), expected=True)
    if file.is_symlink():
        return _link(file, folder.resolve())
    if not file.is_file():
        return UnreadReason("special", "neither a file nor a folder", 0)
    return None


def _link(file: Path, folder: Path) -> UnreadReason | None:
    """Returns the reason why a link is not read, or None if it leads to a file of the folder.

    Raises:
        DataError: The link leads out of the folder. Links into the cache of the Hugging Face hub
            are allowed.
    """
    try:
        target = file.resolve()
    except RuntimeError:  # Only Python 3.11 and 3.12 raise RuntimeError.
        return UnreadReason("missing link", "a link that leads back to itself", 0)
    if not target.exists():
        text = f"a link to {os.readlink(file)}, which is missing (git-annex: `git annex get`)"
        return UnreadReason("missing link", text, 0)
    allowed = (folder, folder.parent.parent / "blobs")
    is_inside = any(target.is_relative_to(place) for place in allowed)
    if is_inside and target.is_dir():
        return UnreadReason("link", "a link to a folder that is read itself", 0, expected=True)
    if is_inside and target.is_file():
        return None
    if is_inside:
        return UnreadReason("special", "neither a file nor a folder", 0)
    end, _ = file_extensions(file)
    if target.is_dir() or end in TEXT_ENDS | LINES_ENDS | TABLE_ENDS | {"", ".json"}:
        raise DataError(
            f"{file}: a link to {target}, which is not in this folder. Remove the link. To use the"
            " target, give its path as a separate source."
        )
    return UnreadReason("link", "a link out of this folder", 0)


def _detected(file: Path) -> DetectedFormat:
    """Returns the format of a file.

    A file with the extension of a text is opened only if it is small enough to be a pointer of Git
    LFS.
    """
    end, packed = file_extensions(file)
    if end in TEXT_ENDS and not packed and _size(file) > POINTER_BYTES:
        return DetectedFormat("text")
    try:
        return detect(file)
    except OSError as error:
        if end in TEXT_ENDS | LINES_ENDS | TABLE_ENDS | {"", ".json"}:
            # The reader of the file reports why it cannot be opened.
            return DetectedFormat("lines")
        return DetectedFormat("other", reason=f"cannot be opened ({error.strerror})")


def _not_text(file: Path, found: DetectedFormat, text_key: str) -> UnreadReason | None:
    """Returns the reason why a file is not read, or None if it is read. The content and the name of
    the file decide.
    """
    end, _ = file_extensions(file)
    size = _size(file)
    if found.kind == "pointer":
        return UnreadReason("Git LFS", found.reason, found.size_bytes, is_data=True)
    was_named = end in TEXT_ENDS | LINES_ENDS | TABLE_ENDS
    if not was_named and (file.name.startswith("_") or size == 0):
        return UnreadReason("marker", "a marker or an empty file", size, expected=True)
    if not was_named and CARD.fullmatch(file.stem):
        return UnreadReason("description", "describes the data", size, expected=True)
    if found.kind == "other":
        return UnreadReason(_kind(file), found.reason, size)
    if found.kind in ("lines", "json") and found.row is not None:
        if text_under(found.row, text_key) is None:
            text = f"JSON without {text_key!r} (found: {keys_of(found.row)}){OTHER_KEY}"
            return UnreadReason(_kind(file), text, size, is_data=found.compression is not None)
    if found.kind == "text" and end not in TEXT_ENDS | {""}:
        return UnreadReason(_kind(file), "not one of the formats that are read", size)
    return None


def _kind(file: Path) -> str:
    return "".join(file_extensions(file)) or "without an end"


def _size(file: Path) -> int:
    try:
        return file.lstat().st_size if file.is_symlink() else file.stat().st_size
    except OSError:
        return 0


def _leave_out_what_is_not_trained(
    folder: Path, found: dict[Path, DetectedFormat], left: dict[Path, UnreadReason]
) -> None:
    """Moves files that are not training text from `found` to `left`.

    These files are splits other than `train`. In the folder of a data set, they are also texts that
    describe the data, and files that the library `datasets` caches.
    """
    tables = [file for file, kind in found.items() if kind.kind == "table"]
    data = [file for file, kind in found.items() if kind.kind != "text"]
    data += [file for file, reason in left.items() if reason.is_data]
    is_clone = (folder / ".gitattributes").is_file()
    looked_at = list(found) if data else []
    for file in looked_at:
        is_text = found[file].kind == "text"
        is_of_clone = is_clone and file_extensions(file)[0] in (".md", ".py")
        if is_text and (CARD.fullmatch(file.stem) or is_of_clone):
            left[file] = UnreadReason(
                "description", "describes the data", _size(file), expected=True
            )
        elif tables and file.name.startswith("cache-"):
            left[file] = UnreadReason("cache", "written by datasets for itself", _size(file), True)
    others = _files_beside_train(folder, found)
    if data:
        others |= _files_of_other_splits(folder, found)
    for file in others - left.keys():
        left[file] = UnreadReason("split", "another split than train", _size(file), True)
    for file in left:
        found.pop(file, None)


def _files_of_other_splits(folder: Path, found: dict[Path, DetectedFormat]) -> set[Path]:
    """Returns the files of a data set whose paths name a split, but not `train`.

    Returns no files if no path names `train`.
    """
    splits = {file: SPLIT.findall(file.relative_to(folder).as_posix()) for file in found}
    if not any("train" in names for names in splits.values()):
        return set()
    return {file for file, names in splits.items() if names and "train" not in names}


def _files_beside_train(folder: Path, found: dict[Path, DetectedFormat]) -> set[Path]:
    """Returns the files whose path names a split other than `train`, if the same path with `train`
    in place of that split exists.

    An example is `TinyStories-valid.txt` beside `TinyStories-train.txt`. Numbers in the paths may
    differ. Program code and marked-up text (.py, .md, .rst) are not compared, so a repository of
    code is read as a whole.
    """
    paths: dict[Path, tuple[str, ...]] = {}
    for file, kind in found.items():
        if kind.kind != "text" or file_extensions(file)[0] in (".txt", ""):
            paths[file] = Path(re.sub(r"\d+", "0", file.relative_to(folder).as_posix())).parts
    known = {parts[:depth] for parts in paths.values() for depth in range(1, len(parts) + 1)}
    others = set[Path]()
    for file, parts in paths.items():
        for depth, part in enumerate(parts):
            train = OTHER_SPLIT.sub("train", part)
            if train != part and (*parts[:depth], train) in known:
                others.add(file)
    return others


def _counted(folder: Path, left: dict[Path, UnreadReason]) -> tuple[UnreadFiles, ...]:
    """Returns number and size of the unread files, one entry for each kind and reason.

    Kinds that may hold training text come first. Otherwise, kinds are ordered by size, the largest
    first.
    """
    groups = defaultdict[tuple[str, str], list[Path]](list)
    for file, reason in left.items():
        groups[reason.kind, reason.text.partition(" (")[0]].append(file)
    unread = []
    for (kind, _), files in groups.items():
        first = files[0]
        group = UnreadFiles(
            kind=kind,
            reason=left[first].text,
            files=len(files),
            size_bytes=sum(left[file].size_bytes for file in files),
            example=first.relative_to(folder.parent).as_posix(),
            expected=left[first].expected,
        )
        unread.append(group)
    return tuple(sorted(unread, key=lambda it: (it.expected, -it.size_bytes, it.kind, it.example)))


def _check(
    folder: Path,
    files: list[Path],
    unread: tuple[UnreadFiles, ...],
    allow_unread: bool,
) -> None:
    """Raises DataError if too little of a folder would be read: no file, or only a small part of
    the data. A folder of which no file is read is always refused. Without `allow_unread`, a folder
    is also refused if its unread files hold more bytes than the files that are read, or if an
    unread file is a pointer of Git LFS or a broken link.
    """
    lost = [it for it in unread if not it.expected]
    named = "".join(f"\n  {it}" for it in lost[:MOST_KINDS])
    if len(lost) > MOST_KINDS:
        named += f"\n  and {len(lost) - MOST_KINDS} other kinds"
    if not files:
        held = ""
        if named:
            held = f" It holds:{named}\n"
        raise DataError(f"{folder}: no files to read in this folder.{held} Allowed: {FORMATS}.")
    if allow_unread or not lost:
        return
    size = sum(file.stat().st_size for file in files)
    lost_size = sum(it.size_bytes for it in lost)
    is_pointer = any(it.kind in ("Git LFS", "missing link") for it in lost)
    if lost_size > size or is_pointer:
        count = sum(it.files for it in lost)
        raise DataError(
            f"{folder}: {counted(count, 'file')} with {lost_size / 1e6:,.2f} MB would not be read,"
            f" beside {counted(len(files), 'file')} with {size / 1e6:,.2f} MB that would:{named}\n"
            f"Read are {FORMATS}. Convert or fetch the others, give the files to read as sources of"
            " their own, or leave the others out: --allow-unread (allow_unread=True)."
        )
