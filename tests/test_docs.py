"""The pages in `docs/`: generated tables are up to date, commands and files work, links lead to
files, and quoted messages exist in the code.

How a page marks its blocks is described in docs/README.md:

- `console`: lines that begin with `$ ` are run, in the order of the page. Other lines are output.
- `bash`: commands for a cluster or a network. Only their syntax and options are checked.
- `toml`, `python` with a title: a file, which is written and loaded.
- `python` without a title: code that is run.
- `text`: not checked.
"""

import ast
import math
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from cluster.interpreter import module_command, source_command
from cluster.job import JobSpec
from cluster.record import Record
from cluster.render import scripts
from cluster.site import Site
from cluster.state import JobState
from kit.__main__ import main
from kit.cli.app import app
from kit.cli.launch_settings import draft_recipe
from kit.config.spec import ModelSpec
from kit.data import build_dataset
from kit.interop.weights.hugging_face_config import PLANNED
from kit.monitor import alerts
from kit.monitor.on_alert import Settings
from kit.run import Run
from tests.cluster.shell import shellcheck
from tests.docs import DOCS, EXAMPLES, PLACES, ROOT, example_of, refreshed, toml
from tests.support.sources import nodes

PAGES = tuple(
    "README first-day site-files run-directory own-data own-model hugging-face resuming"
    " alerts-and-trackers rent-8-gpus troubleshooting api".split()
)
"""Names of the pages, in the order in which their commands are run."""
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)
LINK = re.compile(r"\]\(([^)\s#]*)(#[^)\s]*)?\)")
SMALL = "--set spec.num_layers=1 --set spec.hidden_size=64 --set spec.ffn_hidden_size=176".split()
"""Options that make the model of the shared run small."""
THEIRS = ("CUDA out of memory", "Error displaying widget: model not found")
"""Messages in troubleshooting.md that come from PyTorch and JupyterLab."""
JAVASCRIPT = ROOT / "kit" / "monitor" / "static" / "dashboard.js"


@dataclass(frozen=True)
class Block:
    """A block of code on a page. The title is the name of a file, or empty."""

    kind: str
    title: str
    text: str


def page_text(page: str) -> str:
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(page_text(page))]


def commands(block: str) -> list[tuple[str, list[str]]]:
    """Returns (command, lines of its output) for each command of a `console` block."""
    found: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        else:
            found[-1][1].append(line)
    return found


of_each_page = pytest.mark.parametrize("page", PAGES)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the files of all pages, and with the data set and the run of
    docs/README.md. The run has a small model.
    """
    folder = tmp_path_factory.mktemp("docs")
    files = [block for page in PAGES for block in blocks(page) if block.title]
    assert len({block.title for block in files}) == len(files), "two files with one name"
    for block in files:
        (folder / block.title).write_text(block.text, encoding="utf-8")
    (folder / "text.txt").write_text((ROOT / "README.md").read_text(encoding="utf-8") * 3)
    build_dataset(folder / "data/demo", folder / "text.txt", vocab_size=300, progress=False)
    (launch,) = re.findall(r"^kit (launch .*)$", page_text("README"), re.M)
    command = source_command("kit", *launch.split(), *SMALL)
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    Run.open(folder / "runs/first").job.wait()
    check_runs(folder)
    return folder


def check_runs(folder: Path) -> None:
    """Fails if a run in the working folder has not trained all its steps."""
    for directory in (folder / "runs").iterdir():
        run = Run.open(directory)
        status = run.job.status()
        assert status.state is JobState.DONE, f"{directory}: {status.reason}\n{run.job.logs()}"
        assert run.checkpoints.newest() == run.recipe.num_steps


@pytest.fixture
def run_kit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Callable[[list[str]], tuple[int, str]]:
    """Returns a function that runs a command of the kit in this process. It returns the exit code
    and the output.
    """

    def run(words: list[str]) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["kit", *words])
        with pytest.raises(SystemExit) as end:
            main()
        written = capsys.readouterr()
        return int(end.value.code or 0), written.out + written.err

    return run


# On an idle machine all pages together take less than a minute.
@pytest.mark.timeout(1800)
@of_each_page
def test_page_commands_run_in_order(page, workplace, run_kit, monkeypatch):
    monkeypatch.chdir(workplace)
    for block in blocks(page):
        if block.kind == "python" and not block.title:
            exec(compile(block.text, page, "exec"), {})
        if block.kind != "console":
            continue
        for command, shown in commands(block.text):
            words = shlex.split(command)
            if words[0] == "kit":
                code, output = run_kit(words[1:])
            else:
                done = subprocess.run(command, shell=True, capture_output=True, text=True)
                code, output = done.returncode, done.stdout + done.stderr
            refused = [line for line in shown if re.match(r"\w+Error: ", line)]
            assert code == (1 if refused else 0), f"{command}\n{output}"
            joined = " ".join(output.split())
            for line in shown:
                for part in line.split("..."):
                    assert " ".join(part.split()) in joined, f"{command}\n{part}\n{output}"
    check_runs(workplace)


@of_each_page
def test_page_tables_are_current(page):
    text = page_text(page)
    assert refreshed(text) == text, "refresh them: `python -m tests.docs`"


@of_each_page
def test_page_links_lead_to_files(page):
    for target, anchor in LINK.findall(page_text(page)):
        if "://" in target:
            continue
        file = (DOCS / target).resolve() if target else DOCS / f"{page}.md"
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
            assert anchor.removeprefix("#") in map(anchor_of, headings), f"{target}{anchor}"


def anchor_of(heading: str) -> str:
    """Returns the anchor that code hosts and MkDocs give a heading of plain words."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@of_each_page
