"""What a stranger may send: pickles that run a program, words that a shell or a browser would
obey, whole runs.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import signal
import stat
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cluster.attempts import claim_attempt
from cluster.outcome import write_end
from cluster.process import Process
from cluster.site import Site
from cluster.state import log_path
from kit import launcher
from kit.plan import Plan
from kit.recipe import Recipe
from kit.run import Run
from kit.spec import ModelSpec
from tests.monitor.recorded import beat, rows

SCRIPT = (
    "<img src=x"
    " onerror=\"document.title='owned'\"><script>document.title='owned'</script>'\"`${7*7}"
)
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\x1b]8;;http://evil\x1b\\click\u202e"
MARKUP = "[link=http://evil]click[/link][bold red]x[/]"
STRANGER = 65534
"""Owns nothing, and is called nobody."""


class Payload:
    """Unpickled by an ordinary reader, it makes the file `canary`."""

    def __init__(self, canary: Path) -> None:
        self.canary = str(canary)

    def __reduce__(self):
        return os.mkdir, (self.canary,)


class Reduced:
    """Is pickled as whatever it is told."""

    def __init__(self, parts: tuple) -> None:
        self.parts = parts

    def __reduce__(self) -> tuple:
        return self.parts


def finished_run(
    directory: Path, spec: ModelSpec | None = None, recipe: Recipe | None = None, steps: int = 40
) -> Run:
    """Returns a run that has done all its steps, as a job would have left it, with one loss that
    deserves an alert.
    """
    plan, recipe = Plan(global_batch_size=8), recipe or Recipe(data="data", num_steps=steps)
    site = Site.load("laptop").with_measured_peak("fp32", 1e12, "test")
    run = Run.create(
        directory, spec=spec or ModelSpec.preset("demo"), plan=plan, recipe=recipe, site=site
    )
    attempt = claim_attempt(run.directory)
    job = launcher.job_spec(run).replace(argv=("true",))
    for name, record in (("job", job), ("plan.attempt_01", plan), ("site.attempt_01", site)):
        record.write(run.directory / f"{name}.json")
    lines = rows(1, steps)
    lines[steps // 2] = json.dumps({**json.loads(lines[steps // 2]), "loss": math.nan}) + "\n"
    (run.directory / "metrics.jsonl").write_text("".join(lines))
    log = log_path(run.directory, attempt, 0)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"step {steps} of {steps}\n")
    beat(run, steps)
    write_end(run.directory, attempt=attempt, rc=0, reason="the one rank ended with code 0")
    return run


def process_of(pid: int) -> Process:
    """Returns the identity of a process of this machine, as anybody can read it there."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Process.current().replace(pid=pid, start_ticks=int(fields[19]))


