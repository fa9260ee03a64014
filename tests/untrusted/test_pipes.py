"""Pipes and devices in place of checkpoint files and token files of another user are refused and
never read.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.data import Dataset
from kit.data.dataset import DESCRIPTION
from kit.errors import CheckpointError, DataError
from kit.interop.weights.hugging_face import export_run
from kit.interop.weights.other_trainers import check_safetensors
from kit.run import Run
from kit.run.checkpoint import Manifest
from kit.run.checkpoint_reader import CheckpointTensors
from tests.support.hostile import STEPS, finished_run, save_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
PLANTED: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "device": lambda file: file.symlink_to("/dev/zero"),
}


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """Ends a test after 30 s, in case the code waits for a pipe or reads a device without end."""

    def fail(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, spec, tiny_dataset) -> Run:
    directory = tmp_path_factory.mktemp("pipes") / "run"
    run = finished_run(directory, spec.replace(num_layers=1), str(tiny_dataset.directory))
    save_checkpoint(run)
    return run


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("is_listed", [True, False], ids=["listed", "not listed"])
def test_pipe_or_device_in_checkpoint_is_refused(
    run: Run, tmp_path: Path, kind: str, is_listed: bool
) -> None:
    copy = shutil.copytree(run.directory, tmp_path / "run")
    checkpoints = Run.open(copy).checkpoints
    folder = checkpoints.path(STEPS)
    shard = min(folder.glob("*.distcp"))
    shard.unlink()
    PLANTED[kind](shard)
    manifest = Manifest.read(folder / "manifest.json")
    files = {**manifest.files, shard.name: 0}
    if not is_listed:
        del files[shard.name]
    checkpoints.complete(folder, manifest.replace(files=files))
    with pytest.raises(CheckpointError, match="pipe or device|does not list"):
        CheckpointTensors(checkpoints, checkpoints.describe(STEPS), run.spec)


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("is_listed", [True, False], ids=["listed", "not listed"])
def test_pipe_or_device_in_dataset_is_refused(
    tiny_dataset, tmp_path: Path, kind: str, is_listed: bool
) -> None:
    copy = shutil.copytree(tiny_dataset.directory, tmp_path / "data")
    for name in (tiny_dataset.info.tokenizer_file, "validation.jsonl"):
        (copy / name).unlink(missing_ok=True)
        PLANTED[kind](copy / name)
    description = json.loads((copy / DESCRIPTION).read_text())
    sizes = {file["name"]: file for file in description["files"]}
    for name in (tiny_dataset.info.tokenizer_file, "validation.jsonl"):
        sizes.get(name, {})["size_bytes"] = 0
        if not is_listed:
            sizes.pop(name, None)
    description["files"] = list(sizes.values())
    (copy / DESCRIPTION).write_text(json.dumps(description))
    reads = [
        lambda: Dataset.open(copy).tokenizer(),
        lambda: [*Dataset.open(copy).validation_documents()],
    ]
    for read in reads:
        with pytest.raises((DataError, OSError), match="pipe or device|a pipe"):
            read()


@pytest.mark.parametrize("name", ["more.safetensors", "tokenizer.model"])
def test_pipe_in_model_folder_is_refused(run: Run, tmp_path: Path, name: str) -> None:
    folder = export_run(run, None, tmp_path / "model")
    os.mkfifo(folder / name)
    with pytest.raises(DataError, match=f"{name}: a folder, a pipe or a device"):
        check_safetensors(folder)
