"""The devices, CPUs and memory per node that a job requests from its scheduler.

A site file need not repeat the values of `devices_per_node` and `device` under `[slurm]` or
`[kubernetes]`. This module derives the missing values from the ranks of the job and lists the
derived values for the user. So no script can request a node without its GPUs by mistake. Standard
library only.
"""

import dataclasses
import math
import re

from cluster.job import JobSpec
from cluster.record import ConfigError, counted
from cluster.render import shares_nodes, slurm_table
from cluster.scheduler import Kubernetes, Slurm
from cluster.site import Device, Site

GPU_REQUEST = re.compile(r"--(?:gpus(?:-[a-z-]+)?(?:=.*)?|(?:gres|tres-[a-z-]+)=.*gpu.*)")
"""Pattern of options of sbatch that request GPUs."""
CPU_LAYOUT = re.compile(
    r"--(?:hint|threads-per-core|cores-per-socket|cpu-bind|cpus-per-[a-z]+|extra-node-info)\b.*"
)
"""Pattern of options that exclude some of a node's CPUs, or bind tasks to CPUs. With such an
option, the kit does not derive the CPUs of a task."""
CPUS_VARIABLE = "KIT_CPUS_PER_TASK"
"""Environment variable that the batch script sets to the number of CPUs of each task, counted when
the job starts."""
CHIP_CORES = {"trn1": 2}
"""Number of NeuronCores per Trainium chip, by generation. There is no entry for trn2, whose number
of cores depends on the settings of the Neuron runtime."""
KUBERNETES_DEVICES = {
    "NVIDIA": "nvidia.com/gpu",
    "AMD Instinct": "amd.com/gpu",
    "Gaudi": "habana.ai/gaudi",
    "TPU": "google.com/tpu",
}
"""Name of the Kubernetes resource for one device, by a word that `Device.name` contains. The
vendors' device plugins define these resources."""
NEURON_DEVICE = "aws.amazon.com/neuron"
"""Name of the Kubernetes resource for one Trainium chip, which AWS's device plugin defines."""
DEVICE_RESOURCE = re.compile(r"gpu|mig-|neuron|gaudi|tpu|/xe$|/i915$")
"""Pattern that finds device resources of Kubernetes by a part of their name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmRequest:
    """Resources that one job requests from Slurm: values of the site file, and values that the kit
    derives.
    """

    table: Slurm
    """The site's `[slurm]` table with the job's values in `gpus_per_node`, `cpus_per_task` and
    `sbatch_options`."""
    counts_cpus: bool
    """Whether the batch script computes the number of CPUs of each task, as the CPUs of a node
    divided by its tasks."""
    derived: tuple[str, ...]
    """Lines for the user, one about each requested value that the site file does not give."""


def slurm_request(job: JobSpec, site: Site) -> SlurmRequest:
    """Returns the resources that a job requests from Slurm: the values of the `[slurm]` table, and
    missing values derived from the ranks of a node.

    Raises:
        ConfigError: The site has no `[slurm]` table, the ranks of a node would start without their
            GPUs, or the kit does not know how to request the site's devices.
    """
    table = slurm_table(site)
    ranks = job.num_processes // job.num_nodes
    tasks = ranks if table.launcher == "srun" else 1
    _check_devices(table, site, ranks, tasks)
    options = list(table.sbatch_options)
    derived: list[str] = []
    gpus_per_node = table.gpus_per_node
    cpus_per_task = table.cpus_per_task
    counts_cpus = False
    if table.derive_request and not site.device.is_cpu:
        takes_node = ranks == site.devices_per_node or not shares_nodes(site)
        if site.device.is_gpu:
            gpus_per_node = _gpus_per_node(table, site, ranks, tasks, takes_node)
        if gpus_per_node != table.gpus_per_node:
            derived.append(
                f"--gpus-per-node={gpus_per_node}: for the {counted(ranks, 'rank')} of a node that"
                f" has {counted(site.devices_per_node, 'device')}."
            )
        if site.device.trainium:
            derived.append(
                "No GRES: Slurm does not count NeuronCores, so the job takes whole nodes."
            )
        if takes_node:
            derived += _whole_node(options)
        if table.cpus_per_task is None and not _has_cpu_layout(table):
            counts_cpus = takes_node
            if not takes_node and site.cores_per_node:
                per_device = site.cores_per_node.value / site.devices_per_node
                cpus_per_task = max(1, math.floor(per_device * ranks / tasks))
            derived.append(_cpus_line(site, ranks, tasks, takes_node, cpus_per_task))
    if table.limit_s(job.num_nodes, job.time_limit_s) is None:
        derived.append(
            "No --time: neither --minutes nor [[slurm.walltime]] gives a limit, so the default of"
            " the partition holds (`scontrol show partition`)."
        )
    return SlurmRequest(
        table=table.replace(
            gpus_per_node=gpus_per_node,
            cpus_per_task=cpus_per_task,
            sbatch_options=tuple(options),
        ),
        counts_cpus=counts_cpus,
        derived=tuple(derived),
    )


def cpu_request(job: JobSpec, site: Site) -> SlurmRequest:
    """Returns the resources that one task of a job array requests from Slurm if it needs no GPU. An
    example is a task that builds a part of a dataset.

    For each process of the job, `cpus_per_task` CPUs are requested if the site gives this value.
    Otherwise the number is the cores of a node divided by its devices, or one if the cores are
    unknown. No GPU is requested.

    Raises:
        ConfigError: The site has no `[slurm]` table.
    """
    table = slurm_table(site)
    per_process = table.cpus_per_task or 1
    if table.cpus_per_task is None and site.cores_per_node:
        per_process = max(1, int(site.cores_per_node.value) // site.devices_per_node)
    # With torchrun, a task is a whole node, so `cpus_per_task` is the number for all ranks of a
    # node.
    has_all = table.launcher == "torchrun" and table.cpus_per_task is not None
    cpus = max(per_process, job.num_processes) if has_all else per_process * job.num_processes
    left_out = [
        option
        for option in table.sbatch_options
        if GPU_REQUEST.fullmatch(option) or option.startswith("--exclusive")
    ]
    derived = [f"One task with {counted(cpus, 'CPU')} on a node, and no GPU: the work needs none."]
    if left_out:
        derived.append(f"Left out of sbatch_options: {', '.join(left_out)}.")
    if table.limit_s(1, job.time_limit_s) is None:
        derived.append("No --time: the default of the partition holds.")
    return SlurmRequest(
        table=table.replace(
            launcher="torchrun",
            cpus_per_task=cpus,
            gpus_per_node=None,
            gpus_per_task=None,
            sbatch_options=tuple(each for each in table.sbatch_options if each not in left_out),
        ),
        counts_cpus=False,
        derived=tuple(derived),
    )


def kubernetes_resources(
    job: JobSpec, table: Kubernetes, site: Site
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns (resources, lines): the quantity of each resource of a pod, and one line for the user
    about each resource that the site file does not give.

    Raises:
        ConfigError: The ranks of a pod would start without their devices, or the kit does not know
            how to request the site's devices.
    """
    resources = dict(table.resources)
    device = site.device
    ranks = job.num_processes // job.num_nodes
    if device.is_cpu:
        return resources, ()
    found = [name for name in resources if DEVICE_RESOURCE.search(name)]
    if found:
        _check_quantity(resources, found, site, ranks)
        return resources, ()
    name, count = _kubernetes_device(device, site, ranks)
    resources[name] = str(count)
    line = f"{name}: {count}, for the {counted(ranks, 'rank')} of a pod."
    return resources, (line,)


