"""Warnings about a PYTHONPATH, as set by environment modules, in which a file shadows a module of
this Python environment.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.shadows import find_shadowing_modules, python_path
from tests.support.sources import ROOT

KIT = ["-P", "-c", "import sys; from kit.__main__ import main; sys.exit(main())"]
OLD = "__version__ = '3.7'\n"


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with a folder in PYTHONPATH, which comes before the kit's source."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True)


@pytest.mark.parametrize("words", ["doctor", "plan --list", "status nowhere"])
def test_commands_name_module_shadowed_by_pythonpath(tmp_path, words):
    """PYTHONPATH has an old version of a package. The import fails when typer imports pydantic, and
    pydantic imports the old package.
    """
    (tmp_path / "typing_extensions").mkdir()
    (tmp_path / "typing_extensions" / "__init__.py").write_text(OLD)
    done = run(tmp_path, *KIT, *words.split())
    told = f"typing_extensions comes from {tmp_path}, set by PYTHONPATH, not from this environment"
    assert done.returncode == 1 and told in done.stderr
    assert "Traceback" not in done.stderr and "kit doctor" in done.stderr


def test_import_names_a_shadowed_standard_library(tmp_path):
    (tmp_path / "dataclasses.py").write_text("raise AttributeError('a backport')\n")
    done = run(tmp_path, *KIT, "doctor")
    assert done.returncode == 1
    assert f"dataclasses comes from {tmp_path}, set by PYTHONPATH" in done.stderr.splitlines()[-1]


def test_import_names_a_shadowing_file_in_cwd(tmp_path):
    """The working directory is on sys.path, as in a notebook or a program that starts in this
    folder.
    """
    (tmp_path / "random.py").write_text("")
    words = [
        sys.executable,
        "-c",
        f"import sys; sys.path.append({str(ROOT)!r}); import kit; kit.Run",
    ]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    told = f"random comes from {tmp_path}, the working directory"
    assert told in done.stderr.splitlines()[-1]


def test_found_shadows_match_python_imports(tmp_path, monkeypatch):
    """Expected value: the file that a new Python process imports for each name."""
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("")
    # This folder has no __init__.py, so Python imports the installed package instead.
    (tmp_path / "torch").mkdir()
    for name in ("colorsys", "rich", "a_module_of_ours", "kit"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    assert python_path() == [str(tmp_path)]
    code = "import sys; from importlib.util import find_spec\n"
    code += "print(*(n for n in sys.argv[2:] if find_spec(n).origin.startswith(sys.argv[1])))"
    names = ["numpy", "torch", "colorsys", "rich", "json"]
    imported = run(tmp_path, "-P", "-c", code, str(tmp_path), *names).stdout.split()
    assert [shadow.name for shadow in find_shadowing_modules()] == sorted(imported)
    assert sorted(imported) == ["colorsys", "numpy", "rich"]


@pytest.mark.parametrize("is_venv", [False, True])
def test_user_site_shadows_packages_of_its_prefix(tmp_path, is_venv):
    """Expected value: the file that a new Python process imports. A virtual environment puts its
    own packages before the user's packages.
    """
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    python = base
    if is_venv:
        words = ["-m", "venv", "--without-pip", "--system-site-packages", str(tmp_path / "venv")]
        subprocess.run([base, *words], check=True)
        python = tmp_path / "venv" / "bin" / "python"
    environment = {**os.environ, "PYTHONUSERBASE": str(tmp_path / "user")}
    environment.pop("PYTHONPATH", None)

    def told(code: str) -> list[str]:
        words = [python, "-P", "-c", f"import sys; sys.path.append({str(ROOT)!r}); {code}"]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.split()

    (user,) = told("import site; print(site.getusersitepackages())")
    installed = told("from importlib.util import find_spec; print(bool(find_spec('pip')))")
    if not is_venv and installed == ["False"]:
        pytest.skip("the Python below this environment has no pip to shadow")
    (own,) = told("import sysconfig; print(sysconfig.get_path('purelib'))")
    Path(user).mkdir(parents=True)
    # The standard library comes first, so this file shadows nothing.
    (Path(user) / "json.py").write_text("")
    (Path(user) / "pip").mkdir()
    (Path(user) / "pip" / "__init__.py").write_text("")
    if is_venv:
        (Path(own) / "pip").mkdir()
        (Path(own) / "pip" / "__init__.py").write_text("")
    (found,) = told("import pip; print(pip.__file__)")
    names = told(
        "from cluster.shadows import find_shadowing_modules as find;"
        " print(*(each.name for each in find()))"
    )
    assert names == (["pip"] if found.startswith(user) else [])
    assert found.startswith(own if is_venv else user)
