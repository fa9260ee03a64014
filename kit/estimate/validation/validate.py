"""Validation as a command: the estimator's error on published runs, with whole groups held out. No torch.

For each machine the prior is the population of all other machines, so that nothing of a machine is known beforehand;
its own rows outside the held-out group are fitted, the group is scored. `kit validate` prints it.
"""

import os
from collections.abc import Sequence

import numpy as np

from kit.estimate.fit import fitting, interval
from kit.estimate.fit.fitting import Prior
from kit.estimate.fit.published import PublishedRun
from kit.estimate.theory.hardware import NAMES
from kit.estimate.theory.layouts import Array
from kit.estimate.validation.machines import Group, Machine, machines, population_without, size_of
from kit.estimate.validation.memory_validation import memory_validation
from kit.estimate.validation.new_machine import new_machine
from kit.estimate.validation.search_validation import search_validation
from kit.show.results import Row, row

SELENE_FITTED = ("factor",)


def held_out(machine: Machine, prior: Prior, *, stacks: bool = False) -> tuple[Array, Array]:
    """Returns (relative error, ln half-width of its 90 % interval) of each row, its group not fitted."""
    rows, error, half = machine.rows, np.empty(len(machine.rows)), np.empty(len(machine.rows))
    labels = {group: i for i, group in enumerate(dict.fromkeys(machine.groups))}
    group = np.array([labels[each] for each in machine.groups])
    for i in range(len(labels)):
        test = rows.select(group == i)
        found = fitting.fit(rows.select(group != i), prior, stacks=stacks)
        centre, variance = interval.spread(test.layouts, test.hardware, found.values, found.covariance)
        if stacks:
            factors = np.append(found.stack_factors, np.zeros(int(rows.stack.max()) + 1))
            centre = centre + factors[test.stack]
        error[group == i] = np.exp(centre) / test.seconds - 1
        misfit = interval.SCALES.misfit_after(found.left_out_error, found.left_out_variance)
        half[group == i] = interval.SCALES.half_width(variance, misfit, np.zeros(len(test)), len(rows) - len(test))
    return error, half


def regret(runs: Sequence[PublishedRun], predicted_s: Array, group: Group) -> tuple[float, int]:
    """Returns (how much slower the predicted best is than the measured best, averaged over groups, their number)."""
    lost = []
    keys = [group(run) for run in runs]
    for key in dict.fromkeys(keys):
        members = [i for i, each in enumerate(keys) if each == key]
        if len(members) >= 4:
            cost = np.array([runs[i].num_devices / runs[i].global_batch_size for i in members])
            measured = cost * [runs[i].step_time_s or np.nan for i in members]
            lost.append(measured[np.argmin(cost * predicted_s[members])] / measured.min() - 1)
    return float(np.mean(lost)) if lost else float("nan"), len(lost)


def validate(
    rows_csv: str | os.PathLike[str] | None = None, calibrate: int | None = None, seed: int = 0
) -> tuple[Row, ...]:
    """Returns the table of errors on published runs, groups held out, or on a CSV with their columns (`validate_rows`).

    Raises:
        ConfigError: the CSV cannot be read or holds no measured run.
    """
    if rows_csv is not None:
        from kit.estimate.validation.validate_rows import validate_rows

        return validate_rows(rows_csv, calibrate or 0, seed)
    everything = machines()
    priors = {name: population_without(everything, machine.family) for name, machine in everything.items()}
    errors, table = {}, []
    for name, machine in everything.items():
        errors[name], half = _held_out(machine, priors[name])
        table += _rows_of_machine(machine, errors[name], half)
    table.append(_row_of_all(list(errors.values())))
    table += new_machine(everything)
    table += _regret_rows(everything, errors)
    return tuple([*table, *memory_validation(), *search_validation()])


