"""Models in the formats of others, and out of them: Hugging Face, Megatron-LM, DeepSpeed, NeuronX Distributed, GGUF."""

from typing import TYPE_CHECKING

from kit.run import Run

if TYPE_CHECKING:
    from kit.model import Decoder


def load_model(run: Run, step: int | None = None) -> "Decoder":
    """Returns the whole model of one checkpoint (default: the newest) on the CPU, fp32, in evaluation mode.

    Raises:
        CheckpointError: there is no complete checkpoint, or none at that step.
    """
    from kit.model import empty_decoder

    step = run.checkpoints.newest() if step is None else step
    if run.checkpoints.manifest(step).plan.engine == "neuron":
        from kit.convert.neuron import import_nxd

        return import_nxd(run.checkpoints.path(step), run.spec)
    decoder = empty_decoder(run.spec)
    state = {f"model.{name}": parameter.detach() for name, parameter in decoder.named_parameters()}
    run.checkpoints.load(step, state, spec=run.spec, distributed=False)
    return decoder.eval()
