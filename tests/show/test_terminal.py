"""The table of the command line: aligned, folded or stacked, and never cut; nothing is wrapped
in a file or a pipe.
"""

import io
import re

import pytest

from kit.data.build import BuildProgress
from kit.errors import kit_command
from kit.monitor.runs import show
from kit.show.terminal import PlainConsole, Table, as_text, number

RUNS = [
    (
        "frontier-tensor-parallel-sweep-with-a-long-name",
        "done",
        "1,234,567",
        "4.9882",
        "Dash et al. arXiv:2312.12705",
    ),
    (
        "b",
        "failed",
        "12",
        "10.1",
        "the job was killed, or the machine went down [/red] while it wrote a checkpoint",
    ),
]


def shown(width: int | None) -> str:
    table = Table(
        "run",
        "state",
        "tokens",
        "loss",
        "reason",
        right=("tokens", "loss"),
        title="All runs of a folder",
    )
    for row in RUNS:
        table.add(*row)
    file = io.StringIO()
    PlainConsole(file=file, **({} if width is None else {"width": width})).print(table)
    return file.getvalue()


@pytest.mark.parametrize("width", [None, 200, 120, 80, 40, 20])
def test_nothing_is_cut_at_any_width(width: int | None) -> None:
    text = shown(width)
    assert "…" not in text and max(map(len, text.splitlines())) <= (width or 200)
    assert all("".join(cell.split()) in re.sub(r"\s", "", text) for row in RUNS for cell in row[:4])
    words = text.split()
    assert width == 20 or all(word in words for word in RUNS[1][4].split()), "folded between words"


def test_what_is_no_terminal_gets_one_line_a_row() -> None:
    title, header, *rows = shown(None).splitlines()
    assert not re.search(r" $", shown(None), re.MULTILINE), "no blanks at the end of a line"
    assert title.strip() == "All runs of a folder" and header.split() == [
        "run",
        "state",
        "tokens",
        "loss",
        "reason",
    ]
    assert len(rows) == 2 and all(
        row.split()[0] == cells[0] for row, cells in zip(rows, RUNS, strict=True)
    )


def test_a_narrow_terminal_gets_names_beside_values() -> None:
    assert "tokens 1,234,567" in shown(60) and "tokens 1,234,567" not in shown(120)


def test_a_huge_loss_has_an_exponent() -> None:
    assert [number(value, ".3f") for value in (2.5, -29618484.0, float("nan"), None)] == [
        "2.500",
        "-2.962e+07",
        "not finite",
        "–",
    ]
    assert number(29618484.0, ",.0f") == "29,618,484"
    assert (
        show("loss", 29618484.0) == "2.962e+07" and show("tokens_per_s", 29618484.0) == "29,618,484"
    )


def test_a_command_in_a_message_can_be_pasted() -> None:
    assert kit_command("watch", "runs/a b's") == """kit watch 'runs/a b'"'"'s'"""


MARKED = "runs/a[red]b [/] # EDIT: [device.peak_flops_per_s] :warning: [link=x]y"


def test_brackets_of_a_name_an_error_or_a_file_are_printed_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By each console of the kit that prints what others wrote: of commands, of texts for pages,
    of a build.
    """
    PlainConsole().print(MARKED)
    BuildProgress(shown=True).say(MARKED)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [MARKED, MARKED]
    assert as_text(MARKED) == MARKED
