"""Rules of the source code. Modules import only from lower layers, as listed in kit/README.md, and
some tasks are done in one module only.
"""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kit.engines.capabilities import ENGINES
from tests.support.sources import ROOT, nodes


def layers(package: str) -> dict[str, int]:
    """Returns a dict from each layer of a package to its line number in kit/README.md. Lower layers
    have smaller numbers.
    """
    text = (ROOT / "kit" / "README.md").read_text()
    cells = enumerate(re.findall(rf"^\| (`{package}\.[^|]*) \|", text, re.M))
    return {name: line for line, cell in cells for name in re.findall(r"`([\w.]+)`", cell)}


@functools.cache
def modules() -> dict[str, Path]:
    """Returns a dict from the name of each module to its file."""
    names = {file: ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in nodes()}
    return {name.removesuffix(".__init__"): file for file, name in names.items()}


@functools.cache
def imports() -> dict[str, set[str]]:
    """Returns for each module the modules of `kit` and `cluster` that it imports, at module level
    or inside functions.
    """
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


def layer_of(module: str, known: dict[str, int]) -> str:
    """Returns the most specific layer that contains a module, or an empty string."""
    return max(
        (layer for layer in known if f"{module}.".startswith(f"{layer}.")), key=len, default=""
    )


def upward(graph: dict[str, set[str]], known: dict[str, int]) -> list[str]:
    """Returns the imports of a higher layer by a lower layer, as texts "importing module ->
    imported module".
    """
    level = {module: known.get(layer_of(module, known), -1) for module in graph}
    pairs = [(a, b) for a in graph for b in graph[a] if a.split(".")[0] == b.split(".")[0]]
    return [f"{a} -> {b}" for a, b in pairs if level[b] > level[a]]


@pytest.mark.parametrize("package", ["kit", "cluster"])
def test_every_module_is_in_a_layer(package):
    known = layers(package)
    own = [module for module in imports() if module.startswith(f"{package}.")]
    assert not [module for module in own if not layer_of(module, known)]
    assert not [layer for layer in known if layer not in imports()]


@pytest.mark.parametrize("package", ["kit", "cluster"])
def test_no_module_imports_a_higher_layer(package):
    graph = without_faces()
    assert upward(graph, layers(package)) == []


def without_faces() -> dict[str, set[str]]:
    """Returns all imports except those from or by the top-level packages `kit` and `cluster`, which
    only re-export other modules.
    """
    faces = {"kit", "cluster"}
    return {module: names - faces for module, names in imports().items() if module not in faces}


def test_upward_import_is_found():
    graph = {"kit.data.corpus": {"kit.monitor.alerts"}, "kit.monitor.alerts": set()}
    assert upward(graph, layers("kit")) == ["kit.data.corpus -> kit.monitor.alerts"]


def test_imports_have_no_cycle():
    assert list(graphlib.TopologicalSorter(without_faces()).static_order())


