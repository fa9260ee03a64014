"""The mirror of a run directory that lies on a cluster: itself a run directory, which every view
can read, offline too.

    login.json         whose mirror it is: the login node, the directory there, the Python and the
                       source that answer
    login_seen.json    what was last heard: the job's status, when, and which version of each small
                       file came

One round trip fills it: what grows (steps, history, logs that were asked for) comes from where it
ended here, small files when they have changed. Data and checkpoints stay there. The job notices
nothing.
"""

import contextlib
import dataclasses
import fcntl
import hmac
import json
import math
import os
import shlex
import threading
import time
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Self

from cluster.files import appending, opened, other_owner, read_small, write_atomic
from cluster.login.connection import NoConnectionError, ssh
from cluster.record import Record, config_folder, field_doc
from cluster.state import JobError, read_record

MIRROR, SEEN = "login.json", "login_seen.json"
INTERVAL_S, LATE_S, FIRST_WAIT_S = 5.0, 12.0, 20.0
MARK = b"\nKIT-ANSWER\n"
"""Before the answer: what a login shell prints by itself comes first."""
TAIL_BYTES = 256
SYNCED = "/kit-source-"
"""In the path of source that was sent there, which must be its user's own; one that a site file
names need not be."""
IS_OWN = """\
{ [ "$(find . -prune -user "$(id -u)" ! -perm -020 ! -perm -002)" = . ] || { echo "$PWD is no folder that you alone \
can write to, and what it holds would be run. Remove it, or give another there.folder." >&2; exit 1; }; }"""  # noqa: E501
"""Ends a shell unless the folder that it is in, whatever bears its name by now, is its user's
own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mirror(Record):
    """login.json: where the run is that this directory mirrors."""

    login: str = field_doc("name of the login node in ~/.ssh/config")
    python: str = field_doc("Python there")
    source: str = field_doc("folder of the kit there")
    directory: str = field_doc("run directory there")
    seal: str = field_doc(
        "shows that this user made it: run directories are passed on, and it says what is run there"
    )

    @classmethod
    def sealed(cls, *, login: str, python: str, source: str, directory: str) -> Self:
        """Returns a mirror of this user's own."""
        return cls(
            login=login,
            python=python,
            source=source,
            directory=directory,
            seal=_seal(login, python, source, directory),
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """Returns the answer of the other side to a request.

        Raises:
            NoConnectionError: it cannot be reached.
            JobError: it refuses, with its words, or the mirror is somebody else's.
        """
        answer = ssh(
            self.login,
            self.command("cluster.login.answer"),
            zlib.compress(json.dumps({"run": self.directory, **request}).encode()),
        )
        try:
            found = json.loads(zlib.decompress(answer.partition(MARK)[2]))
        except (zlib.error, ValueError) as error:  # the connection broke in the middle of it
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
        if not hmac.compare_digest(
            self.seal, _seal(self.login, self.python, self.source, self.directory)
        ):
            told = f"`kit attach RUN --site FILE.toml --there {shlex.quote(self.directory)}`"
            raise JobError(
                f"somebody else made this mirror of {self.directory} on {self.login}. Make your"
                f" own: {told}."
            )
        return command(self.source, self.python, module, *words)


def command(source: str, python: str, module: str, *words: str) -> str:
    """Returns the shell command that runs a module of the kit in a folder of its source."""
    own = f" && {IS_OWN}" if SYNCED in source else ""
    inner = f"cd {shlex.quote(source)}{own} && exec {shlex.join([python, '-m', module, *words])}"
    # A login shell, since the scheduler and its modules may be known only there.
    return f"exec bash -lc {shlex.quote(inner)}"


def _seal(*words: str) -> str:
    """Returns a keyed hash; the key, made at first use, is this user's on this machine."""
    file = config_folder() / "login.key"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with (
            contextlib.suppress(FileExistsError),
            open(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as new,
        ):
            new.write(os.urandom(32))
    return hmac.digest(file.read_bytes(), "\0".join(words).encode(), "sha256").hex()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen(Record):
    """login_seen.json: what was last heard from there."""

    time: float = field_doc("unix time here")
    status: dict[str, Any] = field_doc("JobStatus as the other side knew it")
    versions: dict[str, int] = field_doc("checksums of small files that came", default_factory=dict)

    @property
    def age_s(self) -> float:
        """Seconds since then."""
        return max(0.0, time.time() - self.time)

    @property
    def age(self) -> str:
        """The same for people."""
        seconds = self.age_s
        for unit, size, least in (("d", 86400, 2), ("h", 3600, 2), ("min", 60, 2)):
            if seconds >= least * size:
                return f"{seconds / size:.0f} {unit}"
        return f"{seconds:.0f} s"


def mirror_of(run_dir: Path) -> Mirror | None:
    """Returns whose mirror a run directory is, or None for one whose run is here."""
    return read_record(Mirror, run_dir / MIRROR)


def unheard(run_dir: Path) -> str | None:
    """Returns how old what is known of a run elsewhere is, if polls fail to tell; None
    otherwise, and of one here.
    """
    seen = read_record(Seen, run_dir / SEEN)
    return seen.age if seen and seen.age_s > LATE_S else None


def forward(run_dir: Path, request: str) -> bool:
    """Asks the other side to `stop`, `checkpoint`, `cancel` or `requeue`; returns False where the
    run is here.

    Raises:
        NoConnectionError: it cannot be asked; the job goes on.
        JobError: it refuses.
    """
    if (mirror := mirror_of(run_dir)) is None:
        return False
    mirror.ask(do="request", request=request)
    refresh(run_dir, now=True)
    return True


def look(run_dir: Path) -> tuple[Seen | None, str]:
    """Returns what was last heard of a run, and what is in the way of hearing more, if anything.

    Asks at most every INTERVAL_S, in the background; waits only for a first answer of this process.
    """
    if owner := other_owner(run_dir):
        return (
            read_record(Seen, run_dir / SEEN),
            f"the mirror is {owner}'s, so it is asked for nothing new",
        )
    with _LOCK:
        known = _ASKING.get(run_dir)
        if known is None or (not known.is_alive() and time.monotonic() - known.begun > INTERVAL_S):
            known = _ASKING[run_dir] = _Asking(
                run_dir, first=known is None, trouble=known.trouble if known else ""
            )
            known.start()
    if known.first:
        known.join(FIRST_WAIT_S)
    return read_record(Seen, run_dir / SEEN), known.trouble


def wanted(run_dir: Path, log: Path) -> Path:
    """Returns a log that somebody reads; a mirror fetches the logs that it has, so there it is
    made.
    """
    if not log.exists() and mirror_of(run_dir) and not other_owner(run_dir):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
    return log


def refresh(run_dir: Path, now: bool = False) -> None:
    """Brings a mirror up to date and returns when it is; what is in the way is told by `look`,
    not raised.
    """
    if now:
        with _LOCK:
            _ASKING.pop(run_dir, None)
    look(run_dir)


class _Asking(threading.Thread):
    """One round trip to the other side, or several while much is new."""

    def __init__(self, run_dir: Path, first: bool, trouble: str) -> None:
        super().__init__(name="login-poll", daemon=True)
        self.run_dir, self.first, self.trouble, self.begun = (
            run_dir,
            first,
            trouble,
            time.monotonic(),
        )

    def run(self) -> None:
        login = mirror.login if (mirror := mirror_of(self.run_dir)) else ""
        failed, told = _UNREACHABLE.get(login, (-math.inf, ""))
        if (
            time.monotonic() - failed < INTERVAL_S
        ):  # so that a list of many runs waits for one of them
            self.trouble = told
            return
        try:
            while fetch(self.run_dir, patient=self.first):
                pass
            self.trouble = ""
        except NoConnectionError as error:
            self.trouble = str(error)
            _UNREACHABLE[login] = time.monotonic(), self.trouble
        except Exception as error:  # whatever went wrong, what is here already tells the rest
            self.trouble = str(error)


_ASKING: dict[Path, _Asking] = {}
_UNREACHABLE: dict[str, tuple[float, str]] = {}
"""When a login node could last not be reached, and why."""
_LOCK = threading.Lock()


def fetch(run_dir: Path, patient: bool = False) -> bool:
    """Makes one round trip and returns whether more is to come at once; one writer at a time, and
    `patient` waits.

    Raises:
        NoConnectionError, JobError: as `Mirror.ask`.
    """
    mirror = mirror_of(run_dir)
    assert mirror is not None
    with appending(run_dir / ".login.lock") as lock:
        if not _is_locked(
            lock, FIRST_WAIT_S if patient else 0.0
        ):  # another process of this machine is at it
            return False
        seen = read_record(Seen, run_dir / SEEN)
        versions = dict(seen.versions) if seen else {}
        logs = [str(file.relative_to(run_dir)) for file in run_dir.glob("logs/attempt_*/*.log")]
        ends = {name: _end(run_dir / name) for name in ("metrics.jsonl", "history.jsonl", *logs)}
        answer = mirror.ask(do="read", ends=ends, versions=versions)
        for name, (start, text) in answer["grown"].items():
            if name in ends:
                _put(run_dir / name, start, text.encode("latin-1"))
        for name, (version, text) in answer["changed"].items():
            if _is_inside(name):
                _replace(run_dir / name, text)
                versions[name] = version
        for name in answer["gone"]:
            if _is_inside(name):
                (run_dir / name).unlink(missing_ok=True)
            versions.pop(name, None)
        Seen(time=time.time(), status=answer["status"], versions=versions).write(run_dir / SEEN)
    return answer["more"]


def _is_locked(lock: BinaryIO, wait_s: float) -> bool:
    """Returns whether this caller has the lock now, waiting for it so long at most."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        except OSError:  # this file system has no locks
            return True


def _end(file: Path) -> tuple[int, int]:
    """Returns where a file ends here, and a checksum of its last bytes, by which the other side
    knows it again.
    """
    try:
        with opened(file) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL_BYTES))
            return size, zlib.crc32(stream.read(TAIL_BYTES))
    except FileNotFoundError:
        return 0, 0


def _put(file: Path, start: int, new: bytes) -> None:
    """Appends what is new; from the start if the file there is another one now."""
    if start == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, new)
    else:
        with appending(file) as stream:
            stream.truncate(start)
            stream.write(new)


def _replace(file: Path, text: str) -> None:
    if file.name == "alerts.jsonl":  # watchers of both sides write it: each line is kept
        with contextlib.suppress(OSError):
            known = set(read_small(file).decode(errors="replace").splitlines())
            text = "".join(
                f"{line}\n"
                for line in [*known, *(each for each in text.splitlines() if each not in known)]
            )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, text)


def _is_inside(name: str) -> bool:
    return (
        not Path(name).is_absolute()
        and ".." not in Path(name).parts
        and name not in (MIRROR, SEEN, "site.json")
    )
