"""Finds a free TCP port for the rendezvous of a job's ranks, and reserves it until rank 0 listens
at it.

Standard library only.
"""

import contextlib
import errno
import socket
import threading
from collections import deque
from collections.abc import Iterator

FIRST_PORT = 20000
NUM_PORTS = 10000
"""Number of ports, beginning with FIRST_PORT, from which the kit chooses a port for the rendezvous.
They are below the NodePorts of Kubernetes (30000 to 32767) and below the ports that Linux gives to
outgoing connections (from 32768)."""
TRIES = 100
"""Maximum number of consecutive ports that `reserve_port` tries."""
MAX_PORT = 65535
BACKLOG = 4096
"""Maximum number of connections that the kernel queues until they are accepted. It is large because
all nodes of a job connect at the same time."""
ANSWERED_AT_ONCE = 256
"""Number of answered connections that `answer_on_free_port` keeps open, so that the other side
closes them first. The side that closes first blocks its port for a minute (TIME_WAIT)."""
TAKEN_WORDS = ("eaddrinuse", "address already in use")
"""Words, in lower case, by which an error message says that a port is in use."""


def reserve_port(preferred: int = 0, address: str = "") -> socket.socket:
    """Returns a socket that is bound to a free port and does not listen.

    The search starts at `preferred` and tries the following ports. If `preferred` is 0, the kernel
    chooses a free port. An empty `address` means all networks of this machine.

    Until the socket is closed, the kernel gives the port to no other program, and another call of
    this function does not return it. A process that sets SO_REUSEADDR, as torch does, can listen on
    the port.

    Raises:
        OSError: None of the TRIES ports is free.
    """
    port = preferred
    last_port = min(preferred + TRIES - 1, MAX_PORT) if preferred else 0
    while True:
        try:
            return _bound(address, port)
        except OSError as error:
            # EACCES: the administrator has reserved the port for other programs. The next port is
            # tried.
            if error.errno not in (errno.EADDRINUSE, errno.EACCES) or port >= last_port:
                raise
        port += 1


def _bound(address: str, port: int) -> socket.socket:
    dual = not address and socket.has_dualstack_ipv6()
    reserved = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    try:
        if dual:
            reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # The socket is bound without SO_REUSEADDR, so that a port which another job has reserved
        # counts as taken.
        reserved.bind((address, port))
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        reserved.close()
        raise
    return reserved


@contextlib.contextmanager
def answer_on_free_port(preferred: int, line: str) -> Iterator[int]:
    """Yields a free port at or after `preferred`. During the block, every program that connects to
    the port receives `line`.

    Raises:
        OSError: None of the TRIES ports is free.
    """
    with reserve_port(preferred) as listening:
        listening.listen(BACKLOG)
        listening.settimeout(0.2)
        over = threading.Event()
        thread = threading.Thread(target=_answer, args=(listening, line, over), daemon=True)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            over.set()
            thread.join()


def _answer(listening: socket.socket, line: str, over: threading.Event) -> None:
    answered = deque[socket.socket](maxlen=ANSWERED_AT_ONCE)
    while not over.is_set():
        try:
            connection, _ = listening.accept()
        except OSError:  # Nobody has connected yet, or the connection was closed already.
            continue
        with contextlib.suppress(OSError):
            connection.sendall(f"{line}\n".encode())
        if len(answered) == ANSWERED_AT_ONCE:
            answered[0].close()
        answered.append(connection)
    for connection in answered:
        connection.close()


def mentions_port_in_use(text: str) -> bool:
    """Returns whether the last lines of a log say that a port was in use."""
    return any(word in text.lower() for word in TAKEN_WORDS)
