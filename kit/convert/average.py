"""Averages of checkpoints: the mean of the weights late in a training often scores better than the last of them.

HLAT's Table IV averages its last checkpoints (arXiv 2404.10630). Sums are in fp64, so the mean is that of the weights.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kit.convert.hugging_face import export_hugging_face, import_hugging_face
from kit.convert.weights import Weights
from kit.errors import ConfigError


def average_models(models: Sequence[Weights]) -> Weights:
    """Returns the mean of the weights of several models, each made when it is asked for.

    Raises:
        ConfigError: there is none, or they are not of one model.
    """
    if not models:
        raise ConfigError("average: no checkpoint was given. Give at least one.")
    spec = models[0].spec
    for model in models:
        if model.spec.replace(name="") != spec.replace(name=""):
            raise ConfigError(f"average: {model.spec.name} is not the same model as {spec.name}.")

    def fill(targets: dict[str, Tensor]) -> None:
        for name, target in targets.items():
            total, one = torch.zeros(target.shape, dtype=torch.float64), torch.empty(target.shape)
            for model in models:
                model.fill({name: one})
                total += one
            target.copy_(total.div_(len(models)))

    return Weights(spec, fill)


def average_folders(folders: Sequence[Path], out: Path) -> Path:
    """Writes the mean of Hugging Face folders, with the tokenizer of the first; returns `out`.

    Raises:
        ConfigError: no folder was given, they are not of one model, or `out` holds something.
        DataError: one of them cannot be read.
    """
    mean = average_models([import_hugging_face(folder) for folder in folders])
    return export_hugging_face(mean, out, tokenizer=Path(folders[0]))
