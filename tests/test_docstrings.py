"""The examples in docstrings of public names do what they show, one after the other."""

import doctest
import inspect
from pathlib import Path

import pytest

import kit
from kit.data import build_dataset

README = Path(__file__).parent.parent / "README.md"


def test_every_public_name_says_what_it_is() -> None:
    assert all(inspect.getdoc(getattr(kit, name)) for name in kit.__all__)


# Ten seconds alone: a job of five steps.
@pytest.mark.timeout(600)
def test_examples_do_what_they_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(README.read_text() * 3)
    build_dataset("data/demo", "text.txt", vocab_size=300, progress=False)
    for example in (kit.Recipe, kit.Site, kit.launch, kit.Run):
        text = str(inspect.getdoc(example))
        assert "Next: " in " ".join(text.split())
        test = doctest.DocTestParser().get_doctest(text, {}, example.__name__, None, 0)
        told: list[str] = []
        found = doctest.DocTestRunner().run(test, out=told.append)
        assert found.attempted >= 3 and not found.failed, "".join(told)
