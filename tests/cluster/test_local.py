"""The local launcher with real processes: start, end, failure, kill, attaching from another
process, and cleanup.
"""

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster import local
from cluster.job import Job, JobSpec
from cluster.record import ConfigError
from cluster.state import (
    JobError,
    JobState,
    last_attempt,
    read_exit,
    read_state,
    update_state,
    write_request,
)
from cluster.status import read_status
from cluster.submission import submit
from tests.cluster.jobs import LAPTOP, job_spec, supervisor
from tests.support.waiting import eventually, processes

ROOT = Path(local.__file__).parents[2]
SLEEP = "import time; time.sleep(600)"
PRINT_AND_SLEEP = f"print('up', flush=True)\n{SLEEP}"
FAST = [sys.executable, "-S", "-c"]
DONE, FAILED = JobState.DONE, JobState.FAILED


@pytest.fixture(autouse=True)
def mark(monkeypatch):
    """Sets an environment variable that all processes started by a test inherit. After the test,
    checks that no process with this variable is left.
    """
    text = f"CLUSTER_TEST={uuid.uuid4()}"
    monkeypatch.setenv(*text.split("="))
    yield text
    eventually(lambda: not processes("", text))
    left_behind = processes("", text)
    for pid in left_behind:
        os.kill(pid, signal.SIGKILL)
    assert not left_behind


def spec(run_dir, code, num_processes=2, **changes):
    fields = {"name": "test", "grace_s": 2.0, "working_directory": "/", **changes}
    return JobSpec(run_dir=str(run_dir), argv=(*FAST, code), num_processes=num_processes, **fields)


@pytest.fixture
def launch(tmp_path):
    """Returns a function that submits a job with two ranks, which run the given Python code. The
    run directory is `tmp_path`.
    """
    return lambda code, *size, **changes: submit(spec(tmp_path, code, *size, **changes), LAPTOP)


@pytest.fixture
def until_go(tmp_path):
    """Python code of a rank. The rank waits until the file `go` exists in the run directory."""
    return (
        f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.02)\n"
    )


def printed(job, rank=0):
    """Waits until the log of a rank has a first line, and returns the line."""
    return eventually(lambda: (job.logs(rank) or "").partition("\n")[0])


def test_successful_job_gives_ranks_their_environment(tmp_path, launch, monkeypatch):
    """Checked for each rank: environment variables, working directory, log, and empty standard
    input.
    """
    for name, value in {"FROM_CALLER": "kept", "RANK": "99", "OMP_NUM_THREADS": "3"}.items():
        monkeypatch.setenv(name, value)
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR KIT_ATTEMPT FROM_CALLER"
    names += " OMP_NUM_THREADS WINS TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    code = f"""
