"""The file writer of torch's distributed checkpoint, with a checksum of each file: computed where it was written."""

import dataclasses
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from kit.checkpoint import checksum


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
