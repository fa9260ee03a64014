"""What a job asks of its site, stage by stage: to fit, to start, to keep what it has learnt."""

import dataclasses
import itertools
import math
from collections import Counter
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from cluster.record import counted
from cluster.render import STORM_NODES, nodes_for, reads_shared_disk
from cluster.site import Fact, Site
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.estimate.choose.machine import Machine, machine_of
from kit.estimate.choose.memory_advice import estimated
from kit.estimate.fit.calibrate import Prediction, published_calibration
from kit.estimate.fit.measured_rows import hardware_on
from kit.estimate.theory.layouts import Layouts
from kit.parallel.pipeline import stage_indices
from kit.parallel.simulate import view_rank
from kit.run.checkpoint import BYTES_PER_PARAM
from kit.show.results import format_value

MAX_RISK = 0.05
"""Accepted probability of running out of memory, as in `kit plan`."""
OWN_FILES, GROUP_FILES = 30, 6
"""Open files of a rank, and more for each group beside its connections: seen in `python -m
tests.bench groups`."""
DEVICE_HOURS_BETWEEN_FAILURES = 54 * 24 * 16_384 / 419
"""Of one device: 419 unexpected interruptions of 16,384 H100 in 54 days (The Llama 3 Herd of
Models, arXiv 2407.21783, section 3.3.4). Other machines fail at other rates: give your own."""
COPY_BYTES_PER_S = 5e9
"""From a device to its host's memory, for which alone training waits: a sixth of PCIe 4.0 x16
(PCI-SIG: 31.5 GB/s)."""
RESTART_S = 480.0
"""From a failure to the next attempt's first step, but for reading its checkpoint: 360 until Slurm
takes a lost node for down, as it comes; imports, process groups and model, 120 assumed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Count:
    """What a job needs of something, and how that is known."""

    stage: str
    what: str
    value: float | None
    """None: not known."""
    unit: str = ""
    limit: float | None = None
    """The highest value that fits."""
    limit_source: str = ""
    """Where the limit is from; without one, what nobody has stated. Empty: it needs none."""
    known: Literal["run", "counted", "modelled"] = "counted"
    """`run`: the real code did it; `counted`: from what the code does, times how many;
    `modelled`: by equations."""
    note: str = ""

    @property
    def fits(self) -> bool | None:
        """Whether it is within its limit; None without one."""
        return None if self.limit is None or self.value is None else self.value <= self.limit

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of a table: stage, what, value, limit, whether it fits, how it is known,
        note.
        """
        value = "not known" if self.value is None else format_value(self.value, self.unit)
        limit = "not known" if self.limit_source else ""
        if self.limit is not None:
            limit = f"≤ {format_value(self.limit, self.unit)}"
        verdict = {True: "yes", False: "NO", None: ""}[self.fits]
        return self.stage, self.what, value, limit, verdict, self.known, self.note

    def within(self, fact: Fact | None, name: str, unit: float = 1.0) -> "Count":
        """Returns the count held to what a site file states as `name`, in multiples of `unit`."""
        if fact is None:
            return dataclasses.replace(self, limit_source=f"{name} is not stated")
        return dataclasses.replace(self, limit=fact.value / unit, limit_source=fact.source)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A model, its layout and training, on as many devices of a site as the layout has."""

    spec: ModelSpec
    plan: Plan
    recipe: Recipe
    site: Site
    hours_between_failures: float | None

    @cached_property
    def machine(self) -> Machine:
        """The site with what published runs tell about it."""
        return machine_of(self.site, published_calibration(self.site), engine=self.plan.engine)

    @cached_property
    def step_time(self) -> Prediction:
        """Modelled seconds of a step, with an interval."""
        layouts = Layouts.of(self.spec, [self.plan])
        hardware = hardware_on(self.site, layouts, self.plan.precision)
        return self.machine.calibration.predict(layouts, hardware)

    @property
    def used_bytes(self) -> float:
        """Modelled bytes of the fullest device."""
        (option,) = estimated(self.spec, self.plan, [{}], self.site.device)
        return option.used_bytes

    @property
    def num_nodes(self) -> int:
        """Nodes of the site that it fills."""
        return nodes_for(self.plan.num_devices, self.site)

    @property
    def checkpoint_bytes(self) -> int:
        """Of one checkpoint."""
        return BYTES_PER_PARAM * self.spec.num_params

    @property
    def between_checkpoints_s(self) -> float:
        """Modelled seconds of training between two."""
        every = self.recipe.checkpoint_every or self.recipe.num_steps
        return every * self.step_time.total_s.item()


def plan(job: Job) -> list[Count]:
    """The layout: memory of the fullest device, time of a step and of the run."""
    slurm = job.site.slurm
    step = job.step_time
    run_s = job.recipe.num_steps * step.total_s.item()
    limit_s = slurm.max_seconds(job.num_nodes) if slurm else None
    jobs = f", {counted(math.ceil(run_s / limit_s), 'job')} one after the other" if limit_s else ""
    return [
        Count(
            stage="plan",
            what="nodes",
            value=job.num_nodes,
            limit=slurm.max_nodes if slurm else None,
            limit_source="site.slurm.max_nodes" if slurm and slurm.max_nodes else "",
        ),
        Count(
            stage="plan",
            what="memory of the fullest device",
            value=job.used_bytes / 2**30,
            unit="GiB",
            limit=job.machine.most_bytes(MAX_RISK) / 2**30,
            limit_source=f"above, it runs out with a probability of more than {MAX_RISK:.0%}",
            known="modelled",
            note=f"of {float(job.machine.hardware.memory_bytes) / 2**30:.1f} GiB",
        ),
        Count(
            stage="plan",
            what="a step",
            value=step.total_s.item(),
            unit="s",
            known="modelled",
            note=f"{step.low_s.item():.3g} to {step.high_s.item():.3g} s;"
            f" {job.machine.calibration.label}",
        ),
        Count(
            stage="plan",
            what="the whole run",
            value=run_s / 86_400,
            unit="days",
            known="modelled",
            note=counted(job.recipe.num_steps, "step") + jobs,
        ),
    ]


def ranks(job: Job) -> list[Count]:
    """What each kind of rank holds, and the files that the one with most connections opens."""
    if job.plan.capabilities.runs_on_trainium:
        told = "NxD splits the model on the devices, which is not yet tested"
        return [Count(stage="ranks", what="kinds of ranks cut", value=0, note=told)]
    plan = job.plan
    found = cut(job.spec, job.plan)
    shards = plan.shard_size or plan.data_parallel
    axes = (plan.pipeline_parallel, plan.data_parallel // shards, shards, plan.tensor_parallel)
    groups = [plan.num_devices, *(size for size in axes if size > 1)]
    sockets = sum(GROUP_FILES + 2 * math.ceil(math.log2(size)) for size in groups)
    return [
        Count(
            stage="ranks",
            what="weights lost or doubled by the cuts",
            value=abs(found.num_params - job.spec.num_params),
            limit=0,
            limit_source="the model's own number",
            known="run",
            note=f"{found.most_params / 1e9:.3g} billion in the fullest of {found.num_kinds} kinds"
            " of ranks",
        ),
        Count(
            stage="ranks",
            what="open files of rank 0",
            value=OWN_FILES + sockets + plan.num_devices,
            note=f"a tree in each of {counted(len(groups), 'process group')}; all ranks connect to"
            " its store",
        ).within(job.site.open_files, "site.open_files"),
    ]


def start(job: Job) -> list[Count]:
    """Nodes whose ranks all read Python's files at once, before the first of them computes."""
    slurm = job.site.slurm if job.site.scheduler == "slurm" else None
    shares = slurm is not None and reads_shared_disk(slurm)
    return [
        Count(
            stage="start",
            what="nodes that read Python from the shared disk",
            value=job.num_nodes if shares else 0,
            limit=STORM_NODES,
            limit_source="above, `kit launch` refuses: pack the environment, [slurm.broadcast] in"
            " the site file",
            note="every rank reads it" if shares else "packed for each node, or in a container",
        )
    ]


