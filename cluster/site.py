"""`Site`: the hardware and scheduler facts of one machine, each number with its source and its
error.

The planner, the launcher and the MFU computation read one site file, so that a peak rate or a
memory size is given in one place only. Standard library only.
"""

import dataclasses
import math
import os
import re
from pathlib import Path
from typing import Any, Literal, Self

from cluster.record import (
    ConfigError,
    MissingError,
    Record,
    field_doc,
    from_one,
    html_table,
    must,
    one_line,
    suggestion,
)
from cluster.scheduler import Kubernetes, SchedulerSettings, Slurm

SITES = Path(__file__).parent / "sites"
DTYPES = ("fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4")
MAX_PEAK_FLOPS_PER_S = 1e17
"""Upper limit of a believable peak of one device, in FLOP/s. It is fifty times the peak of the
fastest accelerator sold, so a larger value is in a wrong unit."""
LEAST_PEAK_FLOPS_PER_S = 1e12
"""Lower limit of a believable peak of one accelerator, in FLOP/s. A smaller value was probably
given in TFLOP/s. For a CPU core the limit is 1e6 FLOP/s."""


EXAMPLE_FACT = 'memory_bytes = { value = 85899345920, source = "data sheet, 80 GiB" }'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fact(Record):
    """One number with its source and its relative error."""

    value: float = field_doc(
        "the number itself; the name of the site's field contains the unit, such as bytes_per_s",
        must(lambda value: 0 < value < math.inf, "Give a finite number above 0."),
    )
    source: str = field_doc(
        "document or measurement from which the number comes, named so that anyone can look it up",
        must(str.strip, "Say where the number comes from."),
    )
    error: float | None = field_doc(
        "relative half-width of the error, such as 0.05 for +-5 %; None if the source states no"
        " error",
        must(lambda error: 0 <= error <= 1, "Give a fraction from 0 to 1 (5 % is 0.05)."),
        default=None,
    )

    @classmethod
    def from_dict(cls, data: Any, path: str = "") -> Self:
        """Returns the number that `data`, a table of a site file with value, source and error,
        describes.

        Raises:
            MissingError: `data` is a number without a source.
            ConfigError: A key is unknown, keys are missing, or a value has the wrong type.
        """
        if isinstance(data, int | float) and not isinstance(data, bool):
            raise MissingError([f"{path}.source"])
        return super().from_dict(data, path)

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.0%}"
        return f"{self.value:.4g}{error} ({self.source})"


def check_dtype(dtype: str, path: str) -> None:
    """Raises ConfigError if `dtype` is not one of `DTYPES`."""
    if dtype not in DTYPES:
        raise ConfigError(f"{path}: {dtype!r} is not a known dtype. {suggestion(dtype, DTYPES)}")


def check_rates(rates: dict[str, Fact], path: str) -> None:
    """Raises ConfigError if a rate belongs to an unknown dtype, or is above MAX_PEAK_FLOPS_PER_S,
    which no device can reach.
    """
    for dtype, fact in rates.items():
        check_dtype(dtype, path)
        if fact.value > MAX_PEAK_FLOPS_PER_S:
            raise ConfigError(
                f"{path}.{dtype}: {fact.value:.3g} FLOP/s is not believable for one device. Give at"
                f" most {MAX_PEAK_FLOPS_PER_S:.0e}, in FLOP/s of one device, not of a node or a"
                " cluster."
            )


