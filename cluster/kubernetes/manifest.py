"""The Kubernetes manifests of a job: as plain dicts, and as YAML text that is shown, kept and can be applied by hand.

One pod is one node: an agent (torchrun) that starts the node's ranks. Two shapes, by `[kubernetes] kind`:

    Job      an Indexed Job and a headless Service, which needs no operator. One Job is one attempt: as soon as a pod
             fails, all are ended, and the next submission goes on from the last checkpoint.
    JobSet   the same under the JobSet operator, which starts all pods again when one is lost.

A pod that is told to end leaves a request to stop in the run directory: all ranks save and stop at the same step, and
every pod then ends with code 143, so that no part of the job counts as finished. Quantities are text, as the official
client wants them. The script lies in a ConfigMap, since Kubernetes would look up `$(NAME)` in a command.
Standard library only.
"""

import hashlib
import json
import re
from pathlib import PurePosixPath
from typing import Any

from cluster.job import JobSpec
from cluster.record import ConfigError, counted
from cluster.scheduler import Kubernetes, quote
from cluster.site import Site

MANAGED_BY = {"app.kubernetes.io/managed-by": "pretraining-notebook-kit"}
INSTANCE = "app.kubernetes.io/instance"
JOB_SET_API, REPLICATED_JOB = "jobset.x-k8s.io/v1alpha2", "node"
RESTART_LABEL = "jobset.sigs.k8s.io/restart-attempt"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
STOPPED_CODE = 143
"""Exit code of pods that saved and stopped because one of them was told to end."""


def manifest_text(job: JobSpec, site: Site, attempt: int = 1) -> str:
    """Returns all manifests of an attempt as YAML documents, for `kubectl apply --filename`."""
    head = f"# {job.name}: {counted(job.num_processes, 'rank')} in {counted(job.num_nodes, 'pod')} on {site.name}\n"
    return head + "---\n".join(to_yaml(manifest) for manifest in manifests(job, site, attempt))


def manifests(job: JobSpec, site: Site, attempt: int = 1) -> list[dict[str, Any]]:
    """Returns the manifests of an attempt: the Job or JobSet first, then what belongs to it.

    Raises:
        ConfigError: the site has no [kubernetes] table, or a path of the job is not on the shared file system.
    """
    table = kubernetes_table(site)
    for field in ("run_dir", "working_directory"):
        if not PurePosixPath(getattr(job, field)).is_relative_to(table.mount_path):
            raise ConfigError(
                f"job.{field}: {getattr(job, field)!r} is not below {table.mount_path!r}, so the pods cannot see it. "
                f"Use a path there, or correct site.kubernetes.mount_path."
            )
    name = job_name(job, attempt)
    labels = {**MANAGED_BY, INSTANCE: name}
    script = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": table.namespace, "labels": labels},
        "data": {"run.sh": pod_script(job, table, name, attempt)},
    }
    queue = {QUEUE_LABEL: table.queue} if table.queue else {}
    metadata = {"name": name, "namespace": table.namespace, "labels": labels | queue}
    spec = _job_spec(job, table, name, labels)
    if table.kind == "JobSet":
        replicated = {"name": REPLICATED_JOB, "replicas": 1, "template": {"metadata": {"labels": labels}, "spec": spec}}
        job_set = {
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": table.max_restarts},
            "suspend": bool(table.queue),
            "replicatedJobs": [replicated],
        }
        return [{"apiVersion": JOB_SET_API, "kind": "JobSet", "metadata": metadata, "spec": job_set}, script]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": table.namespace, "labels": labels},
        # Ranks look each other up before all pods are ready.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {INSTANCE: name}},
    }
    spec["suspend"] = bool(table.queue)
    return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}, service, script]


def job_name(job: JobSpec, attempt: int) -> str:
    """Returns the name of an attempt in the cluster: a DNS label, the same for the same run directory."""
    words = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")[:24].strip("-")
    return f"{words or 'run'}-{mark(job.run_dir)}-{attempt}"


def mark(run_dir: str) -> str:
    """Returns the part of a job's name that tells its run directory."""
    return hashlib.sha256(run_dir.encode()).hexdigest()[:8]


def kubernetes_table(site: Site) -> Kubernetes:
    """Returns the `[kubernetes]` table of a site.

    Raises:
        ConfigError: it has none.
    """
    if site.kubernetes is None:
        raise ConfigError(f"site.kubernetes: {site.name!r} has no [kubernetes] table. eks-trn1.toml shows one.")
    return site.kubernetes


def _job_spec(job: JobSpec, table: Kubernetes, name: str, labels: dict[str, str]) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": job.num_nodes,
        "parallelism": job.num_nodes,
        "backoffLimit": 0,  # a new pod alone could never join the others
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
        cache = {"path": table.compilation.node_cache, "type": "DirectoryOrCreate"}
        volumes.append({"name": "cache", "hostPath": cache})
        mounts.append({"name": "cache", "mountPath": table.compilation.node_cache})
    restart = {"fieldRef": {"fieldPath": f"metadata.labels['{RESTART_LABEL}']"}}
    secrets = [
        {"name": variable, "valueFrom": {"secretKeyRef": dict(zip(("name", "key"), place.split("/"), strict=True))}}
        for variable, place in table.secrets.items()
    ]
    container = {
        "name": "node",
        "image": table.image,
        "command": ["bash", "/kit/run.sh"],
        "env": [*([{"name": "KIT_RESTART", "valueFrom": restart}] if table.kind == "JobSet" else []), *secrets],
        "resources": {"requests": dict(table.resources), "limits": dict(table.resources)},
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": table.stop_before_end_s,
        **({"subdomain": name} if table.kind == "Job" else {}),
        **({"nodeSelector": dict(table.node_selector)} if table.node_selector else {}),
        **(
            {"tolerations": [{"key": key, "operator": "Exists"} for key in table.tolerations]}
            if table.tolerations
            else {}
        ),
        "containers": [container],
        "volumes": volumes,
    }


