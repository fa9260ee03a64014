"""Text from another user is displayed, but never interpreted by a shell, terminal, browser
or plot.
"""

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.job import JobSpec
from cluster.record import ConfigError
from cluster.render import scripts
from cluster.scheduler import Compilation, Kubernetes, Slurm
from cluster.site import Fact, Site
from cluster.slurm.queries import client_environment
from cluster.state import ExitReport, JobError, JobState, RunState, log_path, read_state, write_exit
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.launcher import launch
from kit.monitor.dashboard import Dashboard
from kit.monitor.figure import snapshot
from kit.monitor.runs import compare_figure, runs_table
from kit.monitor.text import status_table, watch
from kit.run import Run
from kit.run.metrics import Metrics
from kit.show.terminal import PlainConsole, plain
from tests.support.hostile import ESCAPES, MARKUP, SCRIPT
from tests.support.pictures import check_figure
from tests.support.recorded_runs import dead_process, recorded_run, say

# A site file --------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["rocm&./touch-canary", "rocm|sh", "a*[b]", "x=1"])
def test_module_name_runs_no_shell_command(tmp_path: Path, module: str) -> None:
    site = Site.load("generic-gpu-slurm").replace(slurm=Slurm(modules=(module,)))
    job = JobSpec(name="r", run_dir=str(tmp_path), argv=("true",), num_processes=8)
    script = scripts(job, site)["submit.sh"]
    line = next(line for line in script.splitlines() if "module load" in line)
    (tmp_path / "touch-canary").write_text("#!/bin/sh\n: > canary\n")
    (tmp_path / "touch-canary").chmod(0o755)
    functions = 'module() { printf "%s\\n" "$@"; }; is_loaded() { :; }; fail() { exit 9; }'
    shell = f"{functions}\n{line}"
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["load", module], done.stderr
    assert not (tmp_path / "canary").exists()


# A run directory ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number", ["--me", "-u someone", "1 --all", "", "7;reboot", "$(reboot)", "1\n2"]
)
def test_state_with_malformed_job_number_is_not_read(tmp_path: Path, number: str) -> None:
    """A job number such as --me must not act as an option of a Slurm command."""
    job = {"scheduler": "slurm", "id": number, "config": None}
    state = {"state": "running", "attempt": 1, "scheduler_job": job}
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert read_state(tmp_path) is None


def test_slurm_conf_in_a_run_directory_is_refused(tmp_path: Path, monkeypatch) -> None:
    """A slurm.conf names libraries that Slurm's commands load. If a run could name its slurm.conf,
    a status query could run foreign code.
    """
    monkeypatch.delenv("SLURM_CONF", raising=False)
    (tmp_path / "job.json").write_text("{}")
    config, inner = tmp_path / "slurm.conf", tmp_path / "etc" / "slurm.conf"
    inner.parent.mkdir()
    for file in (config, inner):
        file.write_text("PluginDir=/tmp/evil\n")
        with pytest.raises(JobError, match="have written. If it is yours, export SLURM_CONF="):
            client_environment(str(file))
    (tmp_path / "job.json").unlink()
    assert client_environment(str(config))["SLURM_CONF"] == str(config)
    config.chmod(0o666)
    with pytest.raises(JobError, match="somebody else may have written"):
        client_environment(str(config))
    monkeypatch.setenv("SLURM_CONF", str(config))
    given = client_environment(str(config))["SLURM_CONF"]
    assert given == str(config), "what the user exports is the user's"


