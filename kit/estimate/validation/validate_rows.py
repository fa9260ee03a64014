"""Validation on rows of your own: any CSV with the columns of the published runs, new machines
included. No torch.
"""

import os
from collections import Counter

import numpy as np

from cluster.record import ConfigError
from kit.estimate.fit import fitting, interval, published
from kit.estimate.fit.calibrate import propose
from kit.estimate.fit.fitting import Prior
from kit.estimate.fit.measured_rows import rows_of
from kit.estimate.fit.published import PublishedRun
from kit.estimate.theory.layouts import Array
from kit.estimate.validation.memory_readings import readings
from kit.show.results import Row, row


def validate_rows(
    file: str | os.PathLike[str], calibrate: int = 0, seed: int = 0
) -> tuple[Row, ...]:
    """Returns errors on the rows of a CSV: of each machine, and of all together.

    A machine that has published rows of its own in the kit starts from these (less those that are
    in the CSV too: no row is scored by a fit that has seen it), others from the population.
    `calibrate` runs of each machine (never all), chosen by the kit out of a random half of its rows
    (`seed`), are fitted and not scored.

    Raises:
        ConfigError: the CSV cannot be read, or holds no run whose layout is known.
    """
    if calibrate < 0:
        raise ConfigError(
            f"validate.calibrate: {calibrate} is not allowed. Give a number of runs from 0."
        )
    runs, refused, left_out = published.read(file)
    measured = [run for run in runs if run.kind == "measured"]
    if not runs:
        raise ConfigError(
            f"{file}: no row has a layout and a time or an out-of-memory label. "
            f"{_reasons([*refused, *left_out])}"
        )
    table, errors, inside = [], [], []
    for system in dict.fromkeys(run.system for run in measured):
        own = [run for run in measured if run.system == system]
        error, covered, note = _score(own, calibrate, seed)
        errors, inside = [*errors, error], [*inside, covered]
        table.append(
            row(f"{system}: mean error", float(np.abs(error).mean()), "fraction", note=note)
        )
        table.append(row(f"{system}: 90 % interval holds", float(covered.mean()), "fraction"))
    if errors:
        off, covered = np.abs(np.concatenate(errors)), np.concatenate(inside)
        table.append(
            row("all rows: mean error", float(off.mean()), "fraction", note=f"{len(off)} rows")
        )
        table.append(row("all rows: median error", float(np.median(off)), "fraction"))
        table.append(row("all rows: worst error", float(off.max()), "fraction"))
        table.append(row("all rows: 90 % interval holds", float(covered.mean()), "fraction"))
    table += readings([run for run in runs if run.memory_bytes])
    table.append(row("rows refused", len(refused), note=_reasons(refused)))
    table.append(row("rows left out", len(left_out), note=_reasons(left_out)))
    return tuple(table)


def _reasons(lines: published.Lines) -> str:
    """Returns `line 7 and 2 more: no tp; ...`: the commonest three reasons."""
    counts, first = (
        Counter(reason for _, reason in lines),
        {reason: line for line, reason in reversed(lines)},
    )
    more = {
        reason: f" and {count - 1} more" if count > 1 else ""
        for reason, count in counts.most_common(3)
    }
    return "; ".join(f"line {first[reason]}{rest}: {reason}" for reason, rest in more.items())


def _score(runs: list[PublishedRun], calibrate: int, seed: int) -> tuple[Array, Array, str]:
    """Returns (relative errors, whether each interval holds, what was fitted) for one machine."""
    rows = rows_of(runs)
    given = set(runs)
    known = [
        run for run in published.load() if run.kind == "measured" and _same_machine(run, runs[0])
    ]
    known = [run for run in known if run not in given]
    prior = Prior.default()
    start = fitting.fit(rows_of(known), prior) if known else fitting.prior_only(prior)
    count = min(calibrate, len(runs) - 1)
    pool = np.arange(len(runs))
    if 0 < 3 * count < len(runs):  # a few rows are all candidates, many are halved at random
        pool = np.sort(
            np.random.default_rng(seed).permutation(len(runs))[: max(3 * count, len(runs) // 2)]
        )
    inside = rows.select(pool)
    proposed = propose(inside.layouts, inside.hardware, start.values, start.covariance, count)
    chosen = pool[np.array(proposed, dtype=int)]
    rest = ~np.isin(np.arange(len(runs)), chosen)
    found, fitted = start, [*known, *(runs[i] for i in chosen)]
    if count:
        found = fitting.fit(rows_of(fitted), prior, start=start.values)
    error, covered = interval.errors(rows.select(rest), found, rows_of(fitted) if fitted else None)
    basis = (
        f"{len(known)} published rows of this machine" if known else "average of published machines"
    )
    assumed = sorted({name for run in runs for name in run.assumed})
    doubt = f"; assumed: {', '.join(assumed)}" if assumed else ""
    spread = f"median {np.median(np.abs(error)):.1%}, worst {np.abs(error).max():.0%}"
    return error, covered, f"{int(rest.sum())} rows; {spread}; {basis}, {count} runs fitted{doubt}"


def _same_machine(published_run: PublishedRun, run: PublishedRun) -> bool:
    """Returns whether both ran on one machine; a nameless one (`A100 cluster`) is known by its
    source as well.
    """
    same_system = published_run.system == run.system
    return same_system and (run.system in published.SYSTEMS or published_run.stack == run.stack)
