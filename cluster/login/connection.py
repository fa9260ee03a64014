"""One command on a login node, by the system's own OpenSSH over one connection that is used again
and again.

Nobody is ever asked for a password or a second factor from here (BatchMode): who has to type one
opens the connection with one command, which every error names. KIT_SSH_CONFIG names another
configuration than ~/.ssh/config.

Source: https://man.openbsd.org/ssh_config (ControlMaster, ControlPath, BatchMode) and
https://man.openbsd.org/ssh (exit status 255)
"""

import functools
import os
import re
import shlex
import subprocess
import tempfile

from cluster.state import JobError

CONNECT_S, TIMEOUT_S = 10, 60.0
OWN_PATH = "ControlPath=~/.ssh/kit-%C"
NOT_CONNECTED = 255
FIRST = {
    "Could not resolve hostname": (
        "No machine of that name is known here: give its HostName in ~/.ssh/config. "
    ),
    "Connection refused": (
        "The machine takes no ssh now: wait until it does, or mend its Port in ~/.ssh/config. "
    ),
}
"""What is to be done first, by ssh's own words, since the command that opens a connection would
fail as well."""


class NoConnectionError(JobError):
    """The login node cannot be reached now, or wants to ask its user something; what runs there
    goes on.
    """


def ssh(login: str, command: str, data: bytes = b"", timeout_s: float = TIMEOUT_S) -> bytes:
    """Returns what a shell command on a login node prints, `data` on its standard input.

    Raises:
        NoConnectionError: there is no connection; with the command that opens one.
        JobError: the command fails, with its last words.
    """
    with (
        tempfile.TemporaryFile() as said
    ):  # not a pipe: a connection that stays open would keep it open
        try:
            done = subprocess.run(
                _words(login, command),
                input=data,
                stdout=subprocess.PIPE,
                stderr=said,
                timeout=timeout_s,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise JobError(
                "ssh is not installed here. Install OpenSSH's client (openssh-client)."
            ) from error
        except subprocess.TimeoutExpired as error:
            raise NoConnectionError(
                f"{login} did not answer within {timeout_s:g} s. {_advice(login)}"
            ) from error
        said.seek(0)
        last = (said.read().decode(errors="replace").strip().splitlines() or ["no reason given"])[
            -1
        ]
    if done.returncode == NOT_CONNECTED:
        raise NoConnectionError(
            f"no connection to {login} ({last.strip()}). {_advice(login, last)}"
        )
    if done.returncode:
        raise JobError(f"{login}: exit code {done.returncode}: {last.strip()}")
    return done.stdout


def pass_through(login: str, command: str) -> int:
    """Runs a shell command on a login node, whose output goes where this process's goes, and
    returns its exit status.

    Raises:
        NoConnectionError: there is no connection.
    """
    if (
        code := subprocess.run(_words(login, command), stdin=subprocess.DEVNULL).returncode
    ) == NOT_CONNECTED:
        raise NoConnectionError(f"no connection to {login}, or no longer. {_advice(login)}")
    return code


def _words(login: str, command: str) -> list[str]:
    batch = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}"]
    return ["ssh", *_config(), *batch, *_shared(login, "auto"), "--", login, command]


def told(login: str, command: str) -> str:
    """Returns how `ssh` runs a shell command, less its options: which these are, ssh itself
    would have to be asked.
    """
    return shlex.join(["ssh", *_config(), "--", login, command])


def open_command(login: str) -> str:
    """Returns the command by which a user opens the connection, and types what has to be typed."""
    return shlex.join(["ssh", *_config(), "-fN", *_shared(login, "yes"), "--", login])


def _advice(login: str, said: str = "") -> str:
    first = next((what for words, what in FIRST.items() if words in said), "")
    return f"{first}Open one: `{open_command(login)}`"


def _config() -> list[str]:
    file = os.environ.get("KIT_SSH_CONFIG")
    return ["-F", file] if file else []


def _shared(login: str, master: str) -> list[str]:
    """Returns the options by which one connection serves all commands; none where the user's
    configuration has some.
    """
    if _is_shared(login, os.environ.get("KIT_SSH_CONFIG")):
        return []
    return [
        word
        for option in (
            f"ControlMaster={master}",
            OWN_PATH,
            "ControlPersist=yes",
            "ServerAliveInterval=15",
        )
        for word in ("-o", option)
    ]


@functools.cache
def _is_shared(login: str, config: str | None) -> bool:
    try:
        told = subprocess.run(
            ["ssh", *_config(), "-G", "--", login],
            capture_output=True,
            text=True,
            timeout=CONNECT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    found = dict(re.findall(r"^(control\w+) (.+)$", told.stdout, re.MULTILINE))
    return (
        found.get("controlmaster", "false") not in ("false", "no")
        and found.get("controlpath", "none") != "none"
    )
