"""Jobs on a real Slurm with simulated nodes: life cycle, status, logs, attaching from another
process, special characters, and errors.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import nbformat
import pytest
from typer.testing import CliRunner

from cluster import poll, slurm
from cluster.poll import Poller, SchedulerAnswer
from cluster.record import ConfigError
from cluster.render import scripts
from cluster.sandbox import Sandbox, why_not
from cluster.scheduler import Broadcast, Compilation
from cluster.site import Site
from cluster.slurm import inventory, preflight, reasons
from cluster.slurm import queries as slurm_queries
from cluster.slurm.queries import slurm_command
from cluster.state import JobError, JobState, SchedulerJob, read_exit
from cluster.submission import submit
from kit.cli.app import app
from tests.cluster.conftest import be_client
from tests.cluster.jobs import job_spec, occupy, scheduler_job, standin, with_slurm
from tests.cluster.shell import WORDS, programs
from tests.support.waiting import eventually

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "03_launch_jobs.ipynb"


def test_job_runs_from_queued_to_done(sandbox, site, tmp_path):
    """Checked: the states of the job, logs of all ranks, history, exit report and `follow`."""
    job = submit(standin(tmp_path / "run", num_processes=8, num_nodes=4), site)
    assert job.state in (JobState.QUEUED, JobState.CONFIGURING, JobState.STARTING)
    assert job.wait(60).state is JobState.DONE
    report = read_exit(job.run_dir)
    assert report is not None and (report.rc, report.attempt, report.host) == (0, 1, "node1")
    for rank in range(8):
        assert job.logs(rank) == f"attempt 1 rank {rank} from step 0\n"
    assert [event.state for event in job.history] == ["queued", "starting", "running", "done"]
    assert {event.job_id for event in job.history[1:]} == {scheduler_job(job).id}
    assert list(job.follow(3)) == ["attempt 1 rank 3 from step 0"]


@pytest.mark.parametrize("last", ["exec sleep 60", "echo Socket timed out >&2; exit 1"])
def test_job_runs_once_after_lost_sbatch_answer(sandbox, site, tmp_path, monkeypatch, last):
    """sbatch submits the job. Then it hangs, or reports that the controller did not answer.

    The error says that Slurm may have accepted the job. A second launch submits a second job, and
    only one of the two jobs runs.
    """
    sbatch, run_dir = shutil.which("sbatch"), tmp_path / "run"
    spec = standin(run_dir, 5)
    assert submit(spec, site).wait(60).state is JobState.DONE
    sandbox.run("scontrol", "update", "NodeName=ALL", "State=drain", "Reason=test")
    fakes = programs(tmp_path / "bin", {"sbatch": f'{sbatch} "$@" >&2; {last}'})
    told = rf"timed out.*been accepted.*squeue --me.*for {run_dir}, and `scancel`"
    with monkeypatch.context() as silent:
        silent.setenv("PATH", f"{fakes}:{os.environ['PATH']}")
        silent.setattr(slurm, "SUBMIT_TIMEOUT_S", 2.0)
        with pytest.raises(JobError, match=told):
            submit(spec, site)
    job = submit(standin(run_dir, 60), site)
    waiting = sandbox.run("squeue", "--noheader", "--format=%i %Z").splitlines()
    assert len(waiting) == 2 and all(str(run_dir) in line for line in waiting)
    sandbox.run("scontrol", "update", "NodeName=ALL", "State=resume")
    assert job.wait(60).attempt == 2 and job.state is JobState.DONE
    refused = [log for log in run_dir.glob("logs/slurm-*.log") if "belongs to" in log.read_text()]
    assert len(refused) == 1, "nothing was started by the other"


def test_job_is_reattached_and_stopped_from_other_shell(sandbox, site, tmp_path, monkeypatch):
    """The job is attached in another shell, which has no variable SLURM_CONF. The path of
    slurm.conf is read from the run directory.
    """
    job = submit(standin(tmp_path / "run", 500), site)
    assert eventually(lambda: job.state is JobState.RUNNING)
    code = f"""
