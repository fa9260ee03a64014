"""A first site file from what a cluster says of itself; what nobody there can know is marked EDIT.

Every number has its source: a column of sinfo, which was asked for by name, a line of `scontrol show config`, or the
data sheet behind a packaged site with the same device.

Source of the formats: https://slurm.schedmd.com/sinfo.html, https://slurm.schedmd.com/gres.html
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Sequence

from cluster.record import ConfigError, suggestion
from cluster.site import DTYPES, Device, Fact, Site
from cluster.state import JobError

Ask = Callable[[Sequence[str]], str]
"""Runs a command where Slurm is and returns what it prints; raises JobError."""
SINFO = ("sinfo", "--noheader", "--exact", "--noconvert", "--format=%P|%D|%c|%m|%l|%s|%G")
CONFIG = ("scontrol", "show", "config")
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
KNOWN = {"gb300": ["gb300-nvl72"], "gb200": ["gb200-nvl72"], "h100": ["dgx-h100"], "mi250": ["frontier"],
         "a100": ["selene", "perlmutter"]}  # fmt: skip
"""Packaged sites with a device of this name, which differ in its memory."""
SLICE = re.compile(r"\dg\.\d+gb", re.IGNORECASE)
"""Of a GPU that is cut by MIG, as NVIDIA names them: 3g.20gb."""
OTHERS = re.compile(r"pcie|nvl\b|_nvl|mig|" + SLICE.pattern, re.IGNORECASE)
"""Models and slices that share the name of a packaged site's device, and are slower."""
SAME_MEMORY = 0.06
"""Relative; what nvidia-smi reports lacks what the driver keeps."""


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


def device_of(gpu: str, memory_bytes: float | None) -> tuple[Device | None, str]:
    """Returns a packaged site's device of that name, of that memory where it is known, and that site's name."""
    for word, sites in KNOWN.items() if not OTHERS.search(gpu) else ():
        if word in re.sub(r"[^a-z0-9]", "", gpu.lower()):
            for name in sites:
                device = Site.load(name).device
                held = device.memory_bytes.value if device.memory_bytes else math.nan
                if memory_bytes is None or abs(memory_bytes / held - 1) < SAME_MEMORY:
                    return (device if memory_bytes or len(sites) == 1 else device.replace(memory_bytes=None)), name
            return Site.load(sites[0]).device.replace(memory_bytes=None, memory_bytes_per_s=None), sites[0]
    return None, ""


def probe(ask: Ask, nodes: Nodes) -> tuple[str, float] | None:
    """Returns name and memory in bytes of a GPU, by a job of one minute with nvidia-smi; None if that says nothing."""
    job = ("srun", f"--partition={nodes.partition}", "--nodes=1", "--ntasks=1", "--time=1", "--gres=gpu:1")
    return gpu_of(ask((*job, *NVIDIA_SMI)))


def gpu_of(text: str) -> tuple[str, float] | None:
    """Returns name and memory of the first line of `NVIDIA_SMI`, whose MiB have no unit."""
    name, comma, memory = (text.strip().splitlines() or [""])[0].rpartition(",")
    return (name.strip(), float(memory) * 2**20) if comma and memory.strip().isdigit() else None


def site_text(
    nodes: Nodes, settings: dict[str, str], *, seen: tuple[str, float] | None = None, login: str | None = None
) -> str:
    """Returns the site file of some nodes, which `Site.load` takes; `seen` is what `probe` has returned."""
    gpu = seen[0] if seen else nodes.gpu
    device, packaged = device_of(gpu, seen[1] if seen else None)
    name = re.sub(r"[^\w.-]", "-", settings.get("ClusterName", "")) or nodes.partition
    what = f"{nodes.gpus} x {gpu or 'GPU'}" if nodes.gpus else f"{nodes.cpus} cores"
    lines = [
        f"# Made from what {name} says of itself. Look at each line that says EDIT, then at the rest.",
        f"name = {_word(name)}",
        f"description = {_word(f'{name}, partition {nodes.partition}: {nodes.count} nodes with {what}')}",
        'scheduler = "slurm"',
        f"devices_per_node = {nodes.gpus or nodes.cpus}",
        *_login(login),
        "",
        *_device(nodes, gpu, device, packaged, seen),
        "",
        "# EDIT: [links] from your system's documentation, or by `kit bench site` in a job; price_per_node_hour",
        "",
        *_slurm(nodes, settings),
    ]
    return "\n".join(lines) + "\n"


