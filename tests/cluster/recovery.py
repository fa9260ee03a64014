"""Functions that switch off a simulated Slurm node, and that return a node to service."""

import contextlib
import os
import signal
import subprocess

from cluster.sandbox import Sandbox
from cluster.state import JobError


def power_off(sandbox: Sandbox, node: str) -> None:
    """Kills all processes of a node at once and removes its network link, so that its address does
    not answer any more.
    """
    sandbox.path("run", f"{node}.off").touch()
    number = sandbox.path("run", f"{node}.pid")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        os.kill(int(number.read_text()), signal.SIGKILL)
        number.unlink()
    subprocess.run(["ip", "link", "del", sandbox.cable(node)], capture_output=True)


def recover(sandbox: Sandbox, node: str) -> None:
    """Reconnects a node that was switched off or disconnected, and puts it back into service in
    Slurm.
    """
    sandbox.path("run", f"{node}.off").unlink(missing_ok=True)
    if sandbox.isolated:  # A node that is switched off gets its network link when it starts.
        plug = ["ip", "link", "set", sandbox.cable(node), "master", f"{sandbox.tag}br"]
        subprocess.run(plug, capture_output=True)
    update = ("scontrol", "update", f"NodeName={node}", "Reason=recovered")
    # State=down comes first. Otherwise Slurm would wait long for the end of a job that no longer
    # exists.
    sandbox.run(*update, "State=down")
    try:
        sandbox.run(*update, "State=resume")
    except JobError:  # The node may have returned to service by itself in the meantime.
        if sandbox.node_states()[node].startswith(("down", "drain", "drng")):
            raise
