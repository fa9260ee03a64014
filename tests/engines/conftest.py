"""Puts a simulated NxD (folder `standin`) on sys.path, as if it were installed. Worker processes
import the simulated NxD.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

STANDIN = Path(__file__).parent / "standin"
VERSIONS = {
    "neuronx-distributed": "0.17.26814",
    "torch-neuronx": "2.9.0.2.12.22436",
    "torch-xla": "2.9.0",
}


def install(folder: Path, versions: dict[str, str]) -> Path:
    """Creates a folder with package metadata (dist-info) for the given names and versions, without
    modules. Returns the folder.
    """
    folder.mkdir(exist_ok=True)
    for name, version in versions.items():
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


@pytest.fixture
def standin(tmp_path_factory, monkeypatch) -> Iterator[str]:
    """Installs the simulated NxD. Yields the PYTHONPATH with which other processes find it."""
    folder = install(tmp_path_factory.mktemp("installed"), VERSIONS)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.syspath_prepend(str(STANDIN))
    yield os.pathsep.join([str(STANDIN), str(folder), os.environ.get("PYTHONPATH", "")])
    assert "torch_xla" not in sys.modules, "a stand-in in this process would mislead other packages"