LINES: tuple[Callable[[str], Any], ...] = (
    lambda line: Slurm(setup=("true", line)),
    lambda line: Slurm(task_setup=(line,)),
    lambda line: Kubernetes(image="i", claim="c", mount_path="/m", resources={}, setup=(line,)),
    lambda line: Compilation(command=(line,), variable="X", shared_cache="/a", node_cache="/b"),
)
"""Functions that put a text into each setting of a site file with shell lines. These lines are
copied into run directories.
"""
JOB = {"name": "r", "run_dir": "/r", "num_processes": 1}
SECRET_NAMES = """
KEY1 WANDB_API_KEY2 SECRET1 PASSWORD1 TOKEN2 ACCESSKEYID DBPASS SLACK_WEBHOOK_URL SAS_URL BEARER
COOKIE
""".split()
SHELL = [
    "export WANDB_API_KEY=aaaa",
    "module load x; DB_PWD='x' run",
    'GITHUB_PAT="abc" git fetch',
    f"wandb login {'0123456789' * 4}",
    f"wandb login --relogin '{'0123456789' * 4}'",
    "curl -H 'Authorization: Bearer eyJhbGciOiJIUzI1NiJ9abcdef' https://example.org",
    "mysql -u me -pS3cret runs",
    "sshpass -p hunter2 ssh far",
    "aws configure set aws_secret_access_key wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY",
    "huggingface-cli login --token abcdefgh12345678",
    "docker login --password=correcthorse registry.example.org",
    *(f"export {name}=aaaa" for name in SECRET_NAMES),
]
NO_SECRETS = [
    "export HF_TOKEN=$(cat ~/.token)",
    'export HF_TOKEN="$MINE"',
    '[ -n "$HF_TOKEN" ] || exit 1',
    "unset KEY; KEY= run",
    "sort --key=2",
    "docker login registry.gitlab.some-university.example.org",
    "docker login --username me --password-stdin < ~/.password",
    'wandb login "$WANDB_API_KEY" --host https://wandb.some-university.example.org',
    "huggingface-cli login --token $(cat ~/.token)",
    'curl -H "Authorization: Bearer $(cat ~/.token)" https://example.org',
    "mysql -p runs && mkdir -p /scratch/runs",
    "sshpass -p $MINE ssh far",
    "export KEYBOARD=us COMPASS=north BYPASS=1 MAX_TOKENS2=4096 NUM_PASS=3 SSH_AUTH_SOCK=/tmp/x",
    "export TOKENIZERS_PARALLELISM=false WEBHOOK_PORT=80",
    "export MAX_TOKENS=4096 PATH=/opt/bin:$PATH PYTHONPATH=/x",
]


def refused(make: Callable[[str], Any], text: str) -> str:
    """Asserts that a text is refused because it looks like a secret. Returns the text of
    the error.
    """
    with pytest.raises(ConfigError, match="looks like a secret") as told:
        make(text)
    return str(told.value)


VALUES = (
    "hf_" + "a" * 34,
    "ghp_" + "A1" * 18,
    "sk-proj-" + "x" * 40,
    "AKIAIOSFODNN7EXAMPLE",
    "http://me:hunter2@proxy:80",
)


@pytest.mark.parametrize("value", VALUES)
def test_secret_under_a_harmless_name_is_refused(value: str) -> None:
    refused(lambda text: JobSpec(**JOB, argv=("true",), environment={"PROXY": text}), value)
    refused(lambda text: JobSpec(**JOB, argv=("true", f"--login={text}")), value)
    refused(lambda text: Slurm(environment={"PROXY": text}), value)


def test_secret_in_two_words_of_command_is_refused() -> None:
    for words in (("wandb", "login", "0123456789" * 4), ("run", "--token", "abcdefgh12345678")):
        refused(lambda text, words=words: JobSpec(**JOB, argv=words), "")
    JobSpec(**JOB, argv=("run", "--token", "$TOKEN", "--tokens", "100000000"))


@pytest.mark.parametrize("site", LINES)
def test_secret_in_a_shell_line_is_refused(site: Callable) -> None:
    for value in VALUES:
        assert value not in refused(site, f"curl -x {value} https://example.org")
    for line in SHELL:
        assert re.search(r"\[\d\]: holds what looks like a secret", refused(site, line))
    for line in NO_SECRETS:
        site(line)


