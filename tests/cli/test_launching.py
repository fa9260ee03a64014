"""`kit launch`: source of recipe and layout, options, `--show`, and Ctrl-C."""

import json
import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from cluster import local, slurm, submission
from cluster.job import Job
from cluster.site import Site
from cluster.state import JobError
from kit import launcher
from kit.cli import launching
from kit.cli.app import app
from kit.cli.launch_settings import gather_settings
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.errors import ConfigError, DataError
from kit.interop.weights.hugging_face_config import config_of
from kit.papers import hlat_model
from kit.papers.recipes import names, published_recipe
from kit.run.checkpoint import Checkpoints


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def launch(words: str = "") -> int | None:
    return app(["launch", "runs/new", *shlex.split(words)], standalone_mode=False)


def asked(**changes: Any):
    given = {"model": None, "recipe": None, "plan": None, "options": {}, "changes": {}, **changes}
    given["changes"] = {"spec": {}, "plan": {}, "recipe": {}, **given["changes"]}
    return gather_settings(**given)


def refused(message: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        launch(words)
    assert message in str(raised.value) and not list(Path().rglob("runs"))


@pytest.mark.parametrize("name", names())
def test_published_recipe_has_the_papers_values(name) -> None:
    published = published_recipe(name)
    ask = asked(recipe=name, options={"data": "/d"})
    assert ask.spec == ModelSpec.preset(published.model) and ask.plan == published.plan
    ask.plan.check(ask.spec)
    assert set(ask.missing) == set(published.not_stated), "nothing else is left open"
    left = {"num_steps": 5000, "warmup_steps": 500}
    recipe = Recipe.from_dict({**left, **ask.recipe_fields})
    rate = {"hlat-7b": 3e-4, "hlat-70b": 1.5e-4}.get(name, 6e-5)
    assert recipe.learning_rate == rate
    assert recipe.learning_rate == pytest.approx(10 * recipe.min_learning_rate)
    assert ask.plan.global_batch_size == {"frontier-22b": 640, "frontier-175b": 640}.get(name, 1024)
    assert ask.plan.engine == ("deepspeed" if name.startswith("frontier") else "neuron")
    if name.startswith("hlat"):
        assert (recipe.num_steps, recipe.warmup_steps) == (429_153, 2000)
        assert recipe.cosine_floor == "clamped"
        assert hlat_model.MODELS[name.partition("-")[2].upper()] == published.model
        assert ask.plan.num_devices == 32 * Site.load("trn1.32xlarge").devices_per_node


def test_only_the_demo_model_has_a_default_recipe() -> None:
    for model in ("hlat-70b", "gpt-22b"):
        refused(f"--recipe: '{model}' needs one", f"--model {model}")
    ModelSpec.preset("demo").replace(num_layers=2).write(Path("spec.json"))
    every = "frontier-22b, frontier-175b, frontier-1t, hlat-7b, hlat-70b"
    refused(every, "--model spec.json")
    Path("mine.toml").write_text("learning_rate = 1e-4\nwarmup_steps = 5\n")
    refused("has no default layout", "--model spec.json --recipe mine.toml")
    demo = asked()
    assert demo.recipe_fields["learning_rate"] == 3e-3 and demo.missing == {}
    assert demo.plan.global_batch_size == 16


def test_recipe_file_of_the_user_is_read_and_checked() -> None:
    text = 'learning_rate = 1e-4\nwarmup_steps = 5\nbeta2 = 0.9\ndata = "EDIT"\n'
    Path("mine.toml").write_text(text)
    changes = {"plan": {"global_batch_size": 32}, "recipe": {"beta2": 0.99}}
    ask = asked(model="hlat-7b", recipe="mine.toml", changes=changes)
    assert ask.missing == {"data": "still 'EDIT' in mine.toml", "num_steps": "--steps N"}
    assert ask.plan.global_batch_size == 32
    assert (ask.recipe_fields["beta2"], ask.recipe_fields["learning_rate"]) == (0.99, 1e-4)
    refused("recipe.num_steps: --steps N", "--recipe mine.toml --data d")
    whole = Recipe(data="/d", num_steps=7, learning_rate=2e-4)
    whole.write(Path("recipe.json"))
    ask = asked(recipe="recipe.json", options={"num_steps": 9})
    assert Recipe.from_dict(ask.recipe_fields) == whole.replace(num_steps=9) and not ask.missing
    wrong = {
        "learning_rat = 1": "Did you mean 'learning_rate'",
        "x = ": "not valid TOML",
        "": "--data",
    }
    for text, message in wrong.items():
        Path("wrong.toml").write_text(text)
        refused(message, "--recipe wrong.toml")


def test_values_missing_in_a_paper_must_be_given() -> None:
    changes = {"recipe": {"warmup_steps": 3}}
    lacking = asked(recipe="frontier-1t", options={"num_steps": 9}, changes=changes).missing
    assert lacking == {"data": "--data FOLDER, made by `kit data build`"}


def test_plan_file_sets_the_layout() -> None:
    plan = Plan(tensor_parallel=4, pipeline_parallel=2, global_batch_size=64)
    plan.write(Path("plan.json"))
    file = Path("plan.json")
    assert asked(plan=file).plan == plan
    assert asked(plan=file, changes={"plan": {"micro_batch_size": 2}}).plan.micro_batch_size == 2
    own = asked(recipe="hlat-7b", plan=file).plan
    assert own == plan, "a layout of one's own for a paper's recipe"


def test_plan_of_the_planner_is_launched_unchanged(capsys) -> None:
    words = "plan hlat-7b --site trn1.32xlarge --devices 2048 --batch 1024 --choose 2"
    app([*words.split(), "--out", "second.json"], standalone_mode=False)
    kept = Plan.read(Path("second.json"))
    assert kept.engine == "neuron" and "Layout 2 is in second.json" in capsys.readouterr().out
    assert asked(recipe="hlat-7b", plan=Path("second.json")).plan == kept
    launch("--recipe hlat-7b --plan second.json --site trn1.32xlarge --show")
    said = capsys.readouterr()
    assert "#SBATCH --nodes=64" in said.out
    assert "plan." not in said.err, "nothing of the layout is left to fill in"


def test_plan_advises_launch_with_its_sequence_length(capsys) -> None:
    words = "plan llama3.1-405b --site dgx-h100 --devices 2048 --batch 2048 --seq 4096"
    words += " --out plan.json --code-base megatron-core"
    app(words.split(), standalone_mode=False)
    told = capsys.readouterr()
    assert "2,048 sequences of 4,096 tokens" in told.out and "megatron-core's kernels" in told.out
    assert "Layout 1 is in plan.json." in told.out
    assert told.err.startswith("Launch it") and "--set spec.sequence_length=4096" in told.err
    Plan.read(Path("plan.json")).check(ModelSpec.preset("llama3.1-405b"))


@pytest.mark.parametrize(
    ("batch", "length", "recipe"),
    [(1024, None, "hlat-7b"), (64, None, "recipe.toml"), (1024, 2048, "recipe.toml")],
)
def test_plan_advises_published_recipe_for_its_batch(capsys, batch, length, recipe) -> None:
    """`kit plan` prints a launch command. The command uses the plan's model, layout, batch size and
    sequence length.
    """
    words = f"plan hlat-7b --site trn1.32xlarge --devices 64 --batch {batch} --out plan.json"
    words += f" --seq {length}" if length else ""
    app(words.split(), standalone_mode=False)
    said = shlex.split(capsys.readouterr().err.split("kit ")[-1])
    options = dict(zip(said[2::2], said[3::2], strict=True))
    assert options["--recipe"] == recipe
    Path("recipe.toml").write_text("num_steps = 10\nlearning_rate = 1e-4\n")
    changes = {"spec": {"sequence_length": int(length)}} if length else {}
    found = asked(
        model=options["--model"],
        recipe=options["--recipe"],
        plan=Path(options["--plan"]),
        changes=changes,
    )
    assert found.plan.global_batch_size == batch and not found.notes
    assert found.plan == Plan.read(Path("plan.json"))
    given = options.get("--set")
    assert given == (f"spec.sequence_length={length}" if length else None)


def test_show_prints_all_scripts_and_missing_values(capsys) -> None:
    shown = "--recipe hlat-70b --set plan.data_parallel=8 --show --site"
    launch(f"{shown} trn1.32xlarge")
    said = capsys.readouterr()
    compiling, running = said.out.split("#### submit.sh")
    assert "#### compile.sh" in compiling and "neuron_parallel_compile" in compiling
    assert "#SBATCH --nodes=64" in compiling and "#SBATCH --nodes=64" in running
    lines = said.err.splitlines()
    assert lines[0] == "Asked of Slurm where the site file says nothing:"
    derived = lines[1 : lines.index("Still to fill in:")]
    # The comments at the beginning of the script contain these lines too.
    assert derived and all(f"\n#   {line.strip()}\n" in running for line in derived)
    marked = [line for line in said.out.splitlines() if "EDIT" in line]
    assert len(marked) == sum(".sh, line" in line for line in lines) > 0
    assert any("site.slurm.partition: in a site file of your own" in line for line in lines)
    assert lines[-1] == "  recipe.data: --data FOLDER, made by `kit data build`"
    assert not Path("runs").exists()
    Path("my-trn1.toml").write_text('base = "trn1.32xlarge"\nname = "mine"\n')
    launch(f"{shown} my-trn1.toml")
    said = capsys.readouterr()
    assert "site.slurm.partition: in my-trn1.toml\n" in said.err, "the reader's own already"


def test_show_of_one_script_prints_only_the_script(capsys) -> None:
    launch("--recipe frontier-175b --site frontier --show")
    said = capsys.readouterr()
    assert said.out.startswith("#!/bin/bash\n")
    assert "submit.sh, line " in said.err and "warmup_steps" in said.err
    launch("--show")
    said = capsys.readouterr()
    assert said.out.startswith("#!/bin/bash\n") and "Build it: kit data build" in said.err
    assert said.err.startswith("Still to fill in:\n  recipe.data: ")


def interrupted(*given: Any) -> None:
    """Raises KeyboardInterrupt, as Ctrl-C does. A signal is not used, because SIGINT has no effect
    if a script runs the tests in the background.
    """
    raise KeyboardInterrupt


def test_interrupted_launch_reports_the_job_state(tiny_dataset, monkeypatch, capsys) -> None:
    start, spec = local.start, launcher.job_spec

    def pressed(*given):
        os.kill(os.getpid(), signal.SIGINT)
        return start(*given)

    words = f"--data {tiny_dataset.directory}"
    monkeypatch.setattr(launching, "_measured", lambda run, site, dtype: site)
    asleep = lambda *given: spec(*given).replace(argv=("sleep", "60"))  # noqa: E731
    monkeypatch.setattr(launcher, "job_spec", asleep)
    monkeypatch.setattr(local, "start", pressed)
    code = launch(words)
    said, job = capsys.readouterr().out, Job.attach("runs/new")
    assert code == 130 and not job.state.is_final
    assert "the job runs: attempt 1 is starting" in said and "kit stop runs/new" in said
    job.cancel()
    job.wait(30)
    monkeypatch.setattr(submission, "submit_prepared", interrupted)
    assert launch(words) == 130 and "nothing was started" in capsys.readouterr().out


def test_show_prints_the_epochs_of_each_source(tiny_dataset, tmp_path, capsys) -> None:
    data = tiny_dataset.directory
    source = f'[[sources]]\npaths = ["{data}"]\nweight = %g\n'
    phase = "[[phases]]\nuntil_tokens = 1e4\nweights = [1, 0]\n"
    recipe = f'data = "{data}"\nnum_steps = 100\n{source % 1}{source % 3}{phase}'
    Path("mix.toml").write_text(recipe)
    launch("--recipe mix.toml --model demo --set spec.sequence_length=64 --show")
    *told, vocabulary = capsys.readouterr().err.splitlines()
    assert "has 4,096 tokens and the tokenizer of the data only 300: 93%" in vocabulary
    # 157 of the 1,600 sequences belong to the first phase, which uses the first source only. The
    # others are divided 1 to 3 between the sources.
    windows = (tiny_dataset.train.num_tokens - 1) // 64
    counts = (157 + 1443 / 4, 1443 * 3 / 4)
    often = " (above 4, repeated text is worth less than new text: arXiv 2305.16264)"
    assert [line.split(" of ")[1] for line in told] == [f"{data}{often}"] * 2
    for line, count in zip(told, counts, strict=True):
        assert float(line.split()[1]) == pytest.approx(count / windows, rel=0.02)


@pytest.mark.parametrize(
    ("vocabulary", "tokenizer", "warns"),
    [
        (50_304, 50_257, False),  # GPT-2 with a padded vocabulary
        (152_064, 151_643, False),  # Qwen2.5
        (128_256, 128_000, False),  # Llama 3
        (32_000, 4_096, True),
        (4_096, 4_096, False),
    ],
)
def test_tokenizer_of_another_model_is_reported(vocabulary, tokenizer, warns) -> None:
    spec = ModelSpec.preset("hlat-7b").replace(vocab_size=vocabulary)
    assert (launcher.unused_vocabulary(spec, tokenizer) is not None) == warns


def test_recipe_for_another_batch_is_reported(capsys) -> None:
    shown = "--recipe hlat-7b --site trn1.32xlarge --show"
    launch(shown)
    assert "was published for batches" not in capsys.readouterr().err
    launch(f"{shown} --set plan.global_batch_size=512")
    said = capsys.readouterr().err
    assert "published for batches of 1,024 sequences, and the plan has 512" in said


def test_gpu_plans_default_to_bf16_and_compile(tmp_path) -> None:
    """Values from the user, a plan file or a published recipe override these defaults."""

    def unsaid(**plan: Any) -> dict[str, Any]:
        return asked(changes={"plan": plan}).gpu_defaults

    assert asked().gpu_defaults == {"precision": "bf16", "compile": True}
    assert asked().plan.precision == "fp32", "on a CPU it is what it was"
    assert unsaid(compile=False) == {"precision": "bf16"}
    assert unsaid(compile=True, precision="fp32") == {}
    assert unsaid(engine="deepspeed", zero_stage=1) == {}
    bubble = {"pipeline_parallel": 2, "virtual_stages": 2, "schedule": "zero_bubble"}
    assert unsaid(**bubble, global_batch_size=8) == {"precision": "bf16", "compile": False}
    assert asked(recipe="frontier-22b").gpu_defaults == {}
    Plan(global_batch_size=8).write(tmp_path / "plan.json")
    assert asked(plan=tmp_path / "plan.json").gpu_defaults == {}


@pytest.mark.parametrize(("words", "said"), [("", False), ("--set plan.compile=false", True)])
def test_uncompiled_selective_recompute_gets_advice(words, said, capsys) -> None:
    launch(f"--site perlmutter --show --set plan.recompute=selective {words}")
    assert ("--set plan.recompute=full" in capsys.readouterr().err) is said


H100_NODES = """
base = "dgx-h100"
name = "mine"
[slurm]
launcher = "srun"
"""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel": 3}, "32 is not divisible by tensor_parallel = 3"),
        ({"pipeline_parallel": 5}, "32 is not divisible by the number of pipeline stages"),
        ({"data_parallel": 12}, "12 devices do not fill whole nodes of mine, which have 8"),
        ({"data_parallel": 7}, "64 sequences cannot be divided among 7 replicas"),
    ],
)
def test_impossible_layout_is_refused_first(changes, message) -> None:
    """The error about the layout comes before errors about data and disk space."""
    Path("mine.toml").write_text(H100_NODES)
    Path("short.toml").write_text("learning_rate = 1e-4\nwarmup_steps = 5\nnum_steps = 9\n")
    batch = 60 if changes == {"data_parallel": 12} else 64
    words = f"--data absent --model llama3-8b --recipe short.toml --site mine.toml --batch {batch}"
    for name, value in changes.items():
        words += f" --set plan.{name}={value}"
    refused(message, words)


