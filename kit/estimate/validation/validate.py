"""Validation: error of the planner's step times on published runs that were not fitted. This module
does not import torch.

The runs of a machine are divided into groups of similar runs, e.g. by hidden size. To predict one
group, the planner's coefficients are fitted to all other groups of the machine. The prior of this
fit comes from other machines only. `kit validate` prints the table of errors. `make validate` adds
machines without any fitted run, memory, and the quality of the chosen layouts.
"""

import dataclasses
import os
from collections.abc import Callable, Hashable

import numpy as np

from cluster.site import Site
from kit.estimate.fit import fitting, interval, published
from kit.estimate.fit.fitting import Prior, Rows
from kit.estimate.fit.measured_rows import published_rows
from kit.estimate.fit.published import PublishedRun
from kit.estimate.theory.hardware import NAMES
from kit.estimate.theory.layouts import Array
from kit.estimate.validation.validate_rows import derived_note, validate_rows
from kit.show.results import Row, row

PAPER = "Dash et al."
"""Beginning of the source of the runs of the Frontier paper. They are in no prior, since figures
and claims compare the paper's numbers with predictions that must not contain them."""
SMALL = 120
"""Largest number of runs of one machine that are used to compute the prior of other machines. More
runs do not change the prior."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredMachine:
    """Measured published runs of one machine, divided into groups of similar runs, e.g. by hidden
    size. The runs of a group are left out of the fit together.
    """

    name: str
    runs: tuple[PublishedRun, ...]
    rows: Rows
    """Measured runs as arrays for a fit, in the order of `runs`."""
    groups: tuple[Hashable, ...]
    """Key of the group to which each run belongs, in the order of `runs`, e.g. its hidden size. To
    predict a run, all runs with its key are left out of the fit."""
    family: str
    """Name of a family of similar machines. The prior of a machine is computed without the runs of
    its family."""

    def small(self) -> Rows:
        """Returns runs as arrays for a fit of the prior: every n-th run, without the runs of the
        Frontier paper. The number n is the smallest with which at most SMALL runs are left.
        """
        allowed = [i for i, run in enumerate(self.runs) if not run.source.startswith(PAPER)]
        step = -(-len(allowed) // SMALL)
        return self.rows.select(np.array(allowed[::step]))


Group = Callable[[PublishedRun], Hashable]
"""Function that returns the key of the group to which a run belongs, e.g. its hidden size."""
Choice = Callable[[PublishedRun], bool]
"""Function that returns whether a published run belongs to a certain machine. Each entry of
MACHINES has one such function."""


def size_of(run: PublishedRun) -> Hashable:
    """Returns the hidden size of a run's neural network. Runs with equal size form a group."""
    return run.spec.hidden_size


def shape_of(run: PublishedRun) -> Hashable:
    """Returns (hidden size, number of layers) of a run's neural network. Runs in which both are
    equal form a group.
    """
    return run.spec.hidden_size, run.spec.num_layers


def _bridge(device: str) -> Choice:
    return lambda run: "Bridge" in run.source and run.device == device


# Each element is (name, family, function that selects the runs, function that returns the group of
# a run). If the last function is `id`, each run is a separate group. Runs with recalled or
# second-hand numbers, and one run with a wrong configuration, are left out.
MACHINES: tuple[tuple[str, str, Choice, Group], ...] = (
    (
        "Selene",
        "Selene",
        lambda run: run.system == "Selene" and not run.source.startswith("MT-NLG"),
        id,
    ),
    ("KAIST multi-node", "KAIST", lambda run: run.system == "KAIST A100 cluster", size_of),
    ("KAIST single node", "KAIST", lambda run: run.system == "KAIST A100 node", size_of),
    ("Aleph Alpha", "Aleph Alpha", lambda run: run.source.startswith("Aleph Alpha"), size_of),
    (
        "Jean Zay",
        "Jean Zay",
        lambda run: run.system == "Jean Zay" and "prequel" in run.source,
        shape_of,
    ),
    (
        "MI250X",
        "MI250X",
        lambda run: (
            run.system in ("Frontier", "LUMI")
            and run.plan.zero_stage < 3
            and run.status != "derived"
        ),
        id,
    ),
    (
        "trn1",
        "trn1",
        lambda run: run.system == "trn1.32xlarge",
        lambda run: (
            shape_of(run),
            run.spec.sequence_length,
            run.plan.num_stages,
            run.plan.tensor_parallel,
        ),
    ),
    ("H100", "Bridge", _bridge("H100"), shape_of),
    ("GB200", "Bridge", _bridge("GB200"), shape_of),
    ("GB300", "Bridge", _bridge("GB300"), shape_of),
)


