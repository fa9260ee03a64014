"""`kit doctor`: what this machine has of what the kit can use, and how to get the rest.

No torch.
"""

import dataclasses
import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from cluster.sandbox import why_not
from cluster.state import JobError
from kit.errors import install_command

EXTRAS = {
    "optuna": "plan",
    "scikit-learn": "plan",
    "lm-eval": "eval",
    "transformers": "eval",
    "wandb": "wandb",
}
SCHEDULER_PROGRAMS = ("sbatch", "squeue", "scontrol", "sacct", "kubectl")
PROBE_LIMIT_S = 120.0
RANKS_LIMIT_S = 60.0
SLOW_IMPORT_S = 20.0
"""A thousand ranks that read an environment from one shared file system take far longer than one
does."""


GPU_PROBE = """
import torch
if torch.cuda.is_available():
    name = "RCCL" if torch.version.hip else "NCCL"
    version = ".".join(map(str, torch.cuda.nccl.version()))
    print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {name} {version}")
"""
"""What torch sees; for a process of its own, as a broken driver can end it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    found: str
    ok: bool | None
    """None: optional, and not here."""
    advice: str = ""


def examine(*, deep: bool = False) -> list[Finding]:
    """Returns what was found, the free space of this folder too; it takes as long as a few imports
    of torch.

    With `deep` DeepSpeed trains a step, which takes up to a minute.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = shutil.disk_usage(Path()).free
    fits = (3, 11) <= sys.version_info[:2] <= (3, 14)
    return [
        Finding(
            subject="Python",
            found=sys.version.split()[0],
            ok=fits,
            advice="" if fits else "use a Python from 3.11 to 3.14",
        ),
        Finding(
            subject="cores, memory", found=f"{os.cpu_count()}, {memory / 2**30:.0f} GiB", ok=True
        ),
        Finding(
            subject=f"free space in {Path().absolute()}",
            found=f"{free / 2**30:.1f} GiB",
            ok=free > 2**31,
            advice="" if free > 2**31 else "checkpoints and data need more",
        ),
        _import_time(),
        (gpu := _gpu()),
        *_rates(int(gpu.found.split()[0]) if gpu.ok else 0),
        _compiler(),
        *(_package(name, extra) for name, extra in EXTRAS.items()),
        _deepspeed(deep),
        _neuron(),
        *(_program(name) for name in SCHEDULER_PROGRAMS),
        _sandbox(),
    ]


def _import_time() -> Finding:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__)"],
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["?"])[-1]
        return Finding(
            subject="torch", found=f"cannot be imported: {last}", ok=False, advice=install_command()
        )
    advice = (
        ""
        if seconds < SLOW_IMPORT_S
        else "copy the environment to each node's own disk (broadcast in the site file)"
    )
    return Finding(
        subject="torch",
        found=f"{done.stdout.strip()}, imported in {seconds:.1f} s",
        ok=seconds < SLOW_IMPORT_S,
        advice=advice,
    )


