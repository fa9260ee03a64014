"""Opens, appends to and replaces files of a run, finds the owner of a folder, and detects a full
disk. All other modules open files of a run by functions of this module.

A run may belong to a colleague, or be in a folder in which colleagues may write. A colleague may
have replaced a file of the run. The file may be a link to a private file of the reader, a pipe that
blocks forever, or a device that never ends. Standard library only.
"""

import contextlib
import errno
import fcntl
import grp
import io
import os
import pwd
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

NO_RECORD = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.EINVAL,
    errno.ENXIO,
    errno.EFBIG,
)
"""Values of `errno` with which `read_small` fails if a record does not exist: the file is missing,
is not a plain file, or is too large. Any other value means that the file system fails."""
RECORD_BYTES = 16 << 20
"""Maximum number of bytes of a file that is read as a whole. No record is larger. Files that grow
with the run are read in pieces."""
FULL = (errno.ENOSPC, errno.EDQUOT)
RESERVE, RESERVE_BYTES = ".reserve", 128 << 10
"""Name, and size in bytes, of the file by which an attempt reserves disk space for the record of
its end. The record contains 16 KB of a log, up to six times as many bytes in JSON, and a few
sentences. An attempt cannot begin on a disk with less free space."""


def open_for_reading(file: Path, *, follows: bool = False) -> io.BufferedReader:
    """Returns a stream that reads a file. With `follows`, the file may be a symbolic link.

    Raises:
        OSError: The file is missing, or is a link, a folder, a pipe or a device.
    """
    flags = os.O_RDONLY if follows else os.O_RDONLY | os.O_NOFOLLOW
    return os.fdopen(_regular(file, flags), "rb")


def file_size(file: Path, *, follows: bool = False) -> int:
    """Returns the size of a file in bytes, without opening the file. With `follows`, the file may
    be a symbolic link.

    Raises:
        OSError: The file is missing, or is a link, a folder, a pipe or a device.
    """
    about = os.stat(file, follow_symlinks=follows)
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "not a plain file, but a link, folder, pipe or device", file)
    return about.st_size


def read_small(file: Path, *, limit_bytes: int = RECORD_BYTES, follows: bool = False) -> bytes:
    """Returns the content of a file of at most `limit_bytes` bytes. With `follows`, the file may be
    a symbolic link. All files of other users that are read as a whole are read by this function.

    Raises:
        OSError: The file is missing, is not a plain file, or is larger than `limit_bytes`.
    """
    with open_for_reading(file, follows=follows) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > limit_bytes:
            raise OSError(
                errno.EFBIG,
                f"has {size:,} bytes, more than the {limit_bytes:,} that are read of such a file",
                str(file),
            )
        return stream.read(size)  # `read` allocates `size` bytes at once.


def open_for_appending(file: Path, *, mode: int = 0o666) -> io.FileIO:
    """Returns an unbuffered stream that appends to a file. A missing file is created with the
    permissions `mode`, less those that the umask removes.

    Raises:
        OSError: The file is a link, a pipe or a device, or has further hard links, which may be in
            folders of other users.
    """
    handle = _regular(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, mode)
    if os.fstat(handle).st_nlink > 1:
        os.close(handle)
        raise OSError(
            errno.EMLINK, "a file with other names, which no file of a run has", str(file)
        )
    return io.FileIO(handle, "ab+")


def lock_file(file: Path) -> io.FileIO:
    """Opens a file that serves as a lock, and returns it. Creates the file if it is missing.

    Only the owner has permissions for the file. A user who can open a file can hold its lock, and
    would thereby delay or block the owner's work.

    Raises:
        OSError: The file is a link, a pipe or a device, or has further hard links.
    """
    stream = open_for_appending(file, mode=0o600)
    # Lock files of older versions of the kit can be read by other users.
    with contextlib.suppress(OSError):
        if stat.S_IMODE(os.fstat(stream.fileno()).st_mode) & 0o077:
            os.fchmod(stream.fileno(), 0o600)
    return stream


