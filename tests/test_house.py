"""The layout is what kit/README.md says: whom a module may ask, and how long a file or a
function may get.
"""

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LONGEST_FILE, LONGEST_FUNCTION = 460, 120
"""Lines of 100 columns: what the house has now. They may fall; a higher one is argued for in LOG.md."""


def rooms(package: str) -> dict[str, int]:
    """Returns the rooms of a package in the tables of kit/README.md, each with its line: those
    above are lower.
    """
    cells = re.findall(
        rf"^\| (`{package}\.[^|]*) \|", (ROOT / "kit" / "README.md").read_text(), re.M
    )
    return {
        name: line for line, cell in enumerate(cells) for name in re.findall(r"`([\w.]+)`", cell)
    }


@functools.cache
def imports() -> dict[str, set[str]]:
    """Returns for each module those of ours that it imports, at its top, in its functions or for
    types.
    """
    files = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for package in ("kit", "cluster")
        for file in (ROOT / package).rglob("*.py")
    }
    found = {}
    for module, file in files.items():
        names = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {
                    name for a in node.names if (name := f"{node.module}.{a.name}") in files
                } or {node.module}
        found[module] = names & set(files) - {module}
    return found


def room_of(module: str, known: dict[str, int]) -> str:
    """Returns the innermost room that a module is in."""
    return max((room for room in known if f"{module}.".startswith(f"{room}.")), key=len, default="")


def upward(graph: dict[str, set[str]], known: dict[str, int]) -> list[str]:
    """Returns the imports that go from a lower room to a higher one."""
    level = {module: known.get(room_of(module, known), -1) for module in graph}
    return [
        f"{a} -> {b}"
        for a in graph
        for b in graph[a]
        if a.split(".")[0] == b.split(".")[0]
        if level[b] > level[a]
    ]


@pytest.mark.parametrize("package", ["kit", "cluster"])
def test_every_module_is_in_a_room_of_the_table(package):
    known = rooms(package)
    faces = {package}
    assert not [
        m
        for m in imports()
        if m.split(".")[0] == package and m not in faces and not room_of(m, known)
    ]
    assert not [room for room in known if room not in imports()]


@pytest.mark.parametrize("package", ["kit", "cluster"])
def test_no_import_goes_from_a_lower_room_to_a_higher_one(package):
    graph = {
        module: names for module, names in imports().items() if module != package
    }  # its face hands on the rest
    assert (
        upward(
            {m: {n for n in names if n != package} for m, names in graph.items()}, rooms(package)
        )
        == []
    )


def test_an_upward_import_is_found():
    graph = {"kit.data.corpus": {"kit.monitor.alerts"}, "kit.monitor.alerts": set()}
    assert upward(graph, rooms("kit")) == ["kit.data.corpus -> kit.monitor.alerts"]


def test_cluster_does_not_know_kit():
    assert not [
        m
        for m, names in imports().items()
        if m.startswith("cluster")
        for n in names
        if n.startswith("kit")
    ]


def test_no_circle():
    graph = {
        module: {n for n in names if n not in ("kit", "cluster")}
        for module, names in imports().items()
    }
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_files_and_functions_stay_short():
    long_files, long_functions = [], []
    for file in [*(ROOT / "kit").rglob("*.py"), *(ROOT / "cluster").rglob("*.py")]:
        text = file.read_text()
        if (lines := len(text.splitlines())) > LONGEST_FILE:
            long_files.append(f"{file.relative_to(ROOT)}: {lines}")
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.FunctionDef)
                and (lines := node.end_lineno - node.lineno + 1) > LONGEST_FUNCTION
            ):
                long_functions.append(f"{file.relative_to(ROOT)}:{node.name}: {lines}")
    assert not long_files and not long_functions
