"""Kubernetes manifests, checked against the published schemas, and the script of a pod, run by bash
on this machine.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.kubernetes.manifest import manifests, pod_script, texts
from cluster.render import render
from cluster.state import (
    JobState,
    SchedulerJob,
    read_exit,
    read_pending_request,
    read_state,
    update_state,
    write_request,
)
from tests.cluster.eks import eks, training_job
from tests.cluster.shell import hostile_text, programs, shellcheck, told
from tests.support.waiting import eventually

ROOT = Path(__file__).parent.parent.parent
SCHEMA_VERSION = "1.33"


def test_manifest_equals_its_golden_file():
    """The golden file has the script of a pod, and the resource names of AWS's device plugins for a
    trn1.32xlarge. After an intended change, update it: KIT_UPDATE_GOLDEN=1 pytest THIS_FILE
    """
    site = eks(queue="trn1")
    job = training_job(name="hlat-7b", environment=site.profile("hlat-7b"))
    golden = Path(__file__).parent / "golden" / "eks-hlat-7b.submit.json"
    if os.environ.get("KIT_UPDATE_GOLDEN"):
        golden.write_text(render(job, site))
    assert render(job, site) == golden.read_text()


def test_kueue_job_starts_suspended_with_queue_label():
    """Kueue, which queues jobs on Kubernetes, then starts all pods of the job together."""
    (plain, *others), (queued, *same) = (
        manifests(training_job(), eks(queue=q)) for q in (None, "trn1")
    )
    plain["spec"]["suspend"], name = (
        not plain["spec"]["suspend"],
        {"kueue.x-k8s.io/queue-name": "trn1"},
    )
    plain["metadata"]["labels"] |= name
    assert plain == queued and queued["spec"]["suspend"] is True and others == same


def test_kubernetes_restarts_only_recoverable_failures():
    """Source of the rules: kubernetes.io/docs/concepts/workloads/controllers/job, backoffLimit and
    podFailurePolicy.
    """
    useless = {"containerName": "node", "operator": "In", "values": [os.EX_CONFIG]}
    fails = {"action": "FailJob", "onExitCodes": useless}
    lost = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    one = training_job(num_nodes=1, num_processes=32)
    alone, several = (manifests(job, eks(max_restarts=7))[0] for job in (one, training_job()))
    assert (alone["spec"]["backoffLimit"], several["spec"]["backoffLimit"]) == (7, 0)
    assert alone["spec"]["podFailurePolicy"] == {"rules": [fails, lost]}
    # With several pods, one restarted pod could not join the running pods.
    assert several["spec"]["podFailurePolicy"] == {"rules": [fails]}
    for job in (one, training_job()):
        job_set, _ = manifests(job, eks(kind="JobSet", max_restarts=7))
        reasons = {"onJobFailureReasons": ["PodFailurePolicy"]}
        rule = {"name": "useless", "action": "FailJobSet", **reasons}
        assert job_set["spec"]["failurePolicy"] == {"maxRestarts": 7, "rules": [rule]}
        inner = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
        assert inner["backoffLimit"] == 0 and inner["podFailurePolicy"] == {"rules": [fails]}
    name, script = job_set["metadata"]["name"], texts(training_job(), eks(kind="JobSet"))["run.sh"]
    assert f"MASTER_ADDR={name}-node-0-0.{name}" in script


@pytest.mark.parametrize("changes", [{}, {"queue": "trn1"}, {"secrets": {"HF_TOKEN": "hub/token"}}])
def test_manifests_follow_the_published_schemas(changes):
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for job in (training_job(time_limit_s=3600), training_job(num_nodes=1, num_processes=32)):
        for manifest in json.loads(render(job, eks(**changes)))["items"]:
            validate.validate(manifest, SCHEMA_VERSION, strict=True)
    manifest["metadata"]["nmae"] = "x"
    with pytest.raises(validate.ValidationError):
        validate.validate(manifest, SCHEMA_VERSION, strict=True)


def test_job_set_follows_its_published_model():
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api"
    )
    job_set, _ = manifests(training_job(), eks(kind="JobSet", queue="trn1"))
    # The model of the API would drop an unknown key, so the two dicts would differ.
    assert models.JobsetV1alpha2JobSet.from_dict(job_set).to_dict() == job_set


def test_secrets_are_rendered_as_secret_key_refs():
    assert "secretKeyRef" in render(training_job(), eks(secrets={"HF_TOKEN": "hub/token"}))


FAKE_PYTHON = f"""
[ "$1" = -P ] || exit 64
shift
case $2 in
    cluster.kubernetes) PYTHONPATH={ROOT} exec {sys.executable} -P "$@" ;;
    torch.distributed.run)
        while [[ $1 != bash ]]; do shift; done
        RANK=0 "$@" || exit 1 ;;  # torchrun's own code, whatever its ranks ended with
    *) exec "$@" ;;
