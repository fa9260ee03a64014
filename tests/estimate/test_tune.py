"""Search of plan parameters: failed trials, resuming, comparison with random search, sensitivity to
parameters, and real runs.
"""

import contextlib
import dataclasses
import itertools
import math
import multiprocessing
import os
import signal
import sys

import numpy as np
import pytest

import kit
from cluster.site import Site
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.errors import ConfigError, MissingPackageError, RunError
from kit.estimate.choose.search import Machine
from kit.estimate.fit.calibrate import calibrate
from kit.estimate.theory.activations import KIT
from kit.estimate.theory.hardware import Hardware
from kit.estimate.theory.out_of_memory import RESERVE
from kit.estimate.tuning.figures import sensitivity_figure, trials_figure
from kit.estimate.tuning.objectives import (
    FRONTIER_SPACE,
    EstimatedRate,
    MeasuredRate,
    plan_of_trial,
)
from kit.estimate.tuning.tune import TrialFailure, Trials, sensitivity, tune
from tests.support.pictures import check_data

SPACE = {"tensor_parallel": (1, 2, 4, 8), "micro_batch_size": (1, 2, 4, 8), "zero_stage": (0, 1)}


def objective(parameters):
    """Returns a score that grows with the micro-batch size. A plan that needs too much memory
    raises TrialFailure.
    """
    t, b, z = (parameters[name] for name in SPACE)
    if 10 / t + b > 8 + 2 * z:
        raise TrialFailure("out of memory")
    return 10 * (1 - 0.4 / b) - math.log2(t) - 0.1 * z


@pytest.fixture(scope="module")
def estimated() -> EstimatedRate:
    site = Site.load("frontier")
    rest = {"calibration": calibrate([], site), "kernels": KIT, "reserve": RESERVE}
    machine = Machine(site=site, hardware=Hardware.of(site), **rest)
    return EstimatedRate(spec=ModelSpec.preset("gpt-22b"), machine=machine, devices_per_node=8)


@pytest.fixture(scope="module")
def space() -> dict[str, tuple]:
    return {
        "pipeline_parallel": (1, 2, 4, 8),
        "tensor_parallel": (1, 2, 4, 8),
        "micro_batch_size": (1, 2, 3, 4, 6, 8),
        "num_microbatches": (4, 8, 16, 32),
        "zero_stage": (0, 1),
        "recompute": ("none", "selective", "full"),
        "num_nodes": (4,),
    }


@pytest.fixture(scope="module")
def grid(estimated, space):
    return estimated.rates(space)


@pytest.mark.parametrize("sampler", ["random", "optuna"])
def test_tune_keeps_failures_and_tries_all_choices(sampler):
    trials = tune(objective, SPACE, num_trials=40, sampler=sampler, seed=3)
    seen = {tuple(trial.parameters.values()) for trial in trials.trials}
    assert len(trials.trials) == len(seen) == 32  # the search space has 32 combinations
    failed = [trial for trial in trials.trials if trial.failure]
    assert {(trial.value, trial.failure) for trial in failed} == {(None, "out of memory")}
    assert np.isnan(trials.values).sum() == len(failed)
    expected = []
    for choice in itertools.product(*SPACE.values()):
        with contextlib.suppress(TrialFailure):
            expected.append(objective(dict(zip(SPACE, choice, strict=True))))
    assert trials.best.value == max(expected)
    assert trials.best_so_far[-1] == trials.best.value


@pytest.mark.parametrize("sampler", ["random", "optuna"])
def test_killed_search_resumes_identically(sampler, tmp_path):
    options = {"space": SPACE, "num_trials": 18, "sampler": sampler, "seed": 1}
    whole, storage, calls = tune(objective, **options), tmp_path / "search", []

    def counted(parameters, last=100):
        calls.append(parameters)
        if len(calls) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return objective(parameters)

    killed = multiprocessing.get_context("fork").Process(
        target=lambda: tune(lambda given: counted(given, last=12), **options, storage=storage)
    )
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL and Trials.read(storage).trials == whole.trials[:11]
    assert tune(counted, **options, storage=storage) == whole == Trials.read(storage)
    again = [trial.parameters for trial in whole.trials[11:]]
    assert calls == again, "also that at which it was killed"
    assert tune(objective, **{**options, "seed": 2}) != whole
    with pytest.raises(ConfigError, match=r'holds another search: .*"seed": 1, .* not .*"seed": 2'):
        tune(objective, **{**options, "seed": 2}, storage=storage)
    with pytest.raises(ConfigError, match=r'"zero_stage": \[0, 1\].* not .*"zero_stage": \[0\]'):
        tune(objective, **{**options, "space": {**SPACE, "zero_stage": (0,)}}, storage=storage)


