"""Keeps a mirror of a run directory on a cluster. The mirror is itself a run directory, which every
view can read, also offline. It has three files of its own:

    login.json         place of the run: login node, directory on the cluster, and the Python and
                       the kit's source there that answer requests
    login_seen.json    last report: the job's status, the time of the report, and the error that has
                       prevented later reports
    .login.lock        lock of a request. Its modification time is the beginning or end of the last
                       request.

rsync copies small files when they have changed. Of metrics and requested logs it copies only what
the mirror does not have yet. Data and weights stay on the cluster. The job is not affected.
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
    lock_file,
    open_for_appending,
    try_lock,
    write_atomic,
)
from cluster.interpreter import source_command
from cluster.login.connection import TIMEOUT_S, NoConnectionError, copy, pass_through, ssh
from cluster.ownership import Owned
from cluster.record import Record, config_folder, field_doc
from cluster.state import JobError, RunState, find_log, rank_logs, script_logs

MIRROR_FILE = "login.json"
REPORT_FILE = "login_seen.json"
LOCK_FILE = ".login.lock"
INTERVAL_S = 5.0
LATE_S = 12.0
FIRST_WAIT_S = 20.0
# Longer than the cluster's scheduler may take to accept two jobs, one that compiles and one that
# runs.
SUBMIT_WAIT_S = 300.0
SYNCED = "/kit-source-"
"""Part of the path of each folder into which this kit has copied its source on the cluster. Such a
folder must belong to the user (IS_OWN). A folder that a site file names may belong to another
user."""
IS_OWN = """\
{ [ "$(find . -prune -user "$(id -u)" ! -perm -020 ! -perm -002)" = . ] || { echo "$PWD is no folder that you alone \
can write to, and what it holds would be run. Remove it, or give another there.folder." >&2; exit 1; }; }"""  # noqa: E501
"""Shell command that exits with code 1 unless the current folder belongs to the user and nobody
else can write to it. It tests the working directory of the shell itself, even if another folder now
has its path."""
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
    "--include=/notes.txt",
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
"""Options of rsync for files that are replaced as a whole. 16 MiB is the largest size of a record.
login.json and site.json are not copied, since the mirror has its own. Files that were deleted on
the cluster are also deleted in the mirror. Files at the top level are not deleted, since the user
may have put files there."""
GROWING = ("--max-size=1g", "--append", "--files-from=-", "--ignore-missing-args")
"""Options of rsync for files that only grow, such as logs. Only new bytes are copied."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mirror(Record):
    """Content of login.json: where the run is that this directory mirrors."""

    login: str = field_doc("name of the login node in ~/.ssh/config")
    python: str = field_doc("path of Python on the cluster")
    source: str = field_doc("folder of the kit's source on the cluster")
    directory: str = field_doc("run directory on the cluster")

    @property
    def note(self) -> Path:
        """File in the user's configuration folder that exists if this user has made the mirror. The
        check is needed because users pass run directories to others, and login.json names programs
        that are run on a login node.
        """
        return config_folder() / "mirrors" / hashlib.sha256(self.to_json().encode()).hexdigest()

    def own(self) -> Self:
        """Records that this user has made the mirror, so that its programs may be run. Returns this
        object.
        """
        self.note.parent.mkdir(parents=True, exist_ok=True)
        self.note.touch()
        return self

    def send_request(self, **request: Any) -> dict[str, Any]:
        """Sends a request to the kit on the cluster (`cluster.login.answer`), and returns the
        answer.

        Raises:
            NoConnectionError: The login node cannot be reached.
            JobError: The cluster refuses the request, or another user made the mirror.
        """
        data = json.dumps({"run": self.directory, **request}).encode()
        timeout_s = SUBMIT_WAIT_S if request["do"] in ("submit", "requeue") else TIMEOUT_S
        answer = ssh(self.login, self.command("cluster.login.answer"), data, timeout_s)
        try:  # The login shell may have printed other lines first.
            found = json.loads(answer[answer.rstrip().rfind(b"\n") + 1 :])
        except ValueError as error:  # The answer is incomplete.
            raise NoConnectionError(
                f"{self.login}: the answer was cut short ({len(answer):,} bytes)"
            ) from error
        if "refused" in found:
            raise JobError(f"{self.login}: {found['refused']}")
        return found

    def command(self, module: str, *words: str) -> str:
        """Returns the shell command that runs a module of the kit on the login node.

        Raises:
            JobError: Another user made the mirror, so the programs that it names are not trusted.
        """
        if not self.note.exists():
            raise JobError(
                f"somebody else made this mirror of {self.directory} on {self.login}. Make your"
                f" own: `kit launch RUN --site FILE.toml --there {shlex.quote(self.directory)}`."
            )
        return command(self.source, self.python, module, *words)


