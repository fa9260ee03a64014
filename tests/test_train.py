"""Training jobs of several real processes: resumed, stopped, failing and moved to another
layout.
"""

import importlib.metadata
import io
import itertools
import json
import math
import os
import shutil
import time

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import kit
from cluster.state import JobState, read_state, update_state
from kit.cli.app import app
from kit.config.plan import Plan
from kit.config.recipe import DataPhase, DataSource
from kit.data import Dataset
from kit.errors import CheckpointError
from kit.interop.weights import load_model
from kit.launcher import draft, job_spec, submit
from kit.monitor import run_figure, status_row, status_table
from kit.run import Run
from kit.run.checkpoint_reader import CheckpointTensors
from kit.show.terminal import PlainConsole
from kit.train import _record_attempt
from tests.support.attempts import Attempt, finished, lines_of
from tests.support.fault_cost import DP2
from tests.support.workers import local_run

STEPS = 120  # STEPS is the number of steps of the recipe in conftest.py.
ONE = Plan(micro_batch_size=8, global_batch_size=8)
PATIENCE_S = 180


def assert_done(run: Run) -> None:
    status = run.job.wait(timeout_s=PATIENCE_S)
    assert status.state is JobState.DONE, f"{status}\n{run.job.logs()}"


@pytest.fixture
def forked(monkeypatch) -> None:
    """Makes `launch` and `resume` fork the ranks and wait until they have ended."""

    def submit(prepared: kit.launcher.PreparedLaunch) -> Run:
        run = prepared.run
        for name, text in run.configuration_texts().items():
            (run.directory / name).write_text(text)
        state = read_state(run.directory)
        attempt = state.attempt + 1 if state else 1
        finished(run, attempt)
        update_state(run.directory, attempt=attempt, state=JobState.DONE)
        return run

    monkeypatch.setattr(kit.launcher, "submit", submit)


def test_run_directory_holds_the_documented_files(unbroken):
    names = {path.name for path in unbroken.directory.iterdir()}
    assert names >= {
        *"spec.json plan.json recipe.json site.json job.json submit.sh env.json state.json".split(),
        *"exit.json metrics.jsonl ranks logs checkpoints plan.attempt_01.json".split(),
        "site.attempt_01.json",
    }
    metrics = unbroken.metrics()
    assert metrics["step"].tolist() == list(range(1, STEPS + 1))
    assert (metrics["tokens"] == 8 * 16).all() and (metrics["step_time_s"] > 0).all()
    assert metrics["loss"][-10:].mean() < 0.7 * metrics["loss"][:5].mean()
    assert unbroken.checkpoints.steps() == [100, 120]
    manifest = unbroken.checkpoints.manifest(120)
    assert (manifest.samples, manifest.tokens, manifest.attempt) == (960, 960 * 16, 1)
    assert json.loads((unbroken.directory / "env.json").read_text())["torch"]


def test_full_disk_keeps_older_checkpoints(spec, recipe, mount_memory, tmp_path):
    # The disk has free space but few free inodes, so that a save fails after some files.
    disk = mount_memory("size=64m,nr_inodes=12")
    plan = DP2.replace(data_parallel=1, zero_stage=0)
    often = recipe.replace(checkpoint_every=2)
    prepared = local_run(tmp_path / "run", spec, plan, often)
    prepared.checkpoints.directory.symlink_to(disk)
    # Leave inodes for two checkpoints and for the first files of a third.
    for number in itertools.count():
        if os.statvfs(disk).f_favail <= 9:
            break
        (disk / f"taken-{number}").touch()
    run = kit.resume(prepared.directory)
    status = run.job.wait(timeout_s=PATIENCE_S)
    assert status.state is JobState.FAILED, run.job.logs()
    assert "No space left" in status.reason, run.job.logs()
    steps = run.checkpoints.steps()
    assert steps and f"The checkpoint of step {steps[-1]} is intact" in status.reason
    load_model(run, steps[-1])
    for taken in disk.glob("taken-*"):
        taken.unlink()


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel": 2, "sequence_parallel": True},
        {"pipeline_parallel": 2},
        {"pipeline_parallel": 3},
        {"data_parallel": 2, "zero_stage": 3},
    ],
    ids=["TP2", "PP2", "PP3 of 4 layers", "ZeRO3"],
)
def test_resume_on_another_layout_keeps_the_loss(layout, unbroken, forked, tmp_path):
    """The last 20 steps are repeated from the checkpoint of step 100 on another layout."""
    shutil.copytree(unbroken.directory, tmp_path / "moved")
    shutil.rmtree(Run.open(tmp_path / "moved").checkpoints.path(STEPS))
    run = kit.resume(
        tmp_path / "moved", plan=DP2.replace(**{"data_parallel": 1, "zero_stage": 0, **layout})
    )
    ours, theirs = run.metrics(), unbroken.metrics()
    assert ours["attempt"].tolist() == [1] * 100 + [2] * 20
    assert ours.plans[1] == DP2 and ours.plans[2] != DP2
    np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-5)
    np.testing.assert_allclose(ours["grad_norm"], theirs["grad_norm"], rtol=1e-4)
    moved, stayed = (load_model(each, STEPS).state_dict() for each in (run, unbroken))
    assert moved.keys() == stayed.keys()
    assert all(torch.allclose(moved[name], stayed[name], atol=1e-4) for name in moved)


