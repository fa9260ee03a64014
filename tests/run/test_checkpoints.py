"""Checkpoints of several ranks: planning of writes, completion, resume, damage, recovery and
deletion of old checkpoints.
"""

import errno
import io
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from cluster.state import JobState, StaleAttemptError, update_state
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.errors import CheckpointError, DamagedCheckpointError, DataError
from kit.parallel.groups import raised_on_all
from kit.run import Run
from kit.run.checkpoint import MANIFEST, Checkpoints, Manifest, checksum
from kit.run.checkpoint_reader import CheckpointTensors, TensorsOnlyReader
from kit.run.checkpoint_writer import CheckpointWriter
from kit.trainer.checkpoints import PortableCheckpoints
from tests.support.checkpoints import facts, writer_in
from tests.support.workers import local_run, run_ranks


def mine(step: int, size: int = 5) -> dict[str, torch.Tensor]:
    """Returns two tensors by name: one that only this rank has, and one that both ranks have. Their
    values depend on `step`.
    """
    rank = dist.get_rank()
    return {
        f"of.{rank}": torch.full((size,), 10.0 * step + rank),
        "of.both": torch.full((3,), float(step)),
    }


def write(writer: CheckpointWriter, spec: ModelSpec, step: int, size: int = 5) -> None:
    writer.start(mine(step, size), facts(spec, step))
    writer.finish()


def load(
    checkpoints: Checkpoints, step: int, state: dict[str, torch.Tensor], spec: ModelSpec
) -> None:
    CheckpointTensors(checkpoints, checkpoints.describe(step), spec).fill_all(state)


def save_thrice(directory: Path, spec: ModelSpec) -> list[int]:
    """Saves three checkpoints with one writer, the last with other tensor shapes, and one
    checkpoint with a second writer.

    Returns how often this rank has computed a global save plan, counted after each save.
    """
    plan = Mock(wraps=default_planner.create_default_global_save_plan)
    default_planner.create_default_global_save_plan = plan
    checkpoints, seen = Checkpoints(directory / "checkpoints"), []
    writer = writer_in(checkpoints.directory)
    for step, size in ((1, 5), (2, 5), (3, 7)):
        write(writer, spec, step, size)
        seen.append(plan.call_count)
        found = {name: torch.zeros_like(tensor) for name, tensor in mine(step, size).items()}
        load(checkpoints, step, found, spec)
        assert all(torch.equal(found[name], tensor) for name, tensor in mine(step, size).items())
    other = writer_in(directory / "other")
    other.start({"alone": torch.ones(dist.get_rank() + 1)[:1]}, facts(spec, 1))
    other.finish()
    return [*seen, plan.call_count]


def test_save_is_planned_once_until_shapes_change(tmp_path: Path, spec: ModelSpec) -> None:
    on_first, on_second = run_ranks(2, save_thrice, tmp_path, spec)
    assert on_first == [1, 1, 2, 3], "rank 0 plans; the plan of one writer is not another's"
    assert on_second == [0, 0, 0, 0]
    assert Checkpoints(tmp_path / "checkpoints").steps() == [2, 3]


def assert_flushed_before_deletion(directory: Path, spec: ModelSpec) -> None:
    """Saves two checkpoints. Checks that the files and folders of the second checkpoint were
    flushed to disk before the first checkpoint was deleted.
    """
    flushed, missing, fsync, rmtree = set(), [], os.fsync, shutil.rmtree

    def noting(handle: int) -> None:
        flushed.add(os.fstat(handle).st_ino)
        fsync(handle)

    def asking(folder: Path, *args: Any, **kwargs: Any) -> None:
        newest = directory / "step_00000002"
        asked = *newest.iterdir(), newest, directory
        missing.extend(path.name for path in asked if path.stat().st_ino not in flushed)
        rmtree(folder, *args, **kwargs)

    os.fsync, shutil.rmtree = noting, asking
    writer = writer_in(directory, 1)
    for step in (1, 2):
        write(writer, spec, step)
    assert Checkpoints(directory).steps() == [2] and not missing