def test_layout_above_the_memory_of_a_gpu_is_reported(capsys, monkeypatch, tiny_dataset) -> None:
    Path("mine.toml").write_text(H100_NODES)
    Path("short.toml").write_text("learning_rate = 1e-4\nwarmup_steps = 5\nnum_steps = 9\n")
    words = f"--data {tiny_dataset.directory} --model llama3-8b --recipe short.toml --batch 64"
    words += " --set spec.sequence_length=64 --set plan.data_parallel=8 --site mine.toml"
    launch(f"{words} --show")
    said = capsys.readouterr().err
    assert "WARNING: this layout probably runs out of memory" in said
    assert "GiB of 80.00 GiB, with a probability of 100% of running out" in said
    (change,) = re.findall(r"These changes fit: (.*?) \(", said)
    launch(f"{words} {change} --show")
    assert "out of memory" not in capsys.readouterr().err
    # On CPU cores there is no warning, since their memory is that of the whole machine.
    launch(f"{words.replace('--site mine.toml', '')} --show")
    assert "out of memory" not in capsys.readouterr().err
    # A launch prints the warning before it submits the job.
    monkeypatch.setattr(launcher, "submit", interrupted)
    monkeypatch.setattr(slurm, "check", lambda job, site: None)
    monkeypatch.setattr(Checkpoints, "check_space", lambda self, spec: None)
    launch(words)
    assert "WARNING: this layout probably runs out of memory" in capsys.readouterr().err


