"""Notes of a run: a text of its owner in the file notes.txt of the run directory. The dashboard and
the page of `kit watch --html` show the notes.
"""

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


def read_notes(directory: Path) -> str:
    """Returns the notes of the run in a directory. Returns "" if there are none.

    Control characters are replaced by visible symbols, since the file may be another user's. Notes
    with more than MOST_CHARACTERS are cut, and end with a sentence that says so.
    """
    try:
        with open_for_reading(directory / NOTES) as stream:
            data = stream.read(READ_BYTES)
    except OSError:
        return ""
    text = plain(data.decode(errors="replace").replace("\r\n", "\n"))
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}\n[{NOTES} has more text, which is not shown here.]"


def notes_are_editable(run: Run) -> bool:
    """Returns whether this user may write the notes of a run. The notes of a run on a cluster are
    written there, and those of another user's run by its owner. Notes that are too long to be shown
    as a whole cannot be edited in the dashboard.
    """
    is_shown_completely = len(read_notes(run.directory)) <= MOST_CHARACTERS
    return run.is_writable and not run.is_mirror and is_shown_completely


def write_notes(run: Run, text: str) -> None:
    """Replaces the notes of a run by atomic rename.

    Raises:
        JobError: The run belongs to another user.
        ConfigError: The text is too long, or the run is on a cluster.
        OSError: The file cannot be written.
    """
    run.check_writable("write notes into it")
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(
            f"notes: {len(text):,} characters are too many. Give at most {MOST_CHARACTERS:,}, or"
            " name a file with a longer text in the notes."
        )
    if not notes_are_editable(run):
        raise ConfigError(
            f"notes: {run.directory / NOTES} cannot be written here. Edit it on the cluster of the"
            " run or, if it is a long text, in an editor."
        )
    write_atomic(run.directory / NOTES, plain(text).encode(errors="replace"))
