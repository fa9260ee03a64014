import shlex
import sys
from collections.abc import Callable

import pytest

from kit.__main__ import main


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """Returns a function that runs a command that must fail, and returns its standard error.

    The function checks that the exit code is 1 or 2 and that no traceback was printed.
    """

    def said(words: str | list[str]) -> str:
        words = shlex.split(words) if isinstance(words, str) else words
        monkeypatch.setattr(sys, "argv", ["kit", *words])
        with pytest.raises(SystemExit) as end:
            main()
        text = capsys.readouterr().err
        assert end.value.code in (1, 2) and text.strip() and "Traceback" not in text, words
        return " ".join(text.split())

    return said