def test_page_options_of_commands_exist(page):
    text = page_text(page)
    lines = re.findall(r"`(kit [^`\n]+)`", BLOCK.sub("", text))
    for block in blocks(page):
        if block.kind in ("bash", "text"):
            lines += block.text.replace("\\\n", " ").splitlines()
    for line in lines:
        words = shlex.split(line, comments=True)
        if "kit" in words[:-1]:
            check_options(words[words.index("kit") + 1 :])


def check_options(words: list[str]) -> None:
    """Fails if a word after `kit` is neither a command nor an option of it."""
    command: Any = typer.main.get_command(app)
    rest = list(words)
    allowed = {"--help", "--json", "--version"}
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"no command {rest[0]}: {words}"
        command = command.commands[rest.pop(0)]
    for parameter in command.params:
        allowed |= {*parameter.opts, *parameter.secondary_opts}
    options = {word.partition("=")[0] for word in rest if re.match(r"--?[A-Za-z]", word)}
    assert options <= allowed, f"{words}: no option {options - allowed}"


@of_each_page
def test_page_shell_blocks_pass_shellcheck(page):
    for block in blocks(page):
        if block.kind == "bash":
            # A page needs no `|| exit` after `cd`, and sources files of the reader.
            shellcheck(block.text, "--exclude=SC2164,SC1091")


@of_each_page
def test_page_files_are_valid(page, tmp_path):
    for block in blocks(page):
        if block.title.endswith(".toml"):
            check_toml(block, tmp_path)


def check_toml(block: Block, folder: Path) -> None:
    """Fails if a TOML file of a page is neither a site file, nor a recipe, nor config.toml. For a
    site with Slurm, also checks the batch script of a job.
    """
    data = tomllib.loads(block.text)
    if "on_alert" in data:
        Settings.from_dict(data)
        return
    if "base" not in data:
        draft_recipe(data)
        return
    (folder / block.title).write_text(block.text, encoding="utf-8")
    site = Site.load(folder / block.title)
    if site.slurm is None or site.login is not None:
        return
    job = JobSpec(
        name="docs",
        run_dir="/scratch/runs/docs",
        argv=module_command("kit.train"),
        num_processes=2 * site.devices_per_node,
        num_nodes=2,
    )
    for text in scripts(job, site).values():
        shellcheck(text, "--exclude=SC1091")


def test_site_table_examples_are_allowed():
    """Each example of a field is accepted by the record, together with a packaged site."""
    classes = [pytest.importorskip("cluster.site"), pytest.importorskip("cluster.scheduler")]
    records = [vars(module).get(name) for name in PLACES for module in classes]
    for record in filter(None, records):
        assert issubclass(record, Record)
        data = {field.name: example_of(record, field.name) for field in fields(record)}
        known = {name: value for name, value in data.items() if value is not None}
        if record.__name__ == "RemotePaths":
            del known["source"]  # Either `source` or `sync` is given.
        if record.__name__ == "Slurm":
            known |= {"srun_options": []}  # Either `container` or a container of srun is given.
        if record is Site:
            # Tables of a site have sections of their own.
            known |= {"device": {"name": "one GPU"}, "there": None, "slurm": None}
        record.from_dict(known)
        assert tomllib.loads(
            "\n".join(f"{name} = {toml(known[name])}" for name in known if known[name])
        )
    assert {record.__name__ for record in EXAMPLES} <= {*PLACES}


