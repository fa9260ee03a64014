"""Makes file system calls of started programs slow or fail. A library, compiled from
`failing_disk.c`, is preloaded into the programs.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

Fault = tuple[str, int, int, str]
"""One fault: (name of the C function, error number or 0 for no error, delay in milliseconds,
pattern of file paths below a folder).
"""


def compiler() -> str | None:
    """Returns the path of this machine's C compiler, or None."""
    return shutil.which("gcc") or shutil.which("cc")


def compile_library(folder: Path) -> Path:
    """Compiles the library that makes calls slow or fail into a folder, and returns its path.

    Raises:
        RuntimeError: This machine has no C compiler.
    """
    found = compiler()
    if found is None:
        raise RuntimeError("a failing disk needs a C compiler, and there is no gcc or cc here")
    out, source = folder / "failing_disk.so", Path(__file__).with_name("failing_disk.c")
    subprocess.run(
        [found, "-shared", "-fPIC", "-O2", "-o", str(out), str(source), "-ldl"], check=True
    )
    return out


class FailingDisk:
    """A disk with faults for the programs that are started in the context `preloaded`.

    Args:
        library: Path of the compiled library.
        rules: File with the present faults. The file may be missing.
    """

    def __init__(self, library: Path, rules: Path) -> None:
        self.library, self.rules = library, rules

    @contextlib.contextmanager
    def preloaded(self) -> Iterator[None]:
        """Sets the environment variables that preload the library into programs started in the
        with-block.
        """
        added = {"LD_PRELOAD": str(self.library), "FAILING_DISK": str(self.rules)}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]

    @property
    def num_hits(self) -> int:
        """Number of calls so far that the library made slow or made fail."""
        hits = self.rules.with_name(f"{self.rules.name}.hits")
        return hits.stat().st_size if hits.exists() else 0

    def begin(self, folder: Path, *faults: Fault) -> None:
        """Starts faults for files in a folder. The new faults replace all earlier faults."""
        lines = [
            f"{call} {code} {delay_ms} {folder}/{pattern}\n"
            for call, code, delay_ms, pattern in faults
        ]
        part = self.rules.with_suffix(".part")
        part.write_text("".join(lines))
        part.replace(self.rules)

    def end(self) -> None:
        """Ends all faults, so that file system calls succeed again."""
        self.rules.unlink(missing_ok=True)
