"""The files of a sandbox: slurm.conf, gres.conf, hosts and the first process of a node, as text.

Source of every option: https://slurm.schedmd.com/slurm.conf.html; what differs from a production file says why.
"""

import dataclasses
import hashlib
import os
import socket
from pathlib import Path

from cluster.record import Record, field_doc


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout(Record):
    """What a sandbox consists of; kept in its directory as sandbox.json."""

    root: str = field_doc("its directory: configuration, state, sockets and logs")
    num_nodes: int = field_doc("simulated nodes", default=4)
    isolated: bool = field_doc("each node has its own network, host name, processes and mounts; needs root")
    accounting: bool = field_doc("with slurmdbd and MariaDB, so that sacct works", default=False)

    @property
    def nodes(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.num_nodes + 1)]

    @property
    def tag(self) -> str:
        """Names interfaces and namespaces, so that two sandboxes do not meet."""
        return f"k{hashlib.sha256(self.root.encode()).hexdigest()[:5]}"

    @property
    def number(self) -> int:
        return int(self.tag[1:], 16)

    @property
    def network(self) -> str:
        """The first three bytes: a /24 of 198.18.0.0/15, which RFC 2544 reserves for benchmarks."""
        return f"198.{18 + self.number // 250 % 2}.{1 + self.number % 250}"

    @property
    def controller_address(self) -> str:
        return f"{self.network}.1" if self.isolated else "127.0.0.1"

    @property
    def controller_port(self) -> int:
        return 10000 + self.number % 4000 * 5

    def node_address(self, node: str) -> str:
        return f"{self.network}.{10 + int(node.removeprefix('node'))}" if self.isolated else "127.0.0.1"

    def path(self, *parts: str) -> Path:
        return Path(self.root, *parts)

    @property
    def slurm_conf(self) -> str:
        return str(self.path("etc", "slurm.conf"))


def slurm_conf(layout: Layout) -> str:
    """Returns slurm.conf: a partition for all, one that may preempt it, and a short one of half the nodes."""
    root, user = layout.root, _user()
    host = socket.gethostname().split(".")[0]
    half = f"node[1-{max(1, layout.num_nodes // 2)}]"
    return f"""\
ClusterName=sandbox
SlurmctldHost={host}({layout.controller_address})
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A requeued job may start again when its old credential has expired: 5 s instead of two minutes.
AuthInfo=socket={root}/run/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={layout.controller_port}
StateSaveLocation={root}/state
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdSpoolDir={root}/nodes/%n/spool
SlurmdPidFile={root}/nodes/%n/run/slurmd.pid
SlurmdLogFile={root}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0,requeue_setup_env_fail
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobAcctGatherType=jobacct_gather/linux
SlurmdTimeout=300
SlurmctldTimeout=15
KillWait=10
MinJobAge=600
MessageTimeout=5
TCPTimeout=2
JobRequeue=1
PropagateResourceLimits=NONE
{_accounting(layout)}
{_nodes(layout, host)}
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=debug Nodes={half} MaxTime=30:00 State=UP PriorityTier=1 GraceTime=20
"""


def _accounting(layout: Layout) -> str:
    if not layout.accounting:
        return "AccountingStorageType=accounting_storage/none"
    return (
        "AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=localhost\n"
        f"AccountingStoragePort={layout.controller_port + 1}\n"
        f"AccountingStoragePass={layout.root}/run/munge.socket\nAccountingStorageTRES=gres/gpu"
    )


def _nodes(layout: Layout, host: str) -> str:
    lines = []
    first_port = 30000 + layout.number % 200 * 10
    for number, node in enumerate(layout.nodes):
        # On one host the nodes differ by their port; a network of its own would not need that, but does not mind.
        where = f"NodeAddr={layout.node_address(node)} Port={first_port + number}"
        where += "" if layout.isolated else f" NodeHostname={host}"
        what = f"CPUs=8 RealMemory=16000{' Gres=gpu:sandbox:8' if _has_devices() else ''}"
        lines.append(f"NodeName={node} {where} {what} State=UNKNOWN")
    return "\n".join(lines)


