"""A Python function goes to the local machine and to a real Slurm, and its run directory tells what became of it."""

import sys
import time

import pytest

from cluster.job import Job
from cluster.record import ConfigError
from cluster.sandbox import Sandbox, stop, why_not
from cluster.site import Site
from cluster.state import JobError, JobState
from cluster.submitit_bridge import send

submitit = pytest.importorskip("submitit", reason="pip install submitit")
cloudpickle = pytest.importorskip("cloudpickle")
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as functions of a notebook are: no job can import them


def add(a, b, *, after=None):
    print("adding", a, b, flush=True)
    while after and not after.exists():
        time.sleep(0.05)
    return a + b


def fail():
    raise ValueError("no <such> thing")


@pytest.fixture(scope="module")
def sandbox_site(tmp_path_factory):
    if reason := why_not():
        pytest.skip(reason)
    root = tmp_path_factory.mktemp("slurm")
    try:
        sandbox = Sandbox.start(root, isolated=False, num_nodes=2)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in sandbox.environment.items():
                patch.setenv(name, value)
            yield Site.load(sandbox.site_file)
    finally:
        stop(root)


@pytest.mark.parametrize("name", ["laptop", "sandbox"])
def test_value_log_and_state_of_a_function(name, tmp_path, request):
    site = request.getfixturevalue("sandbox_site") if name == "sandbox" else Site.load(name)
    go = tmp_path / "go"
    sent = send(add, 2, 3, after=go, site=site, run_dir=tmp_path / "run")
    with pytest.raises(JobError, match="in use"):
        send(add, 2, 3, site=site, run_dir=tmp_path / "run")
    go.touch()
    assert sent.result() == 5
    job = Job.attach(tmp_path / "run")
    assert job.wait(20).state is JobState.DONE
    assert "adding 2 3" in job.logs()
    assert send(add, 4, 5, site=site, run_dir=tmp_path / "run").result() == 9, "a second attempt, since the first ended"
    assert job.status().attempt == 2


def test_exception_is_the_reason(tmp_path):
    sent = send(fail, site=Site.load("laptop"), run_dir=tmp_path / "run")
    with pytest.raises(submitit.core.utils.FailedJobError):
        sent.result()
    status = Job.attach(tmp_path / "run").wait(20)
    assert (status.state, status.exit_code, status.reason) == (JobState.FAILED, 1, "ValueError: no <such> thing")


def test_cluster_out_of_reach_fails_the_attempt_and_frees_the_directory(tmp_path, monkeypatch):
    site = Site.load("generic-gpu-slurm")
    assert site.slurm is not None
    site = site.replace(slurm=site.slurm.replace(account="a", partition="p", gpus_per_node=None))
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("PATH", "/nowhere")
        with pytest.raises(JobError, match="submitit: .*srun"):
            send(add, 1, 2, site=site, run_dir=tmp_path / "run")
    assert Job.attach(tmp_path / "run").state is JobState.FAILED
    assert send(add, 1, 2, site=Site.load("laptop"), run_dir=tmp_path / "run").result() == 3


def test_site_without_a_way_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="local or a Slurm site"):
        send(add, 1, 2, site=Site.load("eks-trn1"), run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match="account"):
        send(add, 1, 2, site=Site.load("frontier"), run_dir=tmp_path / "run")
    assert not list(tmp_path.iterdir())
