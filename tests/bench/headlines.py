"""Measured results on the first page of the documentation: a sentence, an example plan, and five
result rows. Rows with a met target come first.

`python -m tests.bench.headlines` updates these parts and the tables of `docs/benchmarks.md` from
the files in `results/`.
"""

import dataclasses
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from kit.show.results import Row, format_value
from tests.bench.results import RESULTS, Results
from tests.bench.tables import write_tables

DOCUMENTS = (Path("docs/benchmarks.md"), Path("README.md"))
"""Documents with tables to update, relative to the current directory."""
HEADLINES = {
    "evaluate": (
        "speed of the kit / speed of HFLM, SmolLM2-135M, all tasks",
        "scoring SmolLM2-135M: items/s, divided by the items/s of lm-eval's Hugging Face class",
    ),
    "training_faults": (
        "SIGKILL: steps trained again although a complete checkpoint contained them",
        "steps trained again after a kill of ranks, although a complete checkpoint contained them",
    ),
    "validate": (
        "new machine, 0 of its runs fitted: coverage of the 90 % interval",
        "step times inside the planner's 90 % interval, for machines without a run in the fit",
    ),
    "train_speed": (
        "kit / plain loop, 1 thread, llama-100m",
        "training a Llama of 110M on one thread: tokens/s of the kit, divided by the tokens/s of a"
        " plain loop with glibc's default setting for freed memory. The kit changes this setting."
        " With the kit's setting, a plain loop trains the demo model as fast as the kit",
    ),
    "monitor": (
        "CPU time of the Jupyter kernel at 4 steps/s, as a share of one core",
        "CPU time of the live dashboard at four updates a second, as a share of one core",
    ),
}
"""Maps the name of a results file to (name of a row in the file, title of the row on the first
page)."""
ERROR = "all published runs, group left out: median error"
STRANGER = "new machine, 0 of its runs fitted: mean error"
SEARCH = "Search: all layouts of a 1T model on 3,072 devices"


def write_headlines(directory: Path = RESULTS) -> bool:
    """Writes `directory`/headlines.json and returns True. Returns False if one of the five results
    is missing.

    Raises:
        KeyError: A results file lacks a row of HEADLINES.
    """
    found = _measured(directory)
    if not found:
        return False
    rows = []
    for name, (row, title) in HEADLINES.items():
        picked = _row(found[name], row)
        rows.append(dataclasses.replace(picked, name=title, note=headline_note(picked.note)))
    rows.sort(key=lambda row: row.ok is False)
    days = sorted(results.date.split()[0] for results in found.values())
    Results(
        name="headlines",
        command="make bench faults validate",
        machine=found["validate"].machine,
        date=" to ".join(dict.fromkeys((days[0], days[-1]))),
        load_before=max(results.load_before for results in found.values()),
        rows=tuple(rows),
    ).write(directory / "headlines.json")
    return True


def headline_note(note: str) -> str:
    """Returns the first sentence of the note of a row, which is the note on the first page."""
    return note.partition(". ")[0]


def front(directory: Path = RESULTS) -> str | None:
    """Returns the sentence of the first page, built from measured rows. Returns None if a result is
    missing.
    """
    found = _measured(directory)
    if not found:
        return None
    validated = found["validate"]
    error, stranger, search = (_row(validated, name) for name in (ERROR, STRANGER, SEARCH))
    kills = _row(found["training_faults"], HEADLINES["training_faults"][0])
    # The first sentence of the note has the numbers of runs and machines, the last has the range of
    # the errors.
    runs, *_, by_machine = error.note.split(". ")
    sets_of_runs = len(re.findall(r"\d%", stranger.note))
    sentences = (
        (
            "**Measured:** the median error of the planner (`kit plan`) in step time is"
            f" {_value(error)} on {runs}."
        ),
        (
            "Each run was predicted by a fit without it or, on most machines, without all runs of"
            " equal hidden size, shape or layout."
        ),
        f"{by_machine}.",
        (
            "For a machine and a code base without any run in the fit, it is"
            f" {_value(stranger)} (mean over {sets_of_runs} sets of runs, each of one code base on"
            " one machine)."
        ),
        "The equations were chosen on these runs, so all these errors are optimistic.",
        (
            "The planner compares all layouts of a 1T model on 3,072 devices in"
            f" {_value(search)} on one core."
        ),
        f"{kills.note}.",
    )
    return textwrap.fill(" ".join(sentences), width=128)


def plan_example(document: Path = Path("README.md")) -> str:
    """Returns a code block with the output of the `kit plan` command that is printed in `document`:
    the rows from the layout to the nearest published run. The output has 80 columns. The command
    may be continued over several lines.
    """
    command = re.search(r"^\$ (kit plan (?:.*\\\n)*.*)$", document.read_text(), re.M)
    assert command
    terminal = {"TERM": "dumb", "NO_COLOR": "1", "FORCE_COLOR": "1", "COLUMNS": "80"}
    told = subprocess.run(
        [sys.executable, "-m", *command[1].replace("\\\n", " ").split()],
        env={**os.environ, **terminal},
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    told = "\n".join(line.rstrip() for line in told.splitlines())
    rows = told[told.index("\nlayout  ") : told.index("\nother choice  ")].strip()
    return f"```\n$ {command[1]}\n{rows}\n...\n```"


def refresh(*documents: Path) -> Iterator[str]:
    """Updates the measured parts of the documents. Yields one line of text per updated part.

    Raises:
        ConfigError: A document is missing, a marker has no partner, or a results file is damaged.
    """
    write_headlines()
    texts = {"front": front(), "plan": plan_example()}
    for document in documents:
        written, kept = write_tables(document, texts=texts)
        yield (
            f"{document}: refreshed {', '.join(written) or 'nothing'}; kept"
            f" {', '.join(kept) or 'nothing'}"
        )


def _measured(directory: Path) -> dict[str, Results]:
    """Returns a dict from name to the results that the first page needs. The dict is empty if one
    of the results is missing.
    """
    files = {name: directory / f"{name}.json" for name in HEADLINES}
    return (
        {n: Results.read(f) for n, f in files.items()}
        if all(f.exists() for f in files.values())
        else {}
    )


def _value(row: Row) -> str:
    return format_value(row.value, row.unit)


def _row(results: Results, name: str) -> Row:
    return {row.name: row for row in results.rows}[name]


if __name__ == "__main__":
    print(*refresh(*DOCUMENTS), sep="\n")
