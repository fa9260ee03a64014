"""Models out of the formats of others and into them: Hugging Face, Megatron-LM, DeepSpeed,
NeuronX Distributed.
"""

from typing import TYPE_CHECKING

from kit.run import Run

if TYPE_CHECKING:
    from kit.convert.weights import Weights
    from kit.model import Decoder


def run_weights(run: Run, step: int | None = None) -> "Weights":
    """Returns the weights of one checkpoint (default: the newest), whichever engine wrote it.

    Raises:
        CheckpointError: there is no complete checkpoint, or none at that step; to fill, too, where
            it is damaged.
    """
    from kit.convert.weights import Weights

    known = run.checkpoints.describe(run.checkpoints.step_or_newest(step))
    if known[0].plan.engine == "neuron":
        from kit.convert.neuron import import_nxd

        return import_nxd(run.checkpoints.path(known[0].step), run.spec)
    from kit.run.checkpoint_reader import CheckpointTensors

    tensors = CheckpointTensors(run.checkpoints, known, run.spec)
    return Weights(
        run.spec,
        lambda targets: tensors.fill_all({f"model.{name}": targets[name] for name in targets}),
    )


def load_model(run: Run, step: int | None = None) -> "Decoder":
    """Returns the whole model of one checkpoint (default: the newest) on the CPU, fp32, in
    evaluation mode.

    Raises:
        CheckpointError: there is no complete checkpoint, or none at that step, or it is damaged.
    """
    return run_weights(run, step).decoder()
