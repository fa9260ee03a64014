"""Renders the scripts and manifests that start a job on a site, and checks that the job fits the
site. The texts are shown to the user, stored in the run directory and submitted unchanged.

Every name, path and value from a user or a job is quoted in a script, so that none of them can run
as a command. Standard library only.
"""

import shlex
import sys
from pathlib import Path

from cluster.job import JobSpec
from cluster.poll import backend
from cluster.record import ConfigError, counted
from cluster.scheduler import EDIT, Slurm
from cluster.site import Site

MANY_NODES, STORM_NODES = 16, 64
"""Numbers of nodes above which the kit warns of a Python environment on the shared file system, and
above which it refuses to submit the job. The imports on 64 nodes of Frontier took 500 s
(github.com/glotzerlab/software, pull request 335)."""
SIGNAL_EARLY_S = 60
"""Maximum number of seconds by which Slurm may send the signal of `sbatch --signal` too early."""
CONTAINERS = ("apptainer", "singularity", "shifter", "podman-hpc", "enroot")


def render(job: JobSpec, site: Site) -> str:
    """Returns the text that starts `job` on `site`: a shell script, or the manifests for
    Kubernetes. It is the last text that `scripts` returns.

    Raises:
        ConfigError: The job does not fit the site, or contains a value that no script may contain,
            such as a secret.
    """
    return list(scripts(job, site).values())[-1]


def scripts(job: JobSpec, site: Site) -> dict[str, str]:
    """Returns all scripts of a job by file name, in order of submission. Under Slurm, the job of
    each script starts after the job of the previous script has succeeded.

    Most sites need one script, `submit.sh`. For a site that compiles before the run, `compile.sh`
    comes first. Kubernetes has `run.sh`, the script of a pod, before `submit.json`. Only
    `submit.json`, which contains `run.sh`, is submitted.

    Raises:
        ConfigError: The job does not fit the site, or contains a value that no script may contain.
    """
    check_fit(job, site)
    if site.login:
        return backend("login.submit").texts(job, site)
    return backend(site.scheduler).texts(job, site)


def check_fit(job: JobSpec, site: Site) -> None:
    """Raises ConfigError if a node would have more ranks than devices, or if the job has more nodes
    than the site allows. Under Slurm, also checks that the path of the run directory has no
    characters that Slurm replaces.
    """
    if site.scheduler == "local":
        return  # A laptop may run more ranks than it has cores.
    per_node = job.num_processes // job.num_nodes
    if per_node > site.devices_per_node:
        held = counted(site.devices_per_node, "device")
        raise ConfigError(
            f"job.num_nodes: {job.num_processes} ranks on {counted(job.num_nodes, 'node')} are"
            f" {per_node} a node, but a node of {site.name} has {held}. Use"
            f" num_nodes={nodes_for(job.num_processes, site)}."
        )
    if site.scheduler == "slurm":
        # A job with such a path was observed to end as FAILED 0:53 without a log.
        if "%" in job.run_dir or "\\" in job.run_dir:
            raise ConfigError(
                f"job.run_dir: {job.run_dir!r} holds % or \\, which Slurm reads as patterns in the"
                " path of its log. Use a run directory without them."
            )
        largest = slurm_table(site).largest_job
        if largest is not None and job.num_nodes > largest:
            raise ConfigError(
                f"job.num_nodes: {job.num_nodes} is more than the {counted(largest, 'node')} that"
                f" {site.name} gives one job. Use a plan of at most"
                f" {counted(largest * site.devices_per_node, 'device')}, or correct"
                " site.slurm.max_nodes."
            )


def nodes_for(num_processes: int, site: Site) -> int:
    """Returns the smallest number of nodes of the site that have one device for each rank.

    Raises:
        ConfigError: The ranks would use only a part of the last node, so no launcher could spread
            them evenly over the nodes.
    """
    devices = site.devices_per_node
    nodes, rest = divmod(num_processes, devices)
    if nodes and rest:
        raise ConfigError(
            f"plan: {num_processes} devices do not fill whole nodes of {site.name}, which have"
            f" {devices}. Use {nodes * devices} ({counted(nodes, 'node')}) or"
            f" {(nodes + 1) * devices} ({nodes + 1} nodes)."
        )
    return max(1, nodes)


def check_submittable(site: Site) -> None:
    """Raises ConfigError if fields of the site file still contain the placeholder EDIT, since only
    the user knows their values. The message names the fields.
    """
    if fields := to_fill_in(site):
        where = "in the site file"
        if site.base is None and site.name in Site.names():
            where = (
                f'into a file my-{site.name}.toml with a line base = "{site.name}", and use its'
                " path as the site"
            )
        raise ConfigError(f"{', '.join(fields)}: still {EDIT!r}. Write your own values {where}.")


