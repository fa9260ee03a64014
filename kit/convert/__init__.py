"""Models in the formats of others, and out of them: Hugging Face, Megatron-LM, DeepSpeed, NeuronX Distributed, GGUF."""

from typing import TYPE_CHECKING

from kit.run import Run

if TYPE_CHECKING:
    from kit.model import Decoder


def load_model(run: Run, step: int | None = None) -> "Decoder":
    """Returns the whole model of one checkpoint (default: the newest) on the CPU, fp32, in evaluation mode.

    Raises:
        CheckpointError: there is no complete checkpoint, or none at that step, or it is damaged.
    """
    from kit.convert.weights import Weights

    return Weights.of_run(run, step).decoder()
