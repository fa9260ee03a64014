"""Notebooks with SCALE = "cluster", executed on a real Slurm with site, model, plan and recipe
files of a user.
"""

import json
import re
from pathlib import Path

import nbformat
import pytest

from kit.config.plan import Plan
from kit.demo import REPOSITORY, execute
from kit.run import Run

PARAMETERS = """SCALE = "cluster"
SITE, RECIPE, DATA = "my-site.toml", "recipe.json", {data!r}
MODEL, PLAN = "spec.json", "plan.json"
"""


@pytest.fixture
def run_notebook(sandbox, spec, tiny_dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns a function that executes a notebook in a folder with a user's files. The function
    returns the runs that the notebook started.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Without this variable, benchmark data would be downloaded.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    folder = tmp_path / "notebooks"
    folder.mkdir()
    spec.write(folder / "spec.json")
    Plan(data_parallel=4, zero_stage=1, global_batch_size=8).write(folder / "plan.json")
    own = {"learning_rate": 5e-3, "min_learning_rate": 1e-3, "seed": 7}
    (folder / "recipe.json").write_text(json.dumps(own))
    site = Path(sandbox.site_file).read_text()
    site = re.sub('(?m)^name = ".*"', 'name = "my-site"', site, count=1)
    (folder / "my-site.toml").write_text(site)

    def run(name: str) -> list[Run]:
        document = nbformat.read(REPOSITORY / "notebooks" / f"{name}.ipynb", as_version=4)
        for cell in document.cells:
            if "parameters" in cell.metadata.get("tags", []):
                cell.source = PARAMETERS.format(data=str(tiny_dataset.directory))
        nbformat.write(document, folder / f"{name}.ipynb")
        execute(folder / f"{name}.ipynb", tmp_path / "executed" / f"{name}.ipynb")
        made = sorted((tmp_path / "runs").glob("cluster-*/spec.json"))
        return [Run.open(found.parent) for found in made]

    return run


@pytest.fixture
def patient(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--real-limits"):
        pytest.skip("some minutes each; `make faults` runs them")


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_quickstart_runs_on_site_of_the_user(run_notebook, spec) -> None:
    assert_runs("00_quickstart", [96], run_notebook, spec)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_launch_jobs_runs_on_site_of_the_user(patient, run_notebook, spec) -> None:
    assert_runs("03_launch_jobs", [30], run_notebook, spec)


def assert_runs(name: str, steps: list[int], run_notebook, spec) -> None:
    """Executes a notebook, and checks that its runs have the user's settings and the given numbers
    of steps.
    """
    runs = run_notebook(name)
    assert [run.metrics().summary()["step"] for run in runs] == steps
    for run in runs:
        assert run.site.name == "my-site" and run.site.scheduler == "slurm" and run.spec == spec
        assert (run.recipe.learning_rate, run.recipe.seed) == (5e-3, 7)
        assert run.plans()[1].data_parallel == 4, "the reader's layout"
    if name == "00_quickstart":
        assert runs[0].plan.data_parallel == 2, "then on half as many replicas"
        # Jobs score the checkpoints, not the notebook's kernel.
        assert len(list((runs[0].directory / "eval" / "jobs").iterdir())) == 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_evaluate_runs_on_site_of_the_user(patient, run_notebook, spec, monkeypatch) -> None:
    # This notebook downloads benchmarks and a pretrained model, so the variables that prevent this
    # are removed.
    for variable in ("XDG_CACHE_HOME", "PIP_NO_INDEX"):
        monkeypatch.delenv(variable)
    assert_runs("05_evaluate", [96], run_notebook, spec)