def machines() -> dict[str, MeasuredMachine]:
    """Returns a dict from the names in MACHINES to the machines, with their measured runs. The runs
    are the published runs that the kit contains.
    """
    runs = [run for run in published.load() if run.kind == "measured"]
    found = {}
    for name, family, choice, group in MACHINES:
        own = tuple(run for run in runs if choice(run))
        groups = tuple(group(run) for run in own)
        found[name] = MeasuredMachine(
            name=name, family=family, runs=own, rows=published_rows(own), groups=groups
        )
    return found


def population_without(all_machines: dict[str, MeasuredMachine], family: str | None) -> Prior:
    """Returns the prior of the coefficients that is computed from all machines without the machines
    of one family.
    """
    return fitting.population(
        [machine.small() for machine in all_machines.values() if machine.family != family]
    )


SELENE_FITTED = ("factor",)
"""Names of the planner's coefficients that are fitted to runs on Selene. All other coefficients
keep their mean over the other machines."""


def predict_left_out_runs(
    machine: MeasuredMachine, prior: Prior, *, stacks: bool = False
) -> tuple[Array, Array]:
    """Returns (relative errors, half-widths of the 90 % intervals in ln seconds), two arrays with
    one element per run of a machine. Each run is predicted by a fit without its group (set of
    similar runs).

    With `stacks`, a time factor of each software stack is fitted too.
    """
    rows = machine.rows
    error = np.empty(len(machine.rows))
    half = np.empty(len(machine.rows))
    labels = {group: i for i, group in enumerate(dict.fromkeys(machine.groups))}
    group = np.array([labels[each] for each in machine.groups])
    for i in range(len(labels)):
        test = rows.select(group == i)
        found = fitting.fit(rows.select(group != i), prior, stacks=stacks)
        centre, variance = interval.log_time_and_variance(
            test.layouts, test.hardware, found.values, found.covariance
        )
        if stacks:
            factors = np.append(found.stack_factors, np.zeros(int(rows.stack.max()) + 1))
            centre = centre + factors[test.stack]
        error[group == i] = np.exp(centre) / test.step_time_s - 1
        misfit = interval.SCALES.misfit_after(found.left_out_error, found.left_out_variance)
        half[group == i] = interval.SCALES.half_width(
            variance, misfit, np.zeros(len(test)), len(rows) - len(test)
        )
    return error, half


def validate(
    rows_csv: str | os.PathLike[str] | None = None,
    calibrate: int | None = None,
    seed: int = 0,
    site: Site | None = None,
) -> tuple[Row, ...]:
    """Returns a table of the planner's errors on published runs. Each run is predicted by a fit
    without its group (set of similar runs, e.g. with equal hidden size).

    If `rows_csv` is given, the table shows the errors on the runs of this CSV file. Only this table
    uses the arguments `calibrate`, `seed` and `site`, which `validate_rows` explains.

    Raises:
        ConfigError: The CSV file cannot be read, or has no measured run.
    """
    if rows_csv is not None:
        return validate_rows(rows_csv, calibrate or 0, seed, site)
    found = _predict_all_left_out_runs()
    table = [row for each in found for row in _rows_of_machine(*each)]
    return (*table, _row_of_all([error for _, error, _ in found]), *torch_rows())


