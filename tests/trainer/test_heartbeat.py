"""What a rank says of itself, and where."""

import torch.distributed as dist

from cluster.heartbeats import tell
from cluster.outcome import RunDirectory
from kit.trainer.heartbeat import Heartbeat, Notices


def test_nothing_is_said_in_a_directory_that_has_taken_the_place_of_its_own(tmp_path, monkeypatch):
    """Nor by the watchdog's thread, while a step is late."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    notices = Notices(run_dir, 1)
    heartbeat = Heartbeat(RunDirectory(run_dir), 1, dist.group.WORLD, notices)
    heartbeat.write()
    assert [file.name for file in run_dir.iterdir()] == ["ranks"]
    run_dir.rename(tmp_path / "old")
    run_dir.mkdir()
    heartbeat.write()
    assert not list(run_dir.iterdir())


def test_silent_ranks_ignore_the_clocks_of_nodes(tmp_path, monkeypatch):
    """The clock of the second node is an hour behind, and the third rank says nothing more."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    home, notices = RunDirectory(tmp_path), Notices(tmp_path, 1)
    heartbeat = Heartbeat(home, 1, dist.group.WORLD, notices)
    assert heartbeat.silent_ranks() is None, "nobody has looked before"
    behind_s = {0: 0.0, 1: 3600.0, 2: 0.0}
    for rank in range(3):
        tell(tmp_path, heartbeat.beat.replace(rank=rank, time=1.7e9 - behind_s[rank]))
    heartbeat.look_at_ranks()
    for rank in (0, 1):
        tell(tmp_path, heartbeat.beat.replace(rank=rank, time=1.7e9 + 1 - behind_s[rank]))
    assert heartbeat.silent_ranks() == [2]
