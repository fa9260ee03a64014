"""Interfaces that users rely on: imported names, commands, and files of older versions.

`tests/contract` holds a dataset and a run that an older version wrote. Its README.md names the
version. Files that the present version writes have every key of the older files, and may have more
keys. CHANGELOG.md lists removed interfaces.
"""

import filecmp
import hashlib
import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main
from safetensors.torch import load_file
from typer.testing import CliRunner

import kit
from cluster.state import JobState, read_exit, read_taken_request, take_request, write_request
from kit.cli.app import app
from kit.config.spec import PRESETS
from kit.data import Dataset, build_dataset
from kit.evaluate import SUITES, EvalReport, evaluate
from kit.interop.weights import load_model
from kit.monitor import run_figure, status_row
from kit.papers import FIGURES
from kit.papers.recipes import names

SAMPLE = Path(__file__).parent / "contract"

NAMES = {
    "cluster.process": "child_pids",
    "cluster.record": "ConfigError",
    "cluster.render": "check_submittable render scripts",
    "cluster.sandbox": "Sandbox default_root why_not",
    "cluster.state": "read_state",
    "kit": "ModelSpec.preset Plan Recipe Run.open Site.load Site.names launch resume",
    "kit.errors": "ConfigError DataError",
    "kit.estimate": (
        "EstimatedRate Layouts Panel answers calibrate hardware_on memory_by_stage predictions"
        " published_calibration search sensitivity sensitivity_figure simulate_plan timeline_figure"
        " trials_figure tune"
    ),
    "kit.evaluate": "build_mirror default_mirror evaluate evaluate_model report_file",
    "kit.launcher": "job_spec",
    "kit.model": "Attention Block Decoder TENSOR_PARALLEL_SPLIT",
    "kit.monitor": "Monitor eval_figure run_figure",
    "kit.notebook": "Table at_scale demo_dataset new_run_directory",
    "kit.papers": (
        "FRONTIER FRONTIER_NOT_DRAWN HLAT HLAT_NOT_DRAWN contents frontier_demo hlat_demo"
        " paper_figure"
    ),
    "kit.estimate.rehearsal": "rehearse",
    "kit.config.spec": "FlopBasis PRESETS",
}
"""Names that README.md and the notebooks import, by the package or module from which they are
imported."""

COMMANDS = {
    "average": "--last --out",
    "bench": "--apply",
    "calibrate": "",
    "checkpoint": "",
    "data build": "",
    "eval": "--follow --submit --suite --task-data --tasks --untrusted-code",
    "eval-data": "",
    "export": "--follow --format --out --step",
    "figure": "--out --points-template --run",
    "generate": "",
    "import": "--follow --format --out --site",
    "launch": "--data --recipe --set --site --steps --there",
    "plan": "--batch --devices --list --rehearse --site",
    "resume": "--set --steps",
    "runs": "",
    "site init": "",
    "status": "--why",
    "stop": "--now",
    "validate": "",
    "watch": "",
}
"""Commands in README.md and the notebooks. Value: the options that these documents use with the
command.
"""

TYPED = {
    "figures": (
        "frontier-memory frontier-stage-memory frontier-tensor-parallel frontier-micro-batches"
        " frontier-pipeline frontier-observations frontier-roofline frontier-flash-attention"
        " frontier-search frontier-sensitivity frontier-recipes frontier-throughput"
        " frontier-weak-scaling frontier-strong-scaling frontier-cost hlat-models"
        " hlat-sequence-length hlat-hyperparameters hlat-learning-rate hlat-data-mix hlat-cost"
        " hlat-throughput hlat-quality hlat-averaging hlat-averaged-weights"
        " hlat-truthfulness hlat-scores-7b hlat-scores-70b hlat-loss hlat-precision"
    ),
    "models": "demo gpt-1.4b gpt-22b gpt-175b gpt-1t hlat-7b hlat-70b llama3-8b gpt2-xl",
    "recipes": "frontier-22b frontier-175b frontier-1t hlat-7b hlat-70b",
    "sites": (
        "aleph-alpha aurora dgx-h100 eks-trn1 frontier gb200-nvl72 gb300-nvl72 generic-gpu-slurm"
        " jean-zay kaist laptop lumi p4d.24xlarge perlmutter selene tpu-v4 trn1.32xlarge"
    ),
    "suites": "default smoke curve hlat",
}
"""Names of figures, models, recipes, sites and suites that users type in commands."""

READERS = ("status", "watch", "status --why", "logs", "runs", "export --format csv", "figure")
"""Commands that only read a run."""