def try_lock(file: io.FileIO | int, wait_s: float) -> bool:
    """Tries to lock an open file or folder for at most `wait_s` seconds. Returns whether the caller
    has the lock now.

    The kernel releases the lock when the process ends. Returns True also if the file system
    supports no locks.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        except OSError:
            return True


def append_lines(file: Path, lines: bytes) -> None:
    """Appends lines in one write, so that the lines of two writers never mix.

    Raises:
        OSError: The file is a link, a pipe or a device, or has further hard links.
    """
    with open_for_appending(file) as stream:
        stream.write(line_break(stream) + lines)


def line_break(stream: io.FileIO) -> bytes:
    """Returns the bytes to write before the next line of a file: a line break if the last line of
    the file is torn, otherwise no bytes.
    """
    end = stream.seek(0, os.SEEK_END)
    return b"\n" if end and os.pread(stream.fileno(), 1, end - 1) != b"\n" else b""


def _regular(file: Path, flags: int, mode: int = 0o666) -> int:
    try:
        handle = os.open(file, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "a link, which no file of a run is", str(file)) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "a folder, a pipe or a device, and not a plain file", str(file))
    os.set_blocking(handle, True)
    return handle


def write_atomic(file: Path, content: str | bytes) -> None:
    """Replaces the content of a file by atomic rename. A reader sees the old or the new content,
    never a part of it.
    """
    if isinstance(content, str):
        content = content.encode()
    with replace_atomically(file) as stream:
        stream.write(content)


@contextlib.contextmanager
def replace_atomically(file: Path) -> Iterator[BinaryIO]:
    """Yields a stream. At the end of the block, the content of the stream replaces the content of
    `file` by atomic rename. If the block raises an error, `file` does not change.

    A reader sees the old or the new content, never a part of it. The umask decides who may read the
    file, as for any new file. The folder of the file is created, but not the parents of the folder:
    a deleted run directory must not reappear with a few files in it.
    """
    file.parent.mkdir(exist_ok=True)
    part = file.with_name(f".{file.name}.{os.urandom(4).hex()}")
    try:
        # Not made by `tempfile`, whose files only their owner can read.
        with part.open("xb") as stream:
            yield stream
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


class ErrorIgnoringOutput(io.FileIO):
    """An open file for the output of a process. If the disk is full or the file system fails, it
    discards the output and raises no error.
    """

    def write(self, words: Any, /) -> int:
        with contextlib.suppress(OSError):
            super().write(words)
        return len(words)


def ignore_output_errors() -> None:
    """Replaces stdout and stderr, so that this process continues if its output cannot be
    written.
    """
    for name, number in (("stdout", 1), ("stderr", 2)):
        # Output is not buffered, as with `python -u`.
        output = ErrorIgnoringOutput(number, "w", closefd=False)
        text = io.TextIOWrapper(output, "utf-8", "backslashreplace", write_through=True)
        setattr(sys, name, text)


def why_full(folder: Path) -> str | None:
    """Returns a message if the disk of a folder is full. Returns None if the disk is not full, or
    if its free space is unknown.

    A disk with less than twice RESERVE_BYTES counts as full. An attempt that has ended on a full
    disk may have freed RESERVE_BYTES by deleting the file RESERVE.
    """
    with contextlib.suppress(OSError):
        if (free := shutil.disk_usage(folder).free) < 2 * RESERVE_BYTES:
            return f"the disk is full: {free:,} bytes free"


def other_owner(folder: Path) -> str | None:
    """Returns the login name of the owner of a folder. Returns None if the owner is this user, or
    if the folder is missing, since this user may then create it.
    """
    try:
        owner = folder.stat().st_uid
    except OSError:
        return None
    if owner == os.geteuid():
        return None
    return user_name(owner)


def is_private(folder: Path) -> bool:
    """Returns whether a path is a folder (not a link) to which only this user may write."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return not other_owner(folder) and not other_writers(folder)


def user_name(number: int) -> str:
    """Returns the login name of a user id, or 'user NUMBER' if the system has no name for it."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def other_writers(folder: Path) -> str | None:
    """Returns a description of the other users who may write to a folder, such as 'all users' or
    'group NAME'. Returns None if only the owner may write to it.

    Many systems give each user a group of the same name. Such a group counts only if it has members
    other than the owner.
    """
    about = folder.stat()
    if about.st_mode & stat.S_IWOTH:
        return "all users"
    if not about.st_mode & stat.S_IWGRP:
        return None
    try:
        group = grp.getgrgid(about.st_gid)
    except KeyError:
        return f"group {about.st_gid}"
    owner = user_name(about.st_uid)
    if group.gr_name == owner and not {*group.gr_mem} - {owner}:
        return None
    return f"group {group.gr_name}"


def print_line(text: str) -> None:
    """Prints a line. Ignores errors of the output stream, such as a closed pipe or a full disk."""
    with contextlib.suppress(OSError):
        print(text, flush=True)
