"""One virtual switch and one network namespace per node. Needs root; Linux, iproute2."""

import os
import subprocess

from cluster.sandbox.layout import Layout
from cluster.state import JobError


def is_possible() -> bool:
    """Whether this process may make nodes with a network, processes and mounts of their own."""
    probe = "unshare --uts --net --mount --pid --fork --mount-proc ip link set lo up".split()
    return os.geteuid() == 0 and subprocess.run(probe, capture_output=True).returncode == 0


def up(layout: Layout) -> None:
    """Makes the switch, with this machine as login node; nodes plug themselves in.

    Nothing leads outside.
    """
    if not layout.isolated:
        return
    down(layout)
    ip(f"link add {layout.bridge} type bridge")
    ip(f"addr add {layout.values()['network']}.1/24 dev {layout.bridge}")
    ip(f"link set {layout.bridge} up")


def down(layout: Layout) -> None:
    """Removes all of it; what is not there is not missed."""
    if not layout.isolated:
        return
    for node in layout.nodes:
        ip(f"link del {layout.cable(node)}", check=False)
        ip(f"netns del {layout.namespace(node)}", check=False)
    ip(f"link del {layout.bridge}", check=False)


def ip(command: str, check: bool = True) -> None:
    """Runs iproute2's ip; raises JobError with its words when it fails and that matters."""
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
    if check and done.returncode:
        advice = "Remove left-overs with: python -m cluster.sandbox stop"
        raise JobError(f"ip {command}: {done.stderr.strip()}. {advice}")
