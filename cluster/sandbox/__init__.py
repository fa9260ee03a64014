"""A real Slurm on one machine, for tutorials and tests: `python -m cluster.sandbox start | stop | status`.

As root, every node has its own network, host name, processes and mounts, so that nodes can be switched off and cables
cut. Without root all nodes share one host. Up in one or two seconds. Nothing is installed and no service of the machine
is touched; see `why_not` for what is missing.
"""

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from cluster.process import Process
from cluster.sandbox import network
from cluster.sandbox.configuration import Layout, write_files
from cluster.slurm.queries import client_environment, slurm_command
from cluster.state import JobError

PACKAGES = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2"
ACCOUNTING_PACKAGES = "slurmdbd slurm-wlm-mysql-plugin mariadb-server"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip")
ACCOUNTING_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db")
START_WAIT_S = 60.0
SYSTEM_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"


def why_not(accounting: bool = False) -> str | None:
    """Returns why no sandbox can run here and what to do about it, or None when one can."""
    if sys.platform != "linux":
        return f"a sandbox needs Linux, this is {sys.platform}"
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    wanted = PROGRAMS + (ACCOUNTING_PROGRAMS if accounting else ())
    missing = [program for program in wanted if shutil.which(program, path=path) is None]
    if not missing:
        return None
    packages = PACKAGES + (f" {ACCOUNTING_PACKAGES}" if accounting else "")
    return f"{', '.join(missing)} not found. On Debian or Ubuntu: apt-get install --no-install-recommends {packages}"


@dataclasses.dataclass(frozen=True)
class Sandbox:
    """A running sandbox."""

    layout: Layout
    was_running: bool = False
    """Whether it was found: then it is for whoever started it to stop."""

    @classmethod
    def start(
        cls,
        root: str | os.PathLike[str] | None = None,
        *,
        num_nodes: int = 4,
        isolated: bool | None = None,
        accounting: bool = False,
    ) -> Self:
        """Returns a sandbox whose nodes are all idle; one that runs already is returned as it is, `was_running` true.

        Args:
            root: its directory, made for the caller alone; default: one per user below /tmp.
            num_nodes: simulated nodes.
            isolated: namespaces for each node; default: where this process may make them.
            accounting: with slurmdbd and MariaDB behind it, so that sacct works.

        Raises:
            JobError: something is missing, the directory is not the caller's own, or the daemons did not come up; then
                the message ends with their last words.
        """
        if reason := why_not(accounting):
            raise JobError(reason)
        directory = Path(root or default_root()).absolute()
        isolated = network.is_possible() if isolated is None else isolated
        layout = Layout(root=str(directory), num_nodes=num_nodes, isolated=isolated, accounting=accounting)
        if running := cls.find(directory):
            return running
        stop(directory)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700, parents=True)
        is_own(directory)
        write_files(layout)
        with layout.path("log", "keeper.log").open("ab") as log:
            subprocess.run(
                [sys.executable, "-m", "cluster.sandbox.keeper", layout.root], stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True, cwd=Path(__file__).parents[2], env=client_environment(None),
                check=True,
            )  # fmt: skip
        sandbox = cls(layout)
        sandbox._wait_until_idle()
        return sandbox

    @classmethod
    def find(cls, root: str | os.PathLike[str] | None = None) -> Self | None:
        """Returns the sandbox that runs in a directory, or None; raises JobError as `is_own`."""
        directory = Path(root or default_root()).absolute()
        if not is_own(directory):
            return None
        try:
            sandbox = cls(Layout.read(directory / "sandbox.json"), was_running=True)
            sandbox._order("")
        except (OSError, ValueError):
            return None
        return sandbox

    @property
    def site_file(self) -> str:
        """The site file by which jobs are sent here."""
        return str(self.layout.path("etc", "site.toml"))

    @property
    def environment(self) -> dict[str, str]:
        """What a client (sbatch, squeue, a notebook) must have in its environment."""
        return {"SLURM_CONF": self.layout.slurm_conf}

    def run(self, *command: str) -> str:
        """Returns what a Slurm client prints."""
        return slurm_command([*command], self.layout.slurm_conf)

    def node_states(self) -> dict[str, str]:
        """Returns what Slurm thinks of each node, in its own word."""
        lines = self.run("sinfo", "--noheader", "--Node", "--partition=batch", "--format=%N %t").splitlines()
        return dict(line.split() for line in lines)

    def power_off(self, node: str) -> None:
        """Ends a node and all its processes at once; nothing answers at its address any more."""
        self._order(f"off {node}")
        if self.layout.isolated:
            self.cut(node)

    def power_on(self, node: str) -> None:
        """Starts a node that was switched off."""
        if self.layout.isolated:
            self.heal(node)
        self._order(f"on {node}")

    def cut(self, node: str) -> None:
        """Cuts a node off silently: it goes on, its packets get lost."""
        network.cut(self.layout, node)

    def heal(self, node: str) -> None:
        """Joins a node again that was cut off."""
        network.heal(self.layout, node)

    def recover(self, node: str) -> None:
        """Brings back a node that was switched off or cut off, and has Slurm use it, as an administrator would."""
        self.power_on(node)
        update = ("scontrol", "update", f"NodeName={node}", "Reason=recovered")
        self.run(*update, "State=down")  # first: Slurm would wait long for a job to end that is no longer there
        try:
            self.run(*update, "State=resume")
        except JobError:  # Slurm's word for a node that has come back by itself in between
            if self.node_states()[node].startswith(("down", "drain", "drng")):
                raise

    def restart_controller(self) -> None:
        """Ends the controller; it comes back after ten seconds with its saved state."""
        self._order("restart")

    def stop(self) -> None:
        """Ends all daemons and removes network, mounts and files."""
        stop(self.layout.root)

    def _order(self, order: str) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(str(self.layout.path("run", "keeper.socket")))
            connection.sendall(order.encode() or b"hello")
            return connection.recv(256).decode()

    def _wait_until_idle(self) -> None:
        keeper = Process.read(self.layout.path("keeper.json"))
        deadline = time.monotonic() + START_WAIT_S
        while True:
            try:
                if set(self.node_states().values()) == {"idle"} and self.find(self.layout.root):
                    return
            except (JobError, subprocess.TimeoutExpired):
                pass
            if not keeper.is_alive or time.monotonic() > deadline:
                said = self._last_words()
                stop(self.layout.root, keep_files=True)
                raise JobError(f"the sandbox in {self.layout.root} did not come up: {said}")
            time.sleep(0.05)

    def _last_words(self) -> str:
        words = []
        for name in ("keeper.log", "controller.out", "slurmctld.log", "slurmd.node1.log", "node1.out", "munged.log"):
            file = self.layout.path("log", name)
            text = file.read_text(errors="replace").strip() if file.exists() else ""
            words += [f"{name}: {line}" for line in text.splitlines()[-2:]]
        return "\n".join(words)