def derived(job: JobSpec, site: Site) -> tuple[str, ...]:
    """Returns one line for the user about each resource that a job requests although the site file
    does not give it.

    Raises:
        ConfigError: The ranks of a node would start without their devices, or the kit does not know
            how to request the devices. Or a site with Slurm has no `[slurm]` table.
    """
    if site.scheduler == "slurm":
        return slurm_request(job, site).derived
    if site.scheduler == "kubernetes" and site.kubernetes is not None:
        return kubernetes_resources(job, site.kubernetes, site)[1]
    return ()


def _check_devices(table: Slurm, site: Site, ranks: int, tasks: int) -> None:
    """Raises ConfigError if the job would have fewer GPUs on a node than ranks, or if the kit does
    not know how to request the site's devices.
    """
    device = site.device
    if device.is_cpu or device.trainium:
        return
    has_option = any(GPU_REQUEST.fullmatch(option) for option in table.sbatch_options)
    has_request = bool(table.gpus_per_node or table.gpus_per_task or has_option)
    if not has_request and not device.is_gpu:
        raise ConfigError(
            f"site.device.name: {device.name!r} does not say how Slurm calls such a device, so the"
            " job would start without one. Add sbatch_options = "
            f'["--gres=NAME:{site.devices_per_node}"] or gpus_per_node under [slurm], or give the'
            " name as the vendor has it: 'NVIDIA ...', 'AMD Instinct ...', 'one CPU core'."
        )
    if not has_request and not table.derive_request:
        raise ConfigError(
            "site.slurm.derive_request: false, and nothing under [slurm] asks for GPUs. Give"
            f' gpus_per_node = "{site.devices_per_node}", or remove derive_request.'
        )
    if not device.is_gpu or device.is_part:
        return  # Slurm may count complete GPUs, each of which is several devices of the site.
    given = None
    if table.gpus_per_task is not None:
        given = table.gpus_per_task * tasks
        name = f"gpus_per_task = {table.gpus_per_task} with launcher = {table.launcher!r}"
    elif table.gpus_per_node is not None:
        given = _split_gpus(table.gpus_per_node)[1]
        name = f"gpus_per_node = {table.gpus_per_node!r}"
    if given is not None and given < ranks:
        raise ConfigError(
            f"site.slurm: {name} gives {counted(given, 'GPU')} to the {ranks} ranks of a node, and"
            f" each rank needs one. Give gpus_per_node = '{ranks}', or correct"
            " site.devices_per_node."
        )


