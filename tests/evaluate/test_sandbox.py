"""Untrusted programs in the sandbox: they try to reach files and the network, to exhaust the
machine, or to forge results. Each kind of isolation that this machine has is tested.
"""

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kit.errors import ConfigError
from kit.evaluate.sandbox import Limits, ProgramOutcome, ProgramSandbox, pass_at_k

pytestmark = pytest.mark.slow

LIMITS = Limits(cpu_s=1, wall_s=4.0, memory_bytes=256 * 2**20)


FOR_EACH_FILE = "import os\nfor i in range(32):\n    try: os.{call}\n    except OSError: pass"
BUILTINS = "import builtins; builtins.compile = lambda *a: 'pass'; builtins.exec = print"


def make_sandbox(kind: str) -> ProgramSandbox:
    """Returns the sandbox that the superuser gets ("root"), that other users get ("user"), or that
    a machine without namespaces gets ("limits").
    """
    with pytest.MonkeyPatch.context() as patched:
        if kind == "limits":
            patched.setattr(shutil, "which", lambda name: None)
        return ProgramSandbox(LIMITS, require=False)


@pytest.fixture
def isolated() -> ProgramSandbox:
    sandbox = make_sandbox("user" if os.geteuid() else "root")
    if sandbox.missing:
        pytest.skip(f"this machine gives no namespaces: {sandbox.missing} within reach")
    return sandbox


@pytest.fixture(params=["root", "user", "limits"])
def any_layer(request, monkeypatch) -> ProgramSandbox:
    if request.param == "root" and os.geteuid():
        pytest.skip("this test does not run as root")
    if request.param == "user":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    sandbox = make_sandbox(request.param)
    if sandbox.is_isolated != (request.param != "limits"):
        pytest.skip("this machine gives no namespaces")
    return sandbox


def test_only_right_programs_pass_in_empty_sandbox(any_layer, monkeypatch):
    program = "import math\ndef area(r):\n    return math.pi * r * r\n"
    right, wrong = "assert abs(area(1) - 3.1416) < 1e-3", "assert area(1) == 3"
    assert any_layer.run(program, right) == ProgramOutcome(passed=True, reason="passed")
    failed = ProgramOutcome(passed=False, reason="error: AssertionError")
    assert any_layer.run(program, wrong) == failed
    assert any_layer.run("def area(r:", "area(1)").reason == "error: SyntaxError"
    monkeypatch.setenv("KIT_TEST_SECRET", "1")
    known = {"LC_CTYPE", "PWD", "SHLVL", "_", "OLDPWD"}
    program = f"import os\nassert os.listdir('.') == [] and set(os.environ) <= {known}"
    assert any_layer.run(program).passed
    assert any_layer.run("import sys\nassert sys.argv == [''] and 'site' not in sys.modules").passed


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "import atexit, os; atexit.register(os._exit, 0); raise ValueError",
        FOR_EACH_FILE.format(call="write(i, b'passed')") + "\nos._exit(0)",
        FOR_EACH_FILE.format(call="close(i)"),
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "import ctypes; ctypes.string_at(0)",
        f"{BUILTINS}; raise KeyboardInterrupt",
        BUILTINS,
    ],
)
def test_program_cannot_forge_its_result(any_layer, program):
    assert not any_layer.run(program, "assert False").passed


def test_sandbox_limits_time_memory_and_file_size(any_layer):
    assert not any_layer.run("while True: pass").passed
    timeout = ProgramOutcome(passed=False, reason="timeout")
    assert any_layer.run("import time; time.sleep(3600)") == timeout
    assert any_layer.run("x = bytearray(2**30)").reason == "error: MemoryError"
    assert any_layer.run("open('big', 'wb').write(b'x' * 2**22)").reason == "error: OSError"
    assert any_layer.run("open('small', 'w').write('x')").passed


def test_sandbox_leaves_no_process_or_file(any_layer):
    marker, seen = f"kit-test-{os.getpid()}-{time.time_ns()}", []
    program = f"import os, time\nif os.fork() == 0:\n    x = '{marker}'\n    time.sleep(60)"
    any_layer.run(program)
    any_layer.run(f"import time; x = '{marker}'; time.sleep(60)")
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended
            seen.append(process.read_bytes())
    assert seen and not [words for words in seen if marker.encode() in words]
    assert not list(Path("/tmp").glob("kit-program-*/small"))


def test_files_outside_the_sandbox_are_unreachable(isolated, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    os.chmod(secret, 0o666)
    for path in (secret, "/etc/passwd", __file__, "/proc/self/environ", "/old/etc/passwd"):
        assert not isolated.run(f"import os; os.stat({str(path)!r})").passed, path
    assert not isolated.run("open('/usr/kit-was-here', 'w')").passed
    assert not isolated.run(f"open({os.__file__!r}, 'a')").passed
    outside = "import os; os.chroot('/'); os.chdir('../..'); open('etc/passwd')"
    assert not isolated.run(outside).passed
    assert secret.read_text() == "x"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_mount_below_a_system_folder_is_read_only():
    program = "open('/usr/src/owned', 'w')"
    code = "from kit.evaluate.sandbox import ProgramSandbox as Sandbox;"
    code += f" print(Sandbox().run({program!r}).passed)"
    mount = "mount -t tmpfs -o mode=777 none /usr/src"
    mount += f" && exec {sys.executable} -c {shlex.quote(code)}"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_sandbox_blocks_network_and_other_processes(isolated):
    with socket.create_server(("127.0.0.1", 0)) as server:
        for place in (("127.0.0.1", server.getsockname()[1]), ("192.0.2.1", 80)):
            call = f"import socket; socket.create_connection({place}, 1)"
            assert not isolated.run(call).passed
    thread = "import threading; threading.Thread(target=print).start()"
    assert isolated.run("import os\nwhile True: os.fork()").reason == "error: BlockingIOError"
    assert isolated.run(thread).reason == "error: RuntimeError"
    assert not isolated.run(f"import os; os.kill({os.getpid()}, 0)").passed
    isolated.run("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)")
    isolated.run("import os, signal\nos.kill(-1, signal.SIGKILL)")
    assert isolated.run("x = 1").passed  # the test process and its helpers are still alive


def test_sandboxed_program_cannot_regain_privileges(isolated):
    for call in (
        "mount(b'none', b'/work', b'tmpfs', 0, None)",
        "unshare(0x00020000)",
        "unshare(0x10000000)",
        "chroot(b'/')",
    ):
        program = f"import ctypes\nc = ctypes.CDLL(None)\nassert c.{call} == 0"
        assert not isolated.run(program).passed, call


def test_missing_isolation_is_refused_unless_accepted(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    message = "could reach files, the network, other processes.*untrusted_code='limits'"
    with pytest.raises(ConfigError, match=message):
        ProgramSandbox(LIMITS)
    accepted = ProgramSandbox(LIMITS, require=False)
    assert "it could reach: files, the network, other processes" in accepted.isolation
    kill = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)"
    assert not accepted.run(kill, "assert False").passed


def test_pass_at_k_equals_count_over_all_draws():
    from itertools import combinations

    for n, c, k in ((5, 2, 1), (5, 2, 3), (6, 0, 2), (4, 4, 2), (7, 1, 5)):
        draws = list(combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    for bad in ((5, 6, 1), (5, -1, 1), (5, 1, 6), (5, 1, 0)):
        with pytest.raises(ValueError, match="is not defined"):
            pass_at_k(*bad)
