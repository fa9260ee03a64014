"""The batch script of a Slurm job: directives, environment, a function that becomes each rank, and
the launch.

The launch runs under `python -m cluster.slurm.supervisor RUN_DIR -- COMMAND`, which starts the
command with KIT_ATTEMPT in its environment and answers for it; each task runs under `python -m
cluster.slurm.rank`. Directives name no path of the user: they are relative to the run directory,
from which the script must be submitted. Pure text; nothing is looked up on this machine. Standard
library only.
"""

import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.heartbeats import MANY
from cluster.interpreter import (
    CONTAINER_PYTHON,
    PACKAGE_ROOT,
    from_source,
    module_command,
    source_command,
)
from cluster.job import JobSpec
from cluster.logs import MESSAGE_MARK
from cluster.ports import FIRST_PORT, NUM_PORTS
from cluster.record import counted
from cluster.render import warnings
from cluster.request import CPUS_VARIABLE, SlurmRequest, slurm_request
from cluster.scheduler import NODE_VARIABLES, Compilation, Slurm, quote
from cluster.site import Site, There
from cluster.site_lines import checked_lines, complete_commands

ADDRESS_VARIABLES = ("MASTER_ADDR", "GLOO_SOCKET_IFNAME")
"""Variables that decide by which network the ranks meet. A site may set them for each task."""
SUPERVISOR = "cluster.slurm.supervisor"
KEEPER = "cluster.slurm.rank"
RULER = "# " + "-" * 100


def texts(job: JobSpec, site: Site, there: There | None = None) -> dict[str, str]:
    """Returns the scripts of a job that fits the site by their names in the run directory, in order
    of submission, warnings at the top.

    `there` names the Python and the source that run them, by default these.
    """
    request = slurm_request(job, site)
    slurm = request.table
    python = sys.executable
    source = str(PACKAGE_ROOT)
    if there:
        python = there.python
        source = str(there.source)
    common = [
        *environment(job, slurm, python, counts_cpus=request.counts_cpus),
        *_meeting_point(slurm),
        *_broadcast(job, slurm),
    ]
    scripts = {}
    if slurm.compilation:
        scripts["compile.sh"] = [
            *_header(job, site, slurm, "compiles ahead for"),
            *derived_lines(request),
            *directives(job, slurm, end="-compile"),
            *common,
            *_ranks(job, slurm, python, source, compiling=True),
            *_compile(job, request, slurm.compilation),
        ]
    # B: reaches the supervisor alone; sent to the ranks, the signal would kill those that do not
    # expect it.
    comes_back = ("--requeue", f"--signal=B:USR1@{slurm.stop_before_end_s}")
    scripts["submit.sh"] = [
        *_header(job, site, slurm, "runs"),
        *derived_lines(request),
        *(f"# WARNING: {text}" for text in warnings(job, site, python)),
        *directives(job, slurm, *comes_back),
        *common,
        *_ranks(job, slurm, python, source),
        *_cache_to_nodes(job, slurm),
        *_supervised(job, request, python, source),
    ]
    return {name: "\n".join(lines) + "\n" for name, lines in scripts.items()}


def _header(job: JobSpec, site: Site, slurm: Slurm, what: str) -> list[str]:
    order = (
        "sbatch compile.sh, and after its success sbatch submit.sh"
        if slurm.compilation
        else "sbatch submit.sh"
    )
    size = f"{counted(job.num_processes, 'rank')} on {counted(job.num_nodes, 'node')}"
    return [
        "#!/bin/bash",
        f"# {job.name}: {what} {size} of {site.name}, each with",
        # in JSON, since a line break in a word would end the comment
        f"#   {json.dumps(job.argv)}",
        f"# Submit from the run directory, which needs a folder logs: {order}",
    ]


def derived_lines(request: SlurmRequest) -> list[str]:
    """Returns comments that say what the job asks for beyond what the site file says."""
    if not request.derived:
        return []
    return [
        "# Asked of Slurm where the site file says nothing:",
        *(f"#   {line}" for line in request.derived),
    ]


