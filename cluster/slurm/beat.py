"""Signs of life between the nodes of a job and its supervisor, as datagrams; nothing here touches a
file.

One keeper a node, its leader, says every BEAT_EVERY_S that the node is there, and what its ranks
did last, which they tell it through an abstract Unix socket; the supervisor answers. So the
supervisor knows of a node that has fallen silent long before Slurm or the collectives do, and a
node that is cut off knows it too, and ends. A node that was never heard is not missed: where
datagrams do not pass, the rest works without them. KIT_BEAT_EVERY_S in a job's environment sets the
rhythm, and with it the limits: at 5 s, a dead node is noticed after 30 s, and a supervisor may be
held up for three minutes, as by a file system that fails over. KIT_BEAT_HOST names the first node
where its own name resolves nowhere.
"""

import contextlib
import hashlib
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque

BEAT_EVERY_S = float(os.environ.get("KIT_BEAT_EVERY_S", "5"))
SILENT_AFTER_S = 6 * BEAT_EVERY_S
DEPUTY_AFTER_S = 9 * BEAT_EVERY_S  # longer: the supervisor should be the first to notice
ALONE_AFTER_S = 36 * BEAT_EVERY_S
RECEIVE_BYTES = 4 << 20
"""Of the supervisor's socket, as far as the kernel allows: the default holds 277 datagrams, 4 s
of 384 nodes."""
MOST_RANKS, LINE_BYTES = (
    128,
    500,
)  # of a node, and of a rank's heartbeat: together they fit a datagram
TURN_S = 0.5
CREDENTIALS = struct.Struct("iII")  # process, user and group, as SO_PASSCRED has them (man 7 unix)
VARIABLE = "KIT_SUPERVISOR"


class Switchboard:
    """The supervisor's end: a thread notes who was heard when and answers, whatever file the
    supervisor waits for.

    Time is counted in turns of the thread, so a process that was frozen as a whole blames no node
    for its own gap.
    """

    def __init__(self, host: str) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        self.socket.bind(("", 0))
        self.socket.setblocking(False)
        self.token = secrets.token_hex(8)  # keeps out datagrams of other jobs and attempts
        self.address = f"{host}:{self.socket.getsockname()[1]}:{self.token}"
        self.clock = 0.0
        self.heard: dict[str, float] = {}
        self.ranks: dict[str, bytes] = {}
        """The newest heartbeats of each node's ranks, as lines of JSON."""
        self.reports = deque[dict]()
        self.senders: set[tuple] = set()
        self.ending = self.closed = False
        self.thread = threading.Thread(target=self._listen, name="beats", daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        began = time.monotonic()
        while not self.closed:
            select.select([self.socket], [], [], TURN_S)
            now = time.monotonic()
            self.clock += min(now - began, BEAT_EVERY_S)
            began = now
            self._receive()
        self.socket.close()

    def _receive(self) -> None:
        with contextlib.suppress(OSError):  # nothing more is there
            while True:
                data, sender = self.socket.recvfrom(1 << 16)
                head, _, ranks = data.partition(b"\n")
                try:
                    message = json.loads(head)
                    if message["token"] != self.token:
                        continue
                    node = str(message["node"])
                except (
                    ValueError,
                    KeyError,
                    TypeError,
                    RecursionError,
                ):  # of anyone who found the port
                    continue
                self.senders.add(sender)
                if ranks:
                    self.ranks[node] = ranks
                if not (event := message.get("event")):
                    self.heard[node] = self.clock
                elif event == "left":  # its leader has ended: it is not missed any more
                    self.heard.pop(node, None)
                else:
                    self.reports.append(message)
                    self.ending = self.ending or bool(message.get("code"))
                with contextlib.suppress(OSError):
                    self.socket.sendto(b"end" if self.ending else b"ok", sender)

    def taken(self) -> list[dict]:
        """Returns what was reported since the last call; beats are only noted."""
        return [self.reports.popleft() for _ in range(len(self.reports))]

    def end(self) -> None:
        """Orders the ranks of all nodes to end."""
        self.ending = True
        for sender in list(self.senders):
            with contextlib.suppress(OSError):
                self.socket.sendto(b"end", sender)

    def silent(self) -> list[str]:
        """Returns the nodes that were heard once and then not for SILENT_AFTER_S."""
        return sorted(
            node for node, heard in list(self.heard.items()) if self.clock - heard > SILENT_AFTER_S
        )

    def close(self) -> None:
        self.closed = True


class Line:
    """A keeper's end; the leader of a node speaks for it, the others only have something to
    report.
    """

    def __init__(self, *, is_leader: bool) -> None:
        self.host, port, self.token = os.environ[VARIABLE].rsplit(":", 2)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self.place = f"kit-{hashlib.sha256(self.token.encode()).hexdigest()[:16]}-{self.node}"
        """Where the ranks of the node tell their heartbeats; all users of the node can read it
        in /proc/net/unix."""
        for end in (self.socket, self.ear):
            end.setblocking(False)
        with contextlib.suppress(OSError):  # a name that does not resolve: no beats, no harm
            self.socket.connect((self.host, int(port)))
        if is_leader:
            self.ear.setsockopt(
                socket.SOL_SOCKET, socket.SO_PASSCRED, 1
            )  # the kernel says whose each datagram is
            with contextlib.suppress(
                OSError
            ):  # a name that is taken: no heartbeats of ranks, no harm
                self.ear.bind(f"\0{self.place}")
        self.ranks: dict[int, bytes] = {}
        self.answered: float | None = None
        self.order = "ok"

    def send(self, **report: object) -> None:
        """Sends a beat, or a report when there is one, with the heartbeats of ranks."""
        head = json.dumps({"token": self.token, "node": self.node, **report}).encode()
        with contextlib.suppress(OSError):
            self.socket.send(b"\n".join([head, *self.ranks.values()]))

    def receive(self) -> None:
        """Notes the supervisor's answers, and what the ranks tell."""
        with contextlib.suppress(OSError):
            while True:
                answer = self.socket.recv(64)
                self.answered = time.monotonic()
                if answer == b"end":
                    self.order = "end"
        with contextlib.suppress(OSError):
            while True:
                line, told, *_ = self.ear.recvmsg(LINE_BYTES, socket.CMSG_SPACE(CREDENTIALS.size))
                if [CREDENTIALS.unpack(data)[1] for _, _, data in told] != [
                    os.getuid()
                ]:  # another user's
                    continue
                with contextlib.suppress(
                    ValueError, TypeError, KeyError, OverflowError, RecursionError
                ):  # of anyone
                    rank = int(json.loads(line)["rank"])
                    if rank in self.ranks or len(self.ranks) < MOST_RANKS:
                        self.ranks[rank] = line

    def answered_before(self, moment: float) -> bool:
        """Whether the last answer is older than a moment of `time.monotonic`."""
        return self.answered is None or self.answered < moment

    @property
    def alone_s(self) -> float:
        """Seconds since the supervisor's last answer; 0 before the first."""
        return 0.0 if self.answered is None else time.monotonic() - self.answered

    def reaches_first_node(self) -> bool:
        """Whether the supervisor's node answers, though the supervisor may not: by accepting or
        refusing a connection.

        The port is that of the ranks' meeting point, which no firewall between the nodes of a job
        may close.
        """
        try:
            socket.create_connection(
                (self.host, int(os.environ.get("MASTER_PORT", "29500"))), timeout=5.0
            ).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return True
