"""Writes a first site file from Slurm's report on its nodes.

Slurm does not know numbers such as the peak FLOP/s. They come from the packaged site (a site file
of the kit) with the same GPU or instance type. If no packaged site has a number, its line in the
new file is marked EDIT.

Source of the formats: https://slurm.schedmd.com/sinfo.html, https://slurm.schedmd.com/gres.html and
https://slurm.schedmd.com/slurm.conf.html (Gres).
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence

from cluster.record import ConfigError, counted, suggestion
from cluster.site import Device, Fact, Site
from cluster.state import JobError

SINFO = ("sinfo", "--noheader", "--exact", "--noconvert", "--format=%P|%D|%c|%m|%l|%s|%G|%f|%N")
CONFIG = ("scontrol", "show", "config")
LINE = re.compile(
    r"(?P<partition>[^|*]+)(?P<default>\*?)\|(?P<count>\d+)\|(?P<cpus>\d+)\+?\|"
    r"(?P<megabytes>\d+)\+?\|(?P<limit>[^|]*)\|(?:\d+-)?(?P<most>[^|]*)\|(?P<gres>[^|]*)"
    r"(?:\|(?P<features>[^|]*)\|(?P<names>.*))?"
)
LEAST_SEPARATORS = 6
"""Minimum number of `|` in a line that sinfo prints in the format of SINFO. Lines with fewer come
from wrapper scripts and are ignored."""
GRES_COUNT = re.compile(r"(\d+)([KMGTP]?)", re.IGNORECASE)
COUNT_UNITS = " KMGTP"
"""Suffixes of the count of a GRES (generic resource), in ascending powers of 1,024: none, K, M, G,
T and P."""
MAX_GPUS = 128
"""Largest plausible number of GPUs of a node. It allows for MIG: eight GPUs with seven MIG slices
each count as 56."""
TIME = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)")
"""Regular expression for a time limit as sinfo prints it: [[days-]hours:]minutes:seconds."""
SITES_OF_CHIPS = {
    "a100": {40: "perlmutter", 80: "selene"},
    "h100": {80: "dgx-h100"},
    "h200": {141: "hgx-h200"},
    "b200": {180: "hgx-b200"},
    "b300": {288: "hgx-b300"},
    "gb200": {186: "gb200-nvl72"},
    "gb300": {288: "gb300-nvl72"},
    "mi250": {128: "frontier"},
    "mi250x": {128: "frontier"},
    "mi300x": {192: "mi300x"},
    "mi325x": {256: "mi325x"},
    "mi350x": {288: "mi350x"},
    "mi355x": {288: "mi355x"},
}
"""Name of the packaged site with the data of a GPU, by chip name and then by GB of memory per
GPU."""
MEMORY_SIZES = {size for sites in SITES_OF_CHIPS.values() for size in sites}
CHIP = re.compile(
    rf"(?<![a-z0-9])({'|'.join(sorted(SITES_OF_CHIPS, key=len, reverse=True))})"
    r"(?![a-z]|\d)|(?<![a-z0-9])(a100|h100|h200)(?=sxm|\d\dgb?)"
)
"""Regular expression for a chip name in a GRES type or a node feature. It finds h100 in
`nvidia_h100_80gb_hbm3`, but not in `gh100`."""
MIG_SLICE = re.compile(r"\d+g[._-]?\d+gb|mig")
"""Regular expression for a GRES type that is a MIG slice of a GPU. Slurm shows each profile of MIG
slices as its own GPU type, with the number of slices: `gpu:1g.10gb:7`, `gpu:a100_3g.20gb:2` or
`gpu:nvidia_h100_80gb_hbm3_1g.10gb:8`. A node may have complete GPUs and slices of several profiles,
separated by commas."""
OTHER_VARIANT = re.compile(rf"pcie|nvl(?!72|ink)|{MIG_SLICE.pattern}")
"""Regular expression for GPU variants that no packaged site describes: PCIe cards, H100 NVL and MIG
slices."""
MEMORY = re.compile(r"(?<!\d)(\d{2,3})(?=g|[_-]|$)")
"""Regular expression for the memory size of a GPU, in GB, in a GRES type or a node feature. It
finds 80 in `a100_80`, `hbm80g` and `h100-80gb`."""
TRAINIUM = re.compile(r"(?<![a-z0-9])trn(\d)([nu]?)(?:[.-]?(\d*xlarge))?(?![a-z0-9])")
"""Regular expression for a Trainium instance type. A feature has the form `trn1.32xlarge`, a node
name of AWS ParallelCluster has the form `compute-dy-trn132xlarge-1`."""
TRAINIUM_CORES = {
    "trn1.2xlarge": 2,
    "trn2.3xlarge": 4,
    "trn2.48xlarge": 64,
    "trn2u.48xlarge": 64,
}
"""Number of logical NeuronCores per instance, for instance types that no packaged site describes.
By default, the Neuron runtime divides a trn2 chip into four logical NeuronCores (AWS Neuron
documentation, Logical NeuronCore configuration)."""
CORES_OF_CHIP = {"1": 2, "2": 4}
"""Number of logical NeuronCores per Trainium chip, by generation (AWS Neuron documentation)."""
NEURON_GRES = ("neuron", "neuroncore", "neurondevice")
TRN1 = "trn1.32xlarge"
LARGEST_SIZES = {
    ("1", 64): "32xlarge",
    ("1", 128): "32xlarge",
    ("2", 96): "48xlarge",
    ("2", 192): "48xlarge",
}
"""Size of the largest Trainium instance, by generation and by the number of CPUs that Slurm counts
without and with two threads per core (AWS EC2 instance types)."""
EDIT_FACT = "# EDIT: {} = {{ value = 0, source = {} }}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gres:
    """One generic resource (GRES) of a node, such as its GPUs of one type."""

    name: str
    kind: str
    """Type of the resource, such as `h100`. Empty if the resource has no type."""
    count: int

    def __str__(self) -> str:
        return ":".join(part for part in (self.name, self.kind, str(self.count)) if part)

    @property
    def is_slice(self) -> bool:
        """Whether the resource is a MIG slice of a GPU, judged by its type."""
        return MIG_SLICE.search(self.kind.lower()) is not None

    @property
    def text(self) -> str:
        """Count and type of these GPUs, such as `8 x h100` or `7 MIG slices 1g.10gb`."""
        if self.is_slice:
            return f"{counted(self.count, 'MIG slice')} {self.kind}"
        return f"{self.count} x {self.kind or 'GPU'}"

    @property
    def accepted_names(self) -> set[str]:
        """Names of this resource that the option `--node-type` accepts, in lower case, such as
        h100, h100:8 and gpu:h100:8.
        """
        return {self.kind.lower(), f"{self.kind}:{self.count}".lower(), str(self).lower()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeType:
    """Nodes of one partition with equal CPUs, memory, generic resources and device features."""

    partition: str
    is_default: bool
    """Whether the partition of these nodes is the default for jobs that name no partition."""
    count: int
    cpus: int
    megabytes: int
    limit: str
    """Time limit of the partition, as sinfo prints it, such as `1-00:00:00` or `infinite`."""
    max_nodes_per_job: str
    """Largest number of nodes of one job, as sinfo prints it, such as `64` or `infinite`."""
    gres_text: str
    features: tuple[str, ...]
    """Slurm features that all of these nodes have."""
    names: str = ""
    """Node names in sinfo's short form, such as `node[1-8]`."""
    chosen_gpu: Gres | None = None
    """GPU type that the user named by `--node-type`. If None, jobs request the first type in
    `gpus`."""

    @property
    def gres(self) -> list[Gres]:
        return parse_gres(self.gres_text)

    @property
    def gpus(self) -> list[Gres]:
        """All GPU types of a node, complete GPUs before MIG slices."""
        types = [each for each in self.gres if each.name == "gpu" and each.count]
        return sorted(types, key=lambda each: each.is_slice)

    @property
    def gpu(self) -> Gres | None:
        """GPU type that jobs request, or None if the nodes have no GPU."""
        if self.chosen_gpu is not None:
            return self.chosen_gpu
        return next(iter(self.gpus), None)

    @property
    def trainium(self) -> str | None:
        """AWS Trainium instance type of these nodes, such as trn1.32xlarge. None for other nodes.

        Slurm on AWS usually has no GRES for NeuronCores. The instance type is therefore read from a
        feature, the node names or the partition name. If only a GRES shows NeuronCores, the
        instance type is `trn`.
        """
        if self.gpu is not None:
            return None
        for text in (*self.features, self.names, self.partition):
            matches = list(TRAINIUM.finditer(text.lower()))
            if not matches:
                continue
            found = max(matches, key=lambda match: match[3] is not None)
            generation, network, size = found.groups()
            if size is None:
                size = LARGEST_SIZES.get((generation, self.cpus))
            family = f"trn{generation}{network}"
            return f"{family}.{size}" if size else family
        is_neuron = any(each.name in NEURON_GRES for each in self.gres)
        return "trn" if is_neuron else None

    @property
    def device_text(self) -> str:
        """Devices of one node as a short text, such as `8 x h100`. Of several GPU types, the type
        that jobs request comes first.
        """
        if self.gpu:
            return " and ".join(gpu.text for gpu in (self.gpu, *other_gpus(self)))
        if self.trainium:
            return f"Trainium, {self.trainium}"
        return counted(self.cpus, "core")

    def __str__(self) -> str:
        marks = ", ".join(self.device_features)
        text = f"{counted(self.count, 'node')} with {self.device_text}, {self.cpus} CPUs"
        return f"{text} ({marks})" if marks else text

    @property
    def device_features(self) -> tuple[str, ...]:
        """Features of these nodes, set by the administrators in Slurm, that name a GPU, its memory
        size or an instance type.
        """
        return tuple(feature for feature in self.features if _names_device(feature))

    def is_called(self, text: str) -> bool:
        """Returns whether `text`, a user's word, names these nodes by GPU type, GRES, feature or
        instance type.
        """
        known = {feature.lower() for feature in self.features}
        known |= {str(each).lower() for each in self.gres}
        for gpu in self.gpus:
            known |= gpu.accepted_names
        if self.trainium:
            known |= {self.trainium, self.trainium.partition(".")[0]}
        return text.lower() in known - {""}