def test_checkpoint_is_flushed_before_older_is_deleted(tmp_path: Path, spec: ModelSpec) -> None:
    """New folder entries stay in memory for a while. Without the flush, a power failure could
    destroy both checkpoints.
    """
    run_ranks(1, assert_flushed_before_deletion, tmp_path / "checkpoints", spec)


def whole_when_named(directory: Path, spec: ModelSpec) -> list[bool]:
    """Saves two checkpoints. Returns for each checkpoint whether all its files were complete when
    its folder got the final name.
    """
    rename, whole = Path.rename, []

    def watched(folder: Path, target: Path) -> Path:
        if target.parent == directory and not target.suffix:
            sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
            listed = MANIFEST in sizes and Manifest.read(folder / MANIFEST).files
            whole.append(listed and listed.items() <= sizes.items())
        return rename(folder, target)

    Path.rename = watched
    writer = writer_in(directory)
    for step in (1, 2):
        write(writer, spec, step)
    return whole


def test_checkpoint_is_renamed_when_complete(tmp_path: Path, spec: ModelSpec) -> None:
    """If a checkpoint were renamed too early, a kill could leave the newest checkpoint without its
    manifest.
    """
    assert run_ranks(1, whole_when_named, tmp_path / "checkpoints", spec) == [[True, True]]


def begin_in_a_run_that_is_gone(directory: Path, spec: ModelSpec, is_replaced: bool) -> str:
    writer = writer_in(directory, 1)
    dist.barrier()
    if dist.get_rank() == 0:
        directory.parent.rename(directory.parent.with_name("aside"))
        if is_replaced:
            directory.parent.mkdir()
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        write(writer, spec, 1)
    return str(caught.value)


@pytest.mark.parametrize("is_replaced", [False, True], ids=["gone", "replaced"])
def test_nothing_is_written_into_a_deleted_run(tmp_path, spec, is_replaced) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for said in run_ranks(2, begin_in_a_run_that_is_gone, run / "checkpoints", spec, is_replaced):
        assert "checkpoint of step 1 could not be written" in said
    assert run.exists() == is_replaced and not list(run.glob("*"))


def begin_without_the_folder(directory: Path, spec: ModelSpec) -> list[int]:
    writer = writer_in(directory)
    write(writer, spec, 1)
    shutil.rmtree(directory)
    write(writer, spec, 2)
    return Checkpoints(directory).steps()


def test_removed_checkpoint_folder_does_not_end_run(tmp_path: Path, spec: ModelSpec) -> None:
    assert run_ranks(1, begin_without_the_folder, tmp_path / "checkpoints", spec) == [[2]]


def complete_as_left_over(run: Path, spec: ModelSpec) -> list[int]:
    """Lets an old attempt try to complete a checkpoint. Returns the steps of the complete
    checkpoints afterwards.
    """
    writer = writer_in(run / "checkpoints")
    update_state(run, attempt=2, state=JobState.RUNNING)
    with pytest.raises(StaleAttemptError):
        write(writer, spec, 5)
    return writer.checkpoints.steps()


def test_old_attempt_cannot_complete_a_checkpoint(tmp_path: Path, spec: ModelSpec) -> None:
    assert run_ranks(1, complete_as_left_over, tmp_path, spec) == [[]]


def copies_of_saves(directory: Path, spec: ModelSpec) -> tuple[list[float], int]:
    """Saves a changing tensor three times. Returns (mean of the tensor in each checkpoint, number
    of memory buffers used for the copies).
    """
    checkpoints, places = Checkpoints(directory), set()
    writer = writer_in(checkpoints.directory, 3)
    weight, found = torch.zeros(1000), []
    for step in (1, 2, 3):
        weight.fill_(step)
        # The tensor is a new view for each save, as from a real engine.
        writer.start({"weight": weight.detach()}, facts(spec, step))
        writer.wait_for_copies()
        weight.fill_(-1)
        writer.finish()
        assert writer.stager is not None
        copies = writer.stager._state_dict_stager._cached_storage_mapping.values()
        places |= {copy.data_ptr() for copy in copies}
        read = {"weight": torch.zeros(1000)}
        load(checkpoints, step, read, spec)
        found.append(float(read["weight"].mean()))
    return found, len(places)


