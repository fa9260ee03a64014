"""Hardware: the numbers of a machine that step time needs; Coefficients: what a calibration fits
to them. No torch.
"""

import dataclasses
from typing import Any, Self

import numpy as np

from cluster.record import ConfigError, Record
from cluster.site import Site
from kit.estimate.theory.layouts import Columns

Number = float | np.ndarray
FULL_DEVICES = 8
"""Larger nodes are wired in groups of about this size."""
TYPICAL_CEILING = 0.85
"""Of the peak, by the best matrix product, where a site gives no measured ceiling (A100 0.90,
H100 0.82)."""
NARROW = {"fp8": 2.0, "mxfp8": 2.0, "nvfp4": 4.0}
"""How much faster than bf16 the matrix unit is at its peak, where a site does not say; attention
stays in bf16."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware(Columns):
    """What a step's time depends on; every number may be an array, one value per layout.

    Bandwidths are of one direction. Groups of up to `near_devices` use `near_bytes_per_s`, up to
    `node_devices` use `node_bytes_per_s` of one device; larger groups cross `network_bytes_per_s`,
    which all devices of a node share.
    """

    peak_flops_per_s: Number
    """Of the data sheet, for MFU."""
    attention_flops_per_s: Number
    """The most that a product in bf16 was seen to reach."""
    matmul_flops_per_s: Number
    """The same for the products of linear layers, which may have a narrow format."""
    memory_bytes: Number
    memory_bytes_per_s: Number
    near_devices: Number
    near_bytes_per_s: Number
    node_devices: Number
    node_bytes_per_s: Number
    full_devices: Number
    """A group as large as this has all links of its devices: those of a node, at most
    FULL_DEVICES."""
    network_bytes_per_s: Number
    price_per_device_hour: Number
    """NaN where the site has none."""

    @classmethod
    def of(cls, site: Site, dtype: str = "bf16") -> Self:
        """Returns the numbers of a site, for matrix products in a dtype that it has a peak for, or
        in one of `NARROW`.

        Raises:
            ConfigError: the site lacks a number that step time needs.
        """
        peak = site.peak_flops_per_s("bf16" if dtype in NARROW else dtype)
        needed = {
            f"device.peak_flops_per_s.{dtype}": peak,
            "device.memory_bytes": site.device.memory_bytes,
            "device.memory_bytes_per_s": site.device.memory_bytes_per_s,
        }
        if missing := [name for name, value in needed.items() if value is None]:
            raise ConfigError(
                f"site {site.name}: step time needs {', '.join(missing)}. Add them to the site"
                " file, or measure them (`kit bench --out FILE.toml`)."
            )
        assert peak and site.device.memory_bytes and site.device.memory_bytes_per_s
        matmul = site.device.matmul_flops_per_s.get(dtype if dtype not in NARROW else "bf16")
        ceiling = matmul.value if matmul else peak * TYPICAL_CEILING
        narrow = site.device.peak_flops_per_s.get(dtype) if dtype in NARROW else None
        faster = narrow.value / peak if narrow else NARROW.get(dtype, 1.0)
        tiers = site.links.intra_node
        memory_rate = site.device.memory_bytes_per_s.value
        # Shared memory where no link is given.
        near = tiers[0].bytes_per_s.value if tiers else memory_rate
        network = site.links.inter_node_bytes_per_s
        price = site.price_per_node_hour
        return cls(
            peak_flops_per_s=peak,
            attention_flops_per_s=ceiling,
            matmul_flops_per_s=ceiling * faster,
            memory_bytes=site.device.memory_bytes.value,
            memory_bytes_per_s=memory_rate,
            near_devices=float(tiers[0].num_devices if tiers else site.devices_per_node),
            near_bytes_per_s=near,
            node_devices=float(max(site.devices_per_node, tiers[-1].num_devices if tiers else 1)),
            node_bytes_per_s=tiers[-1].bytes_per_s.value if tiers else near,
            full_devices=float(min(FULL_DEVICES, site.devices_per_node)),
            network_bytes_per_s=_network_per_domain(site, network.value if network else near),
            price_per_device_hour=price.value / site.devices_per_node if price else float("nan"),
        )

    @property
    def is_narrow(self) -> np.ndarray:
        """Where linear layers multiply in a format below bf16, bool."""
        return np.asarray(self.matmul_flops_per_s) > 1.01 * np.asarray(self.attention_flops_per_s)

    @classmethod
    def like(cls, peak_flops_per_s: float) -> Self:
        """Returns a guess from the peak alone, in the proportions of an A100 node, for machines
        without a site.
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
            price_per_device_hour=float("nan"),
        )

    def select(self, rows: Any) -> Self:
        """Returns some elements; numbers that are not arrays stay."""
        return self.map(lambda value: value[rows] if isinstance(value, np.ndarray) else value)


def _network_per_domain(site: Site, per_node: float) -> float:
    """Returns bytes/s out of one fast domain, which may span several nodes (NVL72)."""
    tiers = site.links.intra_node
    nodes = max(1.0, tiers[-1].num_devices / site.devices_per_node) if tiers else 1.0
    return per_node * nodes


