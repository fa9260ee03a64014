"""Record of names that torch 2.9 lacks and of signatures of its functions, in
data/trainium_torch.json. Torch 2.9 is the release on Trainium hosts.

`refuse_what_it_lacks` hides the missing names from modules of the kit while they are imported. When
a module of the kit imports a further module of torch, write the record again. This command, which
needs the environment of `make test-nxd`, writes it:

`build/nxd/bin/python -m tests.engines.trainium_torch .venv/bin/python`
"""

import ast
import builtins
import functools
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).parent / "data" / "trainium_torch.json"


@functools.cache
def record() -> dict[str, Any]:
    """Returns the record as a dict. "lacks" maps each torch module to the names that torch 2.9
    lacks, with operators under "torch.ops". "torch" and "torch_xla" map functions to their
    signatures.
    """
    return json.loads(RECORD.read_text())


@functools.cache
def lacking() -> frozenset[str]:
    """Returns the full names of the modules, functions and operators that torch 2.9 lacks."""
    lacks = record()["lacks"].items()
    return frozenset(f"{module}.{name}" for module, names in lacks for name in names)


# What the kit uses --------------------------------------------------------------------------------


def sources() -> Iterator[tuple[Path, ast.Module]]:
    """Yields (file, syntax tree) of each module of the kit."""
    for file in sorted((ROOT / "kit").rglob("*.py")):
        yield file, ast.parse(file.read_text())


def modules_used() -> list[str]:
    """Returns the names of the torch modules that the kit imports, or from which the kit imports
    names.
    """
    found = {"torch"}
    for _, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found |= {
                    str(node.module),
                    *(f"{node.module}.{alias.name}" for alias in node.names),
                }
    return sorted(name for name in found if name.split(".")[0] == "torch" and is_module(name))


def is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def group_calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Yields (place, function name, syntax node of the call) for each call `dist.NAME(...)` in the
    kit.
    """
    for file, tree in sources():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "dist":
                yield f"{file.relative_to(ROOT)}:{node.lineno}", node.func.attr, node


# Refusing -----------------------------------------------------------------------------------------


class Old(types.ModuleType):
    """A torch module without the names that torch 2.9 lacks. Modules of the kit receive it instead
    of the real module.
    """

    def __init__(self, name: str, real: types.ModuleType) -> None:
        super().__init__(name)
        self.__dict__["real"] = real

    def __getattr__(self, name: str) -> Any:
        full = f"{self.__name__}.{name}"
        if full in lacking():
            raise AttributeError(f"torch 2.9 has no {full}")
        found = getattr(self.real, name)
        return Old(full, found) if isinstance(found, types.ModuleType) else found


def refuse_what_it_lacks() -> None:
    """Changes imports in this process, so that modules of the kit can import only names that torch
    2.9 has.
    """
    real_import, covered = builtins.__import__, record()["lacks"].keys()

    def import_old(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        importer = (globals or {}).get("__name__", "").split(".")[0]
        if importer != "kit" or level or name.split(".")[0] != "torch":
            return real_import(name, globals, locals, fromlist, level)
        if name in lacking():
            raise ModuleNotFoundError(f"torch 2.9 has no module {name}", name=name)
        # Python would search the loaded modules, so each name is checked here.
        for each in fromlist or ():
            if f"{name}.{each}" in lacking():
                raise ImportError(f"torch 2.9 has no {name}.{each}", name=name)
        assert name in covered, f"{name} is not in {RECORD.name}; {__doc__}"
        return Old(
            name if fromlist else "torch", real_import(name, globals, locals, fromlist, level)
        )

    builtins.__import__ = import_old


# Recording ----------------------------------------------------------------------------------------


def inventory(modules: list[str]) -> dict[str, list[str]]:
    """Returns a dict from each module to the names that it has in the installed torch. The key
    "torch.ops" holds the operators.
    """
    found = {}
    for name in filter(is_module, modules):
        module = importlib.import_module(name)
        inside = {found.name for found in pkgutil.iter_modules(getattr(module, "__path__", []))}
        found[name] = sorted(inside | {each for each in dir(module) if not each.startswith("__")})
    every = torch._C._dispatch_get_all_op_names()
    operators = {name.split(".")[0].replace("::", ".") for name in every}
    return found | {"torch.ops": sorted(operators)}


def signatures(names: set[str]) -> dict[str, list[list[str]]]:
    """Returns the signatures of functions of `torch.distributed`, in the format of
    nxd_signatures.json. The values of defaults are left out.
    """
    return {
        name: [
            [p.name, p.kind.name.lower(), *([] if p.default is p.empty else ["..."])]
            for p in inspect.signature(getattr(dist, name)).parameters.values()
        ]
        for name in sorted(names)
        if inspect.isfunction(getattr(dist, name))  # Functions written in C++ have no signature.
    }


def make(newer_python: str) -> dict[str, Any]:
    """Returns the record. This process must have torch 2.9 and Torch-XLA. The Python `newer_python`
    must have a newer torch.
    """
    asked = [newer_python, "-m", "tests.engines.trainium_torch", "inventory"]
    said = subprocess.run(asked, cwd=ROOT, check=True, capture_output=True, text=True)
    newer = json.loads(said.stdout)
    older = inventory(list(newer))
    both = {module: names for module, names in newer.items() if module in older}
    lacks = {module: sorted(set(names) - set(older[module])) for module, names in both.items()}
    called = {name for _, name, _ in group_calls()}
    plain = signatures(called)
    import torch_xla.distributed.xla_backend  # noqa: F401  # pyright: ignore[reportMissingImports]

    xla = {name: found for name, found in signatures(called).items() if found != plain[name]}
    return {"lacks": lacks, "torch": plain, "torch_xla": xla}


if __name__ == "__main__":
    if sys.argv[1] == "inventory":
        print(json.dumps(inventory(modules_used())))
    else:
        tables = [
            f'"{name}": {{\n'
            + ",\n".join(f'  "{key}": {json.dumps(row)}' for key, row in table.items())
            + "\n}"
            for name, table in make(sys.argv[1]).items()
        ]
        RECORD.write_text("{" + ",\n".join(tables) + "}\n")
