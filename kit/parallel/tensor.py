"""Tensor and sequence parallelism with torch's DTensor. `TENSOR_PARALLEL_SPLIT` says for each layer
of the model how its matrix is split.

A column-split matrix followed by a row-split matrix needs a single all-reduce (Megatron-LM, arXiv
1909.08053). With sequence parallelism a reduce-scatter and an all-gather replace the all-reduce,
and hidden states between blocks are split along the sequence axis T (arXiv 2205.05198).
"""

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from kit.model import TENSOR_PARALLEL_SPLIT, Decoder

T_AXIS = Shard(1)
V_AXIS = Shard(-1)


def apply_tensor_parallel(decoder: Decoder, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Splits the decoder's matrices over the ranks of the one-axis `mesh` and adds the
    communication between them, in place.

    Afterwards the logits of a rank have shape [B, T, V / tensor_parallel]: micro-batch B, sequence
    length T, vocabulary size V. `cross_entropy` of this module takes these logits.
    """
    between_blocks = T_AXIS if sequence_parallel else Replicate()
    styles: dict[str, ParallelStyle] = {}
    for name, split in TENSOR_PARALLEL_SPLIT.items():
        if split == "vocabulary":
            styles[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        elif split == "row":
            styles[name] = RowwiseParallel(output_layouts=between_blocks)
        else:
            styles[name] = ColwiseParallel()
    styles["output"] = ColwiseParallel(input_layouts=between_blocks, output_layouts=V_AXIS)
    # Column-split matrices with a common input share one gathered copy of it. The gradient of this
    # input is then reduced over the ranks only once.
    styles |= {
        "attention": PrepareModuleInput(
            input_layouts=(between_blocks, None), desired_input_layouts=(Replicate(), None)
        ),
        "feed_forward": PrepareModuleInput(
            input_layouts=(between_blocks,), desired_input_layouts=(Replicate(),)
        ),
    }
    if sequence_parallel:
        styles |= {
            "embedding": PrepareModuleOutput(
                output_layouts=Replicate(), desired_output_layouts=T_AXIS
            ),
            "attention_norm": SequenceParallel(),
            "feed_forward_norm": SequenceParallel(),
            "norm": SequenceParallel(),
        }
    for module in (decoder, *decoder.layers.values()):
        inner = dict(module.named_modules())
        here = {name: style for name, style in styles.items() if name in inner}
        parallelize_module(module, mesh, here)
    if decoder.embedding is not None:
        # The local part of a DTensor is a view. Without the clone, a compiled block returns a
        # gradient that DTensor rejects.
        decoder.embedding.register_forward_hook(lambda _module, _inputs, x_BTH: x_BTH.clone())
    decoder.tie()


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Returns the mean negative log-likelihood per token in nats, computed in fp32.

    If `mesh` is given, it is the mesh of the tensor parallel axis. The logits then cover only this
    rank's part of the vocabulary, and are never gathered. In this case, the function and its
    backward pass must run within torch's `loss_parallel`.
    """
    logits = logits_BTV.flatten(0, 1).float()
    if mesh is None:
        return F.cross_entropy(logits, targets_BT.flatten())
    loss = F.cross_entropy(
        DTensor.from_local(logits, mesh, (V_AXIS,), run_check=False), targets_BT.flatten()
    )
    # Zero-bubble schedules detach the loss in place. A view of a DTensor cannot be detached in
    # place, so the loss is cloned.
    return loss.to_local().clone() if isinstance(loss, DTensor) else loss
