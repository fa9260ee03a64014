"""A real Slurm for the tests that need one, started once."""

import contextlib
import os
import subprocess
import time

import pytest

from cluster import poll
from cluster.sandbox import START_WAIT_S, Sandbox, why_not
from cluster.site import Site
from cluster.state import JobError


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory):
    """Four nodes without accounting; isolated from each other where this process may do that."""
    if reason := why_not():
        pytest.skip(reason)
    try:
        sandbox = Sandbox.start(tmp_path_factory.mktemp("slurm") / "sandbox")
    except JobError as error:
        pytest.skip(f"no sandbox can run here: {error}")
    yield sandbox
    sandbox.stop()


@pytest.fixture
def sandbox(slurm_cluster, monkeypatch):
    """The cluster with its clients set up; afterwards its queue is empty and its nodes are idle."""
    for key in [key for key in os.environ if key.startswith(("SLURM_", "SBATCH_"))]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("SLURM_CONF", slurm_cluster.environment["SLURM_CONF"])
    monkeypatch.setattr(poll.POLLER, "interval_s", 0.5)
    yield slurm_cluster
    reset(slurm_cluster)


def reset(cluster: Sandbox) -> None:
    """Cancels all jobs and waits until all nodes are idle again."""
    deadline = time.monotonic() + START_WAIT_S
    while True:
        with contextlib.suppress(JobError, subprocess.TimeoutExpired):  # the controller may be restarting
            if jobs := cluster.run("squeue", "--noheader", "--format=%i").split():
                cluster.run("scancel", *jobs)
            not_idle = [node for node, state in cluster.node_states().items() if state != "idle"]
            if not not_idle:
                return
            for node in not_idle:
                cluster.recover(node)
        if time.monotonic() > deadline:
            raise JobError(f"the nodes of {cluster.layout.root} do not become idle: {cluster.node_states()}")
        time.sleep(0.5)


@pytest.fixture
def site(sandbox) -> Site:
    return Site.load(sandbox.site_file)
