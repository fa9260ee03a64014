"""Utilisation, power and temperature of a rank's device. The packages of the vendors are replaced
by the modules in the folder `drivers`. No real GPU was used.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cluster.directory_handle import RunDirectory
from cluster.heartbeats import read_rank_heartbeats
from kit.trainer import device_readings
from kit.trainer.device_readings import (
    DeviceReader,
    DeviceReading,
    Readings,
    device_reader,
    heartbeat_fields,
    neuron_reading,
    pci_address,
)
from kit.trainer.heartbeat import Heartbeat, Notices
from tests.support.waiting import eventually
from tests.trainer.steps import done

GPU = torch.device("cuda", 0)
BUSES = {0: 0x1B, 1: 0xC1}
"""Bus of the PCI address of each physical GPU of the simulated node."""


def select_gpu(monkeypatch, physical: int, hip: str | None = None) -> None:
    """Makes torch see only one physical GPU of the node, as device 0, as environment variables such
    as CUDA_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES do.
    """

    def get_device_properties(device: torch.device) -> Any:
        assert device.index == 0
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=BUSES[physical], pci_device_id=0)

    monkeypatch.setattr(torch.cuda, "get_device_properties", get_device_properties)
    monkeypatch.setattr(torch.version, "hip", hip)


@pytest.fixture
def drivers(monkeypatch):
    """Returns a function that imports a new copy of a stand-in package."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "drivers")

    def load(name: str) -> Any:
        monkeypatch.delitem(sys.modules, name, raising=False)
        return __import__(name)

    yield load
    for name in ("pynvml", "amdsmi"):
        sys.modules.pop(name, None)


@pytest.fixture
def started(monkeypatch):
    """Returns a function that starts a reader and ends it after the test."""
    monkeypatch.setattr(device_readings, "READ_EVERY_S", 0.01)
    monkeypatch.setattr(device_readings, "RETRY_EVERY_S", 0.01)
    readers: list[DeviceReader] = []

    def start(reader: DeviceReader | None) -> DeviceReader:
        assert reader is not None
        reader.start()
        readers.append(reader)
        return reader

    yield start
    for reader in readers:
        reader.end()


def first_fields(reader: DeviceReader) -> dict[str, Any]:
    assert eventually(reader.fields, 30)
    return reader.fields()


def always(reading: DeviceReading) -> Readings:
    """Yields the same reading without end."""
    while True:
        yield reading


def test_cpu_has_no_device_reader():
    assert device_reader(torch.device("cpu")) is None


@pytest.mark.parametrize("physical", [0, 1])
def test_nvidia_gpu_is_found_by_its_pci_address(physical, drivers, monkeypatch, started):
    nvml = drivers("pynvml")
    for gpu, bus in BUSES.items():
        values = {"percent": 90 - gpu, "milliwatts": 600_500 + 1000 * gpu, "celsius": 60 + gpu}
        nvml.GPUS[0, bus, 0, 0] = values
    # In torch's own mapping, this variable would select the NVML device with the same index.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(1 - physical))
    select_gpu(monkeypatch, physical)
    assert first_fields(started(device_reader(GPU))) == {
        "utilisation": (90 - physical) / 100,
        "power_w": 600.5 + physical,
        "temperature_c": 60 + physical,
    }


def test_nvidia_value_that_gpu_lacks_is_left_out(drivers, monkeypatch, started, capsys):
    """A part of a GPU (MIG) has no utilisation."""
    nvml = drivers("pynvml")
    not_supported = nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    values = {"percent": not_supported, "milliwatts": 300_000, "celsius": 50}
    nvml.GPUS[0, BUSES[0], 0, 0] = values
    select_gpu(monkeypatch, 0)
    reader = started(device_reader(GPU))
    assert first_fields(reader) == {"power_w": 300.0, "temperature_c": 50}
    assert not reader.num_errors and not capsys.readouterr().err


