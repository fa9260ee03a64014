"""A simulated NeuronX Distributed (NxD), written from recorded function signatures. It computes on
CPUs, over gloo, in fp32.

Every call must use keyword arguments and fit every recorded version of the real NxD. Calls are
recorded. Tensor, sequence and data parallelism and copies of key/value heads compute as in the real
NxD. A pipeline does not: each of its ranks runs the whole model on the given micro-batches. A test
that passes with the simulated NxD does not prove that the code works on Trainium.
"""

from neuronx_distributed.checkpoint import finalize_checkpoint, load_checkpoint, save_checkpoint
from neuronx_distributed.trainer import (
    initialize_parallel_model,
    initialize_parallel_optimizer,
    neuronx_distributed_config,
)

__all__ = [
    "finalize_checkpoint",
    "initialize_parallel_model",
    "initialize_parallel_optimizer",
    "load_checkpoint",
    "neuronx_distributed_config",
    "save_checkpoint",
]
