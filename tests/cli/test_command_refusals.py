"""Commands and calls that are refused: the error message is checked, and no file may change."""

import fcntl
import hashlib
import os
import re
import shlex
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import kit
from cluster import slurm
from cluster.attempts import AttemptOutcome, claim_attempt, write_end
from cluster.job import JobSpec
from cluster.process import Process
from cluster.record import ConfigError
from cluster.site import Site
from cluster.state import (
    JobError,
    JobState,
    log_path,
    take_request,
    update_state,
    write_request,
)
from cluster.submission import submit
from kit import launcher
from kit.cli.app import app
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.data import Dataset
from kit.errors import CheckpointError, DataError, MissingPackageError, RunError
from kit.evaluate.follow import follow_run
from kit.interop.logs.importers import import_log
from kit.measure import gemm
from kit.run import HOOK, Run
from kit.run.checkpoint import Manifest
from tests.cluster.eks import eks
from tests.support.foreign_logs import ARGUMENTS, head, line
from tests.support.recorded_runs import rows
from tests.support.runs import new_run

PLAN = Plan(global_batch_size=8)
STEPS = 20
FILES = "--model runs/rep/spec.json --recipe runs/rep/recipe.json --set plan.global_batch_size=8"
"""Options that pass the settings of the finished run to a command, as for a new run."""


def contents(folder: Path) -> dict[str, str]:
    """Returns a dict from each path below a folder to the hash of its file, the target of its link,
    or "/" for a folder.
    """

    def told(path: Path) -> str:
        if path.is_symlink():
            return f"-> {os.readlink(path)}"
        return "/" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()

    return {str(path.relative_to(folder)): told(path) for path in sorted(folder.rglob("*"))}


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., None]:
    """Returns a function that calls an action. The action must raise an error with a message, and
    must not change any file.
    """

    def check(error: type[Exception], message: str, action: Callable, *given, **named) -> None:
        before = contents(tmp_path)
        with pytest.raises(error) as raised:
            action(*given, **named)
        assert message in str(raised.value)
        assert contents(tmp_path) == before, "refused, and yet it changed something"

    return check


