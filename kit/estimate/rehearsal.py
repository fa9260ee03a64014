"""Rehearsal of a job of full size: compares the requirements of the job (nodes, memory, files, disk
space, ...) with the limits of its site. A rehearsal starts no job, so it costs no device hours.

The code that splits the model is executed for each kind of rank. All other numbers are computed
from the behaviour of the kit's code, or with the planner's equations. `docs/benchmarks.md` compares
the computed numbers with a small real job.
"""

import dataclasses
import itertools
import math
from typing import Any, ClassVar, Literal

from cluster.record import counted
from cluster.render import STORM_NODES, nodes_for, reads_shared_disk
from cluster.site import Fact, Site
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.engines.build import check_site
from kit.estimate.choose.machine import Machine, machine_of
from kit.estimate.choose.memory_advice import MAX_RISK, estimate_options
from kit.estimate.fit.calibrate import Prediction, own_calibration
from kit.estimate.fit.measured_rows import hardware_on
from kit.estimate.theory.hardware import check_numbers
from kit.estimate.theory.layouts import Layouts
from kit.parallel.pipeline import stage_indices
from kit.parallel.simulate import RankView, view_rank
from kit.run.checkpoint import BYTES_PER_PARAM
from kit.show.results import format_value, parameters_text, short_number
from kit.show.table import Table

FILES_PER_RANK = 30
"""Number of open files of a rank before any process group exists, measured by
`python -m tests.bench groups`."""
FILES_PER_GROUP = 6
"""Number of open files of a rank that each process group adds, without the connections to other
ranks. Measured by `python -m tests.bench groups`."""
DEVICE_HOURS_BETWEEN_FAILURES = 54 * 24 * 16_384 / 419
"""Mean device-hours between two failures of a job. Source: 419 unexpected interruptions of 16,384
H100 in 54 days (The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.4). Other machines have
other failure rates."""
COPY_BYTES_PER_S = 5e9
"""Assumed bytes/s at which a checkpoint is copied from a device to the memory of its host: a sixth
of PCIe 4.0 x16 (31.5 GB/s, PCI-SIG). Training waits only for this copy. All other work of a save
runs in the background."""
RESTART_S = 480.0
"""Seconds from a failure to the first step of the next attempt, without the time to read the
checkpoint. By default Slurm declares a lost node down after 360 s. Imports, process groups and the
construction of the model are assumed to need 120 s."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Requirement:
    """One requirement of a job, e.g. its nodes or its open files, and the limit of the site for
    this requirement.
    """

    stage: str
    what: str
    value: float | None
    """Amount that the job needs, in `unit`. If it cannot be computed, the value is None."""
    unit: str = ""
    limit: float | None = None
    """Highest value that the site allows, in `unit`. If None, there is no limit, or the site file
    does not state one."""
    limit_source: str = ""
    """Source of the limit. If the site file does not state the limit, the text names the missing
    field. If the requirement has no limit, the text is empty."""
    known: Literal["run", "counted", "modelled"] = "counted"
    """Method by which `value` was found. `run`: the kit's code was executed. `counted`: computed
    from the behaviour of the code. `modelled`: computed by the planner's equations."""
    note: str = ""

    @property
    def fits(self) -> bool | None:
        """Whether the required amount is at most the limit. If the amount or the limit is unknown,
        the value is None.
        """
        if self.limit is None or self.value is None:
            return None
        return self.value <= self.limit

    @property
    def row(self) -> tuple[str, ...]:
        """Table row of this requirement. The cells are texts in the order of
        `RehearsalReport.header`.
        """
        value = "not known"
        if self.value is not None:
            value = format_value(self.value, self.unit)
        limit = "not known" if self.limit_source else ""
        if self.limit is not None:
            limit = f"≤ {format_value(self.limit, self.unit)}"
        verdict = {True: "yes", False: "NO", None: ""}[self.fits]
        return self.stage, self.what, value, limit, verdict, self.known, self.note


