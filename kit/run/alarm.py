"""The alarm: how an alert reaches a person who looks at no screen, by a command or a webhook of the user's own.

One line in `~/.config/kit/config.toml` (or below XDG_CONFIG_HOME); the variable KIT_ALARM wins, empty it means none:

    alarm = "https://hooks.example.com/T000/B000"      # JSON by POST; `text` is what Slack and Mattermost show
    alarm = 'mail -s "$KIT_MESSAGE" me@example.com'    # a line of sh: the text in KIT_MESSAGE, JSON on standard input

`kit.monitor.watcher` decides what is sent. A webhook's address is a secret: it is never written anywhere.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cluster.files import appending
from cluster.record import ConfigError, Record, config_folder, cut, field_doc

DEADLINE_S = 10.0
"""For the whole of a message, from the name look-up to the answer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Record):
    """config.toml: what a user wants of every run."""

    alarm: str | None = field_doc("an http(s) address, or a line of sh", default=None)


def config_file() -> Path:
    """Returns where the user's configuration is, or would be."""
    return config_folder() / "config.toml"


def find_alarm() -> str | None:
    """Returns the user's alarm, None if there is none.

    Raises:
        ConfigError: the configuration cannot be read, or the alarm is neither an http(s) address nor a command.
    """
    if (named := os.environ.get("KIT_ALARM")) is not None:
        where, alarm = "KIT_ALARM", named
    else:
        where, alarm = str(config_file()), _settings(config_file()).alarm
    alarm = (alarm or "").strip()
    if not alarm:
        return None
    if "\0" in alarm or not alarm.isprintable():
        raise ConfigError(f"{where}: alarm holds a control character. Give one line: an address, or a command.")
    scheme, separator, _ = alarm.split()[0].partition("://")
    if not separator or not scheme.isalnum():
        return alarm
    try:
        address = urlsplit(alarm)
        is_whole = scheme.lower() in ("http", "https") and address.hostname and address.port != 0 and " " not in alarm
    except ValueError:
        is_whole = False
    if not is_whole or not alarm.isascii():
        told = "is no http:// or https:// address with a host. Give one, or a command of sh."
        raise ConfigError(f"{where}: the alarm, a {scheme}:// address, {told}")
    return alarm


def start_watcher(run_dir: Path) -> None:
    """Starts `kit.monitor.watcher` beside a run; where that is not possible, it goes on without an alarm."""
    folder = run_dir / "monitor"
    command = [sys.executable, "-m", "kit.monitor.watcher", str(run_dir)]
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        with appending(folder / "watcher.log") as log:
            # Through a shell that ends at once: a notebook's kernel, which lives for days, is nobody's parent.
            subprocess.run(
                ["/bin/sh", "-c", '"$@" &', "sh", *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, check=False,
            )  # fmt: skip


def describe_alarm(alarm: str) -> str:
    """Returns an alarm as it may be shown: of an address only the host, of a command only its first word."""
    return f"webhook at {urlsplit(alarm).hostname}" if _is_address(alarm) else f"command {alarm.split()[0]!r}"


def send(alarm: str, message: dict[str, Any]) -> str | None:
    """Sends a message, `text` and what else is known; returns what went wrong, None if it arrived. Never raises."""
    body, failure = json.dumps(message).encode(), [f"no answer within {DEADLINE_S:g} s"]
    deliver: Callable[[str, bytes, str], str | None] = _post if _is_address(alarm) else _run

    def work() -> None:
        try:
            failure[0] = deliver(alarm, body, message["text"]) or ""
        except Exception as error:  # whatever it is, a run goes on
            failure[0] = type(error).__name__ + ("" if _is_address(alarm) else f": {error}")

    # Of its own, since neither a name look-up nor a server that sends a byte a second obeys a time limit.
    thread = threading.Thread(target=work, name="kit-alarm", daemon=True)
    thread.start()
    thread.join(DEADLINE_S + 1)
    return failure[0] or None


def _settings(file: Path) -> Settings:
    try:
        return Settings.from_dict(tomllib.loads(file.read_text(encoding="utf-8")), path=str(file))
    except (FileNotFoundError, NotADirectoryError):
        return Settings()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as TOML ({error}). Write: alarm = 'COMMAND or ADDRESS'.") from error


def _is_address(alarm: str) -> bool:
    return alarm.lower().startswith(("http://", "https://"))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would arrive as a GET without its message."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _post(address: str, body: bytes, text: str) -> str | None:
    headers = {"Content-Type": "application/json", "User-Agent": "kit"}
    request = urllib.request.Request(address, data=body, headers=headers, method="POST")
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=DEADLINE_S):
            return None
    except urllib.error.HTTPError as error:
        with error:
            return f"the server answered {error.code}"
    except TimeoutError:
        return f"no answer within {DEADLINE_S:g} s"
    except urllib.error.URLError as error:
        return cut(str(error.reason), 120)


def _run(command: str, body: bytes, text: str) -> str | None:
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
        given.write(body)
        given.seek(0)
        process = subprocess.Popen(
            ["/bin/sh", "-c", command], stdin=given, stdout=said, stderr=said, start_new_session=True,
            env={**os.environ, "KIT_MESSAGE": text.replace("\0", "")},
        )  # fmt: skip
        try:
            code = process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"the command had not ended after {DEADLINE_S:g} s"
        said.seek(0)
        words = " ".join(said.read(1000).decode(errors="replace").split())
        return f"the command ended with {code}" + (f": {cut(words, 120)}" if words else "") if code else None
