"""A sandbox: a real Slurm with several simulated nodes on one machine, for tutorials and tests.

`python -m cluster.sandbox start | stop | status`. As root, every node has its own network, host
name, processes and mounts, so that tests can switch nodes off and disconnect them. Without root all
nodes share one host. A start takes one or two seconds. The sandbox installs nothing and changes no
service of the machine. `why_not` names missing programs.
"""

import contextlib
import dataclasses
import hashlib
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from string import Template
from typing import Any

from cluster.interpreter import source_command
from cluster.process import Process
from cluster.record import ConfigError, Record, counted, field_doc
from cluster.slurm.queries import client_environment, slurm_command
from cluster.state import JobError

PACKAGES = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2"
ACCOUNTING_PACKAGES = "slurmdbd slurm-wlm-mysql-plugin mariadb-server"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip")
ACCOUNTING_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db")
START_WAIT_S = 60.0
LONGEST_SOCKET = 107
"""Largest number of bytes in the path of a Unix socket on Linux (`sun_path` in unix(7))."""
LARGEST_JOB, LARGEST_STEP = 99_999, 2**32 - 1
"""Largest numbers of a job and of a step in the name of a socket that slurmd makes for each step of
a job. Steps of the batch script have numbers just below 2^32 (slurm.h)."""
SYSTEM_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"


