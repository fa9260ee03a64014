"""Untrusted input from another user: pickles that run programs, text with shell commands and
control characters, and run directories.
"""

import contextlib
import hashlib
import io
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cluster.attempts import AttemptOutcome, claim_attempt, write_end
from cluster.process import Process
from cluster.site import Site
from cluster.state import JobState, RunState, log_path
from kit import launcher
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.run import Run
from tests.support.recorded_runs import beat, rows, spoil
from tests.support.runs import new_run

SCRIPT = (
    "<img src=x"
    " onerror=\"document.title='owned'\"><script>document.title='owned'</script>'\"`${7*7}"
)
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\x1b]8;;http://evil\x1b\\click\u202e"
MARKUP = "[link=http://evil]click[/link][bold red]x[/]"
STEPS = 40
"""Number of steps of the run that `finished_run` writes."""
STRANGER = 65534
"""Number of a user without privileges, usually named nobody, who owns no files."""


class Reduced:
    """Object whose pickle calls any given function: `parts` is the value of `__reduce__`."""

    def __init__(self, parts: tuple) -> None:
        self.parts = parts

    def __reduce__(self) -> tuple:
        return self.parts


class Payload(Reduced):
    """Object whose pickle creates the folder `canary` if a reader loads it without protection."""

    def __init__(self, canary: Path) -> None:
        super().__init__((os.mkdir, (str(canary),)))


def finished_run(directory: Path, spec: ModelSpec | None = None, data: str = "data") -> Run:
    """Returns a finished run of 40 steps, written without training. The loss of step 21 is NaN,
    which raises an alert.
    """
    plan, recipe = Plan(global_batch_size=8), Recipe(data=data, num_steps=40)
    site = Site.load("laptop").with_measured_peak("fp32", 1e12, "test")
    spec = spec or ModelSpec.preset("demo")
    run = new_run(directory, spec=spec, plan=plan, recipe=recipe, site=site)
    attempt = claim_attempt(run.directory)
    job = launcher.job_spec(run).replace(argv=("true",))
    for name, record in (("job", job), ("plan.attempt_01", plan), ("site.attempt_01", site)):
        record.write(run.directory / f"{name}.json")
    (run.directory / "metrics.jsonl").write_text("".join(rows(1, 40)))
    spoil(run, {21: {"loss": math.nan}})
    log = log_path(run.directory, attempt, 0)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("step 40 of 40\n")
    beat(run, 40)
    write_end(run.directory, attempt, AttemptOutcome(0, "the one rank ended with code 0"))
    return run


def running(run: Path, **changes: Any) -> None:
    """Changes the files of a finished run so that its job counts as running, with a fresh
    heartbeat. `changes` replace fields of state.json.
    """
    (run / "exit.json").unlink(missing_ok=True)
    state = {"attempt": 1, "step": 40, "heartbeat": time.time(), "step_time_s": 1.0, **changes}
    RunState(state=JobState.RUNNING, **state).write(run / "state.json")


def process_of(pid: int) -> Process:
    """Returns the identity of a process on this machine: its number and start time, which every
    user can read.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Process.current().replace(pid=pid, start_ticks=int(fields[19]))


def save_checkpoint(run: Run, step: int = STEPS) -> None:
    """Writes a complete checkpoint with initial weights and AdamW's state, as the trainer would."""
    import torch

    from kit.model import build_decoder
    from tests.support.workers import complete_checkpoint

    state = {}
    for name, weight in build_decoder(run.spec).named_parameters():
        state[f"model.{name}"] = weight.detach()
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"adamw.{moment}.{name}"] = torch.zeros_like(weight.detach())
    complete_checkpoint(run, state, step)


def tree(folder: Path) -> dict[str, tuple]:
    """Returns a dict from each path below a folder to (file mode with type, size in bytes,
    modification time in ns, hash of the content or target of the link).
    """
    found = {}
    for path in [folder, *folder.rglob("*")]:
        about, content = path.lstat(), ""
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file() and about.st_size < 2**24:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        name = str(path.relative_to(folder))
        found[name] = oct(about.st_mode), about.st_size, about.st_mtime_ns, content
    return found


def open_to_all(folder: Path, owner: int | None = None) -> None:
    """Makes all files below a folder readable and writable for every user. If `owner` is given, the
    files also get this owner.
    """
    for path in [folder, *folder.rglob("*")]:
        if owner is not None:
            os.chown(path, owner, owner, follow_symlinks=False)
        if not path.is_symlink():
            path.chmod(0o777 if path.is_dir() else 0o666)