def directives(
    job: JobSpec, slurm: Slurm, *more: str, end: str = "", log: str = "logs/slurm-%j.log"
) -> list[str]:
    name = re.sub(r"[^A-Za-z0-9._-]", "_", job.name)[:64]
    limit_s = slurm.limit_s(job.num_nodes, job.time_limit_s)
    time_limit = None if limit_s is None else _clock(limit_s)
    given = {
        "job-name": name + end,
        "account": slurm.account,
        "partition": slurm.partition,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "nodes": job.num_nodes,
        "ntasks-per-node": _num_tasks(job, slurm) // job.num_nodes,
        "cpus-per-task": slurm.cpus_per_task,
        "gpus-per-node": slurm.gpus_per_node,
        "time": time_limit,
        "output": log,
        "open-mode": "append",
        "export": "ALL",
    }
    options = [f"--{key}={value}" for key, value in given.items() if value is not None]
    return [RULER, *(f"#SBATCH {option}" for option in (*options, *more, *slurm.sbatch_options))]


def environment(job: JobSpec, slurm: Slurm, python: str, *, counts_cpus: bool = False) -> list[str]:
    is_task = slurm.launcher == "srun"
    of_size = slurm.environment_one_node if job.num_nodes == 1 else slurm.environment_several_nodes
    of_site = {**slurm.environment, **of_size}
    counted_cpus = []
    num_threads = slurm.cpus_per_task if slurm.cpus_per_task and is_task else 1
    variables = {"OMP_NUM_THREADS": str(num_threads)}
    if counts_cpus:
        tasks = _num_tasks(job, slurm) // job.num_nodes
        counted_cpus.append(f"export {CPUS_VARIABLE}=$((SLURM_CPUS_ON_NODE / {tasks}))")
        if is_task and "OMP_NUM_THREADS" not in of_site:
            del variables["OMP_NUM_THREADS"]
            counted_cpus.append(f"export OMP_NUM_THREADS=${CPUS_VARIABLE}")
    variables |= {
        "PYTHONUNBUFFERED": "1",
        # With gloo, ranks that restart would else read stale addresses.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **of_site,
    }
    if slurm.network_interfaces:
        variables["NCCL_SOCKET_IFNAME"] = ",".join(slurm.network_interfaces)
        variables["GLOO_SOCKET_IFNAME"] = slurm.network_interfaces[0]
    return [
        RULER,
        f'fail() {{ echo "{MESSAGE_MARK}$*" >&2; exit 1; }}',
        f"export KIT_RUN_DIR={quote(job.run_dir)}",
        f'export PATH={quote(str(Path(python).parent))}:"$PATH"',
        *_modules(slurm),
        *counted_cpus,
        *_exports(variables),
        *checked_lines(slurm.setup, "site.slurm.setup"),
    ]


def _modules(slurm: Slurm) -> list[str]:
    """Returns the lines that load the modules of a site.

    Version 3 of Environment Modules reports errors with code 0, so there the list of loaded modules
    must change or have the module. Later versions set MODULES_CMD, Lmod sets LMOD_CMD.
    """
    if not slurm.modules:
        return []
    return [
        "KIT_LOADED=${LOADEDMODULES-}",
        "is_loaded() {",
        '    [ -z "${LMOD_CMD-}${MODULES_CMD-}" ] && [ -n "${LOADEDMODULES+set}" ] || return 0',
        '    [ "$LOADEDMODULES" != "$KIT_LOADED" ] || [[ :$LOADEDMODULES == *":$1"* ]] || return 1',
        "    KIT_LOADED=$LOADEDMODULES",
        "}",
        *(
            f"{{ module load {quote(name)} && is_loaded {quote(name)}; }} ||"
            f" fail {quote(f'the module {name} cannot be loaded')}"
            for name in slurm.modules
        ),
    ]


def _meeting_point(slurm: Slurm) -> list[str]:
    # Other jobs and earlier starts of this job use other ports. The supervisor takes the next port
    # where this port is in use on the first node.
    port = (
        slurm.master_port
        or f"$(({FIRST_PORT} + (SLURM_JOB_ID + 97 * ${{SLURM_RESTART_COUNT:-0}}) % {NUM_PORTS}))"
    )
    return [
        "# Where the ranks meet: the first node of the job.",
        # Other lines are those of a site's wrapper of scontrol.
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" |'
        " grep -xm 1 '[[:alnum:]._-]\\+')",
        '[ -n "$MASTER_ADDR" ] || fail "scontrol names no host in $SLURM_JOB_NODELIST"',
        f"export MASTER_ADDR MASTER_PORT={port}",
        *_task_addresses(slurm),
    ]