def why_not(accounting: bool = False) -> str | None:
    """Returns a message if no sandbox can run on this machine: the reason, and what to do. Returns
    None if a sandbox can run.

    `accounting` is whether the sandbox needs slurmdbd and MariaDB.
    """
    if sys.platform != "linux":
        return f"a sandbox needs Linux, this is {sys.platform}"
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    wanted = PROGRAMS
    packages = PACKAGES
    if accounting:
        wanted = (*PROGRAMS, *ACCOUNTING_PROGRAMS)
        packages = f"{PACKAGES} {ACCOUNTING_PACKAGES}"
    missing = [program for program in wanted if shutil.which(program, path=path) is None]
    if not missing:
        return None
    install = f"apt-get install --no-install-recommends {packages}"
    return f"{', '.join(missing)} not found. On Debian or Ubuntu: {install}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sandbox(Record):
    """Content of sandbox.json: the settings of a sandbox, which is a Slurm cluster simulated on one
    machine. The methods start, query and stop the sandbox.
    """

    root: str = field_doc("folder of the sandbox with its configuration, state, sockets and logs")
    num_nodes: int = field_doc("number of simulated nodes", default=4)
    isolated: bool = field_doc(
        "whether each node has its own network, host name, processes and mounts, which requires"
        " root"
    )
    accounting: bool = field_doc(
        "whether slurmdbd and MariaDB run, so that sacct works", default=False
    )
    shift: int = field_doc(
        "number of IP networks that were skipped because other sandboxes use them; chooses the"
        " network of this sandbox",
        default=0,
    )
    was_running: bool = field_doc(
        "whether `start` has found the sandbox already running; only the program that started it"
        " should stop it",
        default=False,
    )

    @classmethod
    def start(
        cls,
        root: str | os.PathLike[str] | None = None,
        *,
        num_nodes: int = 4,
        isolated: bool | None = None,
        accounting: bool = False,
    ) -> "Sandbox":
        """Starts a sandbox and returns it when all nodes are idle. If a sandbox already runs in the
        directory, returns that sandbox unchanged.

        Args:
            root: directory of the sandbox, accessible only to its user. Default: one per user below
                /tmp.
            num_nodes: number of simulated nodes.
            isolated: whether each node has its own namespaces. Default: whether this process may
                make namespaces.
            accounting: whether slurmdbd and MariaDB run too, so that sacct works.

        Raises:
            JobError: Programs are missing, the path of the directory is too long, the directory
                does not belong to the user, or a daemon does not start. In the last case, the
                message ends with the last lines of the logs.
        """
        if reason := why_not(accounting):
            raise JobError(reason)
        directory = Path(root or default_root()).absolute()
        if running := cls.find(directory):
            return running
        _check_length(directory, num_nodes)
        if isolated is None:
            isolated = can_isolate()
        sandbox = cls(
            root=str(directory),
            num_nodes=num_nodes,
            isolated=isolated,
            accounting=accounting,
        )
        stop_sandbox(directory)
        while sandbox.isolated and _is_of_this_machine(sandbox.values()["controller_address"]):
            sandbox = sandbox.replace(shift=sandbox.shift + 1)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_own(directory)
        write_configuration(sandbox)
        # `run` returns when the keeper has written keeper.json, by which `find` finds the sandbox,
        # and closes its standard output. The keeper continues to run.
        keeper = ["setsid", "--fork", *source_command("cluster.sandbox.keeper", sandbox.root)]
        with sandbox.path("log", "keeper.log").open("ab") as log:
            subprocess.run(
                keeper,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=Path(__file__).parents[2],
                env=client_environment(),
            )
        sandbox._wait_until_idle()
        return sandbox

    @classmethod
    def find(cls, root: str | os.PathLike[str] | None = None) -> "Sandbox | None":
        """Returns the sandbox that runs in a directory, or None.

        Raises:
            JobError: Another user may have written to the directory, see `is_own`.
        """
        found = read_sandbox(Path(root or default_root()).absolute())
        if found is None:
            return None
        sandbox, keeper = found
        return sandbox.replace(was_running=True) if keeper.is_alive else None

    @property
    def nodes(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.num_nodes + 1)]

    @property
    def daemons(self) -> list[str]:
        """Names of all daemons in order of their start. The script daemon.sh starts the daemon
        whose name is its argument.
        """
        databases = ["mariadbd", "slurmdbd"] if self.accounting else []
        return ["munged", *databases, "controller", *self.nodes]

    @property
    def tag(self) -> str:
        """Prefix of the names of the sandbox's network interfaces and namespaces. The prefix is
        made from a hash of the directory, so that two sandboxes use different names.
        """
        return f"k{hashlib.sha256(self.root.encode()).hexdigest()[:5]}"

    def cable(self, node: str) -> str:
        """Returns the name of the network interface that connects a node to the switch."""
        return f"{self.tag}v{node.removeprefix('node')}"

    def path(self, *parts: str) -> Path:
        return Path(self.root, *parts)

    def daemon(self, name: str, **how: Any) -> subprocess.Popen:
        """Starts daemon.sh and returns its process. `name` is one of `daemons`, or `network_up` or
        `network_down`, which makes or removes the network. `how` are further arguments of
        `subprocess.Popen`.
        """
        return subprocess.Popen(
            ["bash", Path(__file__).with_name("daemon.sh"), name],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **self.values()},
            cwd="/",
            **how,
        )

    @property
    def site_file(self) -> str:
        """Path of the site file with which jobs are submitted to the sandbox."""
        return str(self.path("etc", "site.toml"))

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that a client of the sandbox (sbatch, squeue, a notebook) needs."""
        return {"SLURM_CONF": str(self.path("etc", "slurm.conf"))}

    def run(self, *command: str) -> str:
        """Returns the output of a Slurm command that runs in the sandbox, such as squeue."""
        return slurm_command([*command], self.environment["SLURM_CONF"])

    def node_states(self) -> dict[str, str]:
        """Returns the state of each node by node name. The state is Slurm's word, such as
        `idle`.
        """
        lines = self.run(
            "sinfo", "--noheader", "--Node", "--partition=batch", "--format=%N %t"
        ).splitlines()
        return dict(line.split() for line in lines)

    def disconnect_node(self, node: str) -> None:
        """Disconnects a node from the switch. The node keeps running, but its packets are lost.

        Raises:
            JobError: The nodes share one network, because the sandbox runs without root.
        """
        if not self.isolated:
            raise JobError("the nodes have no cables: without root all share one network")
        subprocess.run(["ip", "link", "set", self.cable(node), "nomaster"])

    def stop(self) -> None:
        """Ends all daemons of the sandbox, and removes its network, mounts and files."""
        stop_sandbox(self.root)

    def values(self) -> dict[str, str]:
        """Returns the values of the placeholders in the configuration templates, by name. daemon.sh
        reads the values as environment variables.
        """
        host = socket.gethostname().split(".")[0]
        number = int(self.tag[1:], 16) + self.shift
        count = self.num_nodes
        # The first three bytes of a /24 network in 198.18.0.0/15, which RFC 2544 reserves for
        # benchmarks.
        network = f"198.{18 + number // 250 % 2}.{1 + number % 250}"
        port = 10000 + number % 4000 * 5
        first = 30000 + number % 200 * 10
        # These terminals represent accelerators, since Slurm accepts only character devices as
        # GPUs.
        has_devices = all(Path(f"/dev/tty{number}").is_char_device() for number in range(8))
        values = {
            "root": self.root,
            "user": pwd.getpwuid(os.geteuid()).pw_name,
            "host": host,
            "num_nodes": str(count),
            "half": str(max(1, count // 2)),
            "isolated": "",
            "tag": self.tag,
            "network": network,
            "controller_address": f"{network}.1",
            "controller_port": str(port),
            "database_port": str(port + 1),
            "storage": "none",
            "tracked": "",
            "node_hosts": f"node[1-{count}]",
            "node_addresses": f"{network}.[11-{10 + count}]",
            "node_ports": f"{first}-{first + count - 1}",
            "node_names": "\n".join(f"{network}.{10 + n} node{n}" for n in range(1, count + 1)),
            "devices": "",
            "device_files": "",
            "task_setup": "",
        }
        if self.accounting:
            values |= {"storage": "slurmdbd", "tracked": "AccountingStorageTRES=gres/gpu"}
        if has_devices:
            values["devices"] = "Gres=gpu:sandbox:8"
            values["device_files"] = "Name=gpu Type=sandbox File=/dev/tty[0-7]"
        if self.isolated:
            values["isolated"] = "yes"
        else:
            here = "127.0.0.1"  # All nodes share one host, so their names cannot be resolved.
            values |= {"controller_address": here, "node_addresses": here, "node_hosts": host}
            values["task_setup"] = f'"export MASTER_ADDR={here} GLOO_SOCKET_IFNAME=lo"'
        return values

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + START_WAIT_S
        while self.find(self.root) and time.monotonic() < deadline:
            with contextlib.suppress(JobError):  # slurmctld may not answer yet.
                if set(self.node_states().values()) == {"idle"}:
                    return
            time.sleep(0.05)
        last_lines = []
        for file in sorted(self.path("log").iterdir()):
            lines = file.read_text(errors="replace").splitlines()
            last_lines += [f"{file.name}: {line}" for line in lines[-2:]]
        stop_sandbox(self.root, keep_files=True)
        said = "\n".join(last_lines)
        raise JobError(f"the sandbox in {self.root} did not come up: {said}")


def _is_of_this_machine(address: str) -> bool:
    """Returns whether an IP address belongs to this machine, for example to the network switch of
    another sandbox.
    """
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind((address, 0))
        return True
    return False


def default_root() -> Path:
    return Path(f"/tmp/kit-sandbox-{os.geteuid()}")


def is_own(directory: Path) -> bool:
    """Returns whether a directory exists. Raises an error if it exists and another user may have
    written to it, because a sandbox runs the files of its directory.

    Raises:
        JobError: The directory belongs to another user, other users can write to it, or it is no
            directory.
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


