"""Heartbeats between the nodes of a job and its supervisor, as UDP datagrams.

The first rank of each node says every BEAT_EVERY_S that it is there, the others half as often, and the supervisor
answers each. So the supervisor knows of a node that has fallen silent long before Slurm or the collectives do, and the
ranks of a node that is cut off know it too, and end. A node that was never heard is not missed: where datagrams do not
pass, the rest works without them. KIT_BEAT_EVERY_S in a job's environment sets the rhythm, and with it the limits.
"""

import contextlib
import json
import os
import secrets
import socket
import time

BEAT_EVERY_S = float(os.environ.get("KIT_BEAT_EVERY_S", "5"))
SILENT_AFTER_S = 6 * BEAT_EVERY_S
ALONE_AFTER_S = 9 * BEAT_EVERY_S  # longer: the supervisor should be the first to notice
VARIABLE = "KIT_SUPERVISOR"


class Switchboard:
    """The supervisor's end: who was heard when, and what they reported."""

    def __init__(self, host: str) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("", 0))
        self.socket.setblocking(False)
        self.token = secrets.token_hex(8)  # keeps out datagrams of other jobs and attempts
        self.address = f"{host}:{self.socket.getsockname()[1]}:{self.token}"
        self.heard: dict[str, float] = {}
        self.senders: set[tuple] = set()
        self.ending = False

    def receive(self) -> list[dict]:
        """Returns what was reported since the last call, and answers it; beats are only noted."""
        reports = []
        with contextlib.suppress(BlockingIOError):
            while True:
                data, sender = self.socket.recvfrom(4096)
                try:
                    message = json.loads(data)
                    if message["token"] != self.token:
                        continue
                    self.heard[str(message["node"])] = time.monotonic()
                    self.senders.add(sender)
                except (ValueError, KeyError, TypeError, RecursionError):  # of anyone who found the port
                    continue
                if message.get("event"):
                    reports.append(message)
                    self.ending = self.ending or bool(message.get("code"))
                with contextlib.suppress(OSError):
                    self.socket.sendto(b"end" if self.ending else b"ok", sender)
        return reports

    def end(self) -> None:
        """Orders the ranks of all nodes to end."""
        self.ending = True
        for sender in self.senders:
            with contextlib.suppress(OSError):
                self.socket.sendto(b"end", sender)

    def silent(self) -> list[str]:
        """Returns the nodes that were heard once and then not for SILENT_AFTER_S."""
        now = time.monotonic()
        return sorted(node for node, heard in self.heard.items() if now - heard > SILENT_AFTER_S)

    def close(self) -> None:
        self.socket.close()


class Line:
    """A rank's end."""

    def __init__(self) -> None:
        host, port, self.token = os.environ[VARIABLE].rsplit(":", 2)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        with contextlib.suppress(OSError):  # a name that does not resolve: no beats, no harm
            self.socket.connect((host, int(port)))
        self.node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self.answered: float | None = None
        self.order = "ok"

    def send(self, **report: object) -> None:
        """Sends a beat, or a report when there is one."""
        with contextlib.suppress(OSError):
            self.socket.send(json.dumps({"token": self.token, "node": self.node, **report}).encode())

    def receive(self) -> None:
        """Notes the supervisor's answers."""
        with contextlib.suppress(OSError):
            while True:
                answer = self.socket.recv(64).decode(errors="replace")
                self.answered = time.monotonic()
                if answer == "end":
                    self.order = answer

    def answered_before(self, moment: float) -> bool:
        """Whether the last answer is older than a moment of `time.monotonic`."""
        return self.answered is None or self.answered < moment

    @property
    def alone_s(self) -> float:
        """Seconds since the supervisor's last answer; 0 before the first."""
        return 0.0 if self.answered is None else time.monotonic() - self.answered