def pod_script(job: JobSpec, table: Kubernetes, name: str, attempt: int) -> str:
    """Returns what each pod runs."""
    host = f"{name}-0.{name}" if table.kind == "Job" else f"{name}-{REPLICATED_JOB}-0-0.{name}"
    variables = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [
        "python" if re.fullmatch(r"python[0-9.]*", PurePosixPath(job.argv[0]).name) else job.argv[0],
        *job.argv[1:],
    ]
    job_id = f"{table.kind.lower()}/{name}"
    lines = [
        f"export KIT_RUN_DIR={quote(job.run_dir)}",
        f"export KIT_ATTEMPT=$(({attempt} + ${{KIT_RESTART:-0}}))",
        f"export MASTER_ADDR={host} MASTER_PORT={table.master_port}",
        *(f"export {key}={quote(value)}" for key, value in {**variables, **table.environment}.items()),
        *table.setup,
        "# What each rank runs; LOG says of which phase.",
        "run_rank() {",
        '    exec >>"$KIT_RUN_DIR/logs/${LOG}rank_$(printf %05d "$RANK").log" 2>&1 || exit',
        *(f"    export {key}={quote(value)}" for key, value in job.environment.items()),
        f"    cd {quote(job.working_directory)} || exit",
        f"    exec {' '.join(map(quote, command))}",
        "}",
        "export -f run_rank",
        "# What each pod runs: an agent that starts the ranks of its node.",
        "run_node() {",
        f'    "$@" python -m torch.distributed.run --nnodes={job.num_nodes} --node-rank="$JOB_COMPLETION_INDEX" \\',
        f"        --nproc-per-node={job.num_processes // job.num_nodes} \\",
        '        --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --no-python bash -c run_rank',
        "}",
        *_compilation_lines(table),
        "# Told to end: all ranks save and stop at the same step.",
        'stopped="$KIT_RUN_DIR/control/stopped_$KIT_ATTEMPT"',
        'trap \'touch "$stopped" "$KIT_RUN_DIR/control/request_stop"\' TERM',
        '[ "$JOB_COMPLETION_INDEX" != 0 ] || python -m cluster.kubernetes begin '
        f'"$KIT_RUN_DIR" "$KIT_ATTEMPT" {table.namespace} {quote(job_id)} || exit',
        'LOG=$(printf "attempt_%02d/" "$KIT_ATTEMPT") && mkdir -p "$KIT_RUN_DIR/logs/$LOG" || exit',
        "LOG=$LOG run_node &",
        "agent=$!",
        'while wait "$agent"; code=$?; kill -0 "$agent" 2>/dev/null; do :; done',
        f'[ ! -e "$stopped" ] || exit {STOPPED_CODE}',
        '[ "$JOB_COMPLETION_INDEX" != 0 ] || [ "$code" != 0 ] '
        '|| python -m cluster.kubernetes end "$KIT_RUN_DIR" "$KIT_ATTEMPT"',
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _compilation_lines(table: Kubernetes) -> list[str]:
    compilation = table.compilation
    if compilation is None:
        return []
    return [
        "# Compile ahead, once for this run; then work from a copy on the node's own disk.",
        f"export {compilation.variable}={quote(compilation.shared_cache)}",
        'if [ ! -e "$KIT_RUN_DIR/compiled" ]; then',
        f"    LOG=compile_ run_node {' '.join(map(quote, compilation.command))} || exit",
        '    [ "$JOB_COMPLETION_INDEX" != 0 ] || touch "$KIT_RUN_DIR/compiled"',
        "fi",
        f"cp -ru {quote(compilation.shared_cache)}/. {quote(compilation.node_cache)} || exit",
        f"export {compilation.variable}={quote(compilation.node_cache)}",
    ]


def to_yaml(value: Any, indent: int = 0) -> str:
    """Returns a dict of dicts, lists, text, numbers and booleans as YAML; text stays text, whatever it looks like."""
    pad = "  " * indent
    if isinstance(value, dict) and value:
        return "".join(f"{pad}{_scalar(str(key))}:{_below(item, indent + 1)}" for key, item in value.items())
    if isinstance(value, list) and value:
        return "".join(f"{pad}- {_below(item, indent + 1).lstrip()}" for item in value)
    return f"{pad}{_scalar(value)}\n"


def _below(value: Any, indent: int) -> str:
    if isinstance(value, dict | list) and value:
        return "\n" + to_yaml(value, indent)
    if isinstance(value, str) and value.endswith("\n") and all(
        line.isprintable() and line == line.rstrip() for line in value[:-1].split("\n")
    ) and value[0] not in " \n" and not value.endswith("\n\n"):  # fmt: skip
        return " |\n" + "".join(f"{'  ' * indent}{line}\n" if line else "\n" for line in value[:-1].split("\n"))
    return f" {_scalar(value)}\n"


def _scalar(value: Any) -> str:
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]*", value)
    if plain and value.lower() not in ("y", "n", "yes", "no", "on", "off", "true", "false", "null"):
        return value
    text = json.dumps(value, ensure_ascii=False)
    # YAML has no surrogate pairs, and may not hold control characters even in quotes.
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)