BEHIND = """
name = "mine"
description = "behind a login node"
scheduler = "slurm"
devices_per_node = 1
login = "frontier"
there = { python = "/opt/their python", folder = "/project/runs", %s }
device = { name = "one CPU core" }
slurm = { partition = "batch" }
"""


@pytest.mark.parametrize("source", ['source = "/opt/kit"', "sync = true"])
def test_show_for_a_login_node_starts_no_ssh(source, tmp_path, monkeypatch, capsys) -> None:
    """The first ssh command that is printed is the first command that a launch would run."""
    Path("mine.toml").write_text(BEHIND % source)
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    kept = f"printf '%s\\0' \"${{@: -1}}\" >>{tmp_path}/asked"
    ssh.write_text(f'#!/bin/bash\n{kept}\n[ "${{@: -1}}" != frontier ]\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    before = {*tmp_path.rglob("*")}
    launch("--site mine.toml --data /data --show")
    assert {*tmp_path.rglob("*")} == before, "nothing is started or written"
    out, err = capsys.readouterr()
    supervisor = r"exec '/opt/their python' -I -u \S+/cluster/start.py cluster.slurm.supervisor"
    assert re.search(supervisor, out)
    assert "KIT_RUN_DIR=/project/runs/new" in out and str(tmp_path) not in out
    assert "cd /opt/kit ||" in out or "cd /project/runs/kit-source-" in out
    told = [shlex.split(line) for line in err.splitlines() if line.startswith("  ssh ")]
    assert all(words[:-1] == ["ssh", "--", "frontier"] for words in told)
    for part in ("cd /", "their python", "cluster.login.answer"):
        assert part in told[-1][-1]
    with pytest.raises(JobError):
        launch("--site mine.toml --data /data")
    asked = (tmp_path / "asked").read_text().split("\0")
    asked = [each for each in asked if each not in ("", "frontier")]
    assert asked[0] == told[0][-1], "it is what a launch asks first"


def test_sbatch_options_of_launch_reach_the_script(capsys) -> None:
    """The site has no account. With these options the generated script is complete."""
    words = "--account abc123 --partition batch --qos debug --time 1:30:00 --nodes 16"
    launch(f"--recipe frontier-175b --site frontier --data /d --steps 9 --show {words}")
    script = capsys.readouterr().out
    for line in ("--account=abc123", "--partition=batch", "--qos=debug", "--nodes=16"):
        assert f"#SBATCH {line}" in script
    assert "#SBATCH --time=01:30:00" in script


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("2:30", 150),
        ("1:00:00", 3600),
        ("2-03", 183_600),
        ("1-00:30", 88_200),
        ("1-00:00:05", 86_405),
    ],
)
def test_time_option_accepts_sbatch_formats(text: str, seconds: int) -> None:
    """The expected seconds follow the formats in `man sbatch`, option --time."""
    assert launching.slurm_seconds(text) == seconds


