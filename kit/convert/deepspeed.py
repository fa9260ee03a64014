"""DeepSpeed's universal checkpoints: what its converter makes of the files of ranks.

Under `zero/` is a folder for each weight, whole, by the name that the module gives it. Source:
deepspeed/checkpoint/ds_to_universal.py and universal_checkpoint.py of DeepSpeed 0.19.8
(github.com/deepspeedai/DeepSpeed).
"""

from pathlib import Path

from torch import Tensor

from kit.convert.formats import named
from kit.convert.weights import Weights, load_tensors, parameter_shapes
from kit.errors import DataError
from kit.spec import ModelSpec


def import_universal(folder: str | Path, spec: ModelSpec) -> Weights:
    """Returns the weights of a universal checkpoint.

    The folder is `global_stepN`, written by DeepSpeed's converter for a module of the kit; its
    files do not describe the model.

    Raises:
        DataError: a weight is missing, damaged or of another shape.
    """
    shapes = parameter_shapes(spec)

    def read(name: str) -> Tensor:
        file = Path(folder) / "zero" / name / "fp32.pt"
        if not file.exists():
            raise DataError(
                f"{file} does not exist. {named(Path(folder), 'universal')}"
                f"Give a folder global_stepN of a module with the kit's names."
            )
        held = load_tensors(file)
        weight = held["param"] if "param" in held else held[""]
        # From ZeRO 3, the converter writes a weight as a row, with what padded it out to all ranks.
        shape = shapes[name]
        return (
            weight[: shape.numel()].view(shape)
            if weight.ndim == 1 and len(weight) >= shape.numel()
            else weight
        )

    return Weights.read_by(spec, read, Path(folder))
