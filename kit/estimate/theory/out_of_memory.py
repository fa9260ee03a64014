"""Out of memory: what a device uses beyond the modelled bytes, and how likely a run stops for
lack of memory.
"""

import dataclasses

import numpy as np

from cluster.record import ConfigError, Record, field_doc

Array = np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reserve(Record):
    """Memory that is not modelled, as a function of what is, and the odds that come of it.

    used = state + factor x dynamic + extra_bytes. State (weights, gradients, optimizer) is
    allocated once and exactly; what comes and goes in each step is fragmented and has temporaries
    (`factor`); context, kernels and communication library take the rest. Probability of running out
    = 1 / (1 + (capacity / used)^sharpness).
    """

    factor: float = field_doc("of activations, logits, workspace and buffers")
    extra_bytes: float = field_doc("of a device, whatever it holds")
    sharpness: float = field_doc("odds of running out grow by this power of used / capacity")
    source: str = field_doc("rows that it was fitted to")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.5 <= self.factor <= 3 or self.extra_bytes < 0 or self.sharpness <= 0:
            raise ConfigError(
                f"reserve: factor {self.factor:.3g}, extra_bytes {self.extra_bytes:.3g} or"
                f" sharpness {self.sharpness:.3g} is not allowed. Give a factor from 0.5 to 3,"
                " bytes from 0 and a power above 0."
            )

    def used_bytes(self, state: Array, dynamic: Array) -> Array:
        """Returns bytes that a device shows as used."""
        return state + (self.factor * dynamic + self.extra_bytes)

    def out_of_memory_probability(self, used_bytes: Array, device_bytes: float) -> Array:
        """Returns the probability, 0 to 1, that a run stops for lack of memory on devices of
        `device_bytes`.
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
"""Fitted and scored by `make validate`: what a run needs. A monitor shows more, since allocators
keep what they freed:"""
MONITOR_RESERVE = RESERVE.replace(
    factor=1.18,
    extra_bytes=6.9e9,
    source="34 readings of BLOOM's prequel runs on A100 (BigScience tr11 chronicles)",
)
CORE_RESERVE = RESERVE.replace(
    factor=1.0,
    extra_bytes=3e9,
    sharpness=60.0,
    source="70 published runs that ran (Megatron-Bridge archive, Megatron-LM README)",
)
"""Of Megatron-Core. Memory does not break up where segments grow (PYTORCH_CUDA_ALLOC_CONF, which
its recipes set); context and communication library stay. 68 of these runs take at most 91 % of
their devices by it; two, on GB300, do not fit by any count."""
