"""The layout is what kit/README.md says: whom a module may ask, and how large each part may get."""

import ast
import collections
import functools
import graphlib
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from kit.commands.app import app
from tests.sources import ROOT, nodes

LONGEST_FILE, LONGEST_FUNCTION = 379, 120
"""Lines: what the house has now. They may fall; a higher one is argued for in LOG.md."""
LARGEST_FILE, LARGEST_FUNCTION = 251, 42
"""Statements, which no formatter packs or stretches."""


def rooms(package: str) -> dict[str, int]:
    """Returns a package's rooms in kit/README.md, each with its line: those above are lower."""
    text = (ROOT / "kit" / "README.md").read_text()
    cells = enumerate(re.findall(rf"^\| (`{package}\.[^|]*) \|", text, re.M))
    return {name: line for line, cell in cells for name in re.findall(r"`([\w.]+)`", cell)}


@functools.cache
def modules() -> dict[str, Path]:
    """Returns the files of all modules by name."""
    names = {file: ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in nodes()}
    return {name.removesuffix(".__init__"): file for file, name in names.items()}


@functools.cache
def imports() -> dict[str, set[str]]:
    """Returns for each module those of ours that it imports, at its top or anywhere in it."""
    files = modules()
    found = {}
    for module, file in files.items():
        names = set()
        for node in nodes()[file]:
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & {*files}
                names |= inner or {node.module}
        found[module] = names & set(files) - {module}
    return found


def room_of(module: str, known: dict[str, int]) -> str:
    """Returns the innermost room that a module is in."""
    return max((room for room in known if f"{module}.".startswith(f"{room}.")), key=len, default="")


def upward(graph: dict[str, set[str]], known: dict[str, int]) -> list[str]:
    """Returns the imports that go from a lower room to a higher one."""
    level = {module: known.get(room_of(module, known), -1) for module in graph}
    pairs = [(a, b) for a in graph for b in graph[a] if a.split(".")[0] == b.split(".")[0]]
    return [f"{a} -> {b}" for a, b in pairs if level[b] > level[a]]


@pytest.mark.parametrize("package", ["kit", "cluster"])
def test_every_module_is_in_a_room_of_the_table(package):
    known = rooms(package)
    own = [module for module in imports() if module.startswith(f"{package}.")]
    assert not [module for module in own if not room_of(module, known)]
    assert not [room for room in known if room not in imports()]


@pytest.mark.parametrize("package", ["kit", "cluster"])
def test_no_import_goes_from_a_lower_room_to_a_higher_one(package):
    graph = without_faces()
    assert upward(graph, rooms(package)) == []


def without_faces() -> dict[str, set[str]]:
    """Returns all imports but those of and by `kit` and `cluster`, which hand on the rest."""
    faces = {"kit", "cluster"}
    return {module: names - faces for module, names in imports().items() if module not in faces}


def test_an_upward_import_is_found():
    graph = {"kit.data.corpus": {"kit.monitor.alerts"}, "kit.monitor.alerts": set()}
    assert upward(graph, rooms("kit")) == ["kit.data.corpus -> kit.monitor.alerts"]


def test_no_circle():
    assert list(graphlib.TopologicalSorter(without_faces()).static_order())