@dataclasses.dataclass(frozen=True, kw_only=True)
class RehearsalReport:
    """Requirements of a job and the limits of its site. The requirements concern the layout, the
    ranks, the start of the job, the checkpoints and failures.
    """

    spec: ModelSpec
    plan: Plan
    site: Site
    requirements: tuple[Requirement, ...]

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
        """Table rows, one per requirement. A row is a tuple of texts in the order of `header`."""
        return [count.row for count in self.requirements]

    @property
    def fits(self) -> bool:
        """Whether no requirement is above its limit. Unknown amounts and limits are ignored."""
        return all(count.fits is not False for count in self.requirements)

    @property
    def title(self) -> str:
        """Title of the table in one line: model, devices, site and verdict. The verdict names the
        requirements that are above their limits.
        """
        above = [count.what for count in self.requirements if count.fits is False]
        verdict = "all known limits are met"
        if above:
            verdict = f"does not fit: {', '.join(above)}"
        unknown = [
            count for count in self.requirements if count.limit is None and count.limit_source
        ]
        if unknown:
            verdict += f"; {counted(len(unknown), 'limit')} unknown"
        devices = counted(self.plan.num_devices, "device")
        return f"{self.spec.name} on {devices} of {self.site.name}: {verdict}"

    @property
    def untested_conditions(self) -> list[str]:
        """Two sentences that name what a rehearsal cannot test: all devices of the job running at
        once, and the file system of the site.
        """
        return [
            f"{self.plan.num_devices:,} devices at once (what has: 8 ranks that train, 512"
            " light ones under Slurm, 128 in a process group)",
            f"the file system of {self.site.name}: its rates are those of its site file",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns the rehearsal as plain values for JSON."""
        return {
            "model": self.spec.name,
            "plan": self.plan.to_dict(),
            "site": self.site.name,
            "fits": self.fits,
            "counts": [
                {**dataclasses.asdict(count), "fits": count.fits} for count in self.requirements
            ],
            "never_run": self.untested_conditions,
        }

    def _repr_html_(self) -> str:
        rows = [dict(zip(self.header, row, strict=True)) for row in self.rows]
        limits = [
            f"{count.what}: {count.limit_source}"
            for count in self.requirements
            if count.limit_source
        ]
        notes = [f"Not yet tested: {text}." for text in self.untested_conditions]
        return Table(rows, caption=self.title, notes=[*limits, *notes])._repr_html_()


def rehearse(
    spec: ModelSpec,
    plan: Plan,
    recipe: Recipe,
    site: Site,
    *,
    hours_between_failures: float | None = None,
) -> RehearsalReport:
    """Returns the requirements of a job (nodes, memory, files, disk space, ...) and the limits of
    its site. No job is started.

    `hours_between_failures` is the mean time between two failures of the whole job, in hours. The
    default is `DEVICE_HOURS_BETWEEN_FAILURES` divided by the number of devices.

    Raises:
        ConfigError: The plan cannot run the model, or the site lacks a number that the step time
            needs.
    """
    plan.check(spec)
    check_site(spec, plan, site)
    check_numbers(site, "bf16", plan.num_devices)
    machine = machine_of(site, own_calibration([], site), engine=plan.engine)
    layouts = Layouts.of(spec, [plan], muon=recipe.optimizer == "muon")
    predicted = machine.calibration.predict(layouts, hardware_on(site, layouts, plan.precision))
    step_s = predicted.total_s.item()
    if hours_between_failures is None:
        hours_between_failures = DEVICE_HOURS_BETWEEN_FAILURES / plan.num_devices
    counts = [
        *_count_size(spec, plan, recipe, machine),
        *_count_time(plan, recipe, machine, predicted),
        *_count_ranks(spec, plan, site),
        _count_start(plan, site),
        *_count_checkpoints(spec, plan, recipe, site, step_s),
        *_count_failures(spec, plan, recipe, site, step_s, hours_between_failures),
    ]
    return RehearsalReport(spec=spec, plan=plan, site=site, requirements=tuple(counts))


def _count_size(spec: ModelSpec, plan: Plan, recipe: Recipe, machine: Machine) -> list[Requirement]:
    """Returns two requirements: the number of nodes, and the modelled memory in GiB of the device
    that needs most memory.
    """
    site = machine.site
    max_nodes = site.slurm.max_nodes if site.slurm else None
    (option,) = estimate_options(spec, plan, [{}], site.device, optimizer=recipe.optimizer)
    return [
        Requirement(
            stage="plan",
            what="nodes",
            value=nodes_for(plan.num_devices, site),
            limit=max_nodes,
            limit_source="site.slurm.max_nodes" if max_nodes else "",
        ),
        Requirement(
            stage="plan",
            what="memory of the fullest device",
            value=option.used_bytes / 2**30,
            unit="GiB",
            limit=machine.max_used_bytes(MAX_RISK) / 2**30,
            limit_source=f"above, it runs out with a probability of more than {MAX_RISK:.0%}",
            known="modelled",
            note=f"of {float(machine.hardware.memory_bytes) / 2**30:.1f} GiB",
        ),
    ]


def _count_time(
    plan: Plan, recipe: Recipe, machine: Machine, predicted: Prediction
) -> list[Requirement]:
    """Returns the predicted time of a step in seconds and of the whole run in days. If the site
    limits the time of a job, a note states the number of consecutive jobs that the run needs.
    """
    slurm = machine.site.slurm
    step_s = predicted.total_s.item()
    run_s = recipe.num_steps * step_s
    run_note = counted(recipe.num_steps, "step")
    low = short_number(predicted.low_s.item())
    high = short_number(predicted.high_s.item())
    job_limit_s = slurm.max_seconds(nodes_for(plan.num_devices, machine.site)) if slurm else None
    if job_limit_s:
        run_note += f", {counted(math.ceil(run_s / job_limit_s), 'job')} one after the other"
    return [
        Requirement(
            stage="plan",
            what="time of a step",
            value=step_s,
            unit="s",
            known="modelled",
            note=f"{low} to {high} s; {machine.calibration.label}",
        ),
        Requirement(
            stage="plan",
            what="time of the whole run",
            value=run_s / 86_400,
            unit="days",
            known="modelled",
            note=run_note,
        ),
    ]


def _count_ranks(spec: ModelSpec, plan: Plan, site: Site) -> list[Requirement]:
    """Returns two requirements. The first is the number of weights that are lost or doubled when
    the model is split over the ranks, which must be 0. The second is the number of open files of
    rank 0, which has the most connections. On Trainium only the first is returned, with an unknown
    value.
    """
    if plan.capabilities.runs_on_trainium:
        return [
            Requirement(
                stage="ranks",
                what="weights that sharding loses or doubles",
                value=None,
                note="NxD splits the model on the devices, which is not yet tested",
            )
        ]
    views, num_params = split_model(spec, plan)
    most_params = max(view.num_params for view in views)
    shards = plan.shard_size or plan.data_parallel
    degrees = (
        plan.pipeline_parallel,
        plan.data_parallel // shards,
        shards,
        plan.tensor_parallel,
    )
    groups = [plan.num_devices, *(degree for degree in degrees if degree > 1)]
    # Each connection to another rank needs one open file (a socket). A process group connects its
    # ranks as a tree, in which a rank has at most two connections per level.
    files = sum(FILES_PER_GROUP + 2 * math.ceil(math.log2(size)) for size in groups)
    return [
        Requirement(
            stage="ranks",
            what="weights that sharding loses or doubles",
            value=abs(num_params - spec.num_params),
            limit=0,
            limit_source="the model's own number",
            known="run",
            note=f"{parameters_text(most_params)} in the fullest of {len(views)} kinds of ranks",
        ),
        _with_site_limit(
            site.open_files,
            "site.open_files",
            Requirement(
                stage="ranks",
                what="open files of rank 0",
                value=FILES_PER_RANK + files + plan.num_devices,
                note=f"a tree in each of {counted(len(groups), 'process group')}; all ranks"
                " connect to its store",
            ),
        ),
    ]


def split_model(spec: ModelSpec, plan: Plan) -> tuple[list[RankView], int]:
    """Runs the code that splits a model, once for each kind of rank. Returns (views, number of
    parameters).

    Pipeline devices are of one kind if their stages have equal numbers of layers and they agree in
    whether they hold the first and the last stage of the model. For each of these kinds, the first
    and last tensor rank and the first and last data rank are simulated. `views` has one `RankView`
    per simulated rank. The number of parameters is summed over all pipeline devices, before tensor
    and data parallelism split them. Tied embeddings count once.

    Raises:
        ConfigError: The plan cannot run the model.
    """
    # Maps a kind of pipeline device to the numbers of the devices of this kind. A kind has the
    # number of layers of each stage of the device, whether it has the first stage, and whether it
    # has the last stage.
    devices_by_kind: dict[tuple, list[int]] = {}
    for device in range(plan.pipeline_parallel):
        stages = stage_indices(plan, device)
        num_layers = [len(plan.stage_layers(spec, stage)) for stage in stages]
        kind = (*num_layers, 0 in stages, plan.num_stages - 1 in stages)
        devices_by_kind.setdefault(kind, []).append(device)
    data_ranks = {0, plan.data_parallel - 1}
    tensor_ranks = {0, plan.tensor_parallel - 1}
    views = []
    num_params = 0
    for devices in devices_by_kind.values():
        for data_rank, tensor_rank in itertools.product(data_ranks, tensor_ranks):
            rank = devices[0] * plan.data_parallel + data_rank
            views.append(view_rank(spec, plan, rank * plan.tensor_parallel + tensor_rank))
        shapes = [parameter.whole_shape for parameter in views[-1].parameters]
        num_params += len(devices) * sum(math.prod(shape) for shape in shapes)
    if spec.tied_embeddings and plan.pipeline_parallel > 1:
        # The last stage has a copy of the tied embedding. The loop above counted this weight twice.
        num_params -= spec.vocab_size * spec.hidden_size
    return views, num_params


def _with_site_limit(
    fact: Fact | None, name: str, count: Requirement, unit: float = 1.0
) -> Requirement:
    """Returns the requirement `count` with a limit from the site file.

    `fact` is the value of the site field `name`. `unit` is the size of the requirement's unit in
    the unit of this field, e.g. 1e9 for GB if the field is in bytes. If the site file lacks the
    field, `fact` is None. The requirement then has no limit, and its `limit_source` names the
    field.
    """
    if fact is None:
        return dataclasses.replace(count, limit_source=f"{name} is not stated")
    return dataclasses.replace(count, limit=fact.value / unit, limit_source=fact.source)


def _count_start(plan: Plan, site: Site) -> Requirement:
    """Returns, as a requirement, the number of nodes whose ranks all read Python's files from the
    shared disk at the start. The number is 0 if the Python environment is packed for each node or
    in a container.
    """
    num_nodes = 0
    note = "packed for each node, or in a container"
    if site.scheduler == "slurm" and site.slurm and reads_shared_disk(site.slurm):
        num_nodes = nodes_for(plan.num_devices, site)
        note = "every rank reads it"
    return Requirement(
        stage="start",
        what="nodes that read Python from the shared disk",
        value=num_nodes,
        limit=STORM_NODES,
        limit_source="above, `kit launch` refuses: pack the environment, [slurm.broadcast] in"
        " the site file",
        note=note,
    )


def _count_checkpoints(
    spec: ModelSpec, plan: Plan, recipe: Recipe, site: Site, step_s: float
) -> list[Requirement]:
    """Returns one or two requirements: the size of all checkpoints on disk in TB, and the seconds
    to write one checkpoint. The second is left out if the site file states no write rate.
    """
    checkpoint_bytes = BYTES_PER_PARAM * spec.num_params
    save_every = recipe.checkpoint_every or recipe.num_steps
    num_kept = recipe.keep_last + 1
    if recipe.keep_every:
        num_kept += recipe.num_steps // math.lcm(save_every, recipe.keep_every)
    num_kept = min(num_kept, math.ceil(recipe.num_steps / save_every))
    unit, unit_bytes = _size_unit(num_kept * checkpoint_bytes)
    one_unit, one_unit_bytes = _size_unit(checkpoint_bytes)
    one = f"{short_number(checkpoint_bytes / one_unit_bytes)} {one_unit}"
    counts = [
        _with_site_limit(
            site.storage.quota_bytes,
            "site.storage.quota_bytes",
            Requirement(
                stage="checkpoint",
                what="size of the kept checkpoints",
                value=num_kept * checkpoint_bytes / unit_bytes,
                unit=unit,
                note=f"{num_kept} of {one} in {plan.num_devices:,} files, the newest being written",
            ),
            unit=unit_bytes,
        )
    ]
    if write_rate := site.storage.write_bytes_per_s:
        save_every_s = save_every * step_s
        counts.append(
            Requirement(
                stage="checkpoint",
                what="least time to write one",
                value=checkpoint_bytes / write_rate.value,
                unit="s",
                limit=save_every_s,
                limit_source="the time between two",
                known="modelled",
                note=f"every {short_number(save_every_s / 60)} min, in the background; at the rate"
                " of the whole file system",
            )
        )
    return counts


def _size_unit(size_bytes: float) -> tuple[str, float]:
    """Returns (unit, bytes of the unit): the largest of TB, GB and MB in which a size is at least
    1, or MB for a smaller size.
    """
    for unit, unit_bytes in (("TB", 1e12), ("GB", 1e9)):
        if size_bytes >= unit_bytes:
            return unit, unit_bytes
    return "MB", 1e6


def _count_failures(
    spec: ModelSpec,
    plan: Plan,
    recipe: Recipe,
    site: Site,
    step_s: float,
    hours_between_failures: float,
) -> list[Requirement]:
    """Returns the share of the time, 0 to 1, that failures leave for training, and the best time
    between saves in minutes (Young 1974). If the site file states no disk rates, only the share is
    returned, with an unknown value and a note.
    """
    what = f"productive time, with a failure every {short_number(hours_between_failures)} h"
    write_rate = site.storage.write_bytes_per_s
    read_rate = site.storage.read_bytes_per_s
    if write_rate is None or read_rate is None:
        note = "give site.storage.read_bytes_per_s and site.storage.write_bytes_per_s"
        return [Requirement(stage="failures", what=what, value=None, known="modelled", note=note)]
    checkpoint_bytes = BYTES_PER_PARAM * spec.num_params
    write_s = checkpoint_bytes / write_rate.value
    read_s = checkpoint_bytes / read_rate.value
    save_s = checkpoint_bytes / plan.num_devices / COPY_BYTES_PER_S
    between_failures_s = hours_between_failures * 3600
    share = time_that_counts(
        (recipe.checkpoint_every or recipe.num_steps) * step_s,
        between_failures_s=between_failures_s,
        save_s=save_s,
        lost_s=RESTART_S + read_s + write_s,
    )
    # Only one checkpoint is written at a time. The time between saves is therefore at least the
    # time to write one.
    best_s = max(math.sqrt(2 * save_s * between_failures_s), write_s)
    return [
        Requirement(
            stage="failures",
            what=what,
            value=round(share, 6),
            unit="fraction",
            known="modelled",
            note="saved as the recipe says; published failures are those of H100",
        ),
        Requirement(
            stage="failures",
            what="best time between checkpoints",
            value=best_s / 60,
            unit="min",
            known="modelled",
            note=f"checkpoint_every {max(1, round(best_s / step_s)):,};"
            f" {checkpoint_bytes / best_s / 1e9:,.0f} GB/s to be written",
        ),
    ]


def time_that_counts(
    interval_s: float, *, between_failures_s: float, save_s: float, lost_s: float
) -> float:
    """Returns the share of the time, 0 to 1, that is spent on steps whose result no failure
    destroys.

    `interval_s` is the training time between two saves. Each save delays training by `save_s`.
    Failures occur at a constant rate, also during saves and restarts. If a failure occurs before
    the checkpoint is written, the save is useless. Each failure therefore costs `lost_s`: the
    restart and the time to write a checkpoint.

    Source: Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps"
    (Future Generation Computer Systems 22, 2006), equation 13.
    """
    mean_s = between_failures_s
    attempts_s = mean_s * math.exp(lost_s / mean_s)
    return interval_s / (attempts_s * math.expm1((interval_s + save_s) / mean_s))
