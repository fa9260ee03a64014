"""A first site file from what a cluster says of itself; what nobody there can know is marked EDIT.

Every number has its source: a column of sinfo, which was asked for by name, a line of `scontrol show config`, or the
data sheet behind a packaged site with the same device.

Source of the formats: https://slurm.schedmd.com/sinfo.html, https://slurm.schedmd.com/gres.html
"""

import dataclasses
import re
from collections.abc import Callable, Sequence

from cluster import devices
from cluster.devices import SLICE, Gpus, word
from cluster.record import ConfigError, counted, suggestion
from cluster.state import JobError

Ask = Callable[[Sequence[str]], str]
"""Runs a command where Slurm is and returns what it prints; raises JobError."""
SINFO = ("sinfo", "--noheader", "--exact", "--noconvert", "--format=%P|%D|%c|%m|%l|%s|%G")
CONFIG = ("scontrol", "show", "config")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nodes:
    """Nodes of one partition that are alike."""

    partition: str
    is_default: bool
    count: int
    cpus: int
    memory_bytes: int
    max_hours: float | None
    max_nodes: int | None
    gpus: int
    gpu: str
    """Its name among generic resources; empty where they say none."""


def nodes_of(text: str) -> list[Nodes]:
    """Returns what `SINFO` prints, line by line; raises JobError for what is not of that form."""
    return [_nodes(line) for line in text.splitlines() if line.strip()]


def _nodes(line: str) -> Nodes:
    try:
        partition, count, cpus, megabytes, limit, size, gres = (part.strip() for part in line.split("|", 6))
        gpus, gpu = gpus_of(gres)
        return Nodes(
            partition=partition.rstrip("*"), is_default=partition.endswith("*"), count=_number(count),
            cpus=_number(cpus), memory_bytes=_number(megabytes) * 2**20, max_hours=hours(limit),
            max_nodes=_most(size), gpus=gpus, gpu=gpu,
        )  # fmt: skip
    except ValueError as error:
        raise JobError(
            f"sinfo: {line!r} is not of the form {SINFO[-1]!r} ({error}). Is it Slurm's own sinfo?"
        ) from error


def gpus_of(gres: str) -> tuple[int, str]:
    """Returns how many GPUs a node has, and of which kind: 4 and a100 of `gpu:a100:4(S:0-1),lscratch:3570`.

    Of several kinds it is the one that there is most of, whole ones first: a job that asks for a kind gets no other,
    and slices of a GPU (MIG) are kinds of their own.
    """
    kinds: dict[str, int] = {}
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *rest = item.strip().removeprefix("gres/").split(":")
        if name != "gpu" or not rest:
            continue
        kind = "" if rest[0].isdigit() else rest[0]
        kinds[kind] = kinds.get(kind, 0) + (int(rest[-1]) if rest[-1].isdigit() else 1)
    kind = max(kinds, key=lambda each: (not SLICE.search(each), kinds[each]), default="")
    return kinds.get(kind, 0), kind


def hours(limit: str) -> float | None:
    """Returns a time limit of Slurm, [days-][hours:]minutes:seconds, in hours; None where there is none."""
    if limit.lower() in ("infinite", "unlimited", "n/a", ""):
        return None
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # days-hours[:minutes[:seconds]]
        parts = [int(days), *parts, *[0] * (3 - len(parts))]
    seconds = 0.0
    for part, unit in zip(reversed(parts), (1, 60, 3600, 86400), strict=False):
        seconds += part * unit
    return seconds / 3600


def _most(size: str) -> int | None:
    last = size.rpartition("-")[2]
    return int(last) if last.isdigit() else None


def _number(text: str) -> int:
    units = {"K": 1e3, "M": 1e6, "G": 1e9}
    text = text.rstrip("+")
    return int(float(text[:-1]) * units[text[-1]]) if text[-1:] in units else int(text)


def choose(found: list[Nodes], partition: str | None) -> Nodes:
    """Returns the nodes to describe: of the partition that is named, else with GPUs, of the default one, the most.

    Raises:
        ConfigError: there is no such partition.
    """
    names = list(dict.fromkeys(nodes.partition for nodes in found))
    wanted = [nodes for nodes in found if partition in (None, nodes.partition)]
    if not wanted:
        raise ConfigError(f"--partition: {partition!r} is unknown. {suggestion(str(partition), names)}")
    return max(wanted, key=lambda nodes: (nodes.gpus > 0, nodes.is_default, nodes.count))


