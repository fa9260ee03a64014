"""Fixtures with a real Slurm on simulated nodes, which is started once per test session."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import poll
from cluster.login import mirror
from cluster.sandbox import START_WAIT_S, Sandbox, can_isolate, why_not
from cluster.site import Site
from cluster.state import JobError
from tests.cluster.recovery import recover
from tests.support.waiting import eventually

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Adds states of Slurm's nodes, jobs, and the end of the controller's log to the report of a
    failed test.
    """
    report = yield
    cluster = getattr(item, "funcargs", {}).get("slurm_cluster")
    if report.failed and cluster and (log := cluster.path("log", "slurmctld.log")).exists():
        report.sections.append(("slurmctld.log", log.read_text(errors="replace")[-8000:]))
        with contextlib.suppress(JobError):
            nodes = cluster.run(
                "sinfo", "--Node", "--partition=batch", "--format=%N %T since %H: %E"
            )
            jobs = cluster.run("squeue", "--all", "--format=%i %T %R")
            report.sections.append(("nodes and jobs", nodes + jobs))
    return report


@pytest.fixture(scope="session")
def is_full(request):
    """Whether the tests use the time limits of real jobs (`--real-limits`). Otherwise limits are
    shortened.
    """
    return request.config.getoption("--real-limits")


@pytest.fixture(scope="session")
def small_disk(tmp_path_factory):
    """A file system of 48 MB for tests that fill a disk. It is mounted before the isolated nodes
    start, so that the nodes see it.
    """
    folder = tmp_path_factory.mktemp("small")
    if not can_isolate():
        yield folder
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def configured(cluster: Sandbox, **settings: object) -> Iterator[None]:
    """Changes settings in slurm.conf until the context ends, as an administrator might."""
    file = cluster.path("etc", "slurm.conf")
    before = text = file.read_text()
    for name, value in settings.items():
        text = re.sub(rf"(?m)^{name}=.*", f"{name}={value}", text)

    def put(content: str) -> None:
        file.write_text(content)
        cluster.run("scontrol", "reconfigure")

    put(text)
    try:
        yield
    finally:
        put(before)


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory, small_disk, pytestconfig):
    """A simulated cluster of four Slurm nodes, without an accounting database. The nodes have
    separate networks if this process has the permission.

    Without `--real-limits`, Slurm kills the processes of a cancelled job after 2 s (KillWait).
    """
    if reason := why_not():
        pytest.skip(reason)
    sandbox = Sandbox.start(tmp_path_factory.mktemp("slurm") / "sandbox")
    with contextlib.ExitStack() as until_the_end:
        until_the_end.callback(sandbox.stop)
        if not pytestconfig.getoption("--real-limits"):
            until_the_end.enter_context(configured(sandbox, KillWait=2))
        yield sandbox


def be_client(cluster: Sandbox, monkeypatch: pytest.MonkeyPatch, poll_s: float = 0.5) -> None:
    """Makes this process a client of the simulated Slurm cluster. The job status is queried every
    `poll_s` seconds.
    """
    for key in [key for key in os.environ if key.startswith(("SLURM_", "SBATCH_"))]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    monkeypatch.setattr(poll.POLLER, "interval_s", poll_s)


@pytest.fixture
def sandbox(slurm_cluster, monkeypatch):
    """The simulated Slurm cluster, with this process as client. After the test, all jobs are
    cancelled, and all nodes are idle again.
    """
    be_client(slurm_cluster, monkeypatch)
    yield slurm_cluster
    reset(slurm_cluster)


def reset(cluster: Sandbox) -> None:
    """Cancels all jobs and waits until all nodes are idle again."""
    deadline = time.monotonic() + START_WAIT_S
    while True:
        # A command may fail while the controller restarts.
        with contextlib.suppress(JobError, subprocess.TimeoutExpired):
            if jobs := cluster.run("squeue", "--noheader", "--format=%i").split():
                cluster.run("scancel", *jobs)
            not_idle = [node for node, state in cluster.node_states().items() if state != "idle"]
            if not not_idle:
                return
            for node in not_idle:
                recover(cluster, node)
        if time.monotonic() > deadline:
            raise JobError(f"the nodes do not become idle: {cluster.node_states()}")
        time.sleep(0.5)


@pytest.fixture
def site(sandbox) -> Site:
    return Site.load(sandbox.site_file)


class LoginNode:
    """An sshd that serves as login node. Tests can stop the sshd and its connections, and start the
    sshd again.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        for name in ("host", "client"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name]
            subprocess.run(words, check=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # sshd needs the folder for privilege separation
        variables = " ".join(f'"{name}={value}"' for name, value in environment.items())
        self.config, self.folder = folder / "sshd_config", folder
        self.config.write_text(f"""
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/client.pub
UsePAM no
StrictModes no
PidFile none
PasswordAuthentication no
SetEnv {variables}
""")
        (folder / "ssh_config").write_text(f"""
Host frontier
HostName 127.0.0.1
Port {port}
IdentityFile {folder}/client
IdentitiesOnly yes
UserKnownHostsFile {folder}/known
StrictHostKeyChecking accept-new
ControlMaster auto
ControlPath {folder}/master
ControlPersist yes
""")
        self.process: subprocess.Popen | None = None

    def on(self) -> None:
        assert SSHD
        log = self.folder / "sshd.log"
        words = [SSHD, "-D", "-f", self.config, "-E", log]
        self.process = subprocess.Popen(words, start_new_session=True)
        assert eventually(lambda: log.exists() and "listening on" in log.read_text(), 60)
        log.write_text("")

    def off(self) -> None:
        """Ends sshd and the open ssh connection."""
        words = ["ssh", "-F", self.folder / "ssh_config", "-O", "check", "frontier"]
        found = subprocess.run(words, capture_output=True, text=True)
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None
        if "pid=" in found.stderr:
            os.kill(int(found.stderr.partition("pid=")[2].split(")")[0]), signal.SIGKILL)


@pytest.fixture
def login_node(sandbox, tmp_path, monkeypatch):
    """A login node of the simulated Slurm cluster. PATH of this process has ssh and rsync, but no
    Slurm commands.
    """
    if SSHD is None:
        pytest.skip("no sshd here: apt-get install openssh-server")
    # The home folder has no ~/.bashrc, because bash reads this file for each command over ssh. With
    # pyenv in it, bash may wait a minute for a lock that a killed command has left.
    variables = {"OMP_NUM_THREADS": "1", "HOME": str(tmp_path / "home")}
    variables["SLURM_CONF"] = sandbox.environment["SLURM_CONF"]
    (tmp_path / "home").mkdir()
    node = LoginNode(tmp_path, variables)
    node.on()
    (tmp_path / "bin").mkdir()
    for name in ("ssh", "rsync", "tar"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("KIT_SSH_CONFIG", str(tmp_path / "ssh_config"))
    monkeypatch.setattr(mirror, "INTERVAL_S", 0.5)
    with monkeypatch.context() as laptop:
        laptop.setenv("PATH", str(tmp_path / "bin"))
        laptop.delenv("SLURM_CONF")
        yield node
    node.off()
