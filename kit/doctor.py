"""`kit doctor`: what this machine has of what the kit can use, and how to get the rest.

What a launch refuses by itself, such as a full disk, is not looked at. No torch.
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
from cluster.shadows import find_in_working_directory, find_shadows, summary
from cluster.site import Site
from cluster.slurm.script import container_trial
from cluster.state import JobError
from kit.errors import install_command

EXTRAS = {
    "optuna": "plan",
    "scikit-learn": "plan",
    "lm-eval": "eval",
    "transformers": "eval",
    "wandb": "wandb",
}
PROBE_LIMIT_S = 120.0
SLOW_IMPORT_S = 20.0
"""A thousand ranks that read an environment from one shared file system take far longer than one
does."""


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
"""What torch sees; for a process of its own, as a broken driver can end it."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    found: str
    ok: bool | None
    """None: optional, and not here."""
    advice: str = ""


NO_GPU = Finding("GPU", "torch sees none", None)


def examine(*, deep: bool = False) -> list[Finding]:
    """Returns what was found; it takes as long as a few imports of torch.

    With `deep` DeepSpeed, if it is installed, trains a step, which takes up to a minute.
    """
    torch, gpu = _torch()
    return [
        *_modules(),
        torch,
        gpu,
        *_rates(int(gpu.found.split()[0]) if gpu.ok else 0),
        *(_package(name, extra) for name, extra in EXTRAS.items()),
        _deepspeed(deep),
        _neuron(),
    ]


def examine_site(site: Site) -> list[Finding]:
    """Returns a finding: whether the container of a site starts here, and whether the kit and the
    working directory are visible in it.
    """
    slurm = site.slurm
    if slurm is None or not slurm.is_in_container:
        return [Finding("container", f"{site.name} has none", None)]
    if site.login or slurm.has_tasks_in_container:
        advice = "the first second of a job tries it, before any rank starts"
        if slurm.has_tasks_in_container:
            advice = "srun starts it: try `srun` with the site's srun_options"
        return [Finding("container", "not tried from this machine", None, advice)]
    script = container_trial(slurm, str(Path.cwd()))
    try:
        done = _run(("bash", "-lc", script), timeout=PROBE_LIMIT_S)
    except subprocess.TimeoutExpired:
        done = subprocess.CompletedProcess(script, 1, "", f"no answer in {PROBE_LIMIT_S:.0f} s")
    if done.returncode:
        advice = f"bind {PACKAGE_ROOT} and {Path.cwd()} under the same paths (site.slurm.container)"
        return [Finding("container", _last(done.stderr), False, advice)]
    return [Finding("container", "its python3 finds the kit and torch, and sees this folder", True)]


def _modules() -> list[Finding]:
    """Returns findings on modules that are imported from folders of the user instead of this
    environment, in ranks and in notebooks, and on another active environment.
    """
    shadows = find_shadows()
    advice = shadows[0].advice if shadows else ""
    found = summary(shadows) or "all from this environment"
    findings = [Finding("modules", found, not shadows, advice)]
    is_virtual = sys.prefix != sys.base_prefix
    # Conda's base environment is often active beside a virtual environment, which is harmless.
    variable = "VIRTUAL_ENV" if is_virtual else "CONDA_PREFIX"
    active = os.environ.get(variable, sys.prefix)
    if os.path.realpath(active) != os.path.realpath(sys.prefix):
        found = f"{sys.prefix}, while {active} is active ({variable})"
        advice = "start the `kit` of the active environment"
        findings.append(Finding("environment", found, None, advice))
    if here := find_in_working_directory():
        names = ", ".join(shadow.name for shadow in here)
        found = f"has files named like modules, which notebooks here import, not ranks: {names}"
        findings.append(Finding("this folder", found, None, "rename these files"))
    return findings


def _torch() -> tuple[Finding, Finding]:
    """Returns how long torch took to import, and which GPUs it sees."""
    done = _run(code_command(TORCH_PROBE))
    if not done.stdout:
        told = f"cannot be imported: {_last(done.stderr)}"
        return Finding("torch", told, False, install_command()), NO_GPU
    told, _, seen = done.stdout.strip().partition("\n")
    is_fast = float(told.split()[-2]) < SLOW_IMPORT_S
    advice = "copy the environment to each node's own disk (broadcast in the site file)"
    torch = Finding("torch", told, is_fast, "" if is_fast else advice)
    if done.returncode:  # The driver ended the process while the GPUs were counted.
        found = f"cannot be counted: {_last(done.stderr)} (code {done.returncode})"
        return torch, Finding("GPU", found, False, "see `nvidia-smi` or `rocm-smi`")
    if seen:
        return torch, Finding("GPU", seen, True)
    if shutil.which("nvidia-smi"):
        advice = "a newer driver, or torch's wheel for the one of `nvidia-smi`"
        return torch, dataclasses.replace(NO_GPU, ok=False, advice=advice)
    return torch, NO_GPU


def _rates(gpus: int) -> list[Finding]:
    """Has a rank for each GPU, or two on the CPU, multiply matrices and add up a tensor over all
    of them.
    """
    from kit.measure.site import by_ranks

    ranks, what = (gpus, "GPU ranks over NCCL") if gpus else (2, "processes over gloo")
    try:
        seen = by_ranks("kit.measure.node_check", ranks, PROBE_LIMIT_S)
    except (RuntimeError, JobError) as error:
        again = f"{install_command()} again; no run of several ranks works"
        advice = "see NCCL_DEBUG=INFO kit doctor" if gpus else again
        told = f"{ranks} {what} failed: {_last(str(error))}"
        return [Finding("matrix product, all-reduce", told, False, advice)]
    rate = seen["nodes"][0]["matmul_flops_per_s"]
    sent = seen["all_reduce_bytes_per_s"]
    told = f"{rate / 1e12:.3g} TFLOP/s in {seen['dtype']}, the slower of {ranks} {what}"
    summed = f"right, {(sent or 0) / 1e9:.3g} GB/s sent by each of {ranks} {what}"
    return [
        Finding("matrix product", told, True),
        Finding("all-reduce", summed if sent else "one GPU has none to add to", bool(sent) or None),
    ]


def _package(name: str, extra: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name), True)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "not installed", None, install_command(extra))


def _deepspeed(deep: bool) -> Finding:
    """With `deep` made to train one step, since it can be installed and fail to start: a
    compiler, a lock, a torch.
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
        told = f"{installed.found}, but cannot train: {_last(done.stderr)}"
        advice = f"{install_command('deepspeed')}, or engine 'native'; see {shlex.join(probe)}"
        return Finding("deepspeed", told, False, advice)
    return Finding("deepspeed", f"{installed.found}, made a training step", True)


def _neuron() -> Finding:
    """Only its packages are tried: a training step would need a Trainium device and minutes of
    compilation.
    """
    from kit.engines.neuron.probe import INSTALL, has_device, probe

    name = "neuronx-distributed"
    status = probe()
    if not status.versions:
        return Finding(name, "not installed", None, f"on a Trainium host: {INSTALL}")
    if status.state == "ok":
        device = "a" if has_device() else "no"
        told = f"{status.versions[name]}, imported; {device} Neuron device is here"
        return Finding(name, told, has_device() or None, "stay on SDK 2.28, the last that trains")
    return Finding(name, f"{status.state}: {status.reason}", False, status.message)


def _run(
    command: tuple[str, ...], timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end and returns its output as text."""
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def _last(text: str) -> str:
    """Returns the last line of what a process said."""
    return (text.strip().splitlines() or ["it died"])[-1]
