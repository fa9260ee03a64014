"""Checkpoints of a run. They are written in the background, are complete only when they have a
manifest, and can be loaded into any layout (degrees of parallelism).

`checkpoints/step_00000100/` contains the files of torch's distributed checkpoint and a
`manifest.json`. A checkpoint is complete if its folder has a manifest and a name without suffix.
`Checkpoints.manifest` also checks the manifest's own checksum and the sizes of all files. When a
checkpoint is loaded, the checksum of all bytes that are read is checked.

A checkpoint is written into `step_00000100.partial-<attempt>`. The manifest is written last, and
then the folder is renamed. Only NxD writes directly into the final folder. A damaged checkpoint is
renamed to `step_00000100.damaged-<attempt>`, and an older checkpoint is loaded.
"""

import dataclasses
import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cluster.files import file_size, open_for_reading, read_small
from cluster.login.mirror import mirror_of
from cluster.record import ConfigError, Record, check_file_below, counted, field_doc
from cluster.state import refuse_stale
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.errors import CheckpointError, DamagedCheckpointError, kit_command

BYTES_PER_PARAM = 12
"""Bytes of a checkpoint per parameter: one fp32 weight and two fp32 Adam moments."""
MANIFEST = "manifest.json"
DESCRIPTION = ".metadata"
"""Name of the file in which torch's distributed checkpoint describes its tensors (names, shapes,
positions in the files)."""
DESCRIPTION_BYTES = 1 << 30
"""Largest number of bytes of the description that are read, 1 GiB. It limits memory if the file is
not trusted."""
READ_BYTES = 16 << 20
"""Number of bytes that are read at a time to compute a checksum, 16 MiB."""
LEFT_OVER = re.compile(r"step_\d+\.(partial-\d+|replaced-\d+|deleting(-[0-9a-f]+)?)")
"""Pattern of the names of folders that a killed attempt leaves behind. Folders with another suffix,
such as `step_00000100.best`, belong to the user and are never changed."""