import os, sys
print(*(os.environ[n] for n in '{names}'.split()))
print(os.environ['MASTER_PORT'])
print('err', os.getcwd(), sys.stdin.read() == '', file=sys.stderr)"""
    job = launch(code, 3, environment={"WINS": "yes"}, working_directory=str(tmp_path))
    status = job.wait(20)
    assert (status.state, status.exit_code, status.attempt) == (DONE, 0, 1)
    ports = set()
    for rank in range(3):
        first, port, error = job.logs(rank).splitlines()
        assert first == f"{rank} {rank} 3 3 127.0.0.1 1 kept 3 yes 1"
        assert error == f"err {tmp_path} True"
        ports.add(int(port))
    assert len(ports) == 1 and ports.pop() > 1024
    report = read_exit(job.run_dir)
    assert report is not None and (report.rc, report.attempt, report.failing_rank) == (0, 1, None)
    assert eventually(lambda: (state := read_state(job.run_dir)) and state.state is DONE)
    assert "done" in job._repr_html_() and "done" in repr(job)


def test_first_failing_rank_ends_job_and_is_named(launch):
    words = "'bad <data>' + 100 * ' because'"
    fail = f"time.sleep(0.2); raise ValueError({words})"
    job = launch(f"import os, time\nif os.environ['RANK'] == '1': {fail}\n{SLEEP}", 3)
    status = job.wait(20)  # The supervisor ends the other ranks, so the wait is short.
    assert (status.state, status.exit_code, status.attempt) == (FAILED, 1, 1)
    assert status.reason.startswith("rank 1 ended with code 1: ValueError: bad <data> because ")
    # The reason is truncated between two words and ends with an ellipsis.
    assert status.reason.endswith(" because …") and len(status.reason) > 500
    report = read_exit(job.run_dir)
    assert report is not None and report.failing_rank == 1 and "Traceback" in report.log_tail
    assert eventually(lambda: (state := read_state(job.run_dir)) and state.state is FAILED)
    assert "&lt;data&gt;" in job._repr_html_()


def test_rank_ignoring_sigterm_is_killed_after_grace(launch):
    """A child process of the rank is killed too, although it runs in a separate session."""
    deaf = "import os, signal, subprocess; signal.signal(15, signal.SIG_IGN)\n"
    child = f"{deaf}os.setsid(); {PRINT_AND_SLEEP}"
    job = launch(f"{deaf}subprocess.Popen([*{FAST!r}, {child!r}])\n{SLEEP}", 1, grace_s=0.5)
    assert printed(job) == "up"
    start = time.monotonic()
    job.cancel()
    assert job.wait(20).reason == "cancelled by SIGTERM"
    assert time.monotonic() - start > 0.4


def test_rank_can_clean_up_during_the_grace_time(launch):
    clean_up = "signal.signal(15, lambda *_: (print('saved'), sys.exit(0)))"
    job = launch(f"import signal, sys\n{clean_up}\n{PRINT_AND_SLEEP}", 1)
    assert printed(job) == "up"
    job.cancel()
    status = job.wait(20)
    assert (status.state, status.exit_code) == (FAILED, 143)
    assert job.logs().splitlines()[-1] == "saved"
    job.cancel()  # This call has no effect, because the job has ended.


def test_time_limit_ends_the_job(launch):
    status = launch(SLEEP, time_limit_s=0.3).wait(20)
    assert (status.state, status.reason) == (FAILED, "the time limit of 0.3 s was reached")


def test_sigkill_of_supervisor_ends_ranks_and_children(launch, mark):
    """The status of the run is then "lost", and the next launch starts attempt 2."""
    child = f"subprocess.Popen([*{FAST!r}, {SLEEP!r}], start_new_session=True)"
    job = launch(f"import subprocess; {child}\n{PRINT_AND_SLEEP}")
    assert printed(job, 0) and printed(job, 1)
    # The processes are one guard, one supervisor, two ranks and two children.
    assert len(processes("", mark)) == 6
    os.kill(supervisor(job).pid, signal.SIGKILL)
    assert eventually(lambda: not processes("", mark), 30), processes("", mark)
    status = job.status()
    assert (status.state, status.exit_code) == (JobState.LOST, None)
    assert "left no exit.json" in status.reason
    assert launch("pass").wait(20).attempt == 2


@pytest.mark.parametrize("fate", ["deleted", "replaced", "renamed", "emptied"])
def test_job_ends_when_its_directory_is_removed(fate, tmp_path, mark):
    """After the run directory was removed, the job writes nothing at the old path of the
    directory.
    """
    run_dir = tmp_path / "run"
    submit(spec(run_dir, SLEEP), LAPTOP)
    # The four processes are one guard, one supervisor and two ranks.
    assert len(processes("", mark)) == 4
    if fate == "renamed":
        run_dir.rename(tmp_path / "kept")
    elif fate == "emptied":
        subprocess.run(f"rm -rf {run_dir}/*", shell=True, check=True)
    else:
        shutil.rmtree(run_dir)
    if fate == "replaced":
        run_dir.mkdir()
        (run_dir / "job.json").write_text("of somebody else")
    assert eventually(lambda: not processes("", mark), 60), processes("", mark)
    # No file was written after the run directory was removed.
    left = [path.name for path in run_dir.glob("[!.]*")]
    assert left == (["job.json"] if fate == "replaced" else [])
    assert run_dir.exists() == (fate in ("replaced", "emptied"))
    if fate == "renamed":
        (tmp_path / "kept").rename(run_dir)
        status = read_status(run_dir)
        assert status.state is JobState.LOST
        assert status.reason.startswith(f"{run_dir} was deleted or renamed"), status.reason


def test_job_survives_death_of_its_guard(tmp_path, launch, until_go, mark):
    job = launch(until_go)
    (guard,) = (pid for pid in processes("", mark) if pid == os.getpgid(supervisor(job).pid))
    os.kill(guard, signal.SIGKILL)
    assert eventually(lambda: guard not in processes("", mark))
    (tmp_path / "go").touch()
    assert job.wait(20).state is DONE


STEPPING = f"""
import os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from cluster.state import update_state
run_dir, attempt = Path.cwd(), int(os.environ["KIT_ATTEMPT"])
def take(step):
    update_state(run_dir, attempt=attempt, state="running", step=step, heartbeat=time.time())
