"""Validation on the runs of a user: errors of the planner's step times and memory. The runs are
read from a CSV file with the columns of the published runs. They may come from machines of which
the kit has no published runs. This module does not import torch.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from cluster.record import ConfigError
from cluster.site import Site
from kit.estimate.fit import fitting, interval, published
from kit.estimate.fit.calibrate import propose
from kit.estimate.fit.fitting import MIN_MEMORY_RUNS, Prior, fit_reserve
from kit.estimate.fit.measured_rows import hardware_of, published_rows
from kit.estimate.fit.published import PublishedRun
from kit.estimate.theory.activations import MEGATRON
from kit.estimate.theory.hardware import NARROW
from kit.estimate.theory.layouts import Array, Layouts
from kit.estimate.theory.memory import CODE_BASES, DYNAMIC, STATE, CodeBase, memory
from kit.estimate.theory.out_of_memory import MONITOR_RESERVE
from kit.show.results import Row, row


def validate_rows(
    file: str | os.PathLike[str], calibrate: int = 0, seed: int = 0, site: Site | None = None
) -> tuple[Row, ...]:
    """Returns a table of the planner's errors on the runs of a CSV file, for each machine and for
    all machines together.

    If `site` is given, all runs are assumed to have been made on this site. If the kit has
    published runs of a machine, the planner is first fitted to these runs. Published runs that are
    also in the CSV file are left out, so that no run is predicted by a fit that contains it. For
    all other machines, the average of published machines is used.

    `calibrate` is the number of runs of each machine that are fitted too. Their errors are not in
    the table, and at least one run is not fitted. The runs to fit are chosen from a random half of
    the machine's runs, which `seed` determines. If runs are fitted, published runs of other
    software stacks are left out of the fit. In a test with left-out stacks and five fitted
    runs, the error was 6.3 % with the published runs of other stacks, and 5.1 % without them.

    Raises:
        ConfigError: The CSV file cannot be read, no row has a known layout, or no row has a machine
            whose numbers are known (`hardware_of`).
    """
    if calibrate < 0:
        raise ConfigError(
            f"validate.calibrate: {calibrate} is not allowed. Give a number of runs from 0."
        )
    runs, refused, left_out = published.read_runs(file)
    measured = [run for run in runs if run.kind == "measured"]
    if not runs:
        raise ConfigError(
            f"{file}: no row has a layout and a time or an out-of-memory label. "
            f"{_reasons([*refused, *left_out])}"
        )
    lacking = [_lacking(run, site) for run in measured]
    if lacking and all(lacking):
        raise ConfigError("; ".join(dict.fromkeys(lacking)))
    measured = [run for run, lacks in zip(measured, lacking, strict=True) if not lacks]
    table = []
    errors = []
    inside = []
    for system in dict.fromkeys(run.system for run in measured):
        own = [run for run in measured if run.system == system]
        error, covered, note = _score(own, calibrate, seed, site)
        errors = [*errors, error]
        inside = [*inside, covered]
        table.append(
            row(f"{system}: mean error", float(np.abs(error).mean()), "fraction", note=note)
        )
        table.append(
            row(f"{system}: coverage of the 90 % interval", float(covered.mean()), "fraction")
        )
    if errors:
        off = np.abs(np.concatenate(errors))
        covered = np.concatenate(inside)
        table.append(
            row("all rows: mean error", float(off.mean()), "fraction", note=f"{len(off)} rows")
        )
        table.append(row("all rows: median error", float(np.median(off)), "fraction"))
        table.append(row("all rows: worst error", float(off.max()), "fraction"))
        table.append(
            row("all rows: coverage of the 90 % interval", float(covered.mean()), "fraction")
        )
    table += memory_error_rows([run for run in runs if run.memory_bytes])
    table.append(row("rows refused", len(refused), note=_reasons(refused)))
    table.append(row("rows left out", len(left_out), note=_reasons(left_out)))
    if unplaced := list(filter(None, lacking)):
        note = "; ".join(dict.fromkeys(unplaced))
        table.append(row("rows of a machine without numbers", len(unplaced), note=note))
    return tuple(table)


def _lacking(run: PublishedRun, site: Site | None) -> str:
    """Returns a text that names the hardware numbers that the step time needs and that are unknown
    for the run's machine. If no number is missing, the text is empty.
    """
    try:
        hardware_of(run, site)
    except ConfigError as error:
        return str(error)
    return ""


def _reasons(lines: published.Lines) -> str:
    """Returns a text with the three most common reasons why rows are not used. Each reason follows
    the number of its first line, e.g. `line 7 and 2 more: no tp; ...`.
    """
    counts = Counter(reason for _, reason in lines)
    first = {reason: line for line, reason in reversed(lines)}
    more = {
        reason: f" and {count - 1} more" if count > 1 else ""
        for reason, count in counts.most_common(3)
    }
    return "; ".join(f"line {first[reason]}{rest}: {reason}" for reason, rest in more.items())


def _score(
    runs: list[PublishedRun], calibrate: int, seed: int, site: Site | None
) -> tuple[Array, Array, str]:
    """Returns (relative errors, whether each measured time lies in its 90 % interval, note for the
    table). All `runs` are from one machine. The arrays have one element for each run that was not
    used for the fit.
    """
    rows = published_rows(runs, site)
    at = site or runs[0].site()
    same = [
        run
        for run in published.load()
        if run.kind == "measured" and site is None and _same_machine(run, runs[0])
    ]
    if not same and at is not None:
        same = published.of_site(at.base or at.name)
    given = {(run.spec, run.plan, run.step_time_s) for run in runs}
    known = [run for run in same if (run.spec, run.plan, run.step_time_s) not in given]
    prior = Prior.default()
    start = fitting.fit(published_rows(known, site), prior) if known else fitting.prior_only(prior)
    count = min(calibrate, len(runs) - 1)
    known = [run for run in known if not count or run.stack == runs[0].stack]
    pool = np.arange(len(runs))
    # The runs for the fit are chosen from random candidates: half of the runs, or 3 x `count` runs
    # if this is more. If the machine has fewer runs, all its runs are candidates.
    if 0 < 3 * count < len(runs):
        pool = np.sort(
            np.random.default_rng(seed).permutation(len(runs))[: max(3 * count, len(runs) // 2)]
        )
    inside = rows.select(pool)
    # Published rows of other stacks are not fitted together with the own runs. Before the own runs
    # are fitted, the coefficients are therefore as uncertain as in the prior. With the smaller
    # uncertainty of a fit to the published rows, five runs leave an error of 8.2 % on left-out
    # stacks of the packaged machines, and 5.5 % with the uncertainty of the prior.
    variance = np.diag(prior.spread**2)
    proposed = propose(inside.layouts, inside.hardware, start.values, variance, count)
    chosen = pool[np.array(proposed, dtype=int)]
    rest = ~np.isin(np.arange(len(runs)), chosen)
    found = start
    fitted = [*known, *(runs[i] for i in chosen)]
    if count:
        found = fitting.fit(published_rows(fitted, site), prior, start=start.values)
    seen = published_rows(fitted, site) if fitted else None
    other = interval.OTHER_STACK if known and not count else 0.0
    error, covered = interval.prediction_errors(rows.select(rest), found, seen, other)
    basis = "average of published machines"
    if known:
        basis = f"{len(known)} published rows of this machine{derived_note(known)}"
    assumed = sorted({name for run in runs for name in run.assumed})
    off = np.abs(error)
    note = (
        f"{int(rest.sum())} rows{derived_note(runs)}; median {np.median(off):.1%}, worst"
        f" {off.max():.0%}, on average {error.mean():+.1%}; {basis}, {count} runs fitted"
    )
    if assumed:
        note += f"; assumed: {', '.join(assumed)}"
    return error, covered, note


def derived_note(runs: Iterable[PublishedRun]) -> str:
    """Returns a note with the number of runs whose step time is derived from other numbers of the
    source, e.g. `, 4 of them derived`. If there is none, the note is empty.
    """
    count = sum(run.is_derived for run in runs)
    return f", {count} of them derived" if count else ""


def _same_machine(published_run: PublishedRun, run: PublishedRun) -> bool:
    """Returns whether both runs were made on one machine.

    Only the names in `published.SYSTEMS` identify a machine. Other names, e.g. `A100 cluster`, may
    belong to several machines. For these names the software stacks must be equal too. The name of a
    software stack contains the source.
    """
    same_system = published_run.system == run.system
    return same_system and (run.system in published.SYSTEMS or published_run.stack == run.stack)


def memory_error_rows(runs: Sequence[PublishedRun]) -> list[Row]:
    """Returns the rows of the validation table that state the error of the modelled memory per
    device.

    To predict the runs of one model shape, the two numbers of the memory reserve are fitted to the
    runs of all other shapes. If fewer than MIN_MEMORY_RUNS runs are left for this fit, nothing is
    fitted, and the default reserve is used.
    """
    if not runs:
        return []
    measured = np.array([run.memory_bytes for run in runs])
    state, dynamic, shipped = np.array([_modelled(run) for run in runs]).T
    shape = np.array([f"{run.spec.num_layers} x {run.spec.hidden_size}" for run in runs])
    if len(runs) - max(Counter(shape.tolist()).values()) < MIN_MEMORY_RUNS:
        error = np.abs(shipped / measured - 1)
        note = f"worst {error.max():.0%}; too few runs for a fit with a model shape left out"
        name = f"Memory: {len(runs)} measured runs, nothing fitted, mean error"
        return [row(name, float(error.mean()), "fraction", note=note)]

    def used(train: Array) -> Array:
        fitted = fit_reserve(
            state[train], dynamic[train], measured[train], start=MONITOR_RESERVE, source=""
        )
        return fitted.used_bytes(state, dynamic)

    error = np.abs(without_group(shape, used) / measured - 1)
    everywhere = float(np.mean(np.abs(used(np.ones(len(runs), bool)) / measured - 1)))
    median, most = np.quantile(error, (0.5, 0.9))
    note = (
        f"median error {median:.1%}, 90 % of the errors up to {most:.1%}, worst {error.max():.0%};"
        " 2 numbers fitted"
    )
    subject = f"Memory: {len(runs)} measured runs"
    left_out = f"{subject}, model shape left out, mean error"
    no_shape = f"{subject}, no shape left out, mean error"
    remains = "error that remains if the 2 numbers are fitted to all of these runs"
    return [
        row(left_out, float(error.mean()), "fraction", at_most=0.05, note=note),
        row(no_shape, everywhere, "fraction", note=remains),
    ]


def _modelled(run: PublishedRun) -> tuple[float, float, float]:
    """Returns the modelled bytes of a run as (weights, gradients and optimizer states; memory that
    is allocated in each step; sum of both with the default reserve).

    Kernels and reserve of Megatron-Core are assumed if the run has overlap or a number format
    narrower than bf16, since both came with Megatron-Core. Otherwise Megatron-LM is assumed.
    """
    is_core = run.data_overlap or run.precision in NARROW
    base = CODE_BASES["megatron-core"] if is_core else CodeBase(MEGATRON, MONITOR_RESERVE)
    found = memory(memory_layouts([run]), kernels=base.kernels, reserve=base.reserve)
    terms = found.terms()
    state, dynamic = (sum(terms[name].item() for name in names) for names in (STATE, DYNAMIC))
    return state, dynamic, found.used_bytes.item()


def memory_layouts(runs: Sequence[PublishedRun]) -> Layouts:
    """Returns the layouts of the runs, with the bytes per gradient that the training code of each
    run keeps in memory.

    BigScience used Megatron-DeepSpeed. In fp16 this code keeps fp16 gradients (2 bytes). In bf16 it
    keeps a bf16 gradient and its fp32 sum (6 bytes). For all other runs 2 bytes are assumed.
    """
    layouts = published.layouts(runs)
    wide = [
        6.0 if run.precision == "bf16" and run.source.startswith("bigscience") else 2.0
        for run in runs
    ]
    return dataclasses.replace(layouts, gradient_bytes=np.array(wide))


def without_group(group: Array, predict: Callable[[Array], Array]) -> Array:
    """Returns one prediction per run, made by a fit to the runs of all other groups (sets of
    similar runs). `group` has the key of the group of each run. `predict` takes a Boolean mask of
    the runs to fit, and returns predictions for all runs.
    """
    result = np.empty(len(group))
    for name in sorted(set(group)):
        result[group == name] = predict(group != name)[group == name]
    return result