def test_a_rank_imports_what_it_trains_with():
    """No planner, dashboard or converter: thousands of ranks read these files from one file system.

    Building data, measuring and launching come with the faces of `kit` and `kit.data`.
    """
    command = [sys.executable, "-c", "import sys, kit.train; print(*sys.modules)"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = {name for name in done.stdout.split() if f"{name}.".startswith("kit.")}
    known = rooms("kit")
    assert {room_of(name, known) for name in found - {"kit"}} == RANK_ROOMS
    assert len(found) <= RANK_MODULES


def test_files_and_functions_stay_short():
    for file, (tree, *parts) in nodes().items():
        lines = len(file.read_text().splitlines())
        assert lines <= LONGEST_FILE and statements(tree) <= LARGEST_FILE, file
        for node in parts:
            if isinstance(node, ast.FunctionDef):
                lines = node.end_lineno - node.lineno + 1
                small = statements(node) - 1 <= LARGEST_FUNCTION
                assert lines <= LONGEST_FUNCTION and small, f"{file}: {node.name}"


STATEMENTS = {
    "cluster": 1520,  # a frozen lock's file goes; meanings of fields; ConfigError, not TypeError
    "cluster/kubernetes": 177,
    "cluster/local": 261,
    "cluster/login": 351,  # a path with ~ is looked for on the login node again
    "cluster/sandbox": 226,
    "cluster/slurm": 706,
    "kit": 904,  # recompute_layers by device, instead of all blocks or none; uneven stages
    "kit/commands": 932,  # panels, --version, the next step after each command
    "kit/convert": 715,
    "kit/data": 1181,
    "kit/engines": 1305,
    "kit/estimate": 8,
    "kit/estimate/choose": 911,  # as few blocks recomputed as fit, instead of all; code bases
    "kit/estimate/fit": 638,  # derived times, rows of a site, formats of a run; models left out
    "kit/estimate/theory": 1138,  # a share of blocks, instead of all; narrow formats, power, units
    "kit/estimate/tuning": 245,  # imports of figures.py, instead of a tune.py of 373 lines
    "kit/estimate/validation": 229,  # few readings, --site, rows without a machine
    "kit/evaluate": 1567,  # many notes fold; a step is looked for first, for a limit of doctor
    "kit/foreign": 511,  # which blocks Megatron recomputes, instead of "all"
    "kit/measure": 303,
    "kit/model": 275,  # a stage without blocks
    "kit/monitor": 1912,  # losses that jump, gradients not finite, shaded intervals, in figures
    "kit/papers": 1818,  # verdicts from kinds and numbers, how layouts are known, names at lines
    "kit/parallel": 400,  # agreement of ranks, which stood in kit.run
    "kit/rehearsal": 174,
    "kit/run": 815,  # a column without values takes no memory: 90 MB of a million steps
    "kit/show": 309,  # the same drawing gives the same bytes, instead of PNGs beside it
    "kit/trainer": 780,  # callbacks, not an order that comments hold; 0.2 ms less a step
}
"""The most that each folder may hold: statements of Python without docstrings, since lines can be
packed.

Whoever raises one says in the same diff, beside it, what the new code replaces.
"""
RANK_MODULES = 57
RANK_ROOMS = {
    f"kit.{room}"
    for room in (
        "data engines errors launcher measure model_rules parallel plan recipe rules run spec"
        " torch_private train trainer"
    ).split()
}
"""Of the kit, what `import kit.train` loads: modules, and the rooms that they are in."""
COMMANDS, OPTIONS, OPTIONS_OF_ONE = 21, 84, 11
"""Of the command line; `--json`, which all take, counts once."""
STARTED_ABOVE = {
    ("cluster.poll", "f'cluster.{scheduler}'"),
    ("kit.commands.data", "kit"),
    ("kit.evaluate.benchmarks", "kit"),
    ("kit.launcher", "kit.train"),
}
"""Modules that a lower room starts by name, with `python -m` or `import_module`, which no import
shows."""


def folder_of(file: Path) -> str:
    """Returns `kit/run`, `kit/estimate/fit`, or `kit` for a file at the top of its package."""
    parts = file.relative_to(ROOT).parent.parts
    return "/".join(parts[: 3 if parts[:2] == ("kit", "estimate") else 2])


def statements(tree: ast.AST) -> int:
    """Returns the number of statements that are not docstrings."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    values = [node.value for node in found if isinstance(node, ast.Expr)]
    texts = [value for value in values if isinstance(value, ast.Constant)]
    return len(found) - sum(isinstance(text.value, str) for text in texts)


def test_each_folder_keeps_to_its_statements():
    found = collections.Counter()
    for file, (tree, *_) in nodes().items():
        found[folder_of(file)] += statements(tree)
    assert {name: n for name, n in found.items() if n > STATEMENTS.get(name, 0)} == {}
    low = {folder for folder, most in STATEMENTS.items() if found[folder] < 0.97 * most}
    assert not low, "lower them"


def test_the_command_line_keeps_to_its_size():
    whole = typer.main.get_command(app)
    options = [
        sum(parameter.param_type_name == "option" for parameter in command.params)
        for _, command in leaves(whole)
    ]
    assert len(options) <= COMMANDS and max(options) <= OPTIONS_OF_ONE
    assert sum(options) + len(whole.params) <= OPTIONS


def leaves(command, name: str = ""):
    """Yields the commands that do something, by their words."""
    for word, inner in getattr(command, "commands", {}).items():
        yield from leaves(inner, f"{name} {word}".strip())
    if not hasattr(command, "commands"):
        yield name, command


def test_what_is_started_by_name_is_known():
    files, found = modules(), set()
    for module, file in files.items():
        known = rooms(module.split(".")[0])
        for name in set().union(*map(started, nodes()[file])):
            here, there = (known.get(room_of(each, known), -1) for each in (module, name))
            if there > here or name not in files or name == "kit":
                found.add((module, name))
    assert found == STARTED_ABOVE


def started(node: ast.AST) -> set[str]:
    """Returns the modules that a node of a syntax tree starts by name."""
    words = [each.value for each in getattr(node, "elts", ()) if isinstance(each, ast.Constant)]
    pairs = itertools.pairwise(words)
    names = {after for word, after in pairs if word == "-m" and after in modules()}
    if isinstance(node, ast.Call):
        function = getattr(node.func, "attr", getattr(node.func, "id", ""))
        asked = ast.unparse(node.args[0]) if function == "import_module" else ""
        names |= {asked} if "cluster." in asked else set()
    return names


def test_private_names_of_torch_are_in_one_file():
    private = re.compile(r"(torch|dist)(\.\w+)*\._[a-z]\w*(\.\w+)*")
    found = set()
    for file, parts in nodes().items():
        for node in parts:
            names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{each.name}" for each in node.names]
            if any(private.fullmatch(name) for name in names):
                found.add(str(file.relative_to(ROOT)))
    assert found == {"kit/torch_private.py"}
