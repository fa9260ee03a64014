"""What is refused changes nothing: every file beneath the folder is compared before and after
each refusal there is.
"""

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
from cluster import local, slurm
from cluster.attempts import claim_attempt
from cluster.job import JobSpec
from cluster.outcome import write_end
from cluster.process import Process
from cluster.record import ConfigError, Record
from cluster.site import Site
from cluster.slurm import preflight
from cluster.state import JobError, ask, log_path, take_request, update_state
from kit import launcher
from kit.commands.app import app
from kit.data import Dataset
from kit.errors import CheckpointError, DataError, MissingPackageError, RunError
from kit.evaluate.follow import follow_run
from kit.foreign.importers import import_log
from kit.measure import gemm
from kit.plan import Plan
from kit.recipe import Recipe
from kit.run import HOOK, Run
from kit.run.checkpoint import Manifest
from kit.spec import ModelSpec
from tests.cluster.eks import eks
from tests.foreign.logs import ARGUMENTS, head, line
from tests.monitor.recorded import rows

PLAN = Plan(global_batch_size=8)
STEPS = 20


def contents(folder: Path) -> dict[str, str]:
    """Returns a hash of every file, the target of every link, and the name of every folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        else:
            found[name] = "/" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def refused(error: type[Exception], message: str, folder: Path, action: Callable[[], Any]) -> None:
    before = contents(folder)
    with pytest.raises(error) as raised:
        action()
    assert message in str(raised.value)
    after = contents(folder)
    changed = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    assert not changed, f"refused, and yet it changed {changed}"


@pytest.fixture
def finished(tmp_path: Path, spec: ModelSpec, tiny_dataset: Dataset) -> Run:
    """A run that has done all its steps and was once asked for a checkpoint, as a job would have
    left it.
    """
    recipe = Recipe(data=str(tiny_dataset.directory), num_steps=STEPS)
    site = Site.load("laptop").with_measured_peak("fp32", 1e11, "test")
    run = Run.create(tmp_path / "runs" / "rep", spec=spec, plan=PLAN, recipe=recipe, site=site)
    job = launcher.job_spec(run).replace(argv=("true",))
    attempt = claim_attempt(run.directory)
    job.write(run.directory / "job.json")
    PLAN.write(run.directory / "plan.attempt_01.json")
    (run.directory / "submit.sh").write_text("#!/bin/bash\n")
    (run.directory / "metrics.jsonl").write_text("".join(rows(1, STEPS)))
    ask(run.directory, "checkpoint")
    take_request(run.directory, "checkpoint", step=10)
    log_path(run.directory, attempt, 0).parent.mkdir(parents=True, exist_ok=True)
    log_path(run.directory, attempt, 0).write_text("step 20 of 20\n")
    manifest = Manifest(
        step=STEPS,
        attempt=attempt,
        samples=160,
        tokens=160 * 16,
        seed=1234,
        time=0.0,
        spec=spec,
        plan=PLAN,
        files={},
    )
    run.checkpoints.path(STEPS).mkdir(parents=True)
    run.checkpoints.complete(run.checkpoints.path(STEPS), manifest)
    write_end(run.directory, attempt=attempt, rc=0, reason="the one rank ended with code 0")
    return run


def again(run: Run, **changes: Any) -> Callable[[], Run]:
    """Returns the launch that would go on with a finished run, but for these changes."""
    recipe = run.recipe.replace(num_steps=STEPS + 10)
    given = {
        "directory": run.directory,
        "spec": run.spec,
        "plan": PLAN,
        "recipe": recipe,
        **changes,
    }
    return lambda: kit.launch(**given)


def with_cores(site: Site) -> Site:
    """Returns a site of Trainium with devices on which a plan of engine native trains, and other
    sites as they are.
    """
    return site if site.device.trainium is None else site.replace(device=Site.load("laptop").device)


def cluster_site(base: str, **changes: Any) -> Site:
    """Returns a packaged Slurm site of one device a node, filled in as a user would; Trainium's
    with CPU cores.
    """
    site = with_cores(Site.load(base))
    assert site.slurm is not None
    return site.replace(
        devices_per_node=1, slurm=site.slurm.replace(account="me", partition="batch", **changes)
    )


@pytest.fixture
def deaf_slurm(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A Slurm that refuses every job; returns what it was told."""
    told: list[list[str]] = []

    def refuse(words: list[str], *_: object, **__: object) -> str:
        told.append(words)
        if words[0] != "sbatch" or words[-1] == "submit.sh":
            raise JobError(
                "sbatch: error: Invalid account or account/partition combination specified"
            )
        return "41\n"

    monkeypatch.setattr(slurm, "slurm_command", refuse)
    monkeypatch.setattr(preflight, "check", lambda job, site: None)
    return told


