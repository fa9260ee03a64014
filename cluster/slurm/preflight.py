"""What can be known to fail is refused before it costs anything: before submission, and as a job's
first second.

`check` looks from the login node at what is free and quick: paths, free space, limits of site and
partition. `check_nodes` runs inside the allocation: every node must see the same run directory. A
directory on a node's own disk would take all shards of a checkpoint without complaint, and give
back none.
"""

import os
import re
import secrets
import shutil
import subprocess
from pathlib import Path

from cluster.job import JobSpec
from cluster.record import ConfigError
from cluster.render import STORM_NODES, import_storm
from cluster.site import Site
from cluster.slurm.inventory import seconds
from cluster.slurm.queries import matching_lines, slurm_command
from cluster.state import JobError

LOCAL_FILE_SYSTEMS = ("tmpfs", "ramfs")
SINFO_LINE = re.compile(r"([^|]+)\|(\w+)\|([^|]+)\|(\d+)")
"""A line of `%P|%a|%l|%D`: partition, whether it takes jobs, time limit, number of nodes."""
NODE_WAIT_S, ANSWER_WAIT_S = 60.0, 20.0
ASKED = """\
token=$1 folder=$2 node="node $SLURMD_NODENAME"
shift 2
for probe; do
    place=${probe%/*}
    if ! { read -r said < "$probe"; } 2>/dev/null || [ "$said" != "$token" ]; then
        echo "$node does not see $place as the first node does: it is not a shared directory. \
Put the run directory, with its checkpoints, on the shared file system"
        exit
    fi
    [ -w "$place" ] || { echo "$node may not write into $place"; exit; }
done
[ -d "$folder" ] || echo "$node does not see the working directory $folder. Put it on the shared file system"
if declare -F try_container > /dev/null && ! said=$(try_container 2>&1); then
    echo "$node: site.slurm.container does not work: ${said##*$'\n'}. It needs a python3 of 3.11 or \
newer with torch, and must show the source of the kit and the run directory under the same paths"
fi
"""  # noqa: E501
"""Run by bash on each node, since Python is a thousand files, which all nodes would read at the
same moment."""


def check(job: JobSpec, site: Site) -> None:
    """Raises ConfigError, with the way out, for what is known to be wrong with sending `job` to
    `site`.
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


def check_nodes(job: JobSpec, num_nodes: int) -> str | None:
    """Returns what is wrong with some node of this allocation, or None. For the supervisor, inside
    a Slurm job.

    Raises:
        JobError: the nodes could not be asked, which may pass.
    """
    run_dir = Path(job.run_dir)
    places = [path for path in (run_dir, run_dir / "checkpoints") if path.is_dir()]
    token, name = secrets.token_hex(8), f".probe-{os.getpid()}"
    probes = [place / name for place in places]
    for probe in probes:
        probe.write_text(f"{token}\n")
    words = ["bash", "-c", ASKED, "preflight", token, job.working_directory, *map(str, probes)]
    wait_s = NODE_WAIT_S + num_nodes / 4
    try:
        done = _once_a_node(num_nodes, words, wait_s)
    except subprocess.TimeoutExpired as error:
        raise JobError(
            f"some node did not answer within {wait_s:g} s, before any rank was started"
        ) from error
    finally:
        for probe in probes:
            probe.unlink(missing_ok=True)
    complaints = sorted(line for line in done.stdout.splitlines() if line.startswith("node "))
    if complaints:
        return (
            f"{complaints[0]}{f' ({len(complaints)} nodes say so)' if len(complaints) > 1 else ''}"
        )
    if done.returncode:
        raise JobError(f"the nodes could not be checked: {' '.join(done.stderr.split())[-500:]}")
    return None


def answering_nodes(num_nodes: int) -> set[str]:
    """Returns the nodes of this allocation that start a process when asked to; each says so
    without the others.
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
    """Runs a command on each node of this allocation; raises TimeoutExpired, with what was said
    until then.
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
    """Refuses what Slurm would accept and never start: more nodes or more time than the
    partition has.
    """
    try:
        text = slurm_command(["sinfo", "--noheader", "--format=%P|%a|%l|%D"])
    except JobError:  # then sbatch will say what is wrong
        return
    rows = [match.groups() for match in matching_lines(text, SINFO_LINE)]
    default = [row for row in rows if row[0].endswith("*")]
    found = [row for row in rows if row[0].rstrip("*") == wanted] if wanted else default
    if not found:
        return
    starred, state, limit, num_nodes = found[0]
    name, limit_s = starred.rstrip("*"), seconds(limit)
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
    """Returns the kind of a file system that exists on one machine only, or None for any other."""
    there = next(each for each in (path, *path.parents) if each.exists())
    words = ["stat", "--file-system", "--format=%T", there]
    kind = subprocess.run(words, capture_output=True, text=True).stdout.strip()
    return kind if kind in LOCAL_FILE_SYSTEMS else None