PLACES = """
run/spec.json
run/plan.json
run/plan.attempt_*.json
run/recipe.json
run/site.json
run/site.json device
run/site.json device memory_bytes
run/site.json links
run/site.json storage
run/job.json
run/env.json
run/state.json
run/state.json process
run/exit.json
run/history.jsonl
run/alerts.jsonl
run/ranks/rank_*.json
run/control/taken_checkpoint
run/checkpoints/step_*/manifest.json
run/checkpoints/step_*/manifest.json spec
run/checkpoints/step_*/manifest.json plan
run/eval/step_*.json
run/eval/step_*.json scores 0
run/eval/step_*.json scores 0 metrics 0
run/eval/step_*.json scores 0 data 0
data/dataset.json
data/dataset.json settings
data/dataset.json settings sources 0
data/dataset.json train
data/dataset.json files 0
data/validation.jsonl
"""
"""Values in the sample files. Each line has a pattern of file names, and the keys that lead to the
value inside the file. In a .jsonl file, the last line is used."""

# Results of the present version on the sample. Tolerances allow for other processors and torch
# versions.
WEIGHTS = "857b795f652f4a20ffe05c6dbc691c2a00dc951c0806f4e2c975b26a794dfeb3"
EXPORTED = "1a9365dcdf79ab140557b5b09623154938b6c0192bcc442ac149ff232b710c24"
LOSSES = {1: 5.667613983154297, 23: 3.4970169067382812, 24: 3.4015421867370605}
LOSSES |= {40: 3.103914260864258}
VALIDATION = {30: 3.2845959663391113, 40: 3.1611571311950684}
NEXT = [3.12924528, 3.08256340, 3.13108062, 3.07615685, 3.05746078, 3.16958117]
BITS_PER_BYTE = 2.9985530035466965
"""Bits per byte of the four documents, drawn at random, that the sample's evaluation report
scored.
"""
BITS_PER_BYTE_OF_ALL = 2.9820630299597894
"""Bits per byte of all eight documents of the validation set, computed by the version that wrote
the sample.
"""
FIRST_TOKENS = [48, 65, 286, 221, 21, 199, 199, 45, 89, 266, 69, 73]


def moved(folder: Path) -> Path:
    """Returns a copy of the sample in another folder. The recipe of the copied run names the new
    path of the data.
    """
    shutil.copytree(SAMPLE, folder)
    recipe = folder / "run" / "recipe.json"
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | {"data": str(folder / "data")}))
    return folder


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    return moved(tmp_path / "moved here")


@pytest.fixture
def run(sample: Path) -> kit.Run:
    return kit.Run.open(sample / "run")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sample run after the current version of the kit has resumed and scored it and
    has built its dataset again.
    """
    folder = moved(tmp_path_factory.mktemp("fresh") / "went on")
    shutil.rmtree(folder / "run" / "eval")
    words = [sys.executable, "-m", "kit", "resume", str(folder / "run"), "--steps", "46"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = kit.Run.open(folder / "run")
    assert run.job.wait(timeout_s=120).state is JobState.DONE, run.job.logs()
    evaluate(run, tasks=("heldout",), limit=4)
    write_request(run.directory, "checkpoint")
    take_request(run.directory, "checkpoint", step=46)
    shutil.rmtree(folder / "data")
    asked = {"tokenizer": SAMPLE / "data" / "tokenizer.json", "validation_fraction": 0.12}
    build_dataset(folder / "data", folder / "text.jsonl", **asked, progress=False)
    return folder


def shown(*words: str | Path) -> str:
    """Runs a command that must succeed, and returns its standard output."""
    answer = CliRunner().invoke(app, list(map(str, words)))
    assert answer.exit_code == 0, (words, answer.output, answer.exception)
    return answer.stdout


def written(folder: Path, place: str) -> list[dict[str, Any]]:
    """Returns the values at one line of `PLACES`, one value for each file that matches the
    pattern.
    """
    pattern, *within = place.split()
    values = []
    for file in folder.glob(pattern):
        text = file.read_text()
        value = json.loads(text.splitlines()[-1] if file.suffix == ".jsonl" else text)
        for word in within:
            value = value[int(word) if word.isdecimal() else word]
        values.append(value)
    assert values, f"{folder} has no {pattern}"
    return values


def steps(folder: Path, attempts: set[int]) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl that the given attempts wrote."""
    rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["attempt"] in attempts]