def read_sandbox(directory: Path) -> tuple[Sandbox, Process] | None:
    """Returns (sandbox of a directory, process of its keeper), or None if the directory has no
    sandbox. The keeper, which runs the daemons, may have ended.

    Raises:
        JobError: Another user may have written to the directory, see `is_own`.
    """
    if not is_own(directory):
        return None
    try:
        keeper = Process.read(directory / "keeper.json")
        return Sandbox.read(directory / "sandbox.json"), keeper
    except ConfigError:
        return None


def _check_length(directory: Path, num_nodes: int) -> None:
    """Raises JobError if the paths of Slurm's sockets would be too long. Slurm would then hold each
    job with the reason "launch failed".
    """
    node = f"node{num_nodes}"
    file = directory / "nodes" / node / "spool" / f"{node}_{LARGEST_JOB}.{LARGEST_STEP}"
    if (excess := len(os.fsencode(file)) - LONGEST_SOCKET) > 0:
        raise JobError(
            f"{directory}: the path is too long for a sandbox, by {counted(excess, 'byte')}. The"
            f" paths of Slurm's sockets may have {LONGEST_SOCKET} bytes. Give a shorter directory."
        )


def can_isolate() -> bool:
    """Returns whether this process may make nodes with their own network, processes and mounts."""
    probe = "unshare --uts --net --mount --pid --fork --mount-proc ip link set lo up".split()
    return os.geteuid() == 0 and subprocess.run(probe, capture_output=True).returncode == 0


def stop_sandbox(root: str | os.PathLike[str] | None = None, keep_files: bool = False) -> bool:
    """Ends a sandbox or its remaining parts, and removes its files. Returns whether the sandbox
    ran.

    If the nodes have no namespaces of their own and the keeper was killed by SIGKILL, the jobs of
    the sandbox must be ended by hand.
    """
    directory = Path(root or default_root()).absolute()
    if (found := read_sandbox(directory)) is None:
        return False
    sandbox, keeper = found
    was_running = keeper.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 30
    while keeper.is_alive and time.monotonic() < deadline:
        time.sleep(0.02)
    if sandbox.isolated:
        sandbox.daemon("network_down").wait()
    if not keep_files:
        shutil.rmtree(directory, ignore_errors=True)
    return was_running


def write_configuration(sandbox: Sandbox) -> None:
    """Writes sandbox.json and all configuration files of the daemons. The sandbox's directory must
    be writable for this user only, since its files are run.
    """
    # In the folder `scratch`, each node mounts its own file system.
    for folder in ("etc", "state", "log", "run", "scratch"):
        sandbox.path(folder).mkdir(parents=True, exist_ok=True)
    values = sandbox.values()
    templates = Path(__file__).with_name("etc").iterdir()
    files = {
        file.name: Template(file.read_text()).substitute(values).encode() for file in templates
    }
    for name, content in (files | {"munge.key": os.urandom(128)}).items():
        file = sandbox.path("etc", name)
        file.unlink(missing_ok=True)
        file.touch(0o600, exist_ok=False)  # Raises an error instead of following a link.
        file.write_bytes(content)
    sandbox.write(sandbox.path("sandbox.json"))
