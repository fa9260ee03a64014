"""Refuses jobs that would fail: before submission, and in the first second of a job.

`check` runs on the login node. It makes cheap tests of the command, of paths, and of the limits of
site and partition. `check_allocation` runs inside the allocation and tests two conditions:

- Every node sees the same run directory. If it were on each node's own disk, all shards of a
  checkpoint would be written without an error. But a later job could not read them.
- Every node reaches the first node at the address and port of the rendezvous. Without this test,
  torch waits for minutes before it fails.
"""

import contextlib
import os
import re
import secrets
import shutil
import subprocess
from pathlib import Path

from cluster.job import JobSpec
from cluster.ports import answer_on_free_port
from cluster.record import ConfigError
from cluster.render import STORM_NODES, import_storm
from cluster.site import Site
from cluster.slurm.inventory import parse_time_limit
from cluster.slurm.queries import matching_lines, slurm_command
from cluster.state import JobError

LOCAL_FILE_SYSTEMS = ("tmpfs", "ramfs")
SINFO_LINE = re.compile(r"([^|]+)\|(\w+)\|([^|]+)\|(\d+)")
"""Regular expression for a line of sinfo's format `%P|%a|%l|%D`: partition, availability (`up` if
the partition starts jobs), time limit, number of nodes."""
NODE_WAIT_S = 60.0
ANSWER_WAIT_S = 20.0
ASKED = """\
token=$1 port=$2 folder=$3 node="node $SLURMD_NODENAME"
shift 3
for probe; do
    place=${probe%/*}
    if ! { read -r said < "$probe"; } 2>/dev/null || [ "$said" != "$token" ]; then
        echo "$node does not see $place as the first node does: it is not a shared directory. \
Put the run directory, with its checkpoints, on the shared file system"
        exit
    fi
    [ -w "$place" ] || { echo "$node may not write into $place"; exit; }
done
[ -d "$folder" ] || {
    echo "$node does not see the working directory $folder. Put it on the shared file system"
    exit
}
if declare -F try_container > /dev/null && ! said=$(try_container 2>&1); then
    echo "$node: site.slurm.container does not work: ${said##*$'\n'}. It needs a python3 of 3.11 or \
newer with torch, and must show the source of the kit and the run directory under the same paths"
    exit
fi
[ "$port" != 0 ] || exit 0
if declare -F set_task_addresses >/dev/null; then set_task_addresses >/dev/null 2>&1; fi
advice="Set MASTER_ADDR in site.slurm.task_setup to an address of the first node that all nodes reach, \
or correct the cluster's host names"
for name in ${GLOO_SOCKET_IFNAME//,/ }; do
    if ! grep -q "^ *$name:" /proc/net/dev; then
        has=$(sed -n '3,$ s/^ *\\([^:]*\\):.*/\\1/p' /proc/net/dev | grep -vx lo | tr '\\n' ' ')
        echo "$node has no network interface $name. It has: ${has% }. Correct site.slurm.network_interfaces \
or GLOO_SOCKET_IFNAME"
        exit
    fi
done
if [ -z "$GLOO_SOCKET_IFNAME" ] && [ "${SLURM_NNODES:-1}" -gt 1 ]; then
    own=$(timeout 20 getent ahosts "$(uname -n)" | head -n 1)
    case ${own%% *} in
        "" | 127.* | ::1)
            own=${own%% *}
            echo "$node gives its own name $(uname -n) the address ${own:-127.0.0.1}, at which other nodes cannot \
reach its ranks. Name the network in site.slurm.network_interfaces, or correct the node's host names"
            exit
            ;;
    esac
fi
if ! timeout 20 getent ahosts "$MASTER_ADDR" >/dev/null; then
    echo "$node cannot look up MASTER_ADDR=$MASTER_ADDR, the address at which the ranks meet. $advice"
    exit
fi
said=$(timeout 15 bash -c 'read -r said <"/dev/tcp/$0/$1" && echo "$said"' "$MASTER_ADDR" "$port" 2>&1)
code=$?
[ "$said" != "$token" ] || exit 0
case $code:$said in
    *"No such file or directory"*) exit 0 ;;
    124:*) why="no answer within 15 s" ;;
    0:*) why="another program answers there" ;;
    *) why=${said##*: } ;;
esac
echo "$node cannot reach the first node at MASTER_ADDR=$MASTER_ADDR, port $port ($why). $advice. \
Where several networks exist, name one in site.slurm.network_interfaces"
"""  # noqa: E501
"""Script that bash runs on each node, and that prints what is wrong with the node. It is not a
Python program, since Python would read a thousand files on every node at the same moment. If bash
has no /dev/tcp, the connection to the first node is not tested."""


