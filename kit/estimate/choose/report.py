"""Report of `kit plan`: the fastest layouts that fit in memory, and an explanation of one of
them.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from cluster.site import Site
from kit.config.plan import Precision
from kit.engines.capabilities import EngineName
from kit.errors import ConfigError
from kit.estimate.choose.explain import Answer, answers
from kit.estimate.choose.search import COLUMNS, Search, cells, search
from kit.estimate.fit.calibrate import published_calibration
from kit.estimate.theory.hardware import check_numbers
from kit.interop.weights.hugging_face_config import training_spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanReport:
    """Result of `kit plan`: a search, and its fastest layouts with their plans, times and memory.
    The fastest layout is the first element of `answers`.
    """

    search: Search
    answers: list[Answer]
    choice: int = 1
    """Position in `answers`, counted from 1, of the layout that is explained and saved."""
    notes: tuple[str, ...] = ()
    """Assumptions about facts that the model's configuration does not state, such as the sequence
    length in training."""

    @property
    def chosen(self) -> Answer:
        """Layout that is explained and saved, with its plan, times and memory."""
        return self.answers[self.choice - 1]

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
            "sequence_length": found.spec.sequence_length,
            "notes": list(self.notes),
            "code_base": found.machine.code_base,
            "precision": found.precision,
            "max_risk": found.max_risk,
            "calibration_runs": found.machine.calibration.num_runs,
            "layouts": len(found.layouts),
            "feasible": len(found.order),
            "plan": self.chosen.plan.to_dict(),
            "answers": [answer.to_dict() for answer in self.answers],
            "pareto": [found.row(int(index)) for index in found.pareto],
        }


def plan_report(
    model: str,
    *,
    site: str,
    devices: int,
    batch: int,
    tokens: float | None = None,
    max_risk: float = 0.05,
    count: int = 5,
    choose: int = 1,
    engine: EngineName | None = None,
    precision: Precision = "bf16",
    only: Mapping[str, Iterable[Any]] | None = None,
    sequence_length: int | None = None,
    code_base: str = "kit",
) -> PlanReport:
    """Returns the fastest layouts of a model on a machine. The predicted step times are calibrated
    on published runs of the machine.

    `model` and `site` are names or files. `count` is the largest number of layouts. `tokens` is the
    training budget, from which days and price are computed. `choose` is the number of the layout to
    explain and save, counted from 1. Without `sequence_length`, training sequences have the length
    in the preset or file, or an assumed length for a Hugging Face configuration. All other
    arguments are arguments of `search`, which explains them.

    Raises:
        ConfigError: The model or the site is unknown, `tokens` is less than one step, or another
            argument is not allowed. Or no layout fits devices and batch, no layout fits in
            memory, or fewer than `choose` layouts were found.
    """
    spec, notes = training_spec(model, sequence_length=sequence_length)
    if tokens is not None and tokens < batch * spec.sequence_length:
        raise ConfigError(
            f"tokens: {tokens:.4g} is less than one step, which takes"
            f" {batch * spec.sequence_length:,}. Give more, e.g. 1.8e12."
        )
    place = Site.load(site)
    check_numbers(place, "bf16", devices)
    found = search(
        spec,
        place,
        devices,
        batch,
        max_risk=max_risk,
        engine=engine,
        precision=precision,
        calibration=published_calibration(place),
        code_base=code_base,
        only=only,
    )
    shown = answers(found, count, tokens=tokens)
    if not 1 <= choose <= len(shown):
        raise ConfigError(
            f"choose: {choose} is not allowed. {len(shown)} layouts are shown: give 1 to"
            f" {len(shown)}."
        )
    return PlanReport(search=found, answers=shown, choice=choose, notes=notes)
