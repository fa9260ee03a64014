"""Commands on existing runs: status, watch, logs, stop, checkpoint, runs."""

import io
import itertools
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from cluster.job import Job, JobStatus, read_status
from cluster.state import JobState, read_exit
from kit import monitor
from kit.cli.options import (
    AS_JSON,
    RunArgument,
    hint,
    names_table,
    next_step,
    note,
    owned_output,
    print_result,
)
from kit.errors import ConfigError, RunError, kit_command
from kit.monitor.states import STOPPED, state_word
from kit.run import Run
from kit.show.results import short_number
from kit.show.style import check_picture, save_figure
from kit.show.terminal import PlainConsole, Table, format_time, plain

if TYPE_CHECKING:
    from kit.monitor.goodput import Ledger
    from kit.monitor.runs import RunsTable
    from kit.monitor.speed import SpeedComparison

app = typer.Typer()
NEXT = {
    JobState.DONE: ("Score its last checkpoint:", "eval"),
    JobState.FAILED: ("Read its log:", "logs"),
    JobState.LOST: ("Continue from its last checkpoint:", "resume"),
    JobState.IMPORTED: ("Draw its loss:", "figure"),
}
"""Advice on the next step with a run that has ended, by its final state: (sentence, kit command
that follows the sentence)."""


@app.command()
def status(
    run: RunArgument,
    why: Annotated[
        bool,
        typer.Option(
            "--why",
            help="Compare the run's speed with the estimate, and show how the time of its"
            " nodes was spent.",
        ),
    ] = False,
) -> None:
    """Show the state of a run, and its alerts: NaN or spiking loss, stalls, falling MFU, slow
    ranks, failed jobs.
    """
    opened = Run.open(run)
    if why:
        _tell_why(opened)
    elif AS_JSON.get():
        alerts = [alert.to_dict() for alert in monitor.recorded_alerts(opened)]
        print_result(monitor.status_row(opened) | {"alerts": alerts})
    else:
        print_result(None, monitor.status_table(opened, PlainConsole().picture_width))
    _tell_next(run)


@app.command()
def watch(
    run: RunArgument,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the state and the charts of the run into one HTML page, and exit. The page"
            " needs no other file and no network.",
        ),
    ] = None,
) -> None:
    """Follow a run in the terminal until it ends. Ctrl-C ends the view, and the job continues.

    For each new alert, `kit watch` runs a shell command of yours, which is `on_alert = "..."` in
    ~/.config/kit/config.toml. $KIT_MESSAGE contains the alert as one line, and $KIT_ALERT contains
    it as JSON. To get alerts after you log out, use nohup kit watch RUN >/dev/null &
    """
    opened = Run.open(run)
    if html is None:
        monitor.watch(opened)
    else:
        monitor.write_page(opened, owned_output(html, html, "--html"))
        PlainConsole().print(Text(str(html)), soft_wrap=True)
    _tell_next(run)


@app.command()
def logs(
    run: RunArgument,
    rank: Annotated[int, typer.Option(help="Rank whose log is printed.")] = 0,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="After the present lines, print each new line until the job ends. Default: end"
            " after the present lines.",
        ),
    ] = False,
) -> None:
    """Print the log of one rank, or the log of the job's script if the rank has printed nothing."""
    # The directory of a job that scores a checkpoint or builds data has no spec.json.
    is_other = (run / "job.json").exists() and not (run / "spec.json").exists()
    job = Job.attach(run) if is_other else Run.open(run).job
    # A progress bar begins each redraw with a carriage return. Each redraw is printed as its own
    # line.
    lines = io.IncrementalNewlineDecoder(None, translate=True)
    if follow:
        _note_waiting(job, rank)
        for line in job.follow(rank):
            print(plain(lines.decode(line, final=True)), flush=True)
    else:
        file, pieces = job.read_logs(rank)
        first = next(pieces, "")
        if not first:
            note(f"{_silence_text(rank, job.status())} Looked at: {file}")
        elif not Path(file).name.startswith(("rank_", "node_")):
            note(f"{_silence_text(rank, job.status())} This is {file}:")
        for piece in itertools.chain([first], pieces):
            print(plain(lines.decode(piece)), end="")
        print(plain(lines.decode("", final=True)), end="")
    if not is_other:
        next_step("See its state and alerts:", "status", run)


def _silence_text(rank: int, status: JobStatus) -> str:
    """Returns a sentence about a rank that has printed nothing, with the state of its job. The
    sentence says `yet` if the job has not ended, since the rank may then print later.
    """
    yet = "" if status.state.is_final else " yet"
    reason = f" ({status.reason.removesuffix('.')})" if status.reason else ""
    return f"Rank {rank} has printed nothing{yet}. State of the job: {status.state}{reason}."