def settings_of(text: str) -> dict[str, str]:
    """Returns the lines `Key = value` of `scontrol show config`."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {key.strip(): value.strip() for key, equals, value in pairs if equals}


def probe(ask: Ask, nodes: Nodes, account: str | None = None) -> Gpus | None:
    """Returns what a tool of the vendor says of a node's GPUs, by a job of one minute; None if none knows them."""
    job = ["srun", f"--partition={nodes.partition}", "--nodes=1", "--ntasks=1", "--time=1", "--gres=gpu:1"]
    return devices.gpus_of(ask([*job, *([f"--account={account}"] if account else []), *devices.ASK]))


def site_text(
    nodes: Nodes,
    settings: dict[str, str],
    *,
    seen: Gpus | None = None,
    login: str | None = None,
    account: str | None = None,
) -> str:
    """Returns the site file of some nodes, which `Site.load` takes; `seen` is what `probe` has returned."""
    gpu = seen.name if seen else nodes.gpu
    name = re.sub(r"[^\w.-]", "-", settings.get("ClusterName", "")) or nodes.partition
    size = counted(nodes.count, "node")
    what = f"{nodes.gpus} x {gpu or 'GPU'}" if nodes.gpus else counted(nodes.cpus, "core")
    lines = [
        f"# Made from what {name} says of itself. Look at each line that says EDIT, then at the rest.",
        f"name = {word(name)}",
        f"description = {word(f'{name}, partition {nodes.partition}: {size} with {what}')}",
        'scheduler = "slurm"',
        f"devices_per_node = {nodes.gpus or nodes.cpus}",
        *_login(login),
        "",
        *(devices.device_lines(seen, nodes.gpu) if nodes.gpus else _cores(nodes)),
        "",
        "# EDIT: [links] from your system's documentation, or by `kit bench site` in a job; price_per_node_hour",
        "",
        *_slurm(nodes, settings, account),
    ]
    return "\n".join(lines) + "\n"


def _login(login: str | None) -> list[str]:
    if login is None:
        return []
    return [
        f"login = {word(login)}",
        "",
        "[there]",
        'python = "/EDIT/bin/python"   # EDIT: of an environment there with the packages of requirements/',
        'folder = "/EDIT/runs"         # EDIT: for runs, on a file system that the compute nodes share',
        "sync = true                   # sends this kit's own source",
    ]


def _cores(nodes: Nodes) -> list[str]:
    told = '", source = "sinfo: memory of a node over its cores" }'
    return [
        "[device]",
        'name = "one CPU core"',
        f"memory_bytes = {{ value = {nodes.memory_bytes / nodes.cpus:.10g}{told[1:]}",
    ]


def _slurm(nodes: Nodes, settings: dict[str, str], account: str | None) -> list[str]:
    lines = ["[slurm]", f"partition = {word(nodes.partition)}"]
    if account:
        lines.append(f"account = {word(account)}")
    elif settings.get("AccountingStorageEnforce", "none").lower() not in ("none", "0", "(null)"):
        lines.append('account = "EDIT"   # EDIT: your project; `sacctmgr show associations user=$USER format=account`')
    if nodes.gpus:
        lines.append(f"gpus_per_node = {word(':'.join([*filter(None, [nodes.gpu]), str(nodes.gpus)]))}")
        lines.append(f"cpus_per_task = {max(1, nodes.cpus // nodes.gpus)}")
    if "MEMORY" in settings.get("SelectTypeParameters", "").upper():
        lines.append('sbatch_options = ["--mem=0"]   # all of a node: memory is dealt out here, by default a part')
    lines.append("# EDIT: modules, environment and network_interfaces, as your system's documentation has them")
    if nodes.max_nodes:
        lines.append(f"max_nodes = {nodes.max_nodes}")
    if nodes.max_hours:
        lines += ["", "[[slurm.walltime]]", f"max_hours = {nodes.max_hours:g}"]
    return lines
