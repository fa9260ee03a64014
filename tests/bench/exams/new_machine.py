"""Accuracy of the planner's estimates for a machine and code base that are left out of its fit. The
scales of the intervals are chosen without this machine and code base too. Needs no torch.

A "stranger" is one code base measured on one machine. Its prior is computed from all runs that
share neither machine nor code base with the stranger. The width of its intervals is chosen on the
remaining strangers alone, each predicted without its own machine and code base. Two methods are
compared. The hierarchical method, which the kit uses, takes the narrowest `interval.Scales` with
enough coverage. The conformal method takes the quantile of normalised errors, each stranger
weighted equally.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from kit.estimate.fit import fitting, interval, published
from kit.estimate.fit.calibrate import propose
from kit.estimate.fit.fitting import Prior, Rows
from kit.estimate.fit.interval import MeasuredRange, Scales
from kit.estimate.fit.measured_rows import published_rows
from kit.estimate.theory.layouts import Array
from kit.estimate.validation.validate import PAPER, Choice, MeasuredMachine, machines
from kit.show.results import Row, row
from kit.show.style import new_figure
from kit.show.theme import BLUE, GREY, VERMILION

COUNTS = {0: 1, 1: 1, 5: 3, 10: 2}
"""Maps the number of fitted runs of a stranger to the smallest number of its other runs that are
needed for scoring."""
GRID = tuple(
    Scales(misfit=misfit, prior_models=worth, variance_factor=doubt)
    for misfit, worth, doubt in itertools.product(
        (0.04, 0.05, 0.06, 0.07, 0.08, 0.1),
        (2.0, 3.0, 4.0, 6.0),
        (1.0, 1.5, 2.0, 2.25, 2.5, 3.0, 4.0, 6.0),
    )
)
SHORT = 10.0
"""Penalty for each unit of missing coverage (a fraction), in units of interval half-width (ln). The
large value gives coverage priority over width."""
DRAWS = 20
"""Number of random choices of five runs. The planner's five proposed runs are compared with
them."""
# Machines of other publications whose runs form the prior: name in `machines.MACHINES`, then
# (machine, code base).
FITTED = {
    "Selene": ("Selene", "Megatron-LM"),
    "KAIST multi-node": ("KAIST", "Megatron-LM"),
    "KAIST single node": ("KAIST", "Megatron-LM"),
    "Aleph Alpha": ("Aleph Alpha", "Aleph Alpha"),
    "Jean Zay": ("Jean Zay", "Megatron-DeepSpeed"),
    "MI250X": ("MI250X", "Megatron-DeepSpeed"),
    "trn1": ("trn1", "NxD"),
    "H100": ("H100", "Bridge"),
    "GB200": ("GB200", "Bridge"),
    "GB300": ("GB300", "Bridge"),
}
OTHERS: tuple[tuple[str, str, str, Choice], ...] = (
    ("FORGE", "MI250X", "GPT-NeoX", lambda run: "forge" in run.source),
    ("LUMI", "MI250X", "Megatron-DeepSpeed", lambda run: run.system == "LUMI"),
    ("Frontier paper", "MI250X", "Megatron-DeepSpeed", lambda run: run.source.startswith(PAPER)),
    ("Eos", "H100", "Megatron-LM", lambda run: run.system == "Eos-class H100"),
    ("torchtitan", "MI250X", "torchtitan", lambda run: run.source.endswith("torchtitan README")),
    ("PaLM", "TPU v4", "PaLM", lambda run: run.source.startswith("PaLM")),
)
"""Further strangers as (name, machine, code base, filter that selects their runs). They are the
parts of the MI250X runs, and runs that no prior is fitted to."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Stranger:
    """Published runs of one code base on one machine."""

    name: str
    machine: str
    code_base: str
    rows: Rows

    def knows(self, other: "Stranger") -> bool:
        """Returns whether this stranger and `other` share the machine or the code base."""
        return self.machine == other.machine or self.code_base == other.code_base


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """Errors of the planner's predictions for a stranger, after a fit to `num_runs` of the
    stranger's runs.
    """

    off: Array
    """ln(predicted / measured) step time of the runs that are not fitted."""
    variance: Array
    num_untried: Array
    left_out: tuple[Array, Array]
    """(errors, variances) of the predictions for the fitted runs. The runs of each model are
    predicted by a fit to the other runs."""
    num_runs: int

    def half(self, scales: Scales) -> Array:
        """Returns the half-width of the 90 % interval of each predicted run, in ln seconds."""
        misfit = scales.misfit_after(*self.left_out)
        return scales.half_width(self.variance, misfit, self.num_untried, self.num_runs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strangers:
    """All strangers, and the priors that leave out some of them. The priors are computed from the
    strangers `fitted`. The strangers `scored` are predicted.
    """

    fitted: tuple[Stranger, ...]
    scored: tuple[Stranger, ...]

    @classmethod
    def of(cls, known: dict[str, MeasuredMachine]) -> "Strangers":
        """Returns the strangers among the published runs. A stranger in `fitted` has only a small
        selection of its runs.
        """
        fitted = tuple(
            Stranger(name=name, machine=machine, code_base=code, rows=known[name].small())
            for name, (machine, code) in FITTED.items()
        )
        runs = [run for run in published.load() if run.status in ("read", "mixed")]
        runs = [run for run in runs if run.kind == "measured"]
        others = tuple(
            Stranger(
                name=name,
                machine=machine,
                code_base=code,
                rows=published_rows([*filter(choice, runs)]),
            )
            for name, machine, code, choice in OTHERS
        )
        parts = tuple(each for each in fitted if each.name != "MI250X")
        return cls(fitted=fitted, scored=(*parts, *others))

    @cached_property
    def _cache(self) -> dict:
        return {}

    def _fitted_without(self, *unknown: Stranger) -> tuple[Stranger, ...]:
        return tuple(one for one in self.fitted if not any(map(one.knows, unknown)))

    def prior(self, *unknown: Stranger) -> Prior:
        """Returns the prior that is computed without the machines and code bases of `unknown`."""
        fitted = self._fitted_without(*unknown)
        key = tuple(each.name for each in fitted)
        if key not in self._cache:
            self._cache[key] = fitting.population([each.rows for each in fitted])
        return self._cache[key]

    def trial(self, one: Stranger, count: int, *unknown: Stranger) -> Trial | None:
        """Returns the trial of stranger `one` after a fit to `count` proposed runs. Returns None if
        too few runs are left to be predicted.

        The prior leaves out the machines and code bases of `one` and of all strangers in `unknown`.
        """
        if len(one.rows) < count + COUNTS[count]:
            return None
        fitted = self._fitted_without(one, *unknown)
        key = (one.name, count, tuple(each.name for each in fitted))
        if key not in self._cache:
            known = limits([each.rows for each in fitted])
            self._cache[key] = _trial(one.rows, self.prior(one, *unknown), known, count)
        return self._cache[key]

    def others(self, one: Stranger, count: int) -> list[Trial]:
        """Returns the trials of all strangers that share neither machine nor code base with `one`.
        Their priors leave out `one`.
        """
        trials = [self.trial(each, count, one) for each in self.scored if not each.knows(one)]
        return [trial for trial in trials if trial is not None]

    def narrowest(self, trials: list[list[Trial]]) -> Scales:
        """Returns the interval scales that give the narrowest intervals with 90 % coverage of
        `trials`. The result is cached per list of trials.
        """
        key = tuple(id(each) for group in trials for each in group)
        if key not in self._cache:
            self._cache[key] = narrowest(trials)
        return self._cache[key]


def limits(parts: list[Rows]) -> dict[str, tuple[float, float]]:
    """Returns a dict from each name in `interval.BALANCES` to its (lowest, highest) value among the
    machines of `parts`.
    """
    each = [interval.balances(rows.hardware) for rows in parts]
    return {
        name: (min(float(np.min(b[name])) for b in each), max(float(np.max(b[name])) for b in each))
        for name in interval.BALANCES
    }


def _trial(rows: Rows, prior: Prior, known: dict[str, tuple[float, float]], count: int) -> Trial:
    chosen = propose(rows.layouts, rows.hardware, prior.mean, np.diag(prior.spread**2), count)
    rest = rows.select(~np.isin(np.arange(len(rows)), chosen))
    runs = rows.select(np.array(chosen, dtype=int))
    found = fitting.fit(runs, prior)
    centre, variance = interval.log_time_and_variance(
        rest.layouts, rest.hardware, found.values, found.covariance
    )
    measured = MeasuredRange.of(runs.layouts, runs.hardware) if count else None
    untried = interval.unmeasured_feature_counts(rest.layouts, rest.hardware, measured, known)
    return Trial(
        off=centre - np.log(rest.step_time_s),
        variance=variance,
        num_untried=sum(untried.values(), np.zeros(len(rest))),
        left_out=(found.left_out_error, found.left_out_variance),
        num_runs=count,
    )


def narrowest(trials: list[list[Trial]]) -> Scales:
    """Returns the scales of GRID with the narrowest intervals of at least 90 % coverage.

    `trials` are grouped by their number of fitted runs. Trials of a group have equal weight. If no
    scales reach 90 %, the scales with the smallest shortfall are returned.
    """

    def cost(scales: Scales) -> float:
        total = 0.0
        for group in trials:
            halves = [each.half(scales) for each in group]
            inside = zip(group, halves, strict=True)
            held = np.mean([np.mean(np.abs(each.off) <= half) for each, half in inside])
            width = np.mean([np.median(half) for half in halves])
            total += float(width + SHORT * max(0.0, 0.9 - held))
        return total

    return min(GRID, key=cost)


def conformal(trial: Trial, others: list[Trial]) -> Array:
    """Returns the half-width of each prediction interval by split conformal prediction, in ln
    seconds. Each trial in `others` has equal weight.

    Errors are divided by the standard deviation that the kit's model predicts for the run, with the
    default interval scales (`Scales`) and a variance factor of 1.
    """
    plain = Scales(variance_factor=1.0)

    def deviation(each: Trial) -> Array:
        return np.sqrt(
            each.variance
            + plain.misfit**2
            + each.num_untried * interval.UNMEASURED_FEATURE_SPREAD**2
        )

    score = np.concatenate([np.abs(each.off) / deviation(each) for each in others])
    weight = np.concatenate([np.full(len(each.off), 1 / len(each.off)) for each in others])
    order = np.argsort(score)
    share = np.cumsum(weight[order]) / weight.sum()
    return score[order][min(np.searchsorted(share, 0.9), len(score) - 1)] * deviation(trial)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Met:
    """Prediction errors for a stranger after a fit to `num_runs` of its runs. The interval scales
    are chosen without the stranger.
    """

    name: str
    num_runs: int
    off: Array
    """ln(predicted / measured) step time of the runs that are not fitted."""
    half: Array
    """Half-width of the 90 % interval of each predicted run, in ln seconds."""
    conformal: Array
    """Half-width of the conformal 90 % interval of each predicted run, in ln seconds."""

    @property
    def error(self) -> float:
        """Mean absolute relative error of the predicted step times."""
        return float(np.abs(np.expm1(self.off)).mean())

    def held(self, half: Array) -> float:
        """Returns the share of predicted runs whose error is at most the half-width `half`."""
        return float(np.mean(np.abs(self.off) <= half))


def never_met(strangers: Strangers | None = None) -> list[Met]:
    """Returns the prediction errors of each stranger after fits to 0, 1, 5 and 10 of its runs. A
    stranger with too few runs is left out of the larger fits.
    """
    found, met = strangers or Strangers.of(machines()), []
    for one in found.scored:
        others = {count: found.others(one, count) for count in COUNTS}
        scales = found.narrowest(list(others.values()))
        for count in COUNTS:
            if trial := found.trial(one, count):
                widths = {"half": trial.half(scales), "conformal": conformal(trial, others[count])}
                met.append(Met(name=one.name, num_runs=count, off=trial.off, **widths))
    return met


def never_met_figure(trials: Sequence[Met]) -> Any:
    """Returns a figure of left-out machines: prediction errors and intervals after fits to 0 and to
    5 runs.

    `trials` are the result of `never_met`. A dot is the measured step time of a run divided by the
    predicted time. A bar is the interval of the machine's median run. A machine with too few runs
    to fit five and predict others is marked "too few runs".
    """
    names = list(dict.fromkeys(each.name for each in trials))
    with new_figure(1, 2, height=4.8, sharey=True, sharex=True) as (figure, axes):
        for axis, count in zip(axes, (0, 5), strict=True):
            for each in (trial for trial in trials if trial.num_runs == count):
                place, width = names.index(each.name), float(np.median(each.half))
                bar = {"color": BLUE, "alpha": 0.25, "height": 0.7}
                axis.barh(place, 2 * np.sinh(width), left=np.exp(-width), **bar)
                outside = np.abs(each.off) > each.half
                for mask, colour in ((~outside, BLUE), (outside, VERMILION)):
                    level = np.full(mask.sum(), place)
                    axis.plot(np.exp(-each.off[mask]), level, ".", color=colour, alpha=0.6)
            met = {trial.name for trial in trials if trial.num_runs == count}
            for place, name in enumerate(names):
                if name not in met:
                    axis.text(1.04, place, "too few runs", color=GREY, va="center")
            axis.axvline(1, color=GREY, linewidth=1)
            axis.set(xscale="log", xlim=(0.36, 2.8))
            axis.set_xticks([0.5, 1, 2], ["0.5", "1", "2"])
            axis.minorticks_off()
            axis.set(title=f"{count} of its runs seen", xlabel="measured / predicted")
        axes[0].set_yticks(range(len(names)), names)
        axes[0].invert_yaxis()
        told = (
            "Bar: 90 % interval of the machine's median run. Dot: a run, red where\n"
            "it lies outside its own interval, which may be wider than the bar."
        )
        figure.supxlabel(told, x=0.005, ha="left", fontsize="medium")
    return figure


def new_machine(everything: dict[str, MeasuredMachine]) -> list[Row]:
    """Returns rows with the mean error, coverage and interval width for strangers after fits to 0,
    1, 5 and 10 runs. Further rows compare proposed runs with random runs.
    """
    strangers, rows = Strangers.of(everything), []
    every = never_met(strangers)
    for count in COUNTS:
        met = [each for each in every if each.num_runs == count]
        name = f"new machine, {count} of its runs fitted"
        held, width = _held_and_width(met, [each.half for each in met])
        instead, other = _held_and_width(met, [each.conformal for each in met])
        factor = f"{np.exp(width):.2f}"
        wide = f"median interval from 1/{factor} to {factor} times the prediction"
        errors = {each.name: each.error for each in met}
        inside = {each.name: each.held(each.half) for each in met}
        apart = f"mean over {len(met)} machines, each left out with its code base: {_list(errors)}"
        by_conformal = (
            f"{wide}; conformal prediction gives a factor of {np.exp(other):.2f} with a coverage of"
            f" {instead:.0%}"
        )
        half = f"{name}: median half-width of the interval"
        rows += [
            row(f"{name}: mean error", float(np.mean([*errors.values()])), "fraction", note=apart),
            Row(
                name=f"{name}: coverage of the 90 % interval",
                value=held,
                unit="fraction",
                target="85 to 95 %",
                ok=0.85 <= held <= 0.95,
                note=f"{wide}. Coverage by machine: {_list(inside)}",
            ),
            row(half, float(np.expm1(width)), "fraction", note=by_conformal),
        ]
    return [*rows, *_proposed(strangers)]


def _held_and_width(met: list[Met], halves: list[Array]) -> tuple[float, float]:
    """Returns (coverage, median half-width) of the intervals. `halves` has the half-widths of each
    stranger in `met`. Each stranger has equal weight.
    """
    held = [each.held(half) for each, half in zip(met, halves, strict=True)]
    return float(np.mean(held)), float(np.median([np.median(half) for half in halves]))


def _list(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.0%}" for name, value in values.items())


def _proposed(strangers: Strangers) -> list[Row]:
    """Returns rows that compare five proposed runs with random draws of five runs: ratio of the
    errors, and share of draws with a larger error. Uses strangers with at least ten runs.
    """
    ratio, wins = {}, {}
    for one in strangers.scored:
        if len(one.rows) < 10:
            continue
        prior, generator = strangers.prior(one), np.random.default_rng(0)
        trial = strangers.trial(one, 5)
        assert trial
        mine = np.abs(np.expm1(trial.off)).mean()
        drawn = [generator.choice(len(one.rows), 5, replace=False) for _ in range(DRAWS)]
        random = np.array([_error(one.rows, prior, chosen) for chosen in drawn])
        ratio[one.name], wins[one.name] = float(mine / random.mean()), float(np.mean(random > mine))
    error, won = (float(np.mean([*each.values()])) for each in (ratio, wins))
    than = {"at_most": 1.0, "note": f"by machine: {_list(ratio)}"}
    better = {"at_least": 0.5, "note": f"{DRAWS} random choices per machine: {_list(wins)}"}
    ratio_name = "fit to five proposed runs: error / mean error of fits to five random runs"
    share_name = "fit to five proposed runs: share of fits to random runs with a larger error"
    return [
        row(ratio_name, error, "fraction", **than),
        row(share_name, won, "fraction", **better),
    ]


def _error(rows: Rows, prior: Prior, chosen: Array) -> float:
    found = fitting.fit(rows.select(chosen), prior)
    rest = rows.select(~np.isin(np.arange(len(rows)), chosen))
    times = fitting.log_time(rest.layouts, rest.hardware, found.values)
    return float(np.abs(np.expm1(times - np.log(rest.step_time_s))).mean())
