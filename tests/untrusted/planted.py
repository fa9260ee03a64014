"""Runs in which another user has replaced files, and functions that read such runs. These functions
are called views.
"""

import contextlib
import io
import json
import math
import os
import random
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cluster.heartbeats import read_rank_heartbeats, write_all_heartbeats
from cluster.job import Job
from cluster.record import ConfigError
from cluster.state import JobError, log_path, take_request, write_request
from kit.cli.options import strict_json
from kit.errors import DataError, RunError
from kit.evaluate.report import EvalReport, Metric
from kit.monitor.dashboard import Dashboard, PlotRange
from kit.monitor.export import export_table
from kit.monitor.figure import run_figure, snapshot
from kit.monitor.goodput import ledger
from kit.monitor.runs import compare_figure, runs_table
from kit.monitor.scores import eval_curve
from kit.monitor.text import recorded_alerts, status_row
from kit.run import Run
from tests.evaluate.conftest import task_score
from tests.support.hostile import STEPS, finished_run, kit, running
from tests.support.recorded_runs import looked_at
from tests.support.runs import seal

OURS = (ConfigError, DataError, RunError, JobError)
CPU_S, WALL_S, MORE_BYTES = 2.0, 20.0, 300 << 20
"""Limits of one view (function that reads a run): CPU seconds, wall seconds (for a view that
waits), and bytes of additional memory.
"""
RECORDS = """
spec.json plan.json recipe.json site.json job.json state.json exit.json metrics.jsonl history.jsonl
plan.attempt_01.json site.attempt_01.json ranks/rank_00000.json ranks/all.jsonl alerts.jsonl
eval/step_00000040.json checkpoints/step_00000040/manifest.json login_seen.json
control/request_checkpoint control/taken_checkpoint
""".split()
OTHERS = """
login.json import.json hook.py notes.txt control/request_stop .state.lock
logs/attempt_01/rank_00000.log
""".split()
FOLDERS = ("ranks", "logs", "logs/attempt_01", "control", "eval", "checkpoints", "monitor")


def whole_run(directory: Path, **asked: Any) -> Run:
    """Returns a run with every file that a view reads. Its fresh heartbeat says that the job is
    running. `asked` are arguments of `finished_run`.
    """
    run = finished_run(directory, **asked)
    seal(run, STEPS)
    metrics = (Metric.of("acc", 0.5, 0.1, 20),)
    score = task_score(metrics=metrics, num_items=20, total_items=40)
    about = {"name": run.name, "step": 40, "checkpoint": "x", "tokenizer_sha256": "x"}
    report = EvalReport(**about, scores=(score,), tokens_seen=9)
    report.write(run.directory / "eval" / "step_00000040.json")
    write_request(run.directory, "checkpoint")
    take_request(run.directory, "checkpoint", step=40)
    write_request(run.directory, "checkpoint")
    recorded_alerts(run)
    beats = [beat.line for beat in read_rank_heartbeats(run.directory, 1)]
    write_all_heartbeats(run.directory, beats)
    running(run.directory)
    return run


# Files that another user may plant ----------------------------------------------------------------


def huge(file: Path) -> None:
    file.touch()
    os.truncate(file, 2**40)


SPECIAL: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "a link to /dev/zero": lambda file: file.symlink_to("/dev/zero"),
    "a link to /dev/tty": lambda file: file.symlink_to("/dev/tty"),
    "a link to it": lambda file: file.symlink_to("/etc/passwd"),
    "gone": lambda file: None,
    "a terabyte of nothing": huge,
    "a folder": Path.mkdir,
    "a link to its folder": lambda file: file.symlink_to(file.parent),
    "a link into nothing": lambda file: file.symlink_to("/nowhere/at/all"),
    "no text": lambda file: file.write_bytes(b"\xff\xfe\x00\x80" * 9),
    "nothing": Path.touch,
    "10**5000": lambda file: file.write_text("1" + "0" * 5000 + "\n"),
    "a deep list": lambda file: file.write_text("[" * 100_000 + "\n"),
    "a deep table": lambda file: file.write_text('{"a":' * 100_000 + "\n"),
    "a line of 9 MB": lambda file: file.write_text('"' + "x" * 9_000_000 + '"\n'),
}
WHOLE = 2_000_000_000, 2**63, 2**31, 2**53, 10**400, -(10**400), 0, -1, 1
NUMBERS = *WHOLE, math.nan, math.inf, -math.inf, 1e308, 5e-324
WORDS = "", "x", "../../x", "x" * 100_000, "\x1b]0;x\x07<b>", "\ud800", "running", "failed"
SCHEDULERS = "slurm", "kubernetes", "local", "imported"
NESTED = [], {}, [[[[1]]]], {"a": {"b": 1}}
VALUES: tuple[Any, ...] = *NUMBERS, None, True, *WORDS, *SCHEDULERS, *NESTED