@pytest.mark.parametrize(
    ("power", "watts"),
    [
        ({"current_socket_power": 717, "average_socket_power": "N/A"}, 717),
        ({"current_socket_power": "N/A", "average_socket_power": 94}, 94),
        ({"current_socket_power": "N/A", "average_socket_power": 0}, None),
        ({"current_socket_power": "N/A", "average_socket_power": "N/A"}, None),
    ],
)
@pytest.mark.parametrize(
    ("celsius", "temperature"), [({0: 41, 1: 55}, 55), ({0: 41}, 41), ({}, None)]
)
def test_amd_gpu_is_read_in_watts(
    power, watts, celsius, temperature, drivers, monkeypatch, started
):
    """The values of MI300, of MI200, and of the second GCD of an MI250X. Torch sees only the second
    GPU of the node.
    """
    smi = drivers("amdsmi")
    smi.GPUS[0, BUSES[0], 0, 0] = {"percent": 1, "power": {}, "celsius": {}}
    smi.GPUS[0, BUSES[1], 0, 0] = {"percent": 97, "power": power, "celsius": celsius}
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")
    select_gpu(monkeypatch, 1, hip="7.0")
    expected = {"utilisation": 0.97, "power_w": watts, "temperature_c": temperature}
    known = {name: value for name, value in expected.items() if value is not None}
    assert first_fields(started(device_reader(GPU))) == known


def test_amd_utilisation_may_be_unknown(drivers, monkeypatch, started):
    smi = drivers("amdsmi")
    power = {"current_socket_power": 500, "average_socket_power": "N/A"}
    smi.GPUS[0, BUSES[0], 0, 0] = {"percent": "N/A", "power": power, "celsius": {1: 70}}
    select_gpu(monkeypatch, 0, hip="7.0")
    assert first_fields(started(device_reader(GPU))) == {"power_w": 500, "temperature_c": 70}