def check(job: JobSpec, site: Site) -> None:
    """Raises ConfigError if `job` would certainly fail on `site`. The message says what to change.
    Runs on the login node, before submission.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "site.scheduler: 'slurm', but sbatch is not found here. Submit from a login node of the"
            " cluster, or try a simulated one: python -m cluster.sandbox start."
        )
    for name in ("working_directory", "run_dir"):
        path = Path(getattr(job, name))
        if kind := _local_file_system(path):
            raise ConfigError(
                f"job.{name}: {str(path)!r} lies on {kind}, the memory of this one machine, which"
                " other nodes cannot see. Use a directory on the shared file system."
            )
    if job.num_nodes > STORM_NODES and (storm := import_storm(job, site)):
        raise ConfigError(
            f"job.num_nodes: {storm} Above {STORM_NODES} nodes nothing is sent without it."
        )
    job.check_command()
    if site.slurm is not None:
        _check_partition(job, site.slurm.partition)


def check_allocation(job: JobSpec, num_nodes: int, port: int) -> str | None:
    """Returns an error message about a node of this allocation, or None if all nodes pass. The
    supervisor calls this function inside a Slurm job.

    `port` is the port of the rendezvous on this node. If another program uses the port, the next
    free port is tested instead.

    Raises:
        JobError: The nodes could not be tested. A later call may succeed.
        OSError: No port is free on this node.
    """
    run_dir = Path(job.run_dir)
    places = [path for path in (run_dir, run_dir / "checkpoints") if path.is_dir()]
    token = secrets.token_hex(8)
    name = f".probe-{os.getpid()}"
    probes = [place / name for place in places]
    for probe in probes:
        probe.write_text(f"{token}\n")
    wait_s = NODE_WAIT_S + num_nodes / 4
    try:
        with contextlib.ExitStack() as during:
            open_port = 0
            if job.num_processes > 1:  # A single rank has no rendezvous to test.
                open_port = during.enter_context(answer_on_free_port(port, token))
            words = ["bash", "-c", ASKED, "preflight", token, str(open_port)]
            done = _once_a_node(
                num_nodes, [*words, job.working_directory, *map(str, probes)], wait_s
            )
    except subprocess.TimeoutExpired as error:
        raise JobError(
            f"some node did not answer within {wait_s:g} s, before any rank was started"
        ) from error
    finally:
        for probe in probes:
            probe.unlink(missing_ok=True)
    complaints = sorted(line for line in done.stdout.splitlines() if line.startswith("node "))
    if complaints:
        more = f" ({len(complaints)} nodes say so)" if len(complaints) > 1 else ""
        return f"{complaints[0]}{more}"
    if done.returncode:
        raise JobError(f"the nodes could not be checked: {' '.join(done.stderr.split())[-500:]}")
    return None


def answering_nodes(num_nodes: int) -> set[str]:
    """Returns the names of the nodes of this allocation that can still start a process.

    The answers of the other nodes are read even if a lost node does not answer in time.
    """
    try:
        words = ["bash", "-c", "echo $SLURMD_NODENAME"]
        said = _once_a_node(num_nodes, words, ANSWER_WAIT_S + num_nodes / 4).stdout
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode()
    return {*said.split()}


def _once_a_node(
    num_nodes: int, words: list[str], wait_s: float
) -> subprocess.CompletedProcess[str]:
    """Runs a command once on each node of this allocation.

    Raises:
        TimeoutExpired: The command took longer than `wait_s` seconds. The error has the output of
            the nodes until then.
    """
    asked = ["srun", "--immediate=30", "--overlap"]
    asked += [f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1", *words]
    ours = ("SLURM_NTASKS", "SLURM_GPUS")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    return subprocess.run(
        asked,
        capture_output=True,
        text=True,
        errors="replace",
        env=environment,
        timeout=wait_s,
        stdin=subprocess.DEVNULL,
    )


def _check_partition(job: JobSpec, wanted: str | None) -> None:
    """Raises ConfigError for a job that Slurm would accept and never start: the job requests more
    nodes or time than the partition has, or the partition is not up.
    """
    try:
        text = slurm_command(["sinfo", "--noheader", "--format=%P|%a|%l|%D"])
    except JobError:  # If sinfo fails, sbatch will report the cause.
        return
    rows = [match.groups() for match in matching_lines(text, SINFO_LINE)]
    default = [row for row in rows if row[0].endswith("*")]
    found = [row for row in rows if row[0].rstrip("*") == wanted] if wanted else default
    if not found:
        return
    starred, state, limit, num_nodes = found[0]
    name = starred.rstrip("*")
    limit_s = parse_time_limit(limit)
    if state != "up":
        wrong = f"site.slurm.partition: {name!r} is {state} and starts no jobs."
    elif job.num_nodes > int(num_nodes):
        wrong = (
            f"job.num_nodes: {job.num_nodes}, but partition {name!r} has {num_nodes}. Use a smaller"
            " plan."
        )
    elif job.time_limit_s and limit_s and job.time_limit_s > limit_s:
        wrong = (
            f"job.time_limit_s: {job.time_limit_s:g}, but partition {name!r} gives at most"
            f" {limit_s:g}. Ask for less; the job comes back until it is done."
        )
    else:
        return
    raise ConfigError(f"{wrong} `sinfo --summarize` shows the other partitions.")


def _local_file_system(path: Path) -> str | None:
    """Returns the type of a path's file system if only one machine can see it, such as tmpfs.
    Returns None for other file systems.
    """
    there = next(each for each in (path, *path.parents) if each.exists())
    words = ["stat", "--file-system", "--format=%T", there]
    kind = subprocess.run(words, capture_output=True, text=True).stdout.strip()
    return kind if kind in LOCAL_FILE_SYSTEMS else None
