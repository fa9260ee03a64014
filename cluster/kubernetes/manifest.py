"""Writes the manifests of a Kubernetes job: `submit.json` for kubectl, with the script of each pod.

Each node has one pod, which runs an agent (torchrun). The agent starts the ranks of the node. The
field `kind` of the site file chooses between two manifests:

    Job      an Indexed Job and a headless Service, which need no operator. In a job of one pod,
             Kubernetes restarts the pod up to `max_restarts` times after failures, and always after
             the cluster has removed its node. In a job of several pods, a restarted pod could not
             join the other pods. As soon as one pod fails, all pods are ended, and the next
             submission resumes from the last checkpoint.
    JobSet   an Indexed Job under the JobSet operator, which restarts all pods when one is lost.

A failure that a retry would repeat (exit code USELESS_TO_RETRY) ends the Job or JobSet at once. A
pod that receives a signal to end writes a request to stop into the run directory. All ranks then
save and stop at the same step. Every pod ends with code 143, so that no part of the job counts as
finished.

The script is in a ConfigMap. In a command, Kubernetes would expand `$(NAME)`. In the run directory,
another user could replace the script. Standard library only.
"""

import hashlib
import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

from cluster.attempts import USELESS_TO_RETRY
from cluster.job import JobSpec
from cluster.record import ConfigError
from cluster.request import kubernetes_resources
from cluster.scheduler import Kubernetes, quote
from cluster.site import Site
from cluster.site_lines import checked_lines
from cluster.state import last_attempt

MANAGED_BY = {"app.kubernetes.io/managed-by": "pretraining-notebook-kit"}
INSTANCE = "app.kubernetes.io/instance"
JOB_SET_API = "jobset.x-k8s.io/v1alpha2"
REPLICATED_JOB = "node"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
SCRIPT = "run.sh"
CONTAINER = "node"
STOPPED_CODE = 143
"""Exit code of all pods of a job that have saved and stopped because Kubernetes ends one of the
pods."""
FAILS = {
    "action": "FailJob",
    "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [USELESS_TO_RETRY]},
}
IGNORED = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
"""Rule for pods that the cluster has disrupted: their node was removed, or they were evicted for
other pods. By this rule such a pod does not count as failed."""
USELESS = {"name": "useless", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
"""Rule that ends a JobSet, without a restart, if its Job has failed by the rule FAILS."""


def texts(job: JobSpec, site: Site) -> dict[str, str]:
    """Returns the files for the next attempt of a job: the text of each file, by its name in the
    run directory.

    `submit.json` has all manifests, with the script of a pod. It is the only file that is sent to
    the cluster. To send it by hand, use `kubectl create --filename=submit.json`. `run.sh` is a copy
    of the script for people to read.

    Raises:
        ConfigError: The site has no [kubernetes] table, a path of the job is not on the shared file
            system, or the pods would start without their devices.
    """
    items = manifests(job, site, last_attempt(Path(job.run_dir)) + 1)
    whole = {"apiVersion": "v1", "kind": "List", "items": items}
    return {SCRIPT: items[-1]["data"][SCRIPT], "submit.json": json.dumps(whole, indent=2) + "\n"}


def manifests(job: JobSpec, site: Site, attempt: int = 1) -> list[dict[str, Any]]:
    """Returns the manifests of an attempt: first the Job or JobSet, then the Service of a Job, then
    the ConfigMap with the script.

    Raises:
        ConfigError: The site has no [kubernetes] table, a path of the job is not on the shared
            file system, or the pods would start without their devices.
    """
    table = kubernetes_table(site)
    for field in ("run_dir", "working_directory"):
        if not PurePosixPath(getattr(job, field)).is_relative_to(table.mount_path):
            raise ConfigError(
                f"job.{field}: {getattr(job, field)!r} is not below {table.mount_path!r}, so the"
                " pods cannot see it. Use a path there, or correct site.kubernetes.mount_path."
            )
    resources, asked = kubernetes_resources(job, table, site)
    table = table.replace(resources=resources)
    name = job_name(job, attempt)
    labels = {**MANAGED_BY, INSTANCE: name}
    named = {"name": name, "namespace": table.namespace, "labels": labels}
    script = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": named,
        "data": {SCRIPT: pod_script(job, table, name, asked)},
    }
    queue_labels = {QUEUE_LABEL: table.queue} if table.queue else {}
    metadata = {**named, "labels": labels | queue_labels}
    spec = _job_spec(job, table, name, labels)
    if table.kind == "JobSet":
        template = {"metadata": {"labels": labels}, "spec": spec}
        job_set = {
            "network": {
                "enableDNSHostnames": True,
                "subdomain": name,
                "publishNotReadyAddresses": True,
            },
            "failurePolicy": {"maxRestarts": table.max_restarts, "rules": [USELESS]},
            "suspend": bool(table.queue),
            "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": template}],
        }
        return [
            {"apiVersion": JOB_SET_API, "kind": "JobSet", "metadata": metadata, "spec": job_set},
            script,
        ]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": named,
        # Pods must be able to resolve the name of the first pod before all pods are ready.
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {INSTANCE: name},
        },
    }
    spec["suspend"] = bool(table.queue)
    return [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec},
        service,
        script,
    ]