"""
"""Beginning of the Python code of a rank. The code calls `take(step)` to record a training step."""


@pytest.mark.parametrize(
    ("step", "end", "attempts", "reason"),
    [
        ("attempt", "if attempt < 3: os.kill(os.getpid(), 9)", 3, "the one rank ended with code 0"),
        ("attempt", "sys.exit(attempt < 3)", 3, "the one rank ended with code 0"),
        ("5", "os.kill(os.getpid(), 9)", 4, "given up after 3 starts without a new step"),
        ("attempt", "sys.exit(os.EX_CONFIG)", 1, "rank 0 ended with code 78"),
        ("5", "Path('control/request_stop').touch(); os.kill(os.getpid(), 9)", 1, "SIGKILL"),
    ],
    ids=["killed", "failed", "always killed", "useless to retry", "asked to stop"],
)
def test_exit_of_a_rank_decides_about_a_restart(tmp_path, launch, step, end, attempts, reason):
    """Crashed ranks are restarted. No restart follows exit code 78 (configuration error), a stop
    request, or three starts in a row without a new training step.
    """
    job = launch(f"{STEPPING}take({step})\n{end}", 1, working_directory=str(tmp_path))
    status = job.wait(60)
    assert status.attempt == attempts and reason in status.reason, (status, job.logs())
    failed = [event.attempt for event in job.history if event.state is FAILED]
    assert failed in ([], [attempts])


FAILING_DISK = f"""
import errno, os, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from cluster import directory_handle
from cluster.local import supervisor
replace, failures = Path.replace, []
def failing(part, file):
    if os.path.exists("crashed") and file.name == "state.json" and len(failures) < FAILURES:
        failures.append(file)
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
    return replace(part, file)
Path.replace = failing
directory_handle.RETRY_DELAYS_S = (0.1,) * 5
sys.exit(supervisor.main())
"""
"""Python code of a supervisor on a failing disk. After its ranks have crashed, the first FAILURES
writes of state.json fail.
"""


@pytest.mark.parametrize(("failures", "attempts"), [(4, 2), (10**6, 1)], ids=["passes", "stays"])
def test_failing_disk_delays_next_attempt(tmp_path, failures, attempts):
    crash = "open('crashed', 'w').close(); attempt < 2 and os.kill(os.getpid(), 9)"
    job = spec(tmp_path, f"{STEPPING}take(attempt)\n{crash}", 1, working_directory=str(tmp_path))
    job.write(tmp_path / "job.json")
    code = FAILING_DISK.replace("FAILURES", str(failures))
    words = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert last_attempt(tmp_path) == attempts, done.stderr
    assert (done.returncode == 0) == (attempts == 2), done.stderr
    assert "Input/output error" in done.stderr
    if attempts == 2:
        assert read_status(tmp_path).state is DONE


def test_reattach_from_a_new_interpreter(launch, until_go):
    job = launch(f"print('up')\n{until_go}print('end')")
    code = """
import sys
from cluster.job import Job
job = Job.attach(sys.argv[1])
print(job.status().state, flush=True)
open(job.run_dir / 'go', 'w').close()
print(*job.follow(1))
print(job.wait(20).state)"""
    words = [sys.executable, "-c", code, str(job.run_dir)]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.split("\n") == ["starting", "up end", "done", ""], run.stderr


def test_job_survives_death_of_submitting_process(tmp_path, until_go):
    """The submitting process kills its own process group, as happens when a Jupyter kernel or a
    terminal ends.
    """
    code = """