def digest(parameters: dict[str, Any]) -> str:
    """Returns a hash of the names and values of tensors."""
    whole = hashlib.sha256()
    for name, weight in sorted(parameters.items()):
        whole.update(name.encode() + weight.detach().numpy().tobytes())
    return whole.hexdigest()


@pytest.mark.parametrize("module", NAMES)
def test_names_imported_by_notebooks_exist(module: str) -> None:
    for name in NAMES[module].split():
        exec(f"from {module} import {name.partition('.')[0]}; {name}", {})


@pytest.mark.parametrize("words", COMMANDS)
def test_documented_commands_have_their_options(words: str) -> None:
    assert "Usage" in shown(*words.split(), "--help")
    command: Any = typer.main.get_command(app)
    for word in words.split():
        command = command.commands[word]
    options = {option for parameter in command.params for option in parameter.opts}
    assert options >= set(COMMANDS[words].split())


def test_names_of_figures_models_and_sites_remain() -> None:
    brought = {"figures": FIGURES, "models": PRESETS, "recipes": names(), "suites": SUITES}
    brought["sites"] = kit.Site.names()
    missing = {kind: {*words.split()} - {*brought[kind]} for kind, words in TYPED.items()}
    assert not any(missing.values()), missing


def test_modules_of_older_job_scripts_exist() -> None:
    (job,), script = written(SAMPLE, "run/job.json"), (SAMPLE / "run" / "submit.sh").read_text()
    words = [*job["argv"], *script.split()]
    modules = {module for flag, module in itertools.pairwise(words) if flag == "-m"}
    assert modules == {"kit.train", "cluster.local.supervisor"}
    assert all(importlib.util.find_spec(module) for module in modules)


@pytest.mark.parametrize("place", PLACES.strip().splitlines())
def test_written_files_keep_every_older_key(place: str, fresh: Path) -> None:
    keys = set().union(*written(SAMPLE, place))
    assert all(set(value) >= keys for value in written(fresh, place))


def test_run_keeps_every_older_file_and_metric(fresh: Path) -> None:
    files = [str(file.relative_to(SAMPLE)) for file in SAMPLE.rglob("run/**/*") if file.is_file()]
    names = {
        re.sub(r"step_\d+", "step_*", re.sub("attempt_0.", "attempt_03", file)) for file in files
    }
    assert len(names) > 20 and not [name for name in names if not list(fresh.glob(name))]
    before, now = (
        [set(row) for row in steps(folder, attempts)]
        for folder, attempts in ((SAMPLE, {1, 2}), (fresh, {3}))
    )
    assert set.intersection(*now) >= set.intersection(*before), "of every step"
    assert set().union(*now) >= set().union(*before), "of some"


def test_older_run_opens_with_its_configuration(run: kit.Run) -> None:
    assert (run.name, run.spec.num_params) == ("run", 23160)
    assert (run.plan.num_devices, run.plan.zero_stage) == (2, 1)
    assert (run.recipe.num_steps, run.recipe.learning_rate, run.recipe.seed) == (40, 0.01, 1234)
    assert run.site.name == "laptop" and run.site.peak_flops_per_s("fp32")
    assert run.plans() == {1: run.plan, 2: run.plan} and not run.other_sites()
    status, ended = run.job.status(), read_exit(run.directory)
    assert (status.state, status.attempt, status.step) == (JobState.DONE, 2, 40)
    assert ended and (ended.attempt, ended.rc) == (2, 0)
    assert ended.reason == "all 2 ranks ended with code 0"
    assert [event.attempt for event in run.job.history] == [1] * 5 + [2] * 5
    assert "resumed from step 23" in run.job.logs()
    assert "stopped by request after step 23" in run.job.logs(attempt=1)
    taken = read_taken_request(run.directory, "checkpoint")
    assert taken and taken.step == 24


def test_older_metrics_hold_both_attempts(run: kit.Run) -> None:
    metrics = run.metrics()
    assert metrics["step"].tolist() == list(range(1, 41))
    assert metrics["attempt"].tolist() == [1] * 23 + [2] * 17
    assert {step: metrics["loss"][step - 1] for step in LOSSES} == LOSSES
    held_out = metrics["validation_loss"]
    assert (1 + np.flatnonzero(np.isfinite(held_out))).tolist() == [10, 20, 30, 40]
    assert {step: held_out[step - 1] for step in VALIDATION} == VALIDATION
    mfu, summary = metrics.mfu(), metrics.summary()
    assert mfu is not None and (mfu > 0).all() and metrics.skipped_lines == 0
    assert (summary["step"], summary["tokens"], summary["attempt"]) == (40, 10240, 2)


