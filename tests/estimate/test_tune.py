"""Hyperparameter search: failures, resuming, better than random, Shapley values, and real runs as the objective."""

import dataclasses
import itertools
import math
import sys

import numpy as np
import pytest

import kit
from cluster.site import Site
from kit.errors import ConfigError, MissingPackageError, RunError
from kit.estimate.choose.search import Machine
from kit.estimate.fit.calibrate import calibrate
from kit.estimate.theory.activations import KIT
from kit.estimate.theory.hardware import Hardware
from kit.estimate.theory.out_of_memory import RESERVE
from kit.estimate.tuning.objectives import FRONTIER_SPACE, EstimatedRate, MeasuredRate, plan_of
from kit.estimate.tuning.sensitivity import sensitivity, sensitivity_figure, shapley
from kit.estimate.tuning.tune import TrialFailure, Trials, trials_figure, tune
from kit.plan import Plan
from kit.recipe import Recipe
from kit.spec import ModelSpec
from tests.pictures import check_figure

SPACE = {"tensor_parallel": (1, 2, 4, 8), "micro_batch_size": (1, 2, 4, 8), "zero_stage": (0, 1)}


def objective(parameters):
    """More is better with the micro-batch, and what does not fit runs out of memory."""
    t, b, z = (parameters[name] for name in SPACE)
    if 10 / t + b > 8 + 2 * z:
        raise TrialFailure("out of memory")
    return 10 * (1 - 0.4 / b) - math.log2(t) - 0.1 * z


@pytest.fixture(scope="module")
def estimated() -> EstimatedRate:
    site = Site.load("frontier")
    machine = Machine(
        site=site, hardware=Hardware.of(site), calibration=calibrate([], site), kernels=KIT, reserve=RESERVE
    )
    return EstimatedRate(spec=ModelSpec.preset("gpt-22b"), machine=machine, devices_per_node=8)


@pytest.fixture(scope="module")
def space() -> dict[str, tuple]:
    return {
        "pipeline_parallel": (1, 2, 4, 8), "tensor_parallel": (1, 2, 4, 8), "micro_batch_size": (1, 2, 3, 4, 6, 8),
        "num_microbatches": (4, 8, 16, 32), "zero_stage": (0, 1), "recompute": ("none", "selective", "full"),
        "num_nodes": (4,),
    }  # fmt: skip


@pytest.fixture(scope="module")
def grid(estimated, space):
    return estimated.rates(space)


@pytest.mark.parametrize("sampler", ["random", "optuna"])
def test_failures_are_kept_and_the_whole_space_is_searched_once(sampler):
    trials = tune(objective, SPACE, num_trials=40, sampler=sampler, seed=3)
    seen = {tuple(trial.parameters.values()) for trial in trials.trials}
    assert len(trials.trials) == len(seen) == 32  # the space has no more
    failed = [trial for trial in trials.trials if trial.failure]
    assert failed and all(trial.value is None and trial.failure == "out of memory" for trial in failed)
    assert np.isnan(trials.values).sum() == len(failed)
    expected = {}
    for choice in itertools.product(*SPACE.values()):
        parameters = dict(zip(SPACE, choice, strict=True))
        try:
            expected[choice] = objective(parameters)
        except TrialFailure:
            continue
    assert trials.best.value == max(expected.values())
    assert trials.best_so_far[-1] == trials.best.value


@pytest.mark.parametrize("sampler", ["random", "optuna"])
def test_a_search_cut_off_goes_on_as_if_it_had_not_been(sampler, tmp_path):
    whole = tune(objective, SPACE, num_trials=18, sampler=sampler, seed=1)
    calls = []

    def counted(parameters):
        calls.append(parameters)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return objective(parameters)

    storage = tmp_path / "trials.json"
    with pytest.raises(KeyboardInterrupt):
        tune(counted, SPACE, num_trials=18, sampler=sampler, seed=1, storage=storage)
    assert len(Trials.read(storage).trials) == 11
    again = tune(counted, SPACE, num_trials=18, sampler=sampler, seed=1, storage=storage)
    assert again == whole == Trials.read(storage)
    assert len(calls) == 19
    assert tune(objective, SPACE, num_trials=18, sampler=sampler, seed=2) != whole
    with pytest.raises(ConfigError, match="holds a search with seed = 1, not 2"):
        tune(objective, SPACE, num_trials=18, sampler=sampler, seed=2, storage=storage)
    with pytest.raises(ConfigError, match="space"):
        tune(objective, {**SPACE, "zero_stage": (0,)}, num_trials=18, sampler=sampler, seed=1, storage=storage)