def job_name(job: JobSpec, attempt: int) -> str:
    """Returns the name of an attempt's objects in the cluster. The name is a DNS label of the job's
    name, a hash of the run directory's path (`mark`) and the attempt number.
    """
    words = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")[:24].strip("-")
    return f"{words or 'run'}-{run_directory_hash(job.run_dir)}-{attempt}"


def kubectl_name(kind: str, name: str) -> str:
    """Returns kubectl's name for a Job or JobSet, such as `job/NAME`. The kit uses this name as job
    id.
    """
    return f"{kind.lower()}/{name}"


def run_directory_hash(run_dir: str) -> str:
    """Returns the part of a job's name that identifies its run directory: the first eight hex
    digits of the SHA-256 hash of the path.
    """
    return hashlib.sha256(run_dir.encode()).hexdigest()[:8]


def kubernetes_table(site: Site) -> Kubernetes:
    """Returns the `[kubernetes]` table of a site.

    Raises:
        ConfigError: The site has no such table.
    """
    if site.kubernetes is None:
        raise ConfigError(
            f"site.kubernetes: {site.name!r} has no [kubernetes] table. eks-trn1.toml shows one."
        )
    return site.kubernetes


def _job_spec(job: JobSpec, table: Kubernetes, name: str, labels: dict[str, str]) -> dict[str, Any]:
    backoff_limit = 0
    rules = [FAILS]
    if table.kind == "Job" and job.num_nodes == 1:
        # Kubernetes may replace a failed pod only in a Job of one pod, since a new pod could not
        # join other pods that still run.
        backoff_limit = table.max_restarts
        rules.append(IGNORED)
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": job.num_nodes,
        "parallelism": job.num_nodes,
        "backoffLimit": backoff_limit,
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": labels}, "spec": _pod_spec(job, table, name)},
    }
    if job.time_limit_s is not None:
        spec["activeDeadlineSeconds"] = int(job.time_limit_s)
    return spec


