"""Reads the utilisation, power and temperature of a rank's device from its driver, in a separate
thread: a call of a driver may hang, and then neither training nor the heartbeats may be late.

The functions `torch.cuda.utilization`, `power_draw` and `temperature` are not used (torch 2.13). On
AMD GPUs they ignore the values of ROCR_VISIBLE_DEVICES and so may read another device. There
`power_draw` returns watts instead of milliwatts, and 0 if the power is unknown. On NVIDIA GPUs they
assume that CUDA numbers the devices in the order of their PCI addresses. Here the device is found
by the PCI address that torch reports, so the environment variables that select devices do not
matter.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import torch

from cluster.heartbeats import MAX_DEVICE_VALUE
from cluster.record import counted
from kit.errors import install_command

READ_EVERY_S = 1.0
"""Seconds between two readings of a device, which is the time between two heartbeats."""
RETRY_EVERY_S = 60.0
"""Seconds between two readings after a reading has failed. A driver that fails once often fails
again, and its calls may then take long."""
OLDEST_S = 15.0
"""Largest age, in seconds, of a reading that a heartbeat reports. A call of the driver that takes
longer hangs. `neuron-monitor` writes a line every 5 s."""

Readings = Generator["DeviceReading"]
"""Readings of one device. Each `next` calls the driver. `close` releases what the driver needs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceReading:
    """Values of a device at one time. A value is None if the device or its driver does not provide
    it.
    """

    utilisation: float | None = None
    """Fraction of the last sampling period of the driver in which the device computed, 0 to 1."""
    power_w: float | None = None
    """Power of the device in watts."""
    temperature_c: float | None = None
    """Temperature of the device in degrees Celsius."""
    memory_bytes: int | None = None
    """Memory of the device that this process uses, in bytes. None on a GPU, where torch counts the
    memory."""


class NotInstalledError(Exception):
    """The package or program that reads a device is not installed. The message says what to
    install.
    """


class DeviceReader:
    """Reads the device of a rank every READ_EVERY_S seconds in a thread, once `start` was called.

    Args:
        open_device: generator function of the readings of the device. The generator runs in the
            thread.
    """

    def __init__(self, open_device: Callable[[], Readings]) -> None:
        self.open_device = open_device
        self.num_errors = 0
        """Number of readings so far that failed or that the driver did not answer in time."""
        self._problem: str | None = None
        self._has_printed = False
        self._newest: tuple[float, dict[str, float]] | None = None
        """Fields of a heartbeat from the newest reading, with the time of `time.monotonic` at which
        it arrived."""
        self._waits_since: float | None = None
        """Time of `time.monotonic` at which the present call of the driver began. None between two
        calls."""
        self._is_ended = threading.Event()

    def start(self) -> None:
        """Starts the thread. It ends with the process, even if a call of the driver hangs."""
        threading.Thread(target=self._run, name="device readings", daemon=True).start()

    def end(self) -> None:
        """Ends the thread without waiting for it, and prints how many readings have failed."""
        self._is_ended.set()
        if self.num_errors:
            failed = counted(self.num_errors, "reading")
            _print(f"{failed} of the device failed in this attempt")

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a heartbeat about the device: the newest values, or the reason why
        there are none. Never waits.
        """
        now = time.monotonic()
        newest = self._newest
        waits_since = self._waits_since
        if newest is not None and now - newest[0] <= OLDEST_S:
            return dict(newest[1])
        if waits_since is not None and now - waits_since > OLDEST_S:
            problem = f"the driver of the device has not answered for {OLDEST_S:.0f} s"
            self.num_errors += self._problem != problem
            self._report(problem)
        return {"device_problem": self._problem} if self._problem else {}

    def _run(self) -> None:
        readings: Readings | None = None
        wait_s = 0.0
        while not self._is_ended.wait(wait_s):
            self._waits_since = time.monotonic()
            try:
                if readings is None:
                    readings = self.open_device()
                fields = heartbeat_fields(next(readings))
                self._newest = (time.monotonic(), fields)
                self._problem = None
                wait_s = READ_EVERY_S
            except NotInstalledError as error:
                self._waits_since = None
                self._report(str(error))
                return
            except Exception as error:  # The packages have their own classes of errors.
                self.num_errors += 1
                if readings is not None:
                    readings.close()
                readings = None
                wait_s = RETRY_EVERY_S
                self._report(f"the device cannot be read: {' '.join(str(error).split())}")
            self._waits_since = None
        if readings is not None:
            readings.close()

    def _report(self, problem: str) -> None:
        """Stores a problem for the next heartbeats, and prints the first problem of the attempt."""
        self._problem = problem
        if not self._has_printed:
            self._has_printed = True
            _print(f"{problem}. Training continues without utilisation, power and temperature.")


def heartbeat_fields(reading: DeviceReading) -> dict[str, float]:
    """Returns the known values of a reading as fields of `cluster.heartbeats.RankHeartbeat`.

    Raises:
        ValueError: A value is no possible number. A heartbeat would refuse it, which must not end
            training.
    """
    fields = dict[str, float]()
    for name, value in dataclasses.asdict(reading).items():
        if value is None:
            continue
        number = float(value)
        if not abs(number) < MAX_DEVICE_VALUE:
            raise ValueError(f"{name} is {number:g}")
        fields[name] = int(number) if name == "memory_bytes" else number
    return fields


def device_reader(device: torch.device) -> DeviceReader | None:
    """Returns the reader of a rank's device. Returns None on a CPU, which has no such values."""
    if device.type == "xla":
        return DeviceReader(read_neuron_device)
    if device.type != "cuda":
        return None
    read_gpu = read_nvidia_device if torch.version.hip is None else read_amd_device
    # The thread asks torch for the address, so that an error there does not end training.
    return DeviceReader(lambda: read_gpu(pci_address(device)))


