"""Utilisation, power, temperature and memory of the devices of all ranks, in the views of a run."""

import time

import pytest

from cluster.heartbeats import (
    RankHeartbeat,
    read_rank_heartbeats,
    summarise_devices,
    write_rank_heartbeat,
)
from kit.monitor.dashboard import Dashboard
from kit.monitor.text import status_row, status_table
from kit.run import Run
from kit.show.terminal import PlainConsole
from tests.support.recorded_runs import beat, recorded_run

VALUES = (
    {"utilisation": 0.97, "power_w": 650.0, "temperature_c": 61, "memory_bytes": 60 * 2**30},
    {"utilisation": 0.42, "power_w": 310.5, "temperature_c": 55, "memory_bytes": 71 * 2**30},
    {"utilisation": 0.98, "power_w": None, "temperature_c": 84, "memory_bytes": 61 * 2**30},
    {"device_problem": "the device cannot be read: GPU is lost"},
)
"""Fields about the device in the heartbeat of each rank."""


def write_beats(run: Run, *values: dict) -> None:
    for rank, fields in enumerate(values):
        about = {"rank": rank, "attempt": 1, "step": 400, "time": time.time(), "step_time_s": 1.0}
        write_rank_heartbeat(run.directory, RankHeartbeat(**about, host=f"node{rank}", **fields))


@pytest.fixture
def run(tmp_path) -> Run:
    made = recorded_run(tmp_path / "run", ranks=4)
    write_beats(made, *VALUES)
    return made


def test_status_has_worst_ranks_of_devices(run):
    devices = status_row(run)["devices"]
    assert devices == {
        "lowest_device_utilisation": {"value": 0.42, "rank": 1, "host": "node1"},
        "highest_device_temperature_c": {"value": 84, "rank": 2, "host": "node2"},
        "largest_device_memory_bytes": {"value": 71 * 2**30, "rank": 1, "host": "node1"},
        "device_power_w": {"value": 960.5, "rank": None, "host": None},
        "problem": "rank 3: the device cannot be read: GPU is lost",
    }


def test_views_show_devices_in_one_line(run):
    expected = (
        "Devices: lowest utilisation 42% (rank 1 on node1); highest temperature 84 °C (rank 2 on"
        " node2); power of all 960 W; largest memory 71.0 GiB (rank 1 on node1); not read on"
        " rank 3: the device cannot be read: GPU is lost"
    )
    dashboard = Dashboard(run)
    dashboard.catch_up()
    assert dashboard.facts()["device_text"] == expected
    console = PlainConsole(record=True, width=120)
    console.print(status_table(run, 120))
    assert expected in " ".join(console.export_text().split())


def test_views_of_cpu_run_show_no_devices(tmp_path):
    run = recorded_run(tmp_path / "run", ranks=2)
    beat(run, 400)
    assert status_row(run)["devices"] == {}
    dashboard = Dashboard(run)
    dashboard.catch_up()
    assert dashboard.facts()["device_text"] == ""


def test_impossible_values_are_left_out(run):
    """Another user's file may contain any number."""
    impossible = {"utilisation": float("nan"), "temperature_c": 1e300, "memory_bytes": 2**62}
    write_beats(run, {**impossible, "power_w": float("inf")}, *VALUES[1:])
    assert len(read_rank_heartbeats(run.directory, 1)) == 4
    devices = status_row(run)["devices"]
    assert devices["highest_device_temperature_c"]["rank"] == 2
    assert devices["device_power_w"]["value"] == 310.5
    assert summarise_devices([]) == {}