def test_what_counts_as_a_failure():
    raised = iter([ConfigError("no"), MemoryError(), RunError("crashed")])

    def fails(parameters):
        raise next(raised)

    trials = tune(fails, {"x": (1, 2, 3)}, num_trials=3, sampler="random")
    assert [trial.failure for trial in trials.trials] == ["no", "MemoryError", "crashed"]
    with pytest.raises(RunError, match="None of 3 trials succeeded"):
        _ = trials.best
    assert "nan" in (tune(lambda _: math.nan, {"x": (1,)}, num_trials=1, sampler="random").trials[0].failure or "")
    with pytest.raises(ZeroDivisionError):  # a fault of the program is not a failed trial
        tune(lambda _: 1 / 0, SPACE, num_trials=1, sampler="random")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"sampler": "optima"}, "Did you mean 'optuna'"),
        ({"num_trials": 0}, "num_trials: 0"),
        ({"space": {}}, "no parameters"),
        ({"space": {"x": (1, 1)}}, "space.x"),
        ({"space": {"x": ()}}, "space.x"),
    ],
)
def test_searches_that_are_refused(arguments, says):
    with pytest.raises(ConfigError, match=says):
        tune(objective, **{"space": SPACE, "num_trials": 3, "sampler": "random", **arguments})


def test_a_search_without_optuna_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingPackageError, match=r"optuna, which is not installed.*\[plan\]"):
        tune(objective, SPACE, num_trials=1)


def test_plan_of_a_trial():
    parameters = {"pipeline_parallel": 4, "tensor_parallel": 8, "micro_batch_size": 5, "num_microbatches": 10,
                  "zero_stage": 1, "num_nodes": 12}  # fmt: skip
    assert set(parameters) == set(FRONTIER_SPACE)
    plan = plan_of(parameters, devices_per_node=8, base=Plan(recompute="full"))
    assert (plan.data_parallel, plan.global_batch_size, plan.num_microbatches, plan.recompute) == (3, 150, 10, "full")
    with pytest.raises(ConfigError, match="128 devices do not divide 96"):
        plan_of({**parameters, "pipeline_parallel": 16}, devices_per_node=8)
    with pytest.raises(ConfigError, match="plan.tensor_paralel: unknown key"):
        plan_of({**parameters, "tensor_paralel": 2}, devices_per_node=8)


def test_grid_of_the_estimator_equals_single_trials(estimated, space, grid):
    assert 0.05 < np.isfinite(grid).mean() < 0.95
    failures = set()
    for index in np.random.default_rng(0).integers(grid.size, size=60):
        place = np.unravel_index(index, grid.shape)
        parameters = {name: choices[i] for (name, choices), i in zip(space.items(), place, strict=True)}
        try:
            assert estimated(parameters) == pytest.approx(grid[place], rel=1e-9)
        except (TrialFailure, ConfigError) as error:
            failures.add(type(error))
            assert np.isnan(grid[place])
    assert failures == {TrialFailure, ConfigError}


def test_grid_of_a_space_without_any_plan_is_all_failures(estimated, space):
    assert np.isnan(estimated.rates(space | {"tensor_parallel": (3,)})).all()


def _lookup(space, grid):
    def objective(parameters):
        return grid[tuple(choices.index(parameters[name]) for name, choices in space.items())]

    return objective


def test_bayesian_search_is_better_than_random(space, grid):
    best, failed = {}, {}
    for sampler in ("optuna", "random"):
        runs = [tune(_lookup(space, grid), space, num_trials=50, seed=seed, sampler=sampler) for seed in range(6)]
        best[sampler] = np.mean([trials.best.value for trials in runs]) / np.nanmax(grid)
        failed[sampler] = np.mean([np.isnan(trials.values).mean() for trials in runs])
    assert best["optuna"] > max(0.88, best["random"] + 0.04)
    assert failed["optuna"] < failed["random"] - 0.1  # it learns to stay away


def test_search_finds_a_way_where_nearly_everything_fails(estimated):
    large = dataclasses.replace(estimated, spec=ModelSpec.preset("gpt-175b"), base=Plan(recompute="full"))
    grid = large.rates(FRONTIER_SPACE)
    assert np.isfinite(grid).mean() < 0.25
    best = {}
    for sampler in ("optuna", "random"):
        runs = [tune(_lookup(FRONTIER_SPACE, grid), FRONTIER_SPACE, num_trials=50, seed=seed, sampler=sampler)
                for seed in range(6)]  # fmt: skip
        best[sampler] = np.mean(np.nan_to_num([trials.best_so_far[-1] for trials in runs])) / np.nanmax(grid)
    assert best["optuna"] > best["random"] + 0.05


