"""The weights of a model one at a time, wherever they lie, so that no conversion holds a whole
model.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kit.errors import DataError
from kit.model import Decoder, empty_decoder
from kit.spec import ModelSpec
from kit.torch_private import local_part


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights of one model, none of them in memory before it is asked for.

    `fill` writes those that it is given tensors for, by the kit's names. A tensor has the weight's
    shape, and any dtype and strides; of a DTensor, this rank's part is filled.
    """

    spec: ModelSpec
    fill: Callable[[dict[str, Tensor]], object]

    @classmethod
    def read_by(cls, spec: ModelSpec, read: Callable[[str], Tensor], source: Path) -> Self:
        """Returns weights of which `read` gives one, whole, by its name; to fill raises
        DataError unless it fits.
        """
        advice = (
            f"{source} does not hold {spec.name}; give the spec, or the config.json, that it was"
            " trained with."
        )

        def fill(targets: dict[str, Tensor]) -> None:
            for name, target in targets.items():
                try:
                    weight = read(name)
                except RuntimeError as error:  # a merged weight cannot be cut into heads
                    raise DataError(f"{name}: {error}. {advice}") from error
                if weight.shape != target.shape:
                    raise DataError(
                        f"{name} has shape {list(weight.shape)}, expected {list(target.shape)}."
                        f" {advice}"
                    )
                if isinstance(target, DTensor):
                    # Of a file in mapped memory, this part alone is read.
                    weight, target = local_part(weight, target), target.to_local()
                target.copy_(weight)

        return cls(spec, fill)

    @classmethod
    def of(cls, decoder: Decoder) -> Self:
        """Returns the weights of a whole decoder."""
        return cls.read_by(
            decoder.spec, lambda name: decoder.get_parameter(name).detach(), Path(decoder.spec.name)
        )

    def decoder(self, dtype: torch.dtype = torch.float32) -> Decoder:
        """Returns the whole model on the CPU, in evaluation mode."""
        decoder = empty_decoder(self.spec).to(dtype).eval()
        self.fill({name: parameter.detach() for name, parameter in decoder.named_parameters()})
        return decoder


def parameter_shapes(spec: ModelSpec) -> dict[str, torch.Size]:
    """Returns the shape of each weight by the kit's name, in the order of the model."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in Decoder(spec).named_parameters()}


def load_tensors(file: Path) -> dict[str, Any]:
    """Returns what a .pt file holds by name, mapped from the disk; only tensors and plain values
    are unpickled.

    A tensor alone has the name "".

    Raises:
        DataError: the file is damaged, or holds code.
    """
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(state, dict | Tensor):
            raise TypeError(f"it holds a {type(state).__name__}")
        return state if isinstance(state, dict) else {"": state}
    except Exception as error:  # torch raises plain RuntimeError, UnpicklingError and others
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{file}: cannot be read as tensors ({reason}). Copy it again, or re-save the weights"
            " alone."
        ) from error