def _note_waiting(job: Job, rank: int) -> None:
    """Warns the user that no line may appear for long, if the job has not ended and the rank has
    printed nothing.
    """
    status = job.status()
    if not status.state.is_final and not job.logs(rank):
        note(f"{_silence_text(rank, status)} Its lines follow here.")


def _tell_next(run: Path) -> None:
    """Prints the user's next step with a run. It depends on the state of the run."""
    status = read_status(run)
    text, command = NEXT.get(status.state, ("Follow it:", "watch"))
    if state_word(status, Run.open(run).recipe.num_steps) == STOPPED:
        text, command = "It was stopped before its last step. Continue it:", "resume"
    if status.is_cancelled:
        text, command = "It was cancelled. Continue it:", "resume"
    report = read_exit(run)
    words = []
    if command == "logs" and report and report.attempt == status.attempt and report.failing_rank:
        words = ["--rank", str(report.failing_rank)]
    next_step(text, command, run, *words)


@app.command()
def stop(
    run: RunArgument,
    now: Annotated[
        bool, typer.Option("--now", help="End the job at once, without a checkpoint.")
    ] = False,
) -> None:
    """Ask a run to write a checkpoint and stop after its current step; with --now, end the job at
    once without a checkpoint.
    """
    job = _living(run, "stop")
    if now:
        job.cancel()
        hint("The job ends at once, without a checkpoint. Continue it later:", "resume", run)
    else:
        job.stop()
        hint(
            f"Asked at {format_time(time.time())} to write a checkpoint and stop after the current"
            " step. Follow it:",
            "watch",
            run,
        )


@app.command()
def checkpoint(run: RunArgument) -> None:
    """Ask a run to write a checkpoint after its current step."""
    _living(run, "checkpoint").checkpoint()
    hint(
        f"Asked at {format_time(time.time())} for a checkpoint after the current step. Follow it:",
        "watch",
        run,
    )


@app.command()
def runs(
    folder: Annotated[
        Path, typer.Argument(help="Folder that holds run directories.", metavar="FOLDER")
    ],
    compare: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a run in the table that `kit runs FOLDER` prints. The picture --out has"
            " the curves of all runs that are named in this way. Can be given up to 8 times."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Picture that --compare draws: .png, .svg or .pdf. Default: FOLDER/compare.png."
        ),
    ] = None,
) -> None:
    """List all runs below a folder, with their states and the settings in which they differ."""
    table = monitor.runs_table(folder)
    if compare:
        _compare(table.folder, compare, out)
    else:
        print_result(table.to_dicts(), _drawn(table), *table.notes)
        names = [row["run"] for row in table.rows if row["state"] != "unreadable"]
        words = []
        for name in names[:2]:
            words += ["--compare", name]
        if words:
            next_step("Draw their curves in one figure:", "runs", folder, *words)


def _tell_why(run: Run) -> None:
    """Prints a comparison of a run's measured speed with the planner's estimate, or the reason why
    there is no estimate. Also prints how the time of the run's nodes was spent.
    """
    spent = monitor.ledger(run)
    comparison = None
    try:
        comparison = monitor.compare_speed(run)
        pace = comparison.to_dict()
        facts = _facts(comparison)
    # The site lacks a number that the estimate needs, or the run has too few steps.
    except (ConfigError, RunError) as error:
        pace = {"verdict": str(error)}
        facts = [("pace", str(error))]
    used = {"share": spent.goodput, "usd": spent.usd, "parts": spent.rows()}
    print_result(
        {"pace": pace, "goodput": spent.to_dict() | used},
        names_table(f"Is {run.name} as fast as it should be?", facts),
        "",
        *_ledger_tables(spent),
    )
    if comparison is not None and comparison.took_s > comparison.high_s:
        next_step(
            "Keep this speed for later plans, which --runs or --site then use:",
            "calibrate",
            run.directory,
            "--out",
            "mine.toml",
        )


def _facts(comparison: "SpeedComparison") -> list[tuple[str, str]]:
    """Returns rows (name, text) of a table that compares a run's predicted and measured speeds."""

    def shares(parts: dict[str, float], whole: float) -> str:
        return ", ".join(
            f"{name.replace('_', ' ')} {part / whole:.0%}"
            for name, part in parts.items()
            if part > 0.01 * whole
        )

    measured_s = dict(comparison.parts_s)
    recorded_s = sum(measured_s.values())
    # The sum of the medians of the parts can be larger than the median of the whole step.
    whole_s = max(comparison.took_s, recorded_s)
    if measured_s:
        measured_s["other"] = whole_s - recorded_s
    waiting = ""
    if comparison.waiting_s is not None:
        waiting = f"{comparison.waiting_s / whole_s:.0%} for other ranks or the network"
    facts = {
        "pace": comparison.verdict,
        "a step, measured": shares(measured_s, whole_s),
        "of that, waiting": waiting,
        "where the time should go": shares(comparison.terms_s, comparison.expected_s),
    }
    warnings = [("warning", text) for text in comparison.warnings]
    return [fact for fact in (*facts.items(), *warnings) if fact[1]]


