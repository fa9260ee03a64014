"""Faults of real clusters, caused on a real Slurm with simulated nodes. For each fault, the outcome
and the seconds until the outcome are measured.

The measurements are written to results/faults.json. Nodes can be disconnected or switched off only
with network namespaces, which need root.
"""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import kit
from cluster import slurm
from cluster.job import Job
from cluster.state import Event, JobState, last_attempt, read_history, read_state
from cluster.submission import submit
from kit import launcher
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.interop.weights import load_model
from kit.monitor.goodput import ledger
from kit.show.results import Row, row
from tests.bench.results import load_average, write_results
from tests.cluster.conftest import configured
from tests.cluster.jobs import STANDIN, job_spec, occupy, scheduler_job, standin, with_slurm
from tests.cluster.recovery import power_off, recover
from tests.support.runs import new_run
from tests.support.waiting import eventually, processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROWS: list[Row] = []
DP4 = Plan(data_parallel=4, zero_stage=1, micro_batch_size=1, global_batch_size=8)


@pytest.fixture(scope="module", autouse=True)
def results(is_full):
    """Writes the measurements after all tests. With `--real-limits`, which needs an idle machine,
    the limits of the measurements must hold too.
    """
    load, command = load_average(), "pytest tests/cluster/test_faults.py"
    yield
    if ROWS:
        write_results("faults", ROWS, command=command, load_before=load)
    assert not is_full or not [each for each in ROWS if each.ok is False]


@pytest.fixture
def nodes(sandbox):
    """The simulated Slurm cluster. Skips the test if its nodes cannot be disconnected."""
    if not sandbox.isolated:
        pytest.skip("nodes that can be cut off need network namespaces: run as root")
    return sandbox


def running(job: Job) -> bool:
    state = read_state(job.run_dir)
    return state is not None and state.state is JobState.RUNNING


def at_step(job: Job, step: int, timeout_s: float = 180.0) -> None:
    """Waits until a job has done a step, in any attempt."""

    def reached():
        state = read_state(job.run_dir)
        assert state is None or not state.state.is_final, job.status()
        return state and state.state is JobState.RUNNING and (state.step or 0) >= step

    assert eventually(reached, timeout_s), job.status()


def event(job: Job, state: str, since: float, timeout_s: float = 200.0) -> Event:
    """Waits for the first change to a state after the time `since`, and returns its event. Slurm
    itself marks a silent node as down only after 300 s.
    """

    def found():
        later = (each for each in read_history(job.run_dir) if each.time >= since)
        return next((each for each in later if each.state == state), None)

    seen = eventually(found, timeout_s)
    assert seen, job.status()
    return seen


def rank_process(job: Job, rank: int) -> int:
    """Returns the process number of one rank of a job."""
    return processes(str(job.run_dir), f"RANK={rank}")[0]


def measured(name: str, seconds: float, *, at_most: float | None = None, note: str = "") -> None:
    ROWS.append(row(name, round(seconds, 1), "s", at_most=at_most, note=note))


def took(name: str, start: float, *, at_most: float | None = None, note: str = "") -> None:
    measured(name, time.time() - start, at_most=at_most, note=note)


def kill(process: int) -> float:
    """Sends SIGKILL to a process. Returns the time just after the signal, which is before any
    consequence of the kill.
    """
    os.kill(process, signal.SIGKILL)
    return time.time()


def test_ranks_restart_after_one_is_killed(sandbox, site, tmp_path):
    job = submit(standin(tmp_path / "killed", 150, 0.2), site)
    at_step(job, 20)
    start = kill(rank_process(job, 2))
    resumed, reason = event(job, "running", start), event(job, "requeued", start).reason
    what = "a rank is killed: time until the job runs again"
    measured(what, resumed.time - start, at_most=30, note=reason)
    job.stop()
    assert job.wait(120).state is JobState.DONE and last_attempt(job.run_dir) == 2
    assert "rank 2 on node3 was killed by SIGKILL" in reason


def test_repeated_crashes_without_a_step_end_the_job(sandbox, site, tmp_path):
    code = "import os, time; time.sleep(0.5); os.kill(os.getpid(), 9)"
    spec = job_spec(tmp_path / "crash", sys.executable, "-c", code, num_processes=1)
    start = time.time()
    status = submit(spec, site).wait(120)
    what = "a rank crashes at every start: time until the job fails"
    took(what, start, at_most=60, note=status.reason)
    found = (status.state, status.exit_code, status.attempt)
    assert found == (JobState.FAILED, 137, 3)
    assert "given up after 3 starts without a new step" in status.reason