import os, sys
from cluster.job import JobSpec
from cluster.site import Site
from cluster.submission import submit
submit(JobSpec.from_json(sys.argv[1]), Site.load('laptop'))
os.killpg(0, 9)"""
    words = [sys.executable, "-c", code, spec(tmp_path, until_go + "print('survived')").to_json()]
    run = subprocess.run(words, cwd=ROOT, start_new_session=True)
    assert run.returncode == -signal.SIGKILL
    handle = Job.attach(tmp_path)
    assert handle.status().state is JobState.STARTING
    (tmp_path / "go").touch()
    assert handle.wait(20).state is DONE and handle.logs(1) == "survived\n"


def test_one_of_simultaneous_submissions_succeeds(tmp_path, launch, until_go):
    def submitted(name):
        try:
            return launch(until_go, name=name)
        except JobError as error:
            return str(error)

    with ThreadPoolExecutor() as pool:
        results = list(pool.map(submitted, "abc"))
    losers = [result for result in results if isinstance(result, str)]
    assert len(losers) == 2 and all("in use" in loser for loser in losers)
    (tmp_path / "go").touch()
    (winner,) = (result for result in results if isinstance(result, Job))
    assert winner.wait(20).attempt == 1


def test_attempts_are_counted_and_keep_their_logs(tmp_path, launch):
    code = (
        "import os; n = os.environ['KIT_ATTEMPT']; print('attempt', n); raise SystemExit(n == '1')"
    )
    assert launch(code, 1).wait(20).state is FAILED
    # This stop request comes after the end of attempt 1 and does not apply to attempt 2.
    write_request(tmp_path, "stop")
    job = launch(code, 1)
    assert (job.wait(20).state, job.status().attempt) == (DONE, 2)
    assert (
        job.logs() == job.logs(attempt=2) == "attempt 2\n" and job.logs(attempt=1) == "attempt 1\n"
    )
    assert (tmp_path / "logs" / "attempt_01" / "rank_00000.log").exists()
    for wrong in ({"rank": 1}, {"rank": -1}, {"attempt": 3}, {"attempt": 0}):
        with pytest.raises(JobError, match="Allowed"):
            job.logs(**wrong)


def test_supervisor_of_older_attempt_cannot_write(tmp_path, launch, mark):
    job = launch(SLEEP, 1)
    left_over = supervisor(job)
    # Another host has given up attempt 1 and started attempt 2.
    state_of_2 = update_state(tmp_path, attempt=2, state="running", step=5)
    assert left_over.send_signal(signal.SIGTERM)
    assert eventually(lambda: not processes("", mark))
    assert read_exit(tmp_path) is None and read_state(tmp_path) == state_of_2
    assert "could not be recorded" in (tmp_path / "logs" / "attempt_01_supervisor.log").read_text()
    assert job.status().attempt == 2


def test_follow_yields_lines_as_they_are_written(tmp_path, launch, until_go):
    """The last line of the log has no newline. A timeout in `wait` does not end the job."""
    code = f"import sys\nprint('first')\n{until_go}print('second')\nsys.stdout.write('rest')"
    job = launch(code, 1)
    lines = job.follow(poll_s=0.05)
    assert next(lines) == "first"
    with pytest.raises(TimeoutError, match="still starting"):
        job.wait(0.05)
    (tmp_path / "go").touch()
    assert list(lines) == ["second", "rest"] and job.wait(20).state is DONE


@pytest.mark.parametrize(
    "word", ['-rf a b it\'s say "no"', "$HOME `id` \\ *;&| Zürich 東京 🚀\ntwo lines"]
)
def test_special_characters_reach_the_ranks_unchanged(tmp_path, word):
    """The characters occur in directories, arguments and environment variables."""
    directory = tmp_path / word
    directory.mkdir()
    code = """
import os, sys
found = [os.environ['WORD'], sys.argv[1], os.path.basename(os.getcwd())]
print(found == 3 * [eval(sys.argv[2])])"""
    given = {"environment": {"WORD": word}, "working_directory": str(directory)}
    argv = (*FAST, code, word, ascii(word))
    handle = submit(job_spec(directory / "run", *argv, num_processes=1, **given), LAPTOP)
    assert handle.wait(20).state is DONE and handle.logs() == "True\n"
    # A user who runs submit.sh in a shell starts the next attempt.
    script = ["bash", directory / "run" / "submit.sh"]
    subprocess.run(script, check=True, stdout=subprocess.DEVNULL)
    assert handle.status().attempt == 2 and handle.logs() == "True\n"


def test_submit_sh_runs_in_foreground_until_ctrl_c(tmp_path, launch):
    job = launch("pass")
    job.wait(20)
    job.spec.replace(argv=[*FAST, PRINT_AND_SLEEP]).write(tmp_path / "job.json")
    script = ["bash", tmp_path / "submit.sh"]
    with subprocess.Popen(script, stdout=subprocess.DEVNULL, process_group=0) as process:
        assert eventually(lambda: job.status().attempt == 2) and printed(job, 1) == "up"
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(20) == 130
    assert job.status().reason == "cancelled by SIGINT"


def test_refused_requeue_leaves_the_job_running(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    job = submit(spec(tmp_path / "run", SLEEP, working_directory=str(work)), LAPTOP)
    work.rmdir()
    with pytest.raises(ConfigError, match="working_directory"):
        job.requeue()
    assert not job.status().state.is_final
    job.cancel()
    job.wait(20)


def test_file_in_place_of_run_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(JobError, match="file"):
        submit(spec(tmp_path / "file", "pass"), LAPTOP)
    assert (tmp_path / "file").read_text() == "mine"


def test_launches_leak_no_process_or_descriptor(launch):
    """Five launches together cost less CPU time than fifty starts of Python without imports, ten
    for each launch.
    """

    def used_s() -> float:
        kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        return sum(sum(resource.getrusage(kind)[:2]) for kind in kinds)

    start = used_s()
    for _ in range(5):
        subprocess.run([sys.executable, "-c", "pass"], check=True)
    bare_s, descriptors = used_s() - start, len(os.listdir("/proc/self/fd"))
    for attempt in range(1, 6):
        job = launch("pass")
        assert job.wait(20, poll_s=0.02).attempt == attempt
        assert job.status().state is DONE
    assert len(os.listdir("/proc/self/fd")) == descriptors
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
    assert not children.split(), "the submitting process has zombies"
    assert used_s() - start - bare_s < 10 * bare_s
