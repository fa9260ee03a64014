"""Empty replacements of the closed packages that NxD imports and that only AWS's package index has.

NxD imports these packages for kernels and compilers, which training on the CPU never calls. NxD
uses three facts of the packages: the platform, the size of a host, and the pairs of sending and
receiving ranks. This module provides these facts.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CLOSED = (
    "torch_neuronx",
    "libneuronxla",
    "neuronxcc",
    "nki",
    "nkilib",
    "neuronx_distributed_inference",
)
ABSENT = "libneuronxla.libneuronpjrt_path"
"""Module that must stay missing. If it can be imported, Torch-XLA assumes that the machine is a
Neuron host.
"""
PLATFORM = "NXD_PLATFORM"
"""Environment variable with the name of the platform that NxD receives. The default is trn1."""
PATCHED = ("torch_xla.core.xla_env_vars", "torch_xla.core.xla_model", "torch_xla.runtime")


def installed() -> dict[str, str]:
    """Returns the versions of the packages that must seem installed, by name. The version of NxD is
    read from its source on sys.path.
    """
    spec = importlib.machinery.PathFinder.find_spec("neuronx_distributed")
    found = {"torch_neuronx": "2.9.0.2.12.22436"}
    if spec is not None and spec.origin is not None:
        text = (Path(spec.origin).parent / "_version.py").read_text()
        found["neuronx_distributed"] = text.partition('__version__ = "')[2].partition('"')[0]
    return found


class ClosedPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that returns an empty module for every module of a closed package, and metadata
    for the packages of `installed`.
    """

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in PATCHED:
            spec = importlib.machinery.PathFinder.find_spec(fullname, path)
            if spec is not None:
                spec.loader = Patching(spec.loader)
            return spec
        if fullname == ABSENT or fullname.split(".")[0] not in CLOSED:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        name = getattr(context, "name", None)
        for package, version in installed().items():
            if name is None or name.replace("-", "_") == package:
                yield Installed(package, version)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = EmptyModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "torch_neuronx":
            _register_device_class()
        vars(module).update(FACTS.get(module.__name__, {}))


class Patching(importlib.abc.Loader):
    """Import loader for a module of Torch-XLA. It replaces the functions that need a device by the
    functions in `collectives`.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self.inner.exec_module(module)
        from tests.engines.real_nxd import collectives

        vars(module).update(collectives.replacements(module.__name__))


class Installed(importlib.metadata.Distribution):
    """Metadata of a distribution that has a name and a version, but no files."""

    def __init__(self, name: str, version: str) -> None:
        self.text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"

    def read_text(self, filename: str) -> str | None:
        return self.text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Path:
        return Path(path)


class EmptyModule(types.ModuleType):
    """Empty module in which every name exists. A name in CapWords is an empty class. Any other name
    is a `Nothing` object, which accepts every operation.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = (
            EmptyClass(name, (Nothing,), {})
            if name[0].isupper() and not name.isupper()
            else Nothing()
        )
        setattr(self, name, made)
        return made


class Nothing:
    """Replaces a kernel, a decorator or a constant. Called with one function, it returns the
    function, as a decorator does. Other calls return a new `Nothing`.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        is_decorator = len(arguments) == 1 and callable(arguments[0]) and not named
        return arguments[0] if is_decorator else Nothing()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __getitem__(self, key: Any) -> Any:
        return Nothing()

    def __or__(self, other: Any) -> Any:
        return Nothing()

    __ror__ = __or__


class EmptyClass(type):
    """Metaclass of empty classes, in which every class attribute exists."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


class SourcesAndTargets:
    """Pairs of (source, target) ranks in a ring, which NxD's process groups request from
    torch_neuronx.
    """

    def __init__(self, *, replica_groups: list[list[int]]) -> None:
        self.rank_src_tgt_pairs = {
            rank: list(zip(group, [*group[1:], group[0]], strict=True))
            for group in replica_groups
            for rank in group
        }


def platform(*arguments: Any, **named: Any) -> str:
    """Returns the name of the platform. Replaces torch_neuronx's function `get_platform_target`."""
    return os.environ.get(PLATFORM, "trn1")


def _register_device_class() -> None:
    """Registers `torch.classes.neuron`, which the C++ code of the real torch_neuronx registers."""
    import torch

    vars(torch.classes)["neuron"] = EmptyModule("torch.classes.neuron")


FACTS: dict[str, dict[str, Any]] = {
    "torch_neuronx.utils": {"get_platform_target": platform},
    "torch_neuronx.utils.utils": {
        "get_platform_target": platform,
        "SUPPORTED_TYPES": ["trn1", "trn2", "inf2"],
    },
    "neuronxcc.nki._pre_prod_kernels.collectives": {"CollectivesConfig": SourcesAndTargets},
}
