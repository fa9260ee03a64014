"""The only ways in which files of a run are opened, appended to and replaced, whose it is, and what
a full disk costs.

A run may be a colleague's, or lie where colleagues write. Under the name of one of its files there
may be a link to a file of the reader, a pipe that blocks for ever, or a device without end.
Standard library only.
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
"""Error numbers of `read_small` that mean that there is no such record: the file is missing, or
something else has its name. Any other error means that the file system is in trouble."""
RECORD_BYTES = 16 << 20
"""More than any record takes; a file that grows with the run is read piece by piece."""
FULL = (errno.ENOSPC, errno.EDQUOT)
RESERVE, RESERVE_BYTES = ".reserve", 128 << 10
"""What an attempt keeps back for the record of its end: 16 KB of a log, in JSON up to six times as
many, and a few sentences. Where there is less room no attempt begins."""


def opened(file: Path, *, follows: bool = False) -> io.BufferedReader:
    """Returns a stream that reads a file; `follows` takes a link too.

    Raises:
        OSError: it is not there, or is a link, a pipe or a device.
    """
    flags = os.O_RDONLY if follows else os.O_RDONLY | os.O_NOFOLLOW
    return os.fdopen(_regular(file, flags), "rb")


def file_size(file: Path, *, follows: bool = False) -> int:
    """Returns the size of a file in bytes, without opening the file. With `follows`, the file may
    be a symbolic link.

    Raises:
        OSError: the file is missing, or is a link, a folder, a pipe or a device.
    """
    about = os.stat(file, follow_symlinks=follows)
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "not a plain file, but a link, folder, pipe or device", file)
    return about.st_size


def read_small(file: Path, *, limit_bytes: int = RECORD_BYTES, follows: bool = False) -> bytes:
    """Returns the content of a file of at most `limit_bytes` bytes. With `follows`, the file may be
    a symbolic link. All files of other people that are read as a whole are read here.

    Raises:
        OSError: as `opened`, or the file is larger than `limit_bytes`.
    """
    with opened(file, follows=follows) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > limit_bytes:
            raise OSError(
                errno.EFBIG,
                f"has {size:,} bytes, more than the {limit_bytes:,} that are read of such a file",
                str(file),
            )
        return stream.read(size)  # for which as much memory is taken first


def appending(file: Path, *, mode: int = 0o666) -> io.FileIO:
    """Returns an unbuffered stream that appends to a file. A missing file is created with the
    permissions `mode`, less those that the umask removes.

    Raises:
        OSError: the file is a link, a pipe or a device, or has further hard links, which may be in
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
        OSError: as `appending`.
    """
    stream = appending(file, mode=0o600)
    with contextlib.suppress(OSError):  # Older versions of the kit made it readable for others.
        if stat.S_IMODE(os.fstat(stream.fileno()).st_mode) & 0o077:
            os.fchmod(stream.fileno(), 0o600)
    return stream


def is_locked(file: io.FileIO | int, wait_s: float) -> bool:
    """Returns whether this caller has the lock of an open file or folder now.

    It waits for it so long at most. The lock falls with its process. True too where the file
    system has no locks.
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
    """Appends lines in one write, so that those of two writers never mix.

    Raises OSError as `appending`.
    """
    with appending(file) as stream:
        stream.write(line_break(stream) + lines)


def line_break(stream: io.FileIO) -> bytes:
    """Returns what must come before the next line of a file: a line break where its last line is
    torn, or nothing.
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
    """Replaces what a file holds in one step, as `replacement` does, by what is in memory."""
    if isinstance(content, str):
        content = content.encode()
    with replacement(file) as stream:
        stream.write(content)


@contextlib.contextmanager
def replacement(file: Path) -> Iterator[BinaryIO]:
    """Yields a stream whose content replaces that of a file in one step at the end of the block, if
    nothing fails.

    A reader sees the old or the new content, never a part of it; who may read it is the umask's
    choice, as for any file. The file's folder is made, but not those above: a run directory that
    was deleted must not come back as a stub.
    """
    file.parent.mkdir(exist_ok=True)
    part = file.with_name(f".{file.name}.{os.urandom(4).hex()}")
    try:
        with part.open("xb") as stream:  # not by `tempfile`, whose files are their owner's alone
            yield stream
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


class Words(io.FileIO):
    """An open file that drops what cannot be written, because the disk is full or the file system
    is in trouble.
    """

    def write(self, words: Any, /) -> int:
        with contextlib.suppress(OSError):
            super().write(words)
        return len(words)


def outlive_log() -> None:
    """Makes this process continue if what it prints cannot be written."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        words = Words(number, "w", closefd=False)  # as of python -u
        setattr(sys, name, io.TextIOWrapper(words, "utf-8", "backslashreplace", write_through=True))


def why_full(folder: Path) -> str | None:
    """Returns that the disk of a folder is full, in words, or None where it is not or nobody can
    tell.

    With no room but what an attempt has given back at its end, and hardly more, it counts as full.
    """
    with contextlib.suppress(OSError):
        if (free := shutil.disk_usage(folder).free) < 2 * RESERVE_BYTES:
            return f"the disk is full: {free:,} bytes free"


def other_owner(folder: Path) -> str | None:
    """Returns by name whose a folder is, or None where it is this user's, or is not there: then
    it can be made.
    """
    try:
        owner = folder.stat().st_uid
    except OSError:
        return None
    if owner == os.geteuid():
        return None
    return user_name(owner)


def is_private(folder: Path) -> bool:
    """Returns whether a path is a folder, no link, in which only this user may write."""
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
    """Returns a description of the other users who have write permission for a folder, such as
    'all users' or 'group NAME'. Returns None if only the owner has it.

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


def say(text: str) -> None:
    """Prints a line for people, if anyone can still read it."""
    with contextlib.suppress(OSError):
        print(text, flush=True)
