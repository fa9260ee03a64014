"""Stand-in for nvidia-ml-py: the functions that the kit calls, with the names, arguments, units and
errors of version 13.615.71. `GPUS` are the GPUs of the node.
"""

from types import SimpleNamespace
from typing import Any

NVML_ERROR_UNINITIALIZED = 1
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_GPU_IS_LOST = 15
NVML_TEMPERATURE_GPU = 0

GPUS: dict[tuple[int, ...], dict[str, Any]] = {}
"""Values of each GPU by (domain, bus, device, function) of its PCI address. An exception in place
of a value is raised."""
is_initialised = False


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return {15: "GPU is lost"}.get(self.value, f"NVML Error with code {self.value}")


def nvmlInit() -> None:
    global is_initialised
    is_initialised = True


def nvmlDeviceGetHandleByPciBusId(pciBusId: str | bytes) -> Any:
    if not is_initialised:
        raise NVMLError(NVML_ERROR_UNINITIALIZED)
    text = pciBusId.decode() if isinstance(pciBusId, bytes) else pciBusId
    address = tuple(int(part, 16) for part in text.replace(".", ":").split(":"))
    if address not in GPUS:
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    return GPUS[address]


def _value(handle: Any, name: str) -> Any:
    value = handle[name]
    if isinstance(value, Exception):
        raise value
    return value() if callable(value) else value


def nvmlDeviceGetUtilizationRates(handle: Any) -> Any:
    return SimpleNamespace(gpu=_value(handle, "percent"), memory=1)


def nvmlDeviceGetPowerUsage(handle: Any) -> int:
    return _value(handle, "milliwatts")


def nvmlDeviceGetTemperature(handle: Any, sensor: int) -> int:
    assert sensor == NVML_TEMPERATURE_GPU
    return _value(handle, "celsius")
