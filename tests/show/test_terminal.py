"""Tables in the terminal: columns are aligned, folded or stacked, and text is never truncated.
Tables in a file are not wrapped.
"""

import io
import re

import pytest

from kit.data.workers import BuildProgress
from kit.errors import kit_command
from kit.monitor.runs import cell_text
from kit.show.terminal import PlainConsole, Table, as_text, format_number

COLUMNS = ("run", "state", "tokens", "loss", "reason")
LONG = "frontier-tensor-parallel-sweep-with-a-long-name"
REASON = "the job was killed, or the machine went down [/red] while it wrote a checkpoint"
RUNS = [
    (LONG, "done", "1,234,567", "4.9882", "Dash et al. arXiv:2312.12705"),
    ("b", "failed", "12", "10.1", REASON),
]


def shown(width: int | None) -> str:
    table = Table(*COLUMNS, rows=RUNS, right=("tokens", "loss"), title="All runs of a folder")
    file = io.StringIO()
    PlainConsole(file=file, **({} if width is None else {"width": width})).print(table)
    return file.getvalue()


@pytest.mark.parametrize("width", [None, 200, 120, 80, 60, 40, 20])
def test_table_cuts_nothing_at_any_width(width: int | None) -> None:
    text = shown(width)
    assert "…" not in text and max(map(len, text.splitlines())) <= (width or 200)
    assert all("".join(cell.split()) in re.sub(r"\s", "", text) for row in RUNS for cell in row[:4])
    assert width == 20 or {*REASON.split()} <= {*text.split()}, "folded between words"
    is_stacked = width is not None and width <= 80
    assert ("tokens 1,234,567" in text) == is_stacked, "names beside values where it is narrow"


def test_table_in_a_file_has_one_line_per_row() -> None:
    title, header, *rows = shown(None).splitlines()
    assert not re.search(r" $", shown(None), re.MULTILINE), "no blanks at the end of a line"
    assert title == "All runs of a folder" and header.split() == [*COLUMNS]
    assert [row.split()[0] for row in rows] == [LONG, "b"]


def test_huge_loss_is_printed_with_exponent() -> None:
    told = [format_number(value, ".3f") for value in (2.5, -29618484.0, float("nan"), None)]
    assert told == ["2.500", "-2.962e+07", "not finite", "–"]
    assert cell_text("loss", 29618484.0) == "2.962e+07"
    assert cell_text("tokens_per_s", 29618484.0) == "29,618,484"


def test_command_in_message_is_shell_quoted() -> None:
    assert kit_command("watch", "runs/a b's") == """kit watch 'runs/a b'"'"'s'"""


MARKED = "runs/a[red]b [/] # EDIT: [device.peak_flops_per_s] :warning: [link=x]y"


def test_brackets_in_text_are_printed_literally(capsys) -> None:
    """Brackets must not be read as markup of the console. The consoles of commands, of pages and of
    a dataset build are tested.
    """
    PlainConsole().print(MARKED)
    BuildProgress(shown=True).log_line(MARKED)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [MARKED, MARKED]
    assert as_text(MARKED) == MARKED
