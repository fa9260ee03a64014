"""`kit --help`, and the next command that each command advises at the end of its output."""

import importlib
import importlib.metadata
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from rich.text import Text
from typer.testing import CliRunner

from cluster.state import ExitReport, JobState, write_exit
from kit.__main__ import main
from kit.cli.app import COMMANDS, EXAMPLES, app
from kit.cli.runs import NEXT
from kit.doctor import DoctorFinding
from tests.cli.test_advice import problem
from tests.support.recorded_runs import recorded_run
from tests.support.sources import ROOT

WHOLE = typer.main.get_command(app)
SAID = re.compile(r"^(?P<text>[^\n]+): kit (?P<words>[^\n]+)$", re.M)
"""Matches a line of a command's output that ends with the advised next command."""
CROSS_REFERENCE = re.compile(r"\b(as|like) (`kit |--)|\bthe same(,| in)|default: the same", re.I)
"""Matches a help text that refers to another option or command, such as `as --seed`. A help text
must describe its own option."""


def helped(*words: str) -> str:
    return CliRunner().invoke(app, [*words, "--help"]).stdout


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)


def test_help_lists_every_command_under_its_heading() -> None:
    """Expected value: the commands that the modules of `kit.cli` define, with their own help."""
    defined = {}
    for module in sorted({module for part in COMMANDS.values() for module, _ in part.values()}):
        group = typer.main.get_group(importlib.import_module(f"kit.cli.{module}").app)
        for name, command in group.commands.items():
            first = (command.help or "").split("\n\n")[0]
            defined[name] = (module, " ".join(first.split()))
    listed = {name: line for part in COMMANDS.values() for name, line in part.items()}
    assert listed == defined
    text = helped()
    for panel, commands in COMMANDS.items():
        body = text.split(f"╭─ {panel} ─")[1].split("╰")[0]
        assert re.findall(r"^│ (\S+) ", body, re.M) == [*commands]
        shown = " ".join(re.sub("[│\n]", " ", body).split())
        assert all(f"{name} {line}" in shown for name, (_, line) in commands.items())


def test_help_introduction_is_indented_on_every_line() -> None:
    """The introduction is longer than the 80 columns of the terminal, so it is wrapped."""
    introduction = helped().split("COMMAND [ARGS]...")[1].split("╭")[0].strip("\n")
    lines = [line.rstrip() for line in introduction.splitlines() if line.strip()]
    assert len(lines) > 1 and all(re.match(r" \S", line) for line in lines)
    assert " ".join(line.strip() for line in lines) == app.info.help


def test_help_imports_no_command(tmp_path) -> None:
    code = "import sys; from kit.__main__ import main\nsys.argv = ['kit', '--help']\n"
    code += "try: main()\nexcept SystemExit: pass\nprint(*sys.modules)"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "kit.cli.app" in loaded
    assert not loaded & {"numpy", "torch", "pydantic", "rich.markdown", "kit.cli.planning"}


def test_examples_of_help_are_valid_commands() -> None:
    examples = re.findall(r"^kit (.*)$", EXAMPLES, re.M)
    assert len(examples) == 3 and all(f" kit {each}\n" in helped() for each in examples)
    assert not [each for each in examples if problem(shlex.split(each))]


def test_version_option_prints_the_version(monkeypatch) -> None:
    """If the kit is not installed, as in a checkout without metadata, the command prints
    `checkout`.
    """
    told = CliRunner().invoke(app, ["--version"])
    version = importlib.metadata.version("pretraining-notebook-kit")
    assert (told.exit_code, told.stdout) == (0, f"kit {version}\n")

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert "checkout" in CliRunner().invoke(app, ["--version"]).stdout


def leaves(command: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from leaves(inner, *words, name)


@pytest.mark.parametrize(("words", "command"), [*leaves(WHOLE)], ids=str)
def test_help_texts_are_printed_completely(words, command, monkeypatch) -> None:
    """Words in square brackets are not read as markup for colours. Lines are wrapped only at the
    width of the terminal.
    """
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 200)
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", helped(*words)).split())
    for parameter in command.params:
        if parameter.name != "help":
            assert parameter.help.endswith("."), f"{words} {parameter.name}: {parameter.help}"
            assert not CROSS_REFERENCE.search(parameter.help)
        if text := Text.from_markup(getattr(parameter, "help", None) or "").plain:
            assert " ".join(text.split()) in shown
            assert not re.search(r"(?<!\\)\[[a-z]", parameter.help)
    assert "\n" not in command.help.replace("\n\n", "")


