"""Training data of a recipe: the recipe's dataset, or a weighted mix of several sources.

All sources of a mix must have the vocabulary of the recipe's dataset.
"""

import functools
import glob
import math
from pathlib import Path

from kit.config.recipe import DataSource, Recipe
from kit.data.dataset import DESCRIPTION, Dataset
from kit.data.samples import PERIOD, Samples, SourceOrder, SourceSequences
from kit.data.token_file import TokenFile
from kit.errors import DataError


def training_samples(recipe: Recipe, sequence_length: int) -> Samples:
    """Returns the training sequences of a recipe, from its dataset or from its mix of sources.

    Raises:
        DataError: Token files are missing, damaged or too short, or have another vocabulary than
            `recipe.data`.
    """
    dataset = Dataset.open(recipe.data)
    if not recipe.sources:
        return dataset.samples("train", sequence_length, recipe.seed)
    sources = []
    for number, source in enumerate(recipe.sources):
        files = [_token_file(Path(path), dataset) for path in source.paths]
        sources.append(SourceSequences(files, sequence_length, recipe.seed, number))
    return Samples(sources, sequence_length, _phases(recipe, sequence_length))


def shares(recipe: Recipe, sequence_length: int, first: int, count: int) -> dict[str, float]:
    """Returns a dict from the name of each source to its fraction of `count` samples, counted from
    sample `first` on.

    Returns {} if the recipe has no mix of sources or `count` is 0. Opens no file.
    """
    if not recipe.sources or not count:
        return {}
    turns = _turns(recipe, sequence_length)
    drawn = (turns.count_samples_before(first + count) - turns.count_samples_before(first)) / count
    return dict(zip(source_names(recipe), drawn.tolist(), strict=True))


def rounded_weights(recipe: Recipe) -> dict[str, tuple[float, float]]:
    """Returns a dict from source name to (fraction by the weights, fraction that is really drawn),
    for the sources whose two fractions differ by over 1 %.

    Sources are drawn in multiples of 1/65,536 of the sequences of a phase, so the fractions differ
    only for small weights.
    """
    rounded: dict[str, tuple[float, float]] = {}
    if not recipe.sources:
        return rounded
    names = source_names(recipe)
    for _, weights in _phases(recipe, 1):
        drawn = SourceOrder([(0, weights)]).count_samples_before(PERIOD) / PERIOD
        for name, weight, share in zip(names, weights, drawn.tolist(), strict=True):
            wanted = weight / sum(weights)
            if abs(share - wanted) > 0.01 * wanted:
                rounded[name] = wanted, share
    return rounded


def mix_text(recipe: Recipe, sequence_length: int, tokens: int) -> str:
    """Returns a sentence with the fraction of each source in the first `tokens` tokens of a run.

    Returns "" if the run has a single source.
    """
    samples = tokens // sequence_length
    read = shares(recipe, sequence_length, 0, samples)
    if len(read) < 2:
        return ""
    text = "data so far: " + ", ".join(f"{share:.1%} {name}" for name, share in read.items())
    if recipe.phases:
        begun = [phase for phase in _phases(recipe, sequence_length) if phase[0] <= samples]
        _, weights = begun[-1]
        text += "; now " + ", ".join(f"{weight / sum(weights):.1%}" for weight in weights)
    return text


def source_names(recipe: Recipe) -> list[str]:
    """Returns a name for each source: the last folder or file names of its first path, such as
    `web/part_1`.

    The names are as short as possible, but all differ.
    """
    paths = [Path(source.paths[0]).parts for source in recipe.sources]
    for length in range(1, max(map(len, paths), default=0) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{i}: {Path(*parts)}" for i, parts in enumerate(paths)]


@functools.lru_cache(maxsize=8)
def _turns(recipe: Recipe, sequence_length: int) -> SourceOrder:
    return SourceOrder(_phases(recipe, sequence_length))


def _phases(recipe: Recipe, sequence_length: int) -> list[tuple[int, tuple[float, ...]]]:
    """Returns (number of the first sample, weights of the sources) of each phase of the mix. Phases
    begin at numbers of tokens that the recipe states.
    """
    firsts = [0, *(math.ceil(phase.until_tokens / sequence_length) for phase in recipe.phases)]
    weights = [
        *(phase.weights for phase in recipe.phases),
        tuple(source.weight for source in recipe.sources),
    ]
    return list(zip(firsts, weights, strict=True))


def resolve_paths(recipe: Recipe) -> Recipe:
    """Returns the recipe with absolute paths. A pattern such as `web/part_*` is replaced with the
    datasets and token files that match it now.

    If the recipe has no sources and several datasets match `data`, they become one source. The
    first dataset provides the tokenizer and the validation text.
    """
    folders = _shards(recipe.data)
    sources = []
    for source in recipe.sources:
        shards = [shard for path in source.paths for shard in _shards(path)]
        sources.append(source.replace(paths=shards))
    if not recipe.sources and len(folders) > 1:
        sources = [DataSource(paths=tuple(folders))]
    init_from = recipe.init_from
    if init_from:
        init_from = str(Path(init_from).expanduser().resolve())
    return recipe.replace(data=folders[0], sources=sources, init_from=init_from)


def _shards(path: str) -> list[str]:
    """Returns the paths that match a pattern: folders of datasets, and prefixes of Megatron token
    files. Returns the path itself if nothing matches.
    """
    full = str(Path(path).expanduser().resolve())
    datasets = {str(Path(file).parent) for file in glob.glob(f"{full}/{DESCRIPTION}")}
    prefixes = {file.removesuffix(".idx") for file in glob.glob(f"{full}.idx")}
    return sorted(datasets | prefixes) or [full]


def _token_file(path: Path, dataset: Dataset) -> TokenFile:
    """Returns the training token file of a dataset's folder, or the token file of a Megatron
    prefix.

    Raises:
        DataError: The tokens are of another vocabulary than `dataset`. A Megatron prefix has no
            tokenizer, so its first tokens are checked.
    """
    info = dataset.info
    if path.with_name(path.name + ".idx").exists():
        file = TokenFile(path)
        # The header does not name the vocabulary of the tokens. The first tokens show whether it is
        # much larger.
        largest = int(file.read(0, min(file.num_tokens, 4096)).max())
        rules = [
            (file.dtype == info.dtype, f"{file.dtype} tokens", f"{info.dtype} tokens"),
            (
                largest < info.vocab_size,
                f"token {largest:,}",
                f"a vocabulary of {info.vocab_size:,}",
            ),
        ]
    else:
        other = Dataset.open(path)
        file = other.train
        theirs = other.info.tokenizer_sha256
        mine = info.tokenizer_sha256
        rules = [(theirs == mine, f"tokenizer {theirs[:12]}", f"tokenizer {mine[:12]}")]
    for holds, theirs, mine in rules:
        if not holds:
            raise DataError(
                f"recipe.sources: {path} has {theirs}, recipe.data {mine}. Tokenize it with"
                f" {dataset.directory / info.tokenizer_file}, or leave it out."
            )
    return file
