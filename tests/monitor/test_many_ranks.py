"""The views of a job with thousands of ranks read as many files as the views of a job with eight
ranks.
"""

import sys
from functools import partial

import pytest

from kit.monitor import status_row
from kit.monitor.dashboard import Dashboard
from kit.monitor.ranks import RankTimes
from kit.monitor.runs import runs_table
from kit.run import Run
from tests.bench.scale import write_heartbeats
from tests.support.recorded_runs import recorded_run

OPENED: list[str] = []
COUNTING = [False]


def note(event: str, arguments: tuple) -> None:
    if COUNTING[0] and event in ("open", "os.listdir", "os.scandir"):
        OPENED.append(str(arguments[0]))


@pytest.fixture(scope="module", autouse=True)
def hook():
    sys.addaudithook(note)  # Python cannot remove an audit hook, so it stays in the process
    yield
    COUNTING[0] = False


def reads(run: Run, view) -> list[str]:
    """Returns the paths that one call of `view` opens or lists. Only paths below the parent folder
    of the run are returned.
    """
    OPENED.clear()
    COUNTING[0] = True
    view()
    COUNTING[0] = False
    folder = str(run.directory.parent)
    return sorted(name.replace(folder, "FOLDER") for name in OPENED if folder in name)


def test_files_read_by_views_do_not_grow_with_ranks(tmp_path):
    found = {}
    for ranks in (8, 8192):
        folder = tmp_path / str(ranks) / "run"
        folder.parent.mkdir()
        run = recorded_run(folder, steps=50, ranks=ranks)
        write_heartbeats(folder, ranks)
        logs = folder / "logs" / "attempt_01"
        logs.mkdir(parents=True, exist_ok=True)
        for node in range(ranks // 8):
            (logs / f"node_{node}.log").touch()
        dashboard = Dashboard(run)
        # The first reading imports modules and fills caches, so it is not counted.
        dashboard.update_status()
        dashboard.run_view.ranks._rest_until = 0.0
        status_row(run)
        runs_table(folder.parent)
        found[ranks] = {
            "look": reads(run, dashboard.update_status),
            "ranks": reads(run, RankTimes(folder, ranks, 1).read_heartbeats),
            "log": reads(run, dashboard.log),
            "status": reads(run, partial(status_row, run)),
            "runs": reads(run, partial(runs_table, folder.parent)),
        }
        assert dashboard.run_view.ranks.beats[ranks - 1].host and dashboard.run_view.ranks.samples[
            -1
        ].shape == (ranks,)
    small, large = found.values()
    assert "FOLDER/run/ranks/all.jsonl" in small["look"] + small["ranks"]
    assert large == small and max(map(len, small.values())) < 40
