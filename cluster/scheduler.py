"""The tables `[slurm]` and `[kubernetes]` of a site file (description of a machine), and the checks
of their values.

Values that become directives of a batch script may contain only plain words, so that no site file
can break a script. Values of environment variables may contain any text, since they are quoted.
Lines under `setup` and `task_setup` are shell code and are used unchanged. Standard library only.
"""

import dataclasses
import json
import math
import re
import shlex
from typing import Any, Literal

from cluster.record import ConfigError, Record, field_doc, from_one, must

EDIT = "EDIT"
"""Placeholder in a site file for a value that only the user knows, such as the account."""

SECRET_WORDS = "KEY|TOKEN|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?"
SECRET_NAME = re.compile(
    rf"(^|_)({SECRET_WORDS})\d*_"
    rf"|({SECRET_WORDS})\d*="
    r"|(?<=\w)(?<!OLD)PWD\d*="
    r"|(^|_)(PASS|PAT|AUTH|TOKENS|BEARER|COOKIES?)\d*=(?!\d+$)"
    r"|(DB|SQL|USER|ROOT|ADMIN|MAIL|SMTP|PROXY|REDIS|MONGO|LDAP)PASS\d*="
    r"|ACCESSKEYID\d*="
    r"|WEBHOOK(_?URL)?\d*="
    r"|(^|_)SAS_?URL\d*="
)
"""Pattern of NAME=value for environment variables that contain a secret, judged by their name. It
matches complete words in capitals, with or without a number after them: GITHUB_PAT,
AWSSECRETACCESSKEY, API_KEY2. Neither KEYBOARD nor MAX_TOKENS=9 matches."""
SECRET_VALUE = re.compile(
    # Tokens with a known format: Hugging Face, GitHub, GitLab, OpenAI, Slack, AWS, W&B, JWT
    r"\b(hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}"
    r"|sk-[\w-]{30,}|xox[abprs]-[\w-]{20,}|(AKIA|ASIA)[A-Z0-9]{16}|wandb_v1_\w{30,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)\b"
    # Password in a URL.
    r"|://[^/@:\s]+:[^/@\s]+@"
    # Token in an HTTP header.
    r"|\b[Bb]earer\s+[\w.~+/=-]{16,}"
    # `wandb login KEY`. A host name, which may follow `login`, contains dots.
    r"|\blogin\b[^|;&]*?[\s=][\"']?\w{32,}(?![\w./:-])"
    # Options of programs that are followed by a secret.
    r"|--(token|password|passwd|api-key|secret|secret-key|access-key|access-token|auth-token)"
    r"[\s=]+[\"']?\w[^\s\"'$`;&|]{7,}"
    r"|\b(mysql|mysqldump|mysqladmin|mariadb)\b[^|;&]*\s-p[^\s\"'$`;&|]+"
    r"|\bsshpass\s+-p\s*[\"']?[^\s\"'$`;&|]+"
    # `aws configure set aws_secret_access_key VALUE`
    r"|\baws_(secret_access_key|session_token)[\s=]+[\"']?[\w/+=]{16,}"
)
"""Pattern of a secret, recognised by its format or by the words before it. References to shell
variables and commands, such as `--token $TOKEN`, do not match."""
NODE_VARIABLES = ("USER", "SLURM_JOB_ID", "SLURMD_NODENAME", "TMPDIR")
ASSIGNMENT = re.compile(r"""(?<![\w-])([A-Za-z_]\w*)=["']?([^\s"'$`;&|)]+)""")
"""Pattern of NAME=value in a line of shell. It does not match a value that comes from a command or
another variable, since the line does not contain this value."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SET_BY_THE_KIT = (
    "array chdir container error export export-file get-user-env gid input job-name no-requeue"
    " nodes ntasks ntasks-per-node open-mode output requeue signal uid wrap"
).split()
"""Options of sbatch that a site file may not contain. The batch script of the kit sets some of
them. The others would change the user, the command or the output files of the job."""


def check_environment(variables: dict[str, str], path: str) -> None:
    """Raises ConfigError for a variable that no shell can export, or that looks like a secret."""
    for name, value in variables.items():
        if not VARIABLE.fullmatch(name):
            raise ConfigError(
                f"{path}: {name!r} cannot be exported. Use letters, digits and '_', not a digit"
                " first."
            )
        if looks_secret(name, value):
            raise ConfigError(
                f"{path}.{name}: looks like a secret, and everyone who may read the run directory"
                f" could read it there. Leave it out. On Slurm, export {name} in the shell or"
                " notebook that submits: the job inherits it. On Kubernetes, name a Secret under"
                " [kubernetes.secrets]."
            )


def looks_secret(name: str, value: str) -> bool:
    """Returns whether a variable probably contains a secret, judged by its name or by the format of
    its value.
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper()
    return bool(SECRET_NAME.search(f"{words}={value}") or SECRET_VALUE.search(value))