@pytest.mark.parametrize(
    ("package", "hip", "advice"),
    [("pynvml", None, "[nvidia]"), ("amdsmi", "7.0", "pip install amdsmi")],
)
def test_missing_package_is_reported_once(package, hip, advice, monkeypatch, started, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    select_gpu(monkeypatch, 0, hip=hip)
    reader = started(device_reader(GPU))
    assert advice in first_fields(reader)["device_problem"]
    time.sleep(0.1)
    assert capsys.readouterr().err.count("WARNING") == 1 and reader.num_errors == 0


def test_driver_errors_are_counted_and_read_again(drivers, monkeypatch, started, capsys):
    nvml = drivers("pynvml")
    calls: list[int] = []

    def percent() -> int:
        calls.append(1)
        if len(calls) <= 3:
            raise nvml.NVMLError(nvml.NVML_ERROR_GPU_IS_LOST)
        return 80

    nvml.GPUS[0, BUSES[0], 0, 0] = {"percent": percent, "milliwatts": 1000, "celsius": 30}
    select_gpu(monkeypatch, 0)
    reader = started(device_reader(GPU))
    assert eventually(lambda: reader.fields().get("utilisation") == 0.8, 30)
    reader.end()
    assert reader.num_errors == 3
    log = capsys.readouterr().err
    assert log.count("GPU is lost") == 1 and "3 readings of the device failed" in log


def test_gpu_that_driver_does_not_know_is_a_problem(drivers, monkeypatch, started):
    drivers("pynvml")
    select_gpu(monkeypatch, 0)
    assert "code 6" in first_fields(started(device_reader(GPU)))["device_problem"]


@pytest.mark.parametrize("value", [float("nan"), 2**70, "N/A", 10**400])
def test_impossible_value_is_an_error_of_the_reading(value, started):
    """A heartbeat with such a value would raise an error in the training thread."""
    reader = started(DeviceReader(lambda: always(DeviceReading(memory_bytes=value))))
    assert "cannot be read" in first_fields(reader)["device_problem"]


def test_old_values_are_not_reported_while_driver_hangs(monkeypatch, started, capsys):
    """The second call of the driver hangs. `fields`, which heartbeats call, never waits."""
    monkeypatch.setattr(device_readings, "OLDEST_S", 0.2)
    release = threading.Event()

    def readings() -> Readings:
        yield DeviceReading(utilisation=0.5)
        release.wait(60)
        yield from always(DeviceReading(utilisation=0.5))

    reader = started(DeviceReader(readings))
    assert first_fields(reader) == {"utilisation": 0.5}
    assert eventually(lambda: "device_problem" in reader.fields(), 30)
    assert "has not answered" in reader.fields()["device_problem"]
    assert reader.num_errors == 1 and capsys.readouterr().err.count("WARNING") == 1
    release.set()
    assert eventually(lambda: reader.fields() == {"utilisation": 0.5}, 30)


def test_heartbeat_has_values_of_device(tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    reader = DeviceReader(lambda: always(DeviceReading()))
    home, notices = RunDirectory(tmp_path), Notices(tmp_path, 1)
    heartbeat = Heartbeat(home, 1, dist.group.WORLD, notices, lambda: None, reader)
    step = done()
    step.row |= {"step_time_s": 1.0, "memory_bytes": 5 * 2**30}
    heartbeat.after_step(step)
    reading = DeviceReading(utilisation=0.9, power_w=650.0, temperature_c=61)
    reader._newest = (time.monotonic(), heartbeat_fields(reading))
    heartbeat.write()
    (beat,) = read_rank_heartbeats(tmp_path, 1)
    assert (beat.utilisation, beat.power_w, beat.temperature_c) == (0.9, 650.0, 61)
    assert beat.memory_bytes == 5 * 2**30 and beat.device_problem is None
    heartbeat.summarise_devices()
    assert heartbeat.take_device_row() == {
        "lowest_device_utilisation": 0.9,
        "highest_device_temperature_c": 61,
        "largest_device_memory_bytes": 5 * 2**30,
        "device_power_w": 650.0,
    }
    assert heartbeat.take_device_row() == {}, "each summary is in one row only"


def neuron_report(pid: int) -> dict[str, Any]:
    """Returns a report of `neuron-monitor` with two processes, in the form of its user guide
    (https://awsdocs-neuron.readthedocs-hosted.com, Neuron Monitor User Guide).
    """

    def runtime(pid: int, percents: dict[str, float], used: int) -> dict[str, Any]:
        cores = {core: {"neuroncore_utilization": value} for core, value in percents.items()}
        memory = {"host": 1000, "neuron_device": used}
        report = {
            "neuroncore_counters": {"period": 1.0, "neuroncores_in_use": cores, "error": ""},
            "memory_used": {"neuron_runtime_used_bytes": memory, "error": ""},
        }
        return {"pid": pid, "neuron_runtime_tag": "1", "error": "", "report": report}

    runtimes = [runtime(pid + 1, {"0": 5.0}, 1), runtime(pid, {"2": 40.0, "3": 60.0}, 9 * 2**30)]
    return {"neuron_runtime_data": runtimes, "system_data": {}, "neuron_hardware_info": {}}


def test_neuron_reading_is_of_this_process():
    reading = neuron_reading(neuron_report(77), 77)
    assert reading == DeviceReading(utilisation=0.5, memory_bytes=9 * 2**30)
    assert neuron_reading(neuron_report(77), 99) == DeviceReading()
    assert neuron_reading({"neuron_runtime_data": None}, 77) == DeviceReading()


def test_neuron_monitor_is_read_line_by_line(tmp_path, monkeypatch, started):
    program = tmp_path / "neuron-monitor"
    line = json.dumps(neuron_report(os.getpid()))
    program.write_text(f"#!/bin/sh\nwhile echo '{line}'; do sleep 0.05; done\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    fields = first_fields(started(device_reader(torch.device("xla"))))
    assert fields == {"utilisation": 0.5, "memory_bytes": 9 * 2**30}


def test_missing_or_ended_neuron_monitor_is_reported(tmp_path, monkeypatch, started):
    monkeypatch.setenv("PATH", str(tmp_path))
    reader = started(device_reader(torch.device("xla")))
    assert "aws-neuronx-tools" in first_fields(reader)["device_problem"]
    program = tmp_path / "neuron-monitor"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    reader = started(device_reader(torch.device("xla")))
    assert "exit code 3" in first_fields(reader)["device_problem"]


def test_pci_address_has_the_form_of_the_drivers(monkeypatch):
    select_gpu(monkeypatch, 1)
    assert pci_address(GPU) == "0000:c1:00.0"
