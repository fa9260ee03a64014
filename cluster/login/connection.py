"""Runs commands on a login node, and copies files from it, with the system's own OpenSSH and rsync.
All commands share one connection.

This module never asks for a password or a second factor (BatchMode). If the login node needs a
password, the user opens the connection once with the command that every error message contains. The
environment variable KIT_SSH_CONFIG names an ssh configuration to use instead of ~/.ssh/config.

Source: https://man.openbsd.org/ssh_config (ControlMaster, ControlPath, BatchMode),
https://man.openbsd.org/ssh (exit status 255) and https://download.samba.org/pub/rsync/rsync.1
(options, exit values)
"""

import functools
import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

from cluster.state import JobError

CONNECT_S = 10
TIMEOUT_S = 60.0
OWN_PATH = "ControlPath=~/.ssh/kit-%C"
NOT_CONNECTED = 255
# Exit codes of rsync. CUT: the connection broke or timed out. SOME_FILES: some files are missing or
# unreadable, which is no error here.
CUT = (10, 12, 30)
SOME_FILES = (23, 24)
FIRST = {
    "Could not resolve hostname": (
        "No machine of that name is known here: give its HostName in ~/.ssh/config. "
    ),
    "Connection refused": (
        "The machine takes no ssh now: wait until it does, or correct its Port in ~/.ssh/config. "
    ),
}
"""Advice that an error message gives first, by words in the error message of ssh. After these
errors, the command that opens a connection would fail as well."""


class NoConnectionError(JobError):
    """The login node cannot be reached now, or asks for a password or a second factor. Jobs on the
    cluster continue.
    """


def ssh(login: str, command: str, data: bytes = b"", timeout_s: float = TIMEOUT_S) -> bytes:
    """Returns the standard output of a shell command on a login node. `data` is the command's
    standard input.

    Raises:
        NoConnectionError: There is no connection. The message contains the command that opens one.
        JobError: The command fails. The message contains the last line of its standard error.
    """
    return _answer(login, [*_words(login), "--", login, command], data, timeout_s)


def copy(login: str, folder: str, here: Path, *options: str, names: str = "") -> None:
    """Copies files of a folder on a login node into the local folder `here`.

    rsync's `options` select the files. `names` is the standard input of rsync, one file name per
    line, for rsync's option `--files-from=-`.

    Raises:
        NoConnectionError: There is no connection. The message contains the command that opens one.
        JobError: The command rsync fails. The message has the first line of its standard error.
    """
    words = ["rsync", "-rtz", "--no-links", "--secluded-args", *options]
    shell = f"--rsh={shlex.join(_words(login))}"
    _answer(login, [*words, shell, "--", f"{login}:{folder}/", f"{here}/"], names.encode())


def pass_through(login: str, command: str) -> int:
    """Runs a shell command on a login node and returns its exit status. The command writes to the
    standard output and standard error of this process.

    Raises:
        NoConnectionError: There is no connection, or the connection was lost.
    """
    code = subprocess.run(
        [*_words(login), "--", login, command], stdin=subprocess.DEVNULL
    ).returncode
    if code == NOT_CONNECTED:
        raise NoConnectionError(f"no connection to {login}, or no longer. {_advice(login)}")
    return code


def ssh_line(login: str, command: str) -> str:
    """Returns the command line with which `ssh` runs a shell command, for display. Options of the
    connection are left out, because this function would have to run ssh to find them.
    """
    return shlex.join(["ssh", *_config(), "--", login, command])


def open_command(login: str) -> str:
    """Returns the command with which a user opens the connection. This command asks the user for a
    password and a second factor if the login node needs them.
    """
    return shlex.join(["ssh", *_config(), "-fN", *_shared(login, "yes"), "--", login])


def _answer(login: str, words: list[str], data: bytes, timeout_s: float = TIMEOUT_S) -> bytes:
    # Standard error goes to a file, since a shared connection that stays open would keep a pipe
    # open and `run` would not return.
    with tempfile.TemporaryFile() as said:
        try:
            done = subprocess.run(
                words,
                input=data,
                stdout=subprocess.PIPE,
                stderr=said,
                timeout=timeout_s,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise JobError(
                f"{words[0]} is not installed here. Install it (openssh-client, rsync)."
            ) from error
        except subprocess.TimeoutExpired as error:
            raise NoConnectionError(
                f"{login} did not answer within {timeout_s:g} s. {_advice(login)}"
            ) from error
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines() or ["no reason given"]
    code = done.returncode
    is_copy = words[0] == "rsync"
    last = lines[0].strip() if is_copy else lines[-1].strip()
    if code == NOT_CONNECTED or (is_copy and code in CUT):
        raise NoConnectionError(f"no connection to {login} ({last}). {_advice(login, last)}")
    if code and not (is_copy and code in SOME_FILES):
        needs = " rsync must be installed there, and its shell print nothing." if is_copy else ""
        raise JobError(f"{login}: exit code {code}: {last}{needs}")
    return done.stdout


def _words(login: str) -> list[str]:
    batch = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}"]
    return ["ssh", *_config(), *batch, *_shared(login, "auto")]


def _advice(login: str, said: str = "") -> str:
    first = next((what for words, what in FIRST.items() if words in said), "")
    return f"{first}Open a connection: `{open_command(login)}`"


def _config() -> list[str]:
    file = os.environ.get("KIT_SSH_CONFIG")
    return ["-F", file] if file else []


def _shared(login: str, master: str) -> list[str]:
    """Returns the ssh options with which all commands share one connection. Returns no options if
    the user's configuration already shares connections.
    """
    if _is_shared(login, *_config()):
        return []
    options = (f"ControlMaster={master}", OWN_PATH, "ControlPersist=yes", "ServerAliveInterval=15")
    return [word for option in options for word in ("-o", option)]


@functools.cache
def _is_shared(login: str, *config: str) -> bool:
    words = ["ssh", *config, "-G", "--", login]
    try:
        told = subprocess.run(words, capture_output=True, text=True, timeout=CONNECT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    return all(
        re.search(rf"^control{each} (?!no$|none$|false$)", told, re.MULTILINE)
        for each in ("master", "path")
    )
