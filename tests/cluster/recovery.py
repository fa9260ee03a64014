"""Functions that switch off a node of a sandbox and return it to service."""

import contextlib
import os
import signal
import subprocess

from cluster.sandbox import Sandbox
from cluster.state import JobError


def power_off(sandbox: Sandbox, node: str) -> None:
    """Kills a node and all its processes at once. Its address does not answer any more."""
    sandbox.path("run", f"{node}.off").touch()
    number = sandbox.path("run", f"{node}.pid")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        os.kill(int(number.read_text()), signal.SIGKILL)
        number.unlink()
    subprocess.run(["ip", "link", "del", sandbox.cable(node)], capture_output=True)


def recover(sandbox: Sandbox, node: str) -> None:
    """Reconnects a node that was switched off or disconnected, and resumes it in Slurm."""
    sandbox.path("run", f"{node}.off").unlink(missing_ok=True)
    if sandbox.isolated:  # a node that is off gets its link when it starts
        plug = ["ip", "link", "set", sandbox.cable(node), "master", f"{sandbox.tag}br"]
        subprocess.run(plug, capture_output=True)
    update = ("scontrol", "update", f"NodeName={node}", "Reason=recovered")
    # State=down first: otherwise Slurm would wait long for the end of a job that is gone.
    sandbox.run(*update, "State=down")
    try:
        sandbox.run(*update, "State=resume")
    except JobError:  # the node may have returned to service by itself in between
        if sandbox.node_states()[node].startswith(("down", "drain", "drng")):
            raise
