"""A simulated trainer without torch. Arguments: RUN_DIR STEPS SECONDS [LIMIT].

The trainer takes STEPS steps of SECONDS seconds, saves every 5 steps, and stops on a stop request.

With LIMIT, all ranks wait for each other over the network at each step, as in a collective. A rank
ends if this wait takes LIMIT seconds, as with the watchdog of a collective.
"""

import os
import socket
import sys
import time
from pathlib import Path

from cluster.files import write_atomic
from cluster.state import take_request, update_state


def meeting(rank: int, limit_s: float) -> list[socket.socket]:
    """Connects the ranks. Returns the sockets to all other ranks on rank 0, and the socket to rank
    0 on other ranks.
    """
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        with socket.create_server(("", where[1]), backlog=1024) as door:
            ends = [door.accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
    else:
        while True:
            try:
                ends = [socket.create_connection(where)]
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
    for end in ends:
        end.settimeout(limit_s)
    return ends


def wait_for_all(rank: int, ends: list[socket.socket]) -> None:
    """Returns when every rank has called this function. If the time limit is exceeded, this rank
    ends with an error.
    """
    try:
        for end in ends:
            if rank:
                end.sendall(b".")
            if not end.recv(1):
                raise ConnectionError("a rank has ended")
        for end in ends if rank == 0 else []:
            end.sendall(b".")
    except OSError as error:
        sys.exit(0 if stopped.exists() else f"Hung: {error}")


run_dir, num_steps, step_time_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
rank, attempt = int(os.environ["RANK"]), int(os.environ["KIT_ATTEMPT"])
saved, begun, stopped = (
    run_dir / "saved",
    run_dir / f"begun_{attempt}",
    run_dir / f"stopped_{attempt}",
)
if rank == 0:
    write_atomic(begun, saved.read_text() if saved.exists() else "0")
# The file `begun` contains the step at which all ranks start. `saved` may contain a later step,
# because rank 0 may save before this rank starts.
while not begun.exists():
    time.sleep(0.02)
step = int(begun.read_text())
print(f"attempt {attempt} rank {rank} from step {step}", flush=True)
others = meeting(rank, float(sys.argv[4])) if sys.argv[4:] else []
while step < num_steps and not stopped.exists():
    time.sleep(step_time_s)
    wait_for_all(rank, others)
    step += 1
    if rank == 0:
        beat = {"step": step, "heartbeat": time.time(), "step_time_s": step_time_s}
        update_state(run_dir, attempt=attempt, state="running", **beat)
        stop = take_request(run_dir, "stop")
        if stop or step % 5 == 0:
            # An atomic write, because the process may be killed at any moment.
            write_atomic(saved, str(step))
        if stop:
            update_state(
                run_dir, attempt=attempt, state="stopping", reason=f"stopped after step {step}"
            )
            stopped.touch()
