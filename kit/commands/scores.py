"""Commands on what a model can do: eval, generate."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from cluster.files import other_owner
from cluster.login.mirror import mirror_of
from kit.commands.options import JsonOption, console, run_there, tell
from kit.errors import ConfigError, RunError
from kit.run import Run
from kit.show.terminal import PlainConsole, Table, plain

if TYPE_CHECKING:
    from kit.evaluate import EvalReport

app = typer.Typer()


@app.command("eval")
def evaluate(
    run: Annotated[
        str,
        typer.Argument(
            help="run directory, Hugging Face folder, or `data` to fetch the benchmarks",
            metavar="RUN|FOLDER|data",
        ),
    ],
    step: Annotated[int | None, typer.Option(help="which checkpoint; default: the newest")] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="of lm-eval, comma-separated; default: heldout (of a run), piqa, arc_easy"
        ),
    ] = None,
    suite: Annotated[
        str | None, typer.Option(help="hlat, smoke or curve, in place of --tasks")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="items per task, a seeded random part: never a result")
    ] = None,
    seed: Annotated[int, typer.Option(help="of that part, and of sampled programs")] = 1234,
    num_fewshot: Annotated[
        int | None, typer.Option(help="solved examples; default: the suite's or the task's")
    ] = None,
    batch_tokens: Annotated[int, typer.Option(help="tokens in one forward pass")] = 4096,
    precision: Annotated[
        str, typer.Option(help="of the weights while they score: fp32 or bf16")
    ] = "fp32",
    devices: Annotated[
        int | None,
        typer.Option(
            help="of the run's site, in a job if several; default: as many as the weights need"
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="score each new checkpoint until the job ends")
    ] = False,
    submit: Annotated[
        bool, typer.Option("--submit", help="with --follow: each as a job of the run's site")
    ] = False,
    untrusted_code: Annotated[
        str, typer.Option(help="run a model's programs: refuse, isolated or limits")
    ] = "refuse",
    task_data: Annotated[
        Path | None, typer.Option(help="folder with data sets of tasks: jsonl or parquet")
    ] = None,
    download: Annotated[
        bool, typer.Option("--download", help="fetch data that is missing")
    ] = False,
    mirror: Annotated[
        Path | None, typer.Option(help="folder of the benchmarks; default: the user's cache")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="with a FOLDER: file of the report; default: FOLDER.eval.json beside it"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Score a checkpoint, or a Hugging Face folder, with lm-eval; `kit eval data` fetches the
    benchmarks first.
    """
    from kit import evaluate as evaluation
    from kit.evaluate.folder import is_hugging_face_folder

    values: dict[str, Any] = {"--step": step, "--tasks": tasks, "--suite": suite, "--limit": limit}
    values |= {"--follow": follow or None, "--submit": submit or None, "--out": out}
    given = [flag for flag, value in values.items() if value is not None]
    if run == "data":
        _refuse(given, "`kit eval data` fetches all benchmarks and scores nothing. Leave it out.")
        _data(mirror, as_json)
        return
    if suite is not None and tasks is not None:
        raise ConfigError(f"--suite {suite}: not with --tasks {tasks}. Give one of them.")
    options: dict[str, Any] = {
        "limit": limit,
        "seed": seed,
        "num_fewshot": num_fewshot,
        "batch_tokens": batch_tokens,
        "untrusted_code": untrusted_code,
        "download": download,
        "mirror": mirror,
        "precision": precision,
        "devices": devices,
        "task_data": task_data,
    }
    asked = suite if tasks is None else tuple(task.strip() for task in tasks.split(","))
    if is_hugging_face_folder(Path(run)):
        of_a_run = [flag for flag in given if flag in ("--step", "--follow", "--submit")]
        _refuse(
            of_a_run,
            f"{run} is a Hugging Face folder, which has one model. Give a run, or leave it out.",
        )
        _folder(Path(run), asked, out, options, as_json)
        return
    if not (Path(run).expanduser() / "spec.json").exists():
        raise RunError(
            f"{run}: neither a run directory (no spec.json) nor a Hugging Face folder (no"
            " config.json). Give one of them, or `data`."
        )
    if out is not None:
        raise ConfigError(
            "--out: only with a Hugging Face folder; a run keeps its scores in its own eval/."
        )
    if submit and not follow:
        raise ConfigError(
            "--submit: only with --follow. Give both, or neither to score here and now."
        )
    _behind_a_login_node(run, submit)
    chosen = "default" if asked is None else asked
    if follow:
        _follow(Run.open(run), chosen, options, submit, as_json)
        return
    if not as_json:
        _tell_layout(Run.open(run), options)
    report = evaluation.evaluate(Run.open(run), step, chosen, **options)
    if os.environ.get("RANK", "0") == "0":  # of the ranks of a job, one speaks
        _print(report, suite, as_json)
        _tell_unkept(Path(run).expanduser())