def test_views_show_an_older_run(run: kit.Run) -> None:
    row = status_row(run)
    assert (row["state"], row["step"], row["checkpoints"]) == ("done", 40, [40])
    assert row["scores"]["heldout"]["score"] == pytest.approx(BITS_PER_BYTE)
    figure, table = run_figure(run)
    assert figure.axes and len(table["step"]) == 40
    assert {"loss", "validation_loss", "tokens_per_s", "mfu"} <= set(table)
    (listed,) = json.loads(shown("runs", run.directory.parent, "--json"))
    assert (listed["run"], listed["state"]) == ("run", "done")
    assert (listed["step"], listed["num_steps"]) == (40, 40)
    alerts = json.loads(shown("status", run.directory, "--json"))["alerts"]
    assert ("hook", 2, 33) in [(alert["kind"], alert["attempt"], alert["step"]) for alert in alerts]


@pytest.mark.parametrize("words", READERS)
def test_commands_read_an_older_run(words: str, sample: Path) -> None:
    name, *options = words.split()
    assert shown(name, sample if name == "runs" else sample / "run", *options)


@pytest.mark.slow
def test_older_checkpoint_keeps_its_weights(run: kit.Run, tmp_path: Path) -> None:
    """Weights loaded from the checkpoint equal the weights loaded from its export."""
    assert run.checkpoints.steps() == [40]
    manifest = run.checkpoints.manifest(40)
    assert (manifest.step, manifest.samples, manifest.tokens) == (40, 320, 10240)
    assert manifest.plan == run.plan
    assert digest(dict(load_model(run).named_parameters())) == WEIGHTS
    shown("export", run.directory, "--format", "hf", "--out", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config["hidden_size"]) == (["LlamaForCausalLM"], 24)
    tokenizers = (tmp_path / "out" / "tokenizer.json", SAMPLE / "data" / "tokenizer.json")
    assert filecmp.cmp(*tokenizers, shallow=False)
    assert digest(load_file(tmp_path / "out" / "model.safetensors")) == EXPORTED


def test_older_run_resumes_with_the_same_losses(fresh: Path) -> None:
    run = kit.Run.open(fresh / "run")
    metrics = run.metrics()
    assert metrics["attempt"].tolist() == [1] * 23 + [2] * 17 + [3] * 6
    assert metrics["loss"][40:].tolist() == pytest.approx(NEXT, abs=1e-5)
    assert run.checkpoints.steps() == [46] and run.recipe.decay_steps == 40
    (alert,) = written(fresh, "run/alerts.jsonl")
    assert (alert["kind"], alert["level"]) == ("hook", "warning")
    assert (alert["attempt"], alert["step"]) == (3, 42)


@pytest.mark.slow
def test_older_run_scores_are_unchanged(run: kit.Run) -> None:
    kept = EvalReport.read(run.directory / "eval" / "step_00000040.json")
    assert (kept.step, kept.attempt) == (40, 2)
    assert (kept["heldout"].num_items, kept["heldout"].total_items) == (4, 8)
    bits = kept["heldout"].metric("bits_per_byte").value
    assert bits == pytest.approx(BITS_PER_BYTE, abs=1e-4)
    scores = evaluate(run, tasks=("heldout",))
    bits = scores["heldout"].metric("bits_per_byte").value
    assert bits == pytest.approx(BITS_PER_BYTE_OF_ALL, abs=1e-4)


def test_older_dataset_keeps_its_tokens(sample: Path) -> None:
    dataset = Dataset.open(sample / "data")
    dataset.verify()
    assert (dataset.train.num_tokens, dataset.validation.num_tokens) == (21_873, 3_325)
    assert (dataset.vocab_size, dataset.eos_id, dataset.info.train.documents) == (288, 0, 53)
    assert dataset.train.read(0, 12).tolist() == FIRST_TOKENS
    tokenizer, (first, *others) = dataset.tokenizer(), dataset.validation_documents()
    assert tokenizer.encode(first.text) == dataset.validation.read(0, first.tokens - 1).tolist()
    assert len(others) == 7
    assert dataset.unigram_baseline().bits_per_byte == pytest.approx(3.8411942808595883)


def test_rebuilt_dataset_equals_the_older_one(fresh: Path) -> None:
    parts = [f"{part}.{kind}" for part in ("train", "validation") for kind in ("bin", "idx")]
    same = ["tokenizer.json", "validation.jsonl", *parts]
    assert filecmp.cmpfiles(fresh / "data", SAMPLE / "data", same, shallow=False)[0] == same
