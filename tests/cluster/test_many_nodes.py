"""A job on 9 simulated Slurm nodes with 8 ranks each, or on 64 nodes with `--real-limits` (make
faults). Slurm itself is real.

The measurements on 64 nodes are written to results/many_nodes.json. All nodes share one host, so
the loss of a node is simulated by suspending all processes of the node.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from cluster.sandbox import Sandbox, stop_sandbox, why_not
from cluster.site import Site
from cluster.state import log_path
from cluster.submission import submit
from kit.show.results import Row, row
from tests.bench.results import load_average, write_results
from tests.cluster.conftest import be_client
from tests.cluster.jobs import STANDIN, standin
from tests.cluster.test_faults import at_step, event, kill, supervisors
from tests.support.waiting import eventually, processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PER_NODE, LIMIT_S = 8, 40
# To save memory, only rank 0 and the keepers (processes that start and watch a rank) run Python.
LIGHT = """\
if [ "$RANK" = 0 ]; then exec "$@"; fi
echo "attempt $KIT_ATTEMPT rank $RANK"
exec sleep 1000"""


@pytest.fixture
def many(tmp_path_factory, monkeypatch, is_full):
    if reason := why_not():
        pytest.skip(reason)
    root = tmp_path_factory.mktemp("many")
    try:
        sandbox = Sandbox.start(root, num_nodes=64 if is_full else 9, isolated=False)
        be_client(sandbox, monkeypatch, 2.0)
        yield sandbox
    finally:
        stop_sandbox(root)


def seconds_used(pid: int) -> float:
    """Returns the CPU time in seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def of_node(node: str) -> set[int]:
    """Returns the numbers of all processes of a node: Slurm's daemons, the keepers of the ranks,
    and the ranks.
    """
    return {*processes("", f"SLURMD_NODENAME={node}"), *processes(f"\0{node}\0")}


def survives_a_frozen_node(job, node, rows) -> int:
    """Suspends all processes of a node, and checks that only this node is reported as lost. Then
    resumes the processes, because there is no spare node. Returns the number of the next attempt.
    """
    frozen, lost_at = of_node(node), time.time()
    assert len(frozen) > 2 * PER_NODE
    for process in frozen:
        os.kill(process, signal.SIGSTOP)
    requeued = event(job, "requeued", lost_at, LIMIT_S + 120)
    took_s = requeued.time - lost_at
    what = f"one node frozen, ranks end after {LIMIT_S} s: time until the failure is noticed"
    rows.append(row(what, took_s, "s", at_most=LIMIT_S + 90, note=requeued.reason))
    assert requeued.lost_node == node
    for process in frozen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)
    resumed = event(job, "running", lost_at, 400)
    took_s = resumed.time - lost_at
    what = "one node frozen: time until the job runs again"
    rows.append(row(what, took_s, "s", note="all nodes share 2 cores"))
    return resumed.attempt


def test_job_on_many_nodes_starts_and_reports_faults(many, tmp_path, is_full):
    rows: list[Row] = []
    load, num_nodes = load_average(), len(many.nodes)
    ranks = PER_NODE * num_nodes
    site = Site.load(many.site_file).replace(devices_per_node=PER_NODE)
    words = (100_000, 1, LIMIT_S) if is_full else (100_000, 1)
    spec = standin(tmp_path / "run", *words, num_processes=ranks, num_nodes=num_nodes)
    if not is_full:
        spec = spec.replace(argv=("bash", "-c", LIGHT, "rank", *spec.argv))
    start = time.time()
    job = submit(spec, site)
    at_step(job, 3, 300)
    what = f"{num_nodes} nodes with {PER_NODE} ranks each: time until the third step"
    rows.append(row(what, time.time() - start, "s"))
    folder = log_path(job.run_dir, 1, 0).parent
    assert not list(job.run_dir.glob("ranks/*.json*")), "no file of a rank"
    logs = {file.name for file in folder.iterdir()}
    assert logs == {"rank_00000.log", *(f"node_{n}.log" for n in range(num_nodes))}
    assert job.logs(0).startswith("attempt 1 rank 0")
    assert f"attempt 1 rank {ranks - 1}" in job.logs(ranks - 1)

    (pid,) = supervisors(job)
    if is_full:
        before, begun = seconds_used(pid), time.monotonic()
        time.sleep(60)
        share = (seconds_used(pid) - before) / (time.monotonic() - begun)
        what = f"CPU time of the supervisor of {ranks} ranks, as a share of one core"
        rows.append(row(what, share, at_most=0.05))

    attempt = survives_a_frozen_node(job, many.nodes[39], rows) if is_full else 1
    (victim,) = processes(STANDIN if is_full else "sleep\x001000", f"RANK={ranks - 1}")
    start = kill(victim)
    again = event(job, "requeued", start)
    assert f"rank {ranks - 1} on" in again.reason and "SIGKILL" in again.reason
    own = log_path(job.run_dir, attempt, ranks - 1).read_text()
    # The log contains the output of this rank only.
    assert own.startswith(f"attempt {attempt} rank {ranks - 1}") and own.count("\n") == 1
    if is_full:
        took_s = event(job, "running", start, 400).time - start
        what = "a rank is killed: time until the job runs again in the same allocation"
        rows.append(row(what, took_s, "s"))
    job.cancel()
    assert eventually(lambda: not processes(str(tmp_path)), 120)
    if is_full:
        command = "pytest tests/cluster/test_many_nodes.py --real-limits"
        write_results("many_nodes", rows, command=command, load_before=load)
