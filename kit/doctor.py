"""`kit doctor`: reports which parts of this environment the kit can use, and how to install missing
parts.

Problems of a single launch, such as a full disk, are found by the launch itself. This module does
not import torch.
"""

import dataclasses
import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from cluster.interpreter import PACKAGE_ROOT, code_command, source_command
from cluster.shadows import find_shadowing_files, find_shadowing_modules, summary
from cluster.site import Site
from cluster.slurm.script import container_trial
from cluster.state import JobError
from kit.errors import install_command
from kit.show.results import short_number

EXTRAS = {
    "optuna": "plan",
    "scikit-learn": "plan",
    "lm-eval": "eval",
    "transformers": "eval",
    "wandb": "wandb",
}
PROBE_LIMIT_S = 120.0
SLOW_IMPORT_S = 20.0
"""Longest acceptable time, in seconds, of the import of torch in one process. If a thousand
ranks read the environment from one shared file system, the import takes far longer than in one
process."""


TORCH_PROBE = """
import time
start = time.perf_counter()
import torch
print(f"{torch.__version__}, imported in {time.perf_counter() - start:.1f} s")
if torch.cuda.is_available():
    name = "RCCL" if torch.version.hip else "NCCL"
    version = ".".join(map(str, torch.cuda.nccl.version()))
    print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {name} {version}")
"""
"""Python program that prints torch's version, its import time and its GPUs. It runs in a child
process, because a broken driver can kill the process."""


@dataclasses.dataclass(frozen=True)
class DoctorFinding:
    """Result of one examination of the environment."""

    subject: str
    found: str
    ok: bool | None
    """Whether the checked package, program or device can be used. None if it is optional and not
    available."""
    advice: str = ""


NO_GPU = DoctorFinding("GPU", "torch sees none", None)


def examine(*, deep: bool = False) -> list[DoctorFinding]:
    """Returns the findings on this environment. Takes as long as several imports of torch.

    If `deep` is True and DeepSpeed is installed, DeepSpeed also trains one step, which takes up to
    a minute.
    """
    torch, gpu = _torch()
    gpus = int(gpu.found.split()[0]) if gpu.ok else 0
    return [
        *_modules(),
        torch,
        gpu,
        *_rates(gpus),
        *(_package(name, extra) for name, extra in EXTRAS.items()),
        _deepspeed(deep),
        _neuron(),
    ]


def examine_site(site: Site) -> list[DoctorFinding]:
    """Returns a list with one finding: whether the container of a site starts on this machine, and
    whether the kit and the working directory are visible inside the container.
    """
    slurm = site.slurm
    if slurm is None or not slurm.is_in_container:
        return [DoctorFinding("container", f"{site.name} has none", None)]
    if site.login or slurm.has_tasks_in_container:
        advice = "the first second of a job tries it, before any rank starts"
        if slurm.has_tasks_in_container:
            advice = "srun starts it: try `srun` with the site's srun_options"
        return [DoctorFinding("container", "not tried from this machine", None, advice)]
    script = container_trial(slurm, str(Path.cwd()))
    try:
        done = _run(("bash", "-lc", script), timeout=PROBE_LIMIT_S)
    except subprocess.TimeoutExpired:
        done = subprocess.CompletedProcess(script, 1, "", f"no answer in {PROBE_LIMIT_S:.0f} s")
    if done.returncode:
        advice = f"bind {PACKAGE_ROOT} and {Path.cwd()} under the same paths (site.slurm.container)"
        return [DoctorFinding("container", _last(done.stderr), False, advice)]
    return [
        DoctorFinding(
            "container", "its python3 finds the kit and torch, and sees this folder", True
        )
    ]


def _modules() -> list[DoctorFinding]:
    """Returns findings on the modules of this environment. A first finding lists modules that ranks
    or notebooks would import from the user's own folders instead. Another finding reports that a
    different environment is active.
    """
    shadows = find_shadowing_modules()
    advice = shadows[0].advice if shadows else ""
    found = summary(shadows) or "all from this environment"
    findings = [DoctorFinding("modules", found, not shadows, advice)]
    is_virtual = sys.prefix != sys.base_prefix
    # Conda's base environment is often active in addition to a virtual environment, which is
    # harmless.
    variable = "VIRTUAL_ENV" if is_virtual else "CONDA_PREFIX"
    active = os.environ.get(variable, sys.prefix)
    if os.path.realpath(active) != os.path.realpath(sys.prefix):
        found = f"{sys.prefix}, while {active} is active ({variable})"
        advice = "start the `kit` of the active environment"
        findings.append(DoctorFinding("environment", found, None, advice))
    if here := find_shadowing_files():
        names = ", ".join(shadow.name for shadow in here)
        found = f"has files named like modules, which notebooks here import, not ranks: {names}"
        findings.append(DoctorFinding("this folder", found, None, "rename these files"))
    return findings


