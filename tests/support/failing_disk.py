"""Makes a file system slow, or failing, for programs that are started from here, by a library that
is compiled from `failing_disk.c` and preloaded into them.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

Fault = tuple[str, int, int, str]
"""Call, error number or 0, delay in milliseconds, pattern of paths below a folder."""


def compiler() -> str | None:
    """Returns the C compiler of this machine, or None if there is none."""
    return shutil.which("gcc") or shutil.which("cc")


def compile_library(folder: Path) -> Path:
    """Returns the library that makes calls slow or fail, compiled into a folder.

    Raises:
        RuntimeError: there is no C compiler.
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
    """A disk that fails for the programs that are started inside `preloaded`.

    Args:
        library: the compiled library.
        rules: file of the rules in effect, which need not exist.
    """

    def __init__(self, library: Path, rules: Path) -> None:
        self.library, self.rules = library, rules

    @contextlib.contextmanager
    def preloaded(self) -> Iterator[None]:
        """Sets the variables by which a program started in the block gets the library."""
        added = {"LD_PRELOAD": str(self.library), "FAILING_DISK": str(self.rules)}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]

    @property
    def num_hits(self) -> int:
        """Number of calls so far that were slow or failed."""
        hits = self.rules.with_name(f"{self.rules.name}.hits")
        return hits.stat().st_size if hits.exists() else 0

    def begin(self, folder: Path, *faults: Fault) -> None:
        """Begins some faults of files in a folder, instead of those in effect."""
        lines = [
            f"{call} {code} {delay_ms} {folder}/{pattern}\n"
            for call, code, delay_ms, pattern in faults
        ]
        part = self.rules.with_suffix(".part")
        part.write_text("".join(lines))
        part.replace(self.rules)

    def end(self) -> None:
        """Ends all faults."""
        self.rules.unlink(missing_ok=True)
