"""`at_scale`: a notebook trains either its own demo model, or a user's model on the user's
cluster.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.errors import ConfigError
from kit.notebook import DEMO, NotebookSettings, at_scale

EVERY: dict[str, Any] = {"warmup_steps": 24, "validation_every": 32, "checkpoint_every": 48}
OWN = Recipe(data="demo", num_steps=96, learning_rate=3e-3, **EVERY)


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_dataset, spec):
    """Returns a function that calls `at_scale("cluster", ...)` with files of a user. Keywords
    replace its arguments.
    """
    monkeypatch.chdir(tmp_path)
    slurm = '[slurm]\naccount = "mine"\npartition = "gpu"\n'
    Path("my-site.toml").write_text(f'base = "generic-gpu-slurm"\n{slurm}')
    recipe = {"learning_rate": 1e-4, "min_learning_rate": 1e-5, "num_steps": 9000}
    Path("recipe.json").write_text(json.dumps(recipe))
    Plan(data_parallel=4, global_batch_size=8).write(Path("plan.json"))
    spec.write(Path("spec.json"))
    own = {"site": "my-site.toml", "recipe": "recipe.json", "data": str(tiny_dataset.directory)}
    own |= {"model": "spec.json", "plan": "plan.json"}

    def get(**changes: str | None) -> NotebookSettings:
        return at_scale("cluster", **(own | changes))  # type: ignore

    return get


def test_demo_scale_ignores_other_arguments() -> None:
    given = at_scale("demo", site="no.toml", recipe="nothing", data="nowhere")
    assert (given.site, given.spec, given.plan, given.other_plan, given.dataset) == (None,) * 5
    assert given.recipe(OWN) is OWN and str(given) == DEMO


def test_cluster_scale_uses_files_and_demo_steps(given, spec, tiny_dataset) -> None:
    """Learning rates come from the user's recipe. The number of steps comes from the notebook."""
    got = given()
    assert got.site.slurm.account == "mine" and got.spec == spec and got.plan.data_parallel == 4
    assert got.other_plan == got.plan.replace(data_parallel=2)
    assert got.dataset.directory == tiny_dataset.directory
    recipe = got.recipe(OWN)
    assert (recipe.learning_rate, recipe.min_learning_rate) == (1e-4, 1e-5), "the reader's"
    steps = (recipe.num_steps, recipe.warmup_steps, recipe.checkpoint_every)
    assert steps == (96, 24, 48), "the notebook's"
    assert recipe.data == str(tiny_dataset.directory) and "4 devices of site" in str(got)


def test_published_recipe_sets_model_and_layout(given) -> None:
    got = given(recipe="frontier-22b", model=None, plan=None)
    assert got.spec.name == "gpt-22b" and got.plan.engine == "deepspeed"
    recipe = got.recipe(OWN)
    assert recipe.learning_rate == got.recipe_fields["learning_rate"] and recipe.num_steps == 96


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"site": "frontier"}, "site.slurm.account: still 'EDIT'"),
        ({"site": "mine.toml"}, "mine.toml"),
        ({"recipe": "hlat7b"}, "Did you mean 'hlat-7b'"),
        ({"plan": None}, "MODEL, PLAN: recipe.json is a recipe without either"),
        ({"data": "nowhere"}, "nowhere"),
    ],
)
def test_at_scale_refuses_missing_or_invalid_input(given, changes, message) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        given(**changes)
