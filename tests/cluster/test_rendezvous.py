"""Address and port of the rendezvous of the ranks, on a real Slurm."""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from cluster.directory_handle import RunDirectory
from cluster.ports import FIRST_PORT, NUM_PORTS, reserve_port
from cluster.slurm.preflight import ASKED
from cluster.state import JobState, log_path, read_exit, update_state
from cluster.submission import submit
from cluster.supervisor import rank_failure
from tests.cluster.jobs import standin, with_slurm
from tests.support.waiting import eventually

LISTENER = """
import socket, sys, time
held = [socket.create_server(("", int(port))) for port in sys.argv[2:]]
open(sys.argv[1], "w").close()
time.sleep(300)
"""


def occupy_ports(sandbox, folder: Path, *ports: int) -> None:
    """Starts a process on the first node that occupies the given ports. Returns when the process
    listens at the ports.
    """
    (folder / "listener.py").write_text(LISTENER)
    words = [sys.executable, folder / "listener.py", folder / "ready", *ports]
    wrapped = shlex.join(map(str, words))
    sandbox.run("sbatch", "--nodelist=node1", "--output=/dev/null", f"--wrap={wrapped}")
    assert eventually((folder / "ready").exists)


def test_unknown_address_of_first_node_fails_at_once(sandbox, site, tmp_path):
    """The job fails within a minute. Torch alone would wait for 20 minutes."""
    unknown = "node1-hsn0.cluster.invalid"
    site = with_slurm(site, task_setup=(f"export MASTER_ADDR={unknown}",))
    start = time.monotonic()
    status = submit(standin(tmp_path / "run", num_processes=2), site).wait(120)
    assert status.state is JobState.FAILED and time.monotonic() - start < 60
    for words in ("node node1", f"MASTER_ADDR={unknown}", "site.slurm.task_setup"):
        assert words in status.reason
    assert not log_path(tmp_path / "run", 1, 0).exists(), "no rank was started"


def test_unreachable_first_node_is_reported(sandbox, site, tmp_path):
    """MASTER_ADDR is 127.0.0.1. On the second node this address is the second node itself, where no
    process listens.
    """
    site = with_slurm(site, task_setup=("export MASTER_ADDR=127.0.0.1",))
    status = submit(standin(tmp_path / "run", num_processes=2), site).wait(120)
    assert status.state is JobState.FAILED
    assert "node node2 cannot reach the first node at MASTER_ADDR=127.0.0.1" in status.reason


def test_unknown_network_interface_is_named(sandbox, site, tmp_path):
    site = with_slurm(site, network_interfaces=("hsn0",))
    status = submit(standin(tmp_path / "run", num_processes=2), site).wait(120)
    assert status.state is JobState.FAILED
    expected = "has no network interface hsn0. It has: eth0. Correct site.slurm.network_interfaces"
    assert expected in status.reason


def test_port_in_use_is_replaced_by_a_free_one(sandbox, site, tmp_path):
    occupy_ports(sandbox, tmp_path, 23456, 23457)
    site = with_slurm(site, master_port=23456)
    run_dir = tmp_path / "run"
    status = submit(standin(run_dir, 3, 0.1, 30, num_processes=2), site).wait(120)
    assert (status.state, status.attempt) == (JobState.DONE, 1), status.reason
    (log,) = (run_dir / "logs").glob("slurm-*.log")
    assert "port 23456 is in use on this node: the ranks meet at port 23458" in log.read_text()


def test_rank_failure_by_taken_port_causes_restart(tmp_path):
    update_state(tmp_path, attempt=1, state=JobState.STARTING)
    log = log_path(tmp_path, 1, 0)
    log.parent.mkdir(parents=True)
    log.write_text("DistNetworkError: port: 20011, name: EADDRINUSE, message: address in use\n")
    assert rank_failure(RunDirectory(tmp_path), 1, 0, 1, "rank 0").fate == "restart"
    log.write_text("ValueError: wrong\n")
    assert rank_failure(RunDirectory(tmp_path), 1, 0, 1, "rank 0").fate == "end"
    assert read_exit(tmp_path) is None


def test_reserved_port_can_be_used_only_by_rank_0():
    import datetime

    import torch.distributed as dist

    with reserve_port() as first:
        port = first.getsockname()[1]
        with reserve_port(port) as second:
            assert second.getsockname()[1] > port
        store = dist.TCPStore(  # pyright: ignore
            "127.0.0.1", port, 1, True, datetime.timedelta(seconds=30)
        )
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_ports_avoid_kubernetes_and_ephemeral_ranges():
    """The ports are outside Kubernetes' range of NodePorts, and outside Linux's default range for
    outgoing connections.
    """
    ours = set(range(FIRST_PORT, FIRST_PORT + NUM_PORTS))
    assert not ours & set(range(30000, 32768)) and not ours & set(range(32768, 61000))


def test_hostname_with_loopback_address_is_reported(tmp_path):
    """In Debian's /etc/hosts, the host's own name has the address 127.0.1.1. gloo would send that
    address to other nodes.
    """
    getent = tmp_path / "getent"
    getent.write_text("#!/bin/sh\necho '127.0.1.1       STREAM node2'\n")
    getent.chmod(0o755)
    words = ["bash", "-c", ASKED, "preflight", "token", "23456", str(tmp_path)]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURMD_NODENAME": "node2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "SLURM_NNODES": "2"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=280)
    assert done.stdout.startswith("node node2 gives its own name ")
    assert "the address 127.0.1.1" in done.stdout and "network_interfaces" in done.stdout
