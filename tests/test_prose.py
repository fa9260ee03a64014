"""What the notebooks say in numbers is what their code and their outputs show."""

import dataclasses
import math
import re

import pytest

from kit.estimate.theory.hardware import Coefficients
from kit.evaluate.benchmarks import SUITES
from kit.papers.hlat_demo import ANSWERS, PRECISIONS
from kit.trainer.callback import Callback
from tests.gallery import GALLERY, NOTEBOOKS
from tests.prose import counts, evidence, markdown, prose, unseen

FOUR_PROCESSES = r"tensor_parallel=(2), pipeline_parallel=(2)"
DISTURBED = r"subprocess\.Popen|signal\.SIGSTOP|learning_rate=30\.0"
COUNTED: dict[str, dict[str, str | int]] = {
    "00": {
        "four processes": FOUR_PROCESSES,
        "four times": FOUR_PROCESSES,
        "two processes": r"tensor_parallel=(2), pipeline",
        "two more": r"tensor_parallel=2, pipeline_parallel=(2)",
        "two different": r"\d × \d × \d",
        "two micro": r"micro_batch_size=4, global_batch_size=8|data_parallel=2, zero_stage=1",
        "fifty questions": r"limit=(50)\)",
        "three lines": r"build_mirror\(\)|evaluate\(run|Table\(\[\{column: row\[column\] for",
    },
    "01": {
        "two real": r"--nproc-per-node=(2)",
        "two sums": r"dist\.all_reduce\([\w.]+\)",
        "two forward": r"pipeline, rank 0: F0 F1 B0|pipeline, rank 1: F0 B0",
        "two matrices": r"[AB]\.chunk\(2, dim=[01]\)\[rank\]",
        "four moments": sum(not name.startswith(("_", "needs")) for name in vars(Callback)),
    },
    "02": {
        "three kinds": r"\"full\", |\"selective\", |\"none\"\)",
        "twenty-one fitted": len(dataclasses.fields(Coefficients)),
        "three published": r"\"(?:22b|175b|1t)\"",
        "three of": r"propose\(table, (3), hardware\)",
        "six to": r"\"[\w ,-]+\": base",
    },
    "03": {
        "four nodes": r"node\d batch",
        "four node": r"node\d batch",
        "two nodes": r"ranks starting on node\[1-(2)\]",
        "four processes": r"(4) ranks starting on",
        "than four": r"(4) ranks starting on",
    },
    "04": {
        "three windows": r"Monitor\(run|run_figure\(run|run\.job\.status\(\)",
        "three ways": DISTURBED,
        "three of": DISTURBED,
        "two ranks": r"plan = kit.Plan\(data_parallel=(2)",
        "eight busy": r"Popen.* in range\((8)\)",
    },
    "05": {
        "three tasks": len(SUITES["curve"]),
        "with two": r"shots=(2)",
        "two checkpoints": r"HLAT, \d+B tokens",
    },
    "06": {"five runs": r"LUMI, [\d,]+ GCDs"},
    "07": {
        "three checkpoints": r"len\(run\.checkpoints\.steps\(\)\) == (\d)",
        "four precisions": len(PRECISIONS),
        "three on": len(ANSWERS) - 2,
    },
}
"""Counts in words, and what must be as many: the different matches in code and outputs of the page;
with groups, the product of the numbers that these hold.
"""
SAID = {
    "four nodes": "03 starts them",
    "two processes": "of a node: four on two",
    "two ranks": "of the recorded journey, tests/cluster/test_journey.py",
    "two cpu": "the machine that the pages are made on",
    "two cores": "the same",
    "two minutes": "measured on it: see BENCHMARKS.md",
    "ten seconds": "the same",
    "thousand devices": "no particular number",
    "thousand processes": "no particular number",
    "thousand others": "no particular number",
    "thousand do": "compared with a million steps, by tests/monitor/test_soak.py",
    "million steps": "there and in tests/cluster/test_login.py",
    "thousand per": "ten times the speed that was measured, by construction",
    "million after": "about: the assert has the bound",
    "four million": "definition of the paper",
    "two papers": "these are 06 and 07",
    "five tables": "of the paper",
    "three sizes": "of the paper",
    "three per": "headlines of the paper",
    "three quarters": "6ND without recomputation over 8ND with it",
    "million exaflop": "of the paper's abstract",
    "the four": "ratios of the paper, named in the table",
    "ten times": "of the paper",
    "four hold": "ratios of the paper, named in the table",
    "six batches": "kit.papers.hlat_demo makes them",
    "two checkpoints": "the last ones",
    "three formulae": "named above it",
    "two all": "definition of a layer cut over tensor ranks",
    "two of": "named there",
    "three headline": "of the paper, in 01",
    "two logs": "of LUMI and of the authors; the figure has them",
    "two numbers": "parameters and FLOPs, named there",
    "has two": "up and down, named in the formula",
    "two per": "definition of a block",
    "two moments": "definition of Adam",
    "two ends": "of a pipeline",
    "three times": "definition: the backward pass costs two forward ones",
    "four times": "4 over 1, told there",
    "two sources": "named there",
    "five runs": "of make validate, which draws the picture",
    "two to": "of make validate",
    "three steps": "named there",
    "two and": "seconds, about",
    "seven minutes": "of Slurm, by tests/faults",
    "two lines": "those of the block below",
    "two windows": "the others of three",
    "two conventions": "named there",
    "the two": "ranks, see above",
    "two also": "the first rows of the table",
    "two reasons": "named there",
    "two curves": "any",
    "two may": "any",
    "two can": "rules, named there",
    "two different": "scores, named there",
    "with five": "definition of MMLU",
    "two models": "any",
    "three points": "an example; the figure above shows it",
    "hundred questions": "an example; the figure above shows it",
    "two columns": "named in the note",
    "three layers": "named in the table",
    "three lines": "of a caption, named there",
    "two things": "named there",
    "three studies": "named there",
    "two layer": "model of `make test-nxd`",
    "two sides": "named there",
    "20": "seconds, about; see BENCHMARKS.md",
    "1.5": "of make validate",
    "22": "of make validate",
    "1.2": "of make validate",
    "2.28": "of AWS, see requirements/trainium.txt",
    "2.9": "of AWS, see requirements/trainium.txt",
    "2.33": "of AWS, see requirements/trainium.txt",
    "2006": "a year",
    "150": "the default of hung_after_s",
    "900": "bytes, about, by tests/cluster/test_login.py",
    "75": "the rule of the alarm, kit.monitor.alerts",
    "15": "seconds, the rule of the alarm, kit.monitor.alerts",
    "86": "size of the package, kit.evaluate.task_data",
    "19": "of 20: 95 %",
    "100": "an example",
    "14": "of the paper",
    "24": "of the paper",
    "256": "nodes of the paper",
    "400": "of the paper",
    "8,000": "remembered of the paper",
    "18": "fp32 gradients: 4 more than 14",
    "300": "of the figure's caption",
    "28.8": "the output of 01",
    "27.1": "the output of 01",
    "24.0": "the output of 01",
    "200": "of the paper",
    "1.8": "trillion tokens, of the paper",
}
"""Numbers that no output shows, and where they are from."""