def test_environment_secrets_are_not_written_to_a_run(
    tmp_path: Path, spec, recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PIP_INDEX_URL"):
        monkeypatch.setenv(name, "hunter2-sentinel")
    short = recipe.replace(num_steps=3, warmup_steps=1)
    run = launch(tmp_path / "run", spec=spec, plan=Plan(global_batch_size=2), recipe=short)
    assert run.job.wait(120).state is JobState.DONE
    files = [file for file in run.directory.rglob("*") if file.is_file()]
    assert {"env.json", "job.json", "submit.sh"} <= {file.name for file in files}
    assert [file for file in files if b"hunter2-sentinel" in file.read_bytes()] == []


# Terminal output ----------------------------------------------------------------------------------


def hostile_run(folder: Path) -> Run:
    """Returns a run whose name, state, host, alerts and log contain attack texts, as far as each of
    them allows.
    """
    run = recorded_run(folder / SCRIPT.replace("/", "_"), steps=40)
    attack = SCRIPT + ESCAPES + MARKUP
    log_path(run.directory, 1, 0).write_text(attack + "\n")
    end = {"attempt": 1, "rc": 1, "time": 1.0, "failing_rank": 0}
    report = ExitReport(**end, reason=attack, host=attack, log_tail=attack)
    write_exit(run.directory, report)
    alert = {"kind": "nan", "level": "error", "message": attack, "attempt": 1, "step": 5, "time": 1}
    (run.directory / "alerts.jsonl").write_text(json.dumps(alert) + "\n")
    say(run, JobState.FAILED, step=40, process=dead_process().replace(host=attack))
    state = read_state(run.directory)
    assert state
    state.replace(reason=attack).write(run.directory / "state.json")
    run.spec.replace(name=attack).write(run.directory / "spec.json")
    run.recipe.replace(data=attack).write(run.directory / "recipe.json")
    fact = Fact(value=2e11, source=attack)
    device = run.site.device.replace(name=attack, peak_flops_per_s={"fp32": fact})
    run.site.replace(description=attack, device=device).write(run.directory / "site.json")
    return Run.open(run.directory)


def test_terminal_views_print_no_escape_sequences(tmp_path: Path) -> None:
    run, out = hostile_run(tmp_path), io.StringIO()
    console = PlainConsole(file=out, force_terminal=True, width=200, color_system="truecolor")
    console.print(status_table(run, 200))
    watch(run, console=console)
    shown = out.getvalue()
    assert "owned" in shown and "␛]0;" in shown and "[link=http://evil]" in shown
    assert not any(escape in shown for escape in ("\x1b]", "\x1b[2J", "\x9b", "\u202e"))


def test_logs_print_no_control_characters(tmp_path: Path) -> None:
    """Single halves of Unicode surrogate pairs in a log are replaced too."""
    assert plain("a\ud800\x00b\nc\td\re") == "a\ufffd␀b\nc\td␍e"
    run = hostile_run(tmp_path)
    command = [sys.executable, "-m", "kit", "logs", str(run.directory)]
    piped = subprocess.run(command, capture_output=True).stdout
    assert b"\x1b" not in piped and "␛]0;owned".encode() in piped, "`kit logs RUN | head`"
    on_a_terminal = ["script", "-qec", " ".join(map(repr, command)), "/dev/null"]
    terminal = subprocess.run(on_a_terminal, capture_output=True)
    if terminal.returncode == 0:
        assert b"\x1b]0;owned" not in terminal.stdout and "␛]0;owned".encode() in terminal.stdout


# Notebook output ----------------------------------------------------------------------------------


def pages(run: Run) -> dict[str, str]:
    """Returns a dict from the name of each object of a run to the HTML that a notebook displays for
    it.
    """
    shown = {
        "run": run,
        "job": run.job,
        "table": runs_table(run.directory.parent),
        "spec": run.spec,
        "plan": run.plan,
        "site": run.site,
        "recipe": run.recipe,
        "state": RunState.read(run.directory / "state.json"),
        "job spec": run.job.spec,
    }
    read = Dashboard(run, baselines={SCRIPT: 2.0}).read_all()
    picture = snapshot(read).to_html(alt=f"{run.name}: loss and speed")
    return {"saved picture": picture} | {name: each._repr_html_() for name, each in shown.items()}


def test_html_of_a_hostile_run_is_escaped(tmp_path: Path) -> None:
    for name, page in pages(hostile_run(tmp_path)).items():
        assert "<script" not in page and "<img src=x" not in page, name


def test_figure_draws_run_names_literally(tmp_path: Path) -> None:
    first = recorded_run(tmp_path / "$\\frac{$", steps=20)
    second = recorded_run(tmp_path / "_hidden$x^$", steps=20)
    figure, table = compare_figure([first, second])
    check_figure(figure)
    assert set(table) == {first.name, second.name}
    drawn = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [text.strip() for text in drawn] == [first.name, second.name]


def test_metrics_skip_a_line_with_too_large_numbers(tmp_path: Path) -> None:
    rows = [{"step": 1, "attempt": 1, "tokens": 10**400, "step_time_s": 1e-300, "loss": 10**400}]
    rows += [{"step": 2, "attempt": 1, "tokens": float("nan"), "step_time_s": None, "loss": "x"}]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = Metrics.read(file, spec=ModelSpec.preset("demo"), plans={}, site=Site.load("laptop"))
    assert metrics["tokens"].tolist() == [0] and metrics.skipped_lines == 1