TABLE = """
status done                              | eval done
status done --why                        | eval done
status stopped                           | resume stopped
status failed                            | logs failed
status scancelled                        | resume scancelled
status live                              | watch live
watch done                               | eval done
logs done                                | status done
runs .                                   | runs . --compare done --compare failed
runs done                                | runs done --compare done
figure done                              | runs FOLDER
figure                                   | figure frontier-strong-scaling
figure frontier-memory --out f.png       | figure frontier-memory --run runs/first
figure frontier-memory --points-template | figure frontier-memory --points points.csv
export done --format csv                 | figure done
plan --list                              | plan llama3-8b --site dgx-h100 --devices 64 --batch 1024
plan demo --site lumi --devices 8 --batch 16 | plan --out plan.json demo --site lumi --devices 8 --batch 16
plan demo --site lumi --devices 8 --batch 16 --out a.json | launch runs/first --model demo --plan a.json --site lumi
plan hlat-7b --site lumi --devices 64 --batch 64 --seq 2048 --out b.json | launch runs/first --model hlat-7b --plan b.json --site lumi --recipe recipe.toml --set spec.sequence_length=2048
plan llama3-8b --site lumi --devices 64 --batch 64 --out c.json | launch runs/first --model llama3-8b --plan c.json --site lumi --recipe recipe.toml
plan hlat-7b --rehearse --site trn1.32xlarge --set recipe.num_steps=10 | launch runs/first --recipe hlat-7b --site trn1.32xlarge --show
data build small --source text.txt --vocab-size 270 | launch runs/first --data small
data build part --source text.txt --tokenizer small --part 1/1 | launch runs/first --data 'part/part_*'
doctor                                   | data build data/demo
"""  # noqa: E501


FOUND = [
    DoctorFinding(subject="torch", found="2.13", ok=ok, advice="wait") for ok in (True, None, False)
]
"""Replaces the findings of the real checks of `kit doctor`. test_command_line.py runs the real
checks.
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    recorded_run(folder / "done", steps=80, planned=80, state=JobState.DONE)
    recorded_run(folder / "stopped", steps=80, planned=300, state=JobState.DONE)
    recorded_run(folder / "failed", steps=30, state=JobState.FAILED)
    recorded_run(folder / "scancelled", steps=30, state=JobState.FAILED)
    end = ExitReport(attempt=1, rc=143, reason="cancelled (scancel)", host="node1", time=1e9)
    write_exit(folder / "scancelled", end)
    recorded_run(folder / "live", steps=30)
    (folder / "empty").mkdir()
    (folder / "text.txt").write_text("the model is trained on tokens of data\n" * 400)
    return folder


def said(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> list[str]:
    """Runs a `kit` command, and returns the next commands that its output advises."""
    monkeypatch.setattr(sys, "argv", ["kit", *shlex.split(words)])
    with pytest.raises(SystemExit) as end:
        main()
    err = capsys.readouterr().err
    assert end.value.code in (0, None, 1), err
    return [found["words"] for found in SAID.finditer(err)]


@pytest.mark.parametrize("line", TABLE.strip().splitlines(), ids=lambda line: line.split(" |")[0])
def test_command_output_ends_with_the_next_command(line, place, monkeypatch, capsys) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr("kit.cli.machines.examine", lambda deep: FOUND)
    words, _, wanted = (part.strip() for part in line.partition("|"))
    assert said(words, monkeypatch, capsys)[-1:] == [wanted.replace("FOLDER", str(place))]
    assert problem(shlex.split(wanted)) is None


def test_json_output_has_no_next_command(place, monkeypatch, capsys) -> None:
    monkeypatch.chdir(place)
    assert said("runs . --json", monkeypatch, capsys) == []


def test_every_final_state_has_a_next_step() -> None:
    assert {*NEXT} == {state for state in JobState if state.is_final}
    assert not [command for _, command in NEXT.values() if problem([command, "RUN"])]
