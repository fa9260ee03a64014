"""Bringing back a node of a sandbox, as an administrator would."""

from cluster.sandbox import Sandbox
from cluster.state import JobError


def recover(sandbox: Sandbox, node: str) -> None:
    """Brings back a node that was switched off or cut off, and has Slurm use it."""
    sandbox.power_on(node)
    if sandbox.layout.isolated:
        sandbox.heal(node)
    update = ("scontrol", "update", f"NodeName={node}", "Reason=recovered")
    # first: Slurm would wait long for a job to end that is no longer there.
    sandbox.run(*update, "State=down")
    try:
        sandbox.run(*update, "State=resume")
    except JobError:  # Slurm's word for a node that has come back by itself in between
        if sandbox.node_states()[node].startswith(("down", "drain", "drng")):
            raise
