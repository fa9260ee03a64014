"""What a job asks of its site to keep what it has learnt: checkpoints, the order of its data,
scores, restarts.
"""

import functools
import math

from cluster.scheduler import EDIT
from kit.errors import ConfigError, DataError
from kit.evaluate.jobs import layout as evaluation_layout
from kit.evaluate.options import Options
from kit.launcher import check_data
from kit.rehearsal.count import Count
from kit.rehearsal.goodput import DEVICE_HOURS_BETWEEN_FAILURES, Goodput
from kit.rehearsal.job import Job
from kit.trainer.watchdog import patience_s

PLANNING_S_PER_RANK = 9.1 / 3072
"""CPU seconds of rank 0 to plan a first checkpoint of gpt-1t; later ones keep the plan
(BENCHMARKS.md)."""
COPY_BYTES_PER_S = 5e9
"""From a device to its host's memory, for which alone training waits: a sixth of PCIe 4.0 x16
(PCI-SIG: 31.5 GB/s)."""
SLURM_PATIENCE_S = 360.0
"""With a node that says nothing more: SlurmdTimeout, by default 300 s, and until it looks again."""
START_S = 120.0
"""From the start of a job to its first step, but for its checkpoint: imports, process groups,
model. Assumed."""


def checkpoints(job: Job) -> list[Count]:
    """Size, number and time of checkpoints."""
    storage, recipe, size = job.site.storage, job.recipe, job.checkpoint_bytes
    every = recipe.checkpoint_every or recipe.num_steps
    for_good = recipe.num_steps // math.lcm(every, recipe.keep_every) if recipe.keep_every else 0
    kept = min(math.ceil(recipe.num_steps / every), recipe.keep_last + 1 + for_good)
    files = (
        f"{kept} of {size / 1e12:.3g} TB in {job.plan.num_devices:,} files, the newest being"
        " written"
    )
    count = functools.partial(Count, stage="checkpoint")
    between = functools.partial(
        count,
        unit="s",
        limit=job.between_checkpoints_s,
        limit_source="the time between two",
        is_limited=True,
    )
    pace = f"every {job.between_checkpoints_s / 60:.3g} min, in the background"
    counts = [
        count(what="kept", value=kept * size / 1e12, unit="TB", note=files).within(
            storage.quota_bytes, unit=1e12
        )
    ]
    if job.plan.engine != "neuron":  # NxD's ranks write without asking each other
        seconds = PLANNING_S_PER_RANK * job.plan.num_devices
        counts.append(between(what="planned by rank 0, CPU", value=seconds, note=pace))
    if (rate := storage.write_bytes_per_s) is not None:
        note = f"{pace}; at the rate of the whole file system"
        counts.append(
            between(
                what="written in at least", value=size / rate.value, known="modelled", note=note
            )
        )
    return counts


def data(job: Job) -> list[Count]:
    """How often each source of text is read."""
    wanted = job.recipe.num_steps * job.plan.global_batch_size * job.spec.sequence_length
    count = functools.partial(Count, stage="data")
    if job.recipe.data == EDIT:
        return [
            count(
                what="tokens", value=wanted / 1e9, unit="billion", note="without --data: no epochs"
            )
        ]
    try:
        sources = check_data(job.spec, job.plan, job.recipe)
    except (DataError, ConfigError) as error:
        return [
            count(what="tokens", value=wanted / 1e9, unit="billion", note=f"no epochs: {error}")
        ]
    return [
        count(what=f"epochs of {name}", value=epochs, note=f"of {wanted:,} tokens in all")
        for name, epochs in sources
    ]


def scores(job: Job) -> list[Count]:
    """How many devices hold the weights to score a checkpoint."""
    try:
        needed = evaluation_layout(job.spec, job.site, Options(precision="bf16"))
    except ConfigError as error:
        return [
            Count(
                stage="scores",
                what="devices",
                value=math.inf,
                limit=job.plan.num_devices,
                note=str(error),
            )
        ]
    note = (
        f"tensor {needed.tensor_parallel} x pipeline {needed.pipeline_parallel}, bf16, `kit eval"
        " --precision bf16`"
    )
    return [
        Count(
            stage="scores",
            what="devices",
            value=needed.num_devices,
            limit=job.plan.num_devices,
            limit_source="those of the job",
            is_limited=True,
            known="modelled",
            note=note,
        )
    ]


def failures(job: Job) -> list[Count]:
    """What failures cost at the recipe's cadence of checkpoints, and at the best one."""
    hours = job.hours_between_failures or DEVICE_HOURS_BETWEEN_FAILURES / job.plan.num_devices
    source = (
        "yours" if job.hours_between_failures else "as of H100 in arXiv 2407.21783, by the device"
    )
    count = functools.partial(Count, stage="failures", known="modelled")
    counts = [count(what="mean time between failures", value=hours, unit="h", note=source)]
    storage, size = job.site.storage, job.checkpoint_bytes
    if storage.read_bytes_per_s is None or storage.write_bytes_per_s is None:
        lacking = (
            "restarts and lost steps: give site.storage.read_bytes_per_s and"
            " site.storage.write_bytes_per_s"
        )
        return [*counts, count(what="what they cost", value=None, note=lacking)]
    read_s, write_s = size / storage.read_bytes_per_s.value, size / storage.write_bytes_per_s.value
    noticed_s = min(patience_s(job.recipe, job.plan) or math.inf, SLURM_PATIENCE_S)
    goodput = Goodput(
        between_failures_s=hours * 3600,
        save_s=size / job.plan.num_devices / COPY_BYTES_PER_S,
        restart_s=noticed_s + START_S + read_s,
        write_s=write_s,
    )
    best_s = goodput.best_interval_s()
    restart = (
        f"a lost node noticed {noticed_s:.0f}, started {START_S:.0f} (assumed), checkpoint read"
        f" {read_s:.0f} s; without the queue"
    )
    cadence = (
        f"checkpoint_every {job.recipe.checkpoint_every}"
        if job.recipe.checkpoint_every
        else "only at the end"
    )
    rate = f"{size / best_s / 1e9:,.0f} GB/s to be written"
    return [
        *counts,
        count(what="a restart", value=goodput.restart_s, unit="s", note=restart),
        count(
            what="best time between checkpoints",
            value=best_s / 60,
            unit="min",
            note=f"checkpoint_every {max(1, round(best_s / job.step_s[0])):,} (Daly 2006); {rate}",
        ),
        count(what="time that counts, then", value=goodput.at(best_s), unit="fraction"),
        count(
            what="time that counts, as the recipe saves",
            value=round(goodput.at(job.between_checkpoints_s), 6),
            unit="fraction",
            note=cadence,
        ),
    ]