def default_root() -> Path:
    return Path(f"/tmp/kit-sandbox-{os.geteuid()}")


def is_own(directory: Path) -> bool:
    """Returns whether a directory is there, in which nobody but the caller can have put anything.

    Raises:
        JobError: it may be somebody else's; what lies there is believed, and run.
    """
    try:
        found = directory.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise JobError(
            f"{directory} is no folder that you alone can write to: {stat.filemode(found.st_mode)}, of user "
            f"{found.st_uid}. A sandbox runs what lies in its own. Remove it, or give another: --root FOLDER."
        )
    return True


def stop(root: str | os.PathLike[str] | None = None, keep_files: bool = False) -> bool:
    """Ends a sandbox, whatever is left of it, and removes its files; returns whether one was running."""
    directory = Path(root or default_root()).absolute()
    sandbox = Sandbox.find(directory)
    if sandbox:
        sandbox._order("stop")
        address = sandbox.layout.path("run", "keeper.socket")
        deadline = time.monotonic() + 30
        while address.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    for pid in _left_behind(directory):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if not is_own(directory):
        return False
    try:
        network.remove_left_overs(Layout.read(directory / "sandbox.json"))
    except ValueError:
        return sandbox is not None
    if not keep_files:
        shutil.rmtree(directory, ignore_errors=True)
    return sandbox is not None


def _left_behind(root: Path) -> list[int]:
    """Returns daemons and job processes of a sandbox; there are some only if its keeper was killed by SIGKILL."""
    mark, found = f"SLURM_CONF={root / 'etc' / 'slurm.conf'}".encode(), []
    daemons = ("slurmctld", "slurmd", "slurmdbd", "slurmstepd", "munged", "mariadbd")
    for entry in Path("/proc").iterdir():
        try:
            variables = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
            in_job = any(variable.startswith(b"SLURM_JOB_ID=") for variable in variables)
            if mark in variables and (in_job or (entry / "comm").read_text().strip() in daemons):
                found.append(int(entry.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found