def import_storm(job: JobSpec, site: Site, python: str | None = None) -> str | None:
    """Returns a warning, with advice, if all ranks would read one Python environment from the
    shared file system. Otherwise returns None. `python` is the interpreter of the environment, by
    default the interpreter of this process.
    """
    if not reads_shared_disk(slurm_table(site)) or Path(job.argv[0]).name in CONTAINERS:
        return None
    prefix = Path(python or sys.executable).parent.parent
    tar = "environment.tar"
    pack = (
        "conda-pack --format tar -p %s -o %s"
        if (prefix / "conda-meta").is_dir()
        else "tar -C %s -cf %s ."
    ) % (
        shlex.quote(str(prefix)),
        tar,
    )
    return (
        f"the ranks of {job.num_nodes} nodes would all read Python and its packages from the shared"
        f" file system, at 33,000 file calls each. Pack them once, `{pack}`, and give the file as"
        " archive, and a folder on each node's own disk as directory, under [slurm.broadcast] in"
        " the site file; or start the ranks in a container."
    )


def reads_shared_disk(slurm: Slurm) -> bool:
    """Returns whether all ranks read one Python environment from the shared file system. They do
    not if the environment is packed and copied to each node, or if they run in containers.
    """
    options = (*slurm.srun_options, *slurm.sbatch_options)
    in_container = slurm.is_in_container or any(
        option.startswith(("--container", "--image")) for option in options
    )
    return not slurm.has_own_environment and not in_container


def to_fill_in(site: Site) -> list[str]:
    """Returns the dotted names of the site's fields whose value still is the placeholder EDIT, or a
    file path with a folder EDIT. Only the user can fill in these fields.
    """
    unused = {"slurm", "kubernetes"} - {site.scheduler}
    values = {key: value for key, value in site.to_dict().items() if key not in unused}
    return [f"site.{place}" for place, value in _places(values) if EDIT in str(value).split("/")]


def warnings(job: JobSpec, site: Site, python: str | None = None) -> list[str]:
    """Returns warnings about settings that are allowed but probably unwanted, one line each.
    `python` is the interpreter that runs the job, by default the interpreter of this process.
    """
    devices = job.num_nodes * site.devices_per_node
    found = []
    is_alone = site.scheduler != "local" and not shares_nodes(site)
    if is_alone and job.num_processes < devices:
        found.append(
            f"{devices - job.num_processes} of the {devices} devices of these nodes stay idle."
        )
    if site.scheduler == "slurm":
        found += _time_warnings(job, slurm_table(site), site.name)
        if job.num_nodes > MANY_NODES and (storm := import_storm(job, site, python)):
            found.append(storm)
    return found


def shares_nodes(site: Site) -> bool:
    """Returns whether other jobs may run on a node of a job and use the GPUs that the job has not
    requested.
    """
    if site.scheduler != "slurm" or not site.device.is_gpu:
        return False
    table = slurm_table(site)
    alone = any(option.startswith("--exclusive") for option in table.sbatch_options)
    return table.derive_request and not alone


def slurm_table(site: Site) -> Slurm:
    """Returns the `[slurm]` table of a site.

    Raises:
        ConfigError: The site has no such table, since some packaged sites serve only for estimates.
            Or the launcher cannot start ranks in the site's container.
    """
    if site.slurm is None:
        raise ConfigError(
            f"site.slurm: {site.name!r} has no [slurm] table, so no job can be written for it."
            " Write a .toml file "
            f'with base = "{site.name}" and such a table; generic-gpu-slurm.toml shows one.'
        )
    if site.slurm.is_in_container and site.slurm.launcher != "srun":
        raise ConfigError(
            f"site.slurm.launcher: {site.slurm.launcher!r} cannot start ranks in a container. Use"
            " launcher = 'srun', which starts one task per rank."
        )
    return site.slurm


def _time_warnings(job: JobSpec, slurm: Slurm, name: str) -> list[str]:
    found = []
    allowed_s = slurm.max_seconds(job.num_nodes)
    if allowed_s and job.time_limit_s and job.time_limit_s > allowed_s:
        found.append(
            f"{_hours(job.time_limit_s)} were asked for, but {name} gives"
            f" {counted(job.num_nodes, 'node')} {_hours(allowed_s)}: the job asks for that, stops"
            " in time and comes back."
        )
    limit_s = slurm.limit_s(job.num_nodes, job.time_limit_s)
    # If the time limit is too short, Slurm sends the signal while it starts the job. The signal may
    # be lost, since the batch shell does not run yet.
    if limit_s is not None and limit_s <= slurm.stop_before_end_s + SIGNAL_EARLY_S:
        found.append(
            f"the limit of {limit_s:g} s is used up by the {slurm.stop_before_end_s} s before the"
            f" end in which the job is told to save and stop, by Slurm up to {SIGNAL_EARLY_S} s"
            " early. Ask for more time, or lower site.slurm.stop_before_end_s."
        )
    return found


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.3g} h"


def _places(value: object, place: str = "") -> list[tuple[str, object]]:
    """Returns (dotted path, value) for every value inside nested tables."""
    if not isinstance(value, dict):
        return [(place, value)]
    places = []
    for key, item in value.items():
        places += _places(item, f"{place}.{key}".lstrip("."))
    return places