def check_lines(lines: tuple[str, ...], path: str) -> None:
    """Raises ConfigError for a line of shell that contains a probable secret. The message does not
    repeat the secret.
    """
    for number, line in enumerate(lines):
        if SECRET_VALUE.search(line) or any(
            looks_secret(*found) for found in ASSIGNMENT.findall(line)
        ):
            raise ConfigError(
                f"{path}[{number}]: holds what looks like a secret, and everyone who may read the"
                " run directory could read it there. Export it in the shell or notebook that"
                " submits, or let the line read it from a file of yours: NAME=$(cat ~/FILE)."
            )


def check_profiles(profiles: dict[str, dict[str, str]], path: str) -> None:
    """Raises ConfigError if a variable of a profile cannot be exported or looks like a secret. A
    profile is a named set of environment variables.
    """
    for name, variables in profiles.items():
        check_environment(variables, f"{path}.{name}")


def check_references(secrets: dict[str, str], path: str) -> None:
    """Raises ConfigError for a wrong name of a variable, or for a reference to a Kubernetes Secret
    that is not 'name/key'.
    """
    for name, reference in secrets.items():
        if not VARIABLE.fullmatch(name) or not REFERENCE.fullmatch(reference):
            raise ConfigError(f"{path}.{name}: {reference!r} is not allowed. Give 'name/key'.")


def is_given_to_sbatch(option: str) -> bool:
    """Returns whether a text is one option of sbatch, `--name` or `--name=value`, that the user may
    set. Options in SET_BY_THE_KIT and their abbreviations are not allowed.
    """
    # sbatch accepts the first letters of an option in place of its name.
    name = option.removeprefix("--").partition("=")[0]
    whole = OPTION.fullmatch(option) and option.startswith("--")
    return bool(whole) and not any(known.startswith(name) for known in SET_BY_THE_KIT)


def is_path_on_nodes(text: str) -> bool:
    """Returns whether a text is an absolute path without variables other than NODE_VARIABLES, which
    each node sets.
    """
    known = all(name in NODE_VARIABLES for name in re.findall(r"\$\{?(\w+)", text))
    return known and text.startswith(("/", "$")) and text.isprintable()