def coefficient(fitted: tuple, guess: tuple, bounds: tuple, text: str) -> Any:
    """Returns a field of Coefficients.

    Args:
        fitted: mean and ln-spread among the published machines, as `fitting.population` finds them.
        guess: the same before any machine was looked at, from vendors' and libraries' benchmarks.
        bounds: lowest and highest value that physics allows.
        text: what it is.
    """
    metadata = {"doc": text, "spread": fitted[1], "guess": guess, "bounds": bounds}
    return dataclasses.field(default=fitted[0], metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coefficients(Record):
    """Efficiencies and latencies of one machine with its software; defaults are the average of the
    published machines.

    Bounds are physics: no efficiency or bandwidth is above the peak, and `factor`, which multiplies
    their times, is at least 1, so that no fit implies a faster product or link than was ever seen.
    The spread of each between machines is the prior of a calibration.
    """

    gemm_efficiency: float = coefficient(
        (0.909, 0.12), (0.80, 0.15), (0.2, 1.0), "of the peak, by very large matrix products"
    )
    gemm_edge: float = coefficient(
        (46.3, 0.41), (44.0, 0.4), (5.0, 400.0), "matrix side at which half the efficiency is lost"
    )
    memory_efficiency: float = coefficient(
        (0.858, 0.29), (0.85, 0.2), (0.3, 1.0), "of the memory bandwidth, by element-wise kernels"
    )
    attention_efficiency: float = coefficient(
        (0.55, 0.33), (0.5, 0.3), (0.1, 1.0), "of the peak, by written-out attention products"
    )
    flash_efficiency: float = coefficient(
        (0.432, 0.48), (0.5, 0.3), (0.1, 1.0), "of the peak, by fused attention"
    )
    unfused_traffic: float = coefficient(
        (3.0, 0.27), (3.0, 0.3), (1.0, 5.0), "memory traffic of unfused over fused norm and rotary"
    )
    score_bytes: float = coefficient(
        (12.9, 0.39), (14.0, 0.25), (6.0, 40.0), "memory traffic per written-out attention score"
    )
    launch_s: float = coefficient(
        (1.33e-05, 0.46), (12e-6, 0.5), (1e-7, 2e-4), "host time per kernel"
    )
    backward_launches: float = coefficient(
        (3.36, 0.30), (3.0, 0.3), (1.0, 8.0), "kernels of a backward pass over a forward pass"
    )
    collective_launch_s: float = coefficient(
        (2.12e-05, 0.46), (20e-6, 0.5), (1e-7, 2e-2), "host time per tensor-parallel collective"
    )
    node_efficiency: float = coefficient(
        (0.849, 0.28), (0.75, 0.2), (0.1, 1.0), "of the links inside a node"
    )
    node_sharing: float = coefficient(
        (0.462, 0.80),
        (0.2, 0.7),
        (0.01, 1.0),
        "power at which that falls in groups that do not fill a node: 0 on a switch, 1 on a mesh",
    )
    node_latency_s: float = coefficient(
        (1.83e-05, 0.92), (12e-6, 0.5), (1e-6, 1e-2), "per step of a collective inside a node"
    )
    network_efficiency: float = coefficient(
        (0.904, 0.28), (0.75, 0.3), (0.1, 1.0), "of the network between nodes"
    )
    network_latency_s: float = coefficient(
        (2.44e-05, 0.50), (25e-6, 0.5), (2e-6, 1e-3), "per step of a collective between nodes"
    )
    pipeline_exposed: float = coefficient(
        (0.705, 0.47), (0.9, 0.3), (0.05, 1.0), "part of pipeline sends that nothing hides"
    )
    data_efficiency: float = coefficient(
        (0.478, 0.44), (0.5, 0.4), (0.02, 1.0), "of the links, by gradient reduction and gathering"
    )
    data_contention: float = coefficient(
        (0.22, 0.46), (0.2, 0.5), (0.01, 0.6), "power at which that falls with the nodes of the job"
    )
    microbatch_s: float = coefficient(
        (0.000941, 0.68),
        (1e-3, 0.7),
        (1e-6, 5e-2),
        "host time per micro-batch: data, loss, schedule",
    )
    step_s: float = coefficient(
        (0.0069, 1.16),
        (10e-3, 0.7),
        (1e-4, 2.0),
        "host time per step: gradient norm, logging, loader",
    )
    factor: float = coefficient(
        (1.043, 0.08),
        (1.1, 0.08),
        (1.0, 2.0),
        "of the whole time: clocks, stragglers, what is not modelled",
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
SPREAD = {field.name: field.metadata["spread"] for field in dataclasses.fields(Coefficients)}
BOUNDS = {field.name: field.metadata["bounds"] for field in dataclasses.fields(Coefficients)}
GUESS = {field.name: field.metadata["guess"] for field in dataclasses.fields(Coefficients)}