def in_a_child(
    work: Callable[[], Any], user: int | None = None, limit_s: float | None = None
) -> Any:
    """Runs a function in a forked child process and returns its result. With `user`, the child runs
    as that user number.

    Raises:
        AssertionError: The function raised an exception. The text is its traceback.
        TimeoutError: The function has not returned after `limit_s` seconds.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def tell() -> None:
        try:
            if user is not None:
                os.setgroups([])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
            there.send((work(), None))
        except BaseException:
            there.send((None, traceback.format_exc()))

    child = context.Process(target=tell)
    child.start()
    there.close()
    try:
        if limit_s is not None and not here.poll(limit_s):
            raise TimeoutError
        answer, error = here.recv()
    finally:
        child.kill()
        child.join()
    assert error is None, error
    return answer


class Said(NamedTuple):
    """Result of a command: its exit code, and everything that it printed."""

    code: int
    text: str


def kit(*words: str | Path, ctrl_c_after_s: float = 60.0) -> Said:
    """Runs a command of the kit in this process, with the exit codes that a shell would get. After
    `ctrl_c_after_s` seconds SIGINT is sent, as by Ctrl-C.
    """
    from kit.cli.app import run

    said, code = io.StringIO(), 0
    thread = threading.get_ident(), signal.SIGINT
    pressed = threading.Timer(ctrl_c_after_s, signal.pthread_kill, thread)
    # A shell starts background programs with SIGINT ignored, so the default handler is set here.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    before, sys.argv = sys.argv, ["kit", *map(str, words)]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
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


def leaves(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (words, command) for each command of the command line that has no subcommands."""
    for word, inner in getattr(command, "commands", {}).items():
        yield from leaves(inner, f"{name} {word}".strip())
    if not hasattr(command, "commands"):
        yield name, command


TASK = """
task: mine
dataset_path: json
dataset_kwargs: {{data_files: {{test: {lines}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
"""
"""Definition of a task of lm-eval, with the path of its items to be filled in."""


def write_task(folder: Path) -> Path:
    """Writes a task of lm-eval with four items, and returns the file with its definition."""
    items, task = folder / "items.jsonl", folder / "task.yaml"
    items.write_text('{"text": "a b", "answer": "c"}\n' * 4)
    task.write_text(TASK.format(lines=items))
    return task


FAKE = """#!/bin/sh
echo "${{0##*/}} [$SLURM_CONF] $*" >> {calls}
case "${{0##*/}} $1 $2" in
squeue*) for word; do case $word in --format=*)
    echo "${{word#--format=}}" | sed "s|%[iF]|777|; s|%T|RUNNING|; s|%N|node1|; s|%r|None|; s|%Z|$(cat {place})|
        s|%o|$(cat {place})/submit.sh|; s|%j|run|; s|%u|$(id -un)|" ;; esac; done ;;
scancel*) ;;
*) echo "${{0##*/}}: refused" >&2; exit 1 ;;
esac
"""  # noqa: E501
COMMANDS = "ssh scp rsync sbatch scancel srun squeue scontrol sacct sinfo".split()
QUESTIONS = ("squeue ", "sacct ", "sinfo ", "scontrol show ", "scontrol --oneliner show ")


class Calls:
    """Fake versions of the programs that contact other machines, in a folder for PATH. Each fake
    program records its calls.

    The fake Slurm reports one running job of this user, number 777. Its working directory is the
    folder `place`.
    """

    def __init__(self, folder: Path, place: Path) -> None:
        folder.mkdir()
        self.bin, self.file, self.place = folder, folder / "calls.txt", folder / "place.txt"
        self.place.write_text(str(place))
        for name in COMMANDS:
            (folder / name).write_text(FAKE.format(calls=self.file, place=self.place))
            (folder / name).chmod(0o755)

    def taken(self) -> list[str]:
        """Returns the calls recorded since the last query, each as "NAME [SLURM_CONF]
        ARGUMENTS".
        """
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.file.unlink(missing_ok=True)
        return lines


def beyond_questions(calls: Sequence[str], strange: Path) -> list[str]:
    """Returns the calls that did more than query the user's own Slurm cluster."""
    harmless = [call for call in calls if str(strange) not in call.partition("]")[0]]
    asked = [call for call in harmless if call.replace("[] ", "", 1).startswith(QUESTIONS)]
    return [call for call in calls if call not in asked]
