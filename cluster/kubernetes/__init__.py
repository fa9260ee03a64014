"""Sends jobs to Kubernetes through the official client and asks about them.

What is sent comes from `cluster.kubernetes.manifest` and goes through `cluster.kubernetes.client`. Where that is
missing, the text can still be shown, and applied by hand. Standard library otherwise.
"""

import time
from pathlib import Path

from cluster.attempts import Files, claimed, hand_over
from cluster.job import Job, JobSpec
from cluster.kubernetes.client import Cluster
from cluster.kubernetes.manifest import INSTANCE, STOPPED_CODE, kubernetes_table, manifest_text, manifests, mark
from cluster.poll import POLLER, Look
from cluster.record import counted
from cluster.render import check, check_submittable
from cluster.site import Site
from cluster.state import JobError, JobState, SchedulerJob, last_attempt

GONE_WAIT_S = 900.0
HOPELESS = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
)


def submit(job: JobSpec, site: Site, files: Files | None = None) -> Job:
    """Sends a job to the cluster of the current context and returns its handle.

    The run directory gets `job.json`, `site.json` and `submit.yaml`, which is what was sent. `files` and errors are
    those of `cluster.submission.submit`; without the official client it is a JobError too.
    """
    namespace, cluster = _check(job, site)
    run_dir = Path(job.run_dir)
    text = manifest_text(job, site, attempt=last_attempt(run_dir) + 1)
    kept = {**(files or {}), "job.json": job.to_json(), "site.json": site.to_json(), "submit.yaml": text}
    with claimed(run_dir, kept) as attempt:
        name = cluster.create(manifests(job, site, attempt), namespace)
    hand_over(run_dir, attempt, SchedulerJob(scheduler="kubernetes", id=name, config=f"{cluster.context}/{namespace}"))
    return Job.attach(run_dir)


def texts(job: JobSpec, site: Site) -> dict[str, str]:
    """Returns the manifests of a job by the name of their file in the run directory."""
    return {"submit.yaml": manifest_text(job, site)}


def _check(job: JobSpec, site: Site) -> tuple[str, Cluster]:
    check(job, site)
    check_submittable(site)
    manifests(job, site)
    return kubernetes_table(site).namespace, Cluster()


def look(jobs: list[SchedulerJob]) -> dict[str, Look]:
    """Returns what the cluster says about jobs of one context and namespace, by job id; three questions for all.

    Raises:
        JobError: the cluster does not answer.
    """
    context, namespace = _place(jobs[0])
    cluster = Cluster(context)
    pods: dict[str, list[dict]] = {}
    for pod in cluster.list_pods(namespace):
        pods.setdefault(pod["metadata"]["labels"].get(INSTANCE, ""), []).append(pod)
    found: dict[str, dict] = {}
    for kind in {job.id.split("/")[0] for job in jobs}:
        found |= {f"{kind}/{item['metadata']['name']}": item for item in cluster.list_jobs(kind, namespace)}
    return {job.id: judge(found.get(job.id), pods.get(job.id.split("/")[1], [])) for job in jobs}


def cancel(job: SchedulerJob, run_dir: Path) -> None:
    """Deletes a job of a run with its pods, which are told to end first.

    Raises:
        JobError: the cluster refuses or does not answer, or the job is not this run's.
    """
    if f"-{mark(str(run_dir))}-" not in job.id:
        raise JobError(f"{run_dir}: {job.id} is not of this run, by its name. It goes on.")
    context, namespace = _place(job)
    Cluster(context).delete(job.id, namespace)


def requeue(job: Job, scheduler_job: SchedulerJob) -> None:
    """Starts the next attempt; the pods of a running one are ended first, and saw the request to stop.

    Raises:
        ConfigError: the job cannot run on its site; nothing was ended.
        JobError: the cluster refuses or does not answer, or the pods do not end.
    """
    site = Site.read(job.run_dir / "site.json")
    _check(job.spec, site)
    cancel(scheduler_job, job.run_dir)
    deadline = time.monotonic() + GONE_WAIT_S
    context, namespace = _place(scheduler_job)
    cluster, name = Cluster(context), scheduler_job.id.split("/")[1]
    while any(pod["metadata"]["labels"].get(INSTANCE) == name for pod in cluster.list_pods(namespace)):
        if time.monotonic() > deadline:
            raise JobError(f"pods of {name} are still there after {GONE_WAIT_S:.0f} s. Look with kubectl get pods.")
        time.sleep(1.0)
    POLLER.forget(scheduler_job)
    submit(job.spec, site)


