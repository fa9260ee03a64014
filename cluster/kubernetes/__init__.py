"""Submits jobs to Kubernetes with kubectl and queries them.

`cluster.kubernetes.manifest` writes the manifests. The manifests also contain the rules by which
Kubernetes restarts pods. Standard library only.
"""

import contextlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path

from cluster.job import Job, JobSpec
from cluster.kubernetes.manifest import (
    INSTANCE,
    MANAGED_BY,
    job_name,
    kubectl_name,
    kubernetes_table,
    run_directory_hash,
)
from cluster.kubernetes.manifest import texts as texts
from cluster.logs import end_reason
from cluster.poll import POLLER, SchedulerAnswer, run_command
from cluster.record import shortened
from cluster.site import Site
from cluster.state import JobError, JobState, SchedulerJob
from cluster.submission import prepare_job, submit_prepared

TIMEOUT_S = 20.0
GONE_WAIT_S = 900.0
OUTPUT_LINES, OUTPUT_BYTES = 100_000, 64 << 20
"""Maximum output of a container that is fetched, counted from its end, in lines and in bytes."""


def check(job: JobSpec, site: Site) -> None:
    """Accepts every job. Only the cluster can tell which jobs it refuses, so `start` reports a
    refusal.
    """


def start(job: JobSpec, site: Site, attempt: int, texts: Mapping[str, str]) -> SchedulerJob:
    """Creates the objects of `submit.json` in the cluster of the current kubectl context. Returns
    the job, whose id is its name in the cluster.

    Raises:
        JobError: The cluster refuses or does not answer. Objects that were created are deleted.
    """
    table = kubernetes_table(site)
    context = ""
    # Inside a pod, kubectl has no context. It uses a service account.
    with contextlib.suppress(JobError):
        context = _kubectl("config", "current-context").strip()
    name = kubectl_name(table.kind, job_name(job, attempt))
    made = SchedulerJob(scheduler="kubernetes", id=name, config=f"{context}/{table.namespace}")
    try:
        _kubectl("create", "--filename=-", place=made.config, text=texts["submit.json"])
    except JobError:
        with contextlib.suppress(JobError):  # Some of the objects may have been created.
            cancel(made, Path(job.run_dir))
        raise
    return made


def query(jobs: list[SchedulerJob]) -> dict[str, SchedulerAnswer]:
    """Returns the state of each of `jobs` as the cluster reports it, by job id. All jobs must be of
    one kubectl context and namespace.

    Raises:
        JobError: The cluster does not answer.
    """
    kinds = ",".join(sorted({job.id.split("/")[0] for job in jobs}))
    mine = ",".join(f"{key}={value}" for key, value in MANAGED_BY.items())
    answer = _kubectl("get", kinds, f"--selector={mine}", "--output=json", place=jobs[0].config)
    try:
        items = json.loads(answer)["items"]
    except (ValueError, KeyError) as error:
        raise JobError(
            f"kubectl get printed {shortened(answer.strip(), 200)!r}, which is no JSON"
        ) from error
    found = {kubectl_name(item["kind"], item["metadata"]["name"]): item for item in items}
    answers = {job.id: answer_from(found.get(job.id)) for job in jobs}
    unclear = [
        job_id
        for job_id, answer in answers.items()
        if job_id in found and answer.state in (JobState.QUEUED, JobState.FAILED)
    ]
    if unclear:
        pods = _items("pods", f"--selector={mine}", place=jobs[0].config)
        events = _items("events", "--field-selector=type=Warning", place=jobs[0].config)
        for job_id in unclear:
            if why := why_not_running(job_id.split("/")[1], pods, events):
                reason = f"{answers[job_id].reason}. {why}"
                answers[job_id] = answers[job_id].replace(reason=reason)
    return answers


def output(job: SchedulerJob) -> tuple[str, str]:
    """Returns (command, output): the kubectl command that prints the output of a job's pods, and
    this output.

    The output contains the last OUTPUT_LINES lines of each container. It is empty if the command
    fails.
    """
    words = ("logs", f"--selector={INSTANCE}={job.id.split('/')[1]}", "--prefix")
    words += (f"--tail={OUTPUT_LINES}", f"--limit-bytes={OUTPUT_BYTES}")
    text = ""
    with contextlib.suppress(JobError):
        text = _kubectl(*words, place=job.config)
    return shlex.join(["kubectl", *words]), text


def why_not_running(name: str, pods: list[dict], events: list[dict]) -> str:
    """Returns one line that explains why the pods of a job do not run, or an empty text if neither
    pods nor events explain it.

    `pods` and `events` are objects of the Kubernetes API: all pods of the kit and all warning
    events in a namespace.
    """
    for pod in pods:
        if pod["metadata"].get("labels", {}).get(INSTANCE) == name and (why := _trouble_of(pod)):
            return why
    # A job without pods, or a pod without containers, is explained only by events.
    for event in sorted(events, key=lambda each: each.get("lastTimestamp") or "", reverse=True):
        about = event.get("involvedObject") or {}
        subject = about.get("name", "")
        if subject == name or subject.startswith(f"{name}-"):
            where = f"{about.get('kind', 'object').lower()} {subject}"
            return _sentence(where, event.get("reason"), event.get("message"))
    return ""