@pytest.mark.slow
def test_resume_across_shard_sizes_and_data_phases(spec, recipe, forked, tiny_dataset, tmp_path):
    """Optimizer states are sharded over all replicas, then over two replicas, then over all again.
    The data mix differs between the attempts.
    """
    for name in ("web", "code"):
        shutil.copytree(tiny_dataset.directory, tmp_path / name)
    sources = [
        DataSource(paths=(str(tmp_path / name),), weight=weight)
        for name, weight in (("web", 0), ("code", 1))
    ]
    phases = [
        DataPhase(until_tokens=8 * 16 * end, weights=weights)
        for end, weights in ((2, (1, 1)), (5, (3, 1)))
    ]
    steps = {"num_steps": 3, "decay_steps": 9, "warmup_steps": 0, "validation_every": None}
    recipe = recipe.replace(**steps, sources=sources, phases=phases)
    plan = DP2.replace(data_parallel=4, zero_stage=3, shard_size=2)
    whole = recipe.replace(num_steps=9)
    straight = kit.launch(tmp_path / "straight", spec=spec, plan=DP2, recipe=whole)
    run = kit.launch(tmp_path / "resumed", spec=spec, plan=DP2, recipe=recipe)
    for steps, now in ((6, plan), (9, plan.replace(shard_size=None, zero_stage=2))):
        run = kit.resume(run.directory, plan=now, num_steps=steps)
    assert run.metrics()["attempt"].tolist() == [1] * 3 + [2] * 3 + [3] * 3
    np.testing.assert_allclose(run.metrics()["loss"], straight.metrics()["loss"], rtol=1e-5)
    rows = lines_of(run)
    assert [row["share/web"] for row in rows] == [0.5] * 2 + [0.75] * 3 + [0] * 4
    assert all(row["share/web"] + row["share/code"] == 1 for row in rows)
    job_spec(run).write(run.directory / "job.json")
    told = "data so far: 36.1% web, 63.9% code; now 0.0%, 100.0%"
    assert status_row(run)["data"] == told and told in run_figure(run)[0].notes
    console = PlainConsole(width=80, file=(printed := io.StringIO()))
    console.print(status_table(run, 80))
    assert told in printed.getvalue()


