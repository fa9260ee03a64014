"""On which devices a model is scored: here, or shared out in a job of its run's site. No torch."""

import dataclasses
import sys
from collections.abc import Sequence

from cluster import submission
from cluster.job import JobSpec
from cluster.render import nodes_for
from cluster.site import Site
from cluster.state import JobState
from kit.convert.hugging_face_config import config_of
from kit.errors import ConfigError, RunError, kit_command
from kit.evaluate.benchmarks import Options
from kit.run import Run
from kit.spec import ModelSpec

PRECISIONS = {"fp32": 4, "bf16": 2}
"""Of weights, and the bytes of one."""
HEADROOM = 1.2
"""Of a device's memory, over the weights: activations, logits, keys and values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceLayout:
    """How processes, one a device, score a model: so many share its weights, and all of these
    are a replica.

    They are tensor ranks of a Llama on one node; else each holds its part of the weights, gathers a
    layer when it computes it (FSDP), and computes what the others do.
    """

    shards: int = 1
    replicas: int = 1
    is_tensor: bool = True

    @property
    def num_devices(self) -> int:
        """Processes in all."""
        return self.shards * self.replicas

    def __str__(self) -> str:
        return f"{'tensor' if self.is_tensor else 'FSDP'} {self.shards} x replicas {self.replicas}"


def layout(spec: ModelSpec, site: Site, options: Options, ranks: int = 1) -> DeviceLayout:
    """Returns how the devices share a model.

    As few as the weights need; whatever devices there are beside these are replicas, which share
    out the items. Without `options.devices`, and outside a job of several `ranks`, there are none.

    Raises:
        ConfigError: transformers has no such model, or so many devices cannot share it, or do not
            hold it, or are not those that were started.
    """
    config_of(spec)
    asked = options.devices or (ranks if ranks > 1 else None)
    if ranks > 1 and asked != ranks:
        raise ConfigError(
            f"devices: {asked} were asked for, but {ranks} processes were started. Start as many."
        )
    node = site.devices_per_node
    beyond = range(2 * node, spec.num_layers * node + 1, node)
    counts = [asked] if asked else [*range(1, node + 1), *beyond]
    found = next(
        (one for count in counts if (one := _split(spec, site, options.precision, count))), None
    )
    if found is not None:
        return found
    weights = (
        f"{PRECISIONS[options.precision] * spec.num_params / 1e9:,.1f} GB of weights in"
        f" {options.precision}"
    )
    degrees = ", ".join(
        str(degree) for degree in range(1, node + 1) if not _indivisible(spec, degree)
    )
    memory = site.device.memory_bytes
    raise ConfigError(
        f"devices: {asked or 'no number of them'} cannot share {spec.name}: {weights}, devices of"
        f" {site.name} with {f'{memory.value / 1e9:,.1f} GB' if memory else 'unknown memory'},"
        f" {node} a node; a Llama's tensor ranks in a node: {degrees}; beyond one node, whole"
        " nodes. Give another number, precision bf16, or a run whose site has more."
    )


def _indivisible(spec: ModelSpec, tensor: int) -> bool:
    return any(
        n % tensor
        for n in (spec.num_heads, spec.num_kv_heads, spec.ffn_hidden_size, spec.vocab_size)
    )


def _split(spec: ModelSpec, site: Site, precision: str, devices: int) -> DeviceLayout | None:
    """Returns the layout with the most replicas that fits; None if there is none."""
    node = site.devices_per_node
    is_local = site.scheduler == "local"
    if devices > node and devices % node and not is_local:
        return None
    memory = site.device.memory_bytes.value if site.device.memory_bytes else float("inf")
    if is_local:  # whose processes share one memory
        memory *= node / devices
    needed = HEADROOM * PRECISIONS[precision] * spec.num_params
    for shards in range(1, devices + 1):
        is_tensor = spec.family == "llama" and shards <= node
        across = devices > node and node % shards and shards % node  # a group would straddle nodes
        if devices % shards or across or is_tensor and _indivisible(spec, shards):
            continue
        # FSDP has two gathered layers beside its part: one that computes, and the next.
        gathered = 0 if is_tensor or shards == 1 else 2 / spec.num_layers
        if needed * (1 / shards + gathered) <= memory:
            return DeviceLayout(shards=shards, replicas=devices // shards, is_tensor=is_tensor)
    return None


# Jobs ---------------------------------------------------------------------------------------------


def eval_job(run: Run, step: int, tasks: Sequence[str] | str, options: Options) -> JobSpec:
    """Returns the job that scores one checkpoint: each process runs the command that a user would
    type.

    Raises:
        ConfigError: as `layout`.
    """
    chosen = ["--suite", tasks] if isinstance(tasks, str) else ["--tasks", ",".join(tasks)]
    argv = [sys.executable, "-m", "kit", "eval", str(run.directory), "--step", str(step), *chosen]
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value != field.default:
            argv += ["--set", f"{field.name}={str(value).lower() if value is True else value}"]
    devices = layout(run.spec, run.site, options).num_devices
    return JobSpec(
        name=f"{run.name}-eval-{step}",
        run_dir=str(run.directory / "eval" / "jobs" / f"step_{step:08d}"),
        argv=tuple(argv),
        num_processes=devices,
        num_nodes=1 if run.site.scheduler == "local" else nodes_for(devices, run.site),
        max_restarts=0,
    )


def score_in_job(run: Run, step: int, tasks: Sequence[str] | str, options: Options) -> None:
    """Scores a checkpoint in a job of the run's site and returns when that is done; an interrupt
    ends the job.

    Raises:
        ConfigError, JobError: the site cannot run it.
        RunError: it did not come to its end.
    """
    job = submission.submit(eval_job(run, step, tasks, options), run.site)
    try:
        status = job.wait()
    except KeyboardInterrupt:
        job.cancel()
        raise
    if status.state is not JobState.DONE:
        words = [status.reason, *job.logs(0).strip().splitlines()][-1].rstrip(".")
        more = kit_command("logs", job.run_dir)
        raise RunError(f"{run.name}, step {step}: not scored: {words}. All that it said: `{more}`.")
