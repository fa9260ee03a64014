"""Signs of life: who is heard, who is blamed, and what a stall of the supervisor or of a file
system may not do.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time

import pytest

from cluster.heartbeats import (
    PLACE,
    RankHeartbeat,
    keeper_of,
    read_rank_heartbeats,
    tell,
    write_all_heartbeats,
)
from cluster.outcome import keep_words
from cluster.slurm import silence
from cluster.slurm.beat import BEAT_EVERY_S, SILENT_AFTER_S, Line, Switchboard
from cluster.slurm.silence import DOUBT_S, SilenceJudge
from cluster.state import JobError, find_log
from tests.cluster.waiting import eventually


@pytest.fixture
def board(monkeypatch):
    board = Switchboard("127.0.0.1")
    monkeypatch.setenv("KIT_SUPERVISOR", board.address)
    monkeypatch.setenv("SLURMD_NODENAME", "node2")
    yield board
    board.close()


@pytest.fixture
def keeper(board):
    """Makes ends of keepers, and closes them."""
    made = []

    def make(is_leader):
        made.append(Line(is_leader=is_leader))
        return made[-1]

    yield make
    for line in made:
        line.socket.close()
        line.ear.close()


def test_beats_are_answered_and_strangers_are_not(board, keeper):
    line, stranger = keeper(True), keeper(False)
    line.send()
    line.send(event="failed", rank=3, code=1)
    stranger.token = "wrong"
    stranger.send(event="failed", rank=4, code=1)
    line.socket.send(b"\xff not json")
    assert eventually(lambda: board.reports, 5)
    time.sleep(0.05)
    assert [report["rank"] for report in board.taken()] == [3] and board.taken() == []
    assert set(board.heard) == {"node2"} and board.silent() == []
    line.receive()
    stranger.receive()
    assert line.order == "end" and stranger.alone_s == 0.0 and stranger.order == "ok"
    board.heard["node2"] -= 31
    assert board.silent() == ["node2"]
    line.send(event="left")
    assert eventually(lambda: not board.heard, 5), "a node that has done its work is not missed"


def test_one_keeper_speaks_for_its_node(board, keeper, monkeypatch, tmp_path):
    """The heartbeats of its ranks reach one file in one datagram."""
    leader = keeper(True)
    monkeypatch.setenv(PLACE, leader.place)
    assert keeper_of(tmp_path) is None, "that of another run"
    monkeypatch.setenv("KIT_RUN_DIR", str(tmp_path))
    for rank in (8, 9):
        tell(
            tmp_path,
            RankHeartbeat(
                rank=rank, attempt=2, step=7, time=time.time(), step_time_s=1.5, host="node2"
            ),
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as neighbour:
        for text in (
            b"[[" * 900,
            b'{"rank": "9e99"}',
            b'{"rank": 1e999}',
            b'{"rank": null}',
            b'{"rank": 3, "host": "' + b"x" * 3000,
        ):
            neighbour.sendto(text, f"\0{leader.place}")
    assert not list(tmp_path.iterdir()), "no file of a rank"
    leader.receive()
    leader.send()
    assert eventually(lambda: board.ranks, 5)
    assert set(board.heard) == {"node2"} and len(board.senders) == 1
    write_all_heartbeats(tmp_path, board.ranks.values())
    assert [(beat.rank, beat.step) for beat in read_rank_heartbeats(tmp_path, 2)] == [
        (8, 7),
        (9, 7),
    ]


def test_the_place_of_heartbeats_gives_no_token_away(board, keeper):
    keeper(True)
    with open("/proc/net/unix") as names:
        assert board.token not in names.read(), "whoever knows it can order the job to end"


def test_heartbeats_of_another_user_are_not_taken(keeper):
    """Abstract sockets have no permissions."""
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    leader = keeper(True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        for rank, user in ((3, 65534), (4, 0), (5, 65534)):
            os.setresuid(user, user, 0)
            try:
                end.sendto(b'{"rank": %d}' % rank, f"\0{leader.place}")
            finally:
                os.setresuid(0, 0, 0)
    leader.receive()
    assert list(leader.ranks) == [4]


def test_first_node_is_reached_while_its_supervisor_is_silent(keeper, monkeypatch):
    line = keeper(True)
    with socket.create_server(("127.0.0.1", 0)) as meeting_point:
        monkeypatch.setenv("MASTER_PORT", str(meeting_point.getsockname()[1]))
        assert line.reaches_first_node()
    assert line.reaches_first_node(), "a refusal is an answer too"
    monkeypatch.setattr(
        socket, "create_connection", lambda *_, **__: (_ for _ in ()).throw(TimeoutError)
    )
    assert not line.reaches_first_node()


def test_many_silent_nodes_at_once_are_doubted(board, monkeypatch):
    asked = []

    def nodes_down(nodes, config):
        asked.append(nodes)
        if not answer:
            raise JobError("no answer")
        return {*nodes} & {*answer}

    answer: list[str] = []
    monkeypatch.setattr(silence, "nodes_down", nodes_down)
    board.heard = {f"node{number}": 0.0 for number in range(1, 11)}
    board.clock = SILENT_AFTER_S + 1
    judge = SilenceJudge(board, None)
    assert judge.lost() is None and len(asked) == 1 and len(asked[0]) == 10
    assert judge.lost() is None and len(asked) == 1, "Slurm is not asked at each look"
    board.clock += 4 * BEAT_EVERY_S
    answer.append("node7")
    assert judge.lost() == ("node7", "node7 fell silent") and len(asked) == 2
    answer[:] = ["none"]
    board.heard |= {f"node{number}": board.clock for number in range(1, 9)}
    assert judge.lost() == ("node10", "node10, node9 fell silent"), "a fifth, as ever"
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    board.clock += 100
    board.heard["node1"] = board.clock
    assert judge.lost() is None
    board.clock += DOUBT_S
    board.heard["node1"] = board.clock
    assert judge.lost() == ("node1", "node1 hears none of the other nodes: it is cut off")


SUPERVISOR = """
import sys, time
from cluster.slurm.beat import Switchboard
board = Switchboard("127.0.0.1")
print(board.address, flush=True)
while True:
    time.sleep(0.05)
    print(len(board.heard), len(board.ranks), *board.silent(), flush=True)