def _gpu() -> Finding:
    seen = subprocess.run(
        [sys.executable, "-c", GPU_PROBE], capture_output=True, text=True
    ).stdout.strip()
    smi = shutil.which("nvidia-smi")
    query = [smi or "", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.split() if smi else []
    told = f", driver {driver[0]}" if driver else ""
    if seen:
        return Finding(subject="GPU", found=seen + told, ok=True)
    return Finding(
        subject="GPU",
        found=f"torch sees none{told}",
        ok=False if driver else None,
        advice="a newer driver, or torch's wheel for this one" if driver else "",
    )


def _rates(gpus: int) -> list[Finding]:
    """Has a rank for each GPU, or two on the CPU, multiply matrices and add up a tensor over all
    of them.
    """
    from kit.measure.site import by_ranks

    ranks, what = (gpus, "GPU ranks over NCCL") if gpus else (2, "processes over gloo")
    try:
        seen = by_ranks("kit.measure.node_check", ranks, RANKS_LIMIT_S)
    except (RuntimeError, JobError) as error:
        last = (str(error).strip().splitlines() or ["?"])[-1]
        advice = (
            "see NCCL_DEBUG=INFO kit doctor"
            if gpus
            else f"{install_command()} again; no run of several ranks works"
        )
        return [
            Finding(
                subject="matrix product, all-reduce",
                found=f"{ranks} {what} failed: {last}",
                ok=False,
                advice=advice,
            )
        ]
    rate, sent = seen["nodes"][0]["matmul_flops_per_s"], seen["all_reduce_bytes_per_s"]
    told = f"{rate / 1e12:.3g} TFLOP/s in {seen['dtype']}, the slower of {ranks} {what}"
    summed = (
        f"right, {sent / 1e9:.3g} GB/s sent by each of {ranks} {what}"
        if sent
        else "one GPU has none to add to"
    )
    return [
        Finding(subject="matrix product", found=told, ok=True),
        Finding(subject="all-reduce", found=summed, ok=True if sent else None),
    ]


def _compiler() -> Finding:
    path = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    return Finding(
        subject="C++ compiler",
        found=path or "not found",
        ok=True if path else None,
        advice="" if path else "only plan.compile needs it",
    )


def _package(name: str, extra: str) -> Finding:
    try:
        return Finding(subject=name, found=importlib.metadata.version(name), ok=True)
    except importlib.metadata.PackageNotFoundError:
        return Finding(subject=name, found="not installed", ok=None, advice=install_command(extra))


def _deepspeed(deep: bool) -> Finding:
    """With `deep` made to train one step, since it can be installed and fail to start: a
    compiler, a lock, a torch.
    """
    name = "deepspeed"
    installed = _package(name, name)
    if not installed.ok:
        return installed
    version = installed.found
    if not deep:
        advice = "a training step: `kit doctor --deep`"
        return Finding(subject=name, found=f"{version}, not tried", ok=True, advice=advice)
    probe = [sys.executable, "-m", "kit.engines.deepspeed.probe"]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=PROBE_LIMIT_S)
    except subprocess.TimeoutExpired:
        return Finding(
            subject=name,
            found=f"{version}, but no training step within {PROBE_LIMIT_S:.0f} s",
            ok=False,
            advice=f"see where it waits: {' '.join(probe[1:])}",
        )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it died"])[-1]
        return Finding(
            subject=name,
            found=f"{version}, but cannot train: {reason}",
            ok=False,
            advice=f"{install_command('deepspeed')}, or engine 'native'",
        )
    return Finding(subject=name, found=f"{version}, made a training step", ok=True)


def _neuron() -> Finding:
    """Only its packages are tried: a training step would need a Trainium device and minutes of
    compilation.
    """
    from kit.engines.neuron.probe import INSTALL, has_device, probe

    name, status = "neuronx-distributed", probe()
    if status.state == "ok":
        device = (
            "a Neuron device is here"
            if has_device()
            else "no Neuron device is here, so nothing can be trained"
        )
        return Finding(
            subject=name,
            found=f"{status.versions[name]}, imported; {device}",
            ok=has_device() or None,
            advice="its training has reached its end of life: stay on SDK 2.28",
        )
    advice = f"on a Trainium host: {INSTALL}"
    if not status.versions:
        return Finding(subject=name, found="not installed", ok=None, advice=advice)
    versions = ", ".join(f"{package} {version}" for package, version in status.versions.items())
    return Finding(
        subject=name,
        found=f"{status.state} ({versions}): {status.reason}",
        ok=False,
        advice=f"{advice}; elsewhere, uninstall it",
    )


def _program(name: str) -> Finding:
    path = shutil.which(name)
    return Finding(
        subject=name,
        found=path or "not found",
        ok=True if path else None,
        advice="" if path else "only needed where jobs are submitted by it",
    )


def _sandbox() -> Finding:
    reason = why_not()
    return Finding(
        subject="Slurm sandbox",
        found="can run here" if reason is None else "cannot run here",
        ok=True if reason is None else None,
        advice=reason or "python -m cluster.sandbox start",
    )
