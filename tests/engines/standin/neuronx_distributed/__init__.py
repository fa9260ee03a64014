"""A stand-in for NeuronX Distributed, written from its recorded signatures: it computes on CPUs,
over gloo, in fp32.

Every call must be by keyword and fit every recorded version of the real package; it is recorded
too. Tensor, sequence and data parallelism compute, and so do copies of key/value heads. A pipeline
does not: each of its ranks runs the whole model, on micro-batches as told. What passes here has not
run on Trainium.
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