@pytest.mark.parametrize(
    ("words", "layout"),
    [
        ("", (1, 16, 4)),
        ("--batch 6", (1, 6, 2)),
        ("--set plan.data_parallel=8", (8, 16, 2)),
        ("--site dgx-h100 --nodes 2", (16, 16, 1)),
        ("--site dgx-h100 --nodes 2 --batch 32", (16, 32, 2)),
        ("--site dgx-h100 --nodes 2 --batch 64", (16, 64, 4)),
        ("--site dgx-h100 --nodes 2 --batch 64 --set plan.micro_batch_size=2", (16, 64, 2)),
    ],
)
def test_micro_batch_of_the_demo_fits_batch_and_replicas(
    monkeypatch: pytest.MonkeyPatch, words: str, layout: tuple[int, int, int]
) -> None:
    shown = []
    monkeypatch.setattr(launching, "_show", lambda run, gathered, *rest: shown.append(gathered))
    launch(f"{words} --show")
    (plan,) = [gathered.plan for gathered in shown]
    assert (plan.data_parallel, plan.global_batch_size, plan.micro_batch_size) == layout


def test_batch_below_the_replicas_is_refused_without_micro_batches() -> None:
    """The user has set no micro-batch size, so the message names replicas only."""
    with pytest.raises(ConfigError) as raised:
        launch("--site dgx-h100 --nodes 2 --batch 8 --show")
    text = str(raised.value)
    assert "8 sequences cannot be divided among 16 replicas. Use a multiple of 16" in text
    assert "micro" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--partition gpu", "--partition: the jobs of laptop are not sent by Slurm"),
        ("--time soon", "--time 'soon': not allowed"),
        ("--time 10 --minutes 10", "--time 10: not with --minutes 10"),
        ("--batch 8 --set plan.global_batch_size=8", "--set plan.global_batch_size: given by an"),
        ("--nodes 0", "--nodes 0:"),
    ],
)
def test_wrong_launch_options_are_refused(words: str, message: str) -> None:
    refused(message, f"--show {words}")


def test_show_refuses_pickled_weights(capsys) -> None:
    folder = Path("theirs")
    folder.mkdir()
    spec = ModelSpec.preset("demo")
    (folder / "config.json").write_text(json.dumps(config_of(spec)))
    (folder / "pytorch_model.bin").write_bytes(b"x")
    words = "--init-from theirs --learning-rate 1e-4 --recipe mine.toml --batch 4 --steps 9"
    Path("mine.toml").write_text("warmup_steps = 2\n")
    with pytest.raises(DataError, match="pickled weights"):
        launch(f"{words} --show")
    assert capsys.readouterr().out == ""