LIMITS = {
    "Selene": ("Selene, each run left out", 0.035),
    "KAIST multi-node": ("KAIST multi-node (vTrain), model size left out", 0.07),
    "KAIST single node": ("KAIST single node (vTrain), hidden size left out", 0.15),
    "Aleph Alpha": ("Aleph Alpha, model size left out", 0.065),
    "Jean Zay": ("Jean Zay (BLOOM), shape left out", 0.06),
    "MI250X": ("MI250X (Frontier, LUMI), each run left out", 0.07),
    "trn1": ("trn1, layout left out", 0.15),
}
"""Maps the name of a machine to (title of its row in the table, highest allowed mean error as a
fraction)."""


def predictions() -> dict[str, tuple[Array, Array]]:
    """Returns a dict from the name of a machine to (measured, predicted) seconds per step, two
    arrays with one element per published run. Each run is predicted by a fit without its group (set
    of similar runs).
    """
    return {
        machine.name: (machine.rows.step_time_s, machine.rows.step_time_s * (1 + error))
        for machine, error, _ in _predict_all_left_out_runs()
    }


def _predict_all_left_out_runs() -> list[tuple[MeasuredMachine, Array, Array]]:
    """Returns (machine, relative errors, half-widths of the 90 % intervals in ln seconds) for each
    machine. The arrays have one element per run. The prior of a machine is computed without the
    machines of its family.
    """
    everything = machines()
    found = []
    for machine in everything.values():
        prior = population_without(everything, machine.family)
        prior = prior.only(SELENE_FITTED) if machine.name == "Selene" else prior
        found.append(
            (machine, *predict_left_out_runs(machine, prior, stacks=machine.name == "MI250X"))
        )
    return found


def _rows_of_machine(machine: MeasuredMachine, error: Array, half: Array) -> list[Row]:
    without_limit = (f"{machine.name} (Megatron-Bridge), shape left out", None)
    title, limit = LIMITS.get(machine.name, without_limit)
    off = np.abs(error)
    numbers = f"{len(NAMES)} coefficients fitted, each with a prior from the other machines"
    if machine.name == "Selene":
        numbers = f"{len(SELENE_FITTED)} coefficient fitted (`{', '.join(SELENE_FITTED)}`)"
    elif machine.name == "MI250X":
        numbers += f", and {len({run.stack for run in machine.runs})} factors of software stacks"
    note = (
        f"{len(off)} runs{derived_note(machine.runs)}, {len(set(machine.groups))} groups; median"
        f" error {np.median(off):.1%}, worst {off.max():.0%}; {numbers}"
    )
    rows = [row(f"{title}: mean error", float(off.mean()), "fraction", at_most=limit, note=note)]
    if machine.name == "Selene":
        rows.append(row(f"{title}: worst error", float(off.max()), "fraction", at_most=0.09))
    if machine.name == "KAIST multi-node":
        rows.append(row(f"{title}: median error", float(np.median(off)), "fraction", at_most=0.05))
    if machine.name == "MI250X":
        paper = [i for i, run in enumerate(machine.runs) if run.source.startswith(PAPER)]
        inside = [abs(np.log1p(error[i])) <= half[i] for i in paper]
        text = ", ".join(
            f"{error[i]:+.0%} for {machine.runs[i].spec.name} on {machine.runs[i].num_devices} GCDs"
            for i in paper
        )
        rows.append(
            row(
                "MI250X, runs of the Frontier paper: coverage of the 90 % interval",
                float(np.mean(inside)),
                "fraction",
                at_least=1.0,
                note=f"error {text}",
            )
        )
    return rows


TORCH_GROUPS: dict[str, Group] = {
    "model size": size_of,
    "number of GPUs": lambda run: run.num_devices,
}
"""Maps the name of a kind of group to the function that returns the group of a run of plain torch
code. The runs of one group are left out of the fit together."""


