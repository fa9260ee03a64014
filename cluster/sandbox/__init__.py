"""A real Slurm on one machine, for tutorials and tests.

`python -m cluster.sandbox start | stop | status`. As root, every node has its own network, host
name, processes and mounts, so that nodes can be switched off and cables cut. Without root all nodes
share one host. Up in one or two seconds. Nothing is installed and no service of the machine is
touched; see `why_not` for what is missing.
"""

import contextlib
import dataclasses
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from cluster.process import Process
from cluster.record import ConfigError
from cluster.sandbox.layout import Layout, write_files
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
    install = f"apt-get install --no-install-recommends {packages}"
    return f"{', '.join(missing)} not found. On Debian or Ubuntu: {install}"


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
        """Returns a sandbox whose nodes are all idle; one that runs already as it is.

        Args:
            root: its directory, made for the caller alone; default: one per user below /tmp.
            num_nodes: simulated nodes.
            isolated: namespaces for each node; default: where this process may make them.
            accounting: with slurmdbd and MariaDB behind it, so that sacct works.

        Raises:
            JobError: something is missing, the directory is not the caller's own, or the daemons
                did not come up; then the message ends with their last words.
        """
        if reason := why_not(accounting):
            raise JobError(reason)
        directory = Path(root or default_root()).absolute()
        if running := cls.find(directory):
            return running
        layout = Layout(
            root=str(directory),
            num_nodes=num_nodes,
            isolated=can_isolate() if isolated is None else isolated,
            accounting=accounting,
        )
        stop(directory)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_own(directory)
        write_files(layout)
        # Its standard output ends as soon as find() finds it; it lives on.
        keeper = ["setsid", "--fork", sys.executable, "-m", "cluster.sandbox.keeper", layout.root]
        with layout.path("log", "keeper.log").open("ab") as log:
            subprocess.run(
                keeper,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=Path(__file__).parents[2],
                env=client_environment(),
            )
        sandbox = cls(layout)
        sandbox._wait_until_idle()
        return sandbox

    @classmethod
    def find(cls, root: str | os.PathLike[str] | None = None) -> Self | None:
        """Returns the sandbox that runs in a directory, or None; raises JobError as `is_own`."""
        found = left_in(Path(root or default_root()).absolute())
        return cls(found[0], was_running=True) if found and found[1].is_alive else None

    @property
    def site_file(self) -> str:
        """The site file by which jobs are sent here."""
        return str(self.layout.path("etc", "site.toml"))

    @property
    def environment(self) -> dict[str, str]:
        """What a client (sbatch, squeue, a notebook) must have in its environment."""
        return {"SLURM_CONF": str(self.layout.path("etc", "slurm.conf"))}

    def run(self, *command: str) -> str:
        """Returns what a Slurm client prints."""
        return slurm_command([*command], self.environment["SLURM_CONF"])

    def node_states(self) -> dict[str, str]:
        """Returns what Slurm thinks of each node, in its own word."""
        lines = self.run(
            "sinfo", "--noheader", "--Node", "--partition=batch", "--format=%N %t"
        ).splitlines()
        return dict(line.split() for line in lines)

    def cut(self, node: str) -> None:
        """Pulls a node's cable at the switch: the node goes on, its packets just get lost."""
        if not self.layout.isolated:
            raise JobError("the nodes have no cables: without root all share one network")
        subprocess.run(["ip", "link", "set", self.layout.cable(node), "nomaster"])

    def stop(self) -> None:
        """Ends all daemons and removes network, mounts and files."""
        stop(self.layout.root)

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + START_WAIT_S
        while self.find(self.layout.root) and time.monotonic() < deadline:
            with contextlib.suppress(JobError):  # the controller does not answer yet
                if set(self.node_states().values()) == {"idle"}:
                    return
            time.sleep(0.05)
        logs = [
            (file.name, file.read_text(errors="replace"))
            for file in sorted(self.layout.path("log").iterdir())
        ]
        said = "\n".join(
            f"{name}: {line}" for name, text in logs for line in text.splitlines()[-2:]
        )
        stop(self.layout.root, keep_files=True)
        raise JobError(f"the sandbox in {self.layout.root} did not come up: {said}")


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
            f"{directory} is no folder that you alone can write to: "
            f"{stat.filemode(found.st_mode)}, of user {found.st_uid}. "
            "A sandbox runs what lies in its own. Remove it, or give another: --root FOLDER."
        )
    return True


def left_in(directory: Path) -> tuple[Layout, Process] | None:
    """Returns the sandbox of a directory and its keeper, running or ended; None where there is
    none.

    Raises JobError as `is_own`.
    """
    if not is_own(directory):
        return None
    try:
        keeper = Process.read(directory / "keeper.json")
        return Layout.read(directory / "sandbox.json"), keeper
    except ConfigError:
        return None


def can_isolate() -> bool:
    """Whether this process may make nodes with a network, processes and mounts of their own."""
    probe = "unshare --uts --net --mount --pid --fork --mount-proc ip link set lo up".split()
    return os.geteuid() == 0 and subprocess.run(probe, capture_output=True).returncode == 0


def stop(root: str | os.PathLike[str] | None = None, keep_files: bool = False) -> bool:
    """Ends a sandbox, whatever is left of it, and removes its files; returns whether it ran.

    Without namespaces, jobs of one whose keeper was killed by SIGKILL have to be ended by hand.
    """
    directory = Path(root or default_root()).absolute()
    if (found := left_in(directory)) is None:
        return False
    layout, keeper = found
    was_running, deadline = keeper.send_signal(signal.SIGTERM), time.monotonic() + 30
    while keeper.is_alive and time.monotonic() < deadline:
        time.sleep(0.02)
    if layout.isolated:
        layout.start("network_down").wait()
    if not keep_files:
        shutil.rmtree(directory, ignore_errors=True)
    return was_running