def test_shapley_values_of_known_functions():
    generator = np.random.default_rng(0)
    points, background = generator.integers(0, 4, (20, 4)), generator.integers(0, 4, (15, 4))

    def known(c):
        return 2.0 * c[0] + c[1] * c[2] + 0 * c[3]

    values, base = shapley(known, points, background)
    np.testing.assert_allclose(values.sum(axis=1) + base, known(list(points.T)))
    np.testing.assert_allclose(values[:, 0], 2.0 * (points[:, 0] - background[:, 0].mean()))
    np.testing.assert_allclose(values[:, 3], 0)
    swapped, _ = shapley(known, points[:, [0, 2, 1, 3]], background[:, [0, 2, 1, 3]])
    np.testing.assert_allclose(swapped, values[:, [0, 2, 1, 3]])


def test_shapley_values_equal_those_of_the_shap_package():
    shap = pytest.importorskip("shap")
    from sklearn.ensemble import RandomForestRegressor

    generator = np.random.default_rng(0)
    points = generator.integers(0, 5, (40, 5)).astype(float)
    forest = RandomForestRegressor(n_estimators=20, random_state=0).fit(points, points[:, 0] * points[:, 1])
    explainer = shap.TreeExplainer(forest, data=points, feature_perturbation="interventional")

    def predict(columns):
        shape = np.broadcast_shapes(*(column.shape for column in columns))
        rows = np.stack([np.broadcast_to(column, shape).ravel() for column in columns], axis=1)
        return forest.predict(rows).reshape(shape)

    values, base = shapley(predict, points, points)
    np.testing.assert_allclose(values, explainer.shap_values(points), atol=1e-6)
    assert base == pytest.approx(np.ravel(explainer.expected_value)[0])


def test_sensitivity_and_figures(space, grid):
    trials = tune(_lookup(space, grid), space, num_trials=60, sampler="random")
    result = sensitivity(trials, grid)
    filled = np.where(np.isnan(trials.values), np.nanmin(grid), trials.values)
    np.testing.assert_allclose(result.values.sum(axis=1) + result.mean, filled)
    assert result.importance["num_nodes"] == pytest.approx(0, abs=1e-9)  # it has one choice
    pytest.importorskip("sklearn")
    assert set(sensitivity(trials).importance) == set(space)

    figure, rows = sensitivity_figure(result)
    check_figure(figure)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [row["parameter"].replace("_", " ") for row in rows]
    assert sum(len(c.get_offsets()) for c in figure.axes[0].collections) == 60 * len(space)
    figure, rows = trials_figure(trials, unit="tokens/s")
    check_figure(figure)
    assert len(rows) == 60 and sum(row["failure"] is not None for row in rows) == np.isnan(trials.values).sum()
    assert f"failed: {np.isnan(trials.values).sum()}" in figure.axes[1].get_yticklabels()[0].get_text()


@pytest.mark.thorough
def test_search_over_real_runs(tmp_path, tiny_dataset, llama_spec):
    recipe = Recipe(data=str(tiny_dataset.directory), num_steps=5)
    measured = MeasuredRate(
        spec=llama_spec.replace(vocab_size=300), recipe=recipe, directory=tmp_path / "runs", timeout_s=60
    )
    space = {"tensor_parallel": (1, 2, 4), "micro_batch_size": (2,), "num_microbatches": (2,)}
    trials = tune(measured, space, num_trials=3, sampler="random", storage=tmp_path / "trials.json")
    failed = [trial for trial in trials.trials if trial.failure]
    assert [trial.parameters["tensor_parallel"] for trial in failed] == [4], "two key/value heads, and two cores"
    assert (trials.values[~np.isnan(trials.values)] > 0).all()
    assert measured(trials.best.parameters) == trials.best.value  # read from its run, not run again


@pytest.mark.slow
def test_a_trial_that_outlived_its_search_is_waited_for(tmp_path, tiny_dataset, llama_spec):
    recipe = Recipe(data=str(tiny_dataset.directory), num_steps=5)
    spec, parameters = llama_spec.replace(vocab_size=300), {"micro_batch_size": 2}
    measured = MeasuredRate(spec=spec, recipe=recipe, directory=tmp_path, num_devices=1)
    plan = plan_of(parameters, devices_per_node=1)
    run = kit.launch(tmp_path / "micro_batch_size_2", spec=spec, plan=plan, recipe=recipe)
    assert not run.job.state.is_final
    assert measured(parameters) > 0 and run.job.status().attempt == 1