def _task_addresses(slurm: Slurm) -> list[str]:
    """Returns the shell function that sets the addresses of a task as `task_setup` does, for the
    check of the nodes. Returns no lines if `task_setup` sets no address.

    Commands of `task_setup` after the last one that sets an address are left out: they may be
    expensive.
    """
    commands = complete_commands(slurm.task_setup, "site.slurm.task_setup")
    setting = [
        number
        for number, command in enumerate(commands, start=1)
        if any(variable in command for variable in ADDRESS_VARIABLES)
    ]
    if not setting:
        return []
    return [
        "# The addresses of each task, for the check of the nodes before the ranks start.",
        *_function("set_task_addresses", list(commands[: setting[-1]])),
    ]


def _broadcast(job: JobSpec, slurm: Slurm) -> list[str]:
    if slurm.broadcast is None or slurm.broadcast.archive is None:
        return []
    unpack = [
        'cd "$KIT_ENVIRONMENT" && tar -xf environment.tar && { [ ! -e bin/conda-unpack ] ||'
        " bin/conda-unpack; }"
    ]
    return [
        (
            "# The Python environment: one copy to each node's own disk, instead of one read of"
            " every file by every rank."
        ),
        f"export KIT_ENVIRONMENT={_path(slurm.broadcast.directory)}",
        *_function("unpack_environment", unpack),
        f'{_once_a_node(job)} mkdir -p "$KIT_ENVIRONMENT" \\',
        '    || fail "$KIT_ENVIRONMENT cannot be made on all nodes"',
        f'sbcast --force {quote(slurm.broadcast.archive)} "$KIT_ENVIRONMENT/environment.tar" \\',
        '    || fail "the environment cannot be sent to all nodes"',
        f"{_once_a_node(job)} bash -c unpack_environment \\",
        '    || fail "the environment cannot be unpacked on all nodes"',
        'export PATH="$KIT_ENVIRONMENT/bin:$PATH"',
    ]


def _ranks(
    job: JobSpec, slurm: Slurm, python: str, source: str, compiling: bool = False
) -> list[str]:
    """Returns the functions that tasks run: `run_rank` and, where an agent starts the ranks of a
    node, `run_node`.
    """
    direct = slurm.launcher == "srun"
    per_node = job.num_processes // job.num_nodes
    identity = [
        "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID",
        f"export WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE={per_node}",
    ]
    log = (
        'printf -v log \'%s/logs/attempt_%02d/rank_%05d.log\' "$KIT_RUN_DIR" "$KIT_ATTEMPT" "$RANK"'
    )
    if compiling:
        log = 'printf -v log \'%s/logs/compile_rank_%05d.log\' "$KIT_RUN_DIR" "$RANK"'
    # Of many, the others go on with the log of their node, which the supervisor names to srun.
    own_log = '[ "$RANK" != 0 ] || ' if job.num_processes > MANY and not compiling else ""
    prefix = [*slurm.compilation.command] if compiling and slurm.compilation else []
    task_setup = checked_lines(slurm.task_setup, "site.slurm.task_setup")
    folder = quote(job.working_directory)
    if slurm.has_tasks_in_container:
        # A container shows few folders of the host. The run directory is one of them.
        folder = '"$KIT_RUN_DIR"'
    body = [log, f'{own_log}exec >>"$log" 2>&1 || exit']
    if direct:
        command = rank_command(job, slurm, python, source, prefix=prefix)
        body = [*identity, *body, *task_setup]
    else:  # The agent of the node has the prefix, the identity and the setup.
        command = rank_command(job, slurm, python, source)
    body += [
        *_exports(job.environment),
        *container_environment(job, slurm, source),
        f"cd {folder} || exit",
        f"exec {' '.join(map(quote, command))}",
    ]
    lines = [
        RULER,
        "# What each rank runs.",
        *_function("run_rank", body),
        *_container_probe(job, slurm, source),
    ]
    if direct:
        return lines
    agent = [*prefix, _interpreter(job, slurm, python), "-P", "-m", "torch.distributed.run"]
    body = [
        *task_setup,
        # Slurm sends SIGTERM to every process at preemption; the ranks must live on until their
        # checkpoint is written.
        "export PET_SIGNALS_TO_HANDLE=SIGINT,SIGHUP,SIGQUIT",
        f"exec {' '.join(map(quote, agent))} \\",
        f'    --nnodes={job.num_nodes} --node-rank="$SLURM_NODEID" --nproc-per-node={per_node} \\',
        (
            '    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --no-python bash -c'
            " run_rank"
        ),
    ]
    return [
        *lines,
        "# What each node runs: an agent that starts the node's ranks.",
        *_function("run_node", body),
    ]


