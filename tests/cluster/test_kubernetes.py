"""Kubernetes jobs: submission and status with the real kubectl, against a simulated API server.

No Kubernetes cluster can run here. The simulated server has the API's real paths and documented
fields. The tests add the conditions and counts that a real cluster would add.
"""

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse

import pytest

from cluster import kubernetes
from cluster.poll import POLLER
from cluster.record import ConfigError
from cluster.state import JobError, JobState
from cluster.submission import submit
from tests.cluster.eks import eks, training_job
from tests.cluster.jobs import scheduler_job
from tests.cluster.shell import programs

KINDS = {
    "v1": ("Service", "ConfigMap", "Pod", "Event"),
    "batch/v1": ("Job",),
    "jobset.x-k8s.io/v1alpha2": ("JobSet",),
}
OPENAPI = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"


def discovery():
    """Returns the answers to kubectl's first requests, by path. The answers list the kinds of
    objects in the API.
    """
    can = {"namespaced": True, "verbs": ["create", "delete", "get", "list", "watch"]}
    answers, groups = {}, []
    for version, kinds in KINDS.items():
        ones = [(kind, kind.lower()) for kind in kinds]
        named = [{"name": f"{one}s", "singularName": one, "kind": kind} for kind, one in ones]
        place = f"/apis/{version}" if "/" in version else "/api/v1"
        answers[place] = {"groupVersion": version, "resources": [each | can for each in named]}
        group, _, short = version.partition("/")
        groups += [{"name": group, "versions": [{"groupVersion": version, "version": short}]}]
    groups = {"kind": "APIGroupList", "groups": groups[1:]}
    return {"/api": {"versions": ["v1"]}, "/apis": groups, **answers}