esac"""
COMPILE = 'echo compile >>"$KIT_RUN_DIR/compilations"'


@pytest.fixture
def pod(tmp_path):
    """Returns a function that starts the script of a pod and returns the process."""
    fakes = {"python": FAKE_PYTHON, "neuron_parallel_compile": COMPILE}
    binaries = programs(tmp_path / "bin", fakes)

    def run(job, site, name="name-1", index=0):
        for folder in ("logs", "control"):  # A submission creates these folders.
            (Path(job.run_dir) / folder).mkdir(parents=True, exist_ok=True)
        text = pod_script(job, site.kubernetes, name)
        path = f"{binaries}:{os.environ['PATH']}"
        environment = {"PATH": path, "JOB_COMPLETION_INDEX": str(index)}
        return subprocess.Popen(
            ["bash", "-c", text], env=environment, cwd=tmp_path, start_new_session=True
        )

    return run


def pod_job(shared, *words, **changes):
    given = {"num_processes": 1, "num_nodes": 1, "run_dir": str(shared / "run"), **changes}
    return training_job(shared, argv=(str(shared / "bin" / "probe"), *words), **given)


def pod_site(shared):
    site = eks(shared)
    for name in ("cache", "disk"):
        (shared / name).mkdir(exist_ok=True)
    places = {"shared_cache": str(shared / "cache"), "node_cache": str(shared / "disk")}
    table = site.kubernetes.compilation.replace(**places)
    return site.replace(kubernetes=site.kubernetes.replace(compilation=table, setup=[]))


def log_of(job, attempt):
    return Path(job.run_dir) / "logs" / f"attempt_{attempt:02d}" / "rank_00000.log"


def test_pod_runs_ranks_and_records_start_and_end(pod, tmp_path):
    job = pod_job(tmp_path)
    run = Path(job.run_dir)
    for number in (1, 2):
        name = f"name-{number}"
        assert pod(job, pod_site(tmp_path), name).wait(30) == 0
        assert log_of(job, number).read_text() == f"attempt {number} rank 0 at {name}-0.{name}\n"
        state, report = read_state(run), read_exit(run)
        assert state and state.state is JobState.DONE and state.scheduler_job
        assert (state.scheduler_job.id, state.scheduler_job.config) == (f"job/{name}", "/default")
        assert report and (report.attempt, report.rc) == (number, 0)
    # The graphs are compiled once for the run, not once for each attempt.
    assert (run / "compilations").read_text() == "compile\n"


def test_pod_sigterm_stops_one_attempt_only(pod, tmp_path):
    """SIGTERM ends the pod with code 143 and without an exit report. A stop request of a person
    also applies to the next attempt.
    """
    site, job = pod_site(tmp_path), pod_job(tmp_path, "wait")
    process, run = pod(job, site), Path(job.run_dir)
    assert eventually(lambda: log_of(job, 1).exists() and log_of(job, 1).read_text(), 30)
    # Kubernetes signals only the first process of a container.
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(30) == 143
    asked = read_pending_request(run, "stop")
    assert read_exit(run) is None and asked is not None and not asked.by_person

    job = pod_job(tmp_path)
    assert pod(job, site).wait(30) == 0, "started again, it has not been told"
    assert read_pending_request(run, "stop") is None and read_exit(run).attempt == 2
    state = read_state(run)
    state.replace(state=JobState.RUNNING).write(run / "state.json")  # a live job can be asked
    write_request(run, "stop")
    assert pod(job, site).wait(30) == 0
    assert read_pending_request(run, "stop").by_person, "what a person has asked for is kept"


def test_pod_exits_with_78_for_permanent_failures(pod, tmp_path):
    site = pod_site(tmp_path)
    for attempt, (code, end) in enumerate([(1, 1), (os.EX_CONFIG, os.EX_CONFIG), (3, 1)], start=1):
        job = pod_job(tmp_path, "exit", str(code))
        assert pod(job, site).wait(30) == end and log_of(job, attempt).exists()
    run = Path(job.run_dir)
    assert len([*run.glob("logs/attempt_*")]) == 3
    assert pod(pod_job(tmp_path), site).wait(30) == 0
    newer = SchedulerJob(scheduler="kubernetes", id="job/name-2", config="/default")
    update_state(run, attempt=5, state=JobState.RUNNING, heartbeat=time.time(), scheduler_job=newer)
    assert pod(job, site).wait(30) == os.EX_CONFIG, "another job owns the run"
    assert read_state(run).attempt == 5


def test_pod_script_passes_shellcheck():
    for site in (eks(), eks(kind="JobSet")):
        text = texts(training_job(environment=site.profile("hlat-70b")), site)["run.sh"]
        # shellcheck cannot see that the exported function run_rank is called by `bash -c run_rank`.
        shellcheck(text, "--exclude=SC2317,SC2329")


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    argv=st.lists(hostile_text, max_size=2),
    value=hostile_text,
    folder=hostile_text.map(lambda t: t.replace("/", "_")),
)
def test_hostile_values_reach_pod_ranks_unexecuted(pod, tmp_path, argv, value, folder):
    given = {"environment": {"VALUE": value}, "run_dir": str(tmp_path / f"run {folder}")}
    job = pod_job(tmp_path, *argv, **given)
    site = pod_site(tmp_path)
    assert json.loads(texts(job, site)["submit.json"])["items"] == manifests(job, site)
    assert pod(job, site).wait(30) == 0
    got_argv, variables, _ = told(Path(job.run_dir))
    assert (got_argv, variables["VALUE"]) == (argv, value)
    assert not list(tmp_path.rglob("canary*"))
    shutil.rmtree(job.run_dir)