def checkpoints(job: Job) -> list[Count]:
    """Size, number and time of checkpoints."""
    storage = job.site.storage
    recipe = job.recipe
    size = job.checkpoint_bytes
    every = recipe.checkpoint_every or recipe.num_steps
    keep = recipe.keep_every
    for_good = recipe.num_steps // math.lcm(every, keep) if keep else 0
    kept = min(math.ceil(recipe.num_steps / every), recipe.keep_last + 1 + for_good)
    counts = [
        Count(
            stage="checkpoint",
            what="kept",
            value=kept * size / 1e12,
            unit="TB",
            note=f"{kept} of {size / 1e12:.3g} TB in {job.plan.num_devices:,} files, the newest"
            " being written",
        ).within(storage.quota_bytes, "site.storage.quota_bytes", unit=1e12)
    ]
    if rate := storage.write_bytes_per_s:
        counts.append(
            Count(
                stage="checkpoint",
                what="written in at least",
                value=size / rate.value,
                unit="s",
                limit=job.between_checkpoints_s,
                limit_source="the time between two",
                known="modelled",
                note=f"every {job.between_checkpoints_s / 60:.3g} min, in the background; at the"
                " rate of the whole file system",
            )
        )
    return counts


def failures(job: Job) -> list[Count]:
    """What failures cost as often as the recipe saves, and how often would be best (Young 1974)."""
    hours = job.hours_between_failures or DEVICE_HOURS_BETWEEN_FAILURES / job.plan.num_devices
    what = f"time that counts, with a failure every {hours:.3g} h"
    size = job.checkpoint_bytes
    storage = job.site.storage
    if storage.read_bytes_per_s is None or storage.write_bytes_per_s is None:
        lacking = "give site.storage.read_bytes_per_s and site.storage.write_bytes_per_s"
        return [Count(stage="failures", what=what, value=None, known="modelled", note=lacking)]
    write_s = size / storage.write_bytes_per_s.value
    save_s = size / job.plan.num_devices / COPY_BYTES_PER_S
    best_s = max(math.sqrt(2 * save_s * hours * 3600), write_s)  # one is written at a time
    counts = time_that_counts(
        job.between_checkpoints_s,
        between_failures_s=hours * 3600,
        save_s=save_s,
        lost_s=RESTART_S + size / storage.read_bytes_per_s.value + write_s,
    )
    return [
        Count(
            stage="failures",
            what=what,
            value=round(counts, 6),
            unit="fraction",
            known="modelled",
            note="saved as the recipe says; published failures are those of H100",
        ),
        Count(
            stage="failures",
            what="best time between checkpoints",
            value=best_s / 60,
            unit="min",
            known="modelled",
            note=f"checkpoint_every {max(1, round(best_s / job.step_time.total_s.item())):,};"
            f" {size / best_s / 1e9:,.0f} GB/s to be written",
        ),
    ]