LIMITS = {
    "Selene": ("Selene, each row held out", 0.035),
    "KAIST multi-node": ("vTrain multi-node, model size held out", 0.07),
    "KAIST single node": ("vTrain single node, hidden size held out", 0.15),
    "Aleph Alpha": ("Aleph Alpha, model size held out", 0.065), "Jean Zay": ("BLOOM, shape held out", 0.06),
    "MI250X": ("MI250X, each row held out", 0.07), "trn1": ("trn1, layout held out", 0.15),
}  # fmt: skip


def predictions() -> dict[str, tuple[Array, Array]]:
    """Returns (measured, predicted) seconds per step of every published run by machine, its own group not fitted."""
    everything = machines()
    found = {}
    for name, machine in everything.items():
        error, _ = _held_out(machine, population_without(everything, machine.family))
        found[name] = (machine.rows.seconds, machine.rows.seconds * (1 + error))
    return found


def _held_out(machine: Machine, prior: Prior) -> tuple[Array, Array]:
    """Returns what `held_out` says with the numbers that are fitted for this machine."""
    prior = prior.only(SELENE_FITTED) if machine.name == "Selene" else prior
    return held_out(machine, prior, stacks=machine.name == "MI250X")


def _rows_of_machine(machine: Machine, error: Array, half: Array) -> list[Row]:
    title, limit = LIMITS.get(machine.name, (f"{machine.name}, shape held out", None))
    off = np.abs(error)
    stacks = len({run.stack for run in machine.runs})
    numbers = f"{len(NAMES)} numbers fitted, each with a prior from the other machines"
    if machine.name == "Selene":
        numbers = f"{len(SELENE_FITTED)} number fitted ({', '.join(SELENE_FITTED)})"
    elif machine.name == "MI250X":
        numbers += f", and {stacks} factors of software stacks"
    note = f"{len(off)} rows, {len(set(machine.groups))} groups; median {np.median(off):.1%}, worst {off.max():.0%}"
    note += f"; {numbers}"
    rows = [row(f"{title}: mean error", float(off.mean()), "fraction", at_most=limit, note=note)]
    if machine.name == "Selene":
        rows.append(row(f"{title}: worst error", float(off.max()), "fraction", at_most=0.09))
    if machine.name == "KAIST multi-node":
        rows.append(row(f"{title}: median error", float(np.median(off)), "fraction", at_most=0.05))
    if machine.name == "MI250X":
        paper = [i for i, run in enumerate(machine.runs) if run.source.startswith("Dash")]
        inside = [abs(np.log1p(error[i])) <= half[i] for i in paper]
        text = ", ".join(f"{machine.runs[i].spec.name} on {machine.runs[i].num_devices} {error[i]:+.0%}" for i in paper)
        rows.append(row("Frontier paper's rows inside the interval", float(np.mean(inside)), "fraction", at_least=1.0,
                        note=text))  # fmt: skip
    return rows


def _row_of_all(errors: list[Array]) -> Row:
    off = [np.abs(error) for error in errors]
    means, runs = [error.mean() for error in off], np.concatenate(off)
    note = f"{len(runs):,} published runs of {len(off)} machines, each predicted without its own "
    note += f"group (mean by machine {100 * min(means):.0f} to {100 * max(means):.0f} %)"
    name = "published runs, their own group held out: median error"
    return row(name, float(np.median(runs)), "fraction", note=note)


def _regret_rows(everything: dict[str, Machine], errors: dict[str, Array]) -> list[Row]:
    rows = []
    for name, group in (
        ("KAIST multi-node", size_of),
        ("Aleph Alpha", lambda run: (run.spec.hidden_size, run.num_devices, run.spec.sequence_length)),
    ):
        machine = everything[name]
        lost, count = regret(machine.runs, machine.rows.seconds * (1 + errors[name]), group)
        rows.append(row(f"layout regret, {name}", lost, "fraction", at_most=0.02,
                        note=f"{count} groups; predictions with the model size held out"))  # fmt: skip
    return rows
