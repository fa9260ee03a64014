"""Checks whether NeuronX Distributed (NxD) can train on this machine. If it cannot, reports which
package is missing and where to get it.

NxD training is at the end of its life. SDK 2.28 (PyTorch 2.9) is the last release that AWS
recommends for training, and PyTorch/XLA training has not been supported since SDK 2.30. The
successor of NxD is PyTorch itself on Neuron, in public beta since SDK 2.33 for trn2 and trn3. It
has a device and a process group called `neuron`, and supports DTensor, FSDP2 and pipelining, on
which the kit's native engine is based. The kit does not use this successor yet: engine `native`
runs on CPUs and GPUs only. Source: release notes and "TorchNeuron" of the AWS Neuron documentation
(awsdocs-neuron.readthedocs-hosted.com), 2025-12 to 2026-10.
"""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from cluster.interpreter import PACKAGE_ROOT, code_command
from kit.errors import MissingPackageError

State = Literal["absent", "placeholder", "wrong version", "broken", "ok"]

INSTALL = "pip install -r requirements/trainium.txt, in a clone of the kit"
PACKAGES = {
    "neuronx-distributed": "neuronx_distributed",
    "torch-neuronx": "torch_neuronx",
    "torch-xla": "torch_xla",
}
"""Maps the name of a package to the name of the module that it installs and that training
imports."""
NO_CODE = "is the public index's placeholder, which holds no code"
PLACEHOLDERS = {"neuronx-distributed": "0.1", "torch-neuronx": "1.0"}
"""Maps the name of a package to a version on the public package index that installs without an
error but contains no code. The real packages are in AWS's own index."""
SUPPORTED = ("0.17", "0.18")
"""Supported versions of neuronx-distributed, from SDK 2.28 and 2.29. They are the last SDKs that
have NxD training and run on a Python version that the kit supports."""
ENGINE = "kit.engines.neuron.checkpoint"
"""Module whose import also imports all other modules of the Neuron engine. `kit doctor` imports
this module to check that the engine works with the installed torch."""
IMPORT_LIMIT_S = 300.0
"""Longest time, in seconds, that the import of NxD in a child process may take."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeuronStatus:
    """Whether NxD can train on this machine, and the reason if it cannot."""

    state: State
    reason: str
    """Sentence with the reason why NxD cannot train. Empty if NxD can train."""
    versions: dict[str, str]
    """Versions of the packages in PACKAGES that are installed, by package name."""

    @property
    def message(self) -> str:
        """The reason why NxD cannot train, and what to do about it."""
        return (
            f"plan.engine 'neuron' needs neuronx-distributed {' or '.join(SUPPORTED)}:"
            f" {self.reason} On a Trainium host, in an environment of its own: {INSTALL} (it says"
            " how to add the kit). NxD training has reached its end of life; elsewhere, and for"
            " new work, use plan.engine 'native'."
        )


class NeuronError(MissingPackageError):
    """NxD cannot train on this machine. The message says whether NxD is missing, is a placeholder
    without code, has an unsupported version, or is broken.
    """

    def __init__(self, status: NeuronStatus) -> None:
        ImportError.__init__(self, status.message)


def require_nxd(*, here: bool = False) -> None:
    """Raises NeuronError unless NxD can train.

    NxD is imported in a child process, or in this process if `here` is True. A training rank passes
    True, since it must not start a second process on its NeuronCores.
    """
    status = probe(here=here)
    if status.state != "ok":
        raise NeuronError(status)


def probe(*, here: bool = False) -> NeuronStatus:
    """Returns which packages are installed and whether NxD can train.

    The packages and the kit's engine are imported in a child process, or in this process if `here`
    is True.
    """
    versions = dict[str, str]()
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    state, reason = _judge(versions)
    fault = ""
    if state == "ok":
        fault = _import_here() if here else _import()
    if fault:
        state = "broken"
        reason = f"it is installed but {fault.rstrip('.')}."
        if "WRONG PACKAGE" in fault:
            state = "placeholder"
            reason = f"one of its packages {NO_CODE}."
    return NeuronStatus(state=state, reason=reason, versions=versions)


def has_device() -> bool:
    """Returns whether this machine has a Neuron device."""
    return Path("/dev/neuron0").exists()


def _import_here() -> str:
    """Imports the packages and the kit's engine. Returns the error of the first failed import, or
    "" if all succeed.
    """
    for module in (*PACKAGES.values(), ENGINE):
        try:
            importlib.import_module(module)
        # A library that does not fit the installed torch may raise any exception.
        except Exception as error:
            what = "the kit's engine " if module == ENGINE else ""
            return f"{what}cannot be imported: {type(error).__name__}: {error}"
    return ""


def _judge(versions: dict[str, str]) -> tuple[State, str]:
    """Returns (state, reason), judged only from names and versions of the installed packages.
    Nothing is imported.
    """
    for name, version in versions.items():
        if PLACEHOLDERS.get(name) == version.removesuffix(".post1"):
            return "placeholder", f"{name} {version} {NO_CODE}."
    name = "neuronx-distributed"
    if name not in versions:
        if find_spec(PACKAGES[name]) is None:
            return "absent", "it is not installed."
        return (
            "broken",
            f"{PACKAGES[name]} is on the path but was never installed, so its version is unknown.",
        )
    if ".".join(versions[name].split(".")[:2]) not in SUPPORTED:
        return "wrong version", f"version {versions[name]} is installed."
    if "torch-xla" not in versions and "torch-neuronx" in versions:
        return (
            "wrong version",
            (
                f"torch-neuronx {versions['torch-neuronx']} comes without torch-xla, so it is the"
                " new native PyTorch backend, which NxD does not use."
            ),
        )
    for other in PACKAGES:
        if other not in versions:
            return "absent", f"{other}, which it imports, is not installed."
    return "ok", ""


def _import() -> str:
    """Runs `_import_here` in a child process and returns its result. A child process is used
    because the import reserves the NeuronCores and may crash.
    """
    # The working directory is left out, since `python -m` puts it first in sys.path and its files
    # could hide the installed modules.
    folders = [part for part in sys.path if part and part != os.getcwd()]
    path = os.pathsep.join([*folders, str(PACKAGE_ROOT)])
    code = f"import json; from {__name__} import _import_here; print(json.dumps(_import_here()))"
    try:
        done = subprocess.run(
            code_command(code),
            capture_output=True,
            text=True,
            timeout=IMPORT_LIMIT_S,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return f"could not be imported within {IMPORT_LIMIT_S:.0f} s"
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    said = done.stderr.strip().splitlines() or [f"the process ended with code {done.returncode}"]
    return f"cannot be imported: {said[-1]}"