"""


def test_frozen_supervisor_blames_no_node(request):
    """384 nodes of 8 ranks go on while it stands still for two limits; one that really falls
    silent is noticed.
    """
    every_s = 5.0 if request.config.getoption("--real-limits") else 0.5
    environment = {**os.environ, "KIT_BEAT_EVERY_S": str(every_s)}
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert process.stdout
    words = process.stdout
    host, port, token = words.readline().strip().rsplit(":", 2)
    beat = RankHeartbeat(
        rank=1000,
        attempt=1,
        step=1,
        time=time.time(),
        step_time_s=1.5,
        work_s=1.5,
        host="frontier01234",
    )
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(384)]
    for end in sockets:
        end.setblocking(False)
        end.connect((host, int(port)))

    def beats(seconds, without=None):
        """All nodes beat, one after the other; returns the nodes that were called silent, and
        when.
        """
        until, found = time.monotonic() + seconds, {}
        while (begun := time.monotonic()) < until:
            for number, end in enumerate(sockets):
                if number != without:
                    head = json.dumps({"token": token, "node": f"node{number}"}).encode()
                    end.send(b"\n".join([head, *[beat.line] * 8]))
                if number % 32 == 31:
                    time.sleep(every_s / 24)
            while select.select([words], [], [], 0)[0]:
                heard, _, *silent = words.readline().split()
                found |= {node: time.monotonic() for node in silent}
                found["heard"] = int(heard)
            time.sleep(max(0.0, begun + every_s - time.monotonic()))
        return found

    try:
        assert beats(4 * every_s) == {"heard": 384}
        process.send_signal(signal.SIGSTOP)
        beats(12 * every_s)
        process.send_signal(signal.SIGCONT)
        assert beats(8 * every_s) == {"heard": 384}, "healthy nodes are called silent"
        assert set(beats(12 * every_s, without=200)) == {"heard", "node200"}
    finally:
        process.kill()
        process.wait()
        for end in (words, *sockets):
            end.close()


def test_logs_of_every_layout_are_found(tmp_path):
    logs = tmp_path / "logs"
    (logs / "attempt_02").mkdir(parents=True)
    (logs / "attempt_01_rank_00009.log").touch()
    for name in ("node_1.log", "rank_00000.log", "rank_00010.log"):
        (logs / "attempt_02" / name).touch()
    found = [
        find_log(tmp_path, attempt, rank, 8).relative_to(logs)
        for attempt, rank in ((1, 9), (2, 9), (2, 10))
    ]
    assert list(map(str, found)) == [
        "attempt_01_rank_00009.log",
        "attempt_02/node_1.log",
        "attempt_02/rank_00010.log",
    ]
    assert find_log(tmp_path, 3, 0, 8) == logs / "attempt_03" / "rank_00000.log"


def test_words_of_a_rank_are_taken_out_of_the_log_of_its_node_alone(tmp_path):
    folder = tmp_path / "logs" / "attempt_01"
    folder.mkdir(parents=True)
    (folder / "node_1.log").write_bytes(
        b"08: eight\n09: nine: 9\nsrun: 09\n10: \xff\n09: the end\n"
    )
    keep_words(tmp_path, 1, 9, 9, 8)
    assert (folder / "rank_00009.log").read_text() == "nine: 9\nthe end\n"
    old = tmp_path / "logs" / "attempt_02_rank_00009.log"
    old.write_text("09: written by the script of an older version\n")
    keep_words(tmp_path, 2, 9, 9, 8)
    keep_words(tmp_path, 3, 9, 9, 8)
    assert sorted(file.name for file in (tmp_path / "logs").rglob("*rank*")) == [
        old.name,
        "rank_00009.log",
    ]


def test_a_node_whose_ranks_have_failed_is_not_missed(board, tmp_path):
    """Else it falls silent while srun waits for another node that does not end, and takes the
    blame.
    """
    environment = {**os.environ, "KIT_RUN_DIR": str(tmp_path), "SLURM_LOCALID": "0"}
    words = [sys.executable, "-m", "cluster.slurm.rank", "sh", "-c", "exit 3"]
    assert subprocess.run(words, env=environment, timeout=30).returncode == 3
    assert eventually(lambda: board.reports, 5) and board.reports[0]["code"] == 3
    assert not board.heard


def test_a_slower_rhythm_of_beats_makes_no_rank_silent():
    words = "from kit.trainer.signs import RELAYED_S; print(RELAYED_S)"
    environment = {**os.environ, "KIT_BEAT_EVERY_S": "30"}
    done = subprocess.run(
        [sys.executable, "-c", words], env=environment, capture_output=True, text=True, timeout=120
    )
    assert float(done.stdout) >= 60, "a word is a beat old when it is sent, and a beat may be lost"
