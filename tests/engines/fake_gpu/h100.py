"""Makes the Python code of a CUDA build of torch see eight H100. The import of this module has this
effect.

Import this module before the rest of torch, in a process that has loaded the simulated driver
`driver.c`.
"""

import contextlib
import ctypes
import importlib
import time
import types
from typing import Any

import torch
import torch._dynamo.device_interface as device_interface
import torch._inductor.fx_passes.joint_graph as joint_graph
import torch._inductor.fx_passes.post_grad as post_grad
import torch._subclasses.fake_tensor as fake_tensor
from torch.distributed.device_mesh import DeviceMesh

DEVICES = 8
# Properties of NVIDIA's H100 SXM, as `torch.cuda.get_device_properties` returns them.
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=85_045_084_160,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    warp_size=32,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=52428800,
    gcnArchName="",
    is_integrated=0,
    is_multi_gpu_board=0,
    memory_bus_width=5120,
    memory_clock_rate=2619000,
    clock_rate=1980000,
    uuid="0",
    pci_bus_id=0,
)


class Event:
    """A simulated CUDA event that is complete as soon as it is recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.time = 0.0

    def record(self, *_: Any) -> None:
        self.time = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def elapsed_time(self, other: "Event") -> float:
        return 1e3 * (other.time - self.time)


class Stream:
    """A simulated CUDA stream, in which work is complete as soon as it is started."""

    stream_id = device_index = cuda_stream = 0
    device_type = 1
    device = torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class Device:
    """A context manager that replaces `torch.cuda.device`. Device 0 stays the current device."""

    idx = 0

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> "Device":
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class TritonDriver:
    """A simulated Triton driver, which provides the properties that Triton needs to
    generate code.
    """

    binary_ext = "cubin"
    utils = types.SimpleNamespace(
        get_device_properties=lambda device: {
            "max_shared_mem": 232448,
            "max_num_regs": 65536,
            "multiprocessor_count": 132,
            "warpSize": 32,
            "sm_clock_rate": 1980000,
            "mem_clock_rate": 2619000,
            "mem_bus_width": 5120,
        }
    )

    def get_current_target(self) -> Any:
        target = importlib.import_module("triton.backends.compiler").GPUTarget
        return target("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_benchmarker(self) -> None:
        return None


def _returning(value: Any) -> Any:
    """Returns a new function that always returns `value`. Each replaced name needs a separate
    function, because Dynamo refuses one function under two names.
    """
    return lambda *_, **__: value


def _patch(owner: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


torch._C._ensureCUDADeviceGuardSet()
ctypes.CDLL(None).kit_show_devices(DEVICES)
STREAM = Stream()
_patch(
    torch.cuda,
    is_available=lambda: True,
    device_count=lambda: DEVICES,
    get_device_properties=lambda device=None: PROPERTIES,
    get_device_capability=lambda device=None: (9, 0),
    get_device_name=lambda device=None: PROPERTIES.name,
    get_arch_list=lambda: ["sm_90"],
    is_bf16_supported=lambda *_, **__: True,
    is_initialized=lambda: True,
    is_current_stream_capturing=lambda: False,
    current_device=_returning(0),
    set_device=_returning(None),
    synchronize=_returning(None),
    _lazy_init=_returning(None),
    _exchange_device=_returning(0),
    _maybe_exchange_device=_returning(0),
    Event=Event,
    Stream=Stream,
    device=Device,
    device_of=Device,
    _DeviceGuard=Device,
    current_stream=lambda device=None: STREAM,
    default_stream=lambda device=None: STREAM,
    stream=lambda stream: contextlib.nullcontext(),
    set_stream=_returning(None),
    get_rng_state=lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
    set_rng_state=_returning(None),
)
_patch(torch.accelerator, current_stream=lambda device=None: STREAM)
_patch(
    torch._C,
    _cuda_getDevice=_returning(0),
    _cuda_setDevice=_returning(None),
    _cuda_exchangeDevice=_returning(0),
    _cuda_maybeExchangeDevice=_returning(0),
    _cuda_getCurrentRawStream=_returning(0),
    _cuda_getDeviceCount=lambda: DEVICES,
    _cuda_init=_returning(None),
    _cuda_getCurrentStream=lambda device: (0, 0, 1),
)
_patch(fake_tensor, init_gpu_context=_returning(None))
_patch(
    device_interface.CudaInterface,
    device=Device,
    Event=Event,
    Stream=Stream,
    current_device=staticmethod(_returning(0)),
    set_device=staticmethod(_returning(None)),
    device_count=staticmethod(lambda: DEVICES),
    synchronize=staticmethod(_returning(None)),
    get_raw_stream=staticmethod(_returning(0)),
    exchange_device=staticmethod(_returning(0)),
    maybe_exchange_device=staticmethod(_returning(0)),
    is_available=staticmethod(lambda: True),
    get_device_properties=staticmethod(lambda device=None: PROPERTIES),
    is_bf16_supported=staticmethod(lambda *_, **__: True),
    stream=staticmethod(lambda stream: contextlib.nullcontext()),
    current_stream=staticmethod(lambda device=None: STREAM),
    set_stream=staticmethod(_returning(None)),
)
_patch(
    device_interface.CudaInterface.Worker,
    current_device=staticmethod(_returning(0)),
    set_device=staticmethod(_returning(None)),
    get_device_properties=staticmethod(lambda device=None: PROPERTIES),
)
# Torch traces patterns of unfused attention with real tensors on the device, which does not exist.
# The patterns are not needed, because the kit calls torch's attention function.
_patch(joint_graph, lazy_init=_returning(None))
_patch(post_grad, lazy_init=_returning(None))
importlib.import_module("triton").runtime.driver.set_active(TritonDriver())


def outside_fake_tensors(function: Any) -> Any:
    """Returns a version of a function that computes with real tensors instead of fake tensors. The
    mesh of ranks needs real values.
    """

    def wrapped(*arguments: Any, **options: Any) -> Any:
        with fake_tensor.unset_fake_temporarily():
            return function(*arguments, **options)

    return wrapped


_patch(
    DeviceMesh,
    __getitem__=outside_fake_tensors(DeviceMesh.__getitem__),
    _concatenate=staticmethod(outside_fake_tensors(DeviceMesh._concatenate)),
)