def _cache_to_nodes(job: JobSpec, slurm: Slurm) -> list[str]:
    if slurm.compilation is None:
        return []
    variable = slurm.compilation.variable
    copy = [f'mkdir -p "${variable}" && cp -ru "$KIT_SHARED_CACHE/." "${variable}"']
    return [
        (
            "# Compiled graphs: from the shared cache to each node's own disk, which all ranks can"
            " read at once."
        ),
        f"export KIT_SHARED_CACHE={_path(slurm.compilation.shared_cache)}",
        f"export {variable}={_path(slurm.compilation.node_cache)}",
        (
            '[ -d "$KIT_SHARED_CACHE" ] || fail "no compiled graphs in $KIT_SHARED_CACHE: submit'
            ' compile.sh first"'
        ),
        *_function("copy_cache", copy),
        (
            f'{_once_a_node(job)} bash -c copy_cache || fail "the compiled graphs cannot be copied'
            ' to all nodes"'
        ),
    ]


def _supervised(job: JobSpec, request: SlurmRequest, python: str, source: str) -> list[str]:
    slurm = request.table
    # Both need the standard library alone, so -I keeps the user's environment out of them.
    isolated = ["-I", "-u"]
    supervisor = source_command(SUPERVISOR, python=python, source=source)
    keeper = source_command(KEEPER, python=_rank_python(slurm, python), source=source)
    return [
        RULER,
        (
            "# The supervisor counts the attempt (KIT_ATTEMPT), turns signals into requests to save"
            " and stop, starts anew,"
        ),
        (
            "# here or elsewhere, what has failed, and records the end. The keeper of each task"
            " says how it ended."
        ),
        f"cd {quote(source)} || fail 'the kit is not visible on this node'",
        f'exec {_words(supervisor, *isolated)} "$KIT_RUN_DIR" -- \\',
        *_srun(job, request, keeper=f"{_words(keeper, *isolated, '-S')} "),
    ]


def _compile(job: JobSpec, request: SlurmRequest, compilation: Compilation) -> list[str]:
    first, *rest = _srun(job, request)
    return [
        RULER,
        "# The compiled graphs stay in the shared cache, where a run of the same shape finds them.",
        f"export {compilation.variable}={_path(compilation.shared_cache)}",
        f'mkdir -p "${compilation.variable}" || fail "${compilation.variable} cannot be made"',
        f"exec {first.strip()}",
        *rest,
    ]


def _srun(job: JobSpec, request: SlurmRequest, keeper: str = "") -> list[str]:
    slurm = request.table
    tasks = _num_tasks(job, slurm)
    given = {
        "cpus-per-task": slurm.cpus_per_task,
        "gpus-per-task": slurm.gpus_per_task,
        "gpu-bind": slurm.gpu_bind,
        "cpu-bind": slurm.cpu_bind,
    }
    options = [f"--{key}={value}" for key, value in given.items() if value is not None]
    cpus = f'--cpus-per-task="${CPUS_VARIABLE}"' if request.counts_cpus else ""
    function = "run_rank" if slurm.launcher == "srun" else "run_node"
    lines = [
        f"srun --nodes={job.num_nodes} --ntasks={tasks} --ntasks-per-node={tasks // job.num_nodes}",
        cpus,
        " ".join(map(quote, [*options, *slurm.srun_options])),
        # a dead rank ends all; nobody waits for ever for one that left
        "--kill-on-bad-exit=1 --wait=60 --label",
        f"{keeper}bash -c {function}",
    ]
    return [f"    {line} \\" for line in lines[:-1] if line] + [f"    {lines[-1]}"]


def _num_tasks(job: JobSpec, slurm: Slurm) -> int:
    return job.num_processes if slurm.launcher == "srun" else job.num_nodes


def _once_a_node(job: JobSpec) -> str:
    # With all three, since --ntasks-per-node alone is ignored inside a job that has its own number
    # of tasks.
    return f"srun --nodes={job.num_nodes} --ntasks={job.num_nodes} --ntasks-per-node=1"


