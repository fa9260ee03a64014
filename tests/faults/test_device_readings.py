"""A driver whose calls hang does not stop training, and the values of the other devices are stored
in the run.
"""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cluster.heartbeats import read_rank_heartbeats
from kit.run import Run
from kit.trainer import device_readings, heartbeat, loop
from kit.trainer.device_readings import DeviceReader, DeviceReading, Readings
from tests.support.attempts import Attempt

pytestmark = pytest.mark.timeout(300)
READING = DeviceReading(utilisation=0.75, power_w=500.0, temperature_c=66)


def with_driver(out: Path, max_files: int) -> Callable[[int], None]:
    """Returns a fault injector that gives each rank a device. The driver of rank 1 never answers.
    The threads that call the driver of rank 0 are written to the file `out`.
    """

    def sabotage(rank: int) -> None:
        def readings() -> Readings:
            if rank == 1:
                threading.Event().wait()
            while True:
                with out.open("a") as stream:
                    stream.write(json.dumps(threading.current_thread().name) + "\n")
                yield READING

        loop.device_reader = lambda device: DeviceReader(readings)
        loop.GATHER_EVERY_S = heartbeat.GATHER_EVERY_S = 0.1
        heartbeat.BEAT_EVERY_S = device_readings.READ_EVERY_S = 0.1
        heartbeat.MAX_RANKS_WITH_FILES = max_files
        loop.REQUESTS_MAX_STEPS = 4
        if rank == 1:
            device_readings.OLDEST_S = 0.0

    return sabotage


@pytest.mark.parametrize("max_files", [64, 1])
def test_training_continues_while_driver_hangs(prepare, tmp_path, max_files):
    """With `max_files` = 1, rank 0 gathers the heartbeats."""
    run = prepare("hung", num_steps=150)
    attempt = Attempt(run, 1, with_driver(tmp_path / "threads", max_files))
    assert attempt.wait() == [0, 0], attempt.log()
    threads = set((tmp_path / "threads").read_text().splitlines())
    assert threads == {'"device readings"'}
    metrics = Run.open(run.directory).metrics()
    assert len(metrics) == 150
    for name, value in (
        ("lowest_device_utilisation", 0.75),
        ("device_power_w", 500.0),
        ("highest_device_temperature_c", 66.0),
    ):
        known = metrics[name][np.isfinite(metrics[name])]
        assert set(known.tolist()) == {value}
    first, second = read_rank_heartbeats(run.directory, 1)
    assert first.utilisation == 0.75 and first.memory_bytes
    assert second.utilisation is None and "has not answered" in (second.device_problem or "")
    assert attempt.log(1).count("has not answered") == 1
    assert "1 reading of the device failed in this attempt" in attempt.log(1)