@pytest.fixture
def finished(
    tmp_path: Path, spec: ModelSpec, tiny_dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """A finished run with one checkpoint request that was processed. The run's files are written
    without running a job.
    """
    monkeypatch.chdir(tmp_path)
    recipe = Recipe(data=str(tiny_dataset.directory), num_steps=STEPS, warmup_steps=15)
    site = Site.load("laptop").with_measured_peak("fp32", 1e11, "test")
    run = new_run(tmp_path / "runs" / "rep", spec=spec, plan=PLAN, recipe=recipe, site=site)
    job = launcher.job_spec(run).replace(argv=("true",))
    attempt = claim_attempt(run.directory)
    job.write(run.directory / "job.json")
    PLAN.write(run.directory / "plan.attempt_01.json")
    (run.directory / "submit.sh").write_text("#!/bin/bash\n")
    (run.directory / "metrics.jsonl").write_text("".join(rows(1, STEPS)))
    write_request(run.directory, "checkpoint")
    take_request(run.directory, "checkpoint", step=10)
    log_path(run.directory, attempt, 0).parent.mkdir(parents=True, exist_ok=True)
    log_path(run.directory, attempt, 0).write_text("step 20 of 20\n")
    done = {"step": STEPS, "attempt": attempt, "samples": 160, "tokens": 160 * 16}
    manifest = Manifest(**done, seed=1234, time=0.0, spec=spec, plan=PLAN, files={})
    run.checkpoints.path(STEPS).mkdir(parents=True)
    run.checkpoints.complete(run.checkpoints.path(STEPS), manifest)
    write_end(run.directory, attempt, AttemptOutcome(0, "the one rank ended with code 0"))
    return run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """List of the runs that a test has launched. `launcher.submit` is replaced, so no job
    starts.
    """
    found: list[Run] = []

    def submit(prepared: launcher.PreparedLaunch) -> Run:
        found.append(prepared.run)
        return prepared.run

    monkeypatch.setattr(launcher, "submit", submit)
    return found


def go_on(run: Run, **changes: Any) -> Run:
    """Launches a finished run again with 10 more steps. Keywords change the arguments of
    `kit.launch`.
    """
    recipe = run.recipe.replace(num_steps=STEPS + 10)
    given = {"directory": run.directory, "spec": run.spec, "plan": PLAN, "recipe": recipe}
    return kit.launch(**{**given, **changes})


def kit_command(words: str) -> None:
    app(shlex.split(words), standalone_mode=False)


def one_device(site: Site, **slurm_fields: Any) -> Site:
    """Returns a site with one device per node, and with changed fields of `site.slurm`. A Trainium
    device is replaced by a CPU core.
    """
    if site.device.trainium is not None:
        site = site.replace(device=Site.load("laptop").device)
    if slurm_fields:
        site = site.replace(slurm=site.slurm.replace(**slurm_fields))
    return site.replace(devices_per_node=1)


MINE = {"account": "me", "partition": "batch"}


@pytest.fixture
def deaf_slurm(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A fake Slurm that accepts compile jobs and refuses all other jobs. The fixture's value is the
    list of received commands.
    """
    told: list[list[str]] = []

    def refuse(words: list[str], *_: object, **__: object) -> str:
        told.append(words)
        if words[0] != "sbatch" or words[-1] == "submit.sh":
            raise JobError("sbatch: error: Invalid account or account/partition combination")
        return "41\n"

    monkeypatch.setattr(slurm, "slurm_command", refuse)
    monkeypatch.setattr(slurm, "check", lambda job, site: None)
    return told


COMMANDS = """
resume runs/rep --set plan.data_parallel=8 | RunError | has finished its 20 steps
launch runs/rep --steps 10 | RunError | 20 steps, and 10 were asked for. Continue it: `kit resume
resume runs/rep --steps 10 | RunError | 20 steps, and 10 were asked for. Continue it
resume runs/rep --steps 40 --set plan.tensr_parallel=8 | ConfigError | tensr_parallel
resume runs/rep --set recipe.seed=8 | ConfigError | recipe.seed: cannot change on a resume
resume runs/rep --minutes nan | ConfigError | nan: not allowed. Give a number above 0
stop runs/rep | RunError | Continue it: `kit resume runs/rep --steps N`.
stop runs/rep --now | RunError | nothing to stop
checkpoint runs/rep | RunError | nothing to checkpoint
export runs/rep --out export.csv --format csv | RunError | exists
export runs/rep --format xls | ConfigError | format
status nowhere | RunError | nowhere is not a run directory
runs runs --compare rap | RunError | no such run
eval runs/rep --submit | ConfigError | only with --follow
eval runs/rep --suite hlta | ConfigError | is unknown
eval empty | RunError | neither a run directory (no spec.json) nor a Hugging Face folder
data build full | DataError | is not a dataset
data build new --source nowhere.txt | DataError | no such file or folder. Give text
data build new --source full --tokenizer empty | DataError | finds none. Give a tokenizer.json
launch full FILES | RunError | is not a run directory
launch new --set tensor_parallel=2 | ConfigError | 'tensor_parallel' is not allowed
launch new --set plan.tensr_parallel=2 | ConfigError | Did you mean 'tensor_parallel'?
launch new --model dmeo | ConfigError | spec.preset: 'dmeo' is unknown
launch new --minutes -1 | ConfigError | -1: not allowed. Give a number above 0
launch new --recipe absent.json | ConfigError | no such file
launch new --recipe hlat-7 | ConfigError | 'hlat-7' is unknown. Did you mean 'hlat-7b'?
launch new --plan absent.json | ConfigError | expected a Plan as JSON
launch new --set recipe.schedule=wds | ConfigError | 'wds' is not allowed. Allowed: 'cosine', 'wsd'
launch new --set recipe.schedule=wds --show | ConfigError | 'wds' is not allowed. Allowed: 'cosine'
launch new --set recipe.schedule=wds --recipe frontier-175b --show | ConfigError | schedule: 'wds'
launch new --set recipe.init_from=NOPE | ConfigError | init_from: NOPE: no such folder
launch new --recipe frontier-175b --data d | ConfigError | frontier-175b does not state
launch new --recipe hlat-7b --site eks-trn1 --show | ConfigError | is not below
launch new --recipe hlat-7b --show | ConfigError | for one machine. Give a plan of at most 256
launch new --recipe hlat-7b --site frontier --show | ConfigError | trains on AWS Trainium alone
launch new --data '[/red]none' | DataError | [/red]none: not a dataset
launch new --data runs/rep | DataError | Give a folder made by `kit data build`
launch new --data nowhere | DataError | but empty or absent. Build it: kit data build /
validate --calibrate 3 | ConfigError | --calibrate 3: needs --rows FILE
bench --out mine.json | ConfigError | not a .toml
plan frontier-175b --nodes 2 --batch 8 | ConfigError | or plan the model gpt-175b with --batch
plan demo --site frontier --devices 8 --batch 16 --out a.txt | ConfigError | not a .json file
plan demo --site frontier --devices 2 --batch 8 --tokens -5 | ConfigError | takes 2,048. Give more
plan demo --site laptop --devices 2 --batch 8 | ConfigError | (`kit bench --out FILE.toml`)
"""
"""Table with one refused command per line: command, type of the error, part of the error
message.
"""


@pytest.mark.parametrize("row", COMMANDS.strip().splitlines())
def test_refused_command_advises_and_changes_nothing(row, finished, tmp_path, answer) -> None:
    words, error, message = row.replace("FILES", FILES).split(" | ")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "export.csv").write_text("mine")
    (tmp_path / "empty").mkdir()
    before = contents(tmp_path)
    said = answer(words)
    assert f"{error}: " in said and message in said
    assert contents(tmp_path) == before


# Launch and resume --------------------------------------------------------------------------------


def test_launch_into_existing_run_keeps_its_settings(finished, started) -> None:
    """Warm-up, layout and site are taken from the run unless the command gives them. The command
    that the error message advises works as printed.
    """
    two = "--set plan.tensor_parallel=2"
    message = "has finished its 20 steps, and 20 were asked for"
    with pytest.raises(RunError, match=message) as raised:
        kit_command(f"launch runs/rep {two}")
    turns = "`kit (resume .* --steps N .*)`, which turns plan.tensor_parallel = 1 into 2"
    [advised] = re.findall(turns, str(raised.value))
    assert not started
    kit_command(advised.replace(" N ", " 40 "))
    kit_command(f"launch runs/rep --steps 40 {two}")
    for run in started:
        assert run.recipe == finished.recipe.replace(num_steps=40, decay_steps=20)
        assert run.plan == PLAN.replace(tensor_parallel=2)
        assert (run.spec, run.site) == (finished.spec, finished.site)
    assert len(started) == 2
    message = r"spec.num_layers = 4, not 3; recipe.beta1 = 0.9, not 0.5"
    with pytest.raises(RunError, match=message) as raised:
        other = "--set spec.num_layers=3 --set recipe.beta1=0.5"
        kit_command(f"launch runs/rep {other} --steps 40 {two}")
    assert f"`kit resume {finished.directory} --steps 40 {two}`" in str(raised.value)


def fail(run: Run, step: int | None, line: str) -> None:
    """Writes the files of one more attempt, which fails after `step`. Its log ends with `line`."""
    attempt = claim_attempt(run.directory)
    log_path(run.directory, attempt, 0).write_text(f"step 22 of 40\n{line}\n")
    update_state(run.directory, attempt=attempt, state=JobState.RUNNING, step=step)
    write_end(run.directory, attempt, AttemptOutcome(1, "rank 0 ended with code 1", 0))


def test_resume_prints_the_last_failure_and_starts(finished, started, capsys) -> None:
    def resume(command: str = "resume runs/rep --steps 40") -> str:
        kit_command(command)
        return " ".join(capsys.readouterr().err.split())

    assert "ended" not in resume()
    fail(finished, 22, "ValueError: document 17 is empty")
    said = resume()
    reason = "rank 0 ended with code 1: ValueError: document 17 is empty."
    assert f"Attempt 2 ended at step 22 (failed): {reason}" in said and "both" not in said
    assert reason in resume("launch runs/rep --steps 40")
    fail(finished, 22, "ValueError: document 18 is empty")
    said = resume()
    assert "attempts 2 and 3 both ended at step 22 with: rank 0 ended with code 1: Value" in said
    assert "document 18" in said and "attempt_03/rank_00000.log" in said
    fail(finished, 24, "ValueError: document 18 is empty")
    assert "both" not in resume()
    fail(finished, 24, "KeyError: 'text'")
    assert "both" not in resume()
    for _ in range(2):
        fail(finished, None, "ConfigError: recipe.hook: no on_step")
    assert "both ended before the first step with" in resume()
    assert len(started) == 7


def test_missing_hook_file_needs_a_copy_in_the_run(finished, refused, started) -> None:
    recipe = finished.recipe.replace(hook=str(finished.directory / "gone.py"))
    recipe.write(finished.directory / "recipe.json")
    (finished.directory / HOOK).write_text("def on_step(state): return {}")
    words = "launch runs/rep --steps 40"
    mistyped = f"{words} --set recipe.hook=mistyped.py"
    refused(RunError, "mistyped.py' cannot be read", kit_command, mistyped)
    assert not started
    kit_command(words)
    assert len(started) == 1


def test_peak_is_measured_after_all_checks(finished, refused, started, monkeypatch) -> None:
    rounds: list[str] = []

    def measured(site: Site, dtype: str) -> Site:
        rounds.append(dtype)
        return site.with_measured_peak(dtype, 2e11, "here")

    monkeypatch.setattr(gemm, "measured_site", measured)
    words = f"launch runs/rep --site laptop {FILES}"
    many = "--steps 40 --set plan.data_parallel=257 --set plan.global_batch_size=257"
    for error, message, more in (
        (RunError, "has finished its 20 steps", ""),
        (RunError, "recipe.hook: ", "--steps 40 --set recipe.hook=absent.py"),
        (ConfigError, "at most 256", many),
    ):
        refused(error, message, kit_command, f"{words} {more}")
    assert rounds == []
    kit_command(f"{words} --steps 40")
    [run] = started
    assert rounds == ["fp32"] and run.site.peak_flops_per_s("fp32") == 2e11


def test_launch_with_invalid_settings_is_refused(finished, refused, tmp_path, monkeypatch) -> None:
    spec, recipe = finished.spec, finished.recipe.replace(num_steps=STEPS + 10)
    other = Site.load("laptop").with_measured_peak("fp32", 9e11, "another machine")
    whole = {"plan": PLAN.replace(data_parallel=8), "site": other, "recipe": finished.recipe}
    nine = PLAN.replace(data_parallel=9, global_batch_size=9)
    many = PLAN.replace(data_parallel=257, global_batch_size=257)
    skip = {"plan": PLAN.replace(engine="deepspeed"), "recipe": recipe.replace(on_spike="skip")}
    fast, absent = recipe.replace(learning_rate=0.1), recipe.replace(data=str(tmp_path / "absent"))
    cut = tmp_path / "cut"
    shutil.copytree(recipe.data, cut)
    os.truncate(cut / "train.bin", 1000)
    long = spec.replace(sequence_length=Dataset.open(recipe.data).validation.num_tokens)
    unheld = {"spec": long, "recipe": recipe.replace(validation_every=10)}
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (RunError, "has finished its 20 steps", whole),
        (RunError, "spec.num_layers = 4, not 2", {"spec": spec.replace(num_layers=2)}),
        (RunError, "recipe.learning_rate = 0.0003, not 0.1", {"recipe": fast}),
        (ConfigError, "spec.num_heads", {"plan": PLAN.replace(tensor_parallel=3)}),
        (ConfigError, "vocab_size is 128", {"spec": spec.replace(vocab_size=128)}),
        (DataError, "kit data build", {"recipe": absent}),
        (DataError, "train.bin", {"recipe": recipe.replace(data=str(cut))}),
        (DataError, "1,000,000", {"spec": spec.replace(sequence_length=1_000_000)}),
        (DataError, "validation.bin holds", unheld),
        (ConfigError, "recipe.on_spike: 'skip'", skip),
        (ConfigError, "at most 256", {"plan": many}),
        (ConfigError, "do not fill whole nodes", {"site": Site.load("frontier"), "plan": nine}),
        (ConfigError, "has no [slurm] table", {"site": one_device(Site.load("dgx-h100"))}),
        (ConfigError, "still 'EDIT'", {"site": one_device(Site.load("frontier"))}),
        (ConfigError, "still 'EDIT'", {"site": one_device(Site.load("eks-trn1"))}),
        (ConfigError, "is not below", {"site": one_device(eks())}),
    ]
    for error, message, changes in cases:
        refused(error, message, go_on, finished, **changes)
    monkeypatch.setenv("PATH", "/nowhere")
    site = one_device(Site.load("frontier"), **MINE)
    message = "sbatch is not found here. Submit from a login node of the cluster, or try a"
    refused(ConfigError, f"{message} simulated one", go_on, finished, site=site)
    site = one_device(eks("/"))
    refused(JobError, "kubectl is not installed here", go_on, finished, site=site)
    if not find_spec("neuronx_distributed"):
        neuron = PLAN.replace(engine="neuron")
        refused(MissingPackageError, "neuronx", go_on, finished, plan=neuron)


def test_launch_into_unusable_directory_is_refused(
    finished, refused, tmp_path, monkeypatch
) -> None:
    (tmp_path / "file").write_text("mine")
    refused(RunError, "cannot be written", go_on, finished, directory=tmp_path / "file" / "run")
    with monkeypatch.context() as full:
        usage = shutil.disk_usage(tmp_path)._replace(free=10)
        full.setattr(shutil, "disk_usage", lambda path: usage)
        other = PLAN.replace(micro_batch_size=2)
        words = "no space left for a checkpoint: 0.7 MB needed"
        refused(CheckpointError, words, go_on, finished, plan=other)
    folder = finished.checkpoints.path(STEPS)
    manifest = Manifest.read(folder / "manifest.json").replace(files={"gone.distcp": 7})
    finished.checkpoints.complete(folder, manifest)
    refused(CheckpointError, "gone.distcp is missing", go_on, finished)


def test_launch_of_a_run_in_use_is_refused(finished, refused) -> None:
    with (finished.directory / launcher.LAUNCH_LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(RunError, "is being launched by another process", go_on, finished)
    (finished.directory / launcher.LAUNCH_LOCK).unlink()
    update_state(finished.directory, attempt=2, state="running", process=Process.current())
    message, other = "is in use: attempt 2", PLAN.replace(micro_batch_size=2)
    refused(JobError, message, go_on, finished, plan=other)
    refused(JobError, message, kit.resume, finished.directory)


def test_job_with_unstartable_program_is_refused(finished, refused, tmp_path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    for run_dir in (finished.directory, tmp_path / "new" / "run"):
        job = JobSpec(name="x", run_dir=str(run_dir), argv=(str(program),), num_processes=2)
        message = "could not be started: rank 0 could not"
        refused(JobError, message, submit, job, Site.load("laptop"))


@pytest.mark.parametrize(("base", "cancelled"), [("frontier", 0), ("trn1.32xlarge", 3)])
def test_job_refused_by_slurm_changes_no_file(
    base, cancelled, finished, refused, tmp_path, deaf_slurm
) -> None:
    """Slurm refuses the training job after all checks of the kit have passed. The compile jobs that
    Slurm accepted before are cancelled.
    """
    message, site = "Invalid account", one_device(Site.load(base), **MINE)
    refused(JobError, message, go_on, finished, site=site)
    refused(JobError, message, go_on, finished, site=site, directory=tmp_path / "new" / "run")
    refused(JobError, message, submit, launcher.job_spec(finished), site)
    assert deaf_slurm.count(["scancel", "41"]) == cancelled


def test_eval_job_refused_by_slurm_changes_no_file(finished, refused, tmp_path, deaf_slurm) -> None:
    def follow() -> list:
        return list(follow_run(finished.directory, ("heldout",), submit=True, poll_s=0))

    one_device(Site.load("frontier"), **MINE).write(finished.directory / "site.json")
    before = contents(tmp_path)
    (said,) = follow()
    assert not said.scored and "Invalid account" in said.text and contents(tmp_path) == before
    Site.load("frontier").write(finished.directory / "site.json")
    refused(ConfigError, "still 'EDIT'", follow)


def test_refused_import_changes_no_file(finished, refused, tmp_path) -> None:
    log, other = tmp_path / "train.log", tmp_path / "other.log"
    text = head(ARGUMENTS, vocabulary=51200, engine_micro_batch=2)
    log.write_text(text + line(1, 346.65) + line(2, 346.65))
    other.write_text("nothing of a step\n")
    given = {"out": tmp_path / "theirs", "format": "megatron", "site": Site.load("lumi")}
    assert import_log(log, **given).steps == 2
    new = {"out": tmp_path / "new"}
    for error, message, source, changes in (
        (ConfigError, "is unknown", log, {"format": "neom"}),
        (RunError, "was not imported from", log, {"out": finished.directory}),
        (RunError, "was not imported from", other, {}),
        (DataError, "tells of a step", other, new),
        (DataError, "cannot be read", tmp_path / "absent.log", new),
        (ConfigError, "more than the", log, {"changes": {"plan": {"global_batch_size": 65536}}}),
        (ConfigError, "tensr_parallel", log, {"changes": {"plan": {"tensr_parallel": 2}}}),
    ):
        refused(error, message, import_log, source, **{**given, **changes})