def tree(folder: Path) -> dict[str, tuple]:
    """Returns what is in a folder: kind and mode of each thing, its size, when it was last
    written, what it holds.
    """
    found = {}
    for path in [folder, *folder.rglob("*")]:
        about = path.lstat()
        kind, content = stat.S_IFMT(about.st_mode), ""
        if kind == stat.S_IFLNK:
            content = os.readlink(path)
        elif kind == stat.S_IFREG and about.st_size < 2**24:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(folder))] = (
            oct(about.st_mode),
            about.st_size,
            about.st_mtime_ns,
            content,
        )
    return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Returns the names at which two trees differ."""
    return sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )


def open_to_all(folder: Path, owner: int | None = None) -> None:
    """Lets everybody write everything in a folder, and gives it to somebody."""
    for path in [folder, *folder.rglob("*")]:
        if owner is not None:
            os.chown(path, owner, owner, follow_symlinks=False)
        if not path.is_symlink():
            path.chmod(0o777 if path.is_dir() else 0o666)


def in_a_child(work: Callable[[], Any], user: int | None = None) -> Any:
    """Returns what a function returns, as JSON carries it, in a child of this process; `user`: as
    somebody else.

    Raises:
        AssertionError: it raises; with its traceback.
    """
    with tempfile.TemporaryFile("w+") as told:
        if not (child := os.fork()):
            try:
                if user is not None:
                    os.setgroups([]), os.setresgid(user, user, user), os.setresuid(user, user, user)
                json.dump({"result": work()}, told)
            except BaseException:
                told.seek(0), told.truncate()
                json.dump({"error": traceback.format_exc()}, told)
            finally:
                told.flush()
                os._exit(0)
        try:
            os.waitpid(child, 0)
        except BaseException:  # the time of the test is over
            os.kill(child, signal.SIGKILL), os.waitpid(child, 0)
            raise
        told.seek(0)
        answer = json.load(told)
    assert "error" not in answer, answer["error"]
    return answer["result"]


class Said(NamedTuple):
    """How a command ended: its exit code, and all that it printed."""

    code: int
    text: str


def kit(*words: str | Path, ctrl_c_after_s: float | None = None) -> Said:
    """Runs a command of the kit in this process, as a shell would."""
    from kit.commands.app import run

    said, code = io.StringIO(), 0
    pressed = threading.Timer(
        ctrl_c_after_s or 0, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)
    )
    # What a shell starts in the background ignores it from the start.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    before, sys.argv = sys.argv, ["kit", *map(str, words)]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            if ctrl_c_after_s:
                pressed.start()
            run()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            code = 1
            traceback.print_exc(file=said)
        finally:
            pressed.cancel()
            signal.signal(signal.SIGINT, handler)
            sys.argv = before
    return Said(code, said.getvalue())


FAKE = """#!/bin/sh
echo "${{0##*/}} [$SLURM_CONF] $*" >> {calls}
case "${{0##*/}} $1 $2" in
squeue*) for word; do case $word in --format=*)
    echo "${{word#--format=}}" | sed "s|%i|777|; s|%T|RUNNING|; s|%N|node1|; s|%r|None|; s|%Z|$(cat {place})|
        s|%o|$(cat {place})/submit.sh|; s|%j|run|; s|%u|$(id -un)|" ;; esac; done ;;
"scontrol show job") cat <<END
JobId=777 JobName=run
   UserId=$(id -un)($(id -u)) GroupId=root(0) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   SubmitTime=now EligibleTime=now PreemptTime=None SuspendTime=None
   Command=$(cat {place})/submit.sh
   WorkDir=$(cat {place})
END
;;
scancel*) ;;
*) echo "${{0##*/}}: refused" >&2; exit 1 ;;
esac
"""  # noqa: E501
QUESTIONS = ("squeue ", "sacct ", "sinfo ", "scontrol show ", "scontrol --oneliner show ")


class Calls:
    """Commands that would reach another machine: fakes in a folder for the PATH, which record that
    they were called.

    Slurm's are of a cluster on which job 777 of this user runs; it was submitted in the folder
    `place`.
    """

    def __init__(self, folder: Path, place: Path) -> None:
        folder.mkdir()
        self.bin, self.file, self.place = folder, folder / "calls.txt", folder / "place.txt"
        self.place.write_text(str(place))
        for name in (
            "ssh",
            "scp",
            "rsync",
            "sbatch",
            "scancel",
            "srun",
            "squeue",
            "scontrol",
            "sacct",
            "sinfo",
        ):
            (folder / name).write_text(FAKE.format(calls=self.file, place=self.place))
            (folder / name).chmod(0o755)

    def taken(self) -> list[str]:
        """Returns the calls since the last time, as NAME [SLURM_CONF] WORDS."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.file.unlink(missing_ok=True)
        return lines


def beyond_questions(calls: Sequence[str], strange: Path) -> list[str]:
    """Returns the calls that did more than ask the user's own Slurm."""
    harmless = [call for call in calls if str(strange) not in call.partition("]")[0]]
    asked = [call for call in harmless if call.replace("[] ", "", 1).startswith(QUESTIONS)]
    return [call for call in calls if call not in asked]