def parse_gres(text: str) -> list[Gres]:
    """Returns the generic resources of a node, in the order in which sinfo prints them.

    Each resource has the form `name[:type][:no_consume][:count[K|M|G|T|P]]`, with sockets or
    indices in parentheses. A number before another number is a type: `gpu:3090:8` means eight GPUs.
    """
    found = []
    for entry in re.sub(r"\([^)]*\)", "", text).split(","):
        fields = [field for field in re.sub(r"^gres[/:]", "", entry.strip()).split(":") if field]
        if not fields or fields[0] == "null":
            continue
        name, *rest = fields
        rest = [field for field in rest if field != "no_consume"]
        count = 1
        if rest and (number := GRES_COUNT.fullmatch(rest[-1])):
            count = int(number[1]) * 1024 ** COUNT_UNITS.index(number[2].upper() or " ")
            rest = rest[:-1]
        found.append(Gres(name=name, kind=":".join(rest), count=count))
    return found


def parse_node_types(text: str) -> list[NodeType]:
    """Returns the node types in `text`, the output of the command SINFO. A node type is a set of
    equal nodes of one partition.

    Nodes are equal if they have equal CPUs, memory, generic resources, device features and instance
    type. Lines without the columns of SINFO are ignored, because wrapper scripts of sites print
    such lines.

    Raises:
        JobError: A line has the columns of SINFO but unexpected values, or no line has these
            columns.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    rows = [line for line in lines if line.count("|") >= LEAST_SEPARATORS]
    merged: dict[tuple, NodeType] = {}
    for line in rows or lines:
        found = LINE.fullmatch(line)
        if found is None:
            raise JobError(
                f"sinfo: {line!r} is not of the form {SINFO[-1]!r}. Is it Slurm's own sinfo?"
            )
        features = (found["features"] or "").replace("(null)", "").split(",")
        nodes = NodeType(
            partition=found["partition"],
            is_default=bool(found["default"]),
            count=int(found["count"]),
            cpus=int(found["cpus"]),
            megabytes=int(found["megabytes"]),
            limit=found["limit"],
            max_nodes_per_job=found["most"],
            gres_text=found["gres"],
            features=tuple(feature for feature in features if feature),
            names=found["names"] or "",
        )
        key = (
            nodes.partition,
            nodes.cpus,
            nodes.megabytes,
            *map(str, nodes.gres),
            *nodes.device_features,
            nodes.trainium,
        )
        if same := merged.get(key):
            nodes = dataclasses.replace(
                same,
                count=same.count + nodes.count,
                features=tuple(each for each in same.features if each in nodes.features),
                names=f"{same.names},{nodes.names}",
            )
        merged[key] = nodes
    return list(merged.values())


def parse_time_limit(limit: str) -> float | None:
    """Returns a time limit of sinfo in seconds, or None if it is no time, such as `infinite`."""
    found = TIME.fullmatch(limit)
    if found is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + rest


def choose_node_type(
    found: Sequence[NodeType], partition: str | None = None, node_type: str | None = None
) -> NodeType:
    """Returns the node type for which the site file is written.

    If several node types match `partition` and `node_type`, the order of preference is: nodes with
    accelerators, nodes of the default partition, and the largest number of nodes.

    Raises:
        ConfigError: The partition is unknown, or no nodes match the node type.
        JobError: The GRES means more than MAX_GPUS GPUs per node, which is implausible.
    """
    wanted = [nodes for nodes in found if partition in (None, nodes.partition)]
    if not wanted:
        names = list(dict.fromkeys(nodes.partition for nodes in found))
        raise ConfigError(
            f"--partition: {partition!r} is unknown. {suggestion(str(partition), names)}"
        )
    if node_type is not None:
        called = [nodes for nodes in wanted if nodes.is_called(node_type)]
        if not called:
            place = f"partition {partition}" if partition else "the cluster"
            lines = [f"{nodes.partition}: {nodes}" for nodes in wanted]
            raise ConfigError(
                f"--node-type: no nodes of {place} are called {node_type!r}. Give a GPU type, a"
                " GRES or a feature of one of these:\n  " + "\n  ".join(lines)
            )
        wanted = called
    chosen = max(
        wanted,
        key=lambda nodes: (bool(nodes.gpu or nodes.trainium), nodes.is_default, nodes.count),
    )
    for gpu in chosen.gpus:
        if node_type is not None and node_type.lower() in gpu.accepted_names:
            chosen = dataclasses.replace(chosen, chosen_gpu=gpu)
    if chosen.gpu and chosen.gpu.count > MAX_GPUS:
        raise JobError(
            f"sinfo: GRES {chosen.gres_text!r} means {chosen.gpu.count:,} GPUs in a node, which is"
            f" not believable (at most {MAX_GPUS}). A type needs a count after it, such as"
            f" gpu:{chosen.gpu.count}:8. Write the site file by hand, with base ="
            ' "generic-gpu-slurm", or take other nodes: --partition, --node-type.'
        )
    return chosen


def other_node_types(found: Sequence[NodeType], chosen: NodeType) -> list[NodeType]:
    """Returns the node types in the partition of `chosen` other than `chosen` itself."""
    described = dataclasses.replace(chosen, chosen_gpu=None)
    return [nodes for nodes in found if nodes.partition == chosen.partition and nodes != described]


def other_gpus(nodes: NodeType) -> list[Gres]:
    """Returns the GPU types of a node other than the type that jobs request."""
    return [gpu for gpu in nodes.gpus if gpu != nodes.gpu]


def unique_node_type_name(nodes: NodeType, found: Iterable[NodeType]) -> str | None:
    """Returns a word for `--node-type` that names only the node type `nodes` in its partition, or
    None if no word does.
    """
    kind = nodes.gpu.kind if nodes.gpu else ""
    words = [kind, str(nodes.gpu or ""), nodes.trainium or ""]
    words += [*nodes.device_features, *nodes.features]
    beside = other_node_types(list(found), nodes)
    for word in filter(None, words):
        if not any(other.is_called(word) for other in beside):
            return word
    return None


def parse_settings(text: str) -> dict[str, str]:
    """Returns Slurm's settings by name. `text` is the output of `scontrol show config`, with lines
    `Key = value`.
    """
    pairs = (line.partition("=") for line in text.splitlines())
    return {key.strip(): value.strip() for key, equals, value in pairs if equals}


def _names_device(feature: str) -> bool:
    """Returns whether a feature of a node names a GPU, its memory or an instance type."""
    if "xlarge" in feature:
        return True
    text = feature.lower()
    if CHIP.search(text) or TRAINIUM.search(text):
        return True
    return any(int(size) in MEMORY_SIZES for size in MEMORY.findall(text))


def packaged_site(nodes: NodeType) -> tuple[str | None, str]:
    """Returns (name, assumption): the packaged site that describes the devices of `nodes`, and what
    was assumed to find it.

    The name is None if no packaged site describes these devices. The assumption is a text for the
    user. It is empty if nothing was assumed.
    """
    features = [feature.lower() for feature in nodes.features]
    if instance := _instance_site(nodes):
        return instance, ""
    if nodes.gpu is None:
        return None, ""
    kind = nodes.gpu.kind.lower()
    texts = [kind] if kind else features
    matches = [CHIP.search(text) for text in texts]
    chips = {match[1] or match[2] for match in matches if match}
    if len(chips) != 1 or any(OTHER_VARIANT.search(text) for text in (kind, *features)):
        return None, ""
    (chip,) = chips
    sites = SITES_OF_CHIPS[chip]
    # Only memory sizes of this chip count, since a feature such as 100g may name the speed of a
    # network.
    sizes = {int(size) for text in features for size in MEMORY.findall(text)} & set(sites)
    sizes |= {int(size) for size in MEMORY.findall(kind.replace(chip, "").replace("nvl72", ""))}
    if len(sizes) == 1:
        return sites.get(min(sizes)), ""
    least = min(sites)
    if len(sites) > 1:
        return sites[least], (
            f"sinfo says {chip} and not how much memory it has: {least} GB are assumed, the least"
            f" of {' and '.join(map(str, sorted(sites)))}"
        )
    if chip == "mi250":
        return sites[least], "sinfo says mi250: the numbers are those of an MI250X, which has more"
    return sites[least], ""


def site_text(
    nodes: NodeType,
    settings: dict[str, str],
    *,
    login: str | None = None,
    account: str | None = None,
    beside: Iterable[NodeType] = (),
) -> str:
    """Returns the text of a site file that describes `nodes`. `Site.load` can read the text.

    `settings` is the result of `parse_settings`. `beside` contains the other node types of the
    partition, on which a job must not run.
    """
    cluster = re.sub(r"[^\w.-]", "-", settings.get("ClusterName", "")) or nodes.partition
    size = f"{counted(nodes.count, 'node')} with {nodes.device_text}"
    description = f"{cluster}, partition {nodes.partition}: {size}"
    lines = [
        f"# Made from what {cluster} says of itself. Look at each line that says EDIT, then at the"
        " rest."
    ]
    instance = _instance_site(nodes)
    if instance:
        lines.append(f"base = {json.dumps(instance)}   # instances of this type")
    lines += [f"name = {json.dumps(cluster)}", f"description = {json.dumps(description)}"]
    if not instance:
        lines += ['scheduler = "slurm"', *_device_count(nodes)]
        lines.append(EDIT_FACT.format("price_per_node_hour", '"your contract"'))
    if login:
        lines += _login(login)
    if not instance:
        lines += _device(nodes)
    elif nodes.trainium == "trn1n.32xlarge":
        network = Fact(value=200e9, source="1,600 Gbit/s of EFA: AWS EC2 Trn1 product page")
        lines += ["", "[links]", f"inter_node_bytes_per_s = {_fact(network)}"]
    lines += ["", "[slurm]", f"partition = {json.dumps(nodes.partition)}"]
    lines.append(_account(settings, account))
    lines += _request(nodes, settings, beside)
    lines.append(
        "# EDIT: modules, environment and network_interfaces, as your system's documentation has"
        " them"
    )
    if nodes.max_nodes_per_job.isdigit():
        lines.append(f"max_nodes = {nodes.max_nodes_per_job}")
    else:
        lines.append("# no max_nodes: sinfo has no limit")
    limit = parse_time_limit(nodes.limit)
    if limit:
        lines += ["", "[[slurm.walltime]]", f"max_hours = {limit / 3600:g}"]
    else:
        lines.append("# no [[slurm.walltime]]: no limit")
    return "\n".join(lines) + "\n"


def _instance_site(nodes: NodeType) -> str | None:
    """Returns the name of the packaged site that describes the cloud instance type of `nodes`, such
    as trn1.32xlarge. Returns None if Slurm names no instance type of these nodes, or if no packaged
    site describes it. Slurm names it in a feature of the nodes (for Trainium, see
    `NodeType.trainium`).
    """
    if nodes.trainium:
        return TRN1 if nodes.trainium in (TRN1, "trn1n.32xlarge") else None
    names = {name.lower(): name for name in Site.names() if "xlarge" in name}
    return next((names[each.lower()] for each in nodes.features if each.lower() in names), None)


def _device_count(nodes: NodeType) -> list[str]:
    if nodes.trainium:
        return [
            'engine = "neuron"',
            f"devices_per_node = {_neuron_cores(nodes) or 1}   # EDIT: NeuronCores of a node, as"
            " `neuron-ls` counts them",
        ]
    if nodes.gpu is None:
        return [f"devices_per_node = {nodes.cpus}"]
    line = f"devices_per_node = {nodes.gpu.count}"
    site, _ = packaged_site(nodes)
    if site and Site.load(site).device.is_part and nodes.gpu.count <= 4:
        line += "   # EDIT: twice as many, if Slurm counts modules of two GCDs"
    return [line]


def _neuron_cores(nodes: NodeType) -> int | None:
    """Returns the number of logical NeuronCores of a Trainium node: as Slurm counts them, by the
    instance type, or by the number of chips that Slurm counts. Returns None if none of the three is
    known.
    """
    counts = {each.name: each.count for each in nodes.gres}
    if "neuroncore" in counts:
        return counts["neuroncore"]
    instance = nodes.trainium or ""
    if instance in TRAINIUM_CORES:
        return TRAINIUM_CORES[instance]
    chips = counts.get("neuron", counts.get("neurondevice"))
    cores_of_chip = CORES_OF_CHIP.get(instance.removeprefix("trn")[:1])
    if chips is None or cores_of_chip is None:
        return None
    return chips * cores_of_chip


def _login(login: str) -> list[str]:
    return [
        f"login = {json.dumps(login)}",
        "",
        "[there]",
        'python = "/EDIT/bin/python"   # EDIT: of an environment there with the packages of'
        " requirements/",
        'folder = "/EDIT/runs"         # EDIT: for runs, on a file system that the compute nodes'
        " share",
        "sync = true                   # sends this kit's own source",
    ]


def _device(nodes: NodeType) -> list[str]:
    """Returns the lines of the tables [device] and [links]."""
    network = EDIT_FACT.format("inter_node_bytes_per_s", '"your system\'s documentation"')
    if nodes.gpu is None and nodes.trainium is None:
        memory = Fact(
            value=nodes.megabytes * 2**20 / nodes.cpus,
            source="sinfo: memory of a node over its cores",
        )
        head = ["", "[device]", 'name = "one CPU core"', f"memory_bytes = {_fact(memory)}"]
        return [*head, "", "[links]", network]
    name, assumed = packaged_site(nodes)
    if name is None:
        return [*_unknown_device(nodes), network]
    site = Site.load(name)
    lines = ["", f"# Device and links inside a node: those of the packaged site {name}."]
    if "SXM" in site.device.name:
        lines.append("# They are those of SXM modules. PCIe cards have other numbers.")
    if assumed:
        lines.append(f"# EDIT: {assumed}. Check with `nvidia-smi` or `rocm-smi` on a node.")
        for size, other in SITES_OF_CHIPS.get("a100", {}).items():
            if "A100" in site.device.name and other != name:
                facts = Site.load(other).device
                lines += [
                    f"#   {size} GB: memory_bytes = {_fact(facts.memory_bytes)}",
                    f"#   memory_bytes_per_s = {_fact(facts.memory_bytes_per_s)}",
                ]
    lines += _known_device(site.device)
    count = nodes.gpu.count if nodes.gpu else site.devices_per_node
    lines += ["", "[links]", network]
    intra_node = site.links.intra_node if count > 1 else ()
    for link in intra_node:
        # A link domain of several nodes (NVL72) keeps its number of devices. A link inside a node
        # connects at most the devices of the node.
        spans_nodes = link.num_devices > site.devices_per_node
        num_devices = link.num_devices if spans_nodes else min(link.num_devices, count)
        lines += [
            "",
            "[[links.intra_node]]",
            f"num_devices = {num_devices}",
            f"bytes_per_s = {_fact(link.bytes_per_s)}",
        ]
        if num_devices == count and not spans_nodes:
            break
    return lines


def _known_device(device: Device) -> list[str]:
    lines = ["[device]", f"name = {json.dumps(device.name)}"]
    for name in ("memory_bytes", "memory_bytes_per_s", "watts"):
        if fact := getattr(device, name):
            lines.append(f"{name} = {_fact(fact)}")
    for name in ("peak_flops_per_s", "matmul_flops_per_s"):
        if rates := getattr(device, name):
            lines += ["", f"[device.{name}]"]
            lines += [f"{dtype} = {_fact(fact)}" for dtype, fact in rates.items()]
    return lines


def _unknown_device(nodes: NodeType) -> list[str]:
    """Returns the lines of the table [device] and the first lines of [links] for an unknown device.
    Each number that a plan needs has one line that the user must edit.
    """
    if nodes.trainium:
        generation = nodes.trainium.removeprefix("trn")[:1]
        name = f"AWS Trainium {generation}".strip() + ", one NeuronCore"
        about = "the AWS Neuron documentation has the numbers"
        count = _neuron_cores(nodes)
    else:
        name = "GPU"
        about = "the vendor's name, by `nvidia-smi -L` or `rocm-smi --showproductname` on a node"
        count = None
        if nodes.gpu:
            name = f"GPU {nodes.gpu.kind}".strip()
            count = nodes.gpu.count
    link = '{{ num_devices = {}, bytes_per_s = {{ value = 0, source = "data sheet" }} }}'
    about_count = ""
    if count is None:
        about_count = "   # num_devices: as devices_per_node"
    return [
        "",
        "# No packaged site has this device. `kit plan` needs each number below.",
        "[device]",
        f"name = {json.dumps(name)}   # EDIT: {about}",
        EDIT_FACT.format("memory_bytes", '"data sheet"'),
        EDIT_FACT.format("memory_bytes_per_s", '"data sheet"'),
        "",
        "[device.peak_flops_per_s]",
        EDIT_FACT.format("bf16", '"data sheet, dense"'),
        "",
        "[links]",
        f"# EDIT: intra_node = [{link.format(count or 1)}]{about_count}",
    ]


def _fact(fact: Fact | None) -> str:
    """Returns a TOML table with the value, the source and the error of a number, or `{}` for
    None.
    """
    if fact is None:
        return "{}"
    error = "" if fact.error is None else f", error = {fact.error:g}"
    return f"{{ value = {fact.value:.12g}, source = {json.dumps(fact.source)}{error} }}"


def _account(settings: dict[str, str], account: str | None) -> str:
    if account:
        return f"account = {json.dumps(account)}"
    enforced = settings.get("AccountingStorageEnforce", "none").lower()
    if enforced in ("none", "0", "(null)"):
        return "# no account: none is asked"
    return 'account = "EDIT"   # EDIT: your project; `sacctmgr show associations user=$USER`'


def _request(nodes: NodeType, settings: dict[str, str], beside: Iterable[NodeType]) -> list[str]:
    """Returns the lines of [slurm] by which a job requests the node type `nodes` with its devices,
    CPUs and memory.
    """
    beside = list(beside)
    lines = []
    is_alone = not beside
    if nodes.gpu:
        gpus = f"{nodes.gpu.kind}:{nodes.gpu.count}".lstrip(":")
        select = settings.get("SelectType", "select/cons_tres")
        if select == "select/cons_tres":
            lines.append(f"gpus_per_node = {json.dumps(gpus)}   # sinfo: {nodes.gres_text}")
        else:
            option = json.dumps(f"--gres=gpu:{gpus}")
            lines.append(f"sbatch_options = [{option}]   # {select} has no --gpus-per-node")
        lines.append(f"cpus_per_task = {max(1, nodes.cpus // nodes.gpu.count)}")
        kinds = [each.gpu.kind for each in beside if each.gpu]
        is_alone = bool(nodes.gpu.kind) and nodes.gpu.kind not in kinds
        is_alone = is_alone or not kinds
        if nodes.gpu.is_slice:
            lines.append(
                "# The devices are MIG slices, which have no peer-to-peer access to each other: use"
                " one device per job."
            )
        more = [gpu.text for gpu in other_gpus(nodes)]
        if more:
            lines.append(f"# These nodes also have {', '.join(more)}, which jobs do not ask for.")
    elif nodes.trainium:
        neuron = [str(each) for each in nodes.gres if each.name in NEURON_GRES]
        if neuron:
            lines.append(f'sbatch_options = ["--exclusive", "--gres={neuron[0]}"]')
        else:
            lines.append("# no gpus_per_node: Slurm has no GRES for NeuronCores")
        if _instance_site(nodes):
            lines.append(f"cpus_per_task = {nodes.cpus}")
    else:
        lines.append("# no gpus_per_node: sinfo has none")
        lines.append(
            'sbatch_options = ["--mem=0"]   # all memory of a node, of which a job may get a part'
            " by default"
        )
    if beside:
        others = "; ".join(str(other) for other in beside)
        lines.append(f"# Other nodes of this partition: {others}")
    if not is_alone:
        lines.append(_constraint(nodes, beside))
    return lines


def _constraint(nodes: NodeType, beside: list[NodeType]) -> str:
    """Returns the line of [slurm] by which a job does not run on `beside`, the other node types of
    the partition.
    """
    elsewhere = {feature for other in beside for feature in other.features}
    own = [
        feature for feature in (*nodes.device_features, *nodes.features) if feature not in elsewhere
    ]
    if own:
        return f"constraint = {json.dumps(own[0])}   # of these nodes alone in the partition"
    return (
        "# EDIT: constraint, a feature: the partition has other nodes, and sinfo shows no feature"
    )