def test_ranks_import_only_training_layers():
    """Ranks do not import the planner, the dashboard or converters, because thousands of ranks read
    the imported files from one file system.

    Code that builds data is allowed, because `kit.data` imports it.
    """
    command = [sys.executable, "-c", "import sys, kit.train; print(*sys.modules)"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = {name for name in done.stdout.split() if f"{name}.".startswith("kit.")}
    known = layers("kit")
    assert {layer_of(name, known) for name in found - {"kit"}} == RANK_LAYERS


RANK_LAYERS = {
    f"kit.{layer}"
    for layer in (
        "config data engines engines.capabilities errors parallel run torch_private train trainer"
    ).split()
}
"""Layers of the kit that a rank imports with `import kit.train`."""
STARTED_ABOVE = {
    ("cluster.poll", "f'cluster.{scheduler}'"),
    ("kit.cli.data", "kit"),
    ("kit.launcher", "kit"),
    ("kit.launcher", "kit.train"),
}
"""Pairs (module, name that it starts). The module starts a module of a higher layer by its name,
with `python -m` or `import_module`, so no import statement shows this."""


def test_modules_started_by_name_are_listed():
    files, found = modules(), set()
    for module, file in files.items():
        known = layers(module.split(".")[0])
        for name in set().union(*map(started, nodes()[file])):
            here, there = (known.get(layer_of(each, known), -1) for each in (module, name))
            if there > here or name not in files or name == "kit":
                found.add((module, name))
    assert found == STARTED_ABOVE


def started(node: ast.AST) -> set[str]:
    """Returns the modules that a node of a syntax tree starts by name.

    No other call starts Python, which test_python_is_started_by_one_module checks.
    """
    names = set[str]()
    if isinstance(node, ast.Call):
        function = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if function in ("module_command", "source_command"):
            first = node.args[0]
            value = first.value if isinstance(first, ast.Constant) else None
            names = {value} & set(modules())
        asked = ast.unparse(node.args[0]) if function == "import_module" else ""
        names |= {asked} if "cluster." in asked else set()
    return names


PYTHON_WITHOUT_COMMAND = {
    "cluster/interpreter.py",
    # The path of the local Python is replaced by the path of the remote Python.
    "cluster/login/submit.py",
    "cluster/render.py",  # The path is used to find the environment of this Python.
    "cluster/slurm/__init__.py",  # The path is passed to cluster.slurm.script.
    "cluster/slurm/container.py",  # The path appears in an error message.
    "cluster/slurm/script.py",  # The path is passed to source_command.
    "kit/data/wheels.py",  # The path appears in an error message.
    "kit/evaluate/sandbox.py",  # Python is started with the option -I.
}
"""Files that use `sys.executable` without the function that builds Python commands. The reason
follows each file. No other file may use it.
"""
ADVICE = {
    "cluster/sandbox/__main__.py",
    "cluster/slurm/preflight.py",
    "kit/measure/collectives.py",
    "kit/papers/hlat_training.py",
}
"""Files with a Python command that a person types. These commands may lack the option -P."""
STARTS_PYTHON = re.compile(r"python[\w.}\"']*(?: -[^P\s]\S*)* -[mc]\b")
"""Matches a command in a script that starts Python without the option -P."""
WRONG_STARTS = ["python -m kit", "exec {python} -u -m kit", "python3.12 -c code"]
RIGHT_STARTS = ["python -P -m kit", "{python} -P -S -m kit", "python3 -I -c code"]


def test_python_is_started_by_one_module():
    """Without the option -P, Python puts the working directory on sys.path and imports a user's
    token.py or torch.py.
    """
    assert all(map(STARTS_PYTHON.search, WRONG_STARTS))
    assert not any(STARTS_PYTHON.search(text.replace("-I", "-P")) for text in RIGHT_STARTS)
    naming, wrong = set(), []
    for file, parts in nodes().items():
        path = str(file.relative_to(ROOT))
        for node in parts:
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable":
                naming.add(path)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                # The text is advice in an error message, or a docstring.
                is_shown = "`" in node.value or "\n" in node.value
                if STARTS_PYTHON.search(node.value) and not is_shown and path not in ADVICE:
                    wrong.append(f"{path}: {node.value}")
    assert naming == PYTHON_WITHOUT_COMMAND
    assert not wrong


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


def test_engine_names_are_compared_in_engines_only():
    """Code outside `kit.engines` reads the features of an engine from
    `kit.engines.capabilities`.
    """
    wrong = []
    for file, parts in nodes().items():
        path = str(file.relative_to(ROOT))
        if not path.startswith("kit/") or path.startswith("kit/engines/"):
            continue
        for node in parts:
            operands: list[ast.expr] = []
            if isinstance(node, ast.Compare) and "engine" in ast.unparse(node):
                operands = [node.left, *node.comparators]
            elif isinstance(node, ast.Tuple):
                operands = node.elts
            elif isinstance(node, ast.Dict):
                operands = [key for key in node.keys if key is not None]
            names = [each.value for each in operands if isinstance(each, ast.Constant)]
            if {*names} & {*ENGINES} and (isinstance(node, ast.Compare) or {*names} <= {*ENGINES}):
                wrong.append(f"{path}: {ast.unparse(node)}")
    assert wrong == []


ENTRIES = {
    "cluster/attempts.py",  # A user may start a supervisor by hand.
    "cluster/submission.py",
    "kit/cli/options.py",  # A user may choose an output file inside a run directory.
    "kit/interop/logs/importers.py",
    "kit/launcher.py",
}
"""Files that check once, by path, who owns a run directory. All other code receives an object for a
checked directory: see `cluster.ownership.Owned`."""
FILES_OF_OTHERS = {"cluster/files.py", "cluster/ownership.py", "kit/monitor/export.py"}
"""Files that check the owner of a single file. `export.py` checks the settings file of wandb."""


def test_run_ownership_is_checked_at_entry_points():
    assert Counter(uses("refuse_other_owner")) == Counter([*ENTRIES, "cluster/ownership.py"])
    assert set(uses("other_owner")) == FILES_OF_OTHERS


def test_run_mirrors_are_used_by_few_modules():
    """Other code needs no mirror: `Run.open` updates the local mirror of a remote run, and a job
    reads the run on the machine where it runs.
    """
    importers = {module for module, names in imports().items() if "cluster.login.mirror" in names}
    assert {name for name in importers if name.startswith("kit.")} == KNOW_MIRRORS
    found = [*uses("mirror_of"), *uses("update_mirror")]
    assert len([file for file in found if file.startswith("kit/")]) <= 5


KNOW_MIRRORS = {"kit.cli.options", "kit.run", "kit.run.checkpoint"}


def uses(function: str) -> list[str]:
    """Returns the file of each use of a function's name, one entry per use. Imports do not
    count.
    """
    return [
        str(file.relative_to(ROOT))
        for file, parts in nodes().items()
        for node in parts
        if isinstance(node, ast.Name) and node.id == function
    ]
