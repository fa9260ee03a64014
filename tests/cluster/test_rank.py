"""Keepers, which are the processes that start and watch a rank: recording of failures, handling of
Slurm's signals, and logs of the ranks.
"""

import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from cluster.logs import keep_last_lines
from cluster.process import Process
from cluster.slurm.rank import Failure, failure_folder
from cluster.state import find_log, update_state
from tests.support.waiting import eventually


@pytest.fixture
def keeper(tmp_path):
    """Returns a function that starts the keeper of one rank. The rank runs a script of sh."""
    started = []

    def start(script, rank=0):
        given = {"KIT_RUN_DIR": str(tmp_path), "KIT_ATTEMPT": "1", "SLURM_PROCID": str(rank)}
        words = [sys.executable, "-S", "-m", "cluster.slurm.rank", "sh", "-c", script]
        started.append(subprocess.Popen(words, env={**os.environ, **given}))
        return started[-1]

    failure_folder(tmp_path, 1).mkdir(parents=True)
    yield start
    for process in started:
        process.kill()
        process.wait()


def test_rank_failure_is_recorded_and_children_end(keeper, tmp_path):
    left = tmp_path / "left"
    process = keeper(f"sleep 1000 & echo $! > {shlex.quote(str(left))}; kill -9 $$", rank=3)
    assert process.wait(30) == 137
    failure = Failure.read(failure_folder(tmp_path, 1) / "rank_00003.json")
    assert (failure.rank, failure.code) == (3, -9)
    assert not os.path.exists(f"/proc/{left.read_text().strip()}")
    assert keeper("exit 0").wait(30) == 0 and len(list(failure_folder(tmp_path, 1).iterdir())) == 1


def test_rank_ended_after_peer_failure_is_not_blamed(keeper, tmp_path):
    """After a rank has failed, srun sends SIGTERM to the other ranks. The keeper must not record
    their end as a failure.
    """
    process = keeper(f"touch {shlex.quote(str(tmp_path / 'begun'))}; exec sleep 1000")
    assert eventually((tmp_path / "begun").exists, 30)
    (failure_folder(tmp_path, 1) / "rank_00003.json").touch()
    process.terminate()
    assert process.wait(30) == 137 and len(list(failure_folder(tmp_path, 1).iterdir())) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_keeper_of_rank_0_sends_sigterm_to_supervisor(keeper, tmp_path, rank):
    """The keeper of rank 0 forwards SIGTERM to the supervisor. The ranks do not receive the signal,
    and keepers of other ranks do not forward it.
    """
    heard = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append(time.time()))
    try:
        update_state(tmp_path, attempt=1, state="running", process=Process.current())
        folder = shlex.quote(str(tmp_path))
        wait = "touch begun; until [ -e end ]; do sleep 0.05; done"
        process = keeper(f"cd {folder}; {wait}", rank)
        assert eventually((tmp_path / "begun").exists, 30)
        process.terminate()
        assert bool(eventually(lambda: heard, 1)) == (rank == 0)
        (tmp_path / "end").touch()
        assert process.wait(30) == 0 and len(heard) <= 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_log_of_a_rank_is_found_in_own_or_node_log(tmp_path):
    folder = tmp_path / "logs" / "attempt_01"
    folder.mkdir(parents=True)
    (folder / "rank_00010.log").write_text("words")
    said = b"08: eight\n09: nine: 9\nsrun: 09\n10: \xff\n09: the end\n"
    (folder / "node_1.log").write_bytes(said)
    found = [find_log(tmp_path, 1, rank, 8).name for rank in (0, 9, 10)]
    assert found == ["rank_00000.log", "node_1.log", "rank_00010.log"]
    for attempt in (1, 2):
        keep_last_lines(tmp_path, attempt, 9, 9, 8, tmp_path / "logs" / "slurm-1.log")
    assert (folder / "rank_00009.log").read_text() == "nine: 9\nthe end\n", (
        "taken out of its node's"
    )
    names = sorted(file.name for file in (tmp_path / "logs").rglob("*rank*"))
    assert names == ["rank_00009.log", "rank_00010.log"], "none of an attempt that said nothing"
