"""Writes a run's checkpoints in the background, by torch's distributed checkpoint, with a checksum of each file."""

import dataclasses
import shutil
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from kit.errors import CheckpointError
from kit.run.checkpoint import Checkpoints, Manifest, cause, checksum


class CheckpointWriter:
    """Writes checkpoints of one attempt in the background, one at a time; every rank has one.

    The process group of background writes is its own, so that they never mix with training's collectives.
    """

    def __init__(self, checkpoints: Checkpoints, *, attempt: int, keep_last: int, keep_every: int | None) -> None:
        self.checkpoints, self.attempt = checkpoints, attempt
        self.keep_last, self.keep_every = keep_last, keep_every
        self.is_coordinator = dist.get_rank() == 0
        self.group: Any = dist.new_group(backend="gloo")
        self.pending: tuple[Any, CheckedWriter, dict] | None = None

    def start(self, state: dict[str, Tensor], facts: dict) -> None:
        """Copies `state` and begins to write it; returns as soon as training may change the tensors.

        `state` is as `engine.state_dict()` gives it, `facts` the manifest's fields other than attempt, time and files.

        Raises:
            CheckpointError: this or the previous write failed; older checkpoints are intact.
        """
        self.finish()
        if self.is_coordinator:
            self.checkpoints.check_space(facts["spec"])
        partial = self.checkpoints.path(facts["step"]).with_suffix(f".partial-{self.attempt}")
        writer = CheckedWriter(partial)
        future = async_save(state, storage_writer=writer, process_group=self.group)
        self.pending = (future, writer, facts)

    def poll(self) -> None:
        """Completes the pending checkpoint if its files are written; never waits. Call it once a step."""
        if self.pending is not None and self.pending[0].done():
            self.finish()

    def finish(self) -> None:
        """Waits for the pending checkpoint, if any, and makes it complete."""
        if self.pending is None:
            return
        (future, writer, facts), self.pending = self.pending, None
        try:
            future.result()
        except (Exception, CheckpointException) as error:  # torch's derives from BaseException
            newest = max(self.checkpoints.steps(), default=None)
            kept = f"The checkpoint of step {newest} is intact." if newest else "There is no older checkpoint."
            raise CheckpointError(
                f"The checkpoint of step {facts['step']} could not be written: {cause(error)} {kept}"
            ) from error
        if self.is_coordinator:
            self._complete(Path(writer.path), writer.checksums, facts)

    def _complete(self, partial: Path, checksums: dict[str, int], facts: dict) -> None:
        files = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
        self.checkpoints.complete(
            partial, Manifest(attempt=self.attempt, time=time.time(), files=files, checksums=checksums, **facts)
        )
        final = self.checkpoints.path(facts["step"])
        replaced = final.with_suffix(f".replaced-{self.attempt}")
        if final.exists():
            final.rename(replaced)  # the newer attempt's is whole already, so nothing is lost in between
        partial.rename(final)
        if replaced.exists():
            shutil.rmtree(replaced)
        self.checkpoints.prune(keep_last=self.keep_last, keep_every=self.keep_every)


@dataclasses.dataclass(frozen=True)
class CheckedResult(WriteResult):
    """What a rank reports of one tensor that it has written, and of the file that it went to."""

    file: str
    checksum: int


class CheckedWriter(FileSystemWriter):
    """Writes this rank's files and reads them back once, all in the thread that writes in the background.

    Attributes:
        checksums: CRC-32 of each file of the checkpoint by name, on the coordinator once it is written.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.checksums: dict[str, int] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's tensors; its files' checksums travel to the coordinator with the results."""
        results = super().write_data(plan, planner).wait()
        names = [result.storage_data.relative_path for result in results]
        sums = {name: checksum(Path(self.path) / name) for name in set(names)}
        checked: Future[list[WriteResult]] = Future()
        checked.set_result(
            [
                CheckedResult(**vars(result), file=name, checksum=sums[name])
                for result, name in zip(results, names, strict=True)
            ]
        )
        return checked

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the metadata, on the coordinator, and keeps all checksums."""
        super().finish(metadata, results)
        self.checksums = {
            result.file: result.checksum for part in results for result in part if isinstance(result, CheckedResult)
        }
        folder: Any = Path(self.path)
        self.checksums[".metadata"] = checksum(folder / ".metadata")