def pci_address(device: torch.device) -> str:
    """Returns the PCI address of a GPU, such as `0000:c1:00.0`."""
    properties: Any = torch.cuda.get_device_properties(device)
    domain = properties.pci_domain_id
    return f"{domain:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def read_nvidia_device(address: str) -> Readings:
    """Yields readings of the NVIDIA GPU with this PCI address through NVML. For a part of a GPU
    (MIG), power and temperature are those of the whole GPU.

    Raises:
        NotInstalledError: nvidia-ml-py is not installed.
        pynvml.NVMLError: The driver cannot be used, or has no such GPU.
    """
    nvml = _module("pynvml", f"nvidia-ml-py is not installed. Run: {install_command('nvidia')}")
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByPciBusId(address)

    def supported(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(handle, *arguments)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
                return None
            raise

    while True:
        rates = supported(nvml.nvmlDeviceGetUtilizationRates)
        milliwatts = supported(nvml.nvmlDeviceGetPowerUsage)
        yield DeviceReading(
            utilisation=None if rates is None else rates.gpu / 100,
            power_w=None if milliwatts is None else milliwatts / 1000,
            temperature_c=supported(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        )


def read_amd_device(address: str) -> Readings:
    """Yields readings of the AMD GPU or GCD with this PCI address through AMD SMI.

    Raises:
        NotInstalledError: amdsmi is not installed.
        amdsmi.AmdSmiException: The driver cannot be used, or has no such GPU.
    """
    smi = _module(
        "amdsmi", "amdsmi is not installed. Run pip install amdsmi, for your ROCm version"
    )
    smi.amdsmi_init()
    handle = smi.amdsmi_get_processor_handle_from_bdf(address)
    not_supported = smi.amdsmi_wrapper.AMDSMI_STATUS_NOT_SUPPORTED
    current = smi.AmdSmiTemperatureMetric.CURRENT
    # Some GPUs have only one of the two sensors.
    sensors = (smi.AmdSmiTemperatureType.JUNCTION, smi.AmdSmiTemperatureType.EDGE)

    def supported(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(handle, *arguments)
        except smi.AmdSmiLibraryException as error:
            if error.get_error_code() == not_supported:
                return None
            raise

    while True:
        activity = supported(smi.amdsmi_get_gpu_activity) or {}
        percent = _number(activity.get("gfx_activity"))
        power = supported(smi.amdsmi_get_power_info) or {}
        # MI300 reports only the current power, and MI200 only the average. Of the two GCDs of an
        # MI250X, one reports the power of both, and the other one 0 or "N/A".
        names = ("current_socket_power", "average_socket_power")
        watts = next(filter(None, (_number(power.get(name)) for name in names)), None)
        temperatures = (supported(smi.amdsmi_get_temp_metric, each, current) for each in sensors)
        yield DeviceReading(
            utilisation=None if percent is None else percent / 100,
            power_w=watts,
            temperature_c=next(filter(None, temperatures), None),
        )


def read_neuron_device() -> Readings:
    """Yields readings of the NeuronCores of this process from the lines of `neuron-monitor`. The
    tool reports neither power nor temperature.

    Raises:
        NotInstalledError: `neuron-monitor` is not on the PATH.
        RuntimeError: `neuron-monitor` has ended.
    """
    program = shutil.which("neuron-monitor")
    if program is None:
        raise NotInstalledError(
            "neuron-monitor is not on the PATH. Install the package aws-neuronx-tools"
        )
    # If this process is killed, the program ends too, since its output can no longer be written.
    process = subprocess.Popen(
        [program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            yield neuron_reading(json.loads(line), os.getpid())
        raise RuntimeError(f"neuron-monitor has ended with exit code {process.wait()}")
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


def neuron_reading(report: dict[str, Any], pid: int) -> DeviceReading:
    """Returns the values of one process in a report of `neuron-monitor`. The utilisation is the
    mean over the NeuronCores of the process.
    """
    for runtime in report.get("neuron_runtime_data") or []:
        if runtime.get("pid") != pid:
            continue
        metrics = runtime.get("report") or {}
        cores = (metrics.get("neuroncore_counters") or {}).get("neuroncores_in_use") or {}
        percents = [core["neuroncore_utilization"] for core in cores.values()]
        memory = (metrics.get("memory_used") or {}).get("neuron_runtime_used_bytes") or {}
        return DeviceReading(
            utilisation=sum(percents) / len(percents) / 100 if percents else None,
            memory_bytes=memory.get("neuron_device"),
        )
    return DeviceReading()


def _module(name: str, missing: str) -> Any:
    """Imports a package that has no type annotations. Raises NotInstalledError with the message
    `missing` if it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise NotInstalledError(missing) from error


def _number(value: Any) -> float | None:
    """Returns a value of AMD SMI as a number. Returns None for "N/A"."""
    return value if isinstance(value, int | float) else None


def _print(text: str) -> None:
    """Prints a line into the log of this rank."""
    with contextlib.suppress(OSError):  # A full disk must not end training.
        print(f"WARNING: {text}", file=sys.stderr, flush=True)