def _ledger_tables(spent: "Ledger") -> list[Table | str]:
    """Returns two tables on how the time of a run's nodes was spent: one with a row per category of
    time (training, saving ...), one with a row per attempt.
    """
    from kit.monitor.text import duration

    has_price = spent.usd is not None
    names = ["part", "time", "share", "device-hours"]
    if has_price:
        names.append("USD")
    names.append("what it is")
    rows = []
    for part in spent.rows():
        if not part["seconds"]:
            continue
        row = [part["part"], duration(part["seconds"]), f"{part['share']:.1%}"]
        row.append(short_number(part["device_hours"]))
        if has_price:
            row.append(f"{part['usd']:,.2f}")
        row.append(part["meaning"])
        rows.append(row)
    title = (
        f"{spent.goodput:.1%} of the device-hours of {spent.run} were productive; shares are of all"
        " time, waiting included"
    )
    parts: list[Table | str] = [Table(*names, right=names[1:-1], title=title, rows=rows)]
    if spent.idle_s:
        parts.append(
            f"{duration(spent.idle_s)} between attempts, in which none was wanted, are in no part."
        )
    if spent.unknown_s:
        parts.append(
            f"{duration(spent.unknown_s)} after the last sign of life of an attempt are in no part:"
            " its end was not recorded, so it is unknown how long it held its nodes."
        )
    names = ("attempt", "devices", "time", "productive device-hours", "last word")
    rows = []
    for share in spent.attempts:
        took = duration(sum(share.seconds.values()))
        goodput = "" if math.isnan(share.goodput) else f"{share.goodput:.1%}"
        rows.append((str(share.attempt), f"{share.devices:,}", took, goodput, share.end))
    return [*parts, "", Table(*names, right=names[1:3], rows=rows)]


def _living(run: Path, what: str) -> Job:
    """Returns the job of a run if the job is still live, so that a request can be sent to it.
    `what` names the request in error messages.

    Raises:
        RunError: The run does not exist, was imported, or has ended. No trainer would read the
            request.
        JobError: The run belongs to another user.
    """
    if not run.exists():
        raise RunError(
            f"{run} does not exist, so there is nothing to {what}. A job whose run directory is"
            " deleted ends by itself within seconds."
        )
    opened = Run.open(run)
    opened.check_writable(f"{what} it")
    if opened.is_imported:
        raise RunError(
            f"{run}: there is nothing to {what}, it was imported from another trainer's log."
        )
    status = opened.job.status()
    if status.state.is_final:
        is_whole = opened.checkpoints.steps()[-1:] >= [opened.recipe.num_steps]
        more_steps = ["--steps", "N"] if is_whole else []
        raise RunError(
            f"{run}: there is nothing to {what}, the job is {status.state} ({status.reason})."
            f" Continue it: `{kit_command('resume', run, *more_steps)}`."
        )
    return opened.job


def _compare(folder: Path, names: list[str], out: Path | None) -> None:
    """Draws the curves of several runs in one figure. `names` are the names of run directories in
    `folder`. Prints the path of the figure's file.
    """
    file = check_picture(owned_output(out, folder / "compare.png"))
    if missing := [name for name in names if not (folder / name).is_dir()]:
        raise RunError(
            f"--compare {missing[0]!r}: no such run below {folder}. `{kit_command('runs', folder)}`"
            " lists them."
        )
    figure, table = monitor.compare_figure([Run.open(folder / name) for name in names])
    save_figure(figure, [], [file])
    values = {}
    for name, columns in table.items():
        values[name] = {key: column.tolist() for key, column in columns.items()}
    print_result(values, str(file))


def _drawn(table: "RunsTable") -> Table | str:
    """Returns the table of runs for a terminal. Each state is printed in its colour."""
    from kit.monitor.runs import cell_text, column_heading
    from kit.monitor.text import STATE_COLOURS

    if not table.rows:
        return f"no run below {table.folder}"
    headings = [column_heading(name) for name in table.columns]
    rows = []
    for row in table.rows:
        cells = []
        for name in table.columns:
            style = STATE_COLOURS.get(row["state_word"], "") if name == "state_word" else ""
            cells.append(Text(cell_text(name, row.get(name)), style))
        rows.append(cells)
    return Table(*headings, rows=rows, right=headings[2:])
