"""Runs untrusted programs in an isolated process, and scores the programs that a model writes.

The process has limits on time, memory, files and forks, an empty temporary directory and no
environment variables. In Linux namespaces, the process sees only the files of Python and of the
system's libraries, read-only. It has no network and sees no other process. `ProgramSandbox.missing`
lists what a program can reach nevertheless: test programs try to reach it. On a machine that allows
no namespaces, the caller must accept a process with the limits only.

The isolation does not stop a program that was made to attack this harness. For example, the program
may look for the secret that marks a passed test. The scores of models that were not trained against
the harness are not affected.
"""

import contextlib
import dataclasses
import json
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

from cluster.record import Record, field_doc
from kit.errors import ConfigError

NOBODY = 65534
MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits(Record):
    """Resource limits of one program.

    HumanEval's own harness allows 3 s (github.com/openai/human-eval, execution.py).
    """

    cpu_s: int = field_doc("limit of processor time, in seconds", default=3)
    wall_s: float = field_doc(
        "limit of elapsed time in seconds, including the start of the process", default=10.0
    )
    memory_bytes: int = field_doc("limit of the address space, in bytes", default=512 * MIB)
    file_bytes: int = field_doc("limit of the size of each file, in bytes", default=1 * MIB)

    def resources(self) -> dict[str, int]:
        """Returns a dict from the name of each limit in Python's module `resource` to its value."""
        return {
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NPROC": 0,
            "RLIMIT_NOFILE": 32,
            "RLIMIT_CORE": 0,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramOutcome:
    """Result of running one program with its test: whether it passed, and how it ended."""

    passed: bool
    reason: str  # passed, error: TYPE, timeout, exit CODE, or killed by SIGNAL


SETUP = """
set -e
root=$1; python=$2; shift 2
READ_ONLY='import ctypes, sys
attributes = (ctypes.c_uint64 * 4)(1 | 2, 0, 0, 0)
place = sys.argv[1].encode()
sys.exit(ctypes.CDLL(None).syscall(442, -100, place, 0x8000, attributes, 32) != 0)'
mount -t tmpfs -o size=16m,mode=755,nosuid,nodev tmpfs "$root"
cd "$root"
mkdir old
mkdir -m 1777 work
while [ "$1" != -- ]; do
  if [ -L "$1" ]; then cp -P "$1" ".$1"
  else
    mkdir -p ".$1"
    mount --rbind "$1" ".$1"
    "$python" -I -S -c "$READ_ONLY" ".$1" || {
      mount -o remount,bind,ro,nosuid ".$1"
      if grep -q " $root$1/" /proc/self/mountinfo; then exit 1; fi
    }
  fi
  shift
done
shift
pivot_root . old
"$python" -I -S -c 'import ctypes, os; os.rmdir("/old") if ctypes.CDLL(None).umount2(b"/old", 2) == 0 else exit(1)'
cd /work
exec "$@"
"""  # noqa: E501
"""Shell script that runs in new namespaces. It makes a new root file tree from read-only copies
(bind mounts) of the given folders, and executes a command there. Arguments: the new root, Python,
the folders, `--`, the command.

Mounts below a given folder become read-only, too. The script calls mount_setattr (system call 442,
from Linux 5.12) with MOUNT_ATTR_RDONLY and MOUNT_ATTR_NOSUID for the whole tree (AT_RECURSIVE). On
an older kernel, the script fails for a folder with mounts below it. The old root is removed by the
system call umount2 with MNT_DETACH: the command `umount` reads /proc, which the new tree lacks."""

DROP = [
    "setpriv",
    "--bounding-set=-all",
    "--inh-caps=-all",
    "--ambient-caps=-all",
    "--no-new-privs",
]
NAMESPACES = ["unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
TOOLS = ("unshare", "setpriv", "mount", "pivot_root")
"""Programs of the package util-linux that create the namespaces. Without them, programs are not
isolated."""


class ProgramSandbox:
    """Runs programs in new Linux namespaces.

    Attributes:
        limits: resource limits of one program.
        is_isolated: whether programs run in namespaces. If False, this machine allows no
            namespaces, and programs run in processes with `limits` only.
        missing: resources that a program can reach although it should not, such as "files". Empty
            if there are none.

    Args:
        limits: resource limits of one program, by default `Limits()`.
        require: whether to refuse a machine on which a program can reach files, the network, other
            processes or forks.

    Raises:
        ConfigError: A program can reach one of these resources although `require` is set, or no
            program runs on this machine.
    """

    def __init__(self, limits: Limits | None = None, *, require: bool = True) -> None:
        self.limits = limits or Limits()
        self._child = files("kit.evaluate").joinpath("sandbox_child.py").read_text()
        self.is_isolated = all(map(shutil.which, TOOLS))
        works = self.run("x = 1", "assert x == 1").passed
        if self.is_isolated and not works:
            self.is_isolated = False
            works = self.run("x = 1", "assert x == 1").passed
        self.missing = self._reachable()
        if not works or require and self.missing:
            raise ConfigError(
                f"untrusted code: it could reach {', '.join(self.missing) or 'everything'} on this"
                " machine, since Linux namespaces cannot be made here (`unshare --user --net"
                " --mount --pid true` fails, or util-linux is missing). Score in a container or on"
                " a machine where they can, or accept the danger with untrusted_code='limits'"
                " (`--untrusted-code limits`)."
            )

    @property
    def isolation(self) -> str:
        """Line for a report. It says how programs were isolated, and which resources they could
        have reached.
        """
        held = "its own namespaces" if self.is_isolated else "a process with limits only"
        reached = ", ".join(self.missing) or "nothing"
        return f"each program ran in {held}; outside, it could reach: {reached}"

    def run(self, program: str, test: str = "") -> ProgramOutcome:
        """Runs `program`, then `test` with the same global variables, and returns the outcome.

        A program passes only if `test` runs to its end.
        """
        secret = secrets.token_hex(16).encode()
        request = {"limits": self.limits.resources(), "program": program, "test": test}
        with (
            tempfile.TemporaryFile() as stdin,
            tempfile.TemporaryDirectory(prefix="kit-program-") as folder,
        ):
            stdin.write(json.dumps(request).encode())
            stdin.seek(0)
            result, result_end = _pipe()
            secret_end, secret_in = _pipe()
            with result, secret_end:
                with result_end, secret_in:
                    secret_in.write(secret)
                    descriptors = (result_end.fileno(), secret_end.fileno())
                    ended = self._wait(stdin, folder, descriptors)
                os.set_blocking(result.fileno(), False)
                # None means that the pipe is empty but open: a process was not killed and holds its
                # other end.
                found = result.read(4096) or b""
        if found == secret and ended == "exit 0":
            return ProgramOutcome(passed=True, reason="passed")
        if found.startswith(b"error: "):
            return ProgramOutcome(passed=False, reason=found.decode(errors="replace"))
        return ProgramOutcome(passed=False, reason=ended)

    def _wait(self, stdin: IO[bytes], folder: str, descriptors: tuple[int, int]) -> str:
        """Runs the process of a program. Returns how it ended: `exit CODE`, `killed by SIGNAL` or
        `timeout`.
        """
        environment = {}
        if self.is_isolated:
            # The shell of SETUP needs PATH. The program itself starts without environment variables
            # (`env -i`).
            environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        process = subprocess.Popen(
            self._command(folder, descriptors),
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=descriptors,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(self.limits.wall_s)
            return f"exit {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
            process.wait()

    def _command(self, folder: str, descriptors: tuple[int, int]) -> list[str]:
        python = [_interpreter(), "-I", "-S", "-B", "-c", self._child, *map(str, descriptors)]
        if not self.is_isolated:
            # The parent of the program is a shell. A program that kills its parent kills only that
            # shell, not this process.
            return ["/bin/sh", "-c", '"$@"; exit $?', "sh", *python]
        shown = [
            path for path in ("/usr", "/bin", "/lib", "/lib32", "/lib64") if os.path.lexists(path)
        ]
        prefix = Path(sys.base_prefix).resolve()
        if not prefix.is_relative_to("/usr"):
            shown.append(str(prefix))
        # Users other than root need a user namespace to create the other namespaces. Root needs no
        # user namespace, and runs the program as the user nobody.
        user_namespace = ["--user", "--map-root-user"]
        become = []
        if os.geteuid() == 0:
            user_namespace = []
            become = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        setup = ["sh", "-c", SETUP, "sh", folder, python[0], *shown, "--"]
        return [*NAMESPACES, *user_namespace, *setup, *DROP, *become, "env", "-i", *python]

    def _reachable(self) -> list[str]:
        """Returns the names of the resources that a program can reach. A small program tries each
        resource.
        """
        with socket.create_server(("127.0.0.1", 0)) as server:
            attempts = {
                "files": "open('/etc/passwd').read()",
                "the network": (
                    "import socket; socket.create_connection(('127.0.0.1',"
                    f" {server.getsockname()[1]}), 2)"
                ),
                "other processes": f"import os; os.kill({os.getpid()}, 0)",
                "forks": "import os; os.fork() or os._exit(0)",
            }
            return [name for name, program in attempts.items() if self.run(program).passed]


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    """Returns (read end, write end) of a pipe, both unbuffered."""
    read, write = os.pipe()
    return open(read, "rb", buffering=0), open(write, "wb", buffering=0)


def _interpreter() -> str:
    """Returns the path of the Python interpreter outside of any virtual environment."""
    folder = Path(sys.base_prefix).resolve() / "bin"
    for name in (f"python3.{sys.version_info.minor}", "python3"):
        if (folder / name).exists():
            return str(folder / name)
    return str(Path(sys.executable).resolve())


# Scores -------------------------------------------------------------------------------------------

REPORTED_K = (1, 10, 100)


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Returns the probability that at least one of k programs passes. The k programs are drawn
    without replacement from `num_samples` programs, of which `num_passed` pass.

    With n = `num_samples` and c = `num_passed`, it is 1 - C(n - c, k) / C(n, k): the unbiased
    estimator of Chen et al., "Evaluating Large Language Models Trained on Code", arXiv 2107.03374,
    equation 1.

    Raises:
        ValueError: k is not in 1..n, or c is not in 0..n.
    """
    if not (1 <= k <= num_samples and 0 <= num_passed <= num_samples):
        raise ValueError(f"pass@{k} of {num_passed} in {num_samples} programs is not defined.")
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


class CodeScorer:
    """Runs each program with its test and computes pass@1, pass@10 and pass@100. Replaces the hub's
    `code_eval` in HumanEval's task. pass@k is left out if a problem has fewer than k programs.
    """

    def __init__(self, sandbox: ProgramSandbox | None) -> None:
        """Stores the sandbox in which the programs run.

        If several processes make the same calls, only one of them has a sandbox. The other
        processes pass None, run no programs and report zeros.
        """
        self._sandbox = sandbox
        self.isolation = sandbox.isolation if sandbox else ""

    def compute(
        self, *, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Any = None
    ) -> tuple[dict[str, float], list[list[ProgramOutcome]]]:
        """Returns (pass@k averaged over the problems, by name; outcome of each program, by
        problem).

        `references` has the test of each problem, `predictions` the programs of each problem. `k`,
        which lm-eval asks for, is ignored: the reported values of k follow from the number of
        programs.
        """
        outcomes = [
            self._run_all(programs, test)
            for programs, test in zip(predictions, references, strict=True)
        ]
        count = min(map(len, outcomes))
        scores = {}
        for reported_k in REPORTED_K:
            if reported_k > count:
                continue
            chances = []
            for found in outcomes:
                num_passed = sum(outcome.passed for outcome in found)
                chances.append(pass_at_k(len(found), num_passed, reported_k))
            scores[f"pass@{reported_k}"] = sum(chances) / len(chances)
        return scores, outcomes

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Makes this object the scorer of lm-eval's HumanEval task within the context."""
        # The task's module keeps its scorer in a variable, and lm-eval has no option for
        # another scorer.
        with patch.object(sys.modules["lm_eval.tasks.humaneval.utils"], "compute_", self):
            yield

    def _run_all(self, programs: Sequence[str], test: str) -> list[ProgramOutcome]:
        sandbox = self._sandbox
        if sandbox is None:
            return [ProgramOutcome(passed=False, reason="not run here")] * len(programs)
        # Equal programs run only once, since a small model often writes the same program several
        # times.
        distinct = list(dict.fromkeys(programs))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            outcomes = pool.map(lambda program: sandbox.run(program, test), distinct)
        found = dict(zip(distinct, outcomes, strict=True))
        return [found[program] for program in programs]
