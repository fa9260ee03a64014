"""What the vendors' tools say of the GPUs of a machine, what packaged sites know of them, and both as a site file.

Source of the formats: https://docs.nvidia.com/deploy/nvidia-smi, and what was printed by real machines, which
`tests/cluster/test_inventory.py` keeps with its sources.
"""

import json
import math
import re
from typing import NamedTuple

from cluster.site import DTYPES, Device, Fact, Site

TOOLS = (
    "nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits",
    "rocm-smi --showproductname --showmeminfo vram --json",
    "amd-smi static --asic --vram --json",
)
ASK = ("bash", "-c", f"PATH=$PATH:/opt/rocm/bin; {' || '.join(f'{tool} 2>&-' for tool in TOOLS)} || true")
"""The first tool that answers does; the path is where ROCm's are without a module."""
KNOWN = {"gb300": ["gb300-nvl72"], "gb200": ["gb200-nvl72"], "h100": ["dgx-h100"], "mi250": ["frontier"],
         "a100": ["selene", "perlmutter"]}  # fmt: skip
"""Packaged sites with a device of this name, which differ in its memory."""
SLICE = re.compile(r"\dg\.\d+gb", re.IGNORECASE)
"""Of a GPU that is cut by MIG, as NVIDIA names them: 3g.20gb."""
OTHERS = re.compile(r"pcie|nvl\b|_nvl|mig|oam ac|" + SLICE.pattern, re.IGNORECASE)
"""Models and slices that share the name of a packaged site's device, and are slower: `oam ac` is an MI250, no X."""
SAME_MEMORY = 0.06
"""Relative; what a tool reports lacks what the driver keeps."""


class Gpus(NamedTuple):
    """The GPUs of a machine, all like its first, as a tool has told."""

    name: str
    memory_bytes: float
    count: int
    tool: str


def gpus_of(text: str) -> Gpus | None:
    """Returns what `ASK` has printed, or None if no tool knew a GPU; nvidia-smi's numbers are MiB, amd-smi's MB too."""
    lines = [line.rpartition(",") for line in text.splitlines()]
    found = [(name.strip(), float(size) * 2**20) for name, _, size in lines if name and size.strip().isdigit()]
    tool = "nvidia-smi"
    if not found:
        found, tool = _amd(text)
    return Gpus(*found[0], len(found), tool) if found else None


def _amd(text: str) -> tuple[list[tuple[str, float]], str]:
    """Returns names and memories that ROCm's tools print as JSON, below what they warn of, and which tool it was."""
    start = re.search(r"^[{\[]", text, re.MULTILINE)
    try:
        told = json.loads(text[start.start() :] if start else "{}")
        if isinstance(told, dict) and "gpu_data" not in told:
            cards = [{key.lower(): value for key, value in card.items()} for card in told.values()]
            sizes = [
                (card["card series"], float(card["vram total memory (b)"])) for card in cards if "card series" in card
            ]
            return sizes, "rocm-smi"
        cards = told["gpu_data"] if isinstance(told, dict) else told
        return [(each["asic"]["market_name"], each["vram"]["size"]["value"] * 2.0**20) for each in cards], "amd-smi"
    except (ValueError, KeyError, TypeError, AttributeError):  # of a form that we have not seen
        return [], ""


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


def device_lines(gpus: Gpus | None, named: str = "") -> list[str]:
    """Returns the table [device] of a site file, of GPUs that a tool has seen or that are only named."""
    name = gpus.name if gpus else named
    device, packaged = device_of(name, gpus.memory_bytes if gpus else None)
    seen = gpus and Fact(value=gpus.memory_bytes, source=gpus.tool)
    if device is None:
        return [
            "[device]",
            f"name = {word(name if 'NVIDIA' in name else f'GPU {name}'.strip())}   # EDIT: the vendor's name",
            f"memory_bytes = {_fact(seen)}" if seen else '# EDIT: memory_bytes = { value = 0, source = "data sheet" }',
            '# EDIT: [device.peak_flops_per_s] with bf16 = { value = 0, source = "data sheet, dense" }',
        ]
    origin = gpus.tool if gpus else f"GRES says {named!r}"
    lines = [
        "[device]",
        f"# {origin}; the facts are those of site {packaged!r}. EDIT: compare with your data sheet.",
        f"name = {word(device.name)}",
    ]
    for field, fact in (
        ("memory_bytes", device.memory_bytes or seen),
        ("memory_bytes_per_s", device.memory_bytes_per_s),
    ):
        lines.append(f"{field} = {_fact(fact)}" if fact else f"# EDIT: {field}, which models of this name differ in")
    if device.watts:
        lines.append(f"watts = {_fact(device.watts)}")
    peaks = device.peak_flops_per_s
    return [
        *lines,
        "",
        "[device.peak_flops_per_s]",
        *(f"{each} = {_fact(peaks[each])}" for each in DTYPES if each in peaks),
    ]


def local_text(gpus: Gpus | None, name: str) -> str:
    """Returns the site file of this machine, whose processes compute on its GPUs, or on its cores where it has none."""
    if gpus is None:
        told = "# Its cores and its memory; `kit bench site --out FILE.toml` measures peaks and links too."
        return f'{told}\nbase = "laptop"\nname = {word(name)}\n'
    head = [
        f"# Made on {name}. Look at each line that says EDIT, then at the rest.",
        f"name = {word(name)}",
        f"description = {word(f'{name}: {gpus.count} x {gpus.name}')}",
        'scheduler = "local"',
        f"devices_per_node = {gpus.count}",
    ]
    return "\n".join([*head, "", *device_lines(gpus), "", "# EDIT: [links]; price_per_node_hour"]) + "\n"


def word(text: str) -> str:
    """Returns a text as TOML has it."""
    return json.dumps(text)


def _fact(fact: Fact) -> str:
    return f"{{ value = {fact.value:.15g}, source = {word(fact.source)} }}"
