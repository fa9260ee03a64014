"""A first site file from what a cluster says of itself, with EDIT where nobody there can know.

Source of the formats: https://slurm.schedmd.com/sinfo.html, https://slurm.schedmd.com/gres.html
"""

import json
import re
from string import Template

from cluster.record import ConfigError, counted, suggestion
from cluster.state import JobError

SINFO = ("sinfo", "--noheader", "--exact", "--noconvert", "--format=%P|%D|%c|%m|%l|%s|%G")
CONFIG = ("scontrol", "show", "config")
LINE = re.compile(
    r"(?P<partition>[^|*]+)(?P<default>\*?)\|(?P<count>\d+)\|(?P<cpus>\d+)\+?\|"
    r"(?P<megabytes>\d+)\+?\|(?P<limit>[^|]*)\|(?:\d+-)?(?P<most>[^|]*)\|(?P<gres>.*)"
)
GPU = re.compile(r"(?:^|[,/])gpu\b(?::([^:,(]*[A-Za-z][^:,(]*))?(?::(\d+))?")
"""A node's first GPUs, kind and number: a100 and 4 of `gpu:a100:4(S:0-1),lscratch:3570`."""
TIME = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)")
"""A limit as sinfo prints it: [[days-]hours:]minutes:seconds."""
TEMPLATE = Template("""\
# Made from what $cluster says of itself. Look at each line that says EDIT, then at the rest.
name = "$cluster"
description = $description
scheduler = "slurm"
devices_per_node = $devices
# EDIT: price_per_node_hour = { value = 0, source = "your contract" }
$login
[device]
$device

[links]
# EDIT: inter_node_bytes_per_s = { value = 0, source = "your system's documentation" }

[slurm]
partition = $partition
$account
$tasks
sbatch_options = ["--mem=0"]   # all memory of a node, of which a job may get a part by default
# EDIT: modules, environment and network_interfaces, as your system's documentation has them
$most
$walltime
""")
LOGIN = """\
login = {}

[there]
python = "/EDIT/bin/python"   # EDIT: of an environment there with the packages of requirements/
folder = "/EDIT/runs"         # EDIT: for runs, on a file system that the compute nodes share
sync = true                   # sends this kit's own source
"""
GPU_DEVICE = """\
name = {}   # EDIT: the vendor's name: `nvidia-smi -L` or `rocm-smi --showproductname` on a node
# Such facts are in the sites perlmutter, selene (A100), dgx-h100, gb200-nvl72, frontier (MI250X).
# EDIT: memory_bytes = {{ value = 0, source = "data sheet" }}

[device.peak_flops_per_s]
# EDIT: bf16 = {{ value = 0, source = "data sheet, dense" }}"""
CORE = """\
name = "one CPU core"
memory_bytes = {{ value = {:.10g}, source = "sinfo: memory of a node over its cores" }}"""
ACCOUNT = 'account = "EDIT"   # EDIT: your project; `sacctmgr show associations user=$USER`'
Nodes = dict[str, str]
"""Nodes of one partition that are alike: the groups of LINE."""


def nodes_of(text: str) -> list[Nodes]:
    """Returns what each line of `SINFO` says. Lines without its columns, which site wrappers print,
    are ignored.

    Raises:
        JobError: a line has these columns with other values, or no line has them.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    num_separators = SINFO[-1].count("|")
    rows = {line: LINE.fullmatch(line) for line in lines if line.count("|") >= num_separators}
    wrong = [line for line, match in rows.items() if match is None] if rows else lines
    if wrong:
        raise JobError(
            f"sinfo: {wrong[0]!r} is not of the form {SINFO[-1]!r}. Is it Slurm's own sinfo?"
        )
    return [match.groupdict() for match in rows.values() if match]


def seconds(limit: str) -> float | None:
    """Returns a time limit in seconds; None where there is none."""
    found = TIME.fullmatch(limit)
    if found is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + rest


def choose(found: list[Nodes], partition: str | None) -> Nodes:
    """Returns the nodes to describe: of the partition that is named, else with GPUs, of the default
    one, the most.

    Raises:
        ConfigError: there is no such partition.
    """
    wanted = [nodes for nodes in found if partition in (None, nodes["partition"])]
    if not wanted:
        names = list(dict.fromkeys(nodes["partition"] for nodes in found))
        raise ConfigError(
            f"--partition: {partition!r} is unknown. {suggestion(str(partition), names)}"
        )
    return max(
        wanted,
        key=lambda nodes: (bool(GPU.search(nodes["gres"])), nodes["default"], int(nodes["count"])),
    )


def settings_of(text: str) -> dict[str, str]:
    """Returns the lines `Key = value` of `scontrol show config`."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {key.strip(): value.strip() for key, equals, value in pairs if equals}


def site_text(
    nodes: Nodes, settings: dict[str, str], *, login: str | None = None, account: str | None = None
) -> str:
    """Returns the site file of some nodes, which `Site.load` takes."""
    cpus, gpu, limit = int(nodes["cpus"]), GPU.search(nodes["gres"]), seconds(nodes["limit"])
    kind, gpus = (gpu[1] or "", int(gpu[2] or 1)) if gpu else ("", 0)
    memory_bytes = int(nodes["megabytes"]) * 2**20
    cluster = re.sub(r"[^\w.-]", "-", settings.get("ClusterName", "")) or nodes["partition"]
    size, what = (
        counted(int(nodes["count"]), "node"),
        f"{gpus} x {kind or 'GPU'}" if gpu else counted(cpus, "core"),
    )
    pays = settings.get("AccountingStorageEnforce", "none").lower() not in ("none", "0", "(null)")
    per_node = (
        f"gpus_per_node = {json.dumps(f'{kind}:{gpus}'.lstrip(':'))}   # sinfo: {nodes['gres']}"
    )
    return TEMPLATE.substitute(
        cluster=cluster,
        description=json.dumps(f"{cluster}, partition {nodes['partition']}: {size} with {what}"),
        devices=gpus or cpus,
        login=LOGIN.format(json.dumps(login)) if login else "",
        device=(
            GPU_DEVICE.format(json.dumps(f"GPU {kind}".strip()))
            if gpu
            else CORE.format(memory_bytes / cpus)
        ),
        partition=json.dumps(nodes["partition"]),
        account=(
            f"account = {json.dumps(account)}"
            if account
            else ACCOUNT
            if pays
            else "# no account: none is asked"
        ),
        tasks=(
            f"{per_node}\ncpus_per_task = {max(1, cpus // gpus)}"
            if gpu
            else "# no gpus_per_node: sinfo has none"
        ),
        most=(
            f"max_nodes = {nodes['most']}"
            if nodes["most"].isdigit()
            else "# no max_nodes: sinfo has no limit"
        ),
        walltime=(
            f"\n[[slurm.walltime]]\nmax_hours = {limit / 3600:g}"
            if limit
            else "# no [[slurm.walltime]]: no limit"
        ),
    )