# Launch and resume --------------------------------------------------------------------------------


def test_a_finished_run_keeps_its_plan_and_site(finished: Run, tmp_path: Path) -> None:
    other = Site.load("laptop").with_measured_peak("fp32", 9e11, "another machine")
    plan = PLAN.replace(data_parallel=8)
    launch = again(finished, plan=plan, site=other, recipe=finished.recipe)
    for action in (launch, lambda: kit.resume(finished.directory, plan=plan)):
        refused(RunError, "has finished its 20 steps", tmp_path, action)


def test_launch_where_a_run_is_asks_for_what_is_given_and_else_for_what_the_run_has(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody gives the demo's warm-up, layout and site again; what is advised can be given as it
    stands.
    """
    started: list[Run] = []
    monkeypatch.setattr(launcher, "submit", lambda run, limit_s: started.append(run))
    two = ("--set", "plan.tensor_parallel=2")

    def launch(*words: str) -> None:
        kit_command("launch", str(finished.directory), *words)

    with pytest.raises(
        RunError, match="has finished its 20 steps, and 20 were asked for"
    ) as raised:
        launch(*two)
    advised = re.search(
        "`kit (resume .* --steps N .*)`, which turns plan.tensor_parallel = 1 into 2",
        str(raised.value),
    )
    assert advised and not started
    kit_command(*shlex.split(advised[1].replace(" N ", " 40 ")))
    launch("--steps", "40", *two)
    for run in started:
        assert run.recipe == finished.recipe.replace(
            num_steps=40, decay_steps=20
        ) and run.plan == PLAN.replace(tensor_parallel=2)
        assert (run.spec, run.site) == (finished.spec, finished.site)
    assert len(started) == 2
    with pytest.raises(
        RunError, match=r"spec.num_layers = 4, not 3; recipe.beta1 = 0.9, not 0.5"
    ) as raised:
        launch("--set", "spec.num_layers=3", "--set", "recipe.beta1=0.5", "--steps", "40", *two)
    assert f"`kit resume {finished.directory} --steps 40 --set plan.tensor_parallel=2`" in str(
        raised.value
    )


def test_fewer_steps_than_a_run_has_done_are_told_as_such(finished: Run, tmp_path: Path) -> None:
    """And not as a warm-up too long, which nobody has given."""
    finished.recipe.replace(warmup_steps=15).write(finished.directory / "recipe.json")
    for command in ("launch", "resume"):
        words = (command, str(finished.directory), "--steps", "10")
        message = "has finished its 20 steps, and 10 were asked for. Go on with it: `kit resume "
        refused(RunError, message, tmp_path, lambda words=words: kit_command(*words))


def test_only_the_hook_that_a_run_has_may_be_gone(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Run] = []
    monkeypatch.setattr(launcher, "submit", lambda run, limit_s: started.append(run))
    finished.recipe.replace(hook=str(tmp_path / "gone.py")).write(
        finished.directory / "recipe.json"
    )
    (finished.directory / HOOK).write_text("def on_step(state): return {}")
    words = ("launch", str(finished.directory), "--steps", "40")
    wrong = str(tmp_path / "mistyped.py")
    refused(
        RunError,
        f"{wrong!r} cannot be read",
        tmp_path,
        lambda: kit_command(*words, "--set", f"recipe.hook={wrong}"),
    )
    assert not started
    kit_command(*words)
    assert len(started) == 1


def test_nothing_is_measured_before_the_last_refusal(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[str] = []

    def measured(site: Site, dtype: str) -> Site:
        rounds.append(dtype)
        return site.with_measured_peak(dtype, 2e11, "here")

    monkeypatch.setattr(gemm, "measured_site", measured)
    monkeypatch.setattr(
        launcher, "submit", lambda run, limit_s: rounds.append(run.site.peak_flops_per_s("fp32"))
    )
    files = (
        "--recipe",
        f"{finished.directory}/recipe.json",
        "--model",
        f"{finished.directory}/spec.json",
    )
    words = (
        "launch",
        str(finished.directory),
        "--site",
        "laptop",
        *files,
        "--set",
        "plan.global_batch_size=8",
    )
    for error, message, more in (
        (RunError, "has finished its 20 steps", ()),
        (RunError, "recipe.hook: ", ("--steps", "40", "--set", "recipe.hook=absent.py")),
        (
            ConfigError,
            "at most 256",
            (
                "--steps",
                "40",
                "--set",
                "plan.data_parallel=257",
                "--set",
                "plan.global_batch_size=257",
            ),
        ),
    ):
        refused(error, message, tmp_path, lambda more=more: kit_command(*words, *more))
    assert rounds == []
    kit_command(*words, "--steps", "40")
    assert rounds == ["fp32", 2e11]


def test_launch_refused_by_what_is_given(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, recipe = finished.spec, finished.recipe.replace(num_steps=STEPS + 10)
    nine = PLAN.replace(data_parallel=9, global_batch_size=9)
    other_engine = PLAN.replace(engine="deepspeed")
    cases: list[tuple[type[Exception], str, dict[str, Record]]] = [
        (RunError, "spec.num_layers = 4, not 2", {"spec": spec.replace(num_layers=2)}),
        (
            RunError,
            "recipe.learning_rate = 0.0003, not 0.1",
            {"recipe": recipe.replace(learning_rate=0.1)},
        ),
        (ConfigError, "spec.num_heads", {"plan": PLAN.replace(tensor_parallel=3)}),
        (ConfigError, "vocab_size is 128", {"spec": spec.replace(vocab_size=128)}),
        (DataError, "kit data build", {"recipe": recipe.replace(data=str(tmp_path / "absent"))}),
        (
            ConfigError,
            "recipe.on_spike: 'skip'",
            {"plan": other_engine, "recipe": recipe.replace(on_spike="skip")},
        ),
        (
            ConfigError,
            "at most 256",
            {"plan": PLAN.replace(data_parallel=257, global_batch_size=257)},
        ),
        (ConfigError, "do not fill whole nodes", {"site": Site.load("frontier"), "plan": nine}),
        (
            ConfigError,
            "has no [slurm] table",
            {"site": Site.load("dgx-h100").replace(devices_per_node=1)},
        ),
        (ConfigError, "still 'EDIT'", {"site": Site.load("frontier").replace(devices_per_node=1)}),
        (
            ConfigError,
            "still 'EDIT'",
            {"site": with_cores(Site.load("eks-trn1")).replace(devices_per_node=1)},
        ),
        (ConfigError, "is not below", {"site": with_cores(eks()).replace(devices_per_node=1)}),
    ]
    for error, message, changes in cases:
        refused(error, message, tmp_path, again(finished, **changes))
    monkeypatch.setenv("PATH", "/nowhere")
    refused(
        ConfigError,
        "sbatch is not found here",
        tmp_path,
        again(finished, site=cluster_site("frontier")),
    )
    site = with_cores(eks("/")).replace(devices_per_node=1)
    refused(JobError, "kubectl is not installed here", tmp_path, again(finished, site=site))
    if not find_spec("neuronx_distributed"):
        refused(
            MissingPackageError,
            "neuronx",
            tmp_path,
            again(finished, plan=PLAN.replace(engine="neuron")),
        )


def test_launch_refused_by_what_is_in_the_directory(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("mine")
    (tmp_path / "file").write_text("mine")
    refused(
        RunError, "is not a run directory", tmp_path, again(finished, directory=tmp_path / "thesis")
    )
    refused(
        RunError,
        "cannot be written",
        tmp_path,
        again(finished, directory=tmp_path / "file" / "run"),
    )
    with monkeypatch.context() as full:
        usage = shutil.disk_usage(tmp_path)._replace(free=10)
        full.setattr(shutil, "disk_usage", lambda path: usage)
        refused(
            CheckpointError,
            "no space left",
            tmp_path,
            again(finished, plan=PLAN.replace(micro_batch_size=2)),
        )
    folder = finished.checkpoints.path(STEPS)
    manifest = Manifest.read(folder / "manifest.json").replace(files={"gone.distcp": 7})
    finished.checkpoints.complete(folder, manifest)
    refused(CheckpointError, "gone.distcp is missing", tmp_path, again(finished))


def test_launch_refused_by_others_at_work(finished: Run, tmp_path: Path) -> None:
    handle = os.open(finished.directory, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    refused(RunError, "is being launched by another process", tmp_path, again(finished))
    os.close(handle)
    update_state(finished.directory, attempt=2, state="running", process=Process.current())
    for launch in (
        again(finished, plan=PLAN.replace(micro_batch_size=2)),
        lambda: kit.resume(finished.directory),
    ):
        refused(JobError, "is in use: attempt 2", tmp_path, launch)


def test_job_whose_processes_cannot_be_started(finished: Run, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    for run_dir in (finished.directory, tmp_path / "new" / "run"):
        job = JobSpec(name="x", run_dir=str(run_dir), argv=(str(program),), num_processes=2)
        refused(
            JobError,
            "could not be started: rank 0 could not",
            tmp_path,
            lambda job=job: local.submit(job),
        )


@pytest.mark.parametrize("base", ["frontier", "trn1.32xlarge"])
def test_job_that_slurm_refuses(
    base: str, finished: Run, tmp_path: Path, deaf_slurm: list[list[str]]
) -> None:
    """Its word comes after everything else; a job that compiles ahead was taken by then."""
    message, site, job = "Invalid account", cluster_site(base), launcher.job_spec(finished)
    refused(JobError, message, tmp_path, again(finished, site=site))
    refused(
        JobError, message, tmp_path, again(finished, site=site, directory=tmp_path / "new" / "run")
    )
    refused(JobError, message, tmp_path, lambda: slurm.submit(job, site))
    assert [words[0] for words in deaf_slurm].count("scancel") == (
        3 if base == "trn1.32xlarge" else 0
    )


def test_scoring_that_slurm_refuses(
    finished: Run, tmp_path: Path, deaf_slurm: list[list[str]]
) -> None:
    cluster_site("frontier").write(finished.directory / "site.json")
    before = contents(tmp_path)
    (said,) = follow_run(finished.directory, ("heldout",), submit=True, poll_s=0)
    assert not said.scored and "Invalid account" in said.said and contents(tmp_path) == before
    Site.load("frontier").write(finished.directory / "site.json")
    refused(
        ConfigError,
        "still 'EDIT'",
        tmp_path,
        lambda: list(follow_run(finished.directory, ("heldout",), submit=True, poll_s=0)),
    )


# Other commands -----------------------------------------------------------------------------------


def kit_command(*words: str) -> None:
    app(list(words), standalone_mode=False)


def test_imports_that_refuse(finished: Run, tmp_path: Path) -> None:
    log, other = tmp_path / "train.log", tmp_path / "other.log"
    text = head(ARGUMENTS, vocabulary=51200, engine_micro_batch=2)
    log.write_text(text + line(1, 346.65) + line(2, 346.65))
    other.write_text("nothing of a step\n")
    lumi = Site.load("lumi")
    report = import_log(log, tmp_path / "theirs", format="megatron", site=lumi)
    assert report.steps == 2
    for error, message, source, given in (
        (ConfigError, "is unknown", log, {"format": "neom"}),
        (RunError, "was not imported from", log, {"out": finished.directory}),
        (RunError, "was not imported from", other, {}),
        (DataError, "tells of a step", other, {"out": tmp_path / "new"}),
        (DataError, "cannot be read", tmp_path / "absent.log", {"out": tmp_path / "new"}),
        (
            ConfigError,
            "more than the",
            log,
            {"changes": {"plan": {"global_batch_size": 1024 * 64}}},
        ),
        (ConfigError, "tensr_parallel", log, {"changes": {"plan": {"tensr_parallel": 2}}}),
    ):
        options = {"out": tmp_path / "theirs", "format": "megatron", "site": lumi, **given}
        refused(
            error,
            message,
            tmp_path,
            lambda source=source, options=options: import_log(source, **options),
        )


def test_commands_that_refuse(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run, data = "runs/rep", finished.recipe.data
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "export.csv").write_text("mine")
    recipe = ["--recipe", f"{run}/recipe.json", "--set", "plan.global_batch_size=8"]
    spec = ["--model", f"{run}/spec.json", "--data", data, *recipe]
    cases: list[tuple[type[Exception], str, tuple[str, ...]]] = [
        (RunError, "has finished", ("resume", run, "--set", "plan.data_parallel=8")),
        (
            ConfigError,
            "tensr_parallel",
            ("resume", run, "--steps", "40", "--set", "plan.tensr_parallel=8"),
        ),
        (ConfigError, "recipe.seed: a run keeps it", ("resume", run, "--set", "recipe.seed=8")),
        (RunError, "nothing to stop", ("stop", run)),
        (RunError, "nothing to stop", ("stop", run, "--now")),
        (RunError, "nothing to checkpoint", ("checkpoint", run)),
        (RunError, "exists", ("export", run, "--out", "export.csv", "--format", "csv")),
        (ConfigError, "format", ("export", run, "--format", "xls")),
        (ConfigError, "only with --follow", ("eval", run, "--submit")),
        (ConfigError, "is unknown", ("eval", run, "--suite", "hlta")),
        (ConfigError, "is unknown", ("eval", run, "--tasks", "piqua")),
        (DataError, "is not a dataset", ("data", "build", "full")),
        (ConfigError, "not a .toml", ("bench", "--out", "mine.json")),
        (RunError, "no such run", ("runs", "runs", "--compare", "rap")),
        (RunError, "is not a run directory", ("launch", "full", *spec)),
    ]
    for error, message, words in cases:
        refused(error, message, tmp_path, lambda words=words: kit_command(*words))
