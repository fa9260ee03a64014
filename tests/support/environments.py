"""Environments that hold what pip installs for a reader and nothing else, made in seconds: links to
files of this one.

A virtual environment of its own, with all packages that the kit's requirements lead to, in the
versions installed here, and the kit as a wheel built from this checkout. What only a developer has
is not there.
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
    """Returns the packages of this environment by name."""
    found = distributions(path=[str(SITE_PACKAGES)])
    return {canonical(distribution.metadata["Name"]): distribution for distribution in found}


def closure(*extras: str) -> set[str]:
    """Returns all packages that pip would install here for this project with some of its extras.

    Raises:
        KeyError: one of them is not installed here.
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
    """Returns this checkout's requirements; its installed metadata may be older."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["optional-dependencies"][extra] if extra else project["dependencies"]


def build_wheel(folder: Path) -> Path:
    """Returns a wheel of this checkout's packages, built in `folder` from a copy."""
    source = folder / "source"
    leave_out = shutil.ignore_patterns("__pycache__")
    for package in ("kit", "cluster"):
        shutil.copytree(ROOT / package, source / package, ignore=leave_out)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    return next(folder.glob("*.whl"))


def make_environment(folder: Path, wheel: Path, packages: set[str]) -> Path:
    """Returns the Python of a new environment with the wheel and links to pip and packages."""
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
    """Returns environment variables without what would lead Python back into the checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more


def _files(distribution: Distribution) -> list[PurePosixPath]:
    """Returns a package's files but its scripts, which start the Python they were made for."""
    record = distribution.read_text("RECORD") or ""
    names = (PurePosixPath(line.rsplit(",", 2)[0].strip('"')) for line in record.splitlines())
    return [name for name in names if name.parts[:4] != ("..", "..", "..", "bin")]


def _link(source: Path, place: Path, name: PurePosixPath) -> None:
    link = place / name
    if name.parts[0] == "..":  # what JupyterLab serves, and it serves no links
        link.parent.resolve().mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, link)
    elif not link.is_symlink():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(source / name)


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=outside())
    assert not done.returncode, done.stderr