def refuse_elsewhere(run_dir: Path, advice: str) -> None:
    """Raises ConfigError if the checkpoints of a run are on a cluster behind a login node. `advice`
    is the end of the error message, which tells the user what to do.
    """
    if mirror_of(run_dir):
        raise ConfigError(f"{run_dir}: its checkpoints are behind a login node{advice}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest(Record):
    """Content of manifest.json, which makes a checkpoint complete: its step, model and layout, and
    the sizes and checksums of its files.
    """

    step: int = field_doc("number of optimizer steps of the run when the checkpoint was saved")
    attempt: int = field_doc("number of the attempt of the run that wrote the checkpoint")
    samples: int = field_doc(
        "number of training sequences that the run has read, which is the complete state of the"
        " data order"
    )
    tokens: int = field_doc("number of training tokens that the run has read")
    seed: int = field_doc("seed from which the order of the data is computed")
    skipped: int = field_doc(
        "number of steps whose update was dropped; AdamW has applied `step` minus `skipped`"
        " updates",
        default=0,
    )
    recent_losses: tuple[float, ...] = field_doc(
        "finite losses of the last steps, with which the next losses are compared to find"
        " spikes (`kit.trainer.bad_steps`)",
        default=(),
    )
    time: float = field_doc("Unix time, in seconds, at which the manifest was made")
    spec: ModelSpec = field_doc("model whose weights are saved, with all sizes")
    plan: Plan = field_doc(
        "plan with which the checkpoint was written; it can be loaded with other degrees of"
        " parallelism"
    )
    files: dict[str, int] = field_doc("size of each file of the checkpoint in bytes, by file name")
    checksums: dict[str, int] = field_doc(
        "CRC-32 of each file, by file name. Files with tensors are left out, since torch stores"
        " a CRC-32 with each tensor. The CRC-32 of the manifest itself is computed without its"
        " own entry.",
        default_factory=dict,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.files:
            # Names may contain subfolders, since NxD writes into subfolders.
            check_file_below(name, "manifest.files")


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self.undeleted = ""
        """Sentence that says which folder could not be deleted and why. Empty if every deletion has
        succeeded."""

    def steps(self) -> list[int]:
        """Returns the steps of all complete checkpoints, oldest first."""
        matches = (re.fullmatch(r"step_(\d+)", path.name) for path in self.directory.glob("step_*"))
        found = (int(match[1]) for match in matches if match)
        # Before Python 3.12, `Path.exists` raises in a folder that this user may not enter.
        return sorted(step for step in found if os.path.exists(self.path(step) / MANIFEST))

    def unreadable(self) -> list[str]:
        """Returns the folders of checkpoints that this user may not enter, as paths relative to the
        run directory. `steps` does not list their checkpoints.
        """
        try:
            names = sorted(os.listdir(self.directory))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError:
            return [self.directory.name]
        if not os.access(self.directory, os.X_OK):
            return [self.directory.name]
        folders = [name for name in names if re.fullmatch(r"step_\d+", name)]
        return [
            f"{self.directory.name}/{name}"
            for name in folders
            if os.path.isdir(self.directory / name)
            and not os.access(self.directory / name, os.X_OK)
        ]

    def saved_at(self, step: int) -> float:
        """Returns the Unix time, in seconds, at which the checkpoint at `step` became complete, by
        the clock of the machine that wrote it. Returns 0 if the time cannot be read.
        """
        try:
            return float(json.loads(read_small(self.path(step) / MANIFEST))["time"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0.0

    def newest(self) -> int:
        """Returns the step of the newest complete checkpoint.

        Raises:
            CheckpointError: No checkpoint is complete yet.
        """
        if not (steps := self.steps()):
            raise CheckpointError(
                f"{self.directory.parent} has no complete checkpoint yet. Wait for one, or ask the"
                f" job, if it runs: `{kit_command('checkpoint', self.directory.parent)}`."
            )
        return steps[-1]

    def step_or_newest(self, step: int | None) -> int:
        """Returns `step`, or the step of the newest complete checkpoint if `step` is None."""
        return self.newest() if step is None else step

    def path(self, step: int) -> Path:
        """Returns the folder of the checkpoint at `step`."""
        return self.directory / f"step_{step:08d}"

    def manifest(self, step: int) -> Manifest:
        """Returns the manifest of the complete checkpoint at `step`, after comparing the size of
        each file with the size in the manifest.

        Raises:
            DamagedCheckpointError: The step has no complete checkpoint, or a file is missing or has
                another size.
            CheckpointError: This directory is a local mirror of a run on another machine.
                Checkpoints are not mirrored.
        """
        path = self.path(step)
        if remote := mirror_of(self.directory.parent):
            raise CheckpointError(
                f"The checkpoint of step {step} stays on {remote.mirror.login}:"
                f" {remote.mirror.directory}. Use it there."
            )
        try:
            manifest = Manifest.read(path / MANIFEST)
            seal = _own_checksum(json.loads(read_small(path / MANIFEST)))
            if manifest.checksums.get(MANIFEST) != seal:
                raise ConfigError("its manifest has changed since it was written.")
        except (ConfigError, UnicodeDecodeError) as error:
            have = ", ".join(map(str, self.steps())) or "none"
            text = f"No usable checkpoint of step {step}: {error} Complete steps: {have}."
            raise DamagedCheckpointError(text) from error
        for name, expected in manifest.files.items():
            file = path / name
            try:
                found = file_size(file)
            except FileNotFoundError:
                found = None
            except OSError as error:
                # Only a file that is no plain file means damage. Another I/O error may be
                # temporary.
                if error.errno != errno.EINVAL:
                    raise
                raise _damaged(f"{file} is {error.strerror}", path) from error
            if found != expected:
                state = "is missing" if found is None else f"has {found:,} bytes"
                raise _damaged(f"{file} {state}, but its manifest says {expected:,} bytes", path)
        return manifest

    def verify(self, manifest: Manifest, names: Iterable[str]) -> None:
        """Raises DamagedCheckpointError if the CRC-32 of one of the files `names` differs from the
        CRC-32 in the manifest. Files without a CRC-32 in the manifest are skipped.
        """
        path = self.path(manifest.step)
        for name in names:
            if name in manifest.checksums and checksum(path / name) != manifest.checksums[name]:
                raise _damaged(
                    f"{path / name} is damaged: its checksum is not that of its manifest", path
                )

    def set_aside(self, step: int, attempt: int) -> Path:
        """Renames the folder of a damaged checkpoint to `step_N.damaged-ATTEMPT`. It is then not a
        checkpoint any more, and the user can examine it. Returns the new path.
        """
        kept = self.path(step).with_suffix(f".damaged-{attempt}")
        self.path(step).rename(kept)
        return kept

    def describe(self, step: int) -> tuple[Manifest, bytes]:
        """Returns (manifest of a checkpoint, content of torch's file `.metadata`). The content is
        empty if the engine does not write torch's format.

        Raises:
            DamagedCheckpointError: The checkpoint is missing or damaged, or the CRC-32 of
                `.metadata` is wrong.
            CheckpointError: This directory is a local mirror of a run on another machine.
        """
        manifest = self.manifest(step)
        if DESCRIPTION not in manifest.files:
            return manifest, b""
        self.verify(manifest, [DESCRIPTION])
        with open_for_reading(self.path(step) / DESCRIPTION) as stream:
            return manifest, stream.read(DESCRIPTION_BYTES)

    def check_model(self, manifest: Manifest, spec: ModelSpec) -> None:
        """Raises CheckpointError if the model of a checkpoint differs from `spec`. The name of the
        model and the settings of its initial weights may differ.
        """
        saved = manifest.spec.to_dict()
        wanted = spec.to_dict()
        for key in wanted.keys() - {"name", "init_std", "scaled_init"}:
            if saved[key] != wanted[key]:
                raise CheckpointError(
                    f"{self.path(manifest.step)} is of another model: spec.{key} is {saved[key]!r}"
                    f" there and {wanted[key]!r} here. Use the run's own spec, or a new run"
                    " directory."
                )

    def complete(self, folder: Path, manifest: Manifest) -> None:
        """Makes a checkpoint complete by writing its manifest. Must be called after all other files
        are written.

        Raises:
            StaleAttemptError: A newer attempt has taken over the run.
        """
        # A process of an old attempt may still run. It must not replace newer checkpoints.
        refuse_stale(self.directory.parent, manifest.attempt)
        seal = {MANIFEST: _own_checksum(manifest.to_dict())}
        manifest.replace(checksums=manifest.checksums | seal).write(folder / MANIFEST)

    def prune(self, *, keep_last: int, keep_every: int | None) -> list[int]:
        """Deletes all checkpoints except the newest `keep_last` checkpoints and those whose step is
        a multiple of `keep_every`. Returns the steps that `steps` no longer lists.

        Also tries again to delete folders that could not be deleted earlier. Before any deletion,
        the manifests of the newest checkpoints are flushed to disk, so that they survive a power
        failure. Torch flushes its own files.
        """
        steps = self.steps()
        kept = [self.path(step) for step in steps[-keep_last:]]
        for place in (*(folder / MANIFEST for folder in kept), *kept, self.directory):
            _flush(place)
        for left_over in self._left_over():
            # Partial folders are not deleted, since a newer attempt may be writing them.
            if ".partial" not in left_over.suffix:
                self.delete(left_over)
        surplus = [
            step for step in steps[:-keep_last] if not (keep_every and step % keep_every == 0)
        ]
        return [step for step in surplus if self.delete(self.path(step))]

    def delete(self, folder: Path) -> bool:
        """Deletes a folder, or a symbolic link to a folder. Returns whether the name of the folder
        is now free.

        If the deletion fails, the error is described in `undeleted` and not raised, since training
        can continue. For example, NFS keeps a folder while a process has one of its files open. The
        next call of `prune` tries again.
        """
        doomed = folder
        try:
            if ".deleting" not in folder.suffix:
                # The folder is renamed first, since a half-deleted folder must not look like a
                # complete checkpoint. The new name is random, since an older undeleted folder of
                # this step may exist.
                doomed = folder.with_suffix(f".deleting-{os.urandom(4).hex()}")
                folder.rename(doomed)
            if doomed.is_symlink():
                doomed.unlink()
                return True
            # The first call deletes everything that can be deleted. If something is left, the
            # second call raises the error.
            shutil.rmtree(doomed, ignore_errors=True)
            if doomed.exists():
                shutil.rmtree(doomed)
        except OSError as error:
            self.undeleted = (
                f"{doomed.name} cannot be deleted ({error.strerror or error}). It takes space on"
                f" the disk of {self.directory}. Each save tries again."
            )
        return not os.path.lexists(folder)

    def recover(self) -> list[int]:
        """Renames or deletes the folders that a killed attempt left behind. Returns the steps of
        all complete checkpoints.

        A folder that is complete but does not have its final name yet is renamed to this name.
        Other folders whose names match LEFT_OVER are deleted. Links, files and folders with other
        names belong to the user and are not changed.
        """
        for folder in self._left_over():
            final = folder.with_suffix("")
            is_complete = (folder / MANIFEST).exists() and ".deleting" not in folder.suffix
            if is_complete and not final.exists():
                folder.rename(final)
            else:
                self.delete(folder)
        return self.steps()

    def _left_over(self) -> list[Path]:
        """Returns the folders whose names match LEFT_OVER: a killed attempt or a failed deletion
        has left them.
        """
        return [
            path
            for path in sorted(self.directory.glob("step_*.*"))
            if LEFT_OVER.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        ]

    def check_space(self, spec: ModelSpec) -> None:
        """Raises CheckpointError if the disk has less free space than 1.05 times the size of a
        checkpoint of the model `spec`.
        """
        needed = _needed_bytes(spec)
        free = self._free_bytes()
        if free < needed:
            raise CheckpointError(
                f"{self.directory}: no space left for a checkpoint: {needed / 1e6:,.1f} MB needed, "
                f"{free / 1e6:,.1f} MB free. Free space, or use another run directory."
            )

    def space_warning(self, spec: ModelSpec, recipe: Recipe) -> str | None:
        """Returns a warning if the disk has too little free space for all checkpoints that a run
        has at the same time. Returns None if the space suffices.
        """
        number = most_at_once(recipe)
        needed = (number - len(self.steps())) * _needed_bytes(spec)
        free = self._free_bytes()
        if free >= needed:
            return None
        kept = f"recipe.keep_last = {recipe.keep_last}"
        if recipe.keep_every is not None:
            kept += f", recipe.keep_every = {recipe.keep_every}"
        return (
            f"WARNING: {self.directory}: the disk has {free / 1e6:,.1f} MB free. The run needs"
            f" {needed / 1e6:,.1f} MB more, since it has up to {counted(number, 'checkpoint')} at"
            f" the same time ({kept}, and the one that is being written). Free space, or keep"
            " fewer checkpoints."
        )

    def _free_bytes(self) -> int:
        existing = next(path for path in (self.directory, *self.directory.parents) if path.exists())
        return shutil.disk_usage(existing).free


def most_at_once(recipe: Recipe) -> int:
    """Returns the largest number of checkpoints that a run has at the same time, including the one
    that is being written.
    """
    every = recipe.checkpoint_every or recipe.num_steps
    steps = {*range(every, recipe.num_steps, every), recipe.num_steps}
    newest = {*sorted(steps)[-recipe.keep_last - 1 :]}
    always = {step for step in steps if recipe.keep_every and step % recipe.keep_every == 0}
    return len(newest | always)


def _needed_bytes(spec: ModelSpec) -> int:
    return int(1.05 * BYTES_PER_PARAM * spec.num_params)


def _flush(place: Path) -> None:
    """Waits until the content of a file, or the list of names in a folder, is written to disk. Does
    nothing if the file system cannot flush a folder.
    """
    handle = os.open(place, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems cannot flush a folder, and report EINVAL.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def _damaged(what: str, path: Path) -> DamagedCheckpointError:
    advice = f"Restore the file, or move {path} away to continue from an earlier checkpoint."
    return DamagedCheckpointError(f"{what}. {advice}")


def checksum(file: Path) -> int:
    """Returns the CRC-32 of the content of a file.

    CRC-32 detects every single flipped bit. It protects against accidental damage but not against
    forgery. Speeds measured on one core of an AMD EPYC: CRC-32 1,500 MB/s, SHA-256 with hardware
    support 960 MB/s, BLAKE2b 460 MB/s.
    """
    value = 0
    buffer = memoryview(bytearray(READ_BYTES))
    with open_for_reading(file) as stream:
        while count := stream.readinto(buffer):
            value = zlib.crc32(buffer[:count], value)  # `crc32` releases the GIL.
    return value


def _own_checksum(manifest: dict[str, Any]) -> int:
    """Returns the CRC-32 of the content of a manifest, computed without the entry for the manifest
    itself.
    """
    others = {name: value for name, value in manifest["checksums"].items() if name != MANIFEST}
    return zlib.crc32(json.dumps({**manifest, "checksums": others}, sort_keys=True).encode())


def cause(error: BaseException) -> str:
    """Returns the reason why saving or loading a checkpoint has failed, followed by the ranks on
    which it failed.

    The attribute `failures` of torch's CheckpointException contains the error of each failed rank,
    either alone or as (error, traceback).
    """
    failures = getattr(error, "failures", {})
    causes = []
    for failure in failures.values():
        if isinstance(failure, tuple):
            failure = failure[0]
        causes.append(failure)
    ranks = f" on ranks {sorted(failures)}" if causes else ""
    if not causes:
        causes = [error]
    reason = f"{type(causes[0]).__name__}: {causes[0]}"
    for each in causes:
        # Torch reports a full disk as an unexpected position in the file.
        if getattr(each, "errno", None) == errno.ENOSPC or "unexpected pos" in str(each):
            reason = os.strerror(errno.ENOSPC)
    return f"{reason}{ranks}."