@contextlib.contextmanager
def frozen(nodes, node):
    """Suspends (SIGSTOP) all processes of a node. Resumes the processes that still exist when the
    context ends.
    """
    words = ["ip", "netns", "pids", f"{nodes.tag}-{node}"]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    for pid in found:
        os.kill(int(pid), signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGCONT)


WAYS = ("switched off", "cut off", "frozen")
WITHOUT_NODE = "time until the first step without the node"
"""End of the names of result rows."""


@pytest.fixture
def lose(nodes):
    """Returns a dict from each kind of failure in WAYS to a function that makes a node fail."""
    with contextlib.ExitStack() as until_the_end:
        yield {
            "switched off": functools.partial(power_off, nodes),
            "cut off": nodes.disconnect_node,
            "frozen": lambda node: until_the_end.enter_context(frozen(nodes, node)),
        }


@pytest.fixture
def hanging_job(request, site, tmp_path, is_full):
    """Returns a function that submits a job with one rank per node. If a training step takes
    `limit_s` seconds, the ranks end.

    With `--real-limits` the job trains a model. Otherwise the job runs the simulated trainer
    standin.py.
    """

    def start(limit_s, num_nodes):
        if not is_full:
            spec = standin(tmp_path / "run", 100_000, 0.2, limit_s, num_processes=num_nodes)
            return submit(spec, site)
        spec, recipe = request.getfixturevalue("spec"), request.getfixturevalue("recipe")
        recipe = recipe.replace(num_steps=10**6, checkpoint_every=100, hung_after_s=limit_s)
        plan = Plan(data_parallel=num_nodes, micro_batch_size=1, global_batch_size=num_nodes)
        one_each = site.replace(devices_per_node=1)
        return kit.launch(tmp_path / "run", spec=spec, plan=plan, recipe=recipe, site=one_each).job

    return start


def nodes_of(nodes, job: Job) -> list[str]:
    """Returns the names of the nodes on which a job runs at present."""
    shown = nodes.run("squeue", "--noheader", f"--jobs={scheduler_job(job).id}", "--format=%N")
    return nodes.run("scontrol", "show", "hostnames", shown.strip()).split()


def first_step(job: Job) -> int:
    """Returns the first step of a job of `hanging_job` whose earlier attempts took no step."""
    metrics = job.run_dir / "metrics.jsonl"
    begun = job.run_dir / f"begun_{last_attempt(job.run_dir)}"
    assert eventually(lambda: begun.exists() or (metrics.exists() and metrics.read_bytes()))
    if begun.exists():
        return int(begun.read_text()) + 1  # standin.py writes the number of steps taken before.
    return json.loads(metrics.read_text().splitlines()[0])["step"]


def times_lost(job: Job, node: str) -> int:
    """Returns the number of attempts that ended because this node no longer answered."""
    return sum(each.lost_node == node for each in read_history(job.run_dir))


def stops(job: Job, attempts: int = 2) -> None:
    """Stops a job and waits for its end. Checks that the job's attempt number is between 2 and
    `attempts`.
    """
    assert 2 <= last_attempt(job.run_dir) <= attempts, job.history
    job.stop()
    assert job.wait(120).state is JobState.DONE


@pytest.mark.parametrize(
    ("how", "limit_s"), [*((how, 40.0) for how in WAYS), ("cut off", Recipe.hung_after_s)]
)
def test_lost_node_is_excluded_from_the_next_job(nodes, lose, hanging_job, is_full, how, limit_s):
    """The lost node does not return. Slurm marks the node as down only after minutes."""
    if limit_s > 40 and not is_full:
        pytest.skip("minutes long; `make faults` runs it")
    limit_s = limit_s if is_full else 5.0
    job = hanging_job(limit_s, num_nodes=3)
    at_step(job, 10)
    # The number is 2 if a node was slow to answer at the start.
    earlier = last_attempt(job.run_dir)
    number, start = scheduler_job(job).id, time.time()
    lose[how]("node2")
    requeued = event(job, "requeued", start, limit_s + 200)
    assert requeued.lost_node == "node2" and "node2 no longer answers" in requeued.reason
    resumed = event(job, "running", requeued.time)
    what = f"node {how}, hung_after_s {limit_s:g}"
    noticed = f"{what}: time until the failure is noticed"
    measured(noticed, requeued.time - start, note=requeued.reason)
    measured(f"{what}: {WITHOUT_NODE}", resumed.time - start, at_most=limit_s + 80)
    assert scheduler_job(job).id != number and "node2" not in nodes_of(nodes, job)
    assert nodes.node_states()["node2"].startswith("comp"), "Slurm still waits for it"
    # While the old job still runs, Slurm may give the lost node to the new job too. The new job
    # then ends at once, and the job after it excludes the node.
    assert last_attempt(job.run_dir) == earlier + times_lost(job, "node2"), job.history
    stops(job, attempts=earlier + 2)


