"""Numbers of a machine from which step times are computed: peak rates, bandwidths and sizes
(`Hardware`), and efficiencies and latencies that are fitted to runs (`Coefficients`). This module
does not import torch.
"""

import dataclasses
from typing import Any, Self

import numpy as np

from cluster.record import ConfigError, Record
from cluster.site import Site
from kit.estimate.theory.layouts import ArrayColumns

Number = float | np.ndarray
FULL_DEVICES = 8
"""Largest number of devices that a communication group needs to use all links of each device. Nodes
with more devices are wired in groups of about this size."""
TYPICAL_CEILING = 0.85
"""Share of the peak FLOP/s, 0 to 1, that the best matrix product is assumed to reach on a site
without a measured rate. Measured values are 0.90 on A100 and 0.82 on H100."""
NARROW = ("fp8", "mxfp8", "nvfp4")
"""Number formats narrower than bf16. Only linear layers multiply in these formats. Attention is
computed in bf16."""
NARROW_CEILING = 0.74
"""Share of the peak FLOP/s, 0 to 1, that the best matrix product in a format of NARROW reaches.
Measured in fp8: H100 0.71, GB200 0.72, H200 0.73, B300 0.745, B200 0.76 (ml-engineering, maximum
achievable matmul FLOPS)."""

EXAMPLES = {
    "memory_bytes": "85899345920",
    "memory_bytes_per_s": "2.039e12",
    "intra_node": "300e9",
    "inter_node_bytes_per_s": "100e9",
}
"""Maps the name of a field in a site file to an example value, that of an A100 with 80 GB. An error
message about missing fields shows these values."""