@pytest.mark.parametrize("content", ["", "{", "[1]\n[2]\n", '{"trials": []}\n{}\n', None])
def test_file_without_search_is_refused(content, tmp_path):
    file = tmp_path / "search"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="search: not a search of `tune`"):
        Trials.read(file)
    assert file.exists() == (content is not None), "reading makes nothing"
    if content:
        with pytest.raises(ConfigError, match="search: not a search of `tune`"):
            tune(objective, SPACE, num_trials=1, storage=file)
        assert file.read_text() == content


def test_search_starts_on_empty_storage_file(tmp_path):
    """A search that is killed before its first trial leaves an empty storage file."""
    (storage := tmp_path / "search").touch()
    trials = tune(objective, SPACE, num_trials=2, sampler="random", storage=storage)
    assert len(trials.trials) == 2


def test_expected_errors_fail_trial_and_bugs_raise():
    raised = iter([ConfigError("no"), MemoryError(), RunError("crashed")])

    def fails(parameters):
        raise next(raised)

    trials = tune(fails, {"x": (1, 2, 3)}, num_trials=3, sampler="random")
    assert [trial.failure for trial in trials.trials] == ["no", "MemoryError", "crashed"]
    with pytest.raises(RunError, match="None of 3 trials succeeded"):
        _ = trials.best
    nothing = tune(lambda _: math.nan, {"x": (1,)}, num_trials=1, sampler="random")
    assert "nan" in str(nothing.trials[0].failure)
    # an error in the objective's code is raised and ends the search
    with pytest.raises(ZeroDivisionError):
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
def test_tune_refuses_bad_arguments(arguments, says):
    with pytest.raises(ConfigError, match=says):
        tune(objective, **{"space": SPACE, "num_trials": 3, "sampler": "random", **arguments})


def test_tune_without_optuna_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingPackageError, match=r"optuna, which is not installed.*\[plan\]"):
        tune(objective, SPACE, num_trials=1)


def test_plan_of_trial_fills_devices_or_is_refused():
    parameters = {
        "pipeline_parallel": 4,
        "tensor_parallel": 8,
        "micro_batch_size": 5,
        "num_microbatches": 10,
        "zero_stage": 1,
        "num_nodes": 12,
    }
    assert set(parameters) == set(FRONTIER_SPACE)
    plan = plan_of_trial(parameters, devices_per_node=8, base=Plan(recompute="full"))
    assert (plan.data_parallel, plan.global_batch_size, plan.num_microbatches) == (3, 150, 10)
    assert plan.recompute == "full"
    with pytest.raises(ConfigError, match="128 devices do not divide 96"):
        plan_of_trial({**parameters, "pipeline_parallel": 16}, devices_per_node=8)
    with pytest.raises(ConfigError, match="plan.tensor_paralel: unknown key"):
        plan_of_trial({**parameters, "tensor_paralel": 2}, devices_per_node=8)


def test_estimator_grid_equals_single_trials(estimated, space, grid):
    assert 0.05 < np.isfinite(grid).mean() < 0.95
    failures = set()
    for index in np.random.default_rng(0).integers(grid.size, size=60):
        place = np.unravel_index(index, grid.shape)
        choices = zip(space.items(), place, strict=True)
        try:
            found = estimated({name: values[i] for (name, values), i in choices})
        except (TrialFailure, ConfigError) as error:
            failures.add(type(error))
            found = np.nan
        assert found == pytest.approx(grid[place], rel=1e-9, nan_ok=True)
    assert failures == {TrialFailure, ConfigError}
    assert np.isnan(estimated.rates(space | {"tensor_parallel": (3,)})).all(), "no plan at all"


def _lookup(space, grid):
    def objective(parameters):
        return grid[tuple(choices.index(parameters[name]) for name, choices in space.items())]

    return objective


def searched(space, grid) -> dict[str, tuple[float, float]]:
    """Returns a dict from the sampler to (best value relative to the highest value of `grid`, share
    of failed trials), as means over six searches.
    """
    found = {}
    for sampler in ("optuna", "random"):
        runs = [
            tune(_lookup(space, grid), space, num_trials=50, seed=seed, sampler=sampler)
            for seed in range(6)
        ]
        best = np.nan_to_num([trials.best_so_far[-1] for trials in runs]) / np.nanmax(grid)
        failed = [np.isnan(trials.values).mean() for trials in runs]
        found[sampler] = float(np.mean(best)), float(np.mean(failed))
    return found


