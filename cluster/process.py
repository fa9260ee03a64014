"""Identity of a process: which process wrote a file, and whether that process still runs.

A pid alone does not identify a process. The kernel reuses the pid after the process has ended, and
the pid means nothing on another host or after a reboot.

All processes that a job has started end even if its supervisor is killed. The kernel kills a rank
when its supervisor dies (PR_SET_PDEATHSIG). Orphans of a rank become children of the nearest
subreaper among their ancestors, which kills its children until it has none. Standard library,
Linux.
"""

import contextlib
import ctypes
import dataclasses
import os
import signal
import socket
import time
from pathlib import Path

from cluster.record import Record, field_doc

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # Numbers of prctl options, from linux/prctl.h.
KILL_WAIT_S = 10.0
END_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""Signals after which a supervisor ends its job."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Process(Record):
    """Identity of one process, distinct from all processes that had or will have its pid."""

    pid: int = field_doc("process id")
    start_ticks: int = field_doc(
        "start time of the process in clock ticks since the boot: field 22 of /proc/PID/stat"
    )
    boot_id: str = field_doc("boot id of the kernel that runs or ran the process")
    host: str = field_doc("name of the host of the process")

    @classmethod
    def current(cls) -> "Process":
        """Returns the identity of the calling process."""
        pid = os.getpid()
        stat = _stat(pid)
        assert stat is not None, f"/proc/{pid}/stat of this very process cannot be read"
        return cls(
            pid=pid, start_ticks=int(stat[19]), boot_id=_boot_id(), host=socket.gethostname()
        )

    @property
    def is_here(self) -> bool:
        """Whether the process was started on this host. Otherwise `is_alive` is always false."""
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs on this host.

        A zombie does not count, since it has ended and only waits to be reaped.
        """
        if not self.is_here or self.boot_id != _boot_id():
            return False
        stat = _stat(self.pid)
        return stat is not None and int(stat[19]) == self.start_ticks and stat[0] not in "ZX"

    def names(self, folder: Path) -> bool:
        """Returns whether an argument of the process is the path of a folder. The command line of a
        supervisor contains its run directory.
        """
        try:
            words = Path(f"/proc/{self.pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return any(
            os.path.realpath(word) == os.fsencode(folder.resolve())
            for word in words
            if word.startswith(b"/")
        )

    def send_signal(self, signal_number: int) -> bool:
        """Sends a signal to this process and to no other process. Returns whether this process was
        alive.

        The kernel may give the pid of an ended process to another process. A pidfd refers to one
        process as long as it is open. Therefore the pidfd is opened first, and then the identity of
        its process is checked.
        """
        try:
            handle = os.pidfd_open(self.pid)
        except (OSError, OverflowError):
            return False
        try:
            if not self.is_alive:
                return False
            signal.pidfd_send_signal(handle, signal_number)
            return True
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)


def child_pids(pid: int) -> list[int]:
    """Returns the pids of the processes of this host whose parent is `pid`, including zombies."""
    candidates = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [child for child in candidates if (stat := _stat(child)) and int(stat[1]) == pid]


def become_rank(parent_pid: int) -> None:
    """Prepares a child process before it executes its command. The kernel will kill the child when
    its parent ends for any reason. Exits if the parent has ended already. Unblocks all signals.
    """
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def become_subreaper() -> None:
    """Makes this process, instead of the init process, the parent of its orphaned descendants."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants() -> None:
    """Kills the children of this process, then the orphans that they leave, until this process has
    no children. Gives up after KILL_WAIT_S seconds.
    """
    deadline = time.monotonic() + KILL_WAIT_S
    while (children := child_pids(os.getpid())) and time.monotonic() < deadline:
        for pid in children:
            with contextlib.suppress(PermissionError):  # The child runs as another user (setuid).
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _stat(pid: int) -> list[str] | None:
    """Returns the fields of /proc/PID/stat from the third field (state) on, or None if the process
    does not exist.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field, the name of the command, may contain spaces and brackets.
    return text.rpartition(")")[2].split()
