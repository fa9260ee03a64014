"""Virtual environments with exactly the packages that pip installs for a user. An environment is
made within seconds from links to files of this environment.

Each environment holds the packages that the kit's requirements need, in the versions installed
here, and the kit as a wheel built from this checkout. Packages for developers only are missing.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections import Counter
from importlib.metadata import Distribution, distributions
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = "pretraining-notebook-kit"
SITE_PACKAGES = Path(sysconfig.get_path("purelib"))


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, Distribution]:
    """Returns the installed packages of this environment by name."""
    found = distributions(path=[str(SITE_PACKAGES)])
    return {canonical(distribution.metadata["Name"]): distribution for distribution in found}


def closure(*extras: str) -> set[str]:
    """Returns the names of all packages that pip would install on this machine for the kit with
    these extras.

    Raises:
        KeyError: A required package is not installed in this environment.
    """
    here, seen = installed(), set()
    left = [(PROJECT, extra) for extra in ("", *extras)]
    while left:
        name, extra = left.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        requires = _own(extra) if name == PROJECT else here[name].requires or ()
        for wanted in map(Requirement, requires):
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                left += [(canonical(wanted.name), further) for further in ("", *wanted.extras)]
    return {name for name, _ in seen} - {PROJECT}


def _own(extra: str) -> list[str]:
    """Returns the requirements of an extra from this checkout. The installed metadata may
    be older.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["optional-dependencies"][extra] if extra else project["dependencies"]


def build_wheel(folder: Path) -> Path:
    """Builds a wheel of this checkout's packages in `folder`, from a copy of the source. Returns
    the wheel's path.
    """
    source = folder / "source"
    leave_out = shutil.ignore_patterns("__pycache__")
    for package in ("kit", "cluster"):
        shutil.copytree(ROOT / package, source / package, ignore=leave_out)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    return next(folder.glob("*.whl"))


def make_environment(folder: Path, wheel: Path, packages: set[str]) -> Path:
    """Makes an environment with the wheel, and with links to pip and to the named packages. Returns
    the path of its Python.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    place = folder / SITE_PACKAGES.relative_to(sys.prefix)
    files = {name: _files(distribution) for name, distribution in installed().items()}
    owners = Counter(top for names in files.values() for top in {name.parts[0] for name in names})
    for package in {*packages, "pip"}:
        for file in files[package]:
            whole = owners[file.parts[0]] == 1
            _link(SITE_PACKAGES, place, PurePosixPath(file.parts[0]) if whole else file)
    _pip("--python", str(python), "install", "--no-deps", "--no-index", "--no-compile", str(wheel))
    return python


def outside(**more: str) -> dict[str, str]:
    """Returns this process's environment variables, without the variables that make Python import
    the checkout. `more` adds variables.
    """
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more


def _files(distribution: Distribution) -> list[PurePosixPath]:
    """Returns a package's files except its scripts, since a script starts the Python of the
    environment in which it was installed.
    """
    record = distribution.read_text("RECORD") or ""
    names = (PurePosixPath(line.rsplit(",", 2)[0].strip('"')) for line in record.splitlines())
    return [name for name in names if name.parts[:4] != ("..", "..", "..", "bin")]


def _link(source: Path, place: Path, name: PurePosixPath) -> None:
    link = place / name
    # JupyterLab serves these files and serves no links, so they are copied.
    if name.parts[0] == "..":
        link.parent.resolve().mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, link)
    elif not link.is_symlink():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(source / name)


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=outside())
    assert not done.returncode, done.stderr
