"""Kubernetes: submission and status through the official client, against a server with the paths of the real API.

No cluster can run here. The server keeps what it is sent and answers as the API does, with the fields that it
documents; pods and conditions, which a real cluster would add, are put there by the tests.
"""

import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse

import pytest
import yaml

import cluster
from cluster import kubernetes
from cluster.kubernetes import client as kubernetes_client
from cluster.poll import POLLER
from cluster.record import ConfigError
from cluster.render import render
from cluster.state import JobError, JobState, read_state
from tests.cluster.eks import eks, training_job


class Api(ThreadingHTTPServer):
    """The paths of the REST API that are used here, over a dict of objects by path."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), ApiHandler)
        self.objects, self.requests, self.refusal = {}, [], None

    def of_kind(self, plural):
        return [item for path, item in self.objects.items() if path.split("/")[-2] == plural]

    def put_pod(self, name, job, **status):
        labels = {"app.kubernetes.io/managed-by": "pretraining-notebook-kit", "app.kubernetes.io/instance": job}
        pod = {"metadata": {"name": name, "labels": labels}, "spec": {"nodeName": f"node-{name}"}, "status": status}
        self.objects[f"/api/v1/namespaces/default/pods/{name}"] = pod


class ApiHandler(BaseHTTPRequestHandler):
    server: Api

    def do_POST(self):
        path, query = self._path()
        item = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        place = f"{path}/{item['metadata']['name']}"
        if self.server.refusal and path.endswith(self.server.refusal[0]):
            return self._answer(self.server.refusal[1], {"kind": "Status", "message": self.server.refusal[2]})
        if place in self.server.objects:
            return self._answer(409, {"kind": "Status", "message": f"{place} already exists"})
        assert query.get("fieldValidation") == ["Strict"]
        item["metadata"]["uid"] = f"uid-{len(self.server.objects)}"
        # A field of a newer version, which a client must bear.
        self.server.objects[place] = item | {"status": {"fieldOfTheFuture": 1}}
        self._answer(201, self.server.objects[place])

    def do_GET(self):
        path, query = self._path()
        wanted = dict(part.split("=") for part in query.get("labelSelector", [""])[0].split(",") if part)
        items = [
            item for place, item in self.server.objects.items()
            if place.rpartition("/")[0] == path and wanted.items() <= item["metadata"].get("labels", {}).items()
        ]  # fmt: skip
        self._answer(200, {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items})

    def do_DELETE(self):
        path, query = self._path()
        item = self.server.objects.pop(path, None)
        if item is None:
            return self._answer(404, {"kind": "Status", "message": "not found"})
        assert query.get("propagationPolicy") == ["Background"]
        uid, name = item["metadata"]["uid"], item["metadata"]["name"]
        for place, other in list(self.server.objects.items()):
            metadata = other["metadata"]
            owned = uid in [owner["uid"] for owner in metadata.get("ownerReferences", [])]
            if owned or ("/pods/" in place and metadata["labels"]["app.kubernetes.io/instance"] == name):
                del self.server.objects[place]
        self._answer(200, {"kind": "Status", "status": "Success"})

    def _path(self):
        url = urlparse(self.path)
        self.server.requests.append((self.command, url.path))
        return url.path, parse_qs(url.query)

    def _answer(self, code, body):
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def api(tmp_path, monkeypatch):
    pytest.importorskip("kubernetes")
    server = Api()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "fake",
        "clusters": [{"name": "fake", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}],
        "users": [{"name": "me", "user": {"token": "x"}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "me"}}],
    }  # fmt: skip
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(POLLER, "interval_s", 0.0)
    yield server
    server.shutdown()
    server.server_close()


def scheduler_job(job):
    state = read_state(job.run_dir)
    assert state is not None and state.scheduler_job is not None
    return state.scheduler_job


def test_submit_look_and_cancel(api, tmp_path):
    job = cluster.kubernetes.submit(training_job(tmp_path), eks(tmp_path))
    sent = list(yaml.safe_load_all((job.run_dir / "submit.yaml").read_text()))
    name = sent[0]["metadata"]["name"]
    assert scheduler_job(job).id == f"job/{name}" and scheduler_job(job).config == "fake/default"
    (made,) = api.of_kind("jobs")
    assert made["spec"] == sent[0]["spec"]
    (service,), (script,) = api.of_kind("services"), api.of_kind("configmaps")
    assert service["metadata"]["ownerReferences"][0]["uid"] == made["metadata"]["uid"]
    assert script["data"] == sent[2]["data"]
    assert job.status().state is JobState.QUEUED
    with pytest.raises(JobError, match="in use"):
        cluster.kubernetes.submit(training_job(tmp_path), eks(tmp_path))
    job.cancel()
    assert not api.objects
    assert ("DELETE", f"/apis/batch/v1/namespaces/default/jobs/{name}") in api.requests
    assert job.status().state.is_final


def condition(kind, status="True", **more):
    return {"type": kind, "status": status, **more}


def terminated(code, at, reason="Error"):
    ended = {"exitCode": code, "finishedAt": at, "reason": reason}
    return {"phase": "Failed", "containerStatuses": [{"state": {"terminated": ended}}]}


def test_states_in_our_words(api, tmp_path):
    job = cluster.kubernetes.submit(training_job(tmp_path), eks(tmp_path))
    ours = scheduler_job(job)
    name = ours.id.split("/")[1]

    def look():
        return kubernetes.look([ours])[ours.id]

    unschedulable = condition("PodScheduled", "False", message="0/64 nodes have enough aws.amazon.com/neuron")
    api.put_pod("a", name, phase="Pending", conditions=[unschedulable])
    api.put_pod("b", name, phase="Running")
    assert look().state is JobState.QUEUED and "aws.amazon.com/neuron (1 of 2 pods)" in look().reason
    pulling = {"waiting": {"reason": "ContainerCreating"}}
    scheduled = [condition("PodScheduled")]
    api.put_pod("a", name, phase="Pending", conditions=scheduled, containerStatuses=[{"state": pulling}])
    assert look().state is JobState.CONFIGURING
    broken = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    api.put_pod("a", name, phase="Pending", conditions=scheduled, containerStatuses=[{"state": broken}])
    assert "will not start: ImagePullBackOff: no such image" in look().reason
    api.put_pod("a", name, phase="Running")
    assert look().state is JobState.RUNNING
    (made,) = api.of_kind("jobs")
    api.put_pod("a", name, **terminated(1, "2026-01-01T00:00:09Z"))
    api.put_pod("b", name, **terminated(137, "2026-01-01T00:00:01Z", "OOMKilled"))
    made["status"]["conditions"] = [condition("Failed", reason="BackoffLimitExceeded", message="limit reached")]
    failed = look()
    assert failed.state is JobState.FAILED and failed.exit_code == 137
    assert "pod b ended first, with code 137 (OOMKilled)" in failed.reason
    made["status"]["conditions"] = [condition("Complete")]
    assert look().state is JobState.DONE
    api.objects.clear()
    assert look().state is JobState.LOST


def test_stopped_job_is_requeued_as_the_next_attempt(api, tmp_path):
    job = cluster.kubernetes.submit(training_job(tmp_path), eks(tmp_path))
    name = scheduler_job(job).id.split("/")[1]
    api.put_pod("a", name, **terminated(143, "2026-01-01T00:00:01Z"))
    (made,) = api.of_kind("jobs")
    made["status"]["conditions"] = [condition("Failed", reason="BackoffLimitExceeded")]
    status = job.status()
    assert status.state is JobState.FAILED and "kit resume" in status.reason and status.exit_code == 143
    eks("/elsewhere").write(job.run_dir / "site.json")
    with pytest.raises(ConfigError, match="is not below '/elsewhere'"):
        job.requeue()
    assert api.of_kind("jobs") == [made], "a requeue that cannot be has ended nothing"
    eks(tmp_path).write(job.run_dir / "site.json")
    job.requeue()
    (made,) = api.of_kind("jobs")
    assert made["metadata"]["name"].endswith("-2")
    assert job.status().attempt == 2 and job.status().state is JobState.QUEUED
    assert "KIT_ATTEMPT=$((2 + " in (job.run_dir / "submit.yaml").read_text()


def test_job_set_goes_through_its_own_path(api, tmp_path):
    job = cluster.kubernetes.submit(training_job(tmp_path), eks(tmp_path, kind="JobSet"))
    (made,) = api.of_kind("jobsets")
    assert ("POST", "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets") in api.requests
    assert not api.of_kind("services"), "the operator makes the Service of a JobSet"
    api.put_pod("a", made["metadata"]["name"], phase="Running")
    made["status"]["restarts"] = 2
    assert kubernetes.look([scheduler_job(job)])[scheduler_job(job).id].reason == "1 pod running (restart 2)"
    job.cancel()
    assert not api.objects


def test_refusal_is_told_in_the_words_of_the_cluster(api, tmp_path):
    api.refusal = ("services", 403, "services is forbidden: User me cannot create")
    with pytest.raises(JobError, match=r"\(403\): services is forbidden"):
        cluster.kubernetes.submit(training_job(tmp_path), eks(tmp_path))
    assert not api.objects, "half a job was left behind"
    assert not (tmp_path / "runs").exists(), "nor anything of the run"
    api.refusal = None
    cluster.kubernetes.submit(training_job(tmp_path), eks(tmp_path))


def test_silent_cluster_and_missing_client_are_told(api, tmp_path, monkeypatch):
    job = cluster.kubernetes.submit(training_job(tmp_path), eks(tmp_path))
    api.shutdown()
    api.server_close()
    monkeypatch.setattr(kubernetes_client, "TIMEOUT_S", 0.5)
    with pytest.raises(JobError, match="cannot be asked"):
        kubernetes.look([scheduler_job(job)])
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    with pytest.raises(JobError, match="pip install kubernetes"):
        kubernetes_client.Cluster()


def test_unfilled_site_is_refused_before_anything_is_written(tmp_path):
    site = eks(tmp_path, image="EDIT", claim="EDIT")
    with pytest.raises(ConfigError, match=r"site\.kubernetes\.image, site\.kubernetes\.claim"):
        cluster.kubernetes.submit(training_job(tmp_path), site)
    assert not list(tmp_path.iterdir())
    assert re.search(r"image: EDIT", render(training_job(tmp_path), site)), "but it can be looked at"
