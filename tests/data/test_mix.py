"""The data of a recipe: a dataset folder, or several sources whose weights change at given samples
(phases). Incompatible datasets are refused.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from kit.config.recipe import DataPhase, DataSource, Recipe
from kit.data import Dataset, mix_text, resolve_paths, rounded_weights, shares, training_samples
from kit.data.mix import source_names
from kit.data.token_file import TokenFileWriter
from kit.errors import ConfigError, DataError


@pytest.fixture
def shards(tmp_path) -> Path:
    """Returns a folder with three Megatron shards. Shard 1 contains only the token 1, shard 2 only
    2, shard 3 only 3. They have 100, 200 and 300 windows of 8 tokens.
    """
    for token in (1, 2, 3):
        with TokenFileWriter(tmp_path / f"part_{token}", 300) as writer:
            for _ in range(100 * token):
                writer.add([token] * 8)
            writer.add([token])
    return tmp_path


def mixed(dataset, *sources: DataSource, phases=()) -> Recipe:
    return Recipe(data=str(dataset.directory), num_steps=10, sources=sources, phases=phases)


def test_plain_data_path_reads_the_dataset(tiny_dataset, recipe):
    samples = training_samples(recipe, 16)
    own = tiny_dataset.samples("train", 16, recipe.seed)
    assert np.array_equal(samples.batch(5, 9), own.batch(5, 9))
    windows = (tiny_dataset.train.num_tokens - 1) // 16
    assert samples.epochs(2 * windows) == [2.0]


def test_shards_of_a_pattern_are_one_source(tiny_dataset, shards):
    recipe = resolve_paths(mixed(tiny_dataset, DataSource(paths=(f"{shards}/part_*",))))
    assert recipe.sources[0].paths == tuple(str(shards / f"part_{i}") for i in (1, 2, 3))
    assert resolve_paths(recipe) == recipe and Recipe.from_json(recipe.to_json()) == recipe
    samples = training_samples(recipe, 8)
    assert samples.epochs(600) == [1.0]
    assert np.bincount(samples.batch(0, 600)[:, 0]).tolist() == [0, 100, 200, 300]


def test_phases_change_the_mix_at_given_tokens(tiny_dataset, shards):
    weights = (1, 1), (2, 0), (3, 1)
    sources = [DataSource(paths=(f"{shards}/part_{i}",), weight=weight) for i, weight in weights]
    ends = (400, (3, 1, 0)), (1601, (0, 1, 1))
    phases = tuple(DataPhase(until_tokens=end, weights=weights) for end, weights in ends)
    samples = training_samples(mixed(tiny_dataset, *sources, phases=phases), 8)
    # Phases begin at samples 0, 50 and 201. The first sample of a phase lies completely after the
    # tokens of the previous phase.
    read = samples.batch(0, 300)[:, 0]
    assert set(read[:50]) == {1, 2} and set(read[50:201]) == {2, 3} and set(read[201:]) == {1, 3}
    counts = np.bincount(read, minlength=4)[1:]
    assert counts.tolist() == pytest.approx([37.5 + 49.5, 12.5 + 75, 75 + 49.5], abs=2)
    assert samples.epochs(300) == pytest.approx(counts / [100, 200, 300])


def test_source_names_are_distinct_path_ends():
    def names(*paths: str) -> list[str]:
        sources = [DataSource(paths=(path,)) for path in paths]
        return source_names(Recipe(data="d", num_steps=1, sources=sources))

    assert names("/d/web", "/d/code") == ["web", "code"]
    assert names("/d/web/0", "/d/code/0") == ["web/0", "code/0"]
    assert names("/d/web", "/d/web") == ["0: /d/web", "1: /d/web"]


def test_data_shares_are_computed_without_files():
    sources = [DataSource(paths=("web",), weight=0.7), DataSource(paths=("code",), weight=0.3)]
    recipe = Recipe(data="none", num_steps=1, sources=sources)
    assert shares(recipe, 8, 0, 1000) == pytest.approx({"web": 0.7, "code": 0.3}, abs=2e-3)
    assert mix_text(recipe, 8, 8000) == "data so far: 70.0% web, 30.0% code"
    assert shares(Recipe(data="none", num_steps=1), 8, 0, 9) == {} and mix_text(recipe, 8, 7) == ""


def test_rounded_small_weight_is_reported():
    """The kit rounds weights of sources. The test counts each source's share over a million
    sequences. Large weights need no rounding.
    """
    weights = {"web": 1, "code": 4e-5, "math": 0.1}
    sources = [DataSource(paths=(name,), weight=weight) for name, weight in weights.items()]
    recipe = Recipe(data="none", num_steps=1, sources=sources)
    read = shares(recipe, 8, 0, 16 * 65_536)
    assert abs(read["web"] * 1.10004 - 1) < 0.01 and abs(read["math"] * 1.10004 / 0.1 - 1) < 0.01
    asked = pytest.approx(4e-5 / 1.10004), pytest.approx(read["code"])
    assert rounded_weights(recipe) == {"code": asked}
    even = (DataPhase(until_tokens=9, weights=(1, 1, 2)),)
    assert rounded_weights(recipe.replace(phases=even)).keys() == {"code"}
    for other in (sources[::2], ()):
        assert not rounded_weights(recipe.replace(sources=other))


def test_parts_of_a_dataset_are_one_source(tiny_dataset, tmp_path):
    """A file name pattern selects the parts, as the recipe's `data` or as one source of a mix.
    Tokenizer and validation text come from the first part. A plain folder keeps its meaning.
    """
    for i in range(2):
        shutil.copytree(tiny_dataset.directory, tmp_path / f"part_{i}_of_2")
    recipe = resolve_paths(Recipe(data=f"{tmp_path}/part_*", num_steps=10))
    assert recipe.data == str(tmp_path / "part_0_of_2")
    assert recipe.sources == (DataSource(paths=(recipe.data, str(tmp_path / "part_1_of_2"))),)
    windows = (tiny_dataset.train.num_tokens - 1) // 16
    assert training_samples(recipe, 16).epochs(windows) == [0.5] and resolve_paths(recipe) == recipe
    assert mix_text(recipe, 16, 1600) == "", "nothing to compare"
    source = resolve_paths(mixed(tiny_dataset, DataSource(paths=(f"{tmp_path}/part_*",))))
    assert source.sources == recipe.sources
    assert training_samples(source, 16).epochs(windows) == [0.5]
    plain = resolve_paths(Recipe(data=str(tiny_dataset.directory), num_steps=10))
    assert plain.data == str(tiny_dataset.directory) and not plain.sources


def test_source_with_another_vocabulary_is_refused(tiny_dataset, tmp_path):
    other = Path(shutil.copytree(tiny_dataset.directory, tmp_path / "other"))
    told = json.loads((other / "dataset.json").read_text())
    (other / "dataset.json").write_text(json.dumps(told | {"tokenizer_sha256": "f" * 64}))
    files = {"wide": (70_000, 1, 100), "large": (1000, 999, 100), "short": (300, 1, 8)}
    for name, (vocab_size, token, count) in files.items():
        with TokenFileWriter(tmp_path / name, vocab_size) as writer:
            writer.add([token] * count)
    tokenize = "Tokenize it with .*tokenizer.json"
    for name, message in {
        "other": f"other has tokenizer ffffffffffff, recipe.data tokenizer .*{tokenize}",
        "wide": f"wide has int32 tokens, recipe.data uint16 tokens. {tokenize}",
        "large": "large has token 999, recipe.data a vocabulary of 300",
        "absent_*": r"absent_\*: not a dataset, but empty or absent",
        "short": "sequence_length: 8 needs at least 9 tokens, but short.bin holds 8",
    }.items():
        with pytest.raises(DataError, match=message):
            training_samples(mixed(tiny_dataset, DataSource(paths=(f"{tmp_path}/{name}",))), 8)


WEB, CODE = DataSource(paths=("web",)), DataSource(paths=("code",))
NO_PATHS = DataSource(paths=())


def until(*ends: float, weights: tuple[float, ...] = (1, 2)) -> tuple[DataPhase, ...]:
    return tuple(DataPhase(until_tokens=end, weights=weights) for end in ends)


@pytest.mark.parametrize(
    ("sources", "phases", "message"),
    [
        ([WEB, NO_PATHS], (), r"sources\[1\].paths: \(\) is not allowed. Give one path or more"),
        *[
            ([WEB.replace(weight=weight)], (), "sources: weights: .* is not allowed. Give 1 num")
            for weight in (-1.0, 0.0, float("nan"), float("inf"))
        ],
        ([], until(1), "phases: 1 is not allowed. Give recipe.sources too"),
        ([WEB, CODE], until(1, weights=(1,)), r"phases\[0\].weights: .*Give 2 n"),
        ([WEB, CODE], until(9, 9), r"phases\[1\].until_tokens: 9.0 is not .* a number above 9"),
    ],
)
def test_invalid_mix_is_refused(sources, phases, message):
    with pytest.raises(ConfigError, match=rf"recipe\.{message}"):
        Recipe(data="d", num_steps=10, sources=sources, phases=phases)


def test_batches_need_no_index_and_no_memory_map(tiny_dataset, monkeypatch):
    """The cost of the start and of a batch must not grow with the number of documents."""
    monkeypatch.setattr("kit.data.token_file.np.memmap", None)
    dataset = Dataset.open(tiny_dataset.directory)
    assert dataset.samples("train", 16, seed=1).batch(0, 4).shape == (4, 17)
