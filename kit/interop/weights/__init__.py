"""Converts models to and from other formats: Hugging Face, Megatron-LM, DeepSpeed and NeuronX
Distributed.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kit.model import Decoder
    from kit.run import Run


def load_model(run: "Run", step: int | None = None) -> "Decoder":
    """Returns the whole model of one checkpoint (default: the newest), on the CPU, in fp32 and in
    evaluation mode.

    Raises:
        CheckpointError: There is no complete checkpoint, or none at that step, or it is damaged.
    """
    # Imports torch, so it is imported late: readers of a configuration need no torch.
    from kit.interop.weights.hugging_face import run_weights

    return run_weights(run, step).decoder()
