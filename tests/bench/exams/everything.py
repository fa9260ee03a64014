"""All validation results of the planner in one table."""

from collections.abc import Sequence

import numpy as np

from kit.estimate.fit.published import PublishedRun
from kit.estimate.theory.layouts import Array
from kit.estimate.validation.validate import Group, machines, predictions, size_of, validate
from kit.show.results import Row, row
from tests.bench.exams.memory import memory_exam
from tests.bench.exams.new_machine import new_machine
from tests.bench.exams.search import search_exam


def everything() -> tuple[Row, ...]:
    """Returns rows with the planner's errors in step time, on left-out machines, in the choice of
    layout and in memory, and with the speed of its search.
    """
    return (*validate(), *new_machine(machines()), *regrets(), *memory_exam(), *search_exam())


def regret(runs: Sequence[PublishedRun], predicted_s: Array, group: Group) -> tuple[float, int]:
    """Returns (slowdown, number of groups). The slowdown is the measured excess time of the layout
    that was predicted as fastest, relative to the fastest measured layout. It is a mean over groups
    of at least four runs.
    """
    lost, keys = [], [group(run) for run in runs]
    for key in dict.fromkeys(keys):
        members = [i for i, each in enumerate(keys) if each == key]
        if len(members) >= 4:
            cost = np.array([runs[i].num_devices / runs[i].plan.global_batch_size for i in members])
            measured = cost * [runs[i].step_time_s or np.nan for i in members]
            lost.append(measured[np.argmin(cost * predicted_s[members])] / measured.min() - 1)
    return float(np.mean(lost)) if lost else float("nan"), len(lost)


def regrets() -> list[Row]:
    """Returns rows with the slowdown of predicted best layouts, for the two machines with the most
    measured layouts.
    """
    known, predicted, rows = machines(), predictions(), []

    def size_and_devices(run: PublishedRun) -> tuple:
        return run.spec.hidden_size, run.num_devices, run.spec.sequence_length

    for name, group in (("KAIST multi-node", size_of), ("Aleph Alpha", size_and_devices)):
        lost, count = regret(known[name].runs, predicted[name][1], group)
        note = f"mean over {count} groups; predictions with the model size left out of the fit"
        title = f"excess time of the layout predicted as fastest, {name}"
        rows.append(row(title, lost, "fraction", at_most=0.02, note=note))
    return rows