def test_saves_reuse_the_staging_memory(tmp_path: Path, spec: ModelSpec) -> None:
    assert run_ranks(1, copies_of_saves, tmp_path, spec) == [([1.0, 2.0, 3.0], 1)]


def save_while_training(run: Run) -> tuple[list[float], bool, float]:
    """Saves while a simulated training step runs. Returns (saved weight, whether the optimizer
    update waited for the copy of the weight, stall in seconds).

    The copy ends 0.1 s after the update has begun to wait.
    """
    engine: Any = Engine(["weight"])
    saver = PortableCheckpoints(run, engine, None, attempt=1)
    saver.save(facts(run.spec, 1))
    saver.finish()
    assert saver.stager is not None
    copy, may_copy = saver.stager._stage, threading.Event()

    def late(*args: Any, **kwargs: Any) -> Any:
        may_copy.wait(60)
        return copy(*args, **kwargs)

    saver.stager._stage = late
    wait_for_copies = saver.wait_for_copies

    def wait() -> None:
        threading.Timer(0.1, may_copy.set).start()
        wait_for_copies()

    saver.wait_for_copies = wait
    saver.save(facts(run.spec, 2))
    # A real training step runs a forward and a backward pass at this point.
    saver.take_stall_s()
    weight = engine.state["weight"]
    weight.grad = torch.ones_like(weight)
    engine.optimizer.step()
    waited = may_copy.is_set() and bool((weight != 0).all())
    saver.finish()
    read = {"weight": torch.ones(2)}
    load(run.checkpoints, 2, read, run.spec)
    return read["weight"].tolist(), waited, saver.take_stall_s()


def test_save_is_copied_during_step_and_before_update(tmp_path, spec, recipe) -> None:
    run = local_run(tmp_path / "run", spec, Plan(), recipe)
    [(held, waited, stall_s)] = run_ranks(1, save_while_training, run)
    assert held == [0.0, 0.0], "as it was when it was saved"
    assert waited and stall_s > 0.01


def complete_unasked(directory: Path, spec: ModelSpec) -> list[int]:
    """Saves two checkpoints without calling `finish` for the second one. Returns the steps of the
    complete checkpoints before `finish`.
    """
    checkpoints = Checkpoints(directory)
    writer = writer_in(checkpoints.directory, 1)
    for step in (1, 2):
        writer.finish()
        writer.start(mine(step), facts(spec, step))
        assert checkpoints.steps() or step == 1, "nothing older goes before the newer counts"
    deadline = time.monotonic() + 30
    while checkpoints.steps() != [2] and time.monotonic() < deadline:
        time.sleep(0.01)
    steps = checkpoints.steps()
    writer.finish()
    return steps


def test_checkpoint_completes_while_training_continues(tmp_path: Path, spec: ModelSpec) -> None:
    assert run_ranks(2, complete_unasked, tmp_path, spec) == [[2], [2]]


class Engine:
    """A simulated engine with the named tensors as its state."""

    def __init__(self, names: list[str]) -> None:
        self.state = {name: torch.zeros(2) for name in names}
        self.optimizer = torch.optim.SGD(list(self.state.values()), lr=1.0)

    def load(self, fill: Callable[[dict[str, torch.Tensor]], None], *, num_updates: int) -> None:
        fill(self.state)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.state