def test_node_lost_before_first_start_is_excluded(nodes, hanging_job):
    """The node fails before the job starts. Slurm does not know this yet and allocates the node."""
    start = time.time()
    power_off(nodes, "node2")
    job = hanging_job(5.0, num_nodes=3)
    requeued = event(job, "requeued", start)
    assert requeued.lost_node == "node2" and "node2 no longer answers" in requeued.reason
    # The event may have a later step: on a busy machine several steps precede the first heartbeat.
    event(job, "running", requeued.time)
    took(f"node lost before the start: {WITHOUT_NODE}", start, note=requeued.reason)
    assert first_step(job) == 1 and "node2" not in nodes_of(nodes, job)
    assert last_attempt(job.run_dir) == 1 + times_lost(job, "node2"), job.history
    stops(job, attempts=3)


@pytest.mark.parametrize("node", ["node1", "node2"])
def test_stall_below_hung_after_s_loses_no_attempt(nodes, hanging_job, is_full, node):
    """The stalled node is either node1, on which the supervisor runs, or node2."""
    limit_s, stall_s = (Recipe.hung_after_s, 120) if is_full else (20.0, 10)
    job = hanging_job(limit_s, num_nodes=3)
    at_step(job, 10)
    with frozen(nodes, node):
        time.sleep(stall_s)
    state = read_state(job.run_dir)
    assert state
    at_step(job, (state.step or 0) + 10)
    time.sleep(5)
    what = f"{node} frozen for {stall_s} s, hung_after_s {limit_s:g}: number of lost attempts"
    lost = last_attempt(job.run_dir) - 1
    ROWS.append(row(what, lost, at_most=0))
    assert lost == 0
    job.stop()
    assert job.wait(120).state is JobState.DONE


@pytest.fixture
def forbid_sbatch_on_nodes(nodes):
    """Returns a function that lets Slurm accept submissions only from the host that submitted a
    given job.
    """

    def forbid(job):
        shown = nodes.run("scontrol", "show", "job", scheduler_job(job).id)
        (host,) = re.findall(r" AllocNode:Sid=(\S+):", shown)
        nodes.run("scontrol", "update", "PartitionName=batch", f"AllocNodes={host}")

    yield forbid
    nodes.run("scontrol", "update", "PartitionName=batch", "AllocNodes=ALL")


@pytest.mark.parametrize("submits", [True, False], ids=["no other node", "no sbatch on nodes"])
def test_job_waits_for_irreplaceable_lost_nodes(
    nodes, hanging_job, forbid_sbatch_on_nodes, is_full, submits
):
    """The lost nodes cannot be replaced, because there are no other nodes, or because Slurm allows
    only a requeue of the old job.
    """
    job = hanging_job(40.0 if is_full else 5.0, num_nodes=4)
    at_step(job, 10)
    if not submits:
        forbid_sbatch_on_nodes(job)
    number, start = scheduler_job(job).id, time.time()
    nodes.disconnect_node("node2")
    nodes.disconnect_node("node3")
    requeued = event(job, "requeued", start)
    assert requeued.lost_node == "node2,node3"
    assert "node2, node3 no longer answer" in requeued.reason
    gone = eventually(lambda: not processes(str(job.run_dir)), 60)
    assert gone, "a node that is cut off still runs a rank"
    assert eventually(lambda: "CG" in nodes.run("squeue", "--noheader", "--format=%t"), 30)
    assert job.state is JobState.REQUEUED and (scheduler_job(job).id != number) == submits
    for node in ("node2", "node3"):
        if not submits:
            # Reboots the node. The job number is the old one, so Slurm would confuse the new job
            # step with the old job step that still runs on the node.
            power_off(nodes, node)
        recover(nodes, node)
    back = time.time()
    # Slurm may lose the start of a job on a node that was just switched on, until the node
    # registers with the controller.
    event(job, "running", back, 300)
    # With the old job number, a returning node may end newer attempts because of older commands, or
    # may not answer for a moment. These attempts do not count.
    lost_again = sum(1 for found in job.history if found.lost_node and found.attempt > 1)
    stops(job, attempts=2 if submits else 4 + lost_again)


