"""Report of `kit plan`: the fastest layouts that fit in memory, and an explanation of one of them;
several sites side by side.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cluster.record import counted
from cluster.site import Fact, Site
from kit.config.plan import Precision
from kit.config.recipe import Optimizer
from kit.engines.capabilities import EngineName
from kit.errors import ConfigError
from kit.estimate.choose.budget import UNKNOWN_PRICE, Budget, budget_of
from kit.estimate.choose.explain import RecommendedLayout, answers
from kit.estimate.choose.search import (
    COLUMNS,
    Search,
    cells,
    describe_layout,
    interval_text,
    search,
    seconds_text,
)
from kit.estimate.fit.calibrate import own_calibration
from kit.estimate.fit.own_runs import extrapolation_error, read_own_runs
from kit.estimate.theory.hardware import check_numbers
from kit.estimate.theory.out_of_memory import MAX_RISK
from kit.interop.weights.hugging_face_config import training_spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanReport:
    """Result of `kit plan`: a search, and its fastest layouts with their plans, times and memory.
    The fastest layout is the first element of `answers`.
    """

    search: Search
    answers: list[RecommendedLayout]
    choice: int = 1
    """Position in `answers`, counted from 1, of the layout that is explained and saved."""
    notes: tuple[str, ...] = ()
    """Assumptions about facts that the model's configuration does not state, such as the sequence
    length in training."""

    num_own_runs: int = 0
    """Number of the user's own runs to which the planner was fitted."""

    @property
    def chosen(self) -> RecommendedLayout:
        """Layout that is explained and saved, with its plan, times and memory."""
        return self.answers[self.choice - 1]

    @property
    def parameters(self) -> tuple[str, str]:
        """Pair (label, text) of the number of parameters of the model, and of those that a token
        uses.
        """
        spec = self.search.spec
        active = "all active"
        if spec.num_active_params != spec.num_params:
            active = f"{spec.num_active_params:,} active"
        return "parameters", f"{spec.num_params:,}, {active}"

    header = ("#", *COLUMNS)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Table rows, one per recommended layout. The cells are texts in the order of `header`."""
        return [
            (str(number), *cells(answer.row)) for number, answer in enumerate(self.answers, start=1)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain values for JSON."""
        found = self.search
        return {
            "model": found.spec.name,
            "site": found.machine.site.name,
            "num_devices": found.num_devices,
            "global_batch_size": found.global_batch_size,
            "engine": found.engine,
            "num_params": found.spec.num_params,
            "num_active_params": found.spec.num_active_params,
            "sequence_length": found.spec.sequence_length,
            "notes": list(self.notes),
            "code_base": found.machine.code_base,
            "precision": found.precision,
            "max_risk": found.max_risk,
            "calibration_runs": found.machine.calibration.num_runs,
            "own_runs": self.num_own_runs,
            "layouts": len(found.layouts),
            "feasible": len(found.order),
            "plan": self.chosen.plan.to_dict(),
            "answers": [answer.to_dict() for answer in self.answers],
            "pareto": [found.row(int(index)) for index in found.pareto],
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteComparison:
    """One model on several sites: the fastest layout of each, with time and price. The order of the
    rows is that of the first number: days, or tokens.
    """

    reports: list[PlanReport]
    budget: Budget | None

    @property
    def title(self) -> str:
        """Title of the table, in one line: model, batch and budget."""
        found = self.reports[0].search
        of = f", for {self.budget.label}" if self.budget else ""
        return (
            f"{found.spec.name}, {counted(found.global_batch_size, 'sequence')} of"
            f" {found.spec.sequence_length:,} tokens, fastest layout of each site{of}"
        )

    @property
    def header(self) -> tuple[str, ...]:
        """Names of the columns."""
        numbers = ("tokens/s",)
        if self.budget is not None:
            numbers = ("days", "tokens", "USD", "tokens/s")
            if self.budget.tokens is None:
                numbers = ("tokens", "days", "USD", "tokens/s")
        return ("site", "devices", *numbers, "tokens/USD", *COLUMNS)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Table rows, one per site. The cells are texts in the order of `header`."""
        return [self._cells(report) for report in self.sorted_reports]

    @property
    def sorted_reports(self) -> list[PlanReport]:
        """Reports in the order of the first number of the table: fewest days, or most tokens."""
        return sorted(self.reports, key=lambda report: -self._speed(report))

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the order of the sites, then notes and warnings of each site, which begin with
        the name of the site.
        """
        texts = []
        for first, second in itertools.pairwise(self.sorted_reports):
            if self._slowest(first) < self._fastest(second):
                names = " and ".join(each.search.machine.site.name for each in (first, second))
                texts.append(
                    f"the order of {names} is uncertain, since their 90 % intervals overlap"
                )
        for report in self.sorted_reports:
            row = report.chosen.row
            name = report.search.machine.site.name
            calibration = report.search.machine.calibration
            texts.append(f"{name}: {calibration}")
            texts += [
                f"{name}: {text.removesuffix('.')}" for text in report.chosen.explain().warnings
            ]
            if row["tokens_per_usd"] is None:
                texts.append(f"{name}: {UNKNOWN_PRICE}")
        return (*self.reports[0].notes, *texts)

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison as plain values for JSON, in the order of the table."""
        return {"sites": [report.to_dict() for report in self.sorted_reports]}

    def _speed(self, report: PlanReport) -> float:
        """Returns the number that orders the rows, as a number that is higher for a better site."""
        row = report.chosen.row
        if self.budget is None:
            return row["tokens_per_s"]
        return 1 / row["days"] if self.budget.tokens is not None else row["tokens"]

    def _slowest(self, report: PlanReport) -> float:
        """Returns the number that orders the rows, at the upper end of the step time's interval."""
        row = report.chosen.row
        return self._speed(report) * row["step_time_s"] / row["step_time_high_s"]

    def _fastest(self, report: PlanReport) -> float:
        """Returns the number that orders the rows, at the lower end of the step time's interval."""
        row = report.chosen.row
        return self._speed(report) * row["step_time_s"] / row["step_time_low_s"]

    def _cells(self, report: PlanReport) -> tuple[str, ...]:
        row = report.chosen.row
        site = report.search.machine.site.name
        if not report.search.machine.calibration.num_runs:
            site += " (not calibrated)"
        texts = {
            "site": site,
            "devices": f"{report.search.num_devices:,}",
            "tokens/s": f"{row['tokens_per_s']:,.0f}",
            "tokens/USD": "–",
            "USD": "–",
            **dict(zip(COLUMNS, cells(row), strict=True)),
        }
        if row["tokens_per_usd"] is not None:
            texts["tokens/USD"] = f"{row['tokens_per_usd']:,.0f}"
        if self.budget is not None:
            texts["days"] = f"{row['days']:,.1f}"
            texts["tokens"] = f"{row['tokens']:.3g}"
            if row["price_usd"] is not None:
                texts["USD"] = f"{row['price_usd']:,.0f}"
        return tuple(texts[name] for name in self.header)


def plan_report(
    model: str,
    *,
    site: str,
    batch: int,
    devices: int | None = None,
    nodes: int | None = None,
    tokens: float | None = None,
    days: float | None = None,
    budget: float | None = None,
    price: float | None = None,
    runs: Sequence[str | Path] = (),
    max_risk: float = MAX_RISK,
    count: int = 5,
    choose: int = 1,
    engine: EngineName | None = None,
    precision: Precision = "bf16",
    only: Mapping[str, Iterable[Any]] | None = None,
    sequence_length: int | None = None,
    code_base: str = "kit",
    optimizer: Optimizer = "adamw",
) -> PlanReport:
    """Returns the fastest layouts of a model on a machine. The predicted step times are calibrated
    on published runs of the machine, and on own runs.

    All other arguments are arguments of `search`, which explains them.

    Args:
        model: name or file of the model.
        site: name or file of the machine.
        batch: global batch size in sequences.
        devices: number of devices. `nodes` may be given instead, the number of whole nodes.
        tokens: training budget in tokens. `days` or `budget`, in USD, may be given instead.
        price: price of a device-hour in USD. Default: the price in the site file.
        runs: run directories and CSV files of own runs, to which the planner is fitted.
        count: largest number of layouts.
        choose: number of the layout to explain and save, counted from 1.
        sequence_length: tokens of a training sequence. Default: the length in the preset or file,
            or an assumed length for a Hugging Face configuration.

    Raises:
        ConfigError: The model or the site is unknown, `tokens` is less than one step, or another
            argument is not allowed. Or no layout fits devices and batch, no layout fits in
            memory, or fewer than `choose` layouts were found.
    """
    spec, notes = training_spec(model, sequence_length=sequence_length)
    if tokens is not None and tokens < batch * spec.sequence_length:
        raise ConfigError(
            f"tokens: {tokens:,.12g} is less than one step, which takes"
            f" {batch * spec.sequence_length:,}. Give more, e.g. 1.8e12."
        )
    limits = budget_of(tokens, days, budget)
    place = priced(Site.load(site), price)
    if (devices is None) == (nodes is None):
        raise ConfigError("--devices: give the number of devices, or of nodes by --nodes.")
    if devices is None:
        assert nodes is not None
        devices = nodes * place.devices_per_node
    check_numbers(place, "bf16", devices)
    own = read_own_runs(runs, place)
    found = search(
        spec,
        place,
        devices,
        batch,
        max_risk=max_risk,
        engine=engine,
        precision=precision,
        calibration=own_calibration(own, place),
        code_base=code_base,
        optimizer=optimizer,
        only=only,
    )
    shown = answers(found, count, budget=limits)
    if not 1 <= choose <= len(shown):
        raise ConfigError(
            f"choose: {choose} is not allowed. {len(shown)} layouts are shown: give 1 to"
            f" {len(shown)}."
        )
    num_own_runs = len(own) + len(place.own_runs)
    if num_own_runs:
        notes = (*notes, *_own_run_notes(shown[choose - 1], num_own_runs))
    return PlanReport(
        search=found, answers=shown, choice=choose, notes=notes, num_own_runs=num_own_runs
    )


def compare_sites(machines: Sequence[Mapping[str, Any]], **question: Any) -> SiteComparison:
    """Returns the fastest layout of a model on several machines. Each element of `machines` has
    the arguments `site`, `devices` or `nodes`, and `price` of `plan_report`. `question` has all
    other arguments of `plan_report`.

    Raises:
        ConfigError: `plan_report` raises it for one of the machines.
    """
    reports = [plan_report(**machine, **question) for machine in machines]
    limits = [question.get(name) for name in ("tokens", "days", "budget")]
    return SiteComparison(reports=reports, budget=budget_of(*limits))


def priced(site: Site, price: float | None) -> Site:
    """Returns the site with the price of a device-hour in USD, or unchanged if `price` is None.

    Raises:
        ConfigError: The price is not above 0.
    """
    if price is None:
        return site
    if not 0 < price < math.inf:
        raise ConfigError(f"--price: {price} is not allowed. Give USD per device-hour, above 0.")
    return site.replace(
        price_per_node_hour=Fact(value=price * site.devices_per_node, source="--price")
    )


def _own_run_notes(answer: RecommendedLayout, num_own_runs: int) -> list[str]:
    """Returns sentences that say how many own runs were fitted, what they changed for a layout, and
    the error of the extrapolation to its number of devices.
    """
    found = answer.search
    site = found.machine.site
    layout = found.layouts.select(np.array([answer.index]))
    without = own_calibration([], site.replace(own_runs=())).predict(layout)
    before = {
        "step_time_low_s": without.low_s.item(),
        "step_time_high_s": without.high_s.item(),
    }
    row = answer.row
    texts = [
        f"{counted(num_own_runs, 'own run')}: {describe_layout(row)} takes"
        f" {seconds_text(row['step_time_s'])} s ({interval_text(row)}) with own runs, and"
        f" {seconds_text(without.total_s.item())} s ({interval_text(before)}) without"
    ]
    measured = found.machine.calibration.measured
    assert measured is not None
    error = extrapolation_error(measured.bounds["devices"][1], found.num_devices)
    if error is not None:
        texts.append(error.removesuffix("."))
    return texts
