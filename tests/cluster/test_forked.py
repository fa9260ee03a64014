"""Ranks that are forked after one import behave like ranks that are spawned as new processes."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from cluster.process import child_pids
from cluster.state import JobState
from cluster.submission import submit
from tests.cluster.jobs import LAPTOP, job_spec, supervisor
from tests.support.waiting import eventually

HEAVY = """
import os
assert os.environ["WORD"] == "two words", "the environment of the ranks is there when their module is imported"
with open(os.environ["IMPORTED"], "a") as file:
    file.write(f"{os.getpid()}\\n")
"""  # noqa: E501
TELLS = """
import json, os, signal, sys
import heavy_of_test

blocked = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
mine = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "KIT_ATTEMPT", "WORD")}
names = [__name__, sys.argv[1:], os.path.basename(sys.argv[0]), os.getcwd(), sys.stdin.read(), blocked]
numbers = [f"/proc/self/fd/{number}" for number in range(3, 9)]
files = [os.readlink(name) for name in numbers if os.path.exists(name)]
if __name__ == "__main__":
    print(json.dumps([mine, names, os.getpgid(0) == os.getpid(), files]))
    print("a warning", file=sys.stderr, end="")
    exec(sys.argv[1])
"""  # noqa: E501


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Puts a folder into PYTHONPATH. The folder has a module that all ranks import, and a module
    that the ranks run.
    """
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "heavy_of_test.py").write_text(HEAVY)
    (folder / "tells_of_test.py").write_text(TELLS)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
    return folder


def job(folder, code, forks, run="run", **changes):
    environment = {"WORD": "two words", "IMPORTED": str(folder / run)}
    given = {"environment": environment, "working_directory": str(folder), "grace_s": 2.0} | changes
    argv, size = (sys.executable, "-m", "tells_of_test", code), {"num_processes": 2, "num_nodes": 1}
    return job_spec(folder / f"{run}-dir", *argv, forks=forks, **size, **given)


def test_forked_ranks_equal_spawned_ranks(modules):
    """These properties of the ranks are compared: environment, arguments, working directory, signal
    mask, open files and logs.

    Forked ranks share one import of the heavy module. Each spawned rank imports it again.
    """
    told = {}
    for forks in (False, True):
        handle = submit(job(modules, "pass", forks, str(forks)), LAPTOP)
        assert handle.wait(20).state is JobState.DONE, handle.logs()
        told[forks] = [handle.logs(rank) for rank in (0, 1)]
        assert len((modules / str(forks)).read_text().splitlines()) == (1 if forks else 2)
    assert told[True] == told[False]
    mine, names, leads, files = json.loads(told[True][1].splitlines()[0])
    found = (mine["RANK"], mine["WORLD_SIZE"], names[0], leads, files)
    assert found == ("1", "2", "__main__", True, [])


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("sys.exit(78)", "rank 0 ended with code 78"),
        ("sys.exit('a word')", "rank 0 ended with code 1"),
        ("os._exit(3)", "rank 0 ended with code 3"),
        ("raise ValueError('broken')", "rank 0 ended with code 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 0 was killed by SIGKILL"),
    ],
)
def test_forked_rank_reports_the_same_exit_as_spawned(modules, code, reason):
    handles = [
        submit(job(modules, code, forks, str(forks), max_restarts=0), LAPTOP)
        for forks in (False, True)
    ]
    anew, forked = (handle.wait(20) for handle in handles)
    assert (anew.exit_code, anew.state) == (forked.exit_code, forked.state)
    assert reason in forked.reason.replace("rank 1", "rank 0"), forked.reason
    # Only the first rank that ends is certain to raise the error. The other rank may be killed
    # before.
    told = [handles[1].logs(rank) for rank in (0, 1)]
    assert any("ValueError: broken" in words for words in told) == ("ValueError" in code)


def test_failed_import_of_forked_ranks_is_reported(modules):
    (modules / "heavy_of_test.py").write_text("import no_such_module_of_test")
    handle = submit(job(modules, "pass", forks=True), LAPTOP)
    status, words = handle.wait(20), "No module named 'no_such_module_of_test'"
    # The other rank may be killed before it prints the error.
    assert status.state is JobState.FAILED and words in status.reason
    assert any(words in handle.logs(rank) for rank in (0, 1))


def test_restart_forks_from_the_same_import(modules):
    (modules / "crash").touch()
    crash = (
        "if os.environ['RANK'] == '0' and os.path.exists('crash'): os.remove('crash'); os.abort()"
    )
    run_dir = f"pathlib.Path({str(modules / 'run-dir')!r})"
    step = f"update_state({run_dir}, attempt=int(os.environ['KIT_ATTEMPT']), step=1)"
    code = f"import pathlib; from cluster.state import update_state\n{step}\n{crash}"
    handle = submit(job(modules, code, forks=True), LAPTOP)
    done = handle.wait(20)
    assert (done.state, done.attempt) == (JobState.DONE, 2), done
    assert len((modules / "run").read_text().splitlines()) == 1
    assert handle.logs(0, attempt=2)


def test_forked_ranks_die_with_their_supervisor(modules):
    handle = submit(job(modules, "import time; time.sleep(60)", forks=True), LAPTOP)
    assert eventually(lambda: handle.logs(0) and handle.logs(1))
    ranks = child_pids(supervisor(handle).pid)
    names = {Path(f"/proc/{rank}/comm").read_text().strip() for rank in ranks}
    assert names == {"rank 0", "rank 1"}
    os.kill(supervisor(handle).pid, signal.SIGKILL)
    assert eventually(lambda: not any(os.path.exists(f"/proc/{rank}") for rank in ranks))
    assert eventually(lambda: handle.state is JobState.LOST)