def _login(login: str | None) -> list[str]:
    if login is None:
        return []
    return [
        f"login = {_word(login)}",
        "",
        "[there]",
        'python = "/EDIT/bin/python"   # EDIT: of an environment there with the packages of requirements/',
        'folder = "/EDIT/runs"         # EDIT: for runs, on a file system that the compute nodes share',
        "sync = true                   # sends this kit's own source",
    ]


def _device(nodes: Nodes, gpu: str, device: Device | None, packaged: str, seen: tuple[str, float] | None) -> list[str]:
    lines = ["[device]"]
    if not nodes.gpus:
        memory = Fact(value=nodes.memory_bytes / nodes.cpus, source="sinfo: memory of a node over its cores")
        return [*lines, 'name = "one CPU core"', f"memory_bytes = {_fact(memory)}"]
    if device is None:
        return [
            *lines, f"name = {_word(gpu if 'NVIDIA' in gpu else f'GPU {gpu}'.strip())}   # EDIT: the vendor's name",
            *([f"memory_bytes = {_fact(Fact(value=seen[1], source='nvidia-smi'))}"] if seen else
              ['# EDIT: memory_bytes = { value = 0, source = "data sheet" }']),
            '# EDIT: [device.peak_flops_per_s] with bf16 = { value = 0, source = "data sheet, dense" }',
        ]  # fmt: skip
    origin = "nvidia-smi" if seen else f"GRES says {nodes.gpu!r}"
    lines.append(f"# {origin}; the facts are those of site {packaged!r}. EDIT: compare with your data sheet.")
    lines.append(f"name = {_word(device.name)}")
    for field in ("memory_bytes", "memory_bytes_per_s"):
        fact = getattr(device, field)
        lines.append(f"{field} = {_fact(fact)}" if fact else f"# EDIT: {field}, which models of this name differ in")
    if device.watts:
        lines.append(f"watts = {_fact(device.watts)}")
    lines += ["", "[device.peak_flops_per_s]"]
    peaks = device.peak_flops_per_s
    return lines + [f"{dtype} = {_fact(peaks[dtype])}" for dtype in DTYPES if dtype in peaks]


def _slurm(nodes: Nodes, settings: dict[str, str]) -> list[str]:
    lines = ["[slurm]", f"partition = {_word(nodes.partition)}"]
    if settings.get("AccountingStorageEnforce", "none").lower() not in ("none", "0", "(null)"):
        lines.append('account = "EDIT"   # EDIT: your project; `sacctmgr show associations user=$USER format=account`')
    if nodes.gpus:
        lines.append(f"gpus_per_node = {_word(':'.join([*filter(None, [nodes.gpu]), str(nodes.gpus)]))}")
        lines.append(f"cpus_per_task = {max(1, nodes.cpus // nodes.gpus)}")
    if "MEMORY" in settings.get("SelectTypeParameters", "").upper():
        lines.append('sbatch_options = ["--mem=0"]   # all of a node: memory is dealt out here, by default a part')
    lines.append("# EDIT: modules, environment and network_interfaces, as your system's documentation has them")
    if nodes.max_nodes:
        lines.append(f"max_nodes = {nodes.max_nodes}")
    if nodes.max_hours:
        lines += ["", "[[slurm.walltime]]", f"max_hours = {nodes.max_hours:g}"]
    return lines


def _word(text: str) -> str:
    return json.dumps(text)


def _fact(fact: Fact) -> str:
    return f"{{ value = {fact.value:.10g}, source = {_word(fact.source)} }}"
