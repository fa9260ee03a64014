"""Writes the batch script of a Slurm job: directives, environment, the shell function that each
rank runs, and the command that starts the ranks.

The script starts `python -m cluster.slurm.supervisor RUN_DIR -- COMMAND`. The supervisor starts
COMMAND, which is srun, with KIT_ATTEMPT in its environment, and records the end of the attempt.
Each task runs under `python -m cluster.slurm.rank`. Paths in directives are relative to the run
directory, from which the script must be submitted. The functions of this module only return text,
and look up nothing on this machine. Standard library only.
"""

import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.heartbeats import MAX_RANKS_WITH_FILES
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
from cluster.site import RemotePaths, Site
from cluster.site_lines import checked_lines, complete_commands

ADDRESS_VARIABLES = ("MASTER_ADDR", "GLOO_SOCKET_IFNAME")
"""Environment variables that choose the address and the network of the rendezvous. The field
`task_setup` of a site may set them for each task."""
SUPERVISOR = "cluster.slurm.supervisor"
KEEPER = "cluster.slurm.rank"
RULER = "# " + "-" * 100


def texts(job: JobSpec, site: Site, there: RemotePaths | None = None) -> dict[str, str]:
    """Returns the scripts of a job by file name, in order of submission. The job must fit the site.
    Warnings are comments at the top of a script.

    `there` names the Python and the source tree that run the scripts. If None, the Python and
    source tree of this process are used.
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
    # With `B:`, only the supervisor receives the signal, which would kill ranks that have no
    # handler for it.
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
        # JSON escapes line breaks, which would end the comment.
        f"#   {json.dumps(job.argv)}",
        f"# Submit from the run directory, which needs a folder logs: {order}",
    ]


def derived_lines(request: SlurmRequest) -> list[str]:
    """Returns comment lines for the batch script. They list the resources that the job requests
    although the site file does not give them.
    """
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
        # Without this variable, restarted ranks that use gloo would read stale addresses.
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

    Version 3 of Environment Modules exits with code 0 after an error. With this version, a module
    counts as loaded if the list of loaded modules has changed or contains the module. Later
    versions are recognised by MODULES_CMD, and Lmod by LMOD_CMD.
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
    # The port depends on the job id and the number of restarts, so that other jobs and earlier
    # starts of this job use other ports. If this port is in use on the first node, the supervisor
    # takes the next free port.
    port = (
        slurm.master_port
        or f"$(({FIRST_PORT} + (SLURM_JOB_ID + 97 * ${{SLURM_RESTART_COUNT:-0}}) % {NUM_PORTS}))"
    )
    return [
        "# Where the ranks meet: the first node of the job.",
        # grep skips lines that a site's wrapper script of scontrol may print.
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" |'
        " grep -xm 1 '[[:alnum:]._-]\\+')",
        '[ -n "$MASTER_ADDR" ] || fail "scontrol names no host in $SLURM_JOB_NODELIST"',
        f"export MASTER_ADDR MASTER_PORT={port}",
        *_task_addresses(slurm),
    ]


def _task_addresses(slurm: Slurm) -> list[str]:
    """Returns the lines of a shell function that sets ADDRESS_VARIABLES as the site's `task_setup`
    does. The preflight check of the nodes calls this shell function. Returns no lines if
    `task_setup` sets none of these variables.

    Commands of `task_setup` after the last command that sets an address are left out, since they
    may be expensive.
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
    """Returns the lines of the shell functions that Slurm's tasks run: `run_rank`, and also
    `run_node` if an agent (torchrun) starts the ranks of a node. If `compiling`, the functions
    belong to the compile job.
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
    # With more than MAX_RANKS_WITH_FILES ranks, only rank 0 has its own log. The other ranks write
    # to the log of their node, for which the supervisor sets SLURM_STDOUTMODE.
    own_log = (
        '[ "$RANK" != 0 ] || ' if job.num_processes > MAX_RANKS_WITH_FILES and not compiling else ""
    )
    prefix = [*slurm.compilation.command] if compiling and slurm.compilation else []
    task_setup = checked_lines(slurm.task_setup, "site.slurm.task_setup")
    folder = quote(job.working_directory)
    if slurm.has_tasks_in_container:
        # The working directory may be missing in the container. The run directory must be mounted
        # in it.
        folder = '"$KIT_RUN_DIR"'
    body = [log, f'{own_log}exec >>"$log" 2>&1 || exit']
    if direct:
        command = rank_command(job, slurm, python, source, prefix=prefix)
        body = [*identity, *body, *task_setup]
    # The function run_node contains prefix and task_setup. The agent (torchrun) sets RANK and
    # WORLD_SIZE.
    else:
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
        # Slurm sends SIGTERM to every process at preemption. The agent must not forward the signal,
        # since the ranks must run until their checkpoint is written.
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
    # Supervisor and keeper need the standard library only. -I isolates both from the user's
    # environment.
    isolated = ["-I", "-u"]
    supervisor = source_command(SUPERVISOR, python=python, source=source)
    keeper = source_command(KEEPER, python=_rank_python(slurm, python), source=source)
    return [
        RULER,
        (
            "# The supervisor counts the attempt (KIT_ATTEMPT), turns Slurm's signals into requests"
            " to save and stop, restarts"
        ),
        (
            "# failed ranks, here or in another job, and records the end. The keeper, each rank's"
            " parent, records how it ended."
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
        # A failed rank ends all ranks. srun kills ranks that still run 60 s after the first rank
        # has ended.
        "--kill-on-bad-exit=1 --wait=60 --label",
        f"{keeper}bash -c {function}",
    ]
    return [f"    {line} \\" for line in lines[:-1] if line] + [f"    {lines[-1]}"]


def _num_tasks(job: JobSpec, slurm: Slurm) -> int:
    return job.num_processes if slurm.launcher == "srun" else job.num_nodes


def _once_a_node(job: JobSpec) -> str:
    # All three options are needed: --ntasks-per-node alone is ignored inside a job that sets its
    # number of tasks.
    return f"srun --nodes={job.num_nodes} --ntasks={job.num_nodes} --ntasks-per-node=1"


def _exports(variables: dict[str, str]) -> list[str]:
    return [f"export {name}={quote(value)}" for name, value in variables.items()]


def _function(name: str, body: list[str]) -> list[str]:
    return [f"{name}() {{", *(f"    {line}" for line in body), "}", f"export -f {name}"]


def rank_command(
    job: JobSpec, slurm: Slurm, python: str, source: str, prefix: Sequence[str] = ()
) -> list[str]:
    """Returns the command of a rank on a compute node, inside the site's container if the site has
    one. `prefix` is inserted before the rank's own command.
    """
    command = [*job.argv]
    if _is_python(command[0]):
        # In a `container` the command stays unchanged: PYTHONPATH contains the source of the kit,
        # or the image contains the kit.
        inside = job.argv if slurm.container else from_source(job.argv, source)
        command = [_interpreter(job, slurm, python), *inside[1:]]
    return [*slurm.container, *prefix, *command]


def container_environment(job: JobSpec, slurm: Slurm, source: str) -> list[str]:
    """Returns shell lines that remove the Python settings of the submitting shell from a
    container's environment. The container has another Python and other packages. Without a
    container, returns no lines.

    The lines also set PYTHONPATH to the source of the kit, followed by the PYTHONPATH of the site
    file and of the job.
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
    """Returns the lines of the shell function with which the preflight check tests the container on
    each node. Returns no lines if the site has no `container`.
    """
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
    """Returns a shell script that sets up the environment of a job and tests the site's container
    on this machine. The script prints errors to standard error.
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
    """Returns the command that tests a container from inside: it fails with a message if ranks
    could not run there. `folder` must be writable in the container.
    """
    return (CONTAINER_PYTHON, *module_command("cluster.slurm.container", folder)[1:])


def _interpreter(job: JobSpec, slurm: Slurm, python: str) -> str:
    """Returns the Python executable of the ranks: the executable in the job's command, unless the
    ranks run in a container or in an environment that is copied to each node.
    """
    if slurm.has_own_environment or slurm.is_in_container:
        return CONTAINER_PYTHON if slurm.is_in_container else "python"
    return job.argv[0] if _is_python(job.argv[0]) else python


def _rank_python(slurm: Slurm, python: str) -> str:
    """Returns the Python executable of a rank's keeper (`cluster.slurm.rank`). The keeper runs
    outside of the container that the field `container` starts. It runs inside a container that srun
    starts for each task.
    """
    if slurm.has_tasks_in_container:
        return CONTAINER_PYTHON
    return "python" if slurm.has_own_environment else python


def _words(command: Sequence[str], *flags: str) -> str:
    """Returns `command`, which is a result of `source_command`, as shell text. Its option -P is
    replaced by `flags`.
    """
    return " ".join(map(quote, [command[0], *flags, *command[2:]]))


def _is_python(word: str) -> bool:
    return re.fullmatch(r"python[0-9.]*", Path(word).name) is not None


def _path(text: str) -> str:
    """Returns a path in double quotes for the shell, which then expands only the variables
    NODE_VARIABLES.
    """
    variables = "|".join(NODE_VARIABLES)
    return (
        '"'
        + re.sub(rf'["\\`]|\$(?!\{{?(?:{variables})\b)', lambda match: "\\" + match[0], text)
        + '"'
    )


def _clock(seconds: float) -> str:
    minutes = math.ceil(seconds / 60)  # Slurm's time limits have a resolution of one minute.
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"