GPU_NAMES = ("NVIDIA", "AMD Instinct", "GPU")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device(Record):
    """The device of one rank: a GPU, a GCD, a NeuronCore or a CPU core."""

    name: str = field_doc(
        "vendor's name of the device, and the part of it that one rank uses, such as 'AMD"
        " Instinct MI250X, one GCD'"
    )
    memory_bytes: Fact | None = field_doc("memory of one device, in bytes", default=None)
    memory_bytes_per_s: Fact | None = field_doc(
        "memory bandwidth of one device, in bytes/s", default=None
    )
    watts: Fact | None = field_doc(
        "power of one device, in watts: the measured power, or the thermal design power",
        default=None,
    )
    peak_flops_per_s: dict[str, Fact] = field_doc(
        "dense peak of one device by dtype, in FLOP/s", check_rates, default_factory=dict
    )
    matmul_flops_per_s: dict[str, Fact] = field_doc(
        "highest measured rate of a matrix product on one device by dtype, in FLOP/s",
        check_rates,
        default_factory=dict,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        least = LEAST_PEAK_FLOPS_PER_S if self.is_gpu or self.trainium else 1e6
        for field in ("peak_flops_per_s", "matmul_flops_per_s"):
            for dtype, fact in getattr(self, field).items():
                if fact.value < least:
                    raise ConfigError(
                        f"device.{field}.{dtype}: {fact.value:g} FLOP/s is not believable for"
                        f" {self.name}. Give FLOP/s, not TFLOP/s: {fact.value:g} TFLOP/s are"
                        f" {fact.value * 1e12:g}."
                    )

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU for which torch uses CUDA, ROCm or XPU, judged by its
        name.
        """
        return any(name in self.name for name in GPU_NAMES)

    @property
    def is_cpu(self) -> bool:
        """Whether the device is a core or a processor of the host, judged by its name."""
        found = re.search(r"\b(?:cpu|core|cores)\b", self.name, re.IGNORECASE)
        return found is not None and not self.is_gpu and self.trainium is None

    @property
    def is_part(self) -> bool:
        """Whether the device is a part of a GPU (a GCD or a tile), judged by its name."""
        return re.search(r"\b(?:GCD|tile)\b", self.name) is not None

    @property
    def trainium(self) -> str | None:
        """Generation of AWS Trainium as AWS's tools name it (trn1, trn2), judged by the name of the
        device. None for other devices.
        """
        found = re.search(r"\b(?:Trainium|trn) ?(\d*)", self.name, re.IGNORECASE)
        return f"trn{found[1] or 1}" if found else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntraNodeLink(Record):
    """Bandwidth between devices of one node, for process groups of up to `num_devices` devices."""

    num_devices: int = field_doc(
        "largest number of neighbouring devices that exchange data at this bandwidth"
    )
    bytes_per_s: Fact = field_doc("bandwidth of one device in one direction, in bytes/s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links(Record):
    """Bandwidths of the links between devices, and topology of the network between nodes. An
    unknown value is left out.
    """

    intra_node: tuple[IntraNodeLink, ...] = field_doc(
        "bandwidths inside a node, one per size of the group of devices, smallest group first",
        default=(),
    )
    inter_node_bytes_per_s: Fact | None = field_doc(
        "bandwidth from one node to all other nodes, in one direction, in bytes/s", default=None
    )
    topology: Literal["fat_tree", "dragonfly", "torus"] | None = field_doc(
        "topology of the network between nodes; fat_tree: a full fat tree, in which each node"
        " always has its whole bandwidth",
        default=None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Storage(Record):
    """The shared file system of a site. A value is left out if it is unknown, or if it depends on
    the storage that the customer has ordered.
    """

    write_bytes_per_s: Fact | None = field_doc(
        "write bandwidth of all nodes together, in bytes/s", default=None
    )
    read_bytes_per_s: Fact | None = field_doc(
        "read bandwidth of all nodes together, in bytes/s", default=None
    )
    quota_bytes: Fact | None = field_doc(
        "bytes that a project may store on the file system", default=None
    )
    metadata_calls_per_s: Fact | None = field_doc(
        "number of metadata operations per second: opening, creating, renaming and querying files",
        default=None,
    )


absolute = must(lambda path: path.startswith("/"), "Give an absolute path there.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemotePaths(Record):
    """The table `[there]`: Python environment, run folder and source of the kit on the cluster
    behind a login node.
    """

    python: str = field_doc(
        "absolute path of Python on the cluster, in an environment with the packages that the kit"
        " needs",
        absolute,
    )
    folder: str = field_doc(
        "folder on the cluster for run directories, on a file system that the compute nodes share",
        absolute,
    )
    source: str | None = field_doc(
        "folder on the cluster that contains the kit; default: the folder to which `sync` copies"
        " the kit",
        absolute,
        default=None,
    )
    sync: bool = field_doc(
        "whether to copy the source of this kit from this machine into `folder`, once per version"
        " and user",
        default=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.source is None) is not self.sync:
            raise ConfigError(
                "there: give either source, the kit's folder there, or sync = true, which sends it."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnRun(Record):
    """A measured step time of a user's own run on a site. `kit calibrate RUN --out FILE` writes it
    into a site file, and the planner is fitted to it.
    """

    source: str = field_doc("run directory and attempt in which the time was measured")
    step_time_s: float = field_doc(
        "median seconds per optimizer step",
        must(lambda value: 0 < value < math.inf, "Give seconds above 0."),
    )
    spec: str = field_doc("model of the run, as the JSON text of its spec.json")
    plan: str = field_doc("layout of the run, as the JSON text of its plan.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site(Record):
    """A machine: its devices, links, scheduler and price, each number with its source.

    Example:

        >>> from cluster.site import Site
        >>> site = Site.load("frontier")
        >>> site.devices_per_node, site.device.name
        (8, 'AMD Instinct MI250X, one GCD')
        >>> print(site.device.peak_flops_per_s["bf16"].value)
        191500000000000.0

    `Site.names()` lists the packaged sites. For your own cluster, write a .toml file with
    `base = "frontier"` and the values that differ. `kit site init mine.toml` writes such a file
    from what Slurm reports.

    Next: `kit.launch(..., site="mine.toml")`, or `kit plan MODEL --site mine.toml`.
    """

    name: str = field_doc("name of the site; Site.load(name) loads a packaged site", one_line)
    description: str = field_doc("description of the machine in one line")
    scheduler: Literal["local", "slurm", "kubernetes"] = field_doc(
        "program that starts the processes"
    )
    devices_per_node: int = field_doc(
        "number of devices of a node, with one process per device", from_one
    )
    engine: Literal["native", "deepspeed", "neuron"] = field_doc(
        "engine (implementation of the optimizer step) that plans for this site use by default",
        default="native",
    )
    device: Device = field_doc("device of one rank, such as a GPU")
    cores_per_node: Fact | None = field_doc(
        "number of cores of the host processors of one node", default=None
    )
    links: Links = field_doc(
        "bandwidths of the links between devices, and topology of the network",
        default_factory=Links,
    )
    storage: Storage = field_doc(
        "bandwidths and quota of the file system that all nodes share", default_factory=Storage
    )
    open_files: Fact | None = field_doc(
        "maximum number of files that a process may have open, sockets included", default=None
    )
    price_per_node_hour: Fact | None = field_doc(
        "price of one node for one hour, in USD", default=None
    )
    own_runs: tuple[OwnRun, ...] = field_doc(
        "measured step times of your own runs, to which the planner is fitted", default=()
    )
    base: str | None = field_doc(
        "name of the packaged site that supplies the values which this file leaves out",
        default=None,
    )
    login: str | None = field_doc(
        "name of the site's login node in ~/.ssh/config, to submit from another machine; default:"
        " jobs are submitted on the login node itself",
        default=None,
    )
    there: RemotePaths | None = field_doc(
        "Python, run folder and source of the kit on the cluster, required with `login`",
        default=None,
    )
    slurm: Slurm | None = field_doc(
        "settings of jobs under Slurm: requested resources, options and start of the ranks",
        default=None,
    )
    kubernetes: Kubernetes | None = field_doc(
        "settings of jobs under Kubernetes: image, resources and settings of the pods", default=None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.login is not None and (
            self.scheduler != "slurm" or not re.fullmatch(r"[\w@.][\w@.:-]*", self.login)
        ):
            raise ConfigError(
                f"site.login: {self.login!r} is not allowed. Give a name of ~/.ssh/config, with"
                " Slurm."
            )

    @classmethod
    def names(cls) -> list[str]:
        """Returns the names of the packaged sites, whose site files come with this package."""
        return sorted(file.name.removesuffix(".toml") for file in SITES.glob("*.toml"))

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> Self:
        """Returns a packaged site by name, or the site described by a `.toml` file.

        A file with a line `base = "frontier"` gives only the values that differ from this base,
        such as the account. If a file for a local site does not give the number of devices or their
        memory, the values of this machine are used.

        Raises:
            ConfigError: The site or the file does not exist, the file is not TOML, or a key or a
                value is not allowed.
        """
        file, data = _read_toml(os.fspath(name_or_path))
        try:
            return cls.from_dict(_with_this_machine(data))
        except MissingError as error:
            example = ""
            if any(name.endswith((".value", ".source")) for name in error.names):
                example = f" Each number has a value and a source, as in {EXAMPLE_FACT}."
            raise ConfigError(f"{file.name}: {error}{example}") from error
        except ConfigError as error:
            raise ConfigError(f"{file.name}: {error}") from error

    def peak_flops_per_s(self, dtype: str) -> float | None:
        """Returns the dense peak of one device in FLOP/s, or None if it is unknown.

        Raises:
            ConfigError: The dtype is not one of `DTYPES`.
        """
        check_dtype(dtype, "dtype")
        fact = self.device.peak_flops_per_s.get(dtype)
        return fact.value if fact else None

    @property
    def scheduler_settings(self) -> SchedulerSettings | None:
        """The table `[slurm]` or `[kubernetes]` for the scheduler of the site. None if the site
        file has no such table, or if the scheduler is `local`.
        """
        return {"slurm": self.slurm, "kubernetes": self.kubernetes}.get(self.scheduler)

    def profile(self, name: str) -> dict[str, str]:
        """Returns the environment variables of the profile `name`, a named set of variables in the
        site file. A caller adds them to `JobSpec.environment`.

        Raises:
            ConfigError: The table of the site's scheduler has no profile of this name.
        """
        profiles = self.scheduler_settings.profiles if self.scheduler_settings else {}
        if name not in profiles:
            raise ConfigError(
                f"site.{self.scheduler}.profiles: {name!r} is unknown. {suggestion(name, profiles)}"
            )
        return dict(profiles[name])

    def with_measured_peak(
        self, dtype: str, value: float, source: str, error: float | None = None
    ) -> Self:
        """Returns a copy of the site with a measured peak for `dtype`: `value` FLOP/s per device,
        with the relative half-width `error`. `source` describes the measurement.

        Raises:
            ConfigError: The value is not a believable peak of one device.
        """
        peaks = {
            **self.device.peak_flops_per_s,
            dtype: Fact(value=value, source=source, error=error),
        }
        return self.replace(device=self.device.replace(peak_flops_per_s=peaks))

    def _repr_html_(self) -> str:
        peaks = self.device.peak_flops_per_s
        links = self.links
        facts = {
            "memory (bytes)": self.device.memory_bytes,
            **{f"peak {name} (FLOP/s)": peaks.get(name) for name in DTYPES[:3]},
            **{f"peak {name} (FLOP/s)": peaks[name] for name in DTYPES if name in peaks},
            **{
                f"within {link.num_devices} devices (bytes/s)": link.bytes_per_s
                for link in links.intra_node
            },
            "between nodes (bytes/s)": links.inter_node_bytes_per_s,
            "price per node and hour (USD)": self.price_per_node_hour,
        }
        rows = [
            ("scheduler", self.scheduler),
            ("devices per node", self.devices_per_node),
            ("device", self.device.name),
            *((name, fact or "unknown") for name, fact in facts.items()),
        ]
        return html_table(f"Site {self.name}: {self.description}", rows, Site)


def _with_this_machine(data: dict) -> dict:
    """Returns `data`, the content of a site file. For a local site, a missing number of devices or
    memory of a device is taken from this machine: one device per CPU core.
    """
    if data.get("scheduler") != "local" or not isinstance(data.get("device"), dict):
        return data
    cores = os.cpu_count() or 1
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = {
        "value": memory_bytes // cores,
        "source": f"this machine: {memory_bytes} bytes of memory / {cores} cores",
    }
    return {"devices_per_node": cores, **data, "device": {"memory_bytes": memory, **data["device"]}}


def _read_toml(name: str) -> tuple[Path, dict]:
    """Returns (file, content) of a site. The content also has the values of the base for keys that
    the file leaves out.
    """
    import tomllib

    file = Path(name).expanduser() if name.endswith(".toml") else SITES / f"{name}.toml"
    if not name.endswith(".toml") and name not in Site.names():
        raise ConfigError(
            f"site: {name!r} is unknown. {suggestion(name, Site.names())} Or give a .toml file."
        )
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        message = (
            f"site: {name}: cannot be read ({error.strerror}). Give a .toml file or one of"
            f" {Site.names()}."
        )
        raise ConfigError(message) from error
    except (ValueError, RecursionError) as error:  # Not TOML, not UTF-8, or nested too deeply.
        raise ConfigError(f"site: {name}: not valid TOML ({error}).") from error
    base = data.get("base")
    if base is None:
        return file, data
    if base not in Site.names() or base == name:
        message = f"{file.name}: site.base: {base!r} is not another packaged site."
        raise ConfigError(f"{message} {suggestion(str(base), Site.names())}")
    joined = _laid_over(_read_toml(base)[1], data)
    _check_tables_are_used(file, data, joined["scheduler"])
    return file, joined


def _check_tables_are_used(file: Path, data: dict, scheduler: str) -> None:
    """Raises ConfigError if a site file has the table of a scheduler that the site does not use. An
    example is `[slurm]` in a file with the base `laptop` and without the key `scheduler`.
    """
    if "scheduler" in data:
        return
    for name in ("slurm", "kubernetes"):
        if name in data and scheduler != name:
            raise ConfigError(
                f"{file.name}: site.scheduler: {scheduler!r}, of the base {data['base']!r}, does"
                f' not use the table [{name}]. Add the line scheduler = "{name}", or remove the'
                " table."
            )


def _laid_over(base: dict, data: dict) -> dict:
    """Returns a copy of `base` with the values of `data`. Tables are merged key by key. All other
    values of `base` are replaced.
    """
    joined = dict(base)
    for key, value in data.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            joined[key] = _laid_over(base[key], value)
        else:
            joined[key] = value
    return joined
