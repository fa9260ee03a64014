"""Models in the formats of others, and out of them: Hugging Face, Megatron-LM, DeepSpeed, NeuronX Distributed, GGUF."""

from typing import TYPE_CHECKING

from kit.run import Run

if TYPE_CHECKING:
    from kit.convert.weights import Weights
    from kit.model import Decoder


def run_weights(run: Run, step: int | None = None) -> "Weights":
    """Returns the weights of one checkpoint (default: the newest), whichever engine wrote it.

    Raises:
        CheckpointError: there is no complete checkpoint, or none at that step; to fill, too, where it is damaged.
    """
    from kit.convert.weights import Weights

    step = run.checkpoints.newest() if step is None else step
    if run.checkpoints.manifest(step).plan.engine == "neuron":
        from kit.convert.neuron import import_nxd

        return import_nxd(run.checkpoints.path(step), run.spec)
    from kit.run.checkpoint_tensors import CheckpointTensors

    tensors = CheckpointTensors(run.checkpoints, step, run.spec)
    return Weights(run.spec, lambda name, target: tensors.fill(f"model.{name}", target))


def load_model(run: Run, step: int | None = None) -> "Decoder":
    """Returns the whole model of one checkpoint (default: the newest) on the CPU, fp32, in evaluation mode.

    Raises:
        CheckpointError: there is no complete checkpoint, or none at that step, or it is damaged.
    """
    return run_weights(run, step).decoder()