def command(source: str, python: str, module: str, *words: str) -> str:
    """Returns the shell command that runs a module of the kit in the folder `source`."""
    own = f" && {IS_OWN}" if SYNCED in source else ""
    answer = source_command(module, *words, python=python, source=source)
    inner = f"cd {shlex.quote(source)}{own} && exec {shlex.join(answer)}"
    # A login shell is used, since other shells may not find the commands of the scheduler and of
    # modules.
    return f"exec bash -lc {shlex.quote(inner)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterReport(Record):
    """Content of login_seen.json: the last report from the cluster about a mirrored run."""

    time: float = field_doc(
        "Unix time of the last answer of the cluster by the clock of this machine, in seconds; 0:"
        " no answer yet",
        default=0.0,
    )
    status: dict[str, Any] = field_doc(
        "last status that the cluster has reported: the fields of JobStatus by name",
        default_factory=dict,
    )
    began: float | None = field_doc(
        "Unix time at which the run began by the clock of the cluster, in seconds", default=None
    )
    alerts: int = field_doc(
        "number of bytes of the cluster's alerts.jsonl that were copied to this machine", default=0
    )
    trouble: str = field_doc(
        "reason why the last query of the cluster failed; empty: it succeeded", default=""
    )

    @property
    def age_s(self) -> float:
        """Age of the last report in seconds."""
        return max(0.0, time.time() - self.time)

    @property
    def age(self) -> str:
        """Age of the last report as a text, such as `3 min`."""
        return age_text(self.age_s)


def age_text(seconds: float) -> str:
    """Returns an age as a text such as `90 s` or `3 min`. The unit is the largest one (d, h, min,
    s) in which the age is at least 2.
    """
    for unit, size, least in (("d", 86400, 2), ("h", 3600, 2), ("min", 60, 2)):
        if seconds >= least * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


class MirroredRun(Owned):
    """A run on a cluster behind a login node: reads its mirror on this machine, and sends requests
    to the cluster.
    """

    def __init__(self, run_dir: Path, mirror: Mirror) -> None:
        self.run_dir = run_dir
        self.mirror = mirror

    @property
    def owned_folder(self) -> Path:
        return self.run_dir

    def last_report(self) -> ClusterReport:
        """Returns the last report from the cluster about the run."""
        return read_cluster_report(self.run_dir)

    def update_report(self, now: bool = False) -> ClusterReport:
        """Returns the last report from the cluster about the run. Its field `trouble` is the error
        that prevents a newer report.

        A background thread requests a new report, at most every INTERVAL_S seconds, or at once if
        `now` is true. If `now` is true, or if the last request is more than LATE_S seconds old,
        waits for the new report for at most FIRST_WAIT_S seconds. A mirror of another user is not
        changed.
        """
        if owner := self.other_owner:
            return self.last_report().replace(
                trouble=f"the mirror is {owner}'s, so it is asked for nothing new"
            )
        quiet_s = _age_s(self.run_dir / LOCK_FILE)
        if now or quiet_s > INTERVAL_S:
            asking = threading.Thread(
                target=self._ask_now, args=(now,), name="login-poll", daemon=True
            )
            asking.start()
            if now or quiet_s > LATE_S:
                asking.join(FIRST_WAIT_S)
        return self.last_report()

    def forward(self, request: str) -> None:
        """Sends a request of the user to the cluster: `stop`, `checkpoint`, `cancel` or `requeue`.

        Raises:
            NoConnectionError: The login node cannot be reached. The job continues.
            JobError: The cluster refuses the request.
        """
        self.mirror.send_request(do=request)
        self.update_report(now=True)

    def fetch_logs(self, logs: Iterable[Path], waits: bool) -> None:
        """Creates missing logs as empty files, since `fetch` updates only logs that the mirror
        already has. If `waits` is true, also fetches their content. Does nothing in a mirror of
        another user.
        """
        if not self.is_writable:
            return
        for log in logs:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.touch()
        if waits:
            self.update_report(now=True)

    def run_command(self, words: list[str]) -> int:
        """Runs a `kit` command on the login node and returns its exit status. The command writes to
        the standard output and standard error of this process.

        Raises:
            NoConnectionError: The login node cannot be reached.
            JobError: Another user made the mirror.
        """
        self.check_writable("run this where it mirrors a run")
        return pass_through(self.mirror.login, self.mirror.command("kit", *words))

    def _ask_now(self, now: bool) -> None:
        """Updates the mirror, unless another process is updating it. If the update fails, records
        the error in login_seen.json.
        """
        # There is one such file per login node, so that a list of many runs waits only once for an
        # unreachable node.
        lost = config_folder() / f"unreachable_{Path(self.mirror.login).name}"
        wait_s = FIRST_WAIT_S if now else 0.0
        try:
            with lock_file(self.run_dir / LOCK_FILE) as lock:
                if not try_lock(lock, wait_s):
                    return
                _mark_now(lock.fileno())
                try:
                    if _age_s(lost) < INTERVAL_S and not now:
                        raise JobError(lost.read_text())
                    fetch(self.run_dir, self.mirror)
                finally:
                    _mark_now(lock.fileno())
        except Exception as error:  # Views show the old report and this error.
            if isinstance(error, NoConnectionError):
                write_atomic(lost, str(error))
                _mark_now(lost)
            self.last_report().replace(trouble=str(error)).write(self.run_dir / REPORT_FILE)


