"""Commands on scores: eval."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from kit.commands.options import JsonOption, console
from kit.errors import ConfigError
from kit.run import Run
from kit.terminal import Table

app = typer.Typer()


@app.command("eval")
def evaluate(
    run: Annotated[str, typer.Argument(help="run directory, or `data` to fetch the benchmarks", metavar="RUN|data")],
    step: Annotated[int | None, typer.Option(help="which checkpoint; default: the newest")] = None,
    tasks: Annotated[str, typer.Option(help="comma-separated")] = "heldout,piqa,arc_easy",
    suite: Annotated[str | None, typer.Option(help="hlat, smoke or curve, in place of --tasks")] = None,
    limit: Annotated[int | None, typer.Option(help="items per task, a seeded random part: never a result")] = None,
    seed: Annotated[int, typer.Option(help="of that part, and of sampled programs")] = 1234,
    num_fewshot: Annotated[int | None, typer.Option(help="solved examples; default: the suite's or the task's")] = None,
    batch_tokens: Annotated[int, typer.Option(help="tokens in one forward pass")] = 4096,
    follow: Annotated[bool, typer.Option("--follow", help="score each new checkpoint until the job ends")] = False,
    submit: Annotated[bool, typer.Option("--submit", help="with --follow: each as a job of the run's site")] = False,
    untrusted_code: Annotated[
        str, typer.Option(help="run programs that the model writes: refuse, isolated or limits")
    ] = "refuse",
    download: Annotated[bool, typer.Option("--download", help="fetch data that is missing")] = False,
    mirror: Annotated[Path | None, typer.Option(help="folder of the benchmarks; default: the user's cache")] = None,
    as_json: JsonOption = False,
) -> None:
    """Score a checkpoint with lm-eval, without conversion; `kit eval data` fetches the benchmarks first."""
    from kit import evaluate as evaluation

    if run == "data":
        _data(mirror, as_json)
        return
    chosen: str | tuple[str, ...] = suite or tuple(tasks.split(","))
    options: dict[str, Any] = {
        "limit": limit, "seed": seed, "num_fewshot": num_fewshot, "batch_tokens": batch_tokens,
        "untrusted_code": untrusted_code, "download": download, "mirror": mirror,
    }  # fmt: skip
    if submit and not follow:
        raise ConfigError("--submit: only with --follow. Give both, or neither to score here and now.")
    if follow:
        _follow(Run.open(run), chosen, options, submit, as_json)
        return
    report = evaluation.evaluate(Run.open(run), step, chosen, **options)
    if as_json:
        print(report.to_json())
        return
    print(report.to_text())
    if suite == "hlat":
        from kit.evaluate.hlat import compare

        for table in ("II", "V"):
            print(f"\n{compare(report, table).to_text()}")


def _data(mirror: Path | None, as_json: bool) -> None:
    from kit.evaluate.task_data import build_mirror, default_mirror, mirror_table

    folder = mirror or default_mirror()
    manifest = build_mirror(folder)
    rows = mirror_table(folder)
    if as_json:
        print(json.dumps({"folder": str(folder), "benchmarks": rows, **manifest.to_dict()}))
        return
    table = Table(*rows[0], title=f"Benchmark data in {folder}")
    for row in rows:
        table.add(*row.values())
    console().print(table)
    console().print(Text("Hashes, sources and licences of all files: manifest.json in that folder."))


def _follow(run: Run, tasks: str | tuple[str, ...], options: dict[str, Any], submit: bool, as_json: bool) -> None:
    from kit.evaluate.follow import follow_run

    for found in follow_run(run, tasks, submit=submit, **options):
        if as_json:
            print(json.dumps(found.to_dict()), flush=True)
        else:
            console().print(Text(found.line()))