def calls_of_a_resume(run: Run, num_files: int) -> int:
    """Resumes from a checkpoint of `num_files` files. This rank loads four tensors, each from a
    separate file.

    Returns the number of file system calls of this rank.
    """
    engine: Any = Engine([f"tensor.{4 * dist.get_rank() + i}" for i in range(4)])
    loader = PortableCheckpoints(run, engine, None, attempt=1)
    calls = [Mock(wraps=getattr(os, name)) for name in OF_FILES]
    opened = Mock(wraps=io.open)
    with patch.multiple(os, **dict(zip(OF_FILES, calls, strict=True))), patch("io.open", opened):
        loader.load(num_files)
    found = [float(engine.state[name][0]) for name in engine.state]
    assert found == [4.0 * dist.get_rank() + i for i in range(4)]
    return sum(call.call_count for call in (*calls, opened))


OF_FILES = ("stat", "lstat", "scandir", "listdir", "open")


def write_files(run: Run, num_files: int) -> None:
    """Writes a checkpoint with the step number `num_files`. It holds `num_files` tensors, each in a
    separate file.
    """
    folder = run.checkpoints.path(num_files)
    state = {f"tensor.{i}": torch.full((2,), float(i)) for i in range(num_files)}
    each = FileSystemWriter(folder, single_file_per_rank=False, sync_files=False)
    save(state, storage_writer=each, no_dist=True)
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    sums = {".metadata": checksum(folder / ".metadata")}
    told = facts(run.spec, num_files) | {"files": sizes, "checksums": sums}
    run.checkpoints.complete(folder, Manifest(**told, attempt=1, time=0.0))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_resume_stats_every_file_on_rank_0_only(tmp_path: Path, spec: ModelSpec, recipe) -> None:
    run = local_run(tmp_path / "run", spec, Plan(), recipe)
    counts = []
    for num_files in (33, 3073):
        write_files(run, num_files)
        counts.append(run_ranks(2, calls_of_a_resume, run, num_files))
    assert counts[0][1] == counts[1][1] <= 8, "a rank opens what it reads"
    assert counts[1][0] - counts[0][0] == 3073 - 33, "rank 0 looks once at each file"


class Strange(EOFError):
    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


def meet_an_error() -> list[str]:
    """Raises four errors on rank 1 and one error on rank 0. Returns the errors that `raised_on_all`
    raises on this rank.
    """
    told = []
    kinds = DamagedCheckpointError, CheckpointError, OSError, DataError, Strange
    for rank, kind in zip((1, 0, 1, 1, 1), kinds, strict=True):
        try:
            with raised_on_all():
                if dist.get_rank() == rank:
                    raise kind(f"seen by rank {rank}")
        except (CheckpointError, DataError, OSError) as error:
            told.append(f"{type(error).__name__} {error}")
    return told


def test_error_of_one_rank_is_raised_on_all_ranks() -> None:
    said = """DamagedCheckpointError seen by rank 1
CheckpointError seen by rank 0
OSError seen by rank 1
DataError seen by rank 1
CheckpointError Strange: seen by rank 1"""
    assert run_ranks(3, meet_an_error) == [said.splitlines()] * 3


