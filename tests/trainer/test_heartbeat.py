"""Heartbeats of ranks: the directory into which heartbeats are written, and that training does not
wait for these writes.
"""

import errno
import os
import threading
import time

import pytest
import torch.distributed as dist

from cluster.directory_handle import RunDirectory
from cluster.heartbeats import write_rank_heartbeat
from cluster.state import read_pending_request, read_taken_request, write_request
from kit.run.metrics import MetricsWriter
from kit.trainer.background import Background
from kit.trainer.heartbeat import Heartbeat, Notices
from kit.trainer.requests import Requests


def test_late_rank_writes_nothing_into_another_directory(tmp_path, monkeypatch):
    """The run directory was moved, and a new directory has its path."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    notices = Notices(run_dir, 1)
    heartbeat = Heartbeat(RunDirectory(run_dir), 1, dist.group.WORLD, notices, lambda: None)
    heartbeat.answer()
    heartbeat.write_answer()
    assert [file.name for file in run_dir.iterdir()] == ["ranks"]
    run_dir.rename(tmp_path / "old")
    run_dir.mkdir()
    heartbeat.answer()
    heartbeat.write_answer()
    assert not list(run_dir.iterdir())


def test_silent_ranks_ignore_the_clocks_of_nodes(tmp_path, monkeypatch):
    """The clock of the second rank's node is an hour behind. The third rank is silent: after its
    first heartbeat, no second heartbeat follows.
    """
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    home, notices = RunDirectory(tmp_path), Notices(tmp_path, 1)
    heartbeat = Heartbeat(home, 1, dist.group.WORLD, notices, lambda: None)
    assert heartbeat.silent_ranks() is None, "nobody has looked before"
    behind_s = {0: 0.0, 1: 3600.0, 2: 0.0}
    for rank in range(3):
        write_rank_heartbeat(
            tmp_path, heartbeat.beat.replace(rank=rank, time=1.7e9 - behind_s[rank])
        )
    heartbeat.store_heartbeat_times()
    for rank in (0, 1):
        write_rank_heartbeat(
            tmp_path, heartbeat.beat.replace(rank=rank, time=1.7e9 + 1 - behind_s[rank])
        )
    assert heartbeat.silent_ranks() == [2]


@pytest.fixture
def background(tmp_path):
    reports: list[str] = []
    made = Background(RunDirectory(tmp_path), reports.append)
    made.reports = reports  # pyright: ignore[reportAttributeAccessIssue]
    return made


def test_background_work_never_blocks_its_caller(background):
    """The background work hangs, as on a file system whose server does not answer."""
    release = threading.Event()
    background.add(release.wait)
    background.start()
    start = time.monotonic()
    for _ in range(1000):
        background.wake()
        background.check()
    assert time.monotonic() - start < 1.0
    assert not background.flush(0.05), "a flush that times out is no success"
    release.set()
    assert background.finish(10.0)


def test_background_counts_disk_errors_and_reports_one(background, capsys):
    calls: list[int] = []

    def fail() -> None:
        calls.append(len(calls))
        if len(calls) < 4:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    background.add(fail)
    background.start()
    assert not background.flush(10.0)
    assert background.finish(10.0), "work is repeated until it succeeds"
    assert len(background.reports) == 1 and os.strerror(errno.ESTALE) in background.reports[0]
    assert background.num_errors == 3 and "3 reads or writes" in capsys.readouterr().err


def test_background_raises_loss_of_run_in_training_thread(background, tmp_path):
    written: list[int] = []
    background.add(background.home.check)
    background.add(lambda: written.append(1))
    tmp_path.rename(tmp_path.with_name("moved"))
    background.start()
    background.flush(10.0)
    with pytest.raises(Exception, match="was deleted or renamed"):
        background.check()
    assert not written, "nothing is written after the run directory was lost"


def test_request_is_recorded_with_its_step(tmp_path):
    (tmp_path / "control").mkdir()
    requests = Requests(tmp_path)
    requests.read_requests()
    assert not requests.take("checkpoint", 1)
    write_request(tmp_path, "checkpoint")
    requests.read_requests()
    assert read_pending_request(tmp_path, "checkpoint") is None
    assert requests.take("checkpoint", 2) and not requests.take("checkpoint", 3)
    write_request(tmp_path, "checkpoint")
    requests.read_requests()
    taken = read_taken_request(tmp_path, "checkpoint")
    assert taken is not None and taken.step is None, "the second request"
    assert requests.take("checkpoint", 4)
    requests.read_requests()
    taken = read_taken_request(tmp_path, "checkpoint")
    assert taken is not None and taken.step == 4


def test_metrics_complete_torn_line_after_stale_handle(tmp_path, monkeypatch):
    """A write fails in the middle of a line with ESTALE, after which the file must be
    opened again.
    """
    file = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(file)
    writer.write([{"step": 1}])
    stream = writer.stream

    class Stale:
        def write(self, data: bytes) -> int:
            if writer.pending.startswith(b'{"step": 2'):
                return os.write(stream.fileno(), bytes(data[:5]))
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        def close(self) -> None:
            stream.close()

    writer.stream = Stale()
    with pytest.raises(OSError, match="Stale"):
        writer.write([{"step": 2}, {"step": 3}])
    assert file.read_bytes() == b'{"step": 1}\n{"ste'
    assert writer.num_unwritten == 2
    writer.flush()
    writer.stream.close()
    assert file.read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'
