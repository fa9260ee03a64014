"""Rules of the project: one list of dependencies, imports between packages in one direction only,
and cheap imports.
"""

import ast
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.cluster.shell import shellcheck
from tests.support.environments import closure
from tests.support.sources import ROOT, nodes

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMED = {"jupyterlab", "torch", "deepspeed", "ipywidgets", "wandb", "lm-eval"}
HEAVY = {*"torch numpy matplotlib transformers lm_eval datasets pyarrow rich typer".split()}


def requirement_name(requirement: str) -> str:
    return re.split(r"[\[<>=!~ ]", requirement)[0].lower().replace("_", "-")


def notebooks() -> list[str]:
    """Returns the requirements of the extra `notebooks`, which combines several other extras."""
    extras = PYPROJECT["optional-dependencies"]
    (itself,) = extras["notebooks"]
    return [each for extra in re.split(r"[\[\],]", itself)[1:-1] for each in extras[extra]]


def test_environment_yml_equals_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, last = environment["dependencies"]
    assert conda == ["python" + PYPROJECT["requires-python"], "pip"]
    constraints, editable, *pip = last["pip"]
    assert (constraints, editable) == ("-c constraints.txt", "-e .")
    assert pip == [*PYPROJECT["dependencies"], *notebooks()]
    assert {requirement_name(requirement) for requirement in pip} >= NAMED
    assert "neuronx-distributed" in (ROOT / "environment.yml").read_text()


def test_binder_installs_the_kit_as_environment_yml_does():
    """repo2docker reads only `python=X.Y`, runs postBuild as a program, and ignores its errors
    without `set -e`.
    """
    environment = yaml.safe_load((ROOT / "binder/environment.yml").read_text())
    python, pip = environment["dependencies"]
    assert (environment["name"], environment["channels"], pip) == (
        yaml.safe_load((ROOT / "environment.yml").read_text())["name"],
        ["conda-forge"],
        "pip",
    )
    version = re.fullmatch(r"python=(\d+\.\d+)", python)
    assert version and SpecifierSet(PYPROJECT["requires-python"]).contains(version[1])
    script = ROOT / "binder/postBuild"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    begin, *_, safe, install = script.read_text().splitlines()
    assert (begin, safe) == ("#!/bin/bash", "set -euo pipefail")
    words = shlex.split(install)
    assert words[:4] == ["python", "-m", "pip", "install"]
    options = dict(itertools.pairwise(words))
    assert (ROOT / options["-c"]).is_file()
    extra = re.fullmatch(r"\.\[(\w+)\]", options["-e"])
    assert extra and extra[1] in PYPROJECT["optional-dependencies"]
    shellcheck(script.read_text(), "--shell=bash")
    (torch,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert f"({torch}+cpu)" in script.read_text()
    # pip prefers the CPU build to the build of PyPI, and the constraint allows it.
    assert Version(f"{torch}+cpu") > Version(torch)
    assert SpecifierSet(f"=={torch}").contains(f"{torch}+cpu")


@pytest.mark.parametrize("own", [None, "2.10.0+rocm7.1"])
def test_make_keeps_an_installed_torch(own, tmp_path):
    (tmp_path / "requirements").mkdir()
    for name in ("Makefile", "constraints.txt", "pyproject.toml", "requirements/install.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    if own:
        (tmp_path / f".venv/lib/python3.12/site-packages/torch-{own}.dist-info").mkdir(parents=True)
    command = ["make", ".venv/notebooks-installed", "PIP=true", "UV=true"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    used = (tmp_path / ".venv/constraints.txt").read_text().splitlines()
    (torch,) = (line for line in pinned if line.startswith("torch=="))
    expected = f"torch=={own}" if own else torch
    assert used == [expected if line == torch else line for line in pinned]


def test_constraints_pin_every_direct_dependency():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {requirement_name(line) for line in lines if "==" in line}
    lists = PYPROJECT["dependencies"], *PYPROJECT["optional-dependencies"].values()
    direct = {requirement_name(each) for each in itertools.chain(*lists)} - {PYPROJECT["name"]}
    assert direct <= pinned, f"add to constraints.txt: {sorted(direct - pinned)}"
    assert not [line for line in lines if "+cpu" in line or "://" in line]


def test_notebooks_extra_includes_main_packages():
    assert closure("notebooks") >= NAMED, "and every package's own needs"


def imports_of(file: Path) -> set[str]:
    found = set()
    for node in nodes()[file]:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return found


def test_packages_import_in_one_direction():
    """`cluster` imports only the standard library, no package imports `tests`, and `kit.model`
    imports no code for distributed training.
    """
    for file in (file for file in nodes() if file.is_relative_to(ROOT / "cluster")):
        top = {name.split(".")[0] for name in imports_of(file)}
        assert not top - set(sys.stdlib_module_names) - {"cluster"}, f"{file}: {top}"
    for file in nodes():
        assert "tests" not in {name.split(".")[0] for name in imports_of(file)}
    model = imports_of(ROOT / "kit" / "model" / "__init__.py")
    assert not any(name.startswith(("torch.distributed", "kit.parallel")) for name in model)


@pytest.mark.parametrize("package", ["kit", "cluster"])
def test_package_import_loads_no_heavy_dependency(package):
    code = f"import sys, {package}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("\n", "")


def test_search_needs_only_numpy_and_rich(tmp_path: Path):
    """The layout search runs without torch, for example in Python in a browser."""
    allowed = {"numpy", "rich", "pygments", "markdown_it", "mdurl", "kit", "cluster"}
    program = tmp_path / "alone.py"
    program.write_text(
        f"""
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in sys.stdlib_module_names | {allowed!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refused())
sys.path.insert(0, {str(ROOT)!r})
import kit
from kit.estimate import search

found = search(kit.ModelSpec.preset("gpt-1t"), kit.Site.load("frontier"), 3072, 9600)
print(len(found.order), found)
"""
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout.split()[0]) > 0, done.stderr


def test_packages_come_from_this_checkout():
    """PyPI has other packages named `kit` and `cluster`, so a wrong package could be imported
    without an error.
    """
    import cluster
    import kit

    assert Path(kit.__file__).parent == ROOT / "kit"
    assert Path(cluster.__file__).parent == ROOT / "cluster"


def test_every_module_has_a_docstring():
    for file, (tree, *_) in nodes().items():
        assert ast.get_docstring(tree), f"{file}: say what it is for in a first docstring"


@pytest.mark.parametrize(
    ("runs", "taken"), [(("3.13", "3.14"), "python3.13"), (("",), "python3"), ((), None)]
)
def test_make_selects_a_supported_python(runs, taken, tmp_path):
    """Without a supported Python, make prints the command with which the user names a Python."""
    (tmp_path / "bin").mkdir()
    for version in ("3.11", "3.12", "3.13", "3.14", ""):
        shim = tmp_path / "bin" / f"python{version or 3}"
        shim.write_text(f"#!/bin/sh\nexit {0 if version in runs else 1}\n")
        shim.chmod(0o755)
    command = ["make", "-f", str(ROOT / "Makefile"), ".venv/bin/python"]
    command += ["-n"] * (taken is not None)
    given = {"cwd": tmp_path, "env": {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}}
    done = subprocess.run(command, **given, capture_output=True, text=True)
    if taken:
        assert done.stdout.splitlines()[-1] == f"{tmp_path}/bin/{taken} -m venv .venv"
    else:
        assert done.returncode and "make demo PYTHON=/path/to/python3" in done.stdout