@pytest.fixture
def impatient(nodes):
    """Returns a function that sets the number of seconds without an answer after which Slurm marks
    a node as down.
    """
    with contextlib.ExitStack() as until_the_end:
        yield lambda seconds: until_the_end.enter_context(configured(nodes, SlurmdTimeout=seconds))


def supervisors(job: Job) -> set[int]:
    return {*processes("cluster.slurm.supervisor")} & {*processes(str(job.run_dir))}


@pytest.mark.parametrize(
    ("how", "patience_s"), [*((how, 60) for how in WAYS), ("switched off", 300)]
)
def test_slurm_requeues_job_after_loss_of_first_node(
    nodes, lose, hanging_job, impatient, is_full, how, patience_s
):
    """The supervisor runs on the first node. The supervisor is lost with the node, or waits on the
    node without a connection. The loss does not count as one of the job's restarts.
    """
    if patience_s == 300 and not is_full:
        pytest.skip("minutes long; `make faults` runs it")
    patience_s = patience_s if is_full else 20
    impatient(patience_s)
    job = hanging_job(40.0 if is_full else 5.0, num_nodes=3)
    at_step(job, 10)
    start = time.time()
    lose[how]("node1")
    resumed = event(job, "running", start, 2 * patience_s + 200)
    what = f"first node {how}, SlurmdTimeout {patience_s}: {WITHOUT_NODE}"
    measured(what, resumed.time - start, at_most=2 * patience_s + 60)
    assert "node1" not in nodes_of(nodes, job)
    if how == "cut off":
        assert eventually(lambda: len(supervisors(job)) == 1, 90), "the one that is cut off goes on"
    stops(job)


def test_follow_up_job_runs_after_supervisor_death(nodes, hanging_job, monkeypatch):
    """The supervisor dies between the submission of the follow-up job and the recording of its job
    number. The follow-up job takes over the run and does not wait for the old job.
    """
    job = hanging_job(40.0, num_nodes=4)
    at_step(job, 10)
    monkeypatch.setenv("KIT_FOLLOWS", f"{scheduler_job(job).id}/1")
    follower = slurm._sbatch(job.run_dir, "submit.sh")
    (supervisor,) = supervisors(job)
    event(job, "running", kill(supervisor))
    assert scheduler_job(job).id == follower
    stops(job)


def test_node_lost_twice_is_excluded(nodes, hanging_job):
    spare = "NodeName=node[3-4]"
    # The other nodes are drained. With spare nodes, the job would leave node2 after the first loss.
    nodes.run("scontrol", "update", spare, "State=drain", "Reason=spare")
    job = hanging_job(5.0, num_nodes=2)
    # An older command on a returning node may end a newer attempt, so the loss is repeated.
    for _ in range(4):
        assert eventually(lambda: running(job), 180), job.status()
        start = time.time()
        nodes.disconnect_node("node2")
        event(job, "requeued", start)
        recover(nodes, "node2")
        if slurm.lost_nodes(job.run_dir):
            break
    nodes.run("scontrol", "update", spare, "State=resume")
    start = time.time()
    assert slurm.lost_nodes(job.run_dir) == ["node2"]
    assert eventually(lambda: running(job), 180), job.status()
    found = nodes_of(nodes, job)
    what = "node lost in two attempts of a job: time until the job runs without the node"
    note = "the time begins when other nodes become available; the job needs 2 nodes and runs on"
    took(what, start, note=f"{note} {', '.join(found)}")
    assert "node2" not in found
    job.cancel()
    job.wait(30)


def test_time_limit_saves_and_requeues_the_job(sandbox, site, tmp_path):
    # Slurm checks time limits every 30 s, and signals jobs whose limit ends before the next check.
    # The signal must not come at the first check, because the shell of the job has not started yet.
    spec = standin(tmp_path / "limit", 350, 0.2, time_limit_s=60)
    job, start = submit(spec, with_slurm(site, stop_before_end_s=10)), time.time()
    stopped = event(job, "requeued", start, 90)
    assert "time limit is near" in stopped.reason
    resumed = event(job, "running", stopped.time)
    what = "time limit near, job saved and requeued: time until the job runs again"
    measured(what, resumed.time - stopped.time, at_most=60)
    saved = (stopped.step or 0) + 1
    assert resumed.step == saved, "no step is lost and none is done twice"
    job.stop()
    assert job.wait(60).state is JobState.DONE


