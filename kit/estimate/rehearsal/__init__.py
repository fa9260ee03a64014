"""A dress rehearsal: what a job of full size would ask of its site, stage by stage, before anyone
pays for it.

The cutting code of every kind of rank runs; all else is counted from what the parts of the kit do,
or modelled. `docs/benchmarks.md` compares counts with a small real job; what was never run is said
(`Rehearsal.never_run`).
"""

import dataclasses
from typing import Any, ClassVar

from cluster.record import counted
from cluster.site import Site
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.engines.build import check_site
from kit.estimate.rehearsal.stages import Count, Job, checkpoints, failures, ranks, start
from kit.estimate.rehearsal.stages import plan as plan_stage
from kit.estimate.theory.hardware import check_numbers
from kit.show.table import Table

STAGES = (plan_stage, ranks, start, checkpoints, failures)


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """What was counted, stage by stage."""

    job: Job
    counts: tuple[Count, ...]

    header: ClassVar[tuple[str, ...]] = (
        "stage",
        "what",
        "is",
        "limit",
        "fits",
        "known how",
        "note",
    )

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The counts as text."""
        return [count.row for count in self.counts]

    @property
    def fits(self) -> bool:
        """Whether nothing is above a limit that is known."""
        return all(count.fits is not False for count in self.counts)

    @property
    def title(self) -> str:
        """What was rehearsed, and the verdict."""
        above = [count.what for count in self.counts if count.fits is False]
        unknown = sum(count.limit is None and bool(count.limit_source) for count in self.counts)
        verdict = f"does not fit: {', '.join(above)}" if above else "every count is under its limit"
        if unknown:
            verdict += f"; {unknown} without a known limit"
        devices = counted(self.job.plan.num_devices, "device")
        return f"{self.job.spec.name} on {devices} of {self.job.site.name}: {verdict}"

    @property
    def never_run(self) -> list[str]:
        """What no rehearsal can show."""
        return [
            f"{self.job.plan.num_devices:,} devices at once (what has: 8 ranks that train, 512"
            " light ones under Slurm, 128 in a process group)",
            f"the file system of {self.job.site.name}: its rates are those of its site file",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain values, for JSON."""
        return {
            "model": self.job.spec.name,
            "plan": self.job.plan.to_dict(),
            "site": self.job.site.name,
            "fits": self.fits,
            "counts": [dataclasses.asdict(count) | {"fits": count.fits} for count in self.counts],
            "never_run": self.never_run,
        }

    def _repr_html_(self) -> str:
        rows = [dict(zip(self.header, row, strict=True)) for row in self.rows]
        limits = [f"{each.what}: {each.limit_source}" for each in self.counts if each.limit_source]
        notes = [f"Not yet tested: {text}." for text in self.never_run]
        return Table(rows, caption=self.title, notes=[*limits, *notes])._repr_html_()


def rehearse(
    spec: ModelSpec,
    plan: Plan,
    recipe: Recipe,
    site: Site,
    *,
    hours_between_failures: float | None = None,
) -> Rehearsal:
    """Returns what a job would ask of its site.

    `hours_between_failures` is the mean of the whole job; by default that of published
    interruptions, for as many devices (`stages.py`).

    Raises:
        ConfigError: the plan cannot run the model, or the site lacks a number that step time needs.
    """
    plan.check(spec)
    check_site(spec, plan, site)
    check_numbers(site, "bf16", plan.num_devices)
    job = Job(
        spec=spec,
        plan=plan,
        recipe=recipe,
        site=site,
        hours_between_failures=hours_between_failures,
    )
    return Rehearsal(job, tuple(count for stage in STAGES for count in stage(job)))
