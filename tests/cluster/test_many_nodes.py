"""A job of many ranks on many real Slurm nodes; `--real-limits` (make faults): 64 nodes of 8 light
ranks, else 9.

The nodes share one host, so a node is lost by freezing all its processes. The rows of the full form
go to results/many_nodes.json.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from cluster import poll, slurm
from cluster.job import JobSpec
from cluster.sandbox import Sandbox, stop, why_not
from cluster.site import Site
from cluster.state import log_path
from kit.show.results import Row, row
from tests.benchmarks.results import load_average, write_results
from tests.cluster.test_faults import at_step, event, supervisors
from tests.cluster.waiting import eventually, processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STANDIN = str(Path(__file__).parent / "standin.py")
PER_NODE, LIMIT_S = 8, 40
# Only rank 0 costs a Python, beside the keepers.
LIGHT = (
    'if [ "$RANK" = 0 ]; then exec "$@"; fi; echo "attempt $KIT_ATTEMPT rank $RANK"; exec sleep'
    " 1000"
)


@pytest.fixture
def is_full(request):
    return request.config.getoption("--real-limits")


@pytest.fixture
def many(tmp_path_factory, monkeypatch, is_full):
    if reason := why_not():
        pytest.skip(reason)
    root = tmp_path_factory.mktemp("many")
    for key in [key for key in os.environ if key.startswith(("SLURM_", "SBATCH_"))]:
        monkeypatch.delenv(key)
    try:
        sandbox = Sandbox.start(root, num_nodes=64 if is_full else 9, isolated=False)
        monkeypatch.setenv("SLURM_CONF", sandbox.environment["SLURM_CONF"])
        monkeypatch.setattr(poll.POLLER, "interval_s", 2.0)
        yield sandbox
    finally:
        stop(root)


def seconds_used(pid: int) -> float:
    """Returns the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def of_node(node: str) -> list[int]:
    """Returns all processes of a node: its daemons, keepers and ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            variables = (
                (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
            )
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if f"SLURMD_NODENAME={node}".encode() in variables or (
            words[:1] and node.encode() in words[1:]
        ):
            found.append(int(entry.name))
    return found


def supervisor_of(job) -> int:
    (pid,) = supervisors(job)
    return pid


def survives_a_frozen_node(job, node, rows) -> int:
    """Freezes a node, which alone is blamed, and thaws it, as there is no other; returns the
    attempt after it.
    """
    frozen, lost_at = of_node(node), time.time()
    assert len(frozen) > 2 * PER_NODE
    for process in frozen:
        os.kill(process, signal.SIGSTOP)
    requeued = event(job, "requeued", lost_at, LIMIT_S + 120)
    what = f"one node frozen, ranks end after {LIMIT_S} s: noticed"
    rows.append(row(what, requeued.time - lost_at, "s", at_most=LIMIT_S + 90, note=requeued.reason))
    assert requeued.lost_node == node
    for process in frozen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)
    resumed = event(job, "running", lost_at, 400)
    rows.append(
        row(
            "one node frozen: running again after",
            resumed.time - lost_at,
            "s",
            note="2 cores for all",
        )
    )
    return resumed.attempt


def test_many_ranks_on_many_nodes(many, tmp_path, is_full):
    rows: list[Row] = []
    load, num_nodes = load_average(), len(many.layout.nodes)
    ranks = PER_NODE * num_nodes
    command = (sys.executable, STANDIN, str(tmp_path / "run"), "100000", "1")
    argv = (*command, str(LIMIT_S)) if is_full else ("bash", "-c", LIGHT, "rank", *command)
    site = Site.load(many.site_file).replace(devices_per_node=PER_NODE)
    spec = JobSpec(
        name="many",
        run_dir=str(tmp_path / "run"),
        argv=argv,
        num_processes=ranks,
        num_nodes=num_nodes,
    )
    start = time.time()
    job = slurm.submit(spec, site)
    at_step(job, 3, 300)
    rows.append(
        row(f"{num_nodes} nodes x {PER_NODE} ranks: third step after", time.time() - start, "s")
    )
    folder = log_path(job.run_dir, 1, 0).parent
    assert not list(job.run_dir.glob("ranks/*.json*")), "no file of a rank"
    assert {file.name for file in folder.iterdir()} == {
        "rank_00000.log",
        *(f"node_{n}.log" for n in range(num_nodes)),
    }
    assert job.logs(0).startswith("attempt 1 rank 0") and f"attempt 1 rank {ranks - 1}" in job.logs(
        ranks - 1
    )

    pid = supervisor_of(job)
    before, begun = seconds_used(pid), time.monotonic()
    time.sleep(60 if is_full else 3)
    share = (seconds_used(pid) - before) / (time.monotonic() - begun)
    rows.append(
        row(
            f"supervisor of {ranks} ranks: share of a core",
            share,
            at_most=0.05 if is_full else None,
        )
    )

    attempt = survives_a_frozen_node(job, many.layout.nodes[39], rows) if is_full else 1
    start = time.time()
    victims = [
        p for p in processes(STANDIN if is_full else "sleep\x001000") if rank_of(p) == ranks - 1
    ]
    os.kill(victims[0], signal.SIGKILL)
    again = event(job, "requeued", start)
    assert f"rank {ranks - 1} on" in again.reason and "SIGKILL" in again.reason
    own = log_path(job.run_dir, attempt, ranks - 1).read_text()
    assert own.startswith(f"attempt {attempt} rank {ranks - 1}") and own.count("\n") == 1, (
        "its words, and no others'"
    )
    if is_full:
        resumed = event(job, "running", start, 400)
        rows.append(
            row("rank killed: running again in the same allocation", resumed.time - start, "s")
        )
    job.cancel()
    assert eventually(lambda: not processes(str(tmp_path)), 120)
    if is_full:
        write_results(
            "many_nodes",
            rows,
            command="pytest tests/cluster/test_many_nodes.py --real-limits",
            load_before=load,
        )


def rank_of(pid: int) -> int:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(int(v.partition(b"=")[2]) for v in variables if v.startswith(b"RANK="))
