"""Averages of checkpoints: the mean of the weights late in a training often scores better than the last of them.

HLAT's Table IV averages its last checkpoints (arXiv 2404.10630). Sums are in fp64, so the mean is that of the weights.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from kit.convert.hugging_face import export_hugging_face, import_hugging_face
from kit.errors import ConfigError
from kit.model import Decoder


def average_models(decoders: Iterable[Decoder]) -> Decoder:
    """Returns the decoder whose weights are the mean of those given, fp32; only one of them is held at a time.

    Raises:
        ConfigError: there is none, or they are not of one model.
    """
    mean: Decoder | None = None
    sums: dict[str, torch.Tensor] = {}
    count = 0
    for decoder in decoders:
        mean = mean or decoder
        if decoder.spec.replace(name="") != mean.spec.replace(name=""):
            raise ConfigError(f"average: {decoder.spec.name} is not the same model as {mean.spec.name}.")
        count += 1
        for name, weight in decoder.named_parameters():
            weight = weight.detach().double()
            sums[name] = sums[name] + weight if name in sums else weight
    if mean is None:
        raise ConfigError("average: no checkpoint was given. Give at least one.")
    with torch.no_grad():
        for name, weight in mean.named_parameters():
            weight.copy_(sums[name] / count)
    return mean


def average_folders(folders: Sequence[Path], out: Path) -> Path:
    """Writes the mean of Hugging Face folders, with the tokenizer of the first; returns `out`.

    Raises:
        ConfigError: no folder was given, they are not of one model, or `out` holds something.
        DataError: one of them cannot be read.
    """
    decoder = average_models(import_hugging_face(folder) for folder in folders)
    return export_hugging_face(decoder, out, tokenizer=Path(folders[0]))
