"""What a job asks of its site while it starts and runs: memory, groups of ranks, files read,
signs of life.
"""

import math

import numpy as np

from cluster.heartbeats import GATHER_EVERY_S, MANY
from cluster.record import counted
from cluster.render import STORM_NODES, reads_shared_disk
from kit.estimate.theory.out_of_memory import RESERVE
from kit.rehearsal.count import Count
from kit.rehearsal.job import Job

MAX_RISK = 0.05
"""Accepted probability of running out of memory, as in `kit plan`."""
OWN_FILES, GROUP_FILES = 30, 6
"""Open files of a rank, and more for each group beside its connections: seen in `python -m
tests.benchmarks groups`."""
IMPORT_CALLS, IMPORT_BYTES = 33_000, 592e6
"""File calls and bytes read until a rank trains: strace of `kit.train` with torch 2.13 on Linux,
a rank alone."""
JOB_CALLS_PER_S, RANK_CALLS_PER_S = 20.0, 6.0
"""File calls of a job that trains: rank 0 tells its step once a second, and the supervisor looks
after it; and of each rank that tells its own in a file of its own (`python -m tests.benchmarks
rehearsal`)."""
SHARE_OF_METADATA = 0.1
"""What one job may take of the file calls that a file system serves: it is not alone there."""


def plan(job: Job) -> list[Count]:
    """The layout: memory of the fullest device, time of a step and of the run."""
    used = job.used_bytes
    has = float(job.machine.hardware.memory_bytes)
    risk = RESERVE.out_of_memory_probability(np.array(used), has).item()
    step_s, low_s, high_s = job.step_s
    days = job.recipe.num_steps * step_s / 86_400
    tokens = job.recipe.num_steps * job.plan.global_batch_size * job.spec.sequence_length
    limit = job.site.slurm.max_seconds(job.num_nodes) if job.site.slurm else None
    jobs = (
        f", {counted(math.ceil(days * 86_400 / limit), 'job')} one after the other" if limit else ""
    )
    most = job.site.slurm.max_nodes if job.site.slurm else None
    return [
        Count(
            stage="plan",
            what="nodes",
            value=job.num_nodes,
            limit=most,
            limit_source="site.slurm.max_nodes",
        ),
        Count(
            stage="plan",
            what="memory of the fullest device",
            value=used / 1e9,
            unit="GB",
            limit=job.machine.most_bytes(MAX_RISK) / 1e9,
            limit_source=f"runs out with a probability of {MAX_RISK:.0%}",
            known="modelled",
            note=f"of {has / 1e9:.1f} GB: runs out with a probability of {risk:.1%}",
        ),
        Count(
            stage="plan",
            what="a step",
            value=step_s,
            unit="s",
            known="modelled",
            note=f"{low_s:.3g} to {high_s:.3g} s; {job.machine.calibration.label}",
        ),
        Count(
            stage="plan",
            what="the whole run",
            value=days,
            unit="days",
            known="modelled",
            note=f"{job.recipe.num_steps:,} steps, {tokens / 1e9:,.0f} billion tokens{jobs}",
        ),
    ]


def ranks(job: Job) -> list[Count]:
    """What each kind of rank holds, and the groups in which it talks."""
    if job.plan.engine == "neuron":
        return [
            Count(
                stage="ranks",
                what="kinds of ranks cut",
                value=0,
                note="NxD cuts on the devices: never run",
            )
        ]
    from kit.rehearsal.ranks import cut

    found = cut(job.spec, job.plan)
    lost = abs(found.num_params - job.spec.num_params)
    share = (
        f"{found.most_params / 1e9:.3g} billion in the fullest of {found.num_kinds} kinds of ranks"
    )
    sockets = sum(
        GROUP_FILES + 2 * math.ceil(math.log2(size)) for size in found.groups.values() if size > 1
    )
    return [
        Count(
            stage="ranks",
            what="weights lost or doubled by the cuts",
            value=lost,
            limit=0,
            limit_source="the model's own number",
            is_limited=True,
            known="run",
            note=share,
        ),
        Count(
            stage="ranks",
            what="process groups of a rank",
            value=len(found.groups),
            known="run",
            note=", ".join(f"{name} {size:,}" for name, size in found.groups.items()),
        ),
        Count(
            stage="ranks",
            what="open files of rank 0",
            value=OWN_FILES + sockets + job.plan.num_devices,
            note="a tree in each group; to its store all ranks are connected",
        ).within(job.site.open_files),
    ]


def start(job: Job) -> list[Count]:
    """Files that all ranks read at once, before the first of them computes."""
    slurm = job.site.slurm if job.site.scheduler == "slurm" else None
    readers, how = (
        job.num_nodes,
        "every rank reads Python from the shared file system; packed, one file a job would be",
    )
    limit, why = (
        STORM_NODES,
        "above, `kit launch` refuses: pack the environment, [slurm.broadcast] in the site file",
    )
    if slurm is None or not reads_shared_disk(slurm):
        readers, how = 0, "packed for each node, or in a container"
    calls = readers * job.site.devices_per_node * IMPORT_CALLS / 1e6
    return [
        Count(
            stage="start",
            what="nodes that read Python from the shared disk",
            value=readers,
            limit=limit,
            limit_source=why,
            is_limited=True,
            note=how,
        ),
        Count(
            stage="start",
            what="their file calls at once",
            value=calls,
            unit="million",
            note=f"and {readers * job.site.devices_per_node * IMPORT_BYTES / 1e12:.3g} TB",
        ),
    ]


def signs_of_life(job: Job) -> list[Count]:
    """What tells, second by second, that a job under Slurm lives."""
    if job.site.scheduler != "slurm":
        return []
    own_files = job.plan.num_devices if job.plan.num_devices <= MANY else 0
    return [
        Count(
            stage="signs of life",
            what="file calls of the job",
            value=JOB_CALLS_PER_S + RANK_CALLS_PER_S * own_files,
            unit="per s",
            note=(
                "each rank writes a file of its own"
                if own_files
                else f"rank 0 writes one file for all ranks every {GATHER_EVERY_S:g} s"
            ),
        ).within(job.site.storage.metadata_calls_per_s, share=SHARE_OF_METADATA)
    ]