VALUE = r"[A-Za-z0-9_./:@+\[\],=&|*-]"
OPTION = re.compile(rf"--?[A-Za-z][A-Za-z0-9_-]*(={VALUE}+)?")
REFERENCE = re.compile(r"[a-z0-9.-]+/[A-Za-z0-9._-]+")
a_word = must(
    re.compile(rf"[A-Za-z0-9_]{VALUE}*").fullmatch,
    "Use letters, digits and _ . / : @ + - = , no spaces.",
)
an_option = must(OPTION.fullmatch, "Give '--name' or '--name=value', without spaces.")
for_sbatch = must(
    is_given_to_sbatch,
    "It holds spaces, its name is not written out, or the kit sets it itself. Leave it out, or give"
    " '--name' or '--name=value'.",
)
a_path = must(
    is_path_on_nodes,
    f"Give an absolute path; it may name {', '.join('$' + name for name in NODE_VARIABLES)}.",
)
a_variable = must(VARIABLE.fullmatch, "Use letters, digits and '_', not a digit first.")
a_label = must(
    re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?").fullmatch, "Small letters, digits and '-'."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walltime(Record):
    """An entry of `[[slurm.walltime]]`: the maximum run time of jobs up to a number of nodes."""

    max_nodes: int | None = field_doc(
        "largest number of nodes of a job for which `max_hours` holds; default: `max_hours` holds"
        " for all jobs that are larger than the previous entries allow",
        from_one,
        default=None,
    )
    max_hours: float = field_doc(
        "maximum run time of a job with at most `max_nodes` nodes, in hours",
        must(lambda hours: 0 < hours < math.inf, "Give hours above 0."),
    )


def check_sizes(walltime: tuple[Walltime, ...], path: str) -> None:
    """Raises ConfigError unless `max_nodes` rises from each entry of `walltime` to the next."""
    sizes = [size.max_nodes or math.inf for size in walltime]
    if sizes != sorted(set(sizes)):
        raise ConfigError(f"{path}: max_nodes must rise from bin to bin, got {sizes}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Broadcast(Record):
    """Copy of a packed Python environment to a disk of each node, so that the ranks do not all read
    the environment on the shared file system.
    """

    directory: str = field_doc(
        "folder on the node-local disk; the path may contain $USER and $SLURM_JOB_ID", a_path
    )
    archive: str | None = field_doc(
        "tar file of a venv, or an archive made by conda-pack, which is unpacked into `directory`;"
        " default: nothing is copied, and ranks read the shared environment",
        default=None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compilation(Record):
    """A separate job that compiles the graphs of the training step before the run. The job writes a
    cache, from which the run loads the compiled graphs.
    """

    command: tuple[str, ...] = field_doc(
        "words that are put before the command of each rank in the compile job, such as"
        " 'neuron_parallel_compile'",
        check_lines,
    )
    variable: str = field_doc(
        "name of the environment variable that contains the path of the cache, such as"
        " 'NEURON_COMPILE_CACHE_URL'",
        a_variable,
    )
    shared_cache: str = field_doc(
        "cache folder that the compile job writes and all nodes can read; the path may contain"
        " $USER",
        a_path,
    )
    node_cache: str = field_doc(
        "folder on each node's own disk for a copy of the cache, which the run reads; the path"
        " may contain $USER",
        a_path,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerSettings(Record):
    """Fields that the tables of all schedulers have in common."""

    environment: dict[str, str] = field_doc(
        "environment variables that are set for every rank", check_environment, default_factory=dict
    )
    profiles: dict[str, dict[str, str]] = field_doc(
        "named sets of environment variables that a job may add",
        check_profiles,
        default_factory=dict,
    )
    stop_before_end_s: int = field_doc(
        "seconds before the end at which the ranks are asked to save and stop. The end is the"
        " time limit under Slurm, and the kill of a terminating pod under Kubernetes. The seconds"
        " must suffice for a step and a checkpoint.",
        from_one,
        default=300,
    )
    compilation: Compilation | None = field_doc(
        "compile job that runs before the run; under Kubernetes `node_cache` is a directory of"
        " the host; default: no compile job",
        default=None,
    )


SBATCH_KEYS = frozenset(
    "comment exclude exclusive gres licenses mem mem_per_cpu mem_per_gpu nice nodelist reservation"
    " switches wckey".split()
)
"""Options of sbatch that users may write as keys of `[slurm]` by mistake."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slurm(SchedulerSettings):
    """The `[slurm]` table: how jobs are submitted and how their ranks are started."""

    account: str | None = field_doc(
        "account that is charged; default: none, for clusters that require no account",
        a_word,
        default=None,
    )
    partition: str | None = field_doc(
        "partition to which jobs are submitted; default: the default partition of the cluster",
        a_word,
        default=None,
    )
    qos: str | None = field_doc(
        "quality of service (QOS) of the jobs; default: the default QOS of the cluster",
        a_word,
        default=None,
    )
    constraint: str | None = field_doc(
        "features that the nodes of a job must have", a_word, default=None
    )
    sbatch_options: tuple[str, ...] = field_doc(
        "additional options of sbatch, one per entry, such as '--exclusive'",
        for_sbatch,
        check_lines,
        default=(),
    )
    derive_request: bool = field_doc(
        "whether a job also requests the GPUs, CPUs and memory that this table does not give,"
        " derived from `devices_per_node`; false: a job requests only what the table gives, as on"
        " machines that always allocate whole nodes",
        default=True,
    )
    launcher: Literal["srun", "torchrun"] = field_doc(
        "program that starts the ranks. srun: one task per rank. torchrun: one task per node,"
        " which starts the ranks of the node.",
        default="srun",
    )
    cpus_per_task: int | None = field_doc(
        "number of CPUs of each task of the launcher; default: the CPUs of a node divided by its"
        " tasks",
        from_one,
        default=None,
    )
    gpus_per_node: str | None = field_doc(
        "GPUs of a node, such as '8' or 'mi250:8'; each rank sees all GPUs of its node; default:"
        " derived from `devices_per_node`",
        a_word,
        default=None,
    )
    gpus_per_task: int | None = field_doc(
        "number of GPUs of a task; each rank sees only the GPUs of its task", from_one, default=None
    )
    gpu_bind: str | None = field_doc(
        "binding of GPUs to tasks, as srun's --gpu-bind, such as 'closest'", a_word, default=None
    )
    cpu_bind: str | None = field_doc(
        "binding of CPUs to tasks, as srun's --cpu-bind, such as 'mask_cpu:0xfe,...'",
        a_word,
        default=None,
    )
    srun_options: tuple[str, ...] = field_doc(
        "additional options of srun, one per entry", an_option, check_lines, default=()
    )
    modules: tuple[str, ...] = field_doc(
        "environment modules, loaded in this order", a_word, default=()
    )
    setup: tuple[str, ...] = field_doc(
        "shell lines, run once on the first node. A line that fails ends the job, unless it ends"
        " with `|| true`.",
        check_lines,
        default=(),
    )
    task_setup: tuple[str, ...] = field_doc(
        "shell lines, run by each task of the launcher. A line that fails ends the task, unless"
        " it ends with `|| true`.",
        check_lines,
        default=(),
    )
    container: tuple[str, ...] = field_doc(
        "words that start a container, put before the command of each rank. Requires launcher"
        " 'srun'. Example for Singularity or Apptainer: ['singularity', 'exec', '--rocm', '-B',"
        " '/scratch,/project', '/path/image.sif'], with --nv instead of --rocm on NVIDIA GPUs."
        " The python3 of the container runs the command, so the image needs Python 3.11 or newer"
        " and PyTorch. -B must show the run directory, the data and the source of the kit under"
        " the same paths as outside. The source need not be shown if the kit is installed in the"
        " image. The batch script and the supervisor run outside of the container, with the"
        " Python from which you submit. Environment variables of this site file reach the ranks,"
        " since Singularity and Apptainer pass the environment on, unless you give --cleanenv."
        " The words are not expanded by the shell. To use variables, end with ['bash', '-c',"
        " '$WITH_CONDA; exec \"$@\"', 'bash']: the shell of the container expands them. For Pyxis"
        " leave this field out and give srun_options ['--container-image=/path/image.sqsh',"
        " '--container-mounts=/scratch:/scratch']. On Alps give srun_options"
        " ['--environment=/path/image.toml']. With Pyxis and on Alps, the process that watches"
        " each rank also runs in the container, so the source of the kit must be mounted.",
        check_lines,
        default=(),
    )
    environment_one_node: dict[str, str] = field_doc(
        "environment variables that are added in jobs of one node",
        check_environment,
        default_factory=dict,
    )
    environment_several_nodes: dict[str, str] = field_doc(
        "environment variables that are added in jobs of several nodes",
        check_environment,
        default_factory=dict,
    )
    network_interfaces: tuple[str, ...] = field_doc(
        "names of the interfaces of the fast network, for the sockets of the collectives",
        a_word,
        default=(),
    )
    master_port: int | None = field_doc(
        "port of the rendezvous of the ranks; default: derived from the number of the job and the"
        " number of its requeues",
        from_one,
        default=None,
    )
    max_nodes: int | None = field_doc(
        "largest number of nodes of a job in the partition; default: no limit",
        from_one,
        default=None,
    )
    walltime: tuple[Walltime, ...] = field_doc(
        "maximum run time of a job by its number of nodes, smallest jobs first",
        check_sizes,
        default=(),
    )
    broadcast: Broadcast | None = field_doc(
        "copy of the Python environment to the nodes' own disks; default: ranks read the shared"
        " environment",
        default=None,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.container and self.has_tasks_in_container:
            raise ConfigError(
                f"site.slurm.container: {list(self.container)} together with"
                f" {list(self.srun_options)} would start a container in a container. Give either"
                " container or srun_options for it."
            )

    @classmethod
    def unknown_key_advice(cls, key: str, value: Any) -> str:
        """Returns advice on a key that is an option of sbatch and not a field of this table, or an
        empty text for other keys.
        """
        name = key.replace("-", "_")
        if name in ("time", "time_limit"):
            return (
                "Give the limit of one job to `kit launch --time`, or the limits of the partition"
                " as walltime = [{ max_hours = 24 }]."
            )
        if name not in SBATCH_KEYS:
            return ""
        option = f"--{name.replace('_', '-')}"
        if value is not True:
            option += f"={value}"
        return f"Give it as an option of sbatch: sbatch_options = [{json.dumps(option)}]."

    def max_seconds(self, num_nodes: int) -> float | None:
        """Returns the maximum run time in seconds of a job with `num_nodes` nodes, or None if the
        site file gives no limit.
        """
        fitting = (
            size for size in self.walltime if size.max_nodes is None or num_nodes <= size.max_nodes
        )
        size = next(fitting, None)
        return size.max_hours * 3600 if size else None

    def limit_s(self, num_nodes: int, asked_s: float | None) -> float | None:
        """Returns the time limit to request for a job, in seconds: the smaller of `asked_s` and the
        limit of the site. Returns None if there is neither.
        """
        return min(
            (limit for limit in (asked_s, self.max_seconds(num_nodes)) if limit is not None),
            default=None,
        )

    @property
    def has_tasks_in_container(self) -> bool:
        """Whether srun starts each task in a container, by an option of Pyxis or of the Container
        Engine on Alps.
        """
        options = ("--container-image", "--environment=")
        return any(option.startswith(options) for option in self.srun_options)

    @property
    def is_in_container(self) -> bool:
        """Whether the command of a rank runs in a container, started by the field `container` or by
        srun.
        """
        return bool(self.container) or self.has_tasks_in_container

    @property
    def has_own_environment(self) -> bool:
        """Whether each node receives a copy of the Python environment, unpacked from an archive."""
        return self.broadcast is not None and self.broadcast.archive is not None

    @property
    def largest_job(self) -> int | None:
        """Maximum number of nodes of one job, or None if the site file gives no limit."""
        bins = self.walltime[-1].max_nodes if self.walltime else None
        return min((limit for limit in (self.max_nodes, bins) if limit is not None), default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kubernetes(SchedulerSettings):
    """The `[kubernetes]` table: image, resources and settings of a pod. Each pod is one node of a
    job.
    """

    namespace: str = field_doc("namespace in which jobs are created", a_label, default="default")
    image: str = field_doc("container image with the kit installed")
    claim: str = field_doc(
        "PersistentVolumeClaim of the shared file system that holds the run directories"
    )
    mount_path: str = field_doc(
        "folder in the pods at which the shared file system is mounted; run directories must be"
        " in this folder"
    )
    resources: dict[str, str] = field_doc(
        "resources of one pod, which are both its requests and its limits; quantities are text."
        " If no device is given, the devices are derived from `devices_per_node`.",
        default_factory=dict,
    )
    node_selector: dict[str, str] = field_doc(
        "labels that the nodes of a job must have", default_factory=dict
    )
    tolerations: tuple[str, ...] = field_doc(
        "keys of the taints that the pods tolerate", default=()
    )
    queue: str | None = field_doc(
        "Kueue queue that admits all pods of a job together; default: no queue",
        a_label,
        default=None,
    )
    kind: Literal["Job", "JobSet"] = field_doc(
        "kind of the Kubernetes object. Job: needs no operator. JobSet: all pods are started"
        " again when one pod is lost.",
        default="Job",
    )
    max_restarts: int = field_doc(
        "maximum number of restarts of a JobSet, or of a Job with one pod", from_one, default=10
    )
    master_port: int = field_doc("port of the rendezvous of the ranks", from_one, default=29500)
    setup: tuple[str, ...] = field_doc(
        "shell lines, run by each pod before the command. A line that fails ends the pod, unless"
        " it ends with `|| true`.",
        check_lines,
        default=(),
    )
    secrets: dict[str, str] = field_doc(
        "names of environment variables, each with the 'name/key' of the Secret that contains its"
        " value",
        check_references,
        default_factory=dict,
    )


def quote(text: str) -> str:
    """Returns a shell word whose value is exactly this text. The word is on one line and contains
    only printable characters, so that no character can deceive a reader.

    Unprintable characters are written as escaped bytes, since bash supports escaped code points
    only in some locales. Unprintable characters cannot remain in a script, since sbatch refuses DOS
    line ends, for example.
    """
    if text.isprintable():
        return shlex.quote(text)
    escaped = {"\\": "\\\\", "'": "\\'"}
    word = ""
    for character in text:
        if character.isprintable():
            word += escaped.get(character, character)
        else:
            word += "".join(f"\\x{byte:02x}" for byte in character.encode())
    return f"$'{word}'"
