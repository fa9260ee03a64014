"""Stand-in for amdsmi: the functions that the kit calls, with the names, arguments, units and
errors of version 7.0.2. `GPUS` are the GPUs of the node.
"""

import enum
import re
from types import SimpleNamespace
from typing import Any

amdsmi_wrapper = SimpleNamespace(AMDSMI_STATUS_NOT_SUPPORTED=2, AMDSMI_STATUS_NOT_FOUND=31)
GPUS: dict[tuple[int, ...], dict[str, Any]] = {}
"""Values of each GPU by (domain, bus, device, function) of its PCI address. A sensor that is not in
`celsius` is not supported."""
is_initialised = False


class AmdSmiException(Exception):
    pass


class AmdSmiLibraryException(AmdSmiException):
    def __init__(self, err_code: int) -> None:
        super().__init__(err_code)
        self.err_code = err_code

    def get_error_code(self) -> int:
        return self.err_code


class AmdSmiTemperatureType(enum.IntEnum):
    EDGE = 0
    HOTSPOT = 1
    JUNCTION = 1
    VRAM = 2


class AmdSmiTemperatureMetric(enum.IntEnum):
    CURRENT = 0
    MAX = 1


def amdsmi_init(flag: int = 2) -> None:
    global is_initialised
    is_initialised = True


def amdsmi_get_processor_handle_from_bdf(bdf: str) -> Any:
    assert is_initialised
    parts = re.match(r"^([0-9a-fA-F]{4}):([0-9a-fA-F]{2}):([0-1][0-9a-fA-F])\.([0-7])$", bdf)
    assert parts is not None
    address = tuple(int(part, 16) for part in parts.groups())
    if address not in GPUS:
        raise AmdSmiLibraryException(amdsmi_wrapper.AMDSMI_STATUS_NOT_FOUND)
    return GPUS[address]


def amdsmi_get_gpu_activity(processor_handle: Any) -> dict[str, Any]:
    return {"gfx_activity": processor_handle["percent"], "umc_activity": 1, "mm_activity": "N/A"}


def amdsmi_get_power_info(processor_handle: Any) -> dict[str, Any]:
    return {"gfx_voltage": 800, "power_limit": 560, **processor_handle["power"]}


def amdsmi_get_temp_metric(
    processor_handle: Any, sensor_type: AmdSmiTemperatureType, metric: AmdSmiTemperatureMetric
) -> int:
    assert metric is AmdSmiTemperatureMetric.CURRENT
    celsius = processor_handle["celsius"]
    if sensor_type.value not in celsius:
        raise AmdSmiLibraryException(amdsmi_wrapper.AMDSMI_STATUS_NOT_SUPPORTED)
    return celsius[sensor_type.value]