TWICE_3 = {"micro_batch_size": 3, "global_batch_size": 24}
PLACES = {
    "12 sequences a batch": {"global_batch_size": 12, "micro_batch_size": 4},
    "48 sequences a batch": {"global_batch_size": 48},
    "ZeRO 3, 2 micro-batches": {"data_parallel": 4, "zero_stage": 3, **TWICE_3},
    "pipeline": {"pipeline_parallel": 2, "micro_batch_size": 2},
    "tensor and data": {"tensor_parallel": 2, "data_parallel": 2, "micro_batch_size": 2},
    "pipeline of DeepSpeed": {"pipeline_parallel": 2, "micro_batch_size": 2, "engine": "deepspeed"},
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_validation_reads_the_requested_sequences(place, spec, recipe, forked, tmp_path):
    """The validation loss does not depend on the batch size. The learning rate is too small to
    change a weight, so that the test can compute the expected loss with the complete model.
    """
    rates = {"warmup_steps": 0, "learning_rate": 1e-30, "min_learning_rate": 0}
    still = recipe.replace(num_steps=1, validation_every=1, **rates)
    held_out, plan = Dataset.open(recipe.data), ONE.replace(**PLACES[place])
    every = held_out.validation.read(0, held_out.validation.num_tokens)
    tokens = torch.tensor(every.astype(np.int64))
    every = torch.stack([tokens[at : at + 17] for at in range(0, len(tokens) - 16, 16)])
    first = torch.from_numpy(held_out.samples("validation", 16, recipe.seed).batch(0, 13))
    assert len(every) > 13
    for asked, windows in ((13, first), (10_000, every)):
        some = still.replace(validation_sequences=asked)
        run = kit.launch(tmp_path / f"{asked}", spec=spec, plan=plan, recipe=some)
        logits = load_model(run)(windows[:, :-1]).flatten(0, 1)
        expected = torch.nn.functional.cross_entropy(logits.double(), windows[:, 1:].flatten())
        assert run.metrics()["validation_loss"][-1] == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.slow
def test_checkpoint_after_validation_resumes_exactly(spec, recipe, forked, tmp_path):
    """A validation gathers the sharded weights. The checkpoint of the same step must still hold the
    optimizer's weights.
    """
    recipe = recipe.replace(num_steps=20, decay_steps=30, validation_every=10, checkpoint_every=10)
    whole = recipe.replace(num_steps=30)
    straight = kit.launch(tmp_path / "straight", spec=spec, plan=DP2, recipe=whole)
    run = kit.launch(tmp_path / "resumed", spec=spec, plan=DP2, recipe=recipe)
    kit.resume(run.directory, num_steps=30)
    assert run.metrics()["attempt"].tolist() == [1] * 20 + [2] * 10
    assert run.metrics()["loss"].tolist() == straight.metrics()["loss"].tolist()


def test_more_steps_do_not_move_the_end_of_the_schedule(spec, recipe, forked, tmp_path):
    """`kit resume --steps` and a launch into an existing run directory add steps, but do not move
    the end of the learning rate schedule. Only decay_steps moves the end.
    """
    rates = {"learning_rate": 1e-3, "min_learning_rate": 1e-4, "warmup_steps": 0}
    recipe = recipe.replace(num_steps=6, validation_every=None, **rates)
    run = kit.launch(tmp_path / "run", spec=spec, plan=ONE, recipe=recipe)
    told = CliRunner().invoke(app, ["resume", str(run.directory), "--steps", "8"]).stderr
    assert "reaches 0.0001 at step 6 (recipe.decay_steps), and stays there to step 8." in told
    kit.launch(run.directory, spec=spec, plan=ONE, recipe=recipe.replace(num_steps=9))
    cosine = [1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * step / 6)) for step in range(1, 7)]
    assert run.metrics()["learning_rate"].tolist() == pytest.approx([*cosine, 1e-4, 1e-4, 1e-4])
    kit.resume(run.directory, num_steps=10, decay_steps=20)
    assert run.metrics()["learning_rate"][-1] == pytest.approx(5.5e-4), "half way of 20"


def test_stop_writes_a_checkpoint_that_resumes(unbroken, spec, recipe, tmp_path):
    run = kit.launch(tmp_path / "stopped", spec=spec, plan=DP2, recipe=recipe)
    while run.metrics().summary()["step"] < 5:
        time.sleep(0.05)
    run.job.stop()
    assert_done(run)
    stopped_at = run.metrics().summary()["step"]
    assert stopped_at < STEPS, "the stop came too late to test anything"
    assert run.checkpoints.steps()[-1] == stopped_at
    assert run.job.status().reason == f"stopped on request at step {stopped_at}"
    kit.resume(run.directory)
    assert_done(run)
    assert run.metrics()["loss"].tolist() == unbroken.metrics()["loss"].tolist()


def test_failed_rank_is_reported_with_its_error(spec, recipe, tmp_path, tiny_dataset):
    gone = recipe.replace(data=str(tmp_path / "absent"))
    run = submit(draft(local_run(tmp_path / "broken", spec, DP2, gone)))
    status = run.job.wait(timeout_s=PATIENCE_S)
    assert status.state is JobState.FAILED
    # The log of rank 0 is not checked. If rank 1 fails first, rank 0 is ended before it logs the
    # error.
    assert "DataError" in status.reason and "absent" in status.reason


def test_other_model_or_missing_step_is_refused(unbroken, spec):
    found, other = unbroken.checkpoints, spec.replace(num_layers=2)
    with pytest.raises(CheckpointError, match="spec.num_layers is 4 there and 2 here"):
        CheckpointTensors(found, found.describe(120), other)
    with pytest.raises(CheckpointError, match="Complete steps: 100, 120"):
        load_model(unbroken, step=7)


def test_attempt_is_recorded_without_git(spec, recipe, tmp_path, monkeypatch):
    run = local_run(tmp_path / "run", spec, DP2, recipe)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(importlib.metadata.Distribution, "discover", lambda **_: iter(()))
    _record_attempt(run, 3, torch.device("cpu"))
    facts = json.loads((run.directory / "env.json").read_text())
    assert (facts["git"], facts["kit"], facts["attempt"]) == (None, None, 3) and 3 in run.plans()
    assert (facts["attention"], facts["fp32_products"]) == ("FLASH_ATTENTION", "fp32")


def test_ranks_refuse_wrong_process_count(spec, recipe, tmp_path):
    run = local_run(tmp_path / "count", spec, DP2, recipe)
    attempt = Attempt(run, WORLD_SIZE="3")
    assert attempt.wait() == [os.EX_CONFIG] * 2
    assert "= 2 processes, but 3 were started. Start 2" in attempt.log()
