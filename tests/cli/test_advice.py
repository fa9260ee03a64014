"""Tests that every command, option, module, extra and field that is named in messages and documents
exists.
"""

import ast
import dataclasses
import functools
import itertools
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import typer.main

from cluster.job import JobSpec
from cluster.scheduler import Kubernetes, Slurm
from cluster.site import Site
from kit.cli.app import app
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.errors import install_command
from tests.support.sources import ROOT, nodes

VALUE = "VALUE"
"""Text that replaces a variable part of a message or command, such as a path."""
CALLS = {"kit_command": 0, "hint": 1, "advice": 1, "next_step": 1}
"""Functions that put a command into a message, by name. Value: index of the argument with the first
word of the command.
"""

EXTRAS = {"MissingPackageError": 1, "install_command": 0}
"""Functions and classes that take the name of an extra (optional dependencies). Value: index of
this argument.
"""


@functools.cache
def texts() -> list[tuple[str, str]]:
    """Returns (place, text) for every text that a user may read: string constants in the source,
    notebooks, README.md and other documents.
    """
    return [*_texts()]


def _texts() -> Iterator[tuple[str, str]]:
    for file in nodes():
        parts: set[int] = set()
        for node in nodes()[file]:
            where = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if id(node) in parts:
                continue
            if isinstance(node, ast.JoinedStr):
                parts |= {id(part) for part in node.values}
                yield where, "".join(_word(part) for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield where, node.value
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in CALLS:
                words = node.args[CALLS[node.func.id] :]  # pyright: ignore[reportAttributeAccessIssue]
                words = [word for word in words if not isinstance(word, ast.Starred)]
                yield where, f"`kit {' '.join(map(_word, words))}`"
    for file in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(file.read_text())["cells"]:
            yield str(file.relative_to(ROOT)), "".join(cell["source"])
    names = "README.md", "Makefile", "environment.yml", "cluster/sites/*.toml", "requirements/*"
    for file in (file for name in names for file in sorted(ROOT.glob(name))):
        yield str(file.relative_to(ROOT)), file.read_text()


def said(pattern: str) -> list[tuple[str, Any]]:
    """Returns (place, match) for each match of a pattern in the texts that a user may read."""
    return [(where, found) for where, text in texts() for found in re.findall(pattern, text)]


def _word(part: ast.expr) -> str:
    return part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else VALUE


def advised() -> Iterator[tuple[str, list[str]]]:
    """Yields (place, words after `kit`) for every command in the texts that a user may read."""
    in_quotes = re.compile(r"`kit ([^`]+)`")
    in_the_open = re.compile(r"(?:^|: |\()kit ([a-z][^\n`;,)]*)", re.MULTILINE)
    for where, text in texts():
        for found in itertools.chain(in_quotes.finditer(text), in_the_open.finditer(text)):
            words = re.sub(r"\\\n", " ", found[1]).split("  #")[0].split(" # ")[0]
            yield where, re.split(r"[.:] |\s{2,}|[.:]$", words)[0].split()


COMMANDS = typer.main.get_command(app)


def problem(words: list[str]) -> str | None:
    """Returns an error text if the command's name, options or number of arguments are wrong.
    Otherwise returns None.
    """
    command: Any = COMMANDS
    words = [word for word in shlex.split(" ".join(words)) if word != "--json"]
    while hasattr(command, "commands"):
        if not words or words[0].startswith((VALUE, "-")):
            return None
        name = words.pop(0)
        if name not in command.commands:
            return f"there is no command {name!r}"
        command = command.commands[name]
    options = {name: each for each in command.params for name in each.opts + each.secondary_opts}
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    given = 0
    while words:
        word, equals, _ = words.pop(0).partition("=")
        if not word.startswith("--"):
            given += 1
        elif word not in options:
            return f"{command.name} has no option {word}"
        elif not equals and words and not getattr(options[word], "is_flag", False):
            words.pop(0)
    if given > len(arguments) and all(argument.nargs == 1 for argument in arguments):
        return f"{command.name} takes {len(arguments)} arguments, not {given}"
    return None


def test_advised_commands_and_options_exist() -> None:
    found = list(advised())
    assert len(found) > 40, "the search itself has come apart"
    problems = [(where, words, problem(words)) for where, words in found]
    assert not [each for each in problems if each[-1]]


def test_command_check_rejects_wrong_commands() -> None:
    wrong = ("exprt RUN", "watch RUN --loud", "watch RUN RUN")
    right = ("launch RUN --set plan.x=1 --show", "data build OUT")
    assert [each for each in wrong + right if problem(each.split())] == [*wrong]


def test_advised_python_modules_exist() -> None:
    named = said(r"python -m ((?:kit|cluster)[\w.]*)")
    assert len(named) > 5
    assert not [f"{where}: python -m {name}" for where, name in named if not find_spec(name)]


def test_advised_extras_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {*project["optional-dependencies"], VALUE}
    named = said(r"pip install.*\.\[([\w,]+)\]")
    for file in nodes():
        for node in nodes()[file]:
            place = EXTRAS.get(getattr(node.func, "id", "")) if isinstance(node, ast.Call) else None
            if place is not None and len(node.args) > place:
                named.append((f"{file}:{node.lineno}", _word(node.args[place])))
    assert len(named) > 3
    assert not [each for each in named if not {*each[1].split(",")} <= extras]


ASKED = """
import importlib.metadata, shlex
from kit import doctor, errors
advice = doctor._package("optuna", "plan").advice
assert str(errors.MissingPackageError("optuna", "plan", "This")).endswith(advice), advice
pip, install, what = shlex.split(advice)
name, _, extra = what.removesuffix("]").partition("[")
found = importlib.metadata.metadata(name)
assert extra in found.get_all("Provides-Extra") and found["Name"] == name
assert shlex.split(errors.install_command()) == ["pip", "install", name]
"""


def test_install_advice_names_the_wheel_or_checkout(reader_python, tmp_path) -> None:
    assert install_command("plan") == "pip install -e '.[plan]'"
    assert install_command() == "pip install -e ."
    asked = [reader_python(), "-c", ASKED]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


RECORDS = {"spec": ModelSpec, "plan": Plan, "recipe": Recipe, "job": JobSpec, "site": Site}
TABLES = {"slurm": Slurm, "kubernetes": Kubernetes}


def test_fields_named_in_messages_exist() -> None:
    """An example is `recipe.checkpoint_every`. Properties and methods of the records are allowed
    too.
    """
    pattern = r"(?<![\w.])(spec|plan|recipe|job|site)\.([a-z_]+[12]?)(?:\.([a-z_]+))?"
    files = ("json", "toml", "py", "preset", "attempt_", "base")
    named = [
        (where, *found)
        for where, found in said(pattern)
        if not where.startswith("notebooks") and found[1] not in files
    ]
    assert len(named) > 50
    for where, record, field, below in named:
        known = hasattr(RECORDS[record], field) or field in _fields(RECORDS[record])
        assert known, f"{where}: {record}.{field}"
        if below and field in TABLES:
            assert below in _fields(TABLES[field]), f"{where}: {record}.{field}.{below}"


def _fields(record: type) -> set[str]:
    return {field.name for field in dataclasses.fields(record)}
