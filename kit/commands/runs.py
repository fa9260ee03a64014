"""Commands on runs: status, watch, logs, stop, checkpoint, figure."""

import difflib
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.job import Job
from cluster.state import refuse_other_owner
from kit.commands.options import (
    JsonOption,
    RunArgument,
    check_not_in_a_strangers_run,
    console,
    facts_table,
    hint,
    strict_json,
    tell,
)
from kit.errors import ConfigError, RunError, kit_command
from kit.run import Run
from kit.show.terminal import Table, plain

if TYPE_CHECKING:
    from kit.monitor.expected import Pace
    from kit.monitor.goodput import Ledger

app = typer.Typer()


@app.command()
def status(
    run: RunArgument,
    why: Annotated[
        bool,
        typer.Option(
            "--why", help="is it as fast as it should be, and where did the time of its nodes go?"
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what a run does now, and what deserved a look: losses that are lost, jump or rise,
    stalls, slow ranks.
    """
    from kit.monitor.text import recorded_alerts, status_row, status_table

    opened = Run.open(run)
    if why:
        _tell_why(opened, as_json)
    elif as_json:
        alerts = [alert.to_dict() for alert in recorded_alerts(opened)]
        print(strict_json(status_row(opened) | {"alerts": alerts}))
    else:
        console().print(status_table(opened, console().picture_width))


@app.command()
def watch(run: RunArgument) -> None:
    """Follow a run in the terminal until it ends. Ctrl-C leaves the job alone.

    For each alert that comes it runs the command `on_alert = "..."` of ~/.config/kit/config.toml,
    with the alert in $KIT_MESSAGE, and as JSON in $KIT_ALERT. To be called at night:
    nohup kit watch RUN >/dev/null &
    """
    from kit.monitor import watch as watch_run

    watch_run(Run.open(run))


@app.command()
def logs(
    run: RunArgument,
    rank: Annotated[int, typer.Option(help="which process")] = 0,
    follow: Annotated[bool, typer.Option("--follow", help="go on until the job ends")] = False,
) -> None:
    """Print the log of one rank."""
    is_other = (run / "job.json").exists() and not (
        run / "spec.json"
    ).exists()  # a job that scores, or builds data
    job = Job.attach(run) if is_other else Run.open(run).job
    shown = plain if sys.stdout.isatty() else str  # a file or a pipe gets what was printed
    if not follow:
        print(shown(job.logs(rank)), end="")
        return
    for line in job.follow(rank):
        print(shown(line), flush=True)


@app.command()
def stop(
    run: RunArgument,
    now: Annotated[bool, typer.Option("--now", help="kill it, without a checkpoint")] = False,
) -> None:
    """Ask a run to checkpoint and stop after its current step, or with --now to end at once."""
    job = _living(run, "stop")
    if now:
        job.cancel()
        hint("Told to end at once, without a checkpoint. Go on later:", "resume", run)
    else:
        job.stop()
        hint(
            f"Asked at {_now()} to stop after the current step; a checkpoint is written first."
            " Done?",
            "watch",
            run,
        )


@app.command()
def checkpoint(run: RunArgument) -> None:
    """Ask a run for a checkpoint after its current step."""
    _living(run, "checkpoint").checkpoint()
    hint(f"Asked at {_now()} for a checkpoint after the current step. Done?", "watch", run)


@app.command()
def figure(
    run: RunArgument,
    out: Annotated[
        Path | None, typer.Option(help="file (.png, .svg, .pdf); default: RUN/figure.png")
    ] = None,
    own: Annotated[
        list[Path] | None, typer.Option("--run", help="with a paper's figure: your runs, added")
    ] = None,
    points: Annotated[
        Path | None, typer.Option(help="with a paper's figure: a CSV of its points, digitised")
    ] = None,
    points_template: Annotated[
        bool, typer.Option("--points-template", help="print such a CSV to fill in")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Draw loss and MFU of a run, or a figure of a paper by its name (`kit figures` lists them)."""
    from kit.monitor import run_figure
    from kit.papers import FIGURES
    from kit.show.style import check_picture, save_figure

    if str(run) in FIGURES:
        from kit.commands.papers import draw_paper_figure

        if points_template:
            return print(FIGURES[str(run)].points_template(str(run), own or ()), end="")
        return draw_paper_figure(str(run), out, own or (), as_json, points)

    if not run.exists():
        close = difflib.get_close_matches(str(run), FIGURES, n=1)
        near = (
            f"Did you mean {close[0]!r}?" if close else "`kit figures` lists the figures of papers."
        )
        raise RunError(f"{run} is neither a run directory nor a figure of a paper. {near}")
    if points or points_template:
        raise ConfigError(f"--points: {run} is no figure of a paper. `kit figures` lists them.")
    if own:
        raise ConfigError(
            f"--run: {own[0]} has no place beside {run}: it adds runs to a figure of a paper."
        )
    opened = Run.open(run)
    file = check_not_in_a_strangers_run(check_picture(out or opened.directory / "figure.png"))
    drawn, table = run_figure(opened)
    save_figure(drawn, [], [file])
    print(
        strict_json({name: column.tolist() for name, column in table.items()}) if as_json else file
    )


def _tell_why(run: Run, as_json: bool) -> None:
    """Prints how a run's speed compares with the estimate, or why that cannot be said, and its
    ledger.
    """
    from kit.monitor.expected import pace
    from kit.monitor.goodput import ledger

    spent = ledger(run)
    try:
        found = pace(run)
        told, facts = found.to_dict(), _facts(found)
    except (ConfigError, RunError) as error:  # a number that the site lacks, or too few steps
        told, facts = {"verdict": str(error)}, [("pace", str(error))]
    used = {**spent.to_dict(), "share": spent.goodput, "usd": spent.usd, "parts": spent.rows()}
    title = f"Is {run.name} as fast as it should be?"
    tell(
        {"pace": told, "goodput": used},
        as_json,
        facts_table(title, facts),
        "",
        *_ledger_tables(spent),
    )


def _facts(found: "Pace") -> list[tuple[str, str]]:
    """Returns in words what an estimate says of a run, and what was measured."""

    def shares(parts: dict[str, float], whole: float) -> str:
        told = (
            f"{name.replace('_', ' ')} {part / whole:.0%}"
            for name, part in parts.items()
            if part > 0.01 * whole
        )
        return ", ".join(told)

    checked = shares(found.node_check, 1.0)
    facts = [
        ("pace", found.verdict),
        ("nearest measured run", str(found.nearest or "")),
        ("node check", checked and f"{checked} of the site file's numbers"),
        ("a step, measured", shares(found.parts_s, found.took_s)),
        ("where the time should go", shares(found.terms_s, found.expected_s)),
        *(("warning", text) for text in found.warnings),
    ]
    return [(name, text) for name, text in facts if text]


def _ledger_tables(spent: "Ledger") -> list[Table | str]:
    """Returns where the time of a run's nodes went, by part and by attempt."""
    from kit.monitor.text import duration

    rows = [row for row in spent.rows() if row["seconds"]]
    costs = [name for name in ("USD", "kWh") if all(row[name.lower()] is not None for row in rows)]
    names = ["part", "time", "share", "device-hours", *costs, "what it is"]
    title = (
        f"{spent.goodput:.1%} of the device-hours of {spent.run} count; shares are of all time,"
        " waiting too"
    )
    parts = Table(*names, right=names[1:-1], title=title)
    for row in rows:
        cost = [f"{row[name.lower()]:,.2f}" for name in costs]
        hours = f"{row['device_hours']:,.3g}"
        parts.add(
            row["part"],
            duration(row["seconds"]),
            f"{row['share']:.1%}",
            hours,
            *cost,
            row["meaning"],
        )
    names = ("attempt", "devices", "time", "of its device-hours count", "last word")
    attempts = Table(*names, right=names[1:3])
    for share in spent.attempts:
        counts = "" if math.isnan(share.goodput) else f"{share.goodput:.1%}"
        held = duration(sum(share.seconds.values()))
        attempts.add(str(share.attempt), f"{share.devices:,}", held, counts, share.end)
    idle = f"{duration(spent.idle_s)} between attempts, in which none was wanted, are in no part."
    return [parts, *([idle] if spent.idle_s else []), "", attempts]


def _living(run: Path, what: str) -> Job:
    """Returns the job of a run; RunError where it has ended, or was never ours: nobody would
    read a request.
    """
    if not run.exists():
        raise RunError(
            f"{run} does not exist, so there is nothing to {what}. A job whose run directory is"
            " deleted ends by itself within seconds."
        )
    opened = Run.open(run)
    refuse_other_owner(opened.directory, f"{what} it")
    if opened.is_imported:
        raise RunError(
            f"{run}: there is nothing to {what}, it was imported from another trainer's log."
        )
    status = opened.job.status()
    if status.state.is_final:
        is_whole = opened.checkpoints.steps()[-1:] >= [opened.recipe.num_steps]
        go_on = (
            kit_command("resume", run, "--steps", "N") if is_whole else kit_command("resume", run)
        )
        raise RunError(
            f"{run}: there is nothing to {what}, the job is {status.state} ({status.reason}). Go on"
            f" with `{go_on}`."
        )
    return opened.job


def _now() -> str:
    return time.strftime("%H:%M:%S")