def _has_devices() -> bool:
    """Whether there are eight device files that can pass for accelerators: Slurm takes character devices only."""
    return all(Path(f"/dev/tty{number}").is_char_device() for number in range(8))


def slurmdbd_conf(layout: Layout) -> str:
    """Returns slurmdbd.conf; it must be readable by its owner alone."""
    root, user = layout.root, _user()
    return f"""\
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={layout.controller_port + 1}
SlurmUser={user}
PidFile={root}/run/slurmdbd.pid
LogFile={root}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={user}
StorageLoc=slurm_acct
"""


def hosts(layout: Layout) -> str:
    """Returns /etc/hosts of the nodes."""
    lines = ["127.0.0.1 localhost", f"{layout.controller_address} login {socket.gethostname()}"]
    lines += [f"{layout.node_address(node)} {node}" for node in layout.nodes]
    return "\n".join(lines) + "\n"


def site(layout: Layout) -> str:
    """Returns a site file for the sandbox: a device is a core, and there are no peaks to compare with."""
    # Names of nodes that share one host resolve nowhere.
    here = 'task_setup = ["export MASTER_ADDR=127.0.0.1"]\nenvironment = { KIT_BEAT_HOST = "127.0.0.1" }\n'
    one_host = "" if layout.isolated else here
    return f"""\
name = "sandbox"
description = "a real Slurm with {layout.num_nodes} simulated nodes; each process computes on one CPU core"
scheduler = "slurm"
devices_per_node = 2

[device]
name = "one CPU core"

[slurm]
partition = "batch"
stop_before_end_s = 60
{one_host}"""


def write_files(layout: Layout) -> None:
    """Writes everything that the daemons read, into a directory that is the caller's alone."""
    # small: a shared file system of 48 MB, to be filled up; scratch: the same path with another one on each node.
    for folder in ("etc", "state", "log", "run", "small", "scratch"):
        layout.path(folder).mkdir(parents=True, exist_ok=True)
    for node in layout.nodes:
        layout.path("nodes", node, "spool").mkdir(parents=True, exist_ok=True)
        layout.path("nodes", node, "run").mkdir(parents=True, exist_ok=True)
    texts = {
        "slurm.conf": slurm_conf(layout),
        "gres.conf": "Name=gpu Type=sandbox File=/dev/tty[0-7]\n" if _has_devices() else "",
        # Slurm would otherwise look for a cgroup file system that a namespace may not show.
        "cgroup.conf": "CgroupPlugin=cgroup/v1\n",
        "hosts": hosts(layout),
        "site.toml": site(layout),
        "node.sh": NODE_INIT,
    }
    if layout.accounting:
        texts["slurmdbd.conf"] = slurmdbd_conf(layout)
    for name, text in texts.items():
        layout.path("etc", name).write_text(text)
        layout.path("etc", name).chmod(0o600 if name == "slurmdbd.conf" else 0o755 if name == "node.sh" else 0o644)
    key = layout.path("etc", "munge.key")
    key.unlink(missing_ok=True)
    new = os.open(key, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY, 0o600)
    with open(new, "wb") as file:
        file.write(os.urandom(128))
    layout.write(layout.path("sandbox.json"))


NODE_INIT = """\
#!/bin/bash
# First process of a simulated node: NODE ROOT. The same paths as everywhere, but its own sockets, scratch and memory.
node=$1 root=$2
hostname "$node"
mount --bind "$root/etc/hosts" /etc/hosts
mount -t tmpfs -o size=64m tmpfs "$root/scratch"
mount -t tmpfs -o size=2g tmpfs /dev/shm
mount --bind "$root/nodes/$node/run" "$root/run"
munged -F -f -S "$root/run/munge.socket" --key-file="$root/etc/munge.key" --log-file="$root/log/munged.$node.log" \\
    --pid-file="$root/run/munged.pid" --seed-file="$root/run/munged.seed" &
for _ in $(seq 200); do [ -S "$root/run/munge.socket" ] && break; sleep 0.02; done
export SLURM_CONF=$root/etc/slurm.conf
slurmd -D -N "$node" &
trap 'kill $(jobs -p); exit 0' TERM
while :; do wait; sleep 1; done
"""


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.geteuid()).pw_name
