"""Notes of a run: a text of its owner in the file notes.txt of the run directory. The dashboard and
the page of `kit watch --html` show the notes.
"""

import errno
from pathlib import Path

from cluster.files import open_for_reading, write_atomic
from kit.errors import ConfigError
from kit.run import Run
from kit.show.terminal import plain

NOTES = "notes.txt"
MOST_CHARACTERS = 20_000
"""Largest number of characters of the notes that are shown or stored."""
READ_BYTES = 4 * MOST_CHARACTERS + 1
"""Number of bytes that are read of the file. A character has at most four bytes."""


CONVERT = f"iconv -f LATIN1 -t UTF-8 {NOTES} > new.txt && mv new.txt {NOTES}"
"""Command that converts notes that an editor has written in Latin-1."""


def read_notes(directory: Path) -> str:
    """Returns the notes of the run in a directory. Returns "" if there are none.

    Control characters are replaced by visible symbols, since the file may be another user's. Bytes
    that are not UTF-8 are replaced by U+FFFD. Notes with more than MOST_CHARACTERS are cut. If the
    text is not the whole text of the file, it ends with a sentence that says so.
    """
    text, problem = _read(directory)
    return f"{text}\n[{problem}]" if problem else text


def _read(directory: Path) -> tuple[str, str]:
    """Returns (text of the notes, reason why a text in the dashboard must not replace the file).
    The reason is "" if the text is complete.
    """
    try:
        with open_for_reading(directory / NOTES) as stream:
            data = stream.read(READ_BYTES)
    except OSError as error:
        # The link of another user is replaced, and its target is neither read nor written.
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return "", ""
        return "", f"{NOTES} cannot be read ({error.strerror}), so it cannot be edited here."
    text = plain(data.decode(errors="replace").replace("\r\n", "\n"))
    if len(text) > MOST_CHARACTERS:
        problem = f"{NOTES} has more text, which is not shown here. Edit it in an editor."
        return text[:MOST_CHARACTERS], problem
    try:
        data.decode()
    except UnicodeDecodeError:
        problem = (
            f"{NOTES} is not UTF-8 text, so it cannot be edited here, and \N{REPLACEMENT CHARACTER}"
            f" stands for what could not be read. If it is in Latin-1, convert it: {CONVERT}"
        )
        return text, problem
    return text, ""


def notes_are_editable(run: Run) -> bool:
    """Returns whether this user may write the notes of a run. The notes of a run on a cluster are
    written there, and those of another user's run by its owner. Notes that cannot be shown
    completely, since they are too long or not UTF-8 text, cannot be edited in the dashboard.
    """
    return run.is_writable and not run.is_mirror and not _read(run.directory)[1]


def write_notes(run: Run, text: str) -> None:
    """Replaces the notes of a run by atomic rename.

    Raises:
        JobError: The run belongs to another user.
        ConfigError: The text is too long, or the run is on a cluster, or the text of the file could
            not be shown completely and would be lost.
        OSError: The file cannot be written.
    """
    run.check_writable("write notes into it")
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(
            f"notes: {len(text):,} characters are too many. Give at most {MOST_CHARACTERS:,}, or"
            " name a file with a longer text in the notes."
        )
    if run.is_mirror:
        raise ConfigError(
            f"notes: {run.directory / NOTES} cannot be written here. Edit it on the cluster of the"
            " run."
        )
    if problem := _read(run.directory)[1]:
        raise ConfigError(f"notes: not saved. {problem}")
    write_atomic(run.directory / NOTES, plain(text).encode(errors="replace"))
