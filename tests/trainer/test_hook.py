"""Hook of a user, which adds numbers to the metrics of each step, run in real ranks."""

import hashlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kit.config.plan import Plan
from kit.errors import ConfigError
from kit.monitor.dashboard import Dashboard
from kit.monitor.export import scalars
from kit.run import HOOK, Run
from kit.run.alerts import AlertLog
from kit.trainer.hook import Hook, _checked
from tests.support.attempts import finished, lines_of
from tests.support.workers import local_run, run_ranks
from tests.trainer.steps import done

STAGES = Plan(tensor_parallel=1, pipeline_parallel=2, micro_batch_size=2, global_batch_size=8)
WEIGHTS = """
import torch
import torch.distributed as dist

def on_step(state):
    count = torch.tensor([sum(p.numel() for part in state.parts for p in part.parameters())])
    dist.all_reduce(count)  # every rank is here
    return {"loss_twice": 2 * state.loss, "weights": count, "ranks": state.num_ranks, "tokens": state.tokens}
"""  # noqa: E501
FAILS = """
def on_step(state):
    if state.rank == 1 and state.step == 3:
        return 1 / (state.step - 3)
    return {"x": state.step}
"""


@pytest.fixture
def trained(spec, recipe, tmp_path):
    """Returns a function that trains a run of two pipeline stages with a given hook source. The
    function returns the run.
    """

    def trained(text: str, steps: int = 5) -> Run:
        file = tmp_path / "mine.py"
        file.write_text(text)
        short = recipe.replace(num_steps=steps, warmup_steps=0, checkpoint_every=None)
        wanted = short.replace(hook=str(file))
        run = local_run(tmp_path / "run", spec, STAGES, wanted)
        # The run uses the copy of the hook in its run directory.
        file.unlink()
        finished(run)
        return run

    return trained


def test_hook_numbers_reach_metrics_views_and_exports(trained, spec):
    run = trained(WEIGHTS)
    assert (run.directory / HOOK).read_text() == WEIGHTS
    found = lines_of(run)
    for step, row in enumerate(found, 1):
        assert row["hook/loss_twice"] == 2 * row["loss"] and 0 < row["hook/seconds"] < 5
        assert row["hook/weights"] == spec.num_params, "both stages' weights, named alike"
        assert row["hook/tokens"] == 8 * spec.sequence_length * step
    assert len(found) == 5 and scalars(run, found)[-1]["hook/ranks"] == 2.0
    dashboard = Dashboard(run)
    dashboard.read()
    assert re.search("hook: loss_twice.*ranks 2", dashboard.facts()["data"])
    env = json.loads((run.directory / "env.json").read_text())
    assert env["hook_sha256"] == hashlib.sha256(WEIGHTS.encode()).hexdigest()
    assert HOOK not in run.configuration_texts(), "its file is gone"


def test_exception_disables_the_hook_on_all_ranks(trained):
    """After the exception, training continues without the hook on all ranks."""
    run = trained(FAILS)
    assert [row.get("hook/x") for row in lines_of(run)] == [1.0, 2.0, None, None, None]
    (alert,) = AlertLog(run.directory / "alerts.jsonl").alerts
    assert (alert.kind, alert.step) == ("hook", 3)
    said = "training continues: .*rank 1: hook.py, line 4: ZeroDivisionError"
    assert re.search(said, alert.message)


def hook_in(folder: Path, text: str, notices: Any = None) -> Hook:
    (folder / HOOK).write_text(text)
    recipe, spec = SimpleNamespace(hook=str(folder / HOOK)), SimpleNamespace(sequence_length=1)
    run: Any = SimpleNamespace(directory=folder, spec=spec, recipe=recipe)
    return Hook(run, SimpleNamespace(decoders=()), None, notices)  # pyright: ignore[reportArgumentType]


def called(folder: Path, text: str) -> tuple[dict, list[str]]:
    """Runs a hook once for a finished step. Returns (numbers that the hook added to the metrics
    row, warnings).
    """
    said, step = [], done()
    row = dict(step.row)
    notices = SimpleNamespace(add=lambda kind, notice, number: said.append(notice))
    hook_in(folder, text, notices).after_step(step)
    return {name: value for name, value in step.row.items() if name not in row}, said


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1], "returned list, not a dict"),
        (None, r"returned NoneType, not a dict of numbers\. Return \{\} for none"),
        ({"x": "high"}, "gave 'x' = 'high'[.] Return a dict from name to number"),
        ({"x": True}, "gave 'x' = True"),
        ({3: 1.0}, "gave 3 = 1.0"),
    ],
)
def test_hook_result_must_be_a_dict_of_numbers(returned, message):
    with pytest.raises(TypeError, match=message):
        _checked(returned)


def test_wrong_hook_result_names_its_rank_and_file(tmp_path):
    numbers, [told] = run_ranks(1, called, tmp_path, "def on_step(state):\n    return 3\n")[0]
    assert numbers == {} and "rank 0: hook.py: TypeError: on_step returned int" in told
    assert _checked({"a": torch.tensor(2.0), "b": 3}) == {"a": 2.0, "b": 3.0}


def test_invalid_hook_file_is_refused(tmp_path):
    for text, message in (
        ("def on_step(:\n", r"hook.py, line 1: SyntaxError"),
        ("x = 1\n\n1 / 0\n", r"hook.py, line 3: ZeroDivisionError"),
        ("def on_steps(state): ...\n", "KeyError: 'on_step'"),
    ):
        with pytest.raises(ConfigError, match=f"recipe.hook: .*{message}"):
            hook_in(tmp_path, text)