def _torch() -> tuple[DoctorFinding, DoctorFinding]:
    """Returns (finding on the import of torch, finding on the GPUs that torch can use)."""
    done = _run(code_command(TORCH_PROBE))
    if not done.stdout:
        found = f"cannot be imported: {_last(done.stderr)}"
        return DoctorFinding("torch", found, False, install_command()), NO_GPU
    version, _, seen = done.stdout.strip().partition("\n")
    is_fast = float(version.split()[-2]) < SLOW_IMPORT_S
    advice = ""
    if not is_fast:
        advice = "copy the environment to each node's own disk (broadcast in the site file)"
    torch = DoctorFinding("torch", version, is_fast, advice)
    if done.returncode:  # The driver killed the process while torch counted the GPUs.
        found = f"cannot be counted: {_last(done.stderr)} (code {done.returncode})"
        return torch, DoctorFinding("GPU", found, False, "see `nvidia-smi` or `rocm-smi`")
    if seen:
        return torch, DoctorFinding("GPU", seen, True)
    if shutil.which("nvidia-smi"):
        advice = "a newer driver, or torch's wheel for the one of `nvidia-smi`"
        return torch, dataclasses.replace(NO_GPU, ok=False, advice=advice)
    return torch, NO_GPU


def _rates(gpus: int) -> list[DoctorFinding]:
    """Returns findings on the speed of matrix products and of an all-reduce. Both are measured with
    one rank per GPU, or with two CPU ranks if there is no GPU.
    """
    from kit.measure.site import by_ranks

    ranks, kind = (gpus, "GPU ranks over NCCL") if gpus else (2, "processes over gloo")
    try:
        report = by_ranks("kit.measure.node_check", ranks, PROBE_LIMIT_S)
    except (RuntimeError, JobError) as error:
        advice = f"{install_command()} again; no run of several ranks works"
        if gpus:
            advice = "see NCCL_DEBUG=INFO kit doctor"
        found = f"{ranks} {kind} failed: {_last(str(error))}"
        return [DoctorFinding("matrix product, all-reduce", found, False, advice)]
    flops_per_s = report["nodes"][0]["matmul_flops_per_s"]
    product = DoctorFinding(
        "matrix product",
        f"{short_number(flops_per_s / 1e12)} TFLOP/s in {report['dtype']}, the slower of"
        f" {ranks} {kind}",
        True,
    )
    bytes_per_s = report["all_reduce_bytes_per_s"]
    if not bytes_per_s:
        return [product, DoctorFinding("all-reduce", "one GPU has none to add to", None)]
    found = f"right, {short_number(bytes_per_s / 1e9)} GB/s sent by each of {ranks} {kind}"
    return [product, DoctorFinding("all-reduce", found, True)]


def _package(name: str, extra: str) -> DoctorFinding:
    try:
        return DoctorFinding(name, importlib.metadata.version(name), True)
    except importlib.metadata.PackageNotFoundError:
        return DoctorFinding(name, "not installed", None, install_command(extra))


def _deepspeed(deep: bool) -> DoctorFinding:
    """Returns the finding on DeepSpeed. If `deep` is True, DeepSpeed trains a step, since an
    installed DeepSpeed can fail to start because of a compiler, a lock or torch.
    """
    installed = _package("deepspeed", "deepspeed")
    if not installed.ok or not deep:
        return installed
    probe = source_command("kit.engines.deepspeed.probe")
    try:
        done = _run(probe, timeout=PROBE_LIMIT_S)
    except subprocess.TimeoutExpired:
        done = subprocess.CompletedProcess(probe, 1, "", f"no step in {PROBE_LIMIT_S:.0f} s")
    if done.returncode:
        found = f"{installed.found}, but cannot train: {_last(done.stderr)}"
        advice = f"{install_command('deepspeed')}, or engine 'native'; see {shlex.join(probe)}"
        return DoctorFinding("deepspeed", found, False, advice)
    return DoctorFinding("deepspeed", f"{installed.found}, made a training step", True)


def _neuron() -> DoctorFinding:
    """Returns the finding on NeuronX Distributed. Its packages are only imported. A training step
    would need a Trainium device and minutes of compilation.
    """
    from kit.engines.neuron.probe import INSTALL, has_device, probe

    name = "neuronx-distributed"
    status = probe()
    if not status.versions:
        return DoctorFinding(name, "not installed", None, f"on a Trainium host: {INSTALL}")
    if status.state == "ok":
        device = "a" if has_device() else "no"
        found = f"{status.versions[name]}, imported; {device} Neuron device is here"
        return DoctorFinding(
            name, found, has_device() or None, "stay on SDK 2.28, the last that trains"
        )
    return DoctorFinding(name, f"{status.state}: {status.reason}", False, status.message)


def _run(
    command: tuple[str, ...], timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end and returns its output as text."""
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def _last(text: str) -> str:
    """Returns the last line that a process printed."""
    return (text.strip().splitlines() or ["it died"])[-1]