def _pod_spec(job: JobSpec, table: Kubernetes, name: str) -> dict[str, Any]:
    volumes = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": table.claim}},
        {"name": "script", "configMap": {"name": name}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [
        {"name": "shared", "mountPath": table.mount_path},
        {"name": "script", "mountPath": "/kit", "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if table.compilation:
        cache = table.compilation.node_cache
        volumes.append({"name": "cache", "hostPath": {"path": cache, "type": "DirectoryOrCreate"}})
        mounts.append({"name": "cache", "mountPath": cache})
    secrets = []
    for variable, place in table.secrets.items():
        secret, key = place.split("/")
        reference = {"secretKeyRef": {"name": secret, "key": key}}
        secrets.append({"name": variable, "valueFrom": reference})
    container = {
        "name": CONTAINER,
        "image": table.image,
        "command": ["bash", f"/kit/{SCRIPT}"],
        "env": secrets,
        "resources": {"requests": dict(table.resources), "limits": dict(table.resources)},
        "volumeMounts": mounts,
        # With this policy, the status of a failed pod contains the last lines of its log.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": table.stop_before_end_s,
    }
    if table.kind == "Job":
        spec["subdomain"] = name
    if table.node_selector:
        spec["nodeSelector"] = dict(table.node_selector)
    if table.tolerations:
        tolerations = [{"key": key, "operator": "Exists"} for key in table.tolerations]
        spec["tolerations"] = tolerations
    spec["containers"] = [container]
    spec["volumes"] = volumes
    return spec


def pod_script(job: JobSpec, table: Kubernetes, name: str, derived: tuple[str, ...] = ()) -> str:
    """Returns the script that each pod runs. `derived` has one line for each requested resource
    that the site file does not give. These lines become comments at the top of the script.
    """
    host = f"{name}-0.{name}" if table.kind == "Job" else f"{name}-{REPLICATED_JOB}-0-0.{name}"
    variables = {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    program, *words = job.argv
    if re.fullmatch(r"python[0-9.]*", PurePosixPath(program).name):
        program = "python"  # The image has its own Python.
    command = [program, *words]
    lines = [
        *(f"# Asked of Kubernetes where the site file says nothing: {line}" for line in derived),
        f"cd {quote(job.working_directory)} || exit",
        f"export KIT_RUN_DIR={quote(job.run_dir)}",
        f"export MASTER_ADDR={host} MASTER_PORT={table.master_port}",
        *(
            f"export {key}={quote(value)}"
            for key, value in {**variables, **table.environment}.items()
        ),
        *checked_lines(table.setup, "site.kubernetes.setup", USELESS_TO_RETRY),
        "# What each rank runs, in the attempt that the first pod has begun or a phase before it.",
        "run_rank() {",
        "    log=${KIT_PHASE-}",
        '    if [ -z "$log" ]; then',
        '        read -r KIT_ATTEMPT <"$KIT_RUN_DIR/logs/attempt" || exit',
        '        log=$(printf "attempt_%02d/" "$KIT_ATTEMPT")',
        '        export KIT_ATTEMPT && mkdir -p "$KIT_RUN_DIR/logs/$log" || exit',
        "    fi",
        '    exec >>"$KIT_RUN_DIR/logs/${log}rank_$(printf %05d "$RANK").log" 2>&1 || exit',
        *(f"    export {key}={quote(value)}" for key, value in job.environment.items()),
        f"    {' '.join(map(quote, command))}",
        "    code=$?",
        f'    if [ "$code" = {USELESS_TO_RETRY} ] && [ -z "${{KIT_PHASE-}}" ]; then',
        '        touch "$KIT_RUN_DIR/control/useless"',
        "    fi",
        '    exit "$code"',
        "}",
        "export -f run_rank",
        "# What each pod runs: an agent that starts the ranks of its node.",
        "run_node() {",
        (
            f'    "$@" python -P -m torch.distributed.run --nnodes={job.num_nodes}'
            ' --node-rank="$JOB_COMPLETION_INDEX" \\'
        ),
        f"        --nproc-per-node={job.num_processes // job.num_nodes} \\",
        (
            '        --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --no-python bash -c'
            " run_rank"
        ),
        "}",
        *_compilation_lines(table),
        "# When Kubernetes ends this pod, all ranks save and stop at the same step.",
        "trap 'python -P -m cluster.kubernetes stop \"$KIT_RUN_DIR\"' TERM",
        "# The first pod counts the attempt, also when Kubernetes has started it again.",
        (
            '[ "$JOB_COMPLETION_INDEX" != 0 ] || python -P -m cluster.kubernetes begin '
            f'"$KIT_RUN_DIR" {table.namespace} {quote(kubectl_name(table.kind, name))} '
            '>"$KIT_RUN_DIR/logs/attempt" || exit'
        ),
        *_meeting_lines(job.num_nodes),
        "run_node &",
        "agent=$!",
        'while wait "$agent"; code=$?; kill -0 "$agent" 2>/dev/null; do :; done',
        "# torchrun has a code of its own for whatever its ranks ended with.",
        f'[ ! -e "$KIT_RUN_DIR/control/useless" ] || exit {USELESS_TO_RETRY}',
        f'[ ! -e "$KIT_RUN_DIR/control/stopped" ] || exit {STOPPED_CODE}',
        (
            '[ "$JOB_COMPLETION_INDEX" != 0 ] || [ "$code" != 0 ] || '
            'python -P -m cluster.kubernetes end "$KIT_RUN_DIR" "$(<"$KIT_RUN_DIR/logs/attempt")"'
        ),
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _meeting_lines(num_pods: int) -> list[str]:
    """Returns lines of the pod script that run after an attempt has begun and before the agent
    (torchrun) starts.
    """
    lines = []
    if num_pods > 1:
        lines = [
            "# All pods wait for each other before their agents do. Missing pods are named.",
            "attempt=",
            '[ "$JOB_COMPLETION_INDEX" != 0 ] || attempt=$(<"$KIT_RUN_DIR/logs/attempt")',
            'python -P -m cluster.kubernetes meet "$KIT_RUN_DIR" "$MASTER_ADDR" "$MASTER_PORT" \\',
            f'    {num_pods} "$JOB_COMPLETION_INDEX" "$attempt" || exit',
        ]
    return [
        *lines,
        "# The first pod writes heartbeats until the first step.",
        'if [ "$JOB_COMPLETION_INDEX" = 0 ]; then',
        "    python -P -m cluster.kubernetes watch \\",
        '        "$KIT_RUN_DIR" "$(<"$KIT_RUN_DIR/logs/attempt")" "$$" &',
        "fi",
    ]


def _compilation_lines(table: Kubernetes) -> list[str]:
    compilation = table.compilation
    if compilation is None:
        return []
    return [
        "# Compile ahead, once for this run; then work from a copy on the node's own disk.",
        f"export {compilation.variable}={quote(compilation.shared_cache)}",
        'if [ ! -e "$KIT_RUN_DIR/compiled" ]; then',
        f"    KIT_PHASE=compile_ run_node {' '.join(map(quote, compilation.command))} || exit",
        '    [ "$JOB_COMPLETION_INDEX" != 0 ] || touch "$KIT_RUN_DIR/compiled"',
        "fi",
        f"cp -ru {quote(compilation.shared_cache)}/. {quote(compilation.node_cache)} || exit",
        f"export {compilation.variable}={quote(compilation.node_cache)}",
    ]