from cluster.job import Job
job = Job.attach({str(job.run_dir)!r})
now = job.status()
print(now.state, 'does not answer' in now.reason)
job.stop()"""
    with monkeypatch.context() as elsewhere:
        elsewhere.delenv("SLURM_CONF")
        words = [sys.executable, "-c", code]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert said == "running False\n"
    status = job.wait(30)
    assert status.state is JobState.DONE and "stopped on request at step" in status.reason


def test_queued_job_shows_reason_and_can_be_cancelled(sandbox, site, tmp_path):
    occupy(sandbox, 600)
    job = submit(standin(tmp_path / "run"), site)
    whys = ("Resources", "Priority")
    assert eventually(lambda: any(why in job.status().reason for why in whys)), job.status()
    assert job.state is JobState.QUEUED
    job.cancel()
    assert job.wait(30).reason == "cancelled while it waited"


def test_requeue_makes_the_next_attempt(sandbox, site, tmp_path):
    """A requeue of a running job keeps the job number. An ended job is submitted again under a new
    number. A submission into a run directory in use is refused.
    """
    spec = standin(tmp_path / "run", 100)
    job = submit(spec, site)
    with pytest.raises(JobError, match="in use"):
        submit(spec, site)
    assert eventually(lambda: job.state is JobState.RUNNING and (job.status().step or 0) > 5)
    number = scheduler_job(job).id
    job.requeue()
    status = job.wait(60)
    assert (status.state, status.attempt, scheduler_job(job).id) == (JobState.DONE, 2, number)
    assert "requeued" in [event.state for event in job.history]
    job.requeue()
    assert job.wait(60).attempt == 3 and job.logs(0) == "attempt 3 rank 0 from step 100\n"


def test_job_ends_when_its_directory_is_deleted(sandbox, site, tmp_path):
    """After its run directory was deleted, the job does not create the directory again."""
    job = submit(standin(tmp_path / "run", 6000), site)
    assert eventually(lambda: job.state is JobState.RUNNING)
    # Deletion may fail at first, because the job still writes into the directory.
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    assert eventually(lambda: not sandbox.run("squeue", "--noheader").strip(), 60)
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    assert not (tmp_path / "run").exists()


def test_first_failing_rank_gives_exit_code_and_reason(sandbox, site, tmp_path):
    """A rank that ends with code 78 (configuration error) is not restarted, even after a training
    step, because the restart would fail again.
    """
    code = f"""
import os, pathlib, sys, time
from cluster.state import update_state
if os.environ['RANK'] == '2':
    update_state(pathlib.Path({str(tmp_path / "run")!r}), attempt=1, state='running', step=1)
    print('no <such> thing', file=sys.stderr)
    sys.exit(os.EX_CONFIG)
time.sleep(600)"""
    job = submit(job_spec(tmp_path / "run", sys.executable, "-c", code), site)
    status = job.wait(60)  # The supervisor ends the other ranks, so the wait is short.
    assert (status.state, status.exit_code, status.attempt) == (JobState.FAILED, 78, 1)
    assert status.reason == "rank 2 on node3 ended with code 78: no <such> thing"

    def shown():  # The job state is COMPLETING until all nodes have cleaned up.
        return sandbox.run("scontrol", "show", "job", scheduler_job(job).id)

    assert eventually(lambda: "JobState=FAILED" in shown())
    assert "ExitCode=78:0" in shown(), "Slurm knows the truth too"


def test_packed_environment_is_broadcast_to_each_node(sandbox, site, tmp_path):
    """A job on 65 nodes gives an error that advises a command. The command packs the virtual
    environment. Keepers and ranks then run from the local disk of their node.
    """
    venv, run_dir = tmp_path / "venv", tmp_path / "run"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", venv], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    told = "import os\nprint(__file__, os.environ['SLURMD_NODENAME'])\n"
    (packages / "packed.py").write_text(told)
    python, words = str(venv / "bin" / "python"), ("-c", "import packed")
    with pytest.MonkeyPatch.context() as here:
        here.setattr(sys, "executable", python)
        with pytest.raises(ConfigError, match="65 nodes would all read.*Above 64 nodes") as refused:
            preflight.check(job_spec(run_dir, python, *words, num_processes=65), site)
    subprocess.run(str(refused.value).split("`")[1], shell=True, cwd=tmp_path, check=True)
    shutil.rmtree(venv)
    scratch = sandbox.path("scratch") if sandbox.isolated else tmp_path / "disk"
    disk, archive = f"{scratch}/$SLURMD_NODENAME", str(tmp_path / "environment.tar")
    packed = with_slurm(site, broadcast=Broadcast(directory=disk, archive=archive))
    sent = submit(job_spec(run_dir, "python", *words), packed)
    assert sent.wait(60).state is JobState.DONE, sent.status()
    for rank in range(4):
        file, node = sent.logs(rank).split()
        assert node == f"node{rank + 1}" and file.startswith(str(scratch))
        assert "site-packages/packed.py" in file


def test_special_characters_reach_ranks_unchanged(sandbox, site, tmp_path, monkeypatch):
    """Secrets in the submitting shell's environment reach the job, but are written to no file.
    Slurm variables of the submitting shell do not change the job.
    """
    habits = {"SQUEUE_FORMAT": "%j", "SBATCH_PARTITION": "absent", "SLURM_JOB_ID": "7"}
    for name, value in {**habits, "HF_TOKEN": "hf_veryS3cret"}.items():
        monkeypatch.setenv(name, value)
    code = """