def _behind_a_login_node(run: str, submit: bool) -> None:
    """Has the mirror of a run scored where its checkpoints are, by jobs; a run that is here is
    left alone.
    """
    if mirror_of(Path(run).expanduser()) and not submit:
        raise ConfigError(
            f"{run}: its checkpoints are behind a login node. Add --follow --submit: jobs score"
            " them."
        )
    run_there(run)


@app.command()
def generate(
    model: Annotated[
        str, typer.Argument(help="run directory or Hugging Face folder", metavar="RUN|FOLDER")
    ],
    prompt: Annotated[str, typer.Argument(help="text to go on from")] = "",
    step: Annotated[int | None, typer.Option(help="which checkpoint; default: the newest")] = None,
    tokens: Annotated[int, typer.Option(help="to write at most")] = 100,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token")] = 0.8,
    top_p: Annotated[
        float, typer.Option(help="draw from the fewest tokens that have this probability")
    ] = 0.95,
    seed: Annotated[int, typer.Option(help="the same text for the same seed")] = 0,
) -> None:
    """Have a checkpoint go on from a prompt, and show the text as it is written."""
    from kit.evaluate.continuation import continue_text

    if mirror_of(Path(model).expanduser()):
        raise ConfigError(
            f"{model}: its checkpoints are behind a login node. Run this command there."
        )
    prompt = os.fsencode(prompt).decode(
        errors="replace"
    )  # as it was typed, whatever the locale makes of it
    print(plain(prompt), end="", flush=True)
    continue_text(
        model,
        prompt,
        step=step,
        num_tokens=tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        tell=lambda text: print(plain(text), end="", flush=True),
    )
    print()


def _refuse(flags: list[str], why: str) -> None:
    if flags:
        raise ConfigError(f"{flags[0]}: {why}")


def _folder(
    folder: Path,
    asked: str | tuple[str, ...] | None,
    out: Path | None,
    options: dict[str, Any],
    as_json: bool,
) -> None:
    from kit.evaluate.folder import DEFAULT_TASKS, evaluate_folder, report_beside

    report = evaluate_folder(folder, DEFAULT_TASKS if asked is None else asked, out=out, **options)
    _print(report, asked, as_json)
    if not as_json:
        console().print(Text(f"Kept in {out or report_beside(folder)}"))


def _tell_layout(run: Run, options: dict[str, Any]) -> None:
    """Says where a score will come from, where that is not this process; the ranks of a job say
    nothing.
    """
    from kit.evaluate.jobs import layout
    from kit.evaluate.options import Options

    if (
        "WORLD_SIZE" not in os.environ
        and (plan := layout(run.spec, run.site, Options.of(options))).num_devices > 1
    ):
        PlainConsole(stderr=True).print(
            f"Scoring in a job on {plan.num_devices} devices of {run.site.name}: tensor"
            f" {plan.tensor_parallel} x pipeline {plan.pipeline_parallel} x replicas"
            f" {plan.data_parallel} ..."
        )


def _tell_unkept(run_dir: Path) -> None:
    if owner := other_owner(run_dir):
        PlainConsole(stderr=True).print(
            f"Not kept: the run is {owner}'s. `--json > FILE` keeps the scores."
        )


def _print(report: "EvalReport", asked: str | tuple[str, ...] | None, as_json: bool) -> None:
    if as_json:
        print(report.to_json())
        return
    print(report.to_text())
    if asked == "hlat":
        from kit.evaluate.hlat import compare

        for table in ("II", "V"):
            print(f"\n{compare(report, table).to_text()}")


def _data(mirror: Path | None, as_json: bool) -> None:
    from kit.evaluate.task_data import build_mirror, default_mirror, mirror_table

    folder = mirror or default_mirror()
    manifest = build_mirror(folder)
    rows = mirror_table(folder)
    table = Table(
        *rows[0], title=f"Benchmark data in {folder}", rows=[row.values() for row in rows]
    )
    more = Text("Hashes, sources and licences of all files: manifest.json in that folder.")
    tell({"folder": str(folder), "benchmarks": rows, **manifest.to_dict()}, as_json, table, more)


def _follow(
    run: Run, tasks: str | tuple[str, ...], options: dict[str, Any], submit: bool, as_json: bool
) -> None:
    from kit.evaluate.follow import follow_run

    for found in follow_run(run, tasks, submit=submit, **options):
        tell(found.to_dict(), as_json, Text(found.line()))