def _trouble_of(pod: dict) -> str:
    """Returns one line that explains why a pod does not run, or an empty text if the status of the
    pod does not explain it.
    """
    status = pod.get("status") or {}
    where = f"pod {pod['metadata']['name']}"
    for container in status.get("containerStatuses") or []:
        state = container.get("state") or {}
        waiting = state.get("waiting") or {}
        ended = state.get("terminated") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return _sentence(where, waiting["reason"], waiting.get("message"))
        if ended.get("exitCode"):
            # The message is the end of the container's log, since the manifest sets
            # terminationMessagePolicy.
            said = end_reason(ended.get("message") or "")
            return _sentence(where, f"{ended.get('reason')}, code {ended['exitCode']}", said)
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _sentence(where, condition.get("reason"), condition.get("message"))
    # The status of an evicted pod has a reason and no containers.
    if status.get("reason"):
        return _sentence(where, status["reason"], status.get("message"))
    return ""


def _sentence(*parts: str | None) -> str:
    return shortened(": ".join(" ".join(part.split()) for part in parts if part), 600)


def _items(*words: str, place: str | None) -> list[dict]:
    """Returns the objects that `kubectl get` finds. Returns an empty list if kubectl fails, for
    example because the user lacks the permission.
    """
    try:
        return json.loads(_kubectl("get", *words, "--output=json", place=place))["items"]
    except (JobError, ValueError, KeyError):  # The caller knows the job's state even without them.
        return []


def cancel(job: SchedulerJob, run_dir: Path, *, waits: bool = False) -> None:
    """Deletes a job of a run with its pods. Kubernetes first sends the pods a signal to end. Does
    nothing if the job is already deleted.

    Raises:
        JobError: The cluster refuses or does not answer, or the job belongs to another run. With
            `waits`, the pods may also not have ended after GONE_WAIT_S seconds.
    """
    if f"-{run_directory_hash(str(run_dir))}-" not in job.id:
        raise JobError(
            f"{run_dir}: {job.id} does not belong to this run, by its name. It was left running."
        )
    kind, name = job.id.split("/")
    # The service of a JobSet is made and deleted by the operator, not by the kit.
    parts = "configmap" if kind == "jobset" else "configmap,service"
    words = ("delete", f"{kind},{parts}", name, "--ignore-not-found")
    if waits:
        how = ("--cascade=foreground", "--wait=true")
        limit_s = GONE_WAIT_S
    else:
        how = ("--wait=false",)
        limit_s = TIMEOUT_S
    _kubectl(*words, *how, place=job.config, limit_s=limit_s)


def requeue(job: Job, scheduler_job: SchedulerJob) -> None:
    """Starts the next attempt of a job. If an attempt is running, its pods are ended first, after
    their ranks could save and stop.

    Raises:
        ConfigError: The job cannot run on its site. No pod was ended.
        JobError: The cluster refuses or does not answer, or the pods do not end.
    """
    prepared = prepare_job(job.spec, Site.read(job.run_dir / "site.json"))
    cancel(scheduler_job, job.run_dir, waits=True)
    POLLER.forget(scheduler_job)
    submit_prepared(prepared)


def answer_from(item: dict | None) -> SchedulerAnswer:
    """Returns the state of a Job or JobSet. `item` is the object of the Kubernetes API, or None if
    the cluster no longer has the object.
    """
    if item is None:
        return SchedulerAnswer(
            state=JobState.LOST,
            reason="Kubernetes no longer has this job, and it left no exit.json",
        )
    status = item.get("status") or {}
    name = item["metadata"]["name"]
    told = {
        each["type"]: each for each in status.get("conditions") or [] if each["status"] == "True"
    }
    if "Complete" in told or "Completed" in told:
        return SchedulerAnswer(state=JobState.DONE, reason="Kubernetes: complete", exit_code=0)
    if failed := told.get("Failed"):
        why = ": ".join(filter(None, ("Kubernetes", failed.get("reason"), failed.get("message"))))
        reason = f"{why.rstrip('.')}. `kit resume` starts it again"
        return SchedulerAnswer(state=JobState.FAILED, reason=reason, exit_code=1)
    if item["metadata"].get("deletionTimestamp"):
        return SchedulerAnswer(state=JobState.STOPPING, reason="Kubernetes: being deleted")
    if item["spec"].get("suspend"):
        return SchedulerAnswer(state=JobState.QUEUED, reason="waits to be admitted by its queue")
    # The status of a Job counts pods. The status of a JobSet counts Jobs, of which the kit makes
    # one.
    parts = status.get("replicatedJobsStatus") or [status]
    active = sum(part.get("active") or 0 for part in parts)
    ready = sum(part.get("ready") or 0 for part in parts)
    restarts = status.get("restarts") or status.get("failed")
    again = f" (restart {restarts})" if restarts else ""
    if active and ready >= active:
        return SchedulerAnswer(state=JobState.RUNNING, reason=f"all pods are ready{again}")
    which = f"`kubectl describe pods --selector={INSTANCE}={name}` says for what"
    return SchedulerAnswer(
        state=JobState.QUEUED, reason=f"waits until all pods are ready{again}; {which}"
    )


def _kubectl(
    *words: str, place: str | None = None, text: str = "", limit_s: float | None = None
) -> str:
    """Returns the output of a kubectl command. `place` is `context/namespace`, and `text` is the
    standard input. Raises JobError if kubectl is not installed, fails or takes longer than
    `limit_s` seconds.
    """
    context, _, namespace = (place or "").rpartition("/")
    options = {"--context": context, "--namespace": namespace}
    where = [f"{name}={value}" for name, value in options.items() if value]
    advice = "Install it, or take what `kit launch ... --show` prints to where it is."
    return run_command(["kubectl", *words, *where], advice, limit_s or TIMEOUT_S, text=text)