def torch_code_bases() -> dict[str, tuple[PublishedRun, ...]]:
    """Returns a dict from the name of a software stack to its runs, for the packaged runs of plain
    torch code (FSDP2, DTensor, torch.compile). A stack is a code base on one machine.
    """
    found: dict[str, tuple[PublishedRun, ...]] = {}
    for run in published.load():
        if run.code_base and run.kind == "measured" and run.status in ("read", "mixed"):
            found[run.stack] = (*found.get(run.stack, ()), run)
    return found


def torch_rows() -> list[Row]:
    """Returns rows with the errors of the predicted step times of plain torch code.

    The first rows are about KempnerForge, with the runs of one model size, or of one number of
    GPUs, left out of the fit. The last rows leave out all runs of a software stack. Each prior of
    `torch_factor` is computed from other code bases.
    """
    stacks = torch_code_bases()
    kempner = next(runs for runs in stacks.values() if runs[0].code_base == "kempnerforge")
    others = [runs for runs in stacks.values() if runs[0].code_base != "kempnerforge"]
    prior = fitting.torch_prior(Prior.default(), [published_rows(runs) for runs in others])
    rows = []
    for name, group in TORCH_GROUPS.items():
        machine = MeasuredMachine(
            name="KempnerForge",
            runs=kempner,
            rows=published_rows(kempner),
            groups=tuple(group(run) for run in kempner),
            family="KempnerForge",
        )
        error, half = predict_left_out_runs(machine, prior)
        off = np.abs(error)
        note = (
            f"{len(error)} runs, {len(set(machine.groups))} groups; median error"
            f" {np.median(off):.1%}, worst {off.max():.0%}; the prior of the factor for plain torch"
            " code comes from other code bases"
        )
        title = f"KempnerForge (FSDP2, DTensor), {name} left out"
        bias = float(error.mean())
        inside = float(np.mean(np.abs(np.log1p(error)) <= half))
        rows += [
            row(f"{title}: mean error", float(off.mean()), "fraction", at_most=0.08, note=note),
            row(f"{title}: absolute value of the bias", abs(bias), "fraction", at_most=0.03),
            row(f"{title}: coverage of the 90 % interval", inside, "fraction", at_least=0.85),
        ]
    return [*rows, *_rows_of_left_out_stacks(stacks)]


def _rows_of_left_out_stacks(stacks: dict[str, tuple[PublishedRun, ...]]) -> list[Row]:
    errors = {}
    covered = {}
    for stack, runs in stacks.items():
        others = [published_rows(each) for name, each in stacks.items() if name != stack]
        found = fitting.prior_only(fitting.torch_prior(Prior.default(), others))
        error, inside = interval.prediction_errors(published_rows(runs), found, None)
        errors[stack] = error
        covered[stack] = float(inside.mean())
    means = [float(np.abs(error).mean()) for error in errors.values()]
    title = "plain torch code, software stack left out"
    biases = "; ".join(f"{error.mean():+.0%} for {name}" for name, error in errors.items())
    note = f"predicted by the prior alone; bias {biases}"
    held = float(np.mean([*covered.values()]))
    return [
        row(f"{title}: mean error", float(np.mean(means)), "fraction", note=note),
        row(f"{title}: coverage of the 90 % interval", held, "fraction", at_least=0.85),
    ]


def _row_of_all(errors: list[Array]) -> Row:
    off = [np.abs(error) for error in errors]
    means = [error.mean() for error in off]
    runs = np.concatenate(off)
    note = (
        f"{len(runs):,} published runs of {len(off)} machines. Each run was predicted by a fit"
        " without its group: the run alone, or all runs of equal hidden size, shape or layout. The"
        " mean error on the runs of one machine is"
        f" {100 * min(means):.0f} to {100 * max(means):.0f} %"
    )
    name = "all published runs, group left out: median error"
    return row(name, float(np.median(runs)), "fraction", note=note)