JOULES_PER_FLOP = {
    "bf16": 700 / 794.5e12,
    "fp16": 700 / 794.5e12,
    "fp8": 700 / 1402.6e12,
    "mxfp8": 700 / 1402.6e12,
    "nvfp4": 350 / 1402.6e12,
}
"""Maps number formats to the energy of matrix products in joules per FLOP. The energy is the 700 W
of an H100, divided by the FLOP/s that the H100 reaches (ml-engineering, maximum achievable matmul
FLOPS). nvfp4 is assumed to need half the energy of fp8, since its elements have half the bits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware(ArrayColumns):
    """Peak rates, bandwidths and sizes of a machine on which the step time depends. Each number may
    be an array with one element per layout.

    Bandwidths are in bytes/s of one direction. Groups of up to `near_devices` devices communicate
    at `near_bytes_per_s` per device. Groups of up to `node_devices` communicate at
    `node_bytes_per_s` per device. Larger groups use `network_bytes_per_s`, which all devices of a
    node share.
    """

    peak_flops_per_s: Number
    """Peak FLOP/s of one device in its data sheet, from which MFU is computed."""
    attention_flops_per_s: Number
    """Highest sustained FLOP/s of matrix products in bf16 on one device. Attention and logits are
    computed in bf16."""
    matmul_flops_per_s: Number
    """Highest sustained FLOP/s of matrix products of linear layers on one device. These products
    may use a number format narrower than bf16."""
    memory_bytes: Number
    """Bytes of memory of one device."""
    memory_bytes_per_s: Number
    """Memory bandwidth of one device in bytes/s."""
    near_devices: Number
    """Number of devices in the smallest group of neighbours, which the fastest links connect."""
    near_bytes_per_s: Number
    """Bandwidth of one device over the fastest links, in bytes/s."""
    node_devices: Number
    """Number of devices of a node, or of a larger group that fast links connect (e.g. 72 in an
    NVL72)."""
    node_bytes_per_s: Number
    """Bandwidth of one device over the links inside a node, in bytes/s."""
    full_devices: Number
    """Number of devices with which a group uses all links of each device: all devices of a node,
    but at most FULL_DEVICES."""
    network_bytes_per_s: Number
    """Bandwidth out of a node in bytes/s, which all devices of the node share."""
    contention: Number
    """1 if the nodes of a large job share network links, so that bandwidth falls. 0 in a full fat
    tree."""
    price_per_device_hour: Number
    """Price of one device in USD per hour. If the site has no price, the value is NaN."""

    @classmethod
    def of(cls, site: Site, dtype: str = "bf16") -> Self:
        """Returns the peak rates, bandwidths and sizes of a site, for training in which linear
        layers multiply in `dtype`. If `dtype` is narrower than bf16, the peak and the rate of
        attention are still the bf16 rates.

        Raises:
            ConfigError: The site lacks a number that step time needs, for example the peak of the
                dtype, or a number seems to have a wrong unit.
        """
        wide = "bf16" if dtype in NARROW else dtype
        peak = site.peak_flops_per_s(wide)
        matmul = sustained(site, dtype)
        check_numbers(site, dtype)
        assert peak and matmul and site.device.memory_bytes and site.device.memory_bytes_per_s
        _check_units(site)
        tiers = site.links.intra_node
        memory_rate = site.device.memory_bytes_per_s.value
        # If the site states no links, devices are assumed to communicate through shared memory, so
        # the memory bandwidth is used as the bandwidth of the links.
        near = tiers[0].bytes_per_s.value if tiers else memory_rate
        network = site.links.inter_node_bytes_per_s
        price = site.price_per_node_hour
        return cls(
            peak_flops_per_s=peak,
            attention_flops_per_s=sustained(site, wide) or peak,
            matmul_flops_per_s=matmul,
            memory_bytes=site.device.memory_bytes.value,
            memory_bytes_per_s=memory_rate,
            near_devices=float(tiers[0].num_devices if tiers else site.devices_per_node),
            near_bytes_per_s=near,
            node_devices=float(max(site.devices_per_node, tiers[-1].num_devices if tiers else 1)),
            node_bytes_per_s=tiers[-1].bytes_per_s.value if tiers else near,
            full_devices=float(min(FULL_DEVICES, site.devices_per_node)),
            network_bytes_per_s=_network_per_domain(site, network.value if network else near),
            contention=0.0 if site.links.topology == "fat_tree" else 1.0,
            price_per_device_hour=price.value / site.devices_per_node if price else float("nan"),
        )

    @property
    def is_narrow(self) -> np.ndarray:
        """Whether linear layers multiply in a number format narrower than bf16. Products are then
        faster than in bf16.
        """
        return np.asarray(self.matmul_flops_per_s) > 1.01 * np.asarray(self.attention_flops_per_s)

    @classmethod
    def like(cls, peak_flops_per_s: float) -> Self:
        """Returns estimated numbers for a machine without a site file. They are the numbers of a
        node with 8 A100, with FLOP/s and bandwidths scaled in proportion to `peak_flops_per_s`.
        """
        scale = peak_flops_per_s / 312e12
        return cls(
            peak_flops_per_s=peak_flops_per_s,
            attention_flops_per_s=peak_flops_per_s * TYPICAL_CEILING,
            matmul_flops_per_s=peak_flops_per_s * TYPICAL_CEILING,
            memory_bytes=80.0 * 2**30,
            memory_bytes_per_s=2.0e12 * scale,
            near_devices=8.0,
            near_bytes_per_s=300e9 * scale,
            node_devices=8.0,
            node_bytes_per_s=300e9 * scale,
            full_devices=8.0,
            network_bytes_per_s=200e9 * scale,
            contention=1.0,
            price_per_device_hour=float("nan"),
        )

    def select(self, rows: Any) -> Self:
        """Returns a copy with the elements `rows` of all arrays. Numbers that are not arrays are
        copied unchanged.
        """
        return self.map(lambda value: value[rows] if isinstance(value, np.ndarray) else value)


def check_numbers(site: Site, dtype: str, num_devices: int = 1) -> None:
    """Raises ConfigError if a site lacks numbers from which the step time of a job on `num_devices`
    devices is computed. The error names all missing numbers with an example of each.

    Processes on one CPU communicate through its memory, so links of CPU cores need not be stated.
    Links of accelerators must be stated, since their bandwidth cannot be derived from the bandwidth
    of the memory.
    """
    device = site.device
    links = site.links
    wide = "bf16" if dtype in NARROW else dtype
    needed = {
        f"device.peak_flops_per_s.{dtype}": sustained(site, dtype),
        f"device.peak_flops_per_s.{wide}": site.peak_flops_per_s(wide),
        "device.memory_bytes": device.memory_bytes,
        "device.memory_bytes_per_s": device.memory_bytes_per_s,
    }
    if num_devices > 1 and not device.is_cpu:
        needed["links.intra_node"] = links.intra_node or None
    if num_devices > site.devices_per_node and not device.is_cpu:
        needed["links.inter_node_bytes_per_s"] = links.inter_node_bytes_per_s
    missing = [name for name, value in needed.items() if value is None]
    if not missing:
        return
    examples: dict[str, list[str]] = {}
    for name in missing:
        table, _, field = name.rpartition(".")
        fact = f'{{ value = {EXAMPLES.get(field, "312e12")}, source = "data sheet" }}'
        if field == "intra_node":
            fact = f"[{{ num_devices = {site.devices_per_node}, bytes_per_s = {fact} }}]"
        examples.setdefault(f"  [{table}]", []).append(f"  {field} = {fact}")
    tables = sorted(examples, key=lambda head: head.rstrip("]"))
    shown = [line for head in tables for line in (head, *examples[head])]
    raise ConfigError(
        f"site {site.name} lacks {', '.join(missing)}, which the step time needs. Add them to the"
        " site file, or measure them (`kit bench --out FILE.toml`). For example:\n"
        + "\n".join(shown)
    )


def ceiling(site: Site, dtype: str) -> float | None:
    """Returns the highest FLOP/s that a matrix product in a dtype reaches on a device of the site.

    If the site file states a measured rate, it is returned. Otherwise the result is
    TYPICAL_CEILING x peak, or NARROW_CEILING x peak for a format narrower than bf16. If bf16
    reaches a smaller share of its peak than NARROW_CEILING, this share is used for narrow formats
    too. If the site has neither a measured rate nor a peak, the result is None.
    """
    measured = site.device.matmul_flops_per_s.get(dtype)
    peak = site.peak_flops_per_s(dtype)
    if measured or peak is None:
        return measured and measured.value
    if dtype not in NARROW:
        return TYPICAL_CEILING * peak
    wide = site.peak_flops_per_s("bf16")
    reached = ceiling(site, "bf16")
    return peak * (min(NARROW_CEILING, reached / wide) if wide and reached else NARROW_CEILING)


def sustained(site: Site, dtype: str) -> float | None:
    """Returns the FLOP/s that matrix products reach over hours. It is the highest rate (`ceiling`),
    reduced if this rate would need more power than the power limit of the device.

    The power limit reduces the clock. Power is assumed to be proportional to the cube of the clock,
    since voltage is proportional to the clock. If the highest rate is unknown, the result is None.
    """
    burst = ceiling(site, dtype)
    watts = site.device.watts
    if not (burst and watts and dtype in JOULES_PER_FLOP):
        return burst
    return burst * min(1.0, watts.value / (burst * JOULES_PER_FLOP[dtype])) ** (1 / 3)


def _check_units(site: Site) -> None:
    """Raises ConfigError if a number of the site is too small for any device, or if the rate of
    matrix products is above the peak. A number that is too small was mostly given in GB, GB/s or
    kW instead of bytes, bytes/s or W.
    """
    device = site.device
    links = site.links
    near = links.intra_node[0].bytes_per_s if links.intra_node else None
    for name, fact, least, unit in (
        ("device.memory_bytes", device.memory_bytes, 1e9, "bytes"),
        ("device.memory_bytes_per_s", device.memory_bytes_per_s, 1e10, "bytes/s"),
        ("device.watts", device.watts, 10, "watts"),
        ("links.intra_node.bytes_per_s", near, 1e6, "bytes/s"),
        ("links.inter_node_bytes_per_s", links.inter_node_bytes_per_s, 1e6, "bytes/s"),
    ):
        if fact and fact.value < least:
            raise ConfigError(
                f"site {site.name}: {name}: {fact.value:,g} is not believable for {device.name}."
                f" Give {unit}, at least {least:g}."
            )
    for dtype, fact in device.matmul_flops_per_s.items():
        if fact.value > (site.peak_flops_per_s(dtype) or fact.value):
            raise ConfigError(
                f"site {site.name}: device.matmul_flops_per_s.{dtype}: {fact.value:.4g} is above"
                f" the peak of {device.name}, {site.peak_flops_per_s(dtype):.4g}. Give the"
                " FLOP/s that a matrix product reaches."
            )


def _network_per_domain(site: Site, per_node: float) -> float:
    """Returns the network bandwidth in bytes/s out of the group of devices that fast links connect.
    The group may span several nodes (NVL72). `per_node` is the bandwidth out of one node.
    """
    tiers = site.links.intra_node
    nodes = max(1.0, tiers[-1].num_devices / site.devices_per_node) if tiers else 1.0
    return per_node * nodes


def coefficient(fitted: tuple, guess: tuple, bounds: tuple, text: str) -> Any:
    """Returns a dataclass field of Coefficients. The mean of `fitted` is its default.

    Args:
        fitted: (mean, standard deviation of the logarithm) over the published machines, computed by
            `fitting.population`.
        guess: (mean, standard deviation of the logarithm) that was assumed before any machine was
            fitted, from benchmarks of vendors and libraries.
        bounds: (lowest, highest) value that physics allows.
        text: Documentation of the coefficient.
    """
    metadata = {"doc": text, "spread": fitted[1], "guess": guess, "bounds": bounds}
    return dataclasses.field(default=fitted[0], metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coefficients(Record):
    """Efficiencies and latencies of one machine with its software, from which step times are
    computed. The defaults are the average of the published machines.

    The bounds are physical limits. No efficiency is above 1, so no bandwidth is above the peak.
    `factor` multiplies the whole step time and is at least 1. Therefore no fit can result in a
    matrix product or link that is faster than the highest measured rate. When a new machine is
    calibrated, the prior of a coefficient has the default as its mean, and the standard deviation
    over the published machines.
    """

    gemm_efficiency: float = coefficient(
        (0.925, 0.11),
        (0.80, 0.15),
        (0.2, 1.0),
        "share of the highest matrix-product FLOP/s that very large matrix products reach",
    )
    gemm_edge: float = coefficient(
        (45.4, 0.41),
        (44.0, 0.4),
        (5.0, 400.0),
        "side of a matrix, in elements, at which half the efficiency is lost",
    )
    memory_efficiency: float = coefficient(
        (0.870, 0.26),
        (0.85, 0.2),
        (0.3, 1.0),
        "share of the memory bandwidth that element-wise kernels reach",
    )
    attention_efficiency: float = coefficient(
        (0.538, 0.38),
        (0.5, 0.3),
        (0.1, 1.0),
        "share of the highest matrix-product FLOP/s that attention with stored scores reaches",
    )
    flash_efficiency: float = coefficient(
        (0.568, 0.30),
        (0.5, 0.3),
        (0.1, 1.0),
        "share of the highest matrix-product FLOP/s that fused attention reaches",
    )
    unfused_traffic: float = coefficient(
        (3.01, 0.27),
        (3.0, 0.3),
        (1.0, 5.0),
        "ratio of the memory traffic of unfused to fused norm and rotary",
    )
    score_bytes: float = coefficient(
        (12.7, 0.38),
        (14.0, 0.25),
        (6.0, 40.0),
        "bytes of memory traffic per attention score that is written to memory",
    )
    launch_s: float = coefficient(
        (1.33e-05, 0.46), (12e-6, 0.5), (1e-7, 2e-4), "host seconds per kernel launch"
    )
    backward_launches: float = coefficient(
        (3.35, 0.30),
        (3.0, 0.3),
        (1.0, 8.0),
        "ratio of kernels in a backward pass to kernels in a forward pass",
    )
    collective_launch_s: float = coefficient(
        (2.15e-05, 0.46), (20e-6, 0.5), (1e-7, 2e-2), "host seconds per tensor parallel collective"
    )
    node_efficiency: float = coefficient(
        (0.815, 0.29),
        (0.75, 0.2),
        (0.1, 1.0),
        "share of the bandwidth that the links inside a node reach",
    )
    node_sharing: float = coefficient(
        (0.302, 0.83),
        (0.2, 0.7),
        (0.01, 1.0),
        "power of (group size / node size) by which bandwidth falls: 0 on a switch, 1 on a mesh",
    )
    node_latency_s: float = coefficient(
        (2.13e-05, 0.80),
        (12e-6, 0.5),
        (1e-6, 1e-2),
        "seconds per step of a collective inside a node",
    )
    network_efficiency: float = coefficient(
        (0.871, 0.28),
        (0.75, 0.3),
        (0.1, 1.0),
        "share of the bandwidth that the network between nodes reaches",
    )
    network_latency_s: float = coefficient(
        (2.46e-05, 0.50),
        (25e-6, 0.5),
        (2e-6, 1e-3),
        "seconds per step of a collective between nodes",
    )
    pipeline_exposed: float = coefficient(
        (0.889, 0.31), (0.9, 0.3), (0.05, 1.0), "share of pipeline sends that no computation hides"
    )
    data_efficiency: float = coefficient(
        (0.445, 0.48),
        (0.5, 0.4),
        (0.02, 1.0),
        "share of the bandwidth that gradient reduction and weight gathering reach",
    )
    data_contention: float = coefficient(
        (0.203, 0.47),
        (0.2, 0.5),
        (0.01, 0.6),
        "power of the number of nodes by which data parallel bandwidth falls",
    )
    microbatch_s: float = coefficient(
        (0.000932, 0.68),
        (1e-3, 0.7),
        (1e-6, 5e-2),
        "host seconds per micro-batch: data, loss, schedule",
    )
    step_s: float = coefficient(
        (0.00685, 1.11),
        (10e-3, 0.7),
        (1e-4, 2.0),
        "host seconds per step: gradient norm, logging, loader",
    )
    factor: float = coefficient(
        (1.04, 0.07),
        (1.1, 0.08),
        (1.0, 2.0),
        "factor of the step time for clocks, stragglers and unmodelled work",
    )

    torch_factor: float = coefficient(
        (1.08, 0.11),
        (1.0, 0.15),
        (1.0, 2.0),
        "further factor of the step time for plain torch code: FSDP2, DTensor and torch.compile",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in dataclasses.fields(self):
            value, (low, high) = getattr(self, field.name), field.metadata["bounds"]
            if not low <= value <= high:
                raise ConfigError(
                    f"coefficients.{field.name}: {value:.4g} is not allowed"
                    f" ({field.metadata['doc']}). Give {low:g} to {high:g}."
                )


NAMES = tuple(field.name for field in dataclasses.fields(Coefficients))
"""Names of all efficiencies and latencies in `Coefficients`. Arrays of coefficients have their
elements in this order."""
SPREAD = {field.name: field.metadata["spread"] for field in dataclasses.fields(Coefficients)}
"""Maps the name of each coefficient to the standard deviation of its logarithm over the published
machines. It is the standard deviation of the coefficient's prior when a new machine is
calibrated."""
BOUNDS = {field.name: field.metadata["bounds"] for field in dataclasses.fields(Coefficients)}
"""Maps the name of each coefficient to (lowest, highest) allowed value, which are physical
limits."""
GUESS = {field.name: field.metadata["guess"] for field in dataclasses.fields(Coefficients)}
"""Maps the name of each coefficient to (mean, standard deviation of the logarithm) that were
assumed before any machine was fitted."""