def _exports(variables: dict[str, str]) -> list[str]:
    return [f"export {name}={quote(value)}" for name, value in variables.items()]


def _function(name: str, body: list[str]) -> list[str]:
    return [f"{name}() {{", *(f"    {line}" for line in body), "}", f"export -f {name}"]


def rank_command(
    job: JobSpec, slurm: Slurm, python: str, source: str, prefix: Sequence[str] = ()
) -> list[str]:
    """Returns the command of a rank as a compute node runs it, in the site's container if there is
    one. `prefix` is put before the rank's own command.
    """
    command = [*job.argv]
    if _is_python(command[0]):
        # With `container`, PYTHONPATH names the source: the image may bring the kit instead.
        inside = job.argv if slurm.container else from_source(job.argv, source)
        command = [_interpreter(job, slurm, python), *inside[1:]]
    return [*slurm.container, *prefix, *command]


def container_environment(job: JobSpec, slurm: Slurm, source: str) -> list[str]:
    """Returns shell lines that keep the Python settings of the submitting shell out of the
    container, whose Python and packages are others. PYTHONPATH names the source of the kit and what
    the site file or the job sets.
    """
    if not slurm.is_in_container:
        return []
    paths = [source]
    for variables in (slurm.environment, job.environment):
        if "PYTHONPATH" in variables:
            paths.append(variables["PYTHONPATH"])
    return [
        "unset PYTHONHOME",
        f"export PYTHONNOUSERSITE=1 PYTHONPATH={quote(':'.join(paths))}",
    ]


def _container_probe(job: JobSpec, slurm: Slurm, source: str) -> list[str]:
    """Returns the function by which the preflight check tries the container on each node."""
    if not slurm.container:
        return []
    command = [*slurm.container, *container_check(job.run_dir)]
    body = [*container_environment(job, slurm, source), " ".join(map(quote, command))]
    return [
        "# Tries the container, which must show these folders under the same paths:",
        f"#   {json.dumps([source, job.run_dir])}",
        *_function("try_container", body),
    ]


def container_trial(slurm: Slurm, folder: str) -> str:
    """Returns a shell script that sets up the environment of a job and tries the site's container
    on this machine. What is wrong is on standard error.
    """
    job = JobSpec(name="trial", run_dir=folder, argv=("true",), num_processes=1)
    command = [*slurm.container, *container_check(folder)]
    lines = [
        *environment(job, slurm, sys.executable),
        *container_environment(job, slurm, str(PACKAGE_ROOT)),
        f"exec {' '.join(map(quote, command))}",
    ]
    return "\n".join(lines)


def container_check(folder: str) -> tuple[str, ...]:
    """Returns the command that reports, inside a container, what is wrong with the container."""
    return (CONTAINER_PYTHON, *module_command("cluster.slurm.container", folder)[1:])


def _interpreter(job: JobSpec, slurm: Slurm, python: str) -> str:
    """Returns the Python of the ranks: the job's own, unless nodes have another."""
    if slurm.has_own_environment or slurm.is_in_container:
        return CONTAINER_PYTHON if slurm.is_in_container else "python"
    return job.argv[0] if _is_python(job.argv[0]) else python


def _rank_python(slurm: Slurm, python: str) -> str:
    """Returns the Python that looks after a rank. It runs outside of `container`, and inside where
    srun itself starts each task in a container.
    """
    if slurm.has_tasks_in_container:
        return CONTAINER_PYTHON
    return "python" if slurm.has_own_environment else python


def _words(command: Sequence[str], *flags: str) -> str:
    """Returns a command of `source_command` in the shell, with flags in place of its -P."""
    return " ".join(map(quote, [command[0], *flags, *command[2:]]))


def _is_python(word: str) -> bool:
    return re.fullmatch(r"python[0-9.]*", Path(word).name) is not None


def _path(text: str) -> str:
    """Returns a path in double quotes, in which only the variables of NODE_VARIABLES are looked
    up.
    """
    variables = "|".join(NODE_VARIABLES)
    return (
        '"'
        + re.sub(rf'["\\`]|\$(?!\{{?(?:{variables})\b)', lambda match: "\\" + match[0], text)
        + '"'
    )


def _clock(seconds: float) -> str:
    minutes = math.ceil(seconds / 60)  # Slurm counts in minutes
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"