def plant(directory: Path, name: str, kind: str) -> None:
    """Replaces or creates a file or folder of a run by a special file. `kind` is a key of
    SPECIAL.
    """
    file, aside = directory / name, directory.with_name("aside")
    file.parent.mkdir(parents=True, exist_ok=True)
    if kind == "a link to it" and file.exists():
        file.rename(aside)
        file.symlink_to(aside)
        return
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    file.unlink(missing_ok=True)
    SPECIAL[kind](file)


def rewrite(file: Path, change: Callable[[Any], Any]) -> None:
    """Applies the function `change` to the JSON value of a file. In a .jsonl file, applies it to
    the value of each line.
    """
    text = file.read_text(errors="replace")
    texts = text.splitlines() if file.suffix == ".jsonl" else [text]
    file.write_text("".join(json.dumps(change(json.loads(text))) + "\n" for text in texts))


NUMBERS_OF_A_STEP = """
step attempt time step_time_s tokens loss consumed_tokens nan_steps loss_scale skipped_steps
validation_loss checkpoint_s reserved_bytes
""".split()


def mutate(directory: Path, dice: random.Random) -> list[str]:
    """Makes one to three random harmful changes to a run's files. Returns descriptions of the
    changes.
    """
    done = []
    if dice.random() < 0.5:  # In half of the cases the run has ended.
        ended = {"attempt": 1, "rc": 1, "reason": "r", "host": "h", "time": 1.7e9}
        (directory / "exit.json").write_text(json.dumps(ended))
    for _ in range(dice.choice((1, 1, 2, 3))):
        name = dice.choice([name for name in RECORDS if _is_plain(directory / name)])
        how = dice.choice((_one_value,) * 6 + (_bytes, _special, _special, _swapped, _more))
        # The change may fail on a file that an earlier change has damaged.
        with contextlib.suppress(OSError, ValueError, RecursionError, IndexError):
            done.append(f"{how.__name__} {name}: {how(directory, name, dice)}")
    return done


def _is_plain(file: Path) -> bool:
    return file.is_file() and not file.is_symlink() and file.stat().st_size < 2**25


def _one_value(directory: Path, name: str, dice: random.Random) -> str:
    told, new = [], dice.choice(VALUES)
    chosen = dice.randrange(10**6)

    def change(value: Any) -> Any:
        places = list(_places(value))
        holder, key = places[chosen % len(places)]
        told.append(f"{key} = {new!r:.30}")
        holder[key] = new
        return value

    rewrite(directory / name, change)
    return told[0]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


def _bytes(directory: Path, name: str, dice: random.Random) -> str:
    text = bytearray((directory / name).read_bytes())
    for _ in range(dice.choice((1, 5, 50))):
        text[dice.randrange(len(text))] = dice.randrange(256)
    (directory / name).write_bytes(text)
    return "flipped"


def _special(directory: Path, name: str, dice: random.Random) -> str:
    name, kind = dice.choice((name, *OTHERS, *FOLDERS)), dice.choice(list(SPECIAL))
    plant(directory, name, kind)
    return f"{name} is {kind}"


def _swapped(directory: Path, name: str, dice: random.Random) -> str:
    other = dice.choice([name for name in RECORDS if _is_plain(directory / name)])
    (directory / name).write_bytes((directory / other).read_bytes())
    return f"is {other}"


