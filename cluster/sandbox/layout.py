"""What a sandbox consists of, and its files: the templates in `etc`, filled in."""

import dataclasses
import hashlib
import os
import pwd
import socket
import subprocess
from pathlib import Path
from string import Template
from typing import Any

from cluster.record import Record, field_doc


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout(Record):
    """What a sandbox consists of; kept in its directory as sandbox.json."""

    root: str = field_doc("its directory: configuration, state, sockets and logs")
    num_nodes: int = field_doc("simulated nodes", default=4)
    isolated: bool = field_doc(
        "each node has its own network, host name, processes and mounts; needs root"
    )
    accounting: bool = field_doc("with slurmdbd and MariaDB, so that sacct works", default=False)

    @property
    def nodes(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.num_nodes + 1)]

    @property
    def daemons(self) -> list[str]:
        """All that runs, in order of its start; see daemon.sh."""
        return [
            "munged",
            *(["mariadbd", "slurmdbd"] if self.accounting else []),
            "controller",
            *self.nodes,
        ]

    @property
    def tag(self) -> str:
        """Names interfaces and namespaces, so that two sandboxes do not meet."""
        return f"k{hashlib.sha256(self.root.encode()).hexdigest()[:5]}"

    @property
    def bridge(self) -> str:
        return f"{self.tag}br"

    def cable(self, node: str) -> str:
        """Returns the interface by which a node is plugged into the switch."""
        return f"{self.tag}v{node.removeprefix('node')}"

    def namespace(self, node: str) -> str:
        return f"{self.tag}-{node}"

    def path(self, *parts: str) -> Path:
        return Path(self.root, *parts)

    def start(self, name: str, **how: Any) -> subprocess.Popen:
        """Returns daemon.sh as a process that runs a daemon, or makes or removes the network."""
        return subprocess.Popen(
            ["bash", Path(__file__).with_name("daemon.sh"), name],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **self.values()},
            cwd="/",
            **how,
        )

    def values(self) -> dict[str, str]:
        """Returns what the templates and daemon.sh leave open."""
        host, number, count = (
            socket.gethostname().split(".")[0],
            int(self.tag[1:], 16),
            self.num_nodes,
        )
        # The first three bytes: a /24 of 198.18.0.0/15, which RFC 2544 reserves for benchmarks.
        network = f"198.{18 + number // 250 % 2}.{1 + number % 250}"
        port, first = 10000 + number % 4000 * 5, 30000 + number % 200 * 10
        # Device files that can pass for accelerators: Slurm takes character devices only.
        devices = all(Path(f"/dev/tty{number}").is_char_device() for number in range(8))
        values = {
            "root": self.root,
            "user": pwd.getpwuid(os.geteuid()).pw_name,
            "host": host,
            "num_nodes": str(count),
            "half": str(max(1, count // 2)),
            "isolated": "yes" if self.isolated else "",
            "tag": self.tag,
            "network": network,
            "controller_address": f"{network}.1",
            "controller_port": str(port),
            "database_port": str(port + 1),
            "storage": "slurmdbd" if self.accounting else "none",
            "tracked": "AccountingStorageTRES=gres/gpu" if self.accounting else "",
            "node_hosts": f"node[1-{count}]",
            "node_addresses": f"{network}.[11-{10 + count}]",
            "node_ports": f"{first}-{first + count - 1}",
            "node_names": "\n".join(f"{network}.{10 + n} node{n}" for n in range(1, count + 1)),
            "devices": "Gres=gpu:sandbox:8" if devices else "",
            "device_files": "Name=gpu Type=sandbox File=/dev/tty[0-7]" if devices else "",
            "task_setup": "",
        }
        if not self.isolated:
            here = "127.0.0.1"  # names of nodes that share one host resolve nowhere
            values |= {"controller_address": here, "node_addresses": here, "node_hosts": host}
            values["task_setup"] = f'"export MASTER_ADDR={here}"'
        return values


def write_files(layout: Layout) -> None:
    """Writes everything that the daemons read, into a directory that is the caller's alone."""
    # scratch: the same path with another file system on each node
    for folder in ("etc", "state", "log", "run", "scratch"):
        layout.path(folder).mkdir(parents=True, exist_ok=True)
    values, templates = layout.values(), Path(__file__).with_name("etc").iterdir()
    files = {
        file.name: Template(file.read_text()).substitute(values).encode() for file in templates
    }
    for name, content in (files | {"munge.key": os.urandom(128)}).items():
        file = layout.path("etc", name)
        file.unlink(missing_ok=True)
        file.touch(0o600, exist_ok=False)  # a new file, not where a link leads
        file.write_bytes(content)
    layout.write(layout.path("sandbox.json"))