def mirror_of(run_dir: Path) -> MirroredRun | None:
    """Returns the run on a cluster whose mirror is `run_dir`, or None if the directory is no
    mirror.
    """
    mirror = Mirror.read_or_none(run_dir / MIRROR_FILE)
    return None if mirror is None else MirroredRun(run_dir, mirror)


def read_cluster_report(run_dir: Path) -> ClusterReport:
    """Returns the last report from the cluster about a mirrored run. The fields of the report have
    their defaults if there is none yet, or if the directory is no mirror.
    """
    return ClusterReport.read_or_none(run_dir / REPORT_FILE) or ClusterReport()


def update_mirror(run_dir: Path) -> None:
    """Requests a new report for a mirror, as `MirroredRun.update_report` describes. Does nothing if
    the directory is no mirror.
    """
    if run := mirror_of(run_dir):
        run.update_report()


def forward(run_dir: Path, request: str) -> bool:
    """Sends a request of the user, such as `stop`, to the cluster, and returns True. Returns False
    if the directory is no mirror, so that the caller acts itself.
    """
    run = mirror_of(run_dir)
    if run is None:
        return False
    run.forward(request)
    return True


def fetch_log(
    run_dir: Path, attempt: int, rank: int, ranks_per_node: int, waits: bool = False
) -> Path:
    """Returns the log file that contains the output of a rank: the log of the rank or the log of
    its node.

    A mirror is updated only with logs that it already has. In a mirror, a missing log is therefore
    created as an empty file. If `waits` is true, its content is fetched before the function
    returns.
    """
    logs = rank_logs(run_dir, attempt, rank, ranks_per_node)
    if not logs[0].exists() and (run := mirror_of(run_dir)):
        run.fetch_logs(logs, waits)
    return find_log(run_dir, attempt, rank, ranks_per_node)


def fetch_script_logs(run_dir: Path, state: RunState) -> list[Path]:
    """Returns the logs of the processes that start the ranks of an attempt (`script_logs`). In a
    mirror, the logs are fetched first.
    """
    logs = script_logs(run_dir, state)
    if run := mirror_of(run_dir):
        run.fetch_logs(logs, waits=True)
    return logs


def fetch(run_dir: Path, mirror: Mirror) -> None:
    """Updates a mirror: the report, small files, and new lines of metrics, logs and alerts.

    Raises:
        NoConnectionError: The login node cannot be reached.
        JobError: The cluster refuses the request, or another user made the mirror.
        OSError: A local file to which lines would be appended is a link, a pipe or a device, or has
            further hard links.
    """
    old = read_cluster_report(run_dir)
    heard = mirror.send_request(do="status", began=old.began, alerts=old.alerts)
    if heard["began"] != old.began:  # The directory on the cluster now contains another run.
        (run_dir / "metrics.jsonl").unlink(missing_ok=True)
        shutil.rmtree(run_dir / "logs", ignore_errors=True)
    copy(mirror.login, mirror.directory, run_dir, *SMALL)
    growing = [
        run_dir / "metrics.jsonl",
        *run_dir.glob("logs/*.log"),
        *run_dir.glob("logs/attempt_*/*.log"),
    ]
    for file in growing:
        open_for_appending(file).close()
    names = "\n".join(str(file.relative_to(run_dir)) for file in growing)
    copy(mirror.login, mirror.directory, run_dir, *GROWING, names=names)
    if heard["alerts"]:  # The local file may contain more alerts, by monitors on this machine.
        append_lines(run_dir / "alerts.jsonl", heard["alerts"].encode())
    ClusterReport(
        time=time.time(), status=heard["status"], began=heard["began"], alerts=heard["alerts_end"]
    ).write(run_dir / REPORT_FILE)


def _mark_now(file: Path | int) -> None:
    """Sets the times of a file to the present time by this machine's clock, since a file server's
    clock may differ.
    """
    now = time.time()
    os.utime(file, (now, now))


def _age_s(file: Path) -> float:
    """Returns the seconds since `_mark_now` was called for a file. Returns infinity if the file is
    missing, or if its time is in the future, which means that another clock has set it.
    """
    try:
        age_s = time.time() - file.stat().st_mtime
    except OSError:
        return float("inf")
    return age_s if age_s >= 0 else float("inf")
