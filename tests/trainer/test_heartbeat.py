"""What a rank says of itself, and where."""

import torch.distributed as dist

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
