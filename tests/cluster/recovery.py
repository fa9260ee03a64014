"""Taking a node of a sandbox away and bringing it back, as an administrator would."""

import contextlib
import os
import signal
import subprocess

from cluster.sandbox import Sandbox
from cluster.state import JobError


def power_off(sandbox: Sandbox, node: str) -> None:
    """Ends a node and all its processes at once; nothing answers at its address any more."""
    sandbox.path("run", f"{node}.off").touch()
    number = sandbox.path("run", f"{node}.pid")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        os.kill(int(number.read_text()), signal.SIGKILL)
        number.unlink()
    subprocess.run(["ip", "link", "del", sandbox.cable(node)], capture_output=True)


def recover(sandbox: Sandbox, node: str) -> None:
    """Brings back a node that was switched off or cut off, and has Slurm use it."""
    sandbox.path("run", f"{node}.off").unlink(missing_ok=True)
    if sandbox.isolated:  # one that is off is plugged in when it starts
        plug = ["ip", "link", "set", sandbox.cable(node), "master", f"{sandbox.tag}br"]
        subprocess.run(plug, capture_output=True)
    update = ("scontrol", "update", f"NodeName={node}", "Reason=recovered")
    # first: Slurm would wait long for a job to end that is no longer there.
    sandbox.run(*update, "State=down")
    try:
        sandbox.run(*update, "State=resume")
    except JobError:  # Slurm's word for a node that has come back by itself in between
        if sandbox.node_states()[node].startswith(("down", "drain", "drng")):
            raise
