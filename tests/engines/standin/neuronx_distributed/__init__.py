"""A stand-in for NeuronX Distributed, written from its recorded signatures: it computes on CPUs,
over gloo, in fp32.

Every call must be by keyword and fit every recorded version of the real package. Calls are
recorded. Tensor, sequence and data parallelism and copies of key/value heads compute as in NxD. A
pipeline does not: each of its ranks runs the whole model on the given micro-batches. A test that
passes with the stand-in has not run on Trainium.
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