@pytest.mark.slow
def test_bayesian_search_beats_random_search(space, grid):
    (best, failed), (by_chance, failed_by_chance) = searched(space, grid).values()
    assert best > max(0.88, by_chance + 0.04)
    assert failed < failed_by_chance - 0.1  # the sampler learns to avoid failing combinations


@pytest.mark.slow
def test_bayesian_search_beats_random_if_most_trials_fail(estimated):
    large = dataclasses.replace(
        estimated, spec=ModelSpec.preset("gpt-175b"), base=Plan(recompute="full")
    )
    grid = large.rates(FRONTIER_SPACE)
    assert np.isfinite(grid).mean() < 0.25
    (best, _), (by_chance, _) = searched(FRONTIER_SPACE, grid).values()
    assert best > by_chance + 0.05


@pytest.mark.slow
def test_sensitivity_matches_shares_of_variance():
    space = {"a": (1, 2, 3, 4, 5), "nothing": (1, 2, 3), "b": (1, 2, 3, 4, 5), "one": ("only",)}
    trials = tune(lambda x: 3.0 * x["a"] + x["b"], space, num_trials=60, sampler="random")
    shares = sensitivity(trials)
    assert list(shares)[:2] == ["a", "b"] and sum(shares.values()) == pytest.approx(1)
    assert shares["a"] == pytest.approx(0.9, abs=0.05)
    assert shares["nothing"] < 0.02 and shares["one"] == 0
    failing = tune(_fails_from(3), space, num_trials=60, sampler="random")
    assert list(sensitivity(failing))[0] == "a", "a failure is as bad as the worst success"


def _fails_from(a):
    def objective(parameters):
        if parameters["a"] >= a:
            raise TrialFailure("too large")
        return 10.0 + parameters["b"] / 10

    return objective


def test_sensitivity_refuses_trials_of_one_value():
    for each in (_fails_from(0), lambda _: 1.0):
        with pytest.raises(RunError, match="3 trials, one value: nothing to explain"):
            sensitivity(tune(each, {"a": (1, 2, 3)}, num_trials=3, sampler="random"))


def test_tuning_figures_match_their_tables(space, grid):
    trials = tune(_lookup(space, grid), space, num_trials=60, sampler="random")
    result = sensitivity(trials)
    assert set(result) == set(space) and result["num_nodes"] == 0, "it has one choice"
    figure, rows = sensitivity_figure(result)
    check_data(figure)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [row["parameter"].replace("_", " ") for row in rows]
    widths = [bar.get_width() / 100 for bar in figure.axes[0].patches]
    assert widths == pytest.approx([row["share of the variance"] for row in rows])
    figure, rows = trials_figure(trials, unit="tokens/s")
    check_data(figure)
    failed = np.isnan(trials.values).sum()
    assert len(rows) == 60 and sum(row["failure"] is not None for row in rows) == failed
    assert f"failed: {failed}" in figure.axes[1].get_yticklabels()[0].get_text()


@pytest.mark.thorough
def test_tune_measures_real_runs(tmp_path, tiny_dataset, llama_spec):
    recipe = Recipe(data=str(tiny_dataset.directory), num_steps=5)
    run = {"spec": llama_spec.replace(vocab_size=300), "recipe": recipe, "timeout_s": 60}
    measured = MeasuredRate(**run, directory=tmp_path / "runs")
    space = {"tensor_parallel": (1, 2, 4), "micro_batch_size": (2,), "num_microbatches": (2,)}
    trials = tune(measured, space, num_trials=3, sampler="random", storage=tmp_path / "search")
    failed = [trial for trial in trials.trials if trial.failure]
    degrees = [trial.parameters["tensor_parallel"] for trial in failed]
    assert degrees == [4], "two key/value heads, and two cores"
    assert (trials.values[~np.isnan(trials.values)] > 0).all()
    # The value is read from the existing run and is not measured again.
    assert measured(trials.best.parameters) == trials.best.value


@pytest.mark.slow
def test_measured_rate_waits_for_running_trial(tmp_path, tiny_dataset, llama_spec):
    """The run of a trial may still train after the search that launched it has ended."""
    recipe = Recipe(data=str(tiny_dataset.directory), num_steps=5)
    spec, parameters = llama_spec.replace(vocab_size=300), {"micro_batch_size": 2}
    measured = MeasuredRate(spec=spec, recipe=recipe, directory=tmp_path, num_devices=1)
    plan = plan_of_trial(parameters, devices_per_node=1)
    run = kit.launch(tmp_path / "micro_batch_size_2", spec=spec, plan=plan, recipe=recipe)
    assert not run.job.state.is_final
    assert measured(parameters) > 0 and run.job.status().attempt == 1