def _gpus_per_node(
    table: Slurm, site: Site, ranks: int, tasks: int, takes_node: bool
) -> str | None:
    """Returns the value of --gpus-per-node, or None if another option requests the GPUs."""
    if table.gpus_per_node is not None:
        kind, count = _split_gpus(table.gpus_per_node)
        if takes_node:
            return table.gpus_per_node
        # A GPU may contain several devices. A node then has fewer GPUs than devices.
        needed = math.ceil(count * ranks / site.devices_per_node)
        return f"{kind}:{needed}".lstrip(":")
    if any(GPU_REQUEST.fullmatch(option) for option in table.sbatch_options):
        return None
    if table.gpus_per_task is not None:
        return str(table.gpus_per_task * tasks)
    return str(ranks)


def _split_gpus(text: str) -> tuple[str, int]:
    """Returns (type, number) of GPUs for a text like "8", "a100:4" or "a100". The type may be
    empty, and the default of the number is 1.
    """
    kind, _, last = text.rpartition(":")
    if last.isdigit():
        return kind, int(last)
    return text, 1


def _whole_node(options: list[str]) -> list[str]:
    """Adds to the list `options` the options of sbatch that request whole nodes. Returns one line
    for the user about each added option.
    """
    lines = []
    if not any(option.startswith(("--exclusive", "--oversubscribe")) for option in options):
        options.append("--exclusive")
        lines.append("--exclusive: the job uses all devices of its nodes.")
    if not any(option.startswith("--mem") for option in options):
        options.append("--mem=0")
        lines.append("--mem=0: all memory of each node, of which Slurm may give a part by default.")
    return lines


def _has_cpu_layout(table: Slurm) -> bool:
    given = (*table.sbatch_options, *table.srun_options)
    return table.cpu_bind is not None or any(CPU_LAYOUT.fullmatch(option) for option in given)


def _cpus_line(
    site: Site, ranks: int, tasks: int, takes_node: bool, cpus_per_task: int | None
) -> str:
    if takes_node:
        over = "for its one task" if tasks == 1 else f"divided by its {tasks} tasks"
        return f"--cpus-per-task: all CPUs of a node, as Slurm counts them at the start, {over}."
    if site.cores_per_node and cpus_per_task:
        times = f", times the {ranks} ranks of a task" if ranks > tasks else ""
        return (
            f"--cpus-per-task={cpus_per_task}: the cores of a node, {site.cores_per_node}, divided"
            f" by its {counted(site.devices_per_node, 'device')}{times}."
        )
    return (
        "No --cpus-per-task: site.slurm.cpus_per_task is not given, so each task gets the CPUs that"
        " the partition gives by default, usually one. Give the CPUs of a node divided by its"
        " devices."
    )


def _check_quantity(resources: dict[str, str], names: list[str], site: Site, ranks: int) -> None:
    """Raises ConfigError if a pod requests fewer devices than it has ranks."""
    quantities = [resources[name] for name in names]
    if site.device.trainium or site.device.is_part or not all(map(str.isdigit, quantities)):
        return
    if sum(map(int, quantities)) < ranks:
        raise ConfigError(
            f"site.kubernetes.resources.{names[0]}: {resources[names[0]]} for the {ranks} ranks of"
            f" a pod, and each rank needs a device. Give {ranks}, or correct"
            " site.devices_per_node."
        )


def _kubernetes_device(device: Device, site: Site, ranks: int) -> tuple[str, int]:
    """Returns (name, quantity) of the Kubernetes resource that gives a pod its devices."""
    if device.trainium in CHIP_CORES:
        # The pod requests all chips: with only some chips it could not use the network adapters of
        # the instance.
        return NEURON_DEVICE, math.ceil(site.devices_per_node / CHIP_CORES[device.trainium])
    for word, name in KUBERNETES_DEVICES.items():
        if word in device.name:
            return name, ranks
    raise ConfigError(
        f"site.device.name: {device.name!r} does not say how Kubernetes calls such a device, so the"
        " pods would start without one. Add its resource under [kubernetes.resources], such as"
        f' "nvidia.com/gpu" = "{site.devices_per_node}".'
    )
