"""Official task definitions read the mirror, and nothing else without being asked to."""

import shutil
from pathlib import Path

import datasets
import datasets.config
import huggingface_hub.constants
import pytest

from kit.data.wheels import file_sha256
from kit.errors import ConfigError, DataError
from kit.evaluate.benchmarks import BENCHMARKS, TaskRequest
from kit.evaluate.harness import load_task
from kit.evaluate.resolver import local_first


@pytest.fixture
def own_mirror(mirror: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(mirror, tmp_path / "evalsets"))


@pytest.fixture(autouse=True)
def empty_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))


def test_a_definition_reads_the_mirror_without_network(mirror, no_network):
    loaded = load_task("piqa", mirror=mirror)
    assert len(loaded.task.eval_docs) == 30
    file = mirror / BENCHMARKS["piqa"].path
    (source,) = loaded.data
    assert (source.origin, source.path, source.sha256) == (
        "mirror",
        BENCHMARKS["piqa"].path,
        file_sha256(file),
    )
    assert loaded.num_fewshot == 0


def test_load_dataset_is_the_real_one_afterwards(mirror, tmp_path):
    real = datasets.load_dataset
    with local_first(mirror):
        assert datasets.load_dataset is not real
    assert datasets.load_dataset is real
    with pytest.raises(DataError):
        load_task("hellaswag", mirror=mirror)
    assert datasets.load_dataset is real


def test_other_data_sets_go_to_the_real_function(mirror, tmp_path):
    (tmp_path / "rows.json").write_text('{"a": 1}\n{"a": 2}\n')
    with local_first(mirror) as sources:
        rows = datasets.load_dataset(
            "json", data_files=str(tmp_path / "rows.json"), cache_dir=str(tmp_path)
        )
    assert rows["train"]["a"] == [1, 2]
    assert [(source.origin, source.path, source.sha256) for source in sources] == [
        ("hub", "json", None)
    ]


def test_a_missing_benchmark_says_how_to_get_it_and_opens_no_connection(mirror, no_network):
    with pytest.raises(
        DataError,
        match=(
            r"Rowan/hellaswag \(splits validation, train\): .* neither in the mirror .* run `kit"
            r" eval-data "
        ),
    ):
        load_task("hellaswag", mirror=mirror)


def test_a_damaged_file_is_refused(own_mirror, write_rows):
    write_rows(own_mirror, "piqa", [{"goal": "G", "sol1": "a", "sol2": "b", "label": 0}])
    with pytest.raises(
        DataError,
        match="damaged, its sha256 is not the one in the mirror's manifest. Run `kit eval-data",
    ):
        load_task("piqa", mirror=own_mirror)
    file = own_mirror / BENCHMARKS["piqa"].path
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(DataError, match="piqa.*validation.parquet.*is damaged"):
        load_task("piqa", mirror=own_mirror)


def test_shots_without_a_pool_fail(mirror):
    with pytest.raises(
        DataError, match="piqa: 2 shots need as many solved examples, but the pool has 0"
    ):
        load_task(TaskRequest(task="piqa", shots=2), mirror=mirror)


def test_shots_come_from_a_training_split_in_the_mirror(own_mirror, write_rows):
    pool = [
        {"goal": f"Shot {i}", "sol1": f"first {i}", "sol2": "second", "label": 0} for i in range(3)
    ]
    write_rows(own_mirror, "piqa", pool, split="train")
    loaded = load_task(TaskRequest(task="piqa", shots=2), mirror=own_mirror)
    loaded.task.build_all_requests(samples=[0])
    prompt = loaded.task.instances[0].args[0]
    assert prompt.count("Question: Shot") == 2 and prompt.count("Question: Goal 0") == 1
    assert "\nAnswer: first " in prompt
    assert loaded.num_fewshot == 2
    assert sorted(Path(source.path).stem for source in loaded.data) == ["train", "validation"]
    with pytest.raises(DataError, match="4 shots need as many solved examples, but the pool has 3"):
        load_task(TaskRequest(task="piqa", shots=4), mirror=own_mirror)


def test_an_unknown_task_is_refused(mirror):
    with pytest.raises(ConfigError, match=r"tasks: 'piqaa' is unknown\. Did you mean 'piqa'\?"):
        load_task("piqaa", mirror=mirror)
