"""Makes the pods of a job find each other before their agents start.

The agent of torch (torchrun), which starts the ranks of a pod, waits for missing pods for minutes.
Its error message then names neither the pods nor the address. Errors of this module name a missing
pod, or a host name that cannot be resolved. The first pod listens at the rendezvous port of the
ranks. Each other pod looks up the name of the first pod, connects and sends its index. When all
pods have connected, the first pod sends GO_ON to each of them. Standard library only.
"""

import contextlib
import socket
import time
from pathlib import Path

from cluster.heartbeats import StartWatch
from cluster.record import counted
from cluster.state import read_state, update_state

LIMIT_S = 900.0
"""Maximum number of seconds for which pods wait for each other. It is long because Kubernetes may
have to start nodes and load images first."""
EVERY_S = 1.0
"""Seconds between two attempts to connect, and between two records of the missing pods."""
GO_ON = b"go\n"
"""Message that the first pod sends to each other pod when all pods have connected."""


def wait_for_pods(
    run_dir: Path, attempt: int, place: tuple[str, int], num_pods: int, limit_s: float = LIMIT_S
) -> str | None:
    """Waits in the first pod until all other pods have connected. Returns an error message if
    `limit_s` seconds have passed, otherwise None. `place` is (host name, port) of the first pod.

    During the wait, the field `reason` in state.json names the missing pods.

    Raises:
        OSError: Another program uses the port in this pod.
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
            # OSError: no pod has connected yet. ValueError: a program has connected that is not a
            # pod of this job and sent no index.
            with contextlib.suppress(OSError, ValueError):
                connection = until_the_end.enter_context(listening.accept()[0])
                connection.settimeout(EVERY_S)
                others[int(connection.recv(16))] = connection
        for connection in others.values():
            with contextlib.suppress(OSError):
                connection.sendall(GO_ON)
                # The side that closes a connection first blocks its port for a minute. This wait
                # lets the other pod close first.
                connection.recv(1)
    _record(run_dir, attempt, f"{counted(num_pods, 'pod')} found each other; ranks start")
    return None


def join_first_pod(place: tuple[str, int], index: int, limit_s: float = LIMIT_S) -> str | None:
    """Waits in each pod except the first pod, until all pods have connected to the first pod.
    Returns an error message if `limit_s` seconds have passed, otherwise None. `place` is (host
    name, port) of the first pod.
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
    if len(indices) == 1:
        return f"pod {indices[0]}"
    words = ", ".join(map(str, indices[:8]))
    more = " ..." if len(indices) > 8 else ""
    return f"pods {words}{more}"


def _record(run_dir: Path, attempt: int, reason: str) -> None:
    with contextlib.suppress(OSError):
        state = read_state(run_dir)
        if state is not None and state.reason != reason:
            update_state(run_dir, attempt=attempt, reason=reason)