def test_navigation_lists_all_pages():
    configuration = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = [page for entry in configuration["nav"] for page in entry.values()]
    optional = runpy.run_path(str(DOCS / "build_hooks.py"))["OPTIONAL"]
    written = {file.name for file in DOCS.glob("*.md")} - {*optional}
    assert sorted(pages) == sorted([*written, "decisions/README.md"])
    assert {f"{page}.md" for page in PAGES} | {"benchmarks.md"} == written


def test_hugging_face_page_lists_all_model_types():
    row = re.search(r"^\| train from the weights.*$", page_text("hugging-face"), re.M)
    assert row and re.findall(r"`(\w+)`", row[0])[2:] == PLANNED.split(", ")


def test_api_reference_names_exist():
    names = re.findall(r"^::: (\S+)$", page_text("api"), re.M)
    assert len(names) > 20
    for name in names:
        assert pkgutil.resolve_name(name).__doc__, name


def test_alert_table_has_all_rules():
    rows = re.findall(r"^\| `(\w+)` \| (warning|error) \| (.*) \|$", page_text(ALERTS), re.M)
    rules = [(rule.kind, rule.level) for rule in alerts.ALERT_RULES]
    assert [row[:2] for row in rows][: len(rules)] == rules
    text = " ".join(row[2] for row in rows)
    for said in (
        f"{alerts.JOIN_S:.0f} s after the start",
        f"{alerts.FIRST_STEP_S:.0f} s after they",
        f"for {alerts.STALL_S:.0f} s and for {alerts.STALL_STEPS:.0f} times",
        f"last {alerts.MFU_STEPS} steps is below {alerts.MFU_FALL:.0%}".replace("%", " %"),
        f"below {alerts.MFU_LOW:.0%} on a cluster".replace("%", " %"),
        f"above {alerts.MFU_DOUBTFUL:.0%},".replace("%", " %"),
        f"more than {alerts.MEMORY_FULL:.0%} of".replace("%", " %"),
        f"than {alerts.CHECKPOINT_LATE:g} times",
    ):
        assert said in text


ALERTS = "alerts-and-trackers"


def test_rent_page_losses_follow_from_published_constants():
    """The constants are those of eq. 10 of arXiv 2203.15556, and of table 1 of arXiv 2404.10102 and
    the program of its authors, which has `exp(6.0073404)` for A, `exp(6.0179186)` for B and
    `exp(0.5267228)` for E.
    """
    published = [
        (1.69, 406.4, 0.34, 410.7, 0.28),
        (math.exp(0.5267228), math.exp(6.0073404), 0.33917084, math.exp(6.0179186), 0.2849083),
        (1.8172, 482.01, 0.3478, 2085.43, 0.3658),
    ]
    text = page_text("rent-8-gpus")
    rows = re.findall(r"^\| [HB][^|]* et al\.[^|]* \| ([\d.| ]+) \|$", text, re.M)
    found = [[float(cell) for cell in row.split("|")] for row in rows]
    num_params = ModelSpec.preset("olmo2-1b").num_params
    assert f"N = {num_params:,} and D = 3e10" in text and "--tokens 3e10" in text
    losses = []
    for (*constants, loss), expected in zip(found, published, strict=True):
        assert constants == pytest.approx(expected, rel=1e-4)
        e, a, alpha, b, beta = expected
        losses.append(e + a / num_params**alpha + b / 3e10**beta)
        assert loss == round(losses[-1], 2)
    assert f"| {min(losses):.2f} to {max(losses):.2f} nats a token |" in text


def test_rent_page_steps_are_the_planned_tokens():
    (recipe,) = (block for block in blocks("rent-8-gpus") if block.title == "rent-recipe.toml")
    full = draft_recipe(tomllib.loads(recipe.text))
    assert full.num_steps * 512 * 4096 == pytest.approx(3e10, rel=1e-3)
    # The trial is allowed, although it is shorter than the warm-up, and has the same schedule.
    assert full.replace(num_steps=100).learning_rate_at(100) == full.learning_rate_at(100)


@pytest.mark.slow
def test_troubleshooting_messages_are_in_the_code():
    """Each message in the first column consists of texts of the code. `…` stands for values."""
    known = [texts_of(part) for tree in nodes().values() for part in tree]
    said = " ".join("".join(filter(None, known)).split()) + JAVASCRIPT.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \|", page_text("troubleshooting"), re.M)
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(messages) > 40
    missing = []
    for message in messages:
        are_known = (part.strip() in said for part in message.split("…"))
        if message not in THEIRS and not all(are_known):
            missing.append(message)
    assert missing == []


def texts_of(node: ast.AST) -> str:
    """Returns the text of a constant or of the fixed parts of an f-string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return f"{node.value}\n"
    return ""
