"""Notebooks: rules for their form, and an execution of each notebook in a user's environment."""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from cluster.record import ConfigError
from kit.demo import REPOSITORY
from tests.support.environments import outside

FOLDER = REPOSITORY / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
AT_A_SCALE = ("00_quickstart", "03_launch_jobs", "05_evaluate")
"""Notebooks whose last section can train a user's model on the user's cluster."""
MAX_CODE_CELLS = 45
MAX_LINES = 20
MAX_STATEMENTS = 18
MAX_IMPORTS = 5
EXECUTE = "import sys, pathlib, kit.demo; kit.demo.execute(*map(pathlib.Path, sys.argv[1:]))"


def is_folded(cell: nbformat.NotebookNode) -> bool:
    """Returns whether JupyterLab shows the code of a cell only after a click."""
    return cell.metadata.get("jupyter", {}).get("source_hidden", False)


by_name = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the repository's layout in which notebooks are executed, so that they write
    nothing into the repository. All notebooks share one dataset.
    """
    workplace = tmp_path_factory.mktemp("notebooks")
    (workplace / "notebooks").mkdir()
    return workplace


@by_name
def test_notebook_follows_the_writing_rules(notebook: Path) -> None:
    cells = nbformat.read(notebook, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert len(code) <= MAX_CODE_CELLS
    assert all(not cell.outputs and cell.execution_count is None for cell in code), (
        "committed without outputs"
    )
    assert all(len(cell.source.splitlines()) <= MAX_LINES for cell in code)
    trees = [ast.parse(re.sub(r"\bawait ", "", cell.source)) for cell in code]
    assert all(len(tree.body) <= MAX_STATEMENTS for tree in trees)
    assert not any(line.startswith("class ") for cell in code for line in cell.source.splitlines())
    parameters = [cell.source for cell in code if "parameters" in cell.metadata.get("tags", [])]
    assert len(parameters) == (notebook.stem in AT_A_SCALE), "no parameter without a use"
    assert all(source.startswith('SCALE = "demo"') for source in parameters)
    own_cluster = [
        i for i, cell in enumerate(code) if re.search(r"SCALE|\bsettings\b", cell.source)
    ]
    assert len(own_cluster) == 3 * len(parameters), "the reader's cluster has a section of its own"
    assert not parameters or own_cluster == list(range(own_cluster[0], own_cluster[0] + 3))
    assert all(
        len(re.findall(r"^(?:import|from) ", cell.source, re.M)) <= MAX_IMPORTS for cell in code
    )
    assert not any(".close()" in cell.source for cell in code), (
        "after the last cell a live view is still live"
    )
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith("# ")
    assert re.search(r"\*\d+ minutes to read, about \d+ to run", cells[0].source)
    number = NOTEBOOKS.index(notebook)
    beside = NOTEBOOKS[number - 1 : number] if number else []
    for other in [*beside, *NOTEBOOKS[number + 1 : number + 2]]:
        assert f"({other.name})" in cells[0].source, "leads to the one before and the next"
    checks = [cell for cell in code if is_folded(cell)]
    assert checks and code[-len(checks) :] == checks, "checks at the end, which the reader may open"
    assert sum(cell.source.count("assert ") for cell in checks) >= 3, "checks of what it claimed"
    assert len({cell.id for cell in cells}) == len(cells)


MISUSES = (
    "reportAttributeAccessIssue",
    "reportCallIssue",
    "reportMissingImports",
    "reportUndefinedVariable",
)
"""Rules of pyright that report a missing name or a call with wrong arguments."""


def test_names_in_code_cells_exist(tmp_path: Path) -> None:
    """pyright finds a renamed function or field within seconds, without executing a notebook."""
    for notebook in NOTEBOOKS:
        cells = nbformat.read(notebook, as_version=4).cells
        code = [cell.source for cell in cells if cell.cell_type == "code"]
        source = "\n\n".join(["from IPython.display import display", *code])
        (tmp_path / f"{notebook.stem}.py").write_text(source)
    settings = {"typeCheckingMode": "basic", "extraPaths": [str(REPOSITORY)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    report = json.loads(checked.stdout)
    assert report["summary"]["filesAnalyzed"] == len(NOTEBOOKS)
    found = [
        f"{Path(each['file']).stem}: {each['message']}"
        for each in report["generalDiagnostics"]
        if each.get("rule") in MISUSES
    ]
    assert not found


@pytest.mark.parametrize("name", AT_A_SCALE)
def test_notebook_refuses_an_unknown_scale(name: str) -> None:
    cells = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells
    (first,) = [i for i, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", [])]
    parameters, settings = cells[first : first + 2]
    names: dict[str, Any] = {}
    exec(parameters.source, names)
    names["SCALE"] = "dmeo"
    with pytest.raises(ConfigError, match="SCALE: 'dmeo' is unknown. Did you mean 'demo'"):
        exec(settings.source, names)


@by_name
def test_exercise_answers_pass_their_asserts(notebook: Path) -> None:
    for cell in nbformat.read(notebook, as_version=4).cells:
        for answer in re.findall(r"```python\n(.*?)```", cell.source, re.DOTALL):
            assert "assert " in answer
            exec(answer, {})


@by_name
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_notebook_runs_in_a_readers_environment(
    notebook: Path, workplace: Path, reader_python
) -> None:
    copy = Path(shutil.copy(notebook, workplace / "notebooks"))
    executed = workplace / "executed" / notebook.name
    command = [reader_python("notebooks"), "-c", EXECUTE, copy, executed]
    done = subprocess.run(command, cwd=workplace, env=outside(), capture_output=True, text=True)
    assert not done.returncode, done.stderr
    cells = [
        cell for cell in nbformat.read(executed, as_version=4).cells if cell.cell_type == "code"
    ]
    assert all(cell.execution_count for cell in cells)
    pictures = [
        output for cell in cells for output in cell.outputs if "image/png" in output.get("data", {})
    ]
    assert pictures, "shows at least one picture"
    complaints = [
        output.text for cell in cells for output in cell.outputs if output.get("name") == "stderr"
    ]
    assert not complaints, "no warnings on the page"