def judge(item: dict | None, pods: list[dict]) -> Look:
    """Returns what a Job or JobSet and its pods, as the API gives them, mean in our words."""
    if item is None:
        return Look(state=JobState.LOST, reason="Kubernetes no longer has this job, and it left no exit.json")
    status, spec = item.get("status") or {}, item["spec"]
    conditions = {c["type"]: c for c in status.get("conditions") or [] if c.get("status") == "True"}
    if "Complete" in conditions or "Completed" in conditions:
        return Look(state=JobState.DONE, reason="Kubernetes: complete", exit_code=0)
    if "Failed" in conditions:
        return _failure(conditions["Failed"], pods)
    if item["metadata"].get("deletionTimestamp"):
        return Look(state=JobState.STOPPING, reason="Kubernetes: being deleted")
    restarts = f" (restart {status['restarts']})" if status.get("restarts") else ""
    if spec.get("suspend"):
        return Look(state=JobState.QUEUED, reason="waits to be admitted by its queue")
    waiting = [found for pod in pods if (found := _waits(pod))]
    if waiting:
        state, reason = max(waiting, key=lambda found: found[0] is JobState.QUEUED)
        return Look(state=state, reason=f"{reason} ({len(waiting)} of {len(pods)} pods){restarts}")
    if not pods:
        return Look(state=JobState.QUEUED, reason=f"no pods yet{restarts}")
    return Look(state=JobState.RUNNING, reason=f"{counted(len(pods), 'pod')} running{restarts}")


def _waits(pod: dict) -> tuple[JobState, str] | None:
    """Returns why a pod does not run yet, or None if it runs or has run."""
    status = pod.get("status") or {}
    if status.get("phase") != "Pending":
        return None
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return JobState.QUEUED, f"waits: {condition.get('message') or condition.get('reason') or 'not scheduled'}"
    for container in status.get("containerStatuses") or []:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in HOPELESS:
            text = f"{waiting['reason']}: {waiting.get('message') or 'see kubectl describe pod'}"
            return JobState.CONFIGURING, f"will not start: {text}. Cancel it, correct site.kubernetes, submit again"
    if any(c["type"] == "PodScheduled" for c in status.get("conditions") or []):
        return JobState.CONFIGURING, "pods are being set up"
    return JobState.QUEUED, "waits to be scheduled"


def _failure(condition: dict, pods: list[dict]) -> Look:
    """Returns the end of a failed job, told by the pod that failed first rather than by those that it took along."""
    ended = []
    for pod in pods:
        for container in (pod.get("status") or {}).get("containerStatuses") or []:
            terminated = (container.get("state") or {}).get("terminated") or {}
            if terminated.get("exitCode"):
                ended.append((terminated.get("finishedAt") or "", pod["metadata"]["name"], terminated))
    reason = f"Kubernetes: {condition.get('reason') or 'Failed'}: {condition.get('message') or ''}".rstrip(": ")
    if not ended:
        return Look(state=JobState.FAILED, reason=reason, exit_code=1)
    _, name, first = min(ended, key=lambda end: end[:2])
    code = first["exitCode"]
    if code == STOPPED_CODE:
        reason = f"a pod was told to end, so all saved and stopped; `kit resume` goes on from there ({reason})"
    else:
        why = f" ({first['reason']})" if first.get("reason") not in (None, "Error") else ""
        reason = f"pod {name} ended first, with code {code}{why}; {reason}"
    return Look(state=JobState.FAILED, reason=reason, exit_code=code)


def _place(job: SchedulerJob) -> tuple[str | None, str]:
    context, _, namespace = (job.config or "/default").rpartition("/")
    return context or None, namespace