of_each = pytest.mark.parametrize(
    "notebook", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda notebook: notebook.stem
)


@of_each
def test_numbers_in_sentences_are_those_of_the_outputs(notebook) -> None:
    text, seen = prose(notebook), evidence(notebook)
    counted = COUNTED[notebook.stem[:2]]
    said = counts(text)
    assert set(said) - set(counted) - set(SAID) == set(), "count it above, or say where it is from"
    assert set(unseen(text, seen)) - set(SAID) == set(), "no output shows it; say where it is from"
    wrong = {
        phrase: found
        for phrase, number in said.items()
        if phrase in counted
        if (found := number_of(counted[phrase], seen)) != number
    }
    assert not wrong, "said, and how many there are"


def number_of(what: str | int, seen: str) -> int:
    """Returns how many there are of something that COUNTED names."""
    if isinstance(what, int):
        return what
    found = {match.groups() or match[0] for match in re.finditer(what, seen)}
    held = [int(number) for groups in found if isinstance(groups, tuple) for number in groups]
    return math.prod(held) if held else len(found)


@of_each
def test_page_has_the_sentences_of_the_notebook(notebook) -> None:
    page = (GALLERY / f"{notebook.stem}.md").read_text(encoding="utf-8")
    assert [text for text in markdown(notebook) if text not in page] == [], "make gallery"


def test_a_number_that_no_output_shows_is_found() -> None:
    assert counts("In five ways, not in twenty-one; a kit of two.") == {
        "five ways": 5,
        "in twenty-one": 21,
        "of two": 2,
    }
    assert unseen("1,024 devices, 38.4 %, 7 of 512", "x = 1024; 38.38 and 511") == ["512"]
    assert number_of(r"node\d", "node1 node2 node1") == 2
    assert number_of(r"TP(\d) PP(\d)", "TP2 PP4, TP2 PP4") == 8
