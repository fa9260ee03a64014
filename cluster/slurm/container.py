"""Tests the container of a site from inside: `python3 -P -m cluster.slurm.container FOLDER`.

Exits with a message on standard error if the container's Python does not find torch or may not
write into FOLDER. The import of this module tests that Python finds the kit and is a recent enough
version. Standard library only.
"""

import os
import sys
from importlib.util import find_spec


def container_problem(folder: str) -> str | None:
    """Returns an error message if ranks could not run in the container of this process, otherwise
    None.
    """
    if find_spec("torch") is None:
        return f"{sys.executable} has no torch. Use an image with PyTorch"
    if not os.access(folder, os.W_OK):
        return f"{folder} is missing or read-only. Bind it into the container under the same path"
    return None


if __name__ == "__main__":
    sys.exit(container_problem(sys.argv[1]))