class Api(ThreadingHTTPServer):
    """A simulated API server with the REST paths that the tests use. `objects` maps a path to the
    created object.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), ApiHandler)
        self.objects, self.requests, self.refusal, self.answers = {}, [], None, discovery()

    def of_kind(self, plural):
        return [item for path, item in self.objects.items() if path.split("/")[-2] == plural]


class ApiHandler(BaseHTTPRequestHandler):
    server: Api

    def do_POST(self):
        path, query = self._path()
        item = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        place = f"{path}/{item['metadata']['name']}"
        if self.server.refusal and path.endswith(self.server.refusal[0]):
            return self._refuse(*self.server.refusal[1:])
        if place in self.server.objects:
            return self._refuse(409, f"{place} already exists")
        assert query["fieldValidation"] == ["Strict"]
        # The server adds a field of a newer API version, which a client must ignore.
        self.server.objects[place] = item | {"status": {"fieldOfTheFuture": 1}}
        self._answer(201, self.server.objects[place])

    def do_GET(self):
        path, query = self._path()
        if path in self.server.answers:
            return self._answer(200, self.server.answers[path])
        # The schema is empty, because the server validates objects itself.
        if path == "/openapi/v2":
            return self._answer(200, b"", OPENAPI)
        if path in self.server.objects:
            return self._answer(200, self.server.objects[path])
        if path.endswith("/events"):
            assert query["fieldSelector"] == ["type=Warning"]
            events = self.server.of_kind("events")
            listed = {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": events}
            return self._answer(200, listed)
        selector = query.get("labelSelector")
        if not selector:
            return self._refuse(404, "not found")
        wanted = dict(part.split("=") for part in selector[0].split(",")).items()
        here = (item for at, item in self.server.objects.items() if at.rpartition("/")[0] == path)
        items = [item for item in here if wanted <= item["metadata"]["labels"].items()]
        self._answer(200, {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items})

    def do_DELETE(self):
        path, _ = self._path()
        how = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["propagationPolicy"]
        self.server.requests.append((how, path))
        if self.server.objects.pop(path, None) is None:
            return self._refuse(404, "not found")
        self._answer(200, {"kind": "Status", "status": "Success"})

    def _path(self):
        url = urlparse(self.path)
        self.server.requests.append((self.command, url.path))
        return url.path, parse_qs(url.query)

    def _refuse(self, code, message):
        reason = {403: "Forbidden", 404: "NotFound", 409: "AlreadyExists"}[code]
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason}
        self._answer(code, {**status, "message": message, "code": code})

    def _answer(self, code, body, form="application/json"):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", form)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def api(tmp_path, monkeypatch):
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: kubernetes.io/docs/tasks/tools")
    server = Api()
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    address = {"server": f"http://127.0.0.1:{server.server_address[1]}"}
    config = {
        "current-context": "fake",
        "clusters": [{"name": "fake", "cluster": address}],
        "users": [{"name": "me", "user": {"token": "x"}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "me"}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("KUBECACHEDIR", str(tmp_path / "cache"))
    monkeypatch.setattr(POLLER, "interval_s", 0.0)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def submitted(api, tmp_path):
    """Returns a function that submits a job to EKS. Keywords change fields of the site. The
    function returns (job, job object on the server).
    """

    def send(**changes):
        job = submit(training_job(tmp_path), eks(tmp_path, **changes))
        (made,) = api.of_kind("jobs") or api.of_kind("jobsets")
        return job, made

    return send


JOBS = "/apis/batch/v1/namespaces/default/jobs"


def look(job):
    ours = scheduler_job(job)
    return kubernetes.query([ours])[ours.id]


def test_job_is_submitted_queried_and_cancelled(api, submitted, tmp_path):
    job, made = submitted()
    sent = json.loads((job.run_dir / "submit.json").read_text())["items"]
    name = sent[0]["metadata"]["name"]
    assert scheduler_job(job).id == f"job/{name}" and scheduler_job(job).config == "fake/default"
    (service,), (script,) = map(api.of_kind, ("services", "configmaps"))
    assert (made["spec"], service["spec"]) == (sent[0]["spec"], sent[1]["spec"])
    assert script["data"] == sent[2]["data"] == {"run.sh": (job.run_dir / "run.sh").read_text()}
    assert job.status().state is JobState.QUEUED
    job.cancel()
    assert not api.objects and ("Background", f"{JOBS}/{name}") in api.requests
    assert job.status().state.is_final
    # The object is deleted already, so this call does nothing.
    kubernetes.cancel(scheduler_job(job), job.run_dir)
    with pytest.raises(JobError, match="does not belong to this run"):
        kubernetes.cancel(scheduler_job(job), tmp_path / "another")


def condition(kind, status="True", **more):
    return {"type": kind, "status": status, **more}


def test_kubernetes_conditions_map_to_job_states(api, submitted):
    job, made = submitted(queue="trn1")

    def having(*conditions, **counts):
        made["status"] = {"conditions": [*conditions], **counts}
        return look(job)

    suspended = having(condition("Suspended"))
    assert suspended.state is JobState.QUEUED and "admitted by its queue" in suspended.reason
    made["spec"]["suspend"] = False
    for counts in ({}, {"active": 64}, {"active": 64, "ready": 63}):
        waiting = having(condition("Suspended", "False"), **counts)
        assert waiting.state is JobState.QUEUED
        instance = f"app.kubernetes.io/instance={scheduler_job(job).id[4:]}"
        assert f"kubectl describe pods --selector={instance}`" in waiting.reason
    ready = having(active=64, ready=64, failed=1)
    assert (ready.state, ready.reason) == (JobState.RUNNING, "all pods are ready (restart 1)")
    some_have_ended = having(active=3, ready=3, succeeded=61)
    assert some_have_ended.state is JobState.RUNNING
    message = "Container node failed with exit code 78 matching FailJob rule at index 0"
    failed = having(condition("Failed", reason="PodFailurePolicy", message=message))
    assert (failed.state, failed.exit_code) == (JobState.FAILED, 1)
    assert failed.reason == f"Kubernetes: PodFailurePolicy: {message}. `kit resume` starts it again"
    assert having(condition("Complete")).state is JobState.DONE
    made["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:01Z"
    assert having(active=64, ready=64).state is JobState.STOPPING
    api.objects.clear()
    assert look(job).state is JobState.LOST


CORE = "/api/v1/namespaces/default"
TERMINATED = {
    "exitCode": 1,
    "reason": "Error",
    "message": "ls: no such file\nkit: setup: x failed\n",
}
PULL = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "kit:9"'}
NO_NODE = {"reason": "Unschedulable", "message": "0/4 nodes are available: 4 Insufficient gpu."}
QUOTA = {"reason": "FailedCreate", "message": "Error creating: exceeded quota: gpus"}


@pytest.mark.parametrize(
    ("pod", "event", "words"),
    [
        ({"containerStatuses": [{"state": {"waiting": PULL}}]}, None, "ImagePullBackOff: Back-off"),
        (
            {"containerStatuses": [{"state": {"terminated": TERMINATED}}]},
            None,
            "Error, code 1: setup: x failed: ls: no such file",
        ),
        ({"conditions": [condition("PodScheduled", "False", **NO_NODE)]}, None, "4 Insufficient"),
        (None, QUOTA, "FailedCreate: Error creating: exceeded quota"),
        ({}, {"reason": "FailedMount", "message": "claim not found"}, "FailedMount: claim not"),
    ],
    ids=["image", "setup", "nodes", "quota", "mount"],
)
def test_status_reports_why_pods_do_not_run(api, submitted, pod, event, words):
    job, made = submitted()
    name = made["metadata"]["name"]
    about = {"kind": "Job" if pod is None else "Pod", "name": name if pod is None else f"{name}-0"}
    if pod is not None:
        metadata = {"name": about["name"], "labels": made["metadata"]["labels"]}
        shown = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": pod}
        api.objects[f"{CORE}/pods/{about['name']}"] = shown
    if event is not None:
        shown = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "e"}, **event}
        api.objects[f"{CORE}/events/e"] = {**shown, "involvedObject": about}
    for status in ({"active": 1}, {"conditions": [condition("Failed", reason="BackoffLimit")]}):
        made["status"] = status
        assert f"{about['kind'].lower()} {about['name']}: " in look(job).reason
        assert words in look(job).reason


def test_requeue_of_failed_job_makes_the_next_attempt(api, submitted, tmp_path):
    job, made = submitted()
    made["status"]["conditions"] = [condition("Failed", reason="BackoffLimitExceeded")]
    assert job.status().state is JobState.FAILED and "kit resume" in job.status().reason
    eks("/elsewhere").write(job.run_dir / "site.json")
    with pytest.raises(ConfigError, match="is not below '/elsewhere'"):
        job.requeue()
    assert api.of_kind("jobs") == [made], "a requeue that cannot be has ended nothing"
    eks(tmp_path).write(job.run_dir / "site.json")
    job.requeue()
    core, name = "/api/v1/namespaces/default", made["metadata"]["name"]
    gone = [f"{place}/{name}" for place in (JOBS, f"{core}/configmaps", f"{core}/services")]
    # With the policy "Foreground", an object is deleted after its pods.
    assert [path for how, path in api.requests if how == "Foreground"] == gone
    (made,) = api.of_kind("jobs")
    assert made["metadata"]["name"].endswith("-2")
    assert job.status().attempt == 2 and job.status().state is JobState.QUEUED
    assert f"job/{made['metadata']['name']}" in (job.run_dir / "run.sh").read_text()


def test_job_set_uses_the_jobset_api(api, submitted):
    job, made = submitted(kind="JobSet")
    assert ("POST", "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets") in api.requests
    assert not api.of_kind("services"), "the operator makes the Service of a JobSet"
    pods = {"name": "node", "active": 1, "ready": 0}
    made["status"] |= {"restarts": 2, "replicatedJobsStatus": [pods]}
    assert look(job).state is JobState.QUEUED
    pods["ready"] = 1
    assert look(job).reason == "all pods are ready (restart 2)"
    job.cancel()
    assert not api.objects


def test_api_refusal_is_reported_and_leaves_nothing(api, submitted, tmp_path):
    api.refusal = ("services", 403, "services is forbidden: User me cannot create")
    with pytest.raises(JobError, match=r"kubectl create: .*services is forbidden"):
        submitted()
    assert not api.objects, "half a job was left behind"
    assert not (tmp_path / "runs").exists(), "nor anything of the run"
    api.refusal = None
    submitted()


def test_kubectl_failures_are_reported(api, submitted, tmp_path, monkeypatch):
    """Tested: an unreachable server, no answer in time, and a missing kubectl."""
    job, _ = submitted()
    api.shutdown()
    api.server_close()
    with pytest.raises(JobError, match="kubectl get: .*refused"):
        look(job)
    bin_ = programs(tmp_path / "bin", {"kubectl": "exec sleep 20"})
    monkeypatch.setenv("PATH", f"{bin_}:/bin:/usr/bin")
    monkeypatch.setattr(kubernetes, "TIMEOUT_S", 0.1)
    with pytest.raises(JobError, match=r"kubectl delete timed out: no answer within 0\.1 s"):
        kubernetes.cancel(scheduler_job(job), job.run_dir)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(JobError, match="kubectl is not installed here"):
        look(job)