import json, os, sys
token = os.environ['HF_TOKEN'][::-1]
print(json.dumps([sys.argv[1:], os.environ['ODD'], os.environ['RANK'], os.getcwd(), token]))"""
    run_dir, odd = tmp_path / 'it\'s $(touch canary)\n`x` é "q" * ;&|', "\r\n\u202e".join(WORDS)
    run_dir.mkdir()
    where = {"num_nodes": 2, "working_directory": str(run_dir), "environment": {"ODD": odd}}
    name = " ".join(word for word in WORDS if word.isprintable())
    argv = (sys.executable, "-c", code, *WORDS, "")
    job = submit(job_spec(run_dir, *argv, name=name, **where), site)
    assert job.wait(120).state is JobState.DONE, job.status()
    for rank in range(4):
        found = [[*WORDS, ""], odd, str(rank), str(run_dir), "terc3Syrev_fh"]
        assert json.loads(job.logs(rank)) == found
    assert not list(tmp_path.rglob("canary*")) and not Path("canary").exists()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not [path for path in files if b"veryS3cret" in path.read_bytes()]


@pytest.mark.parametrize(
    "name", ["frontier", "generic-gpu-slurm", "lumi", "perlmutter", "trn1.32xlarge"]
)
def test_slurm_accepts_the_directives_of_each_site(sandbox, tmp_path, name):
    # The simulated nodes have no accounts, features or GPU types, and fewer cores than the site's
    # nodes.
    site = with_slurm(Site.load(name), **dict.fromkeys(("account", "qos", "constraint")))
    gpus = site.slurm.gpus_per_node
    gpus = gpus and gpus.rpartition(":")[2]
    site = with_slurm(site, partition="batch", cpus_per_task=1, gpus_per_node=gpus)
    (tmp_path / "logs").mkdir()
    job = job_spec(tmp_path, "true", num_processes=2, time_limit_s=3600)
    for file_name, text in scripts(job, site).items():
        (tmp_path / file_name).write_text(text)
        words = ["sbatch", "--test-only", file_name]
        tested = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert tested.returncode == 0 and "to start at" in tested.stderr, tested.stderr


def test_torchrun_agents_start_the_ranks_of_their_node(sandbox, site, tmp_path):
    """Jobs on Trainium use torchrun. The agents on both nodes find each other. Each rank has its
    rank number and log, and ignores SIGTERM.
    """
    code = """
import os, signal
names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE')
print(*(os.environ[name] for name in names), signal.getsignal(signal.SIGTERM) is signal.SIG_IGN)"""
    spec = job_spec(tmp_path / "run", sys.executable, "-c", code, num_nodes=2)
    job = submit(spec, with_slurm(site, launcher="torchrun"))
    assert job.wait(120).state is JobState.DONE, job.status()
    told = [job.logs(rank) for rank in range(4)]
    assert told == [f"{rank} {rank % 2} 4 2 True\n" for rank in range(4)]


def test_run_waits_for_compile_job_and_uses_its_cache(sandbox, site, tmp_path):
    code = """
