"""File locks: another user who can read a run cannot hold a lock that the run's owner needs."""

import fcntl
import multiprocessing
import os
import time
from pathlib import Path

import pytest

import kit
from cluster import files, state
from cluster.state import JobState, update_state
from kit import launcher
from tests.support.hostile import STRANGER, finished_run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs two users")


def lock_all(directory: Path, told) -> None:
    """Becomes another user, and locks the run directory and every file in it that this user can
    open. Sends the names of the locked files through the pipe `told`.
    """
    os.setgroups([])
    os.setresgid(STRANGER, STRANGER, STRANGER)
    os.setresuid(STRANGER, STRANGER, STRANGER)
    locked = []
    for path in [directory, *directory.rglob("*")]:
        try:
            handle = os.open(path, os.O_RDONLY)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        locked.append(path.name)
    told.send(locked)
    time.sleep(600)


@pytest.fixture
def run(tmp_path: Path, spec, tiny_dataset, monkeypatch) -> Path:
    """A finished run that every user can read, with lock files as older versions of the kit created
    them.
    """
    run = finished_run(tmp_path / "run", spec, str(tiny_dataset.directory))
    for folder in (tmp_path, *list(tmp_path.parents)[:-1]):
        folder.chmod(folder.stat().st_mode | 0o055)
    (run.directory / ".state.lock").chmod(0o644)
    # The first update makes the lock file private. Only this update may find the lock file of an
    # older version.
    update_state(run.directory, attempt=1, state=JobState.DONE)
    return run.directory


def test_reader_cannot_block_owner(run: Path, monkeypatch) -> None:
    """Another user, who can only read the run, locks every file of the run that he may open."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    stranger = context.Process(target=lock_all, args=(run, there))
    stranger.start()
    try:
        locked = here.recv()
        assert {"run", "spec.json"} <= set(locked), "the other user may read and lock the rest"
        monkeypatch.setattr(state, "LOCK_WAIT_S", 30.0)
        start = time.monotonic()
        update_state(run, attempt=1, state=JobState.DONE)
        assert time.monotonic() - start < 5.0
        launched = []
        monkeypatch.setattr(launcher, "submit", lambda *given: launched.append(given))
        kit.resume(run, num_steps=99)
        assert launched
    finally:
        stranger.kill()
        stranger.join()
    assert not (run / launcher.LAUNCH_LOCK).exists()


def test_lock_file_is_private_to_its_owner(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        with files.lock_file(tmp_path / "lock") as lock:
            assert os.fstat(lock.fileno()).st_mode & 0o777 == 0o600
    finally:
        os.umask(previous)