@pytest.fixture
def started(site, tmp_path):
    """A running job of four ranks."""
    job = submit(standin(tmp_path / "run", 300), site)
    at_step(job, 10)
    return job


def test_scancel_ends_job_and_all_its_processes(started):
    start = time.time()
    started.cancel()
    status = started.wait(30)
    what = "scancel: time until the status reports the end"
    took(what, start, at_most=15, note=status.reason)
    found = (status.state, status.exit_code, status.reason)
    assert found == (JobState.FAILED, 143, "cancelled (scancel)")
    assert eventually(lambda: not processes(f"{STANDIN}\0{started.run_dir}"))


def test_status_explains_a_job_that_cannot_start(sandbox, site, tmp_path):
    failed = sandbox.run("sbatch", "--parsable", "--output=/dev/null", "--wrap=false").strip()
    after = with_slurm(site, sbatch_options=(f"--dependency=afterok:{failed}",))
    start = time.time()
    job = submit(standin(tmp_path / "hopeless"), after)
    assert eventually(lambda: "will not start" in job.status().reason, 60), job.status()
    reason = job.status().reason
    what = "job that can never start: time until the status shows the reason"
    took(what, start, at_most=20, note=reason)
    assert job.state is JobState.QUEUED
    assert "DependencyNeverSatisfied" in reason and "Cancel it" in reason
    job.cancel()
    assert job.wait(30).state is JobState.FAILED


def test_supervisor_death_is_known_without_accounting(started):
    (supervisor,) = supervisors(started)
    start = kill(supervisor)
    status = started.wait(60)
    what = "supervisor killed, Slurm without accounting: time until the status reports the end"
    took(what, start, at_most=60, note=status.reason)
    assert status.state is JobState.FAILED and status.reason.startswith("Slurm: FAILED")
    assert eventually(lambda: not processes(f"{STANDIN}\0{started.run_dir}"), 60)


def test_job_and_status_survive_controller_restart(sandbox, site, tmp_path):
    job = submit(standin(tmp_path / "restart", 80, 0.2), site)
    at_step(job, 10)
    off = sandbox.path("run", "controller.off")
    off.touch()
    os.kill(int(sandbox.path("run", "slurmctld.pid").read_text()), signal.SIGTERM)
    threading.Timer(10, off.unlink).start()
    start, waits_s = time.time(), []
    while time.time() - start < 12:
        asked = time.monotonic()
        assert job.state in (JobState.RUNNING, JobState.STARTING)
        waits_s.append(time.monotonic() - asked)
        time.sleep(0.2)
    assert job.wait(60).state is JobState.DONE and last_attempt(job.run_dir) == 1
    what = "Slurm controller restarted: longest wait for a status"
    note = "the job was not affected"
    measured(what, max(waits_s), at_most=25, note=note)


def test_node_local_checkpoint_directory_is_refused(nodes, site, tmp_path):
    """A node-local checkpoint directory makes the job fail before any rank starts."""
    run_dir = tmp_path / "local"
    run_dir.mkdir()
    (run_dir / "checkpoints").symlink_to(nodes.path("scratch"))
    start = time.time()
    status = submit(standin(run_dir), site).wait(60)
    note = status.reason.replace(f"{tmp_path}/", "")
    what = "checkpoint directory that is local to a node: time until the job fails"
    took(what, start, at_most=30, note=note)
    assert status.state is JobState.FAILED and "not a shared directory" in status.reason
    assert not list((run_dir / "logs").glob("attempt*/*"))


def test_launches_leave_no_process(sandbox, site, tmp_path, is_full):
    start, count = time.time(), 20 if is_full else 5
    for number in range(count):
        job = submit(standin(tmp_path / f"run{number}", 1, 0.01), site)
        assert job.wait(60).state is JobState.DONE
    what = f"{count} jobs of 4 ranks on 4 nodes, one after the other: time of all jobs"
    took(what, start, note="no process is left")
    assert eventually(lambda: not processes(str(tmp_path)), 60)


