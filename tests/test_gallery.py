"""The gallery: which files a notebook leaves there."""

import base64
from pathlib import Path

import nbformat
import pytest

from kit import gallery
from kit.errors import ConfigError
from kit.papers import FIGURES


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "gallery"
    monkeypatch.setattr(gallery, "GALLERY", folder)
    monkeypatch.setattr(gallery, "REPOSITORY", tmp_path)
    (tmp_path / "runs" / "study").mkdir(parents=True)
    return folder


def test_pictures_of_a_notebook_replace_its_old_ones_only(folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    for name in ("a--old.png", "b--other.png"):
        (folder / name).write_bytes(b"old")
    output = nbformat.v4.new_output("display_data", {"image/png": base64.b64encode(b"new").decode()})
    cells = [nbformat.v4.new_code_cell("1", id="draw", outputs=[output]), nbformat.v4.new_code_cell("2", id="none")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "a.ipynb")
    gallery.keep("a", tmp_path / "a.ipynb")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        "a--draw.png": b"new",
        "b--other.png": b"old",
    }


def test_figures_of_a_paper_are_kept_as_files_and_none_may_be_missing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = {name: FIGURES[name] for name in ("hlat-data-mix", "hlat-averaging")}
    monkeypatch.setattr(gallery, "PAPERS", {"paper": (quick, "study")})
    folder.mkdir()
    (folder / "hlat-averaging.svg").write_text("of a time when tables were pictures")
    gallery.keep("paper", tmp_path / "unused.ipynb")
    names = ["hlat-averaging.csv", *(f"hlat-data-mix.{ending}" for ending in ("csv", "png", "svg"))]
    assert sorted(file.name for file in folder.iterdir()) == names
    monkeypatch.setattr(gallery, "PAPERS", {"paper": ({"hlat-spikes": FIGURES["hlat-spikes"]}, "study")})
    with pytest.raises(ConfigError, match=r"hlat-spikes: runs: no spikes\.json"):
        gallery.keep("paper", tmp_path / "unused.ipynb")


def test_every_notebook_of_a_paper_exists() -> None:
    assert all((gallery.NOTEBOOKS / f"{name}.ipynb").exists() for name in gallery.PAPERS)
