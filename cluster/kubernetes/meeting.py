"""Pods of a job find each other before their agents start, so that a pod that is missing, or a name
that does not resolve, is named.

The first pod listens at the port at which the ranks will meet. The others look its name up, connect
and send their index. As soon as all have come, the first pod tells them to go on. An agent of torch
would wait as long, and name neither pod nor address. Standard library only.
"""

import contextlib
import socket
import time
from pathlib import Path

from cluster.outcome import StartWatch
from cluster.record import counted
from cluster.state import read_state, update_state

LIMIT_S = 900.0
"""Seconds for which pods wait for each other: Kubernetes may have to start nodes and to load
images."""
EVERY_S = 1.0
GO_ON = b"go\n"


def host(
    run_dir: Path, attempt: int, place: tuple[str, int], num_pods: int, limit_s: float = LIMIT_S
) -> str | None:
    """Waits in the first pod until all others have come. Returns why they have not, or None.

    Meanwhile state.json says which pods are missing.

    Raises:
        OSError: another program uses the port in this pod.
    """
    start = StartWatch(run_dir, attempt)
    deadline = time.monotonic() + limit_s
    others = dict[int, socket.socket]()
    with contextlib.ExitStack() as until_the_end, _listening(place[1]) as listening:
        listening.settimeout(EVERY_S)
        while missing := [index for index in range(1, num_pods) if index not in others]:
            waits_for = f"waiting for {_pods(missing)} of {num_pods} at {place[0]}:{place[1]}"
            if time.monotonic() > deadline:
                return (
                    f"{_pods(missing)} of {num_pods} did not reach the first pod at"
                    f" {place[0]}:{place[1]} within {limit_s:g} s. Their logs say why:"
                    " `kubectl logs POD`; `kubectl get pods` shows those that never started"
                )
            _record(run_dir, attempt, waits_for)
            start.beat()
            with contextlib.suppress(OSError, ValueError):  # nobody came, or no pod of this job
                connection = until_the_end.enter_context(listening.accept()[0])
                connection.settimeout(EVERY_S)
                others[int(connection.recv(16))] = connection
        for connection in others.values():
            with contextlib.suppress(OSError):
                connection.sendall(GO_ON)
                connection.recv(1)  # until the other side has closed, which keeps the port free
    _record(run_dir, attempt, f"{counted(num_pods, 'pod')} found each other; ranks start")
    return None


def join(place: tuple[str, int], index: int, limit_s: float = LIMIT_S) -> str | None:
    """Waits in another pod until all have come to the first one. Returns why they have not, or
    None.
    """
    deadline = time.monotonic() + limit_s
    who = f"pod {index} on {socket.gethostname()}"
    why = ""
    while (remaining_s := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(place, timeout=min(10.0, remaining_s)) as connection:
                connection.sendall(f"{index}\n".encode())
                connection.settimeout(remaining_s)
                if connection.recv(len(GO_ON)) == GO_ON:
                    return None
                why = "the first pod has ended the connection"
        except socket.gaierror as error:
            why = f"the name cannot be looked up: {error}"
        except OSError as error:
            why = str(error)
        time.sleep(min(EVERY_S, max(0.0, deadline - time.monotonic())))
    return (
        f"{who} could not meet the other pods at {place[0]}:{place[1]} within {limit_s:g} s"
        f" ({why}). Check the headless Service, the cluster's DNS and its network policies"
    )


def _listening(port: int) -> socket.socket:
    """Returns a socket that listens at a port, for IPv4 and, if this machine has it, for IPv6."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _pods(indices: list[int]) -> str:
    words = ", ".join(map(str, indices[:8])) + (" ..." if len(indices) > 8 else "")
    return f"pod {words}" if len(indices) == 1 else f"pods {words}"


def _record(run_dir: Path, attempt: int, reason: str) -> None:
    with contextlib.suppress(OSError):
        state = read_state(run_dir)
        if state is not None and state.reason != reason:
            update_state(run_dir, attempt=attempt, reason=reason)