import os, pathlib
graph = pathlib.Path(os.environ['CACHE']) / 'graph'
graph.write_text('compiled') if 'COMPILING' in os.environ else print(graph.read_text(), graph)"""
    places = {"shared_cache": str(tmp_path / "shared"), "node_cache": str(tmp_path / "disk")}
    compilation = Compilation(command=("env", "COMPILING=1"), variable="CACHE", **places)
    # The job has one node. All simulated nodes share a disk, so two nodes would copy into one
    # folder at the same time.
    spec = job_spec(tmp_path / "run", sys.executable, "-c", code, num_processes=2, num_nodes=1)
    job = submit(spec, with_slurm(site, compilation=compilation))
    assert job.wait(120).state is JobState.DONE, job.status()
    assert job.logs(0) == f"compiled {tmp_path}/disk/graph\n"


@pytest.mark.parametrize(
    ("changes", "partition", "error", "message"),
    [
        ({"argv": ("no-such-program",)}, "batch", ConfigError, "no-such-program.*not an exec"),
        ({"run_dir": "/dev/shm/run"}, "batch", ConfigError, "memory of this one machine"),
        ({"num_nodes": 9, "num_processes": 9}, "batch", ConfigError, "'batch' has 4.*sinfo"),
        ({"num_nodes": 2, "time_limit_s": 7200}, "debug", ConfigError, "gives at most 1800"),
        ({}, "batchh", JobError, "invalid partition"),  # The last field is Slurm's error text.
    ],
)
def test_refused_submission_writes_nothing(
    sandbox, site, tmp_path, changes, partition, error, message
):
    with pytest.raises(error, match=message):
        submit(standin(tmp_path / "run").replace(**changes), with_slurm(site, partition=partition))
    assert not (tmp_path / "run").exists()


def slurm_job(number, **more):
    return SchedulerJob(scheduler="slurm", id=str(number), **more)


def all_running(jobs):
    return {job.id: SchedulerAnswer(state=JobState.RUNNING, reason=str(job)) for job in jobs}


def test_poller_batches_and_caches_scheduler_queries():
    asked = []

    def ask(jobs):
        asked.append(len(jobs))
        return all_running(jobs)

    poller = Poller(ask)
    poller.interval_s = 0.3
    jobs = [slurm_job(number) for number in range(50)]
    for job in 20 * jobs:
        assert poller.answer(job).reason == str(job)
    assert len(asked) <= 50, "the first look of each job may ask"
    before = len(asked)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        poller.answer(jobs[0])
        time.sleep(0.001)
    assert 1 <= len(asked) - before <= 4 and asked[-1] == 50


def test_hanging_scheduler_does_not_delay_another(monkeypatch):
    monkeypatch.setattr(poll, "ANSWER_WAIT_S", 0.2)
    asked, over = [], threading.Event()

    def ask(jobs):
        asked.append([job.config for job in jobs])
        if jobs[0].config == "gone":
            over.wait(60)
        return all_running(jobs)

    poller = Poller(ask)
    gone, here = (slurm_job(1, config=config) for config in ("gone", "here"))
    assert "has not answered yet" in poller.answer(gone).reason
    assert poller.answer(here).reason == str(here), "though the other is still being asked"
    assert asked == [["gone"], ["here"]]
    over.set()


@pytest.mark.parametrize("deaf", [("squeue", "scontrol", "sacct"), ("scontrol", "sacct")])
def test_job_is_not_lost_if_slurm_cannot_be_queried(monkeypatch, deaf):
    def answer(words, *_, **__):
        if words[0] in deaf:
            raise JobError(f"{words[0]}: Unable to contact slurm controller")
        return ""

    monkeypatch.setattr(slurm_queries, "slurm_command", answer)
    look = Poller(slurm.query).answer(slurm_job(1))
    assert look.state is None, "else it would be sent a second time"
    assert f"slurm does not answer: {deaf[0]}: Unable to contact" in look.reason


def test_accounting_without_end_time_reads_as_stopping(monkeypatch):
    """Slurm's accounting database has no end time for job 1 yet, so the exit code of the job is not
    final.
    """
    ended = "2026-11-23T22:33:01"
    rows = {"1": "FAILED|0:0|Unknown", "2": f"FAILED|3:0|{ended}", "3": "RUNNING|0:0|Unknown"}

    def answer(words, *_, **__):
        if words[0] == "scontrol":
            raise JobError("slurm_load_jobs error: Invalid job id specified")
        found = [row for number, row in rows.items() if f"--jobs={number}" in words[1:]]
        return "".join(f"{row}\n" for row in found)

    monkeypatch.setattr(slurm_queries, "_squeue", lambda ids, config: ({}, ""))
    monkeypatch.setattr(slurm_queries, "slurm_command", answer)
    found = slurm.query([slurm_job(number) for number in rows])
    told = [(each.state, each.exit_code) for each in found.values()]
    assert told == [(JobState.STOPPING, None), (JobState.FAILED, 3), (JobState.RUNNING, None)]


def test_sandbox_avoids_the_network_of_another(sandbox, tmp_path_factory):
    if not sandbox.isolated:
        pytest.skip("only isolated nodes have a network of their own")
    wanted = sandbox.values()["network"]

    def would_take_it(root):
        return Sandbox(root=str(root), isolated=True).values()["network"] == wanted

    folder = tmp_path_factory.mktemp("s")
    root = next(filter(would_take_it, (folder / f"sandbox-{n}" for n in range(100_000))))
    other = Sandbox.start(root)
    try:
        # a later network, if the next one is in use too
        assert other.shift and other.values()["network"] != wanted
        assert Sandbox.find(root) == other.replace(was_running=True)
        for each in (sandbox, other):
            assert set(each.node_states().values()) == {"idle"}
    finally:
        other.stop()


@pytest.fixture
def start_sandbox(tmp_path_factory):
    """Returns a function that starts a Slurm sandbox (simulated cluster) in a separate folder. Its
    path is short, since Slurm makes sockets in it. The sandbox is stopped after the test.
    """
    started = []

    def start(**how):
        if reason := why_not(accounting=how.get("accounting", False)):
            pytest.skip(reason)
        started.append(Sandbox.start(tmp_path_factory.mktemp("s") / "sandbox", **how))
        return started[-1]

    yield start
    for sandbox in started:
        sandbox.stop()


def test_sandbox_without_namespaces_runs_a_job(start_sandbox, tmp_path, monkeypatch):
    """A second start finds the running sandbox. `stop` removes the folder of the sandbox."""
    sandbox = start_sandbox(num_nodes=2, isolated=False)
    assert sandbox.node_states() == {"node1": "idle", "node2": "idle"}
    again = Sandbox.start(sandbox.root)
    assert again == sandbox.replace(was_running=True), "a second start finds the first"
    assert again.was_running and not sandbox.was_running
    be_client(sandbox, monkeypatch)
    job = submit(standin(tmp_path / "run", num_nodes=2), Site.load(sandbox.site_file))
    assert job.wait(60).state is JobState.DONE
    sandbox.stop()
    assert not Path(sandbox.root).exists() and Sandbox.find(sandbox.root) is None


def test_notebook_03_leaves_the_users_sandbox_running(start_sandbox, monkeypatch):
    mine = start_sandbox(num_nodes=2, isolated=False)
    monkeypatch.setattr("cluster.sandbox.default_root", lambda: Path(mine.root))
    cells = {cell.id: cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells}
    names: dict = {}
    job = occupy(mine, 600, num_nodes=2)
    eventually(lambda: mine.run("squeue", "--noheader", "--format=%T").strip() == "RUNNING")
    try:
        for cell in ("parameters", "imports", "start-sandbox"):
            exec(cells[cell], names)
        occupy(names["sandbox"], 0, partition="urgent")
        exec(cells["stop-sandbox"], names)
        left = Sandbox.find()
        assert left, "the user's sandbox has ended"
        assert left.run("squeue", "--noheader", "--format=%i %T").split() == [job, "RUNNING"]
        folders = [path.name for path in Path(mine.root).parent.iterdir()]
        assert folders == ["sandbox"], "the notebook's own sandbox has gone"
    finally:
        if "sandbox" in names:
            names["sandbox"].stop()


@pytest.mark.slow
def test_accounting_is_used_for_purged_jobs(start_sandbox, tmp_path, monkeypatch):
    sandbox = start_sandbox(num_nodes=1, accounting=True)
    be_client(sandbox, monkeypatch)
    words = (sys.executable, "-c", "import sys; sys.exit(3)")
    job = submit(job_spec(tmp_path / "run", *words, num_processes=1), Site.load(sandbox.site_file))
    assert job.wait(60).exit_code == 3
    this = scheduler_job(job)
    monkeypatch.setattr(slurm_queries, "_squeue", lambda jobs, config: ({}, ""))
    monkeypatch.setattr(slurm_queries, "_show", lambda job, config: {})

    def found():
        return slurm.query([this])[this.id]

    assert eventually(lambda: found().state is JobState.FAILED)
    assert found().exit_code == 3 and "FAILED" in found().reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"modules": ("python/9.99",)}, "the module python/9.99 cannot be loaded: .*not found"),
        (
            {"setup": ("true", "source /nowhere/activate nosuchenv")},
            "setup: source /nowhere/activate nosuchenv failed with code 1: .*No such file",
        ),
        ({"setup": ("exit 0",)}, "setup: exit 0 ended the shell with code 0"),
        (
            {"task_setup": ('[ "$RANK" != 1 ] || nosuchcommand',)},
            "rank 1 on node2 ended with code 1: task_setup: .* code 127: .*command not found",
        ),
        (
            {"task_setup": ("cd /nowhere && true",), "launcher": "torchrun"},
            "rank [01] on node[12] ended with code 1: task_setup: cd /nowhere .*No such file",
        ),
        ({"srun_options": ("--no-such-option",)}, "srun: .*no-such-option"),
    ],
    ids=["module", "setup", "exit", "task", "agent", "srun"],
)
def test_failure_before_the_first_rank_has_a_reason(
    sandbox, site, tmp_path, monkeypatch, changes, words
):
    run_dir = tmp_path / "run"
    job = submit(
        standin(run_dir, num_processes=2).replace(max_restarts=0), with_slurm(site, **changes)
    )
    status = job.wait(60)
    assert status.state is JobState.FAILED
    assert re.search(f"{words}[^:]*$", status.reason), status.reason
    file, text = job.find_logs(rank := 1)
    shown = CliRunner().invoke(app, ["logs", str(run_dir), "--rank", str(rank)])
    assert text and text == job.logs(rank) and text in shown.output
    assert file in shown.output.replace("\n", "") or "rank_00001.log" in file


def test_failure_of_the_compile_job_has_a_reason(sandbox, site, tmp_path):
    places = {"shared_cache": str(tmp_path / "shared"), "node_cache": str(tmp_path / "disk")}
    compilation = Compilation(command=("env", "COMPILING=1"), variable="CACHE", **places)
    code = "import sys; sys.exit('no compiler')"
    spec = job_spec(tmp_path / "run", sys.executable, "-c", code, num_processes=2, num_nodes=1)
    job = submit(spec, with_slurm(site, compilation=compilation))
    status = job.wait(60)
    assert status.state is JobState.FAILED and status.reason.endswith(": no compiler"), status


REASONS = Path(__file__).with_name("slurm_reasons.txt")


def test_every_slurm_pending_reason_is_explained():
    """All pending reasons in Slurm's source are tested. The reasons are grouped by the descriptions
    in Slurm's documentation.
    """
    verdict, names = "", 0
    for line in REASONS.read_text().splitlines():
        if line.startswith("["):
            verdict = line.strip("[]")
        elif line and not line.startswith("#"):
            names += 1
            family = reasons.family_of(line)
            assert family and family.verdict == verdict, line
            said = reasons.why_it_waits(line, "7")
            assert line in said and ("will not start" in said) == (verdict != "waits"), said
    assert names > 200
    details = "ReqNodeNotAvail, UnavailableNodes:node[1-2]"
    assert reasons.why_it_waits(details, "7").startswith(f"waits: {details} (its nodes are down")
    assert reasons.why_it_waits("JobHeldUser", "7").endswith("`scontrol release 7` lets it go.")
    assert reasons.why_it_waits("NewReason", "7") == "waits: NewReason"


BANNER = "INFO: maintenance on Monday | see https://status\n\n#### cluster: big ####"


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_stray_lines_of_slurm_commands_are_ignored(sandbox, site, tmp_path, monkeypatch, last):
    """Each Slurm command prints a banner to standard output, as wrappers of some sites do."""
    real = {name: shutil.which(name) for name in "sbatch squeue scontrol sacct sinfo".split()}
    printed = f"cat <<'END'\n{BANNER}\nEND"
    call = '{} "$@"; code=$?; [ $code = 0 ] || exit $code'
    lines = [(call.format(path), printed) for path in real.values()]
    texts = ["\n".join(pair if last else pair[::-1]) for pair in lines]
    fakes = programs(tmp_path / "bin", dict(zip(real, texts, strict=True)))
    words = ("bash", "-c", "echo $MASTER_ADDR; sleep 600")
    with monkeypatch.context() as wrapped:
        wrapped.setenv("PATH", f"{fakes}:{os.environ['PATH']}")
        assert {
            nodes.partition
            for nodes in inventory.parse_node_types(slurm_command([*inventory.SINFO]))
        }
        job = submit(job_spec(tmp_path / "run", *words), with_slurm(site, partition="batch"))
        assert eventually(lambda: job.logs(0) or job.state.is_final), job.status()
        assert job.logs(0) == "node1\n" and job.state is JobState.STARTING
        job.cancel()
        status = job.wait(60)
        assert status.state is JobState.FAILED and "scancel" in status.reason


def test_foreign_output_of_squeue_is_reported(monkeypatch):
    said = {"squeue": "Maintenance on Monday", "scontrol": "Maintenance on Monday", "sacct": ""}
    monkeypatch.setattr(slurm_queries, "slurm_command", lambda words, *_, **__: said[words[0]])
    with pytest.raises(JobError, match="squeue printed 'Maintenance on Monday'"):
        slurm.query([slurm_job(7)])