def _more(directory: Path, name: str, dice: random.Random) -> str:
    """Appends copies of metrics rows in random order. Each copy has a random attempt and one
    extreme number.
    """
    file = directory / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if _is_plain(file) else []
    rows = []
    for _ in range(dice.choice((1, 20))):
        attempt = {"attempt": dice.choice((1, 2, 3))}
        strange = {dice.choice(NUMBERS_OF_A_STEP): dice.choice(NUMBERS)}
        rows.append({**dice.choice(lines), **attempt, **strange})
    with file.open("a") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)
    return "more steps"


# Views that read a run ----------------------------------------------------------------------------


def command(words: str) -> Callable[[Run], None]:
    """Returns a view (function of a run) that runs a command on the run and asserts that it prints
    no traceback.
    """

    def view(run: Run) -> None:
        said = kit(*words.replace("RUN", str(run.directory)).split())
        assert "Traceback" not in said.text and said.code in (0, 1), said.text

    return view


def job_of(run: Run) -> None:
    job = Job.attach(run.directory)
    job.status(), job.history, job._repr_html_()
    log = log_path(run.directory, 1, 0)
    # Huge logs are skipped. A log may have any length, and `logs` reads all of it.
    if not log.exists() or log.stat().st_size < 2**30:
        job.logs()


def dashboard_of(run: Run) -> Dashboard:
    shown = looked_at(run)
    shown.frame(PlotRange())
    shown.frame(PlotRange(axis="tokens", log_x=True))
    shown.frame(PlotRange(axis="time", start=1.0, end=1e12))
    json.dumps([shown.facts(), shown.alerts(), shown.settings, shown.notes()])
    shown.step_time_heat_map(), shown.log()
    return shown


def records_of(run: Run) -> None:
    eval_curve(run), run.checkpoints.steps(), run._repr_html_(), export_table(run)
    for step in run.checkpoints.steps():
        run.checkpoints.manifest(step)


Views = dict[str, Callable[[Run], Any]]
VIEWS: Views = {
    "job": job_of,
    "row": lambda run: strict_json(status_row(run)),
    "alerts": recorded_alerts,
    "goodput": lambda run: strict_json(ledger(run).rows()),
    "dashboard": dashboard_of,
    "records": records_of,
}
COMMANDS = "status RUN", "status RUN --json", "status RUN --why"
SLOW: Views = {f"kit {words}": command(words) for words in COMMANDS}
"""Views that take long. Each test case uses only one of them, in turn."""
DRAWN: Views = {
    "figure": lambda run: drawn(run_figure(run)[0]),
    "compared": lambda run: drawn(compare_figure([run])[0]),
    "widget": lambda run: drawn(snapshot(looked_at(run))),
}


def drawn(figure: Any) -> None:
    figure.savefig(io.BytesIO(), format="png")


class TooLong(BaseException):
    """Raised when a view takes longer than its limit of wall time. The class does not derive from
    Exception, so that no handler in the view catches the error.
    """


def faults(directory: Path, views: Views) -> list[str]:
    """Runs views on a run. Returns descriptions of their faults: errors other than the kit's own
    errors, and too much time or memory.
    """
    names = [each.name for each in directory.iterdir() if not each.is_dir()]

    def table() -> None:
        found = runs_table(directory.parent)
        strict_json(found.to_dicts()), found._repr_html_()
        is_listed = "spec.json" in names and "plan.json" in names
        assert len(found.rows) == is_listed, "a run that cannot be read is a row that says why"

    opened: list[Run] = []
    found = _fault("runs", table) + _fault("open", lambda: opened.append(Run.open(directory)))
    for name, view in views.items() if opened else ():
        found += _fault(name, lambda view=view: view(opened[0]))
    return found


def _fault(name: str, look: Callable[[], Any]) -> list[str]:
    def waits(*_: Any) -> None:
        raise TooLong

    signal.signal(signal.SIGALRM, waits)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    before, memory = time.process_time(), _peak_bytes()
    try:
        look()
    except OURS:
        pass
    except (Exception, TooLong):
        return [f"{name}: {traceback.format_exc()}"]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    took, more = time.process_time() - before, _peak_bytes() - memory
    slow = [f"{name}: {took:.1f} s"] if took > CPU_S else []
    return slow + ([f"{name}: {more >> 20} MB more"] if more > MORE_BYTES else [])


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
