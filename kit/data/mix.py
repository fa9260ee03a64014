"""What a recipe trains on: its dataset, or a mix of sources whose tokens are of that dataset's vocabulary."""

import glob
import math
from pathlib import Path

from kit.data.dataset import DESCRIPTION, Dataset
from kit.data.samples import Samples
from kit.data.token_file import TokenFile
from kit.data.windows import Windows
from kit.errors import DataError
from kit.recipe import Recipe


def training_samples(recipe: Recipe, sequence_length: int) -> Samples:
    """Returns the training sequences of a recipe.

    Raises:
        DataError: token files are missing, damaged, too short, or of another vocabulary than `recipe.data`.
    """
    dataset = Dataset.open(recipe.data)
    if not recipe.sources:
        return dataset.samples("train", sequence_length, recipe.seed)
    sources = [
        Windows([_token_file(Path(path), dataset) for path in source.paths], sequence_length, recipe.seed, number)
        for number, source in enumerate(recipe.sources)
    ]
    firsts = [0, *(math.ceil(phase.until_tokens / sequence_length) for phase in recipe.phases)]
    weights = [*(phase.weights for phase in recipe.phases), [source.weight for source in recipe.sources]]
    return Samples(sources, sequence_length, list(zip(firsts, weights, strict=True)))


def located(recipe: Recipe) -> Recipe:
    """Returns the recipe with full paths, and in place of a pattern (`web/part_*`) the shards that match it now."""
    shards = [[shard for path in source.paths for shard in _shards(path)] for source in recipe.sources]
    sources = [source.replace(paths=paths) for source, paths in zip(recipe.sources, shards, strict=True)]
    begin = recipe.init_from and str(Path(recipe.init_from).expanduser().resolve())
    return recipe.replace(data=str(Path(recipe.data).expanduser().resolve()), sources=sources, init_from=begin)


def _shards(path: str) -> list[str]:
    full = str(Path(path).expanduser().resolve())
    folders = {str(Path(file).parent) for file in glob.glob(f"{full}/{DESCRIPTION}")}
    return sorted(folders | {file.removesuffix(".idx") for file in glob.glob(f"{full}.idx")}) or [full]


def _token_file(path: Path, dataset: Dataset) -> TokenFile:
    """Returns the training part of a dataset's folder, or the file of a Megatron prefix, which names no tokenizer."""
    info = dataset.info
    if path.with_name(path.name + ".idx").exists():
        file, mine, theirs = TokenFile(path), f"{info.dtype} tokens", ""
        # The header does not say of which vocabulary the tokens are; their beginning tells a much larger one.
        largest = int(file.read(0, min(file.num_tokens, 4096)).max())
        if largest >= info.vocab_size:
            mine, theirs = f"a vocabulary of {info.vocab_size:,}", f"token {largest:,}"
        if file.dtype != info.dtype:
            mine, theirs = f"{info.dtype} tokens", f"{file.dtype} tokens"
    else:
        other = Dataset.open(path)
        file, mine, theirs = other.train, f"tokenizer {info.tokenizer_sha256[:12]}", ""
        if other.info.tokenizer_sha256 != info.tokenizer_sha256:
            theirs = f"tokenizer {other.info.tokenizer_sha256[:12]}"
    if theirs:
        tokenizer = dataset.directory / info.tokenizer_file
        raise DataError(
            f"recipe.sources: {path} has {theirs}, recipe.data {mine}. Tokenize it with {tokenizer}, or leave it out."
        )
    return file