def test_read_error_is_not_reported_as_damage(tmp_path: Path, spec, monkeypatch) -> None:
    """A read error and a wrong checksum are different errors: only the checksum means that the
    checkpoint is damaged.
    """
    run_ranks(1, save_thrice, tmp_path, spec)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    state = {"of.0": torch.zeros(7)}

    def fail(*args: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(TensorsOnlyReader, "_slice_file", fail)
        with pytest.raises(OSError, match="Input/output error"):
            load(checkpoints, 3, state, spec)
    file = checkpoints.path(3) / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[content.index(torch.full((7,), 30.0).numpy().tobytes()) + 5] ^= 1
    file.write_bytes(content)
    message = "__0_0.distcp is damaged: a tensor's checksum is not"
    with pytest.raises(DamagedCheckpointError, match=message):
        load(checkpoints, 3, state, spec)
    # The damaged tensor is not loaded, so no error is raised.
    load(checkpoints, 3, {"of.both": torch.zeros(3)}, spec)


@pytest.mark.slow
def test_flipped_bit_raises_only_damage_errors() -> None:
    whole, reader = io.BytesIO(), object.__new__(TensorsOnlyReader)
    torch.save(torch.arange(8.0), whole)
    places = 8 * len(whole.getvalue())
    num_found = 0
    for place in range(places):
        content = bytearray(whole.getvalue())
        content[place // 8] ^= 1 << place % 8
        with tempfile.TemporaryFile() as file:
            file.write(content)
            try:
                reader._slice_file(file, SimpleNamespace(offset=0, length=len(content)))
            except DamagedCheckpointError:
                num_found += 1
    # Not every changed byte can be found, because padding and unused fields of the zip archive are
    # not checked.
    assert num_found > places / 3


def test_recover_completes_or_deletes_partial_saves(
    tmp_path: Path,
) -> None:
    """A partial save is a checkpoint folder with a temporary name. If the folder has a manifest,
    the checkpoint is complete and gets its final name. Otherwise the folder is deleted.
    """
    left = ("100.partial-1", "200.partial-1", "050.deleting", "200.replaced-2", "300.damaged-1")
    for name in left:
        (tmp_path / f"step_00000{name}").mkdir()
    for name in (left[0], left[2]):
        (tmp_path / f"step_00000{name}" / MANIFEST).touch()
    assert Checkpoints(tmp_path).recover() == [100]
    names = sorted(folder.name for folder in tmp_path.iterdir())
    assert names == ["step_00000100", "step_00000300.damaged-1"]


USERS_NAMES = ("best", "bak", "tar", "keep", "damaged-1", "partial", "deleting.txt", "replaced-old")


def test_recover_keeps_folders_named_by_users(tmp_path: Path) -> None:
    """Only folders with names that the kit itself gives are deleted. Copies and archives that a
    user made are kept.
    """
    for name in USERS_NAMES:
        folder = tmp_path / f"step_00000030.{name}"
        folder.mkdir()
        (folder / "notes.txt").write_text("precious")
        (folder / MANIFEST).touch()
    (tmp_path / "step_00000031.tar").touch()
    (tmp_path / "step_00000032.partial-1").touch()
    (tmp_path / "step_00000033.deleting").symlink_to(tmp_path / "step_00000030.best")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    assert Checkpoints(tmp_path).recover() == []
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_prune_of_linked_checkpoint_keeps_its_target(tmp_path: Path) -> None:
    """A user may have moved a checkpoint to another disk and put a link in its place."""
    (tmp_path / "aside").mkdir()
    (tmp_path / "aside" / MANIFEST).touch()
    (tmp_path / "step_00000001").symlink_to(tmp_path / "aside")
    for step in (2, 3):
        (tmp_path / f"step_0000000{step}").mkdir()
        (tmp_path / f"step_0000000{step}" / MANIFEST).touch()
    assert Checkpoints(tmp_path).prune(keep_last=2, keep_every=None) == [1]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["aside", "step_00000002", "step_00000003"]
    assert (tmp_path / "aside" / MANIFEST).exists()


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({}, 1),
        ({"checkpoint_every": 10}, 3),
        ({"checkpoint_every": 60}, 2),
        ({"checkpoint_every": 10, "keep_last": 1}, 2),
        ({"checkpoint_every": 10, "keep_every": 50}, 4),
        ({"checkpoint_every": 10, "keep_last": 4, "keep_every": 20}, 7),
    ],
)
def test_launch_warns_if_kept_checkpoints_exceed_the_disk(
    tmp_path, spec, monkeypatch, changes, number
):
    """The run has 100 steps. At its last write, it has the newest `keep_last` checkpoints, those at
    multiples of `keep_every`, and the one that is being written.
    """
    recipe = Recipe(data="x", num_steps=100, learning_rate=1e-3, **changes)
    one = 1.05 * 12 * spec.num_params
    usage = shutil.disk_usage(tmp_path)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for free, is_warned in ((number * one + 9, False), ((number - 0.5) * one, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert bool(checkpoints.space_warning(spec, recipe)) == is_warned