def time_that_counts(
    interval_s: float, *, between_failures_s: float, save_s: float, lost_s: float
) -> float:
    """Returns the part of the time, 0 to 1, that is spent on steps which count, with saves
    `interval_s` apart, each of which holds training up for `save_s`.

    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (Future
    Generation Computer Systems 22, 2006), equation 13: failures strike at a constant rate, in
    saves and restarts too. A save counts only when an attempt has lasted until it was written, so
    each failure costs `lost_s`: the restart and the time to write.
    """
    mean = between_failures_s
    return interval_s / (mean * math.exp(lost_s / mean) * math.expm1((interval_s + save_s) / mean))


class Cut(NamedTuple):
    """What the ranks of a plan hold, by those that differ."""

    num_kinds: int
    """Ranks whose cutting code ran."""
    most_params: int
    """Numbers that the fullest rank stores as weights."""
    num_params: int
    """Of all pipeline stages together, before tensor and sharded data parallelism cut them; tied
    embeddings once."""


def cut(spec: ModelSpec, plan: Plan) -> Cut:
    """Returns what each kind of rank holds: of each kind of pipeline stage the first and last
    tensor and data rank.

    Raises:
        ConfigError: the plan cannot run the model.
    """
    kinds = {place: _kind(spec, plan, place) for place in range(plan.pipeline_parallel)}
    first_of = {kind: place for place, kind in reversed(kinds.items())}
    ends = [{0, degree - 1} for degree in (plan.data_parallel, plan.tensor_parallel)]
    views = []
    num_params = 0
    for kind, count in Counter(kinds.values()).items():
        for data, tensor in itertools.product(*ends):
            rank = (first_of[kind] * plan.data_parallel + data) * plan.tensor_parallel + tensor
            views.append(view_rank(spec, plan, rank))
        shapes = [torch.Size(parameter.whole_shape) for parameter in views[-1].parameters]
        num_params += count * sum(shape.numel() for shape in shapes)
    if spec.tied_embeddings and plan.pipeline_parallel > 1:  # of which the last stage has a copy
        num_params -= spec.vocab_size * spec.hidden_size
    return Cut(len(views), max(view.num_params for view in views), num_params)


def _kind(spec: ModelSpec, plan: Plan, place: int) -> tuple:
    """Returns what makes a place in the pipeline differ from others: how many layers, and which
    ends.
    """
    return tuple(
        (len(plan.stage_layers(spec, stage)), stage == 0, stage == plan.num_stages - 1)
        for stage in stage_indices(plan, place)
    )
