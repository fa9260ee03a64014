"""Memory in use on a device in addition to the modelled bytes, and the probability that a run stops
because a device runs out of memory.
"""

import dataclasses

import numpy as np

from cluster.record import ConfigError, Record, field_doc

Array = np.ndarray
MAX_RISK = 0.05
"""Highest probability, 0 to 1, that a device runs out of memory, which the planner accepts by
default."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reserve(Record):
    """Memory that is not modelled. With it, the memory in use on a device is computed from the
    modelled bytes, and the probability that a run stops because the device runs out of memory.

    The memory in use is state + factor x dynamic + extra_bytes. State (weights, gradients,
    optimizer) is allocated once and exactly. Dynamic memory is allocated and freed in each step.
    `factor` covers its fragmentation and temporary tensors. `extra_bytes` covers the device's
    context, kernels and the communication library. The probability of running out of memory is
    1 / (1 + (capacity / used)^sharpness).
    """

    factor: float = field_doc(
        "ratio of used to modelled bytes of activations, logits, workspace and buffers"
    )
    extra_bytes: float = field_doc(
        "bytes in use on every device for context, kernels and communication library"
    )
    sharpness: float = field_doc(
        "exponent of used / capacity in the odds of running out of memory. A larger value gives a"
        " sharper limit"
    )
    source: str = field_doc("measured runs to which the reserve was fitted")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.5 <= self.factor <= 3 or self.extra_bytes < 0 or self.sharpness <= 0:
            raise ConfigError(
                f"reserve: factor {self.factor:.3g}, extra_bytes {self.extra_bytes:.3g} or"
                f" sharpness {self.sharpness:.3g} is not allowed. Give a factor from 0.5 to 3,"
                " bytes from 0 and a power above 0."
            )

    def used_bytes(self, state: Array, dynamic: Array) -> Array:
        """Returns the bytes in use on a device. `state` are the modelled bytes of weights,
        gradients and optimizer. `dynamic` are the modelled bytes that are allocated in each step.
        """
        return state + (self.factor * dynamic + self.extra_bytes)

    def out_of_memory_probability(self, used_bytes: Array, device_bytes: float) -> Array:
        """Returns the probability, 0 to 1, that a run runs out of memory. `used_bytes` are the
        bytes in use on a device, and `device_bytes` is the size of its memory.
        """
        return 1 / (1 + (device_bytes / used_bytes) ** self.sharpness)


RESERVE = Reserve(
    factor=1.28,
    extra_bytes=1.3e9,
    sharpness=21.0,
    source=(
        "783 runs of Llama 13B and 30B on A100, 480 of them out of memory (Aleph Alpha, arXiv"
        " 2311.05610)"
    ),
)
"""Reserve with which the memory that a run needs is predicted. `make validate` fits these numbers
and computes the error of the predictions."""
MONITOR_RESERVE = RESERVE.replace(
    factor=1.18,
    extra_bytes=6.9e9,
    source="34 readings of BLOOM's prequel runs on A100 (BigScience tr11 chronicles)",
)
"""Reserve with which the memory that a monitor shows is predicted. A monitor shows more than a run
needs, since allocators keep memory that was freed. `make validate` fits these numbers and computes
the error of the predictions."""
CORE_RESERVE = RESERVE.replace(
    factor=1.0,
    extra_bytes=3e9,
    sharpness=60.0,
    source="70 published runs that ran (Megatron-Bridge archive, Megatron-LM README)",
)
"""Reserve for Megatron-Core. The factor is 1, since Megatron-Core's recipes set
PYTORCH_CUDA_ALLOC_CONF so that segments of the allocator can grow, which avoids fragmentation. The
extra bytes are for context and communication library.

With this reserve, 68 of the 70 runs need at most 91 % of the memory of their devices. The other two
runs, on GB300, exceed the memory of their devices in every way of counting the bytes, although
these runs did not run out of memory."""