# With the real trainer ----------------------------------------------------------------------------


@pytest.mark.thorough
def test_loss_after_kill_and_preemption_is_unchanged(sandbox, site, spec, recipe, tmp_path):
    """The job has two nodes with two ranks each. First a rank is killed, then the job is preempted.
    The run resumes both times.

    The losses equal the losses of an uninterrupted local run. The parts of the goodput ledger add
    up to the total.
    """
    recipe = recipe.replace(num_steps=50, checkpoint_every=10)
    unbroken = kit.launch(tmp_path / "unbroken", spec=spec, plan=DP4, recipe=recipe)
    assert unbroken.job.wait(300).state is JobState.DONE, unbroken.job.logs()
    run = kit.launch(tmp_path / "broken", spec=spec, plan=DP4, recipe=recipe, site=site)
    at_step(run.job, 15)
    start = kill(rank_process(run.job, 3))
    what = "training, a rank is killed: time until the first step of the next attempt"
    note = "includes the start of 4 ranks"
    measured(what, event(run.job, "running", start).time - start, note=note)
    at_step(run.job, 30)
    start = time.time()
    occupy(sandbox, 2, partition="urgent")
    preempted = event(run.job, "preempted", start)
    what = "training, the job is preempted: time until the checkpoint is written"
    measured(what, preempted.time - start, at_most=20, note=preempted.reason)
    status = run.job.wait(300)
    assert (status.state, status.attempt) == (JobState.DONE, 3), run.job.history
    ours, theirs = run.metrics(), unbroken.metrics()
    assert ours["step"].tolist() == theirs["step"].tolist() == list(range(1, 51))
    assert sorted(set(ours["attempt"].tolist())) == [1, 2, 3]
    np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-6)
    difference = float(np.abs(ours["loss"] / theirs["loss"] - 1).max())
    what = "training, after kill and preemption: largest relative difference from the losses of an"
    what += " uninterrupted run"
    ROWS.append(row(what, difference, at_most=1e-6))
    spent, history = ledger(run), read_history(run.directory)
    whole_s = history[-1].time - history[0].time
    assert spent.wall_s == pytest.approx(whole_s, rel=1e-6) and spent.idle_s == 0
    parts = spent.seconds
    costs = ("repeated", "start-up", "lost", "waiting", "checkpoints")
    assert all(parts[part] > 0 for part in costs), parts
    assert 0 < spent.goodput < 1
    assert parts["productive"] == pytest.approx(ours["step_time_s"].sum(), rel=0.5)


@pytest.mark.thorough
def test_disk_full_during_a_save_keeps_old_checkpoint(
    nodes, small_disk, site, spec, recipe, tmp_path
):
    """tests/test_train.py tests a full disk on one machine. test_slurm.py tests that Slurm does not
    restart a job after exit code 78.
    """
    plan = DP4.replace(data_parallel=2, global_batch_size=2)
    folder, filler = small_disk / "checkpoints", small_disk / "filler"
    folder.mkdir()
    endless = recipe.replace(num_steps=100_000)
    run = new_run(tmp_path / "full", spec=spec, plan=plan, recipe=endless, site=site)
    run.checkpoints.directory.symlink_to(folder)
    submit(launcher.job_spec(run), site)
    try:
        assert eventually(lambda: run.checkpoints.steps(), 120), run.job.logs()
        start = time.time()
        with pytest.raises(OSError, match="No space left"), filler.open("wb") as stream:
            while True:
                stream.write(bytes(1 << 16))
                stream.flush()
        status = run.job.wait(120)
        what = "disk full during a checkpoint: time until the status reports the failure"
        took(what, start, note=status.reason.replace(f"{tmp_path}/", ""))
        assert status.state is JobState.FAILED and "o space left" in status.reason, status
        assert status.attempt == 1, "trying again would end the same way"
        newest = run.checkpoints.steps()[-1]
        assert run.checkpoints.manifest(newest).step == newest
        filler.unlink()
        load_model(run, newest)
    finally:
        run.job.cancel()
        shutil.rmtree(folder, ignore_errors=True)


def test_earlier_tests_left_no_process(tmp_path_factory):
    """Only processes in the folders of this test session are checked, because other tests may run
    at the same time in other folders.
    """
    folder = tmp_path_factory.getbasetemp()
    assert not processes(f"{STANDIN}\0{folder}")
    assert not processes(f"kit.train\0--run\0{folder}")
