"""The mirror of a run directory that lies on a cluster: itself a run directory, which every view
can read, offline too.

    login.json         whose mirror it is: the login node, the directory there, the Python and the
                       source that answer
    login_seen.json    what was last heard: the job's status, when, and what was in the way since
    .login.lock        held while it is asked for; its time is when that began or ended last

What is small comes by rsync when it has changed, steps and the logs that were asked for from where
they end here. Data and weights stay there. The job notices nothing.
"""

import dataclasses
import hashlib
import json
import os
import shlex
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from cluster.files import (
    append_lines,
    appending,
    is_locked,
    lock_file,
    write_atomic,
)
from cluster.interpreter import source_command
from cluster.login.connection import TIMEOUT_S, NoConnectionError, copy, pass_through, ssh
from cluster.ownership import Owned
from cluster.record import Record, config_folder, field_doc
from cluster.state import JobError, RunState, find_log, rank_logs, script_logs

MIRROR = "login.json"
SEEN = "login_seen.json"
LOCK = ".login.lock"
INTERVAL_S = 5.0
LATE_S = 12.0
FIRST_WAIT_S = 20.0
SUBMIT_WAIT_S = 300.0  # longer than the scheduler may take there, twice where it compiles first
SYNCED = "/kit-source-"
"""In the path of source that was sent there, which must be its user's own; one that a site file
names need not be."""
IS_OWN = """\
{ [ "$(find . -prune -user "$(id -u)" ! -perm -020 ! -perm -002)" = . ] || { echo "$PWD is no folder that you alone \
can write to, and what it holds would be run. Remove it, or give another there.folder." >&2; exit 1; }; }"""  # noqa: E501
"""Ends a shell unless the folder that it is in, whatever bears its name by now, is its user's
own."""
SMALL = (
    "--max-size=16m",
    "--delete",
    "--filter=protect /*",
    "--prune-empty-dirs",
    "--modify-window=-1",
    "--exclude=.*",
    "--exclude=/site.json",
    "--exclude=/login*",
    "--include=/*.json",
    "--include=/*.sh",
    "--include=/history.jsonl",
    "--include=/eval/",
    "--include=/eval/*.json",
    "--include=/ranks/",
    "--include=/ranks/*.json*",
    "--include=/control/",
    "--include=/control/*",
    "--include=/checkpoints/",
    "--include=/checkpoints/*/",
    "--include=/checkpoints/*/manifest.json",
    "--exclude=*",
)
"""Of rsync, for what is replaced as a whole: no larger than a record may be; neither whose mirror
it is nor the site as the other side names it. What goes there goes here, but for the user's own."""
GROWING = ("--max-size=1g", "--append", "--files-from=-", "--ignore-missing-args")
"""Of rsync, for what only grows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mirror(Record):
    """login.json: where the run is that this directory mirrors."""

    login: str = field_doc("name of the login node in ~/.ssh/config")
    python: str = field_doc("Python on the other side")
    source: str = field_doc("folder of the kit on the other side")
    directory: str = field_doc("run directory on the other side")

    @property
    def note(self) -> Path:
        """Where it is noted that this user has made it: run directories are passed on, and this
        file of one says what is run where.
        """
        return config_folder() / "mirrors" / hashlib.sha256(self.to_json().encode()).hexdigest()

    def own(self) -> Self:
        """Notes that this user has made it, and returns it."""
        self.note.parent.mkdir(parents=True, exist_ok=True)
        self.note.touch()
        return self

    def ask(self, **request: Any) -> dict[str, Any]:
        """Returns the answer of the other side to a request.

        Raises:
            NoConnectionError: it cannot be reached.
            JobError: it refuses, with its words, or the mirror is somebody else's.
        """
        data = json.dumps({"run": self.directory, **request}).encode()
        timeout_s = SUBMIT_WAIT_S if request["do"] in ("submit", "requeue") else TIMEOUT_S
        answer = ssh(self.login, self.command("cluster.login.answer"), data, timeout_s)
        try:  # what a login shell prints by itself comes first
            found = json.loads(answer[answer.rstrip().rfind(b"\n") + 1 :])
        except ValueError as error:  # the connection broke in the middle of it
            raise NoConnectionError(
                f"{self.login}: the answer was cut short ({len(answer):,} bytes)"
            ) from error
        if "refused" in found:
            raise JobError(f"{self.login}: {found['refused']}")
        return found

    def command(self, module: str, *words: str) -> str:
        """Returns the shell command that runs a module of the kit there.

        Raises:
            JobError: the mirror was made by somebody else, so what it names may be anything.
        """
        if not self.note.exists():
            raise JobError(
                f"somebody else made this mirror of {self.directory} on {self.login}. Make your"
                f" own: `kit launch RUN --site FILE.toml --there {shlex.quote(self.directory)}`."
            )
        return command(self.source, self.python, module, *words)


def command(source: str, python: str, module: str, *words: str) -> str:
    """Returns the shell command that runs a module of the kit in a folder of its source."""
    own = f" && {IS_OWN}" if SYNCED in source else ""
    answer = source_command(module, *words, python=python, source=source)
    inner = f"cd {shlex.quote(source)}{own} && exec {shlex.join(answer)}"
    # A login shell, since the scheduler and its modules may be known only there.
    return f"exec bash -lc {shlex.quote(inner)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen(Record):
    """login_seen.json: what was last heard from there."""

    time: float = field_doc("unix time on this side; 0: nothing was heard yet", default=0.0)
    status: dict[str, Any] = field_doc("JobStatus as the other side knew it", default_factory=dict)
    began: float | None = field_doc(
        "unix time on the other side at which the run began", default=None
    )
    alerts: int = field_doc("bytes of the other side's alerts that were copied", default=0)
    trouble: str = field_doc("why nothing more was heard since", default="")

    @property
    def age_s(self) -> float:
        """Seconds since then."""
        return max(0.0, time.time() - self.time)

    @property
    def age(self) -> str:
        """The same for people."""
        return age_text(self.age_s)


def age_text(seconds: float) -> str:
    """Returns an age for people, in the largest unit of which it has at least two."""
    for unit, size, least in (("d", 86400, 2), ("h", 3600, 2), ("min", 60, 2)):
        if seconds >= least * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


class MirroredRun(Owned):
    """A run behind a login node: its mirror on this machine, and what is asked of it there."""

    def __init__(self, run_dir: Path, mirror: Mirror) -> None:
        self.run_dir = run_dir
        self.mirror = mirror

    @property
    def owned_folder(self) -> Path:
        return self.run_dir

    def seen(self) -> Seen:
        """Returns what was last heard of the run."""
        return seen_of(self.run_dir)

    def refresh(self, now: bool = False) -> Seen:
        """Returns what was last heard of the run, and what is in the way of hearing more.

        Asks at most every INTERVAL_S, in the background, or `now`. It waits for the answer only
        then, and where nobody has asked for a while. A mirror of another user is not changed.
        """
        if owner := self.other_owner:
            return self.seen().replace(
                trouble=f"the mirror is {owner}'s, so it is asked for nothing new"
            )
        quiet_s = _age_s(self.run_dir / LOCK)
        if now or quiet_s > INTERVAL_S:
            asking = threading.Thread(
                target=self._ask_now, args=(now,), name="login-poll", daemon=True
            )
            asking.start()
            if now or quiet_s > LATE_S:
                asking.join(FIRST_WAIT_S)
        return self.seen()

    def forward(self, request: str) -> None:
        """Asks the other side to `stop`, `checkpoint`, `cancel` or `requeue`.

        Raises:
            NoConnectionError: it cannot be asked; the job goes on.
            JobError: it refuses.
        """
        self.mirror.ask(do=request)
        self.refresh(now=True)

    def fetch_logs(self, logs: Iterable[Path], waits: bool) -> None:
        """Makes empty logs, since a fetch updates only the logs that the mirror already has. If
        `waits`, fetches them. Of a mirror of another user nothing is fetched.
        """
        if not self.is_writable:
            return
        for log in logs:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.touch()
        if waits:
            self.refresh(now=True)

    def run_command(self, words: list[str]) -> int:
        """Runs a `kit` command on the other side and returns its exit status. Its output goes where
        this process's goes.

        Raises:
            NoConnectionError, JobError: it cannot be run there, or the mirror is somebody else's.
        """
        self.check_writable("run this where it mirrors a run")
        return pass_through(self.mirror.login, self.mirror.command("kit", *words))

    def _ask_now(self, now: bool) -> None:
        """Makes one round trip, unless another is under way, and notes what was in its way."""
        # of the login node, so that a list of many runs waits for one of them
        lost = config_folder() / f"unreachable_{Path(self.mirror.login).name}"
        wait_s = FIRST_WAIT_S if now else 0.0
        try:
            with lock_file(self.run_dir / LOCK) as lock:
                if not is_locked(lock, wait_s):
                    return
                _mark_now(lock.fileno())
                try:
                    if _age_s(lost) < INTERVAL_S and not now:
                        raise JobError(lost.read_text())
                    fetch(self.run_dir, self.mirror)
                finally:
                    _mark_now(lock.fileno())
        except Exception as error:  # whatever went wrong, what is here already tells the rest
            if isinstance(error, NoConnectionError):
                write_atomic(lost, str(error))
                _mark_now(lost)
            self.seen().replace(trouble=str(error)).write(self.run_dir / SEEN)


def mirror_of(run_dir: Path) -> MirroredRun | None:
    """Returns the run that a run directory mirrors, or None for one whose run is here."""
    mirror = Mirror.read_or_none(run_dir / MIRROR)
    return None if mirror is None else MirroredRun(run_dir, mirror)


def seen_of(run_dir: Path) -> Seen:
    """Returns what was last heard of a run elsewhere; of one that is here, nothing ever."""
    return Seen.read_or_none(run_dir / SEEN) or Seen()


def refresh(run_dir: Path) -> None:
    """Brings a mirror up to date as `MirroredRun.refresh`. Does nothing for a run that is here."""
    if run := mirror_of(run_dir):
        run.refresh()


def forward(run_dir: Path, request: str) -> bool:
    """Asks the other side as `MirroredRun.forward`. Returns False where the run is here."""
    run = mirror_of(run_dir)
    if run is None:
        return False
    run.forward(request)
    return True


def fetch_log(
    run_dir: Path, attempt: int, rank: int, ranks_per_node: int, waits: bool = False
) -> Path:
    """Returns the log that holds what a rank has said, as `find_log`.

    A mirror fetches the logs that it has, so there it is made, and `waits` for what is in it.
    """
    logs = rank_logs(run_dir, attempt, rank, ranks_per_node)
    if not logs[0].exists() and (run := mirror_of(run_dir)):
        run.fetch_logs(logs, waits)
    return find_log(run_dir, attempt, rank, ranks_per_node)


def fetch_script_logs(run_dir: Path, state: RunState) -> list[Path]:
    """Returns the files of `script_logs`, which a mirror fetches first."""
    logs = script_logs(run_dir, state)
    if run := mirror_of(run_dir):
        run.fetch_logs(logs, waits=True)
    return logs


def fetch(run_dir: Path, mirror: Mirror) -> None:
    """Brings a mirror up to date.

    Raises:
        NoConnectionError, JobError: as `Mirror.ask`.
        OSError: a file here is none that may be appended to.
    """
    old = seen_of(run_dir)
    heard = mirror.ask(do="status", began=old.began, alerts=old.alerts)
    if heard["began"] != old.began:  # the directory there is that of another run now
        (run_dir / "metrics.jsonl").unlink(missing_ok=True)
        shutil.rmtree(run_dir / "logs", ignore_errors=True)
    copy(mirror.login, mirror.directory, run_dir, *SMALL)
    growing = [
        run_dir / "metrics.jsonl",
        *run_dir.glob("logs/*.log"),
        *run_dir.glob("logs/attempt_*/*.log"),
    ]
    for file in growing:
        appending(file).close()
    names = "\n".join(str(file.relative_to(run_dir)) for file in growing)
    copy(mirror.login, mirror.directory, run_dir, *GROWING, names=names)
    if heard["alerts"]:  # to those of watchers here
        append_lines(run_dir / "alerts.jsonl", heard["alerts"].encode())
    Seen(
        time=time.time(), status=heard["status"], began=heard["began"], alerts=heard["alerts_end"]
    ).write(run_dir / SEEN)


def _mark_now(file: Path | int) -> None:
    """Sets the times of a file by this machine's clock. A file server's clock may differ."""
    now = time.time()
    os.utime(file, (now, now))


def _age_s(file: Path) -> float:
    """Returns the seconds since `_mark_now` was called for a file. Returns infinity if the file is
    missing, or if its time is in the future and so comes from another clock.
    """
    try:
        age_s = time.time() - file.stat().st_mtime
    except OSError:
        return float("inf")
    return age_s if age_s >= 0 else float("inf")
