"""Public names have docstrings, and examples in docstrings run in their order as shown."""

import doctest
import inspect
from pathlib import Path

import pytest

import kit
from kit.data import build_dataset

README = Path(__file__).parent.parent / "README.md"


def test_every_public_name_has_a_docstring() -> None:
    assert all(inspect.getdoc(getattr(kit, name)) for name in kit.__all__)


# The examples take ten seconds on an idle machine, because they run a job of five steps.
@pytest.mark.timeout(600)
def test_docstring_examples_run_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
